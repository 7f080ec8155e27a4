"""The headline claims no more than the seeds can carry."""

import re
from dataclasses import dataclass, field
from typing import Any

from fedstrata.report.finding import finding
from fedstrata.report.groups import group_runs
from fedstrata.report.rows import comparison_rows
from fedstrata.report.view import View


@dataclass(frozen=True)
class Told:
    """What a comparison needs of a run."""

    method: str
    seed: int
    accuracy: float
    worst: float | None = None
    split_hash: str = "same"
    folder: Any = None
    client_accuracies: dict[int, float] = field(default_factory=dict)
    experiment: dict[str, Any] = field(init=False)
    summary: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        final = {"client_after.accuracy.mean": self.accuracy}
        final |= {} if self.worst is None else {"client_after.accuracy.worst10": self.worst}
        object.__setattr__(self, "experiment", {"method": self.method, "seed": self.seed})
        object.__setattr__(self, "summary", {"headline": "client_after", "final": final})


def sentence(**accuracies: tuple[float, ...]) -> str:
    return said_of(
        [Told(method, seed, accuracy) for method, values in accuracies.items() for seed, accuracy in enumerate(values)]
    )


def said_of(runs: list[Any]) -> str:
    rows = comparison_rows(runs)
    methods = [row.label for row in rows]
    said = "".join(finding(View("title", group_runs(runs), rows, methods, methods)))
    return re.sub(r"<[^>]+>", "", said).replace("\u00a0", " ").strip()


def test_a_difference_that_may_be_chance_is_no_difference() -> None:
    said = sentence(fedavg=(0.50, 0.60, 0.70), fedbn=(0.80, 0.55, 0.65))
    # Differences 0.30, -0.05, -0.05: mean 0.0667, deviation 0.2021, t = 0.5714 with 2 degrees of freedom.
    assert said == (
        "Highest accuracy in the last round: fedbn, 66.7 ± 12.6 % over 3 seeds. "
        "It is not distinguishable from fedavg over 3 seeds (p = 0.625)."
    )


def test_a_difference_beyond_chance_is_told_in_points() -> None:
    said = sentence(fedavg=(0.50, 0.60, 0.70), fedbn=(0.60, 0.71, 0.80))
    assert said.endswith("That is 10.3 points above fedavg over 3 seeds (p = 0.001).")


def test_accuracies_on_different_data_are_not_compared() -> None:
    runs = [Told("fedavg", 0, 0.9), Told("fedavg", 0, 0.5)]
    for run, data in zip(runs, ("digits", "heart_disease"), strict=True):
        run.experiment["data"] = data
    assert said_of(runs) == "The runs are on digits and heart_disease; accuracies on different data are not compared."


def test_one_seed_decides_nothing() -> None:
    said = sentence(fedavg=(0.5,), fedbn=(0.9,))
    assert "fedbn, 90.0 %. One seed each decides nothing" in said
    assert "points" not in said
    assert sentence(fedavg=(0.5,)).endswith("One seed: another may give another number.")


def test_all_that_may_be_as_good_are_named() -> None:
    near = (0.90, 0.92, 0.94)
    said = sentence(fedavg=(0.5, 0.51, 0.53), fedbn=near, lips=(0.91, 0.91, 0.935), local=(0.89, 0.93, 0.92))
    assert "fedbn, 92.0 ± 2.0 %" in said
    assert "That is 40.7 points above fedavg" in said
    assert said.endswith("It is not distinguishable from lips and local.")


def test_a_reference_that_leads_is_compared_with_the_next_best() -> None:
    said = sentence(fedavg=(0.9, 0.8, 0.85), fedbn=(0.70, 0.61, 0.66), local=(0.1, 0.2, 0.3))
    assert "Highest accuracy in the last round: fedavg" in said
    assert "points above fedbn over 3 seeds" in said


def test_what_was_not_tested_is_not_said_to_be_as_good() -> None:
    said = sentence(fedavg=(0.5, 0.51, 0.53), fedbn=(0.90, 0.92, 0.94), lips=(0.91,))
    assert "points above fedavg" in said
    assert "lips" not in said


def test_where_no_test_is_possible_the_reason_is_told() -> None:
    said = sentence(fedavg=(0.5, 0.6), fedbn=(0.5, 0.6))
    assert said.endswith("Not tested against fedbn: Equal to fedavg for every seed.")


def test_a_leading_method_that_diverged_in_some_seeds_is_not_told_of_as_if_it_had_not() -> None:
    runs = [Told(method, seed, accuracy) for method, accuracy in (("fedavg", 0.5), ("fedbn", 0.9)) for seed in (0, 1)]
    runs[3].summary["final"]["train.loss"] = None
    assert "fedbn, 90.0 ± 0.0 % over 2 seeds. It diverged in 1 of 2 seeds. " in said_of(runs)
    equal = [Told(method, 0, 0.5) for method in ("fedavg", "fedbn")]
    equal[0].summary["final"]["train.loss"] = None
    assert "round: fedbn, 50.0 %." in said_of(equal)
    equal[1].summary["final"]["train.loss"] = None
    assert "alike, 50.0 %. fedavg diverged in 1 of 1 seed and fedbn diverged in 1 of 1 seed." in said_of(equal)
    alone = said_of(runs[2:])
    assert "(own model after aggregation). It diverged in 1 of 2 seeds." in alone


def test_a_tie_has_no_winner() -> None:
    runs = [Told("fedavg", 0, 0.5, worst=0.0), Told("fedbn", 0, 0.9, worst=0.0001), Told("local", 0, 0.7, worst=0.0)]
    assert said_of(runs).endswith("The worst 10 % of its clients reach 0.0 %.")
    runs = [Told("fedavg", 0, 0.5, worst=0.3), Told("fedbn", 0, 0.9, worst=0.2), Told("local", 0, 0.7, worst=0.3)]
    assert "worst" not in said_of(runs)
    runs = [Told("fedavg", 0, 0.5, worst=0.3), Told("fedbn", 0, 0.5, worst=0.3)]
    assert said_of(runs).startswith("Highest accuracy in the last round: fedavg and fedbn alike, 50.0 %.")
    assert "worst" not in said_of(runs)
    runs = [Told("fedavg", 0, 0.5, worst=0.3), Told("fedbn", 0, 0.9, worst=0.2)]
    assert said_of(runs).endswith("The worst 10 % of clients fare best with fedavg: 30.0 %.")
