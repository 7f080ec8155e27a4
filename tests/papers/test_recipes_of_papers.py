"""The recipes that come along: every table and figure is there, its runs can be built, its numbers are the paper's."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from functools import cache
from statistics import mean

import pytest

import fedstrata
from fedstrata.data import datasets, partitions, transforms
from fedstrata.diagnostics import diagnostics
from fedstrata.errors import FedStrataError
from fedstrata.losses import losses
from fedstrata.methods import Method
from fedstrata.models import models
from fedstrata.optimisers import optimisers
from fedstrata.papers.cells import Cell, cells_of
from fedstrata.papers.reading import PAPER_FILE, PAPERS, RECIPES, Recipe, read_papers
from fedstrata.ranks import mean_ranks
from fedstrata.schedules import schedules
from fedstrata.scores import metrics
from fedstrata.spec import Registry, parse

PARTS = {
    "lips": [*(f"table{n}" for n in range(1, 8)), *(f"figure{n}" for n in range(1, 10))],
    "ssfl": [*(f"table{n}" for n in (1, 2, 3, 5, 6)), *(f"figure{n}" for n in (2, 3, 4, 5, 7, 8))],
    "fedlws": [*(f"table{n}" for n in range(1, 13)), "figure1", *(f"figure{n}" for n in range(3, 12))],
    "player": [
        "table1", "table2", *(f"tableA{n}" for n in range(5, 13)), *(f"figure{n}" for n in range(1, 5)),
        *(f"figureA{n}" for n in range(1, 11)),
    ],
    "sparse-ft": [*(f"table{n}" for n in range(1, 4)), *(f"figure{n}" for n in range(1, 5))],
}  # fmt: skip

OURS = {
    "lips table2": {"pFedSD Fling", "FedAvg server"},
    "lips table5": {"LIPS w/shared init"},
    "fedlws table1": {
        "FedAvg+LWS released", "FedDisco+LWS released", "FedProx+LWS released", "FedAvg+LWS drawn", "FedAvg all",
        "FedAvg+LWS all", "FedAvg+LWS released all",
    },
    "player tableA6": {"Local", "FedAvg"},
    "player tableA9": {"Local", "FedAvg"},
    "player tableA12": {"Local", "FedAvg"},
    "sparse-ft table2": {"Dense"},
    "sparse-ft table3": {"Dense"},
}  # fmt: skip
"""Rows that the papers do not have: other readings of settings, what incentives are measured against, a baseline."""
OUR_COLUMNS = {"sparse-ft table2": {"Small ViT"}, "sparse-ft table3": {"Small ViT"}}
"""Columns that the papers do not have: a model for those who cannot have the paper's."""

SPOT_CHECKS = """
lips | table1 | w/.fix | C10 .1 | 85.15 | 1.59
lips | table1 | w/o.fix | C100 .1 | 43.08 | 0.45
lips | table2 | Separate | C10 .1 | 77.65 | 2.57
lips | table2 | FedAvg | C100 .5 | 26.34 | 1.56
lips | table2 | FedDrop | C100 .1 | 47.14 | 0.77
lips | table2 | FedCAC | Tiny .01 | 68.93 | 0.56
lips | table2 | LIPS | C100 .1 | 47.84 | 0.47
lips | table2 | LIPS | Tiny .5 | 23.53 | 0.15
lips | table3 | LIPS | C100 N=300 | 50.36 |
lips | table4 | LIPS Magnitude | C10 .5 | 72.56 | 0.49
lips | table5 | LIPS w/init | C10 .1 | 87.10 | 1.38
lips | table6 | FedBN | ResNet10 | 42.84 | 0.19
lips | table7 | LIPS w/ local sparsity | C100 .5 | 26.64 | 0.62
lips | table7 | FedBN | Tiny FLOPs | 219.4 |
ssfl | table1 | SSFL | CIFAR-10 | 88.29 | 0.42
ssfl | table1 | Random | CIFAR-100 | 48.62 | 1.33
ssfl | table1 | SubFedAvg | Comms (MB) | 346.6 |
ssfl | table2 | D-PSGD-FT | C100 pathological | 27.58 | 1.88
ssfl | table2 | SSFL | Tiny Dirichlet | 19.4 | 0.30
ssfl | table3 | DisPFL | 95% | 12.04 |
ssfl | table5 | Bitmask | s=0.05 | 8.1 |
ssfl | table6 | Warmup-SSFL | 80% | 86.34 |
fedlws | table1 | FedAvg+LWS | C10 .1 | 64.08 |
fedlws | table1 | FedDyn+LWS | C100 .5 | 46.38 |
fedlws | table1 | L-DAWA | FM .1 | 79.03 |
fedlws | table2 | FedProx+LWS | AG News .1 | 75.24 |
fedlws | table3 | FedLAW | DenseNet121 | 27.25 |
fedlws | table4 | Model-wise | C100 .1 | 37.65 |
fedlws | table5 | FedAvg | C100 ViT | 25.60 |
fedlws | table6 | FedAvg+AWD | C100 100 | 42.81 |
fedlws | table7 | FedLAW (LT) | C10 .1 | 56.91 |
fedlws | table8 | Layer-wise | Tiny .1 | 31.53 |
fedlws | table9 | FedAvg | C10 1 | 91.30 |
fedlws | table10 | only-opt | C100 .1 | 33.74 |
fedlws | table11 | FedDisco+fixed | C100 .1 | 25.73 |
fedlws | table12 | FedAvg+LWS | ViT (MLP) | 0.950 | 0.037
player | table1 | PLayer-FL | FMNIST | 79.3 | 1.4
player | table1 | pFedLA | EMNIST | 7.1 | 0.0
player | table1 | FedBABU | Mean rank | 4.1 |
player | table2 | PLayer-FL | Incentive | 3.4 |
player | tableA5 | PLayer-FL | Heart | 0.073 |
player | tableA7 | PLayer-FL | MIMIC-III | 75.7 | 0.6
player | tableA10 | FedBABU | Mean rank | 3.8 |
sparse-ft | table1 | Cosine | Test accuracy | 86.18 |
sparse-ft | table2 | Sparsity 20% | Test accuracy | 80.10 |
sparse-ft | table3 | Highest magnitude | N_c=10 J=8 | 82.09 |
"""
"""Numbers that were typed again by another hand."""

