import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from fedstrata.errors import FedStrataError
from fedstrata.report.groups import group_runs
from fedstrata.report.notes import notes
from fedstrata.report.results import comparison_cells, comparison_table
from fedstrata.report.rows import accuracy_or_nothing, comparison_rows, highest, lowest
from fedstrata.report.terminal import rich_table
from fedstrata.significance import Estimate


@dataclass(frozen=True)
class Run:
    experiment: dict[str, Any]
    summary: dict[str, Any]
    split_hash: str = ""
    client_accuracies: Mapping[int, float] = field(default_factory=dict)


def run(method: str, seed: int, accuracy: float, split: str | None = None, **config: Any) -> Run:
    return Run(
        {"data": "digits", "method": method, "seed": seed, **config},
        {
            "headline": "client_after",
            "final": {"client_after.accuracy.mean": accuracy, "client_after.accuracy.worst10": accuracy - 0.2},
            "last_ten": {"client_after.accuracy.mean": accuracy - 0.01},
            "best": {"client_after.accuracy.mean": accuracy + 0.01},
            "bytes_up": 1000 * (seed + 1),
            "bytes_down": 2000,
            "seconds": 3.0,
        },
        f"split-{seed}" if split is None else split,
    )


def test_groups_hold_each_seed_once_and_repeats_apart() -> None:
    first, second, again = run("fedavg", 1, 0.8), run("fedavg", 0, 0.7), run("fedavg", 1, 0.8, checkpoint_every=3)
    (group,) = group_runs([first, second, again])
    assert group.label == "fedavg"
    assert group.runs == (second, first)
    assert group.repeated == (again,)


def test_labels_name_what_differs_within_a_method() -> None:
    runs = [run("fedavg", 0, 0.8, epochs=1), run("fedavg", 0, 0.8, epochs=5, steps=2), run("fedbn", 0, 0.9, epochs=5)]
    assert [group.label for group in group_runs(runs)] == [
        "fedavg [epochs=1, steps=none]",
        "fedavg [epochs=5, steps=2]",
        "fedbn",
    ]


def test_rows_average_over_seeds_and_pair_by_seed() -> None:
    # Given out of order, so that only pairing by seed yields the differences 0.02, 0.04 and 0.06.
    runs = [run("fedavg", seed, accuracy) for seed, accuracy in ((0, 0.5), (1, 0.7), (2, 0.9))]
    runs += [run("fedbn", seed, accuracy) for seed, accuracy in ((2, 0.96), (0, 0.52), (1, 0.74))]
    reference, row = comparison_rows(runs)
    assert reference.comparison is None
    assert reference.last == Estimate(pytest.approx(0.7), pytest.approx(0.2), 3)
    assert reference.worst == Estimate(pytest.approx(0.5), pytest.approx(0.2), 3)
    assert reference.last_ten is not None
    assert reference.last_ten.mean == pytest.approx(0.69)
    assert reference.best is not None
    assert reference.best.mean == pytest.approx(0.71)
    assert reference.bytes_up == Estimate(2000.0, 1000.0, 3)
    assert row.seeds == (0, 1, 2)
    assert row.comparison is not None
    assert row.comparison.p_value == pytest.approx(1 - math.sqrt(12 / 14))


def test_holm_counts_the_tested_methods_only() -> None:
    base = [run("fedavg", seed, 0.5) for seed in (0, 1, 2)]
    better = [run("fedbn", seed, 0.5 + step) for seed, step in enumerate((0.02, 0.04, 0.06))]
    noisy = [run("local", seed, 0.5 + step) for seed, step in enumerate((0.02, -0.04, 0.06))]
    alone = [run("fedprox", 0, 0.6)]
    rows = {row.label: row for row in comparison_rows([*base, *better, *noisy, *alone])}
    raw = 1 - math.sqrt(12 / 14)
    assert rows["fedbn"].comparison is not None
    assert rows["fedbn"].comparison.adjusted == pytest.approx(2 * raw)
    assert rows["fedprox"].comparison is not None
    assert rows["fedprox"].comparison.adjusted is None


def test_another_split_is_not_paired() -> None:
    _, row = comparison_rows([run("fedavg", 0, 0.5, split="a"), run("fedbn", 0, 0.6, split="b")])
    assert row.comparison is not None
    assert row.comparison.difference is None


