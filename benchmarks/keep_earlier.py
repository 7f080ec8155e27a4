"""Turn results that were published before there were recipes into the lines of a results.csv.

    python benchmarks/keep_earlier.py lips results/lips-cifar100 --parts table2 table4

reads RUN.toml, summary.csv and rounds.csv of the folder (see publish.py) and writes results.csv beside them. A run with
exactly the settings of a cell of these parts counts as this cell; else it is kept for the cell of the same method and
dataset that it is nearest to, in each of them, with what is changed. Only numbers that these files hold are kept, and
runs that are near to no cell, or to several, are left out.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedstrata.experiment import Experiment
from fedstrata.papers.cells import Cell, cells_of, differences, settings_hash
from fedstrata.papers.keeping import RESULTS, Kept, asked, write_results
from fedstrata.papers.numbers import in_unit
from fedstrata.papers.reading import Recipe, find_paper, read_papers
from fedstrata.runs.sweeping import canonical

_OF_ROUNDS = {"last": lambda values: values[-1], "last_ten": lambda values: sum(values[-10:]) / len(values[-10:]),
              "best": max}  # fmt: skip
_UNITS = ("percent", "fraction", "plain", "squared", "MB")


def earlier_results(parts: Sequence[Recipe], folder: Path) -> list[Kept]:
    """Find the numbers of a folder's runs that cells of some parts ask for."""
    rounds, kept = _rounds(folder / "rounds.csv"), []
    for line in _lines(folder / "summary.csv"):
        experiment = Experiment.read(folder / f"{line['run']}.toml")
        for cell in _cells(parts, experiment):
            value = _number(cell, rounds[line["run"]])
            if value is not None:
                kept.append(_kept(cell, experiment, value, line, folder))
    return kept


def _cells(parts: Sequence[Recipe], experiment: Experiment) -> Iterator[Cell]:
    """The cells that a run is of: those with its settings, once for each number; else the nearest of each part."""
    settings, seed = settings_hash(experiment), experiment.seed
    cells = {part.part: [cell for cell in cells_of(part, seed + 1) if cell.seed == seed] for part in parts}
    exact = [cell for ones in cells.values() for cell in ones if cell.settings == settings]
    if exact:
        yield from {asked(cell): cell for cell in reversed(exact)}.values()
        return
    for ones in cells.values():
        alike = [cell for cell in ones if _method_and_data(cell.experiment) == _method_and_data(experiment)]
        apart = {cell.settings: len(differences(experiment, cell.experiment)) for cell in alike}
        nearest = [settings for settings, count in apart.items() if count == min(apart.values())]
        yield from (cell for cell in alike if nearest == [cell.settings])


def _method_and_data(experiment: Experiment) -> tuple[str, str]:
    return canonical("method", experiment.method), experiment.data.split("(")[0]


def _number(cell: Cell, rounds: Sequence[Mapping[str, str]]) -> float | None:
    recipe = cell.recipe
    values = [float(line[recipe.number]) for line in rounds if line.get(recipe.number)]
    if not values or recipe.at not in _OF_ROUNDS or recipe.unit not in _UNITS:
        return None
    return in_unit(_OF_ROUNDS[recipe.at](values), recipe.unit, {})


def _kept(cell: Cell, experiment: Experiment, value: float, line: Mapping[str, str], folder: Path) -> Kept:
    _, number, at = asked(cell)
    changes = "; ".join(f"{key}={value}" for key, value in differences(experiment, cell.experiment).items())
    return Kept(
        cell.recipe.paper,
        cell.recipe.part,
        cell.row,
        cell.column,
        experiment.seed,
        value,
        number,
        at,
        settings_hash(experiment),
        int(line["rounds"]),
        None,
        int(line["bytes_up"]) + int(line["bytes_down"]),
        line["fedstrata"],
        f"fedstrata run {folder.as_posix()}/{line['run']}.toml",
        line["device"],
        f"fedstrata {line['fedstrata']}, torch {line['torch']}",
        None,
        changes,
    )


def _rounds(path: Path) -> dict[str, list[dict[str, str]]]:
    found: dict[str, list[dict[str, str]]] = {}
    for line in _lines(path):
        found.setdefault(line["run"], []).append(line)
    return found


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paper", help="the paper that the runs are of, such as lips")
    parser.add_argument("folder", type=Path, help="a folder of published results")
    parser.add_argument("--parts", nargs="+", required=True, help="the tables that are looked through")
    arguments = parser.parse_args()
    paper = find_paper(read_papers(), arguments.paper)
    kept = earlier_results([paper.part(name) for name in arguments.parts], arguments.folder)
    if kept:
        write_results(arguments.folder / RESULTS, kept)
    for one in kept:
        print(f"{one.paper} {one.part}, {one.row}, {one.column}, seed {one.seed}: {one.value:g}; {one.changes}")
    print(f"{arguments.folder}: {len(kept)} numbers")


if __name__ == "__main__":
    main()