papers = cache(read_papers)


@cache
def cells(paper: str, part: str) -> list[Cell]:
    return cells_of(papers()[paper].part(part), seeds=1)


def recipes() -> list[Recipe]:
    return [recipe for paper in papers().values() for recipe in paper.parts.values()]


def running() -> list[Recipe]:
    return [recipe for recipe in recipes() if recipe.runs]


def _joined(registry: Registry[object]) -> Callable[[str], object]:
    return lambda text: [registry.build(call) for call in parse(text, registry.kind)]


MAKERS: dict[str, Callable[[str], object]] = {
    "method": Method.make,
    "partition": partitions.make,
    "data": datasets.make,
    "model": models.make,
    "optimiser": optimisers.make,
    "schedule": schedules.make,
    "loss": losses.make,
    "test_loss": losses.make,
    "transforms": lambda text: text == "none" or _joined(transforms)(text),
    "metrics": _joined(metrics),
    "diagnose": _joined(diagnostics),
}


def test_all_tables_and_figures_are_there():
    for name, parts in PARTS.items():
        assert sorted(set(parts) - set(papers()[name].parts)) == []
        assert all(papers()[name].parts[part].runs for part in parts)


def test_parts_that_are_not_run_say_why():
    assert all(recipe.note for recipe in recipes() if not recipe.runs)


@pytest.mark.parametrize("paper", PARTS)
def test_every_run_of_a_recipe_can_be_built(paper: str):
    made: set[tuple[str, str]] = set()
    problems = set()
    for recipe in papers()[paper].parts.values():
        for cell in cells(paper, recipe.part):
            problems |= {cell.problem} - {""}
            for key, make in MAKERS.items():
                text = getattr(cell.experiment, key)
                if text is None or (key, text) in made:
                    continue
                made.add((key, text))
                try:
                    make(text)
                except FedStrataError as error:
                    problems.add(str(error))
    assert sorted(problems) == []


@pytest.mark.parametrize("paper", PARTS)
def test_what_a_paper_says_of_rows_and_columns_is_used(paper: str):
    files = sorted((PAPERS / RECIPES / paper).glob("*.toml"))
    said = tomllib.loads((PAPERS / RECIPES / paper / PAPER_FILE).read_text())
    begun_with = {name for file in files for name in re.findall(r'\blike = "([^"]+)"', file.read_text())}
    parts = papers()[paper].parts.values()
    assert sorted(set(said.get("rows", {})) - begun_with - {row for one in parts for row in one.rows}) == []
    assert sorted(set(said.get("columns", {})) - begun_with - {name for one in parts for name in one.columns}) == []