def test_the_reference_can_be_chosen_and_must_exist() -> None:
    runs = [run("fedavg", 0, 0.5), run("fedbn", 0, 0.6)]
    first, second = comparison_rows(runs, reference="fedbn")
    assert (first.label, first.comparison) == ("fedbn", None)
    assert second.comparison is not None
    assert second.comparison.reference == "fedbn"
    many = [*(run(f"method-{number:02}", 0, 0.5) for number in range(15)), *runs]
    assert comparison_rows(many)[0].label == "fedavg"
    assert comparison_rows(many, reference="fedbn")[0].label == "fedbn"
    swept = [run(method, 0, 0.5, clients=clients) for clients in (3, 5) for method in ("fedavg", "fedbn")]
    references = [row.comparison and row.comparison.reference for row in comparison_rows(swept, reference="fedbn")]
    assert references == [None, None, "fedbn [clients=3]", "fedbn [clients=5]"]
    with pytest.raises(FedStrataError, match="Did you mean 'fedbn'"):
        comparison_rows(runs, reference="fedbm")
    assert comparison_rows([]) == []


def test_a_global_headline_has_no_worst_clients() -> None:
    one = Run({"method": "fedavg", "seed": 0}, {"headline": "global", "final": {"global.accuracy": 0.8}})
    (row,) = comparison_rows([one])
    assert row.last == Estimate(0.8, None, 1)
    assert row.worst is row.last_ten is row.bytes_up is None


def test_a_diverged_seed_is_not_dropped_from_the_mean() -> None:
    diverged = run("fedbn", 1, 0.5)
    diverged.summary["final"]["client_after.accuracy.mean"] = None
    rows = comparison_rows([run("fedavg", 0, 0.5), run("fedavg", 1, 0.5), run("fedbn", 0, 0.9), diverged])
    assert rows[1].last is not None
    assert math.isnan(rows[1].last.mean)
    assert rows[1].comparison is not None
    assert "not a finite number" in rows[1].comparison.note
    assert highest(rows)["last"] == 0.5
    assert highest(rows[:1]) == {}


def test_notes_say_how_many_seeds_and_which_test() -> None:
    assert notes(comparison_rows([run("fedavg", 0, 0.5), run("fedbn", 0, 0.6)])) == [
        "One seed each: no standard deviation over seeds, and no test."
    ]
    runs = [run("fedavg", seed, 0.5) for seed in (0, 1, 2)]
    runs += [run("fedbn", seed, 0.5 + step) for seed, step in enumerate((0.02, 0.04, 0.06))]
    runs += [run("local", seed, 0.5 - step) for seed, step in enumerate((0.02, 0.05, 0.06))]
    said = notes(comparison_rows([*runs, run("fedprox", 0, 0.6)]))
    assert said[0] == "Mean ± sample standard deviation over 1 to 3 seeds."
    assert said[1] == "p: two-sided paired t-test over seeds against fedavg, corrected after Holm for 2 methods."
    assert said[2].startswith("fedbn, local: With 3 seeds")
    assert said[3].startswith("fedprox: One seed in common with fedavg")


def test_notes_tell_what_privacy_was_spent() -> None:
    private = run("central-dp", 0, 0.4)
    private.summary["final"]["privacy.epsilon"] = 7.9996
    assert notes(comparison_rows([run("fedavg", 0, 0.5), private]))[-1] == (
        "Epsilon spent by the client that took part most often: central-dp 8."
    )


def test_many_methods_stand_by_rank_behind_fedavg():
    runs = [run(f"fedprox(mu={number})", 0, 0.5 + number / 100) for number in range(12)]
    few = comparison_rows([*runs[:11], run("fedavg", 0, 0.55)])
    assert [row.label for row in few][:2] == ["fedprox(mu=0)", "fedprox(mu=1)"]
    assert few[0].comparison is None
    many = comparison_rows([*runs, run("fedavg", 0, 0.55)])
    assert [row.label for row in many] == ["fedavg", *(f"fedprox(mu={number})" for number in range(11, -1, -1))]
    assert many[0].comparison is None
    assert many[1].comparison.difference.mean == pytest.approx(0.06)


