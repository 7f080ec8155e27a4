"""A scaled cell has fewer samples everywhere, also where its partition names their numbers, and is never compared."""

from __future__ import annotations

import pytest

from fedstrata.experiment import Experiment
from fedstrata.papers.cells import Smaller, cells_of
from fedstrata.papers.reading import read_papers
from fedstrata.runs.preparing import divide, load_data


@pytest.mark.parametrize(
    ("partition", "scaled"),
    [
        ("dirichlet(alpha=0.1, samples=100, test_samples=400)", "dirichlet(samples=10, test_samples=40)"),
        ("dirichlet-balanced(alpha=0.2, test_samples=100)", "dirichlet-balanced(alpha=0.2, test_samples=10)"),
        (
            "dirichlet-clients(minimum=1, rounding=down, most=2000, test_fraction=0.2)",
            "dirichlet-clients(minimum=1, rounding=down, most=200, test_fraction=0.2)",
        ),
        ("dirichlet-clients:0.3", "dirichlet-clients(alpha=0.3, minimum=1)"),
        ("classes(per_client=2, test_samples=4)", "classes(test_samples=1)"),
        ("natural", "natural"),
        (None, None),
        ("mystery(samples=100)", "mystery(samples=100)"),
    ],
)
def test_numbers_of_samples_are_scaled(partition: str | None, scaled: str | None) -> None:
    experiment = Experiment(partition=partition, rounds=200, validation=500, evaluate_every=50, join_round=100)
    small = Smaller(scale=0.1).change(experiment)
    assert small.partition == scaled
    assert (small.rounds, small.validation, small.evaluate_every, small.join_round) == (20, 50, 20, 10)
    assert Smaller(rounds=200).change(experiment) == experiment


def test_clients_hold_the_part_that_was_asked_for() -> None:
    whole = Experiment(clients=4, partition="dirichlet(alpha=1.0, samples=200, test_samples=40)")
    small = Smaller(scale=0.25).change(whole)
    for experiment, samples, tests in ((whole, 200, 40), (small, 50, 10)):
        split = divide(experiment, load_data(experiment))[1]
        assert (split.sizes.tolist(), split.test_sizes.tolist()) == ([samples] * 4, [tests] * 4)


def test_no_scaled_cell_of_any_paper_counts_as_the_papers() -> None:
    """Data of every kind can be scaled: also where its own text has quotes and parentheses."""
    for paper in read_papers().values():
        cells = cells_of(next(part for part in paper.parts.values() if part.runs), 1, Smaller(scale=0.5))
        assert cells
        assert not any(cell.comparable for cell in cells)