def test_rows_and_columns_are_those_of_the_published_numbers():
    for recipe in recipes():
        if not recipe.published:
            continue
        ours = OURS.get(recipe.name, set())
        for row in set(recipe.rows) - ours if recipe.kind == "table" else ():
            for column in recipe.columns.keys() - OUR_COLUMNS.get(recipe.name, set()):
                told = recipe.told(row, column)
                meet = column in told.get("columns", (column,))
                if meet and not (told.get("runs") is False and (row, column) not in recipe.published):
                    assert (row, column) in recipe.published, (recipe.name, row, column)
        for row, column in recipe.published:
            assert row in recipe.rows, (recipe.name, row)
            assert row not in ours, (recipe.name, row)
            assert column in recipe.columns, (recipe.name, column)


def test_published_numbers_are_finite_and_deviations_are_not_negative():
    numbers = [number for recipe in recipes() for number in recipe.published.values()]
    assert len(numbers) > 1300
    assert all(number.mean is not None and math.isfinite(number.mean) for number in numbers)
    assert all(number.std is None or 0 <= number.std < 20 for number in numbers)


@pytest.mark.parametrize("line", SPOT_CHECKS.strip().splitlines())
def test_a_published_number_is_the_papers(line: str):
    paper, part, row, column, value, std = (word.strip() for word in line.split("|"))
    number = papers()[paper].part(part).published[row, column]
    assert number.mean == float(value)
    assert number.std == (float(std) if std else None)


def test_all_rows_of_a_column_are_in_one_unit():
    """A row with a number of its own had a unit of its own, too: a loss among hundredths of losses."""
    for paper in read_papers().values():
        for part in paper.parts.values():
            for column in part.columns:
                assert len({part.of_cell(row, column).unit for row in part.rows}) <= 1, (part.name, column)


def test_what_stands_behind_the_papers_numbers():
    """PLayer-FL's are medians with intervals of 95 %, over as many runs as its Table A.4 says."""
    means = {
        name: (one.spread, one.middle, one.published_seeds) for name in PARTS for one in [papers()[name].part("table1")]
    }
    assert means == {
        "lips": ("deviation", "mean", 3),
        "ssfl": ("deviation", "mean", 5),
        "fedlws": ("deviation", "mean", 1),
        "player": ("interval95", "median", 10),
        "sparse-ft": ("deviation", "mean", 1),
    }
    for part in ("table1", "tableA7", "tableA10"):
        recipe = papers()["player"].part(part)
        runs = {
            column: recipe.of_cell("FedAvg", column).published_seeds
            for column in ("ISIC", "Sent-140", "Heart", "CIFAR")
        }
        assert runs == {"ISIC": 3, "Sent-140": 20, "Heart": 50, "CIFAR": 10}
    assert papers()["fedlws"].part("table12").spread == "layers"
    single = [name for name, paper in papers().items() for one in paper.parts.values() if one.spread == "layers"]
    assert single == ["fedlws"]


def test_mean_ranks_are_those_of_their_tables_or_have_a_note():
    """The tables of incentives check the rule: more is better, equals share their ranks, and baselines have none."""
    for part, better in (
        ("tableA6", True),
        ("tableA9", True),
        ("tableA12", True),
        ("table1", True),
        ("tableA10", False),
    ):
        recipe = papers()["player"].part(part)
        rows = [row for row in recipe.rows if (row, "Mean rank") in recipe.published]
        columns = [column for column in recipe.columns if column != "Mean rank"]
        found = mean_ranks({row: [recipe.published[row, one].mean or 0.0 for one in columns] for row in rows}, better)
        for row in rows:
            number = recipe.published[row, "Mean rank"]
            assert number.note or number.mean == pytest.approx(found[row], abs=0.26), (part, row)


def test_averages_are_those_of_their_rows_or_have_a_note():
    """The papers' own averages check the numbers that they are made of."""
    checked = 0
    for recipe in recipes():
        averages = [column for column in recipe.columns if recipe.told("", column).get("derived") == "mean"]
        for row, column in ((row, column) for column in averages for row in recipe.rows):
            number = recipe.published_at(row, column)
            others = [recipe.published_at(row, other).mean for other in recipe.columns if other != column]
            if number.mean is None or number.note:
                continue
            assert number.mean == pytest.approx(mean(one for one in others if one is not None), abs=0.011), (
                recipe.name,
                row,
            )
            checked += 1
    assert checked > 15