# Who is better off ---------------------------------------------------------------------------------------------------


def with_clients(method, seed, *accuracies, **more):
    made = run(method, seed, 0.5, **more)
    return replace(made, client_accuracies=dict(enumerate(accuracies)))


def test_the_incentive_compares_clients_of_the_same_seed_with_local_and_fedavg():
    runs = [
        with_clients("fedavg", 0, 0.5, 0.5, 0.9, 0.5),
        with_clients("local", 0, 0.4, 0.6, 0.1, 0.5),
        with_clients("fedbn", 0, 0.6, 0.6, 0.8, 0.9),
        with_clients("fedavg", 1, 0.1, 0.1, 0.1, 0.1),
        with_clients("local", 1, 0.1, 0.1, 0.1, 0.1),
        with_clients("fedbn", 1, 0.2, 0.2, 0.2, 0.2),
        with_clients("fedbn", 2, 0.0, 0.0, 0.0, 0.0),  # nothing to compare with
    ]
    fedavg, local, fedbn = comparison_rows(runs)
    assert fedavg.incentive is None
    assert local.incentive is None
    assert fedbn.incentive == Estimate(0.75, pytest.approx(math.sqrt(0.125)), 2)
    told = "the part of the clients that fare better than with both local and fedavg, of the same seed: fedbn 75 %."
    assert f"Incentive, {told}" in notes([fedavg, local, fedbn])


@pytest.mark.parametrize("missing", ["fedavg", "local"])
def test_without_one_of_the_two_or_with_two_of_it_there_is_no_incentive(missing):
    runs = [with_clients(method, 0, 0.5, 0.7) for method in ("fedavg", "local", "fedbn")]
    rows = comparison_rows([one for one in runs if one.experiment["method"] != missing])
    assert all(row.incentive is None for row in rows)
    assert not any("better" in sentence for sentence in notes(rows))
    without = [one for one in runs if one.experiment["method"] != missing]
    twice = [*without, *(with_clients(missing, 0, 0.5, 0.7, rounds=rounds) for rounds in (8, 9))]
    assert all(row.incentive is None for row in comparison_rows(twice))


def test_of_several_references_it_is_the_one_at_the_same_setting():
    """With nine rounds both clients are better off than with both; with eight, none is."""
    levels = {8: {"fedavg": 0.9, "local": 0.9, "fedbn": 0.5}, 9: {"fedavg": 0.1, "local": 0.2, "fedbn": 0.5}}
    runs = [
        with_clients(method, 0, level, level, rounds=rounds)
        for rounds, methods in levels.items()
        for method, level in methods.items()
    ]
    told = {row.label: row.incentive for row in comparison_rows(runs)}
    assert told["fedbn [rounds=8]"] == Estimate(0.0, None, 1)
    assert told["fedbn [rounds=9]"] == Estimate(1.0, None, 1)


def test_fairness_is_told_below_a_table_of_several_methods():
    rows = comparison_rows(
        [with_clients("fedavg", 0, 0.5, 1.0), with_clients("fedbn", 0, 0.7, 0.8), run("local", 0, 1)]
    )
    told = "the variance of the clients' accuracies (less is fairer): fedavg 0.0625, fedbn 0.0025."
    assert f"Fairness, {told}" in notes(rows)
    assert not any("Fairness" in sentence for sentence in notes(rows[:1]))


def test_costs_and_fairness_stand_in_the_row():
    one = with_clients("fedavg", 0, 0.5, 1.0)
    costs = {"aggregation_seconds": 0.5, "train_flops": 4e9, "train_sparse_flops": 1e9}
    [row] = comparison_rows([replace(one, summary={**one.summary, **costs})])
    assert row.fairness == Estimate(0.0625, None, 1)
    assert (row.aggregation, row.flops, row.sparse_flops) == tuple(Estimate(cost, None, 1) for cost in costs.values())
    [bare] = comparison_rows([run("fedavg", 0, 0.5)])
    assert (bare.fairness, bare.aggregation, bare.flops) == (None, None, None)


def test_other_splits_are_not_compared():
    runs = [
        with_clients("fedavg", 0, 0.1, split="a"),
        with_clients("local", 0, 0.1, split="b"),
        with_clients("fedbn", 0, 0.5, split="a"),
    ]
    assert [row.incentive for row in comparison_rows(runs)] == [None, None, None]


