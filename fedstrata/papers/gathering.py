"""What kept results hold of every part: what was run with the paper's settings, and what with others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedstrata.errors import FedStrataError
from fedstrata.papers.cells import Cell, cells_behind
from fedstrata.papers.deriving import judge_part
from fedstrata.papers.judging import Judged, judge_pairs
from fedstrata.papers.keeping import Kept, asked
from fedstrata.papers.reading import Paper, Recipe
from fedstrata.report.formats import listed


@dataclass(frozen=True)
class OtherSettings:
    """Runs of a part that differ from the paper's in the same settings, such as fewer rounds."""

    changes: str
    rounds: int
    judged: Judged
    kept: tuple[Kept, ...]


@dataclass(frozen=True)
class Gathered:
    """All that is known of a part: its verdicts, the numbers behind them, and runs with other settings."""

    recipe: Recipe
    cells: tuple[Cell, ...]
    judged: Judged
    kept: tuple[Kept, ...]
    others: tuple[OtherSettings, ...]
    repeated: tuple[tuple[Kept, ...], ...]
    """Numbers that were measured more than once with other outcomes; the last of each counts."""

    @property
    def seeds(self) -> int:
        """How many seeds one asks for to have all that were run: they are counted from the first one on."""
        run = {one.seed for one in self.kept}
        return max(
            (count for count, seed in enumerate(sorted({cell.seed for cell in self.cells}), 1) if seed in run),
            default=0,
        )


def papers_told(papers: Mapping[str, Paper], kept: Sequence[Kept]) -> dict[str, Paper]:
    """The papers of which anything is kept; all, where nothing is. Results of a paper that there is not are refused."""
    names = {one.paper for one in kept}
    if unknown := sorted(names - papers.keys()):
        raise FedStrataError(
            f"There are results of the paper '{unknown[0]}', which is none of {listed(sorted(papers))}; name the "
            "folder of its recipes with --recipes."
        )
    return {name: paper for name, paper in papers.items() if name in names or not names}


def gather(paper: Paper, kept: Sequence[Kept]) -> list[Gathered]:
    """Gather what is known of all parts of a paper; a run that several parts ask for counts in all of them."""
    of_paper = [one for one in kept if one.paper == paper.name]
    seeds = 1 + max((one.seed for one in of_paper), default=0)
    return [_gather(paper, part, of_paper, seeds) for part in paper.parts.values()]


def _gather(paper: Paper, recipe: Recipe, kept: Sequence[Kept], seeds: int) -> Gathered:
    cells = cells_behind(paper, recipe, seeds)
    measured: defaultdict[tuple[str, str, str], list[Kept]] = defaultdict(list)
    for one in kept:
        measured[one.what].append(one)
    own = [measured[asked(cell)][-1].of(cell) for cell in cells if asked(cell) in measured]
    wanted = {asked(cell) for cell in cells}
    repeated = [tuple(measured[what]) for what in dict.fromkeys(map(asked, cells)) if what in measured]
    return Gathered(
        recipe,
        tuple(cells),
        judge_part(paper, recipe, cells, own),
        tuple(own),
        tuple(_others(recipe, [one for one in kept if one.part == recipe.part and one.what not in wanted])),
        tuple(ones for ones in repeated if len({one.value for one in ones}) > 1),
    )


def _others(recipe: Recipe, kept: Sequence[Kept]) -> list[OtherSettings]:
    """Tell runs with other settings apart by these; the longest first."""
    groups: defaultdict[tuple[int, str], list[Kept]] = defaultdict(list)
    for one in kept:
        if one.row in recipe.rows and one.column in recipe.columns:
            groups[-one.rounds, one.changes].append(one)
    found = []
    for (rounds, changes), ones in sorted(groups.items()):
        there = {(one.row, one.column) for one in ones}
        pairs = [(row, column) for column in recipe.columns for row in recipe.rows if (row, column) in there]
        found.append(OtherSettings(changes, -rounds, judge_pairs(recipe, pairs, ones, smaller=pairs), tuple(ones)))
    return found


def all_kept(part: Gathered) -> list[Kept]:
    """The numbers of a part, with whatever settings."""
    return [*part.kept, *(one for other in part.others for one in other.kept)]


def claims_of(gathered: Mapping[str, Sequence[Gathered]]) -> list[tuple[Gathered, int]]:
    """The papers' main claims, by their part and place in it; all of a paper that names no main ones."""
    found = []
    for parts in gathered.values():
        all_of_them = [(part, place) for part in parts for place in range(len(part.judged.claims))]
        main = [(part, place) for part, place in all_of_them if part.judged.claims[place].stated.main]
        found += main or all_of_them
    return found