def test_claims_say_what_the_published_numbers_say():
    stated = [(recipe, claim) for recipe in running() for claim in recipe.claims]
    assert len(stated) > 60
    for recipe, claim in stated:
        gains = [_gain(recipe, claim.row, claim.over, column) for column in claim.columns]
        known = [gain for gain in gains if gain is not None]
        assert claim.by is None or not known or mean(known) == pytest.approx(claim.by, abs=0.06), (recipe.name, claim)


def _gain(recipe: Recipe, row: str, over: str, column: str) -> float | None:
    first, second = (recipe.published_at(one, column).mean for one in (row.replace(" released", ""), over))
    return None if first is None or second is None else first - second


def test_the_papers_settings_are_in_the_runs():
    """A few settings of each paper, typed again."""

    def run(paper: str, part: str, row: str, column: str) -> Cell:
        [cell] = [cell for cell in cells(paper, part) if (cell.row, cell.column) == (row, column)]
        return cell

    cell = run("lips", "table2", "LIPS", "C10 .5")
    assert cell.experiment.method == "lips(tau0=0.5)"
    assert cell.experiment.partition == "dirichlet(alpha=0.5, samples=100, test_samples=400)"
    assert (cell.experiment.rounds, cell.experiment.epochs, cell.experiment.batch_size) == (300, 5, 100)
    assert run("lips", "table2", "LIPS", "C100 .1").experiment.method == "lips"
    assert run("lips", "table2", "FedBN", "C10 .5").experiment.method == "fedbn"
    assert run("lips", "table2", "FedCAC", "C100 .1").experiment.method == "fedcac(tau=0.4, beta=170)"
    told, fling = (run("lips", "table2", row, "C100 .1").experiment for row in ("pFedSD", "pFedSD Fling"))
    assert told.method == fling.method == "pfedsd(strength=0.5, temperature=3)"
    assert told.optimiser == "sgd(learning_rate=0.1, momentum=0.9)"
    assert fling.optimiser == "sgd(learning_rate=0.01, momentum=0.9)"
    cell = run("ssfl", "table1", "FedAvg-FT", "CIFAR-100")
    assert cell.recipe.number == "client_adapted.accuracy.mean"
    assert cell.experiment.partition == "dirichlet-balanced(alpha=0.2, test_samples=100)"
    cell = run("ssfl", "table1", "FedAvg-FT", "Comms (MB)")
    assert (cell.recipe.number, cell.recipe.unit) == ("bytes.up", "MB")
    assert not papers()["ssfl"].part("table1").has_run("FedPM", "Comms (MB)")
    assert run("ssfl", "table6", "Warmup-SSFL", "95%").experiment.method == "ssfl(sparsity=0.95, warmup=10)"
    cell = run("fedlws", "table1", "FedDisco+LWS", "FM .1")
    assert cell.experiment.method == "feddisco(a=0.1, normalise=false)+lws(beta=0.1)"
    assert run("fedlws", "table1", "FedDisco+LWS", "C10 .1").experiment.method.endswith("+lws(beta=0.01)")
    cell = run("player", "tableA7", "FedLAMA", "Heart")
    assert cell.experiment.optimiser == "adamw(learning_rate=0.05, weight_decay=0.0001, keep=true, amsgrad=true)"
    assert (cell.recipe.number, cell.experiment.rounds, cell.experiment.batch_size) == (
        "client_before.accuracy.weighted",
        50,
        32,
    )
    assert run("player", "table1", "PLayer-FL", "Heart").experiment.method == "player(preset=heart)"
    cell = run("sparse-ft", "figure4", "Random", "N_c=5 J=4")
    assert (cell.experiment.steps, cell.experiment.rounds) == (4, 300)
    assert cell.experiment.partition == "classes(per_client=5, apart=true)"


def test_one_run_serves_fedavg_and_fedavg_ft() -> None:
    """Before their fine-tuning the runs of the one are those of the other, so that SSFL's tables need one of them."""
    [plain, tuned] = (
        fedstrata.run(clients=2, rounds=2, epochs=1, model="mlp(hidden=4)", method=method, engine="stacked")
        for method in ("fedavg", "fedavg-ft")
    )
    for name in ("client_after.accuracy.mean", "client_after.loss.mean", "bytes.up"):
        assert plain.metrics.series(name)[1].tolist() == tuned.metrics.series(name)[1].tolist()
    table = read_papers()["ssfl"].part("table1")
    own = {cell.row: cell for cell in cells_of(table, 1) if cell.column == "CIFAR-10"}
    assert own["FedAvg"].settings == own["FedAvg-FT"].settings
    assert own["FedAvg"].recipe.number != own["FedAvg-FT"].recipe.number
