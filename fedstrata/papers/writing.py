"""A document that says, table by table, what of the papers was reproduced, from the CSVs that were kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedstrata import files
from fedstrata.papers.cells import cells_of
from fedstrata.papers.deriving import with_derived
from fedstrata.papers.judging import NOT_RUN, Judged, judge
from fedstrata.papers.keeping import Kept, asked, read_results
from fedstrata.papers.reading import Paper, Recipe
from fedstrata.papers.words import CELL_HEADS, cell_line, claim_line, digits_of, order_line
from fedstrata.report.formats import data_size, duration, plural


def write_reproduction(path: Path, papers: Mapping[str, Paper], results: Sequence[Path]) -> None:
    """Write the document."""
    kept = read_results(results)
    files.make_folder(path.resolve().parent)
    files.write_atomically(path, reproduction(papers, kept))


def reproduction(papers: Mapping[str, Paper], kept: Sequence[Kept]) -> str:
    """Say of every table and figure what was run, what came out against the paper, and at what cost."""
    pieces = [
        "# Reproduction\n\n"
        "Written by `fedstrata paper --write` from the results that are kept, and from nothing else. `agrees`, `above` "
        "and `below` compare a published number with ours, `shown`, `not shown` and `undecided` say whether who beats "
        "whom in the paper does so here. What was not run is said to be so.\n"
    ]
    for paper in papers.values():
        pieces.append(f"## {paper.title}\n\n{paper.citation} <{paper.link}>\n")
        parts = [(part, _judged(part, kept)) for part in paper.parts.values()]
        pieces += [_part(part, judged, own) for part, (judged, own) in parts if own]
        pieces += [text for part, _ in parts if (text := _smaller(part, kept))]
        without = [part for part, (_, own) in parts if not own]
        if without:
            pieces.append("Not run: " + "; ".join(_not_run(part) for part in without) + ".\n")
    return "\n".join(pieces)


def _judged(recipe: Recipe, kept: Sequence[Kept]) -> tuple[Judged, list[Kept]]:
    """Judge what was run with the paper's settings; seeds are as many as were run."""
    named = [one for one in kept if (one.paper, one.part) == (recipe.paper, recipe.part)]
    seeds = max((one.seed for one in named), default=0) + 1
    cells = cells_of(recipe, max(seeds, recipe.seeds))
    wanted = {asked(cell) for cell in cells}
    known = {one.what: one for one in kept if one.what in wanted}
    own = [known[asked(cell)].of(cell) for cell in cells if asked(cell) in known]
    return with_derived(judge(recipe, cells, own)), own


def _part(recipe: Recipe, judged: Judged, own: Sequence[Kept]) -> str:
    words = Counter(one.verdict for one in judged.cells)
    found = ", ".join(f"{count} {word}" for word, count in words.items())
    runs = {one.settings: one for one in own}
    cost = (
        f"{plural(len(runs), 'run')}, {duration(sum(one.seconds for one in runs.values()))} of computing on "
        f"{', '.join(sorted({one.device for one in own}))}, {data_size(sum(one.bytes for one in runs.values()))} sent"
    )
    lines = [
        f"### {recipe.part}: {recipe.title}\n",
        f"{found} of {plural(len(judged.cells), 'cell')}. {cost}.\n",
        f"| {' | '.join(CELL_HEADS)} |",
        "|---|---|--:|--:|--:|--:|---|",
        *(f"| {' | '.join(cell_line(one, digits_of(judged)))} |" for one in judged.cells if one.verdict != NOT_RUN),
        "",
        *(f"- {claim_line(claim)}" for claim in judged.claims),
        *(f"- {order_line(*pair)}" for pair in judged.orders.items()),
        *(f"- {one.row}, {one.column}: {one.published.note}" for one in judged.cells if one.published.note),
    ]
    return "\n".join([*lines, f"- {recipe.note}\n" if recipe.note else ""])


def _smaller(recipe: Recipe, kept: Sequence[Kept]) -> str:
    """Tell of runs with other settings than the paper's, which say nothing of its numbers."""
    wanted = {cell.settings for cell in cells_of(recipe, 1 + max((one.seed for one in kept), default=0))}
    other = [one for one in kept if (one.paper, one.part) == (recipe.paper, recipe.part) and one.settings not in wanted]
    if not other:
        return ""
    rounds = sorted({one.rounds for one in other})
    told = f"{plural(len(other), 'number')} of runs with other settings ({', '.join(map(str, rounds))} rounds)"
    return f"{recipe.part}: {told} are kept, and are not comparable with the paper's.\n"


def _not_run(recipe: Recipe) -> str:
    return f"{recipe.part} ({recipe.title})"
