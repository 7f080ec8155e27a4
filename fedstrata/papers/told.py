"""What is said of a part as a whole, alike in documents and on pages: what was run of it, what not, and by what."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from fedstrata.papers.costs import Cost, cells_named
from fedstrata.papers.deriving import friedman_of
from fedstrata.papers.gathering import Gathered, all_kept
from fedstrata.papers.judging import NOT_RUN, Judged, JudgedCell, JudgedClaim
from fedstrata.papers.keeping import asked
from fedstrata.papers.reading import SECONDS, Recipe
from fedstrata.papers.words import order_line, p_words, stated_claim
from fedstrata.report.formats import ABSENT, plural

COUNTED = """\
Counted are the published numbers of all tables that runs can be held against: those of several tables that are made of
the same runs once, of the readings of a row the first; seconds are left out. Undecided are those that do not differ,
but by runs that are too few, or differ too much, to say that they agree. What each was made with stands below its
table."""
PAPER_HEADS = ("paper", "numbers", "run", "agree", "undecided", "above", "below", "runs", "computing", "on")


def papers_in_numbers(gathered: Mapping[str, Sequence[Gathered]]) -> list[tuple[str, ...]]:
    """What there is of each paper and of all, as :data:`PAPER_HEADS` has it; nothing where nothing was run."""
    if not any(all_kept(part) for parts in gathered.values() for part in parts):
        return []
    lines = [_counts_of(name, parts) for name, parts in gathered.items()]
    return [*lines, _counts_of("all", [part for parts in gathered.values() for part in parts])]


def _counts_of(name: str, parts: Sequence[Gathered]) -> tuple[str, ...]:
    """Count the published numbers of a paper's tables and what came out, and add up what it cost."""
    tables = [
        part
        for part in parts
        if part.recipe.kind == "table" and part.recipe.runs and not part.recipe.number.endswith(SECONDS)
    ]
    first_ones = {what: word for part in reversed(tables) for what, word in _verdicts(part).items()}
    found = Counter(first_ones.values())
    cost = Cost.of(one for part in parts for one in all_kept(part))
    verdicts = [f"{found[word]:,}" for word in ("agrees", "undecided", "above", "below")]
    run = found.total() - found[NOT_RUN]
    return (
        name,
        f"{found.total():,}",
        f"{run:,}",
        *verdicts,
        f"{cost.runs:,}",
        cost.time,
        ", ".join(cost.devices) or ABSENT,
    )


def _verdicts(part: Gathered) -> dict[tuple[str, ...], str]:
    """The verdicts on the published numbers of a table, by what they are found of: the runs, and which number."""
    recipe = part.recipe
    found_of = {  # with the first seed
        (cell.row, cell.column): (*asked(cell), cell.recipe.over_clients) for cell in reversed(part.cells)
    }
    return {
        found_of.get((one.row, one.column), (recipe.paper, recipe.part, one.row, one.column)): one.verdict
        for one in part.judged.cells
        if one.published.mean is not None and recipe.has_run(one.row, one.column) and recipe.read_as(one.row) == one.row
    }


def has_results(part: Gathered) -> bool:
    """Tell whether anything of a part was run, with whatever settings."""
    return bool(part.others) or bool(cells_run(part.judged))


def is_told(part: Gathered) -> bool:
    """Tell whether a part has a section of its own: tables that were run, and figures that claims are made of."""
    return has_results(part) and (part.recipe.kind == "table" or bool(part.recipe.claims))


def cells_run(judged: Judged) -> list[JudgedCell]:
    """The cells that have a number of ours."""
    return [one for one in judged.cells if one.ours is not None]


def how_many(part: Gathered) -> str:
    """Say how many cells were run."""
    return f"{len(cells_run(part.judged))} of {plural(len(part.judged.cells), 'cell')}"


def outcome_lines(judged: Judged) -> list[str]:
    """Say in a sentence or two what a part comes to: how many numbers agree, and how many of its claims show.

    Nothing of figures of which the paper has neither.
    """
    run = cells_run(judged)
    if not judged.recipe.published and not judged.claims:
        return []
    if not run:
        return [f"None of its {plural(len(judged.cells), 'cell')} has a number of ours yet."]
    of_all = f"{len(run)} of {plural(len(judged.cells), 'cell')}"
    lines = [f"{of_all} have a number of ours{_readings(judged)}: {_tally(run)}."]
    papers = [claim for claim in judged.claims if not claim.reading and not claim.own_setting]
    readings = [claim for claim in judged.claims if claim.reading]
    for claims, whose in ((papers, "of the paper's"), (readings, "of other readings")):
        tested = Counter(claim.word for claim in claims if claim.found is not None)
        if tested:
            told = ", ".join(f"{count} {word}" for word, count in tested.items())
            lines.append(f"Of {plural(len(claims), 'claim')} {whose}, {told}.")
    return lines


def _readings(judged: Judged) -> str:
    """How many of the cells that were run are further readings of rows, in words."""
    further = sum(judged.recipe.read_as(one.row) != one.row for one in cells_run(judged))
    return f", {plural(further, 'further reading')} of rows among them" if further else ""


def _tally(cells: Iterable[JudgedCell]) -> str:
    """Count the verdicts of cells, in words."""
    found = Counter(one.verdict for one in cells)
    return ", ".join(f"{count} {'agree' if word == 'agrees' and count > 1 else word}" for word, count in found.items())


