"""A document that says, claim by claim and table by table, what of the papers was reproduced, from the kept CSVs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from fedstrata import files
from fedstrata.papers.costs import cost_line
from fedstrata.papers.gathering import Gathered, OtherSettings, claims_of, gather, papers_told
from fedstrata.papers.judging import NOT_RUN, Judged, JudgedCell, JudgedClaim
from fedstrata.papers.keeping import Kept, read_results
from fedstrata.papers.markdown import commands, items, paragraph, table
from fedstrata.papers.reading import Paper
from fedstrata.papers.told import (
    COUNTED,
    PAPER_HEADS,
    anchor_of,
    cells_run,
    claims_missing_line,
    command_of,
    counted,
    has_results,
    how_many,
    is_told,
    missing_line,
    note_lines,
    order_lines,
    papers_in_numbers,
    repeated_lines,
    run_line,
)
from fedstrata.papers.words import (
    CLAIM_HEADS,
    LONG_CELL_HEADS,
    WITHIN,
    cell_line,
    claim_cells,
    digits_of,
    found_words,
    long_cell_line,
    ours_line,
    published_words,
    reported_line,
    stated_claim,
    statistics_line,
    tested_words,
    where_words,
)
from fedstrata.report.formats import ABSENT, plural

INTRODUCTION = """\
This page is written by `fedstrata paper --write {}` from the results that are kept there, one line for each run, and
from nothing else. What was not run is said to be so, and a claim that does not show is said as plainly as one that
does."""
WORDS = (
    "**A claim** (who beats whom) is *shown* where the 95 % interval of the difference, over seeds that both methods "
    "have, lies above 0; *not shown* where it lies below 0, or below half of the published difference; *undecided* "
    "where it does neither, and always with one seed. The difference is the mean over seeds, also where a table has "
    "medians, and by how much the one is better: of losses, seconds and bytes, by how much it has less.",
    "**A number** *agrees* where it differs from the published one by no more than two groups of such runs do in 95 % "
    "of cases, or by no more than a point of a percentage (a hundredth of another number), so *within* what the table "
    "says; else it is *above* or *below*. Where that reach is longer than five points (five hundredths), runs differ "
    "too much or are too few, and it is *undecided*. Mean ranks agree within less than a place. *Diverged* is what has "
    "a run whose training did.",
    "**Published differences** have half of the 95 % interval that the paper's own deviations and numbers of runs "
    "give, taken as independent runs; *single* ones are differences of single numbers, which come without any.",
    "**A setting of ours** is one that the paper does not have: who beats whom in it is told, and is not the paper's "
    "claim.",
    "**Not comparable** are runs with other settings than the paper's, such as fewer rounds, which have tables of "
    "their own and decide no claim, and seconds on another device.",
)
COMMANDS = 4
_CELLS = ("column", "row", *LONG_CELL_HEADS[2:])


def write_reproduction(path: Path, papers: Mapping[str, Paper], results: Sequence[Path]) -> None:
    """Write the document."""
    kept = read_results(results)
    files.make_folder(path.resolve().parent)
    files.write_atomically(path, reproduction(papers, kept, shlex.join(map(str, (path, *results)))))


def reproduction(papers: Mapping[str, Paper], kept: Sequence[Kept], named: str = "FILE RESULTS") -> str:
    """Say of every claim, table and figure what was run, what came out against the paper, and at what cost.

    Papers of which nothing is kept are left out, unless that is so of all.
    """
    papers = papers_told(papers, kept)
    gathered = {paper.name: gather(paper, kept) for paper in papers.values()}
    pieces = ["# Reproduction\n", paragraph(INTRODUCTION.format(named)), _whole(gathered)]
    pieces += ["## The main claims\n", _main_claims(gathered), "How to read it:\n", items(WORDS)]
    seen: set[str] = set()
    for paper in papers.values():
        pieces += _paper(paper, gathered[paper.name], seen)
    return "\n".join(piece for piece in pieces if piece)


def _main_claims(gathered: Mapping[str, Sequence[Gathered]]) -> str:
    lines = []
    for part, place in claims_of(gathered):
        claim = part.judged.claims[place]
        word = f"**{claim.word}**" if claim.word != NOT_RUN else _elsewhere(part, claim)
        lines.append(
            (f"[{part.recipe.name}](#{anchor_of(part.recipe)})" if is_told(part) else part.recipe.name,
             *claim_cells(claim), word)
        )  # fmt: skip
    return table(("part", *CLAIM_HEADS, "so it is"), lines, CLAIM_HEADS[2:])


def _elsewhere(part: Gathered, claim: JudgedClaim) -> str:
    """Say of a claim that was not run where it was tried with other settings."""
    stated = claim.stated
    tried = [
        other for other in part.others for one in other.judged.claims if one.stated == stated and one.found is not None
    ]
    return f"{NOT_RUN}; with other settings: [below](#{anchor_of(part.recipe)})" if tried else NOT_RUN


def _whole(gathered: Mapping[str, Sequence[Gathered]]) -> str:
    lines = papers_in_numbers(gathered)
    if not lines:
        return paragraph("Nothing was run.")
    return table(PAPER_HEADS, lines, PAPER_HEADS[1:-1]) + "\n" + paragraph(COUNTED)


def _paper(paper: Paper, parts: Sequence[Gathered], seen: set[str]) -> list[str]:
    link = f" <{paper.link}>" if paper.link else ""
    pieces = [f"## {paper.title}\n", paragraph(f"{paper.citation}.{link}".replace("..", "."))]
    pieces += [paragraph(f"Settings: {paper.note}")] if paper.note else []
    for part in parts:
        if is_told(part):
            pieces += _part(part, seen)
    figures = [part for part in parts if has_results(part) and not is_told(part)]
    if figures:
        told = ", ".join(f"{part.recipe.part} ({how_many(part)})" for part in figures)
        redrawn = f"`fedstrata paper {paper.name} FIGURE --known results --finished`"
        pieces.append(paragraph(f"Runs behind figures: {told}. {redrawn} redraws those of which tables are kept."))
    without = [part.recipe for part in parts if not has_results(part) and part.recipe.runs]
    if without:
        pieces.append(paragraph("Not run: " + "; ".join(f"{one.part} ({one.title})" for one in without) + "."))
    return pieces


def _part(part: Gathered, seen: set[str]) -> list[str]:
    recipe, judged = part.recipe, part.judged
    published = f" Published: {statistics_line(recipe)}." if recipe.published and not recipe.is_derived else ""
    pieces = [f"### {recipe.name}\n", paragraph(f"**{recipe.title}.**{published}")]
    if recipe.note:
        pieces.append(paragraph(f"Settings: {recipe.note}"))
    run = cells_run(judged)
    if run:
        pieces += [
            paragraph(f"{run_line(part)} {_reported(judged)}"),
            _cells(run, judged),
            _claims(judged.claims, any(claim.found is not None for claim in judged.claims)),
            items([*order_lines(judged), *note_lines(run), *repeated_lines(part)]),
            paragraph(missing) if (missing := missing_line(judged)) else "",
            paragraph(f"Cost: {cost_line(part.kept, seen)}"),
            commands([command_of(part)]),
        ]
        seen |= {one.settings for one in part.kept}
    elif judged.cells:
        pieces.append(paragraph("Nothing of it was run with the paper's settings."))
    for other in part.others:
        pieces += _other(part, other, seen)
    return pieces


def _reported(judged: Judged) -> str:
    recipe = judged.recipe
    return "" if recipe.is_derived else f"Reported is {reported_line(judged, '`{}`')}. {ours_line(recipe)}".rstrip()


def _cells(run: Sequence[JudgedCell], judged: Judged) -> str:
    columns = list(judged.recipe.columns)
    order = sorted(run, key=lambda one: columns.index(one.column))
    lines = []
    for one in order:
        row, column, *rest = long_cell_line(one, digits_of(judged))
        lines.append((column, row, *rest))
    return table(_CELLS, lines, ("published", "ours", "seeds", "difference", WITHIN))


def _claims(claims: Sequence[JudgedClaim], any_run: bool) -> str:
    if not any_run:
        return ""
    lines = [(*claim_cells(claim), tested_words(claim), claim.word) for claim in claims if claim.found is not None]
    rest = claims_missing_line(claims)
    made = table((*CLAIM_HEADS, "test", "so it is"), lines, CLAIM_HEADS[2:])
    return "\n".join(filter(None, (made, paragraph(rest) if rest else "")))


def _other(part: Gathered, other: OtherSettings, seen: set[str]) -> list[str]:
    """A table of runs with other settings, plainly headed; who beats whom in it is no verdict on the paper."""
    judged = other.judged
    full = {cell.experiment.rounds for cell in part.cells if any(
        (cell.row, cell.column) == (one.row, one.column) for one in judged.cells)}  # fmt: skip
    rounds = f"At {other.rounds} of {counted(full, '')} rounds" if full != {other.rounds} else "With other settings"
    changed = f"Changed: `{other.changes}`." if other.changes else "Its settings are not those of the recipe."
    lines = [
        (one.column, one.row, number_published(one, judged), cell_line(one, digits_of(judged))[3],
         ABSENT if one.ours is None else str(one.ours.count))
        for one in judged.cells
    ]  # fmt: skip
    told = [
        f"{stated_claim(claim)}{_where(claim)} in these runs: {found_words(claim)} over {_plural_seeds(claim)} "
        f"({tested_words(claim)}), so {_word_in_them(claim)}; published {published_words(claim)}."
        for claim in judged.claims
        if claim.found is not None
    ]
    pieces = [
        f"#### {rounds}: not comparable with the published numbers\n",
        paragraph(f"Who beats whom in these runs is told, but decides no claim. {changed} {_reported(judged)}"),
        table(("column", "row", "published", "ours", "seeds"), lines, ("published", "ours", "seeds")),
        items(told),
        paragraph(f"Cost: {cost_line(other.kept, seen)}"),
        _first_commands(sorted({one.command for one in other.kept})),
    ]
    seen |= {one.settings for one in other.kept}
    return pieces


def number_published(one: JudgedCell, judged: Judged) -> str:
    """The published number of a cell, as in other tables."""
    return cell_line(one, digits_of(judged))[2]


def _where(claim: JudgedClaim) -> str:
    where = where_words(claim)
    return f" ({where})" if where else ""


def _plural_seeds(claim: JudgedClaim) -> str:
    return plural(0 if claim.found is None else claim.found.seeds, "seed")


def _word_in_them(claim: JudgedClaim) -> str:
    return "undecided" if claim.found is None else claim.found.word


def _first_commands(texts: Sequence[str]) -> str:
    """The commands as they were given; of many, the first."""
    more = len(texts) - COMMANDS
    block = commands(map(shlex.quote, shlex.split(one)) for one in texts[:COMMANDS])
    return block if more <= 0 else paragraph(f"The first {COMMANDS} of {len(texts)} commands:") + "\n" + block