# What diverged -------------------------------------------------------------------------------------------------------


def lost(made):
    return replace(made, summary={**made.summary, "final": {**made.summary["final"], "train.loss": None}})


def test_a_method_that_diverged_is_told_of_and_is_the_best_in_nothing():
    """All its clients fare alike and it costs as little as another one; were it not lost, it would lead everywhere."""
    runs = [
        *(with_clients("fedavg", seed, 0.5, 1.0) for seed in (0, 1)),
        *(with_clients("local", seed, 0.4, 0.6) for seed in (0, 1)),
        *(lost(replace(with_clients("fedbn", seed, 0.9, 0.9), split_hash=f"split-{seed}")) for seed in (0, 1)),
        with_clients("fedprox", 0, 0.7, 0.7),
        lost(with_clients("fedprox", 1, 0.8, 0.8)),
    ]
    for one in runs[4:6]:
        one.summary["final"]["client_after.accuracy.mean"] = 0.9
    rows = {row.label: row for row in comparison_rows(runs)}
    assert [(row.diverged, row.all_diverged) for row in rows.values()] == [
        (0, False),
        (0, False),
        (2, True),
        (1, False),
    ]
    assert rows["fedbn"].fairness is rows["fedbn"].incentive is None
    assert rows["fedprox"].fairness == Estimate(0.0, 0.0, 2)
    assert rows["fedprox"].incentive is not None
    assert max(rows.values(), key=accuracy_or_nothing) is rows["fedavg"]
    assert highest([rows["fedavg"], rows["fedbn"]])["last"] == 0.5
    assert lowest([rows["fedavg"], rows["fedbn"]]) == {}
    told = "fedbn diverged in 2 of 2 seeds, fedprox diverged in 1 of 2 seeds: the training loss of the last round is"
    assert notes(list(rows.values()))[0] == f"{told} not a finite number."
    assert not any("diverged" in sentence for sentence in notes([rows["fedavg"], rows["local"]]))


def test_a_method_that_diverged_is_not_bold_where_it_equals_the_best():
    same = [run("fedavg", 0, 0.5), lost(run("fedbn", 0, 0.5)), run("local", 0, 0.4)]
    same[2].summary.update(bytes_up=5000, seconds=9.0)
    rows = comparison_rows(same)
    page = comparison_table(rows)
    assert [line.count("number best") for line in page.split("<tr")[-3:]] == [6, 0, 0]
    shown = rich_table(rows)
    styles = [str(cell.style) for cell in list(shown.columns[1].cells)]
    assert styles == ["bold", "", ""]


def test_what_validation_samples_have_chosen_and_what_ended_early_stand_in_the_table_and_below() -> None:
    runs = [run("fedavg", seed, 0.5, rounds=30) for seed in range(3)]
    chosen = [
        replace(one, summary={**one.summary, "validated": {"client_after.accuracy.mean": 0.625}, **more})
        for one, more in zip(
            (run("fedbn", seed, 0.5, rounds=30) for seed in range(3)),
            ({"stopped": "no better", "rounds": 7}, {"rounds": 30}, {"stopped": "no better", "rounds": 9}),
            strict=True,
        )
    ]
    rows = comparison_rows([*runs, *chosen])
    assert rows[1].ended == ((7, 30), (9, 30))
    assert "Ended early: fedbn after rounds 7 to 9 of 30 with 2 of 3 seeds." in notes(rows)
    assert highest(rows)["validated"] == 0.625
    columns, [first, second] = comparison_cells(rows)
    titles = [column.title for column in columns]
    place = titles.index("Chosen")
    assert titles[place - 1 : place + 2] == ["Best round", "Chosen", "Worst 10 %"]
    assert (first[place].text, second[place].text) == ("–", "62.5 ± 0.0")  # type: ignore[union-attr]
    assert any(note.startswith("chosen: of the models that were best on the validation") for note in notes(rows))
    without = comparison_rows(runs)
    assert "Chosen" not in [column.title for column in comparison_cells(without)[0]]
    assert not any(note.startswith(("chosen", "Ended early")) for note in notes(without))