def run_line(part: Gathered) -> str:
    """Say what was run with the paper's settings, and how often which verdict came out."""
    recipe, run = part.recipe, cells_run(part.judged)
    seeds = [one.ours.count for one in run if one.ours is not None and one.ours.count]
    of_seeds = f", {counted(seeds)} each" if seeds else ""
    own = [one for one in run if recipe.read_as(one.row) == one.row]
    readings = _readings(part.judged)
    if recipe.is_derived:
        return f"Computed of the runs of {' and '.join(recipe.sources)}: {how_many(part)}; {_tally(run)}."
    papers = not recipe.published or any(one.published.mean is not None for one in own)
    whose = "the paper's settings" if papers else "settings of ours, which the paper does not have"
    return f"Run with {whose}{_precision(part)}: {how_many(part)}{readings}{of_seeds}; {_tally(run)}."


def _precision(part: Gathered) -> str:
    """Name the precision of products; tf32 is one of NVIDIA's GPUs, and elsewhere the same settings mean fp32."""
    devices = {one.settings: one.device for one in part.kept}
    ran = [(cell.experiment.precision, devices[cell.settings]) for cell in part.cells if cell.settings in devices]
    found = sorted({precision for precision, device in ran if precision != "tf32" or "NVIDIA" in device})
    return f", in {' and '.join(found)}" if found and found != ["fp32"] else ""


def counted(counts: Iterable[int], noun: str = "seed") -> str:
    """Say a number, or from which to which.

    >>> counted([3, 5, 3]), counted([1]), counted([200], noun="")
    ('3 to 5 seeds', '1 seed', '200')
    """
    found = sorted(set(counts))
    words = str(found[0]) if len(found) == 1 else f"{found[0]} to {found[-1]}"
    return f"{words} {noun}{'' if found[-1] == 1 else 's'}" if noun else words


def missing_line(judged: Judged) -> str:
    """Name what was not run, column by column; nothing where all was."""
    rows: defaultdict[str, list[str]] = defaultdict(list)
    run = {one.column for one in cells_run(judged)}
    for one in judged.cells:
        if one.ours is None:
            rows[one.column].append(one.row)
    if not rows:
        return ""
    whole = [column for column in rows if column not in run]
    told = [f"the columns {', '.join(whole)}" if len(whole) > 1 else f"the column {whole[0]}"] if whole else []
    told += [f"in {column} {', '.join(names)}" for column, names in rows.items() if column in run]
    return f"Not run: {'; '.join(told)}."


def claims_missing_line(claims: Sequence[JudgedClaim]) -> str:
    """Name the claims that were not run; nothing where all were."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for claim in claims:
        if claim.found is None:
            places[stated_claim(claim)].append(", ".join(filter(None, claim.columns)))
    if not places:
        return ""
    return (
        "Claims that were not run: " + "; ".join(f"{one} ({', '.join(where)})" for one, where in places.items()) + "."
    )


def note_lines(cells: Sequence[JudgedCell]) -> list[str]:
    """What is to be said of cells, each note once, with the cells that it is of."""
    having: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for one in cells:
        for note in one.notes:
            having[note].append((one.row, one.column))
    everything = [(one.row, one.column) for one in cells]
    return [f"{cells_named(where, everything)}: {note}" for note, where in having.items()]


def order_lines(judged: Judged) -> list[str]:
    """How alike the orders of rows are, and whether rows differ at all."""
    lines = [f"{order_line(*pair)}." for pair in judged.orders.items()]
    tested = friedman_of(judged)
    if tested is not None:
        lines.append(
            f"Friedman test of the {tested.methods} rows over {tested.datasets} columns: {p_words(tested.p_value)}."
        )
    return lines


def repeated_lines(part: Gathered) -> list[str]:
    """What was measured more than once, with other outcomes."""
    lines = []
    for ones in part.repeated:
        last = ones[-1]
        values = ", ".join(f"{one.value:.6g} ({one.device}, {one.commit})" for one in ones)
        where = f"{last.row}, {last.column}, seed {last.seed}"
        lines.append(f"{where} was measured more than once, and the last counts: {values}.")
    return lines


def command_of(part: Gathered) -> list[str]:
    """The words of the command that repeats what was run; where rows and columns are not all, it names them."""
    recipe = part.recipe
    words = ["fedstrata", "paper", recipe.paper, recipe.part]
    if not recipe.sources:
        made = [one for one in cells_run(part.judged) if recipe.has_run(one.row, one.column)]
        for option, names, all_of_them in (
            ("--method", dict.fromkeys(one.row for one in made), list(recipe.rows)),
            ("--columns", dict.fromkeys(one.column for one in made), _columns_with_runs(recipe)),
        ):
            if len(names) < len(all_of_them):
                words += [option, shlex.quote(", ".join(names))]
    return [*words, "--seeds", str(part.seeds), *_recipes(recipe)]


def _recipes(recipe: Recipe) -> list[str]:
    """Where somebody's own recipes lie, in the words of a command."""
    return [] if recipe.place is None else ["--recipes", shlex.quote(str(recipe.place))]


def _columns_with_runs(recipe: Recipe) -> list[str]:
    return [column for column in recipe.columns if any(recipe.has_run(row, column) for row in recipe.rows)]


def anchor_of(recipe: Recipe) -> str:
    """The anchor of a part in a document."""
    return recipe.name.replace(" ", "-").lower()
