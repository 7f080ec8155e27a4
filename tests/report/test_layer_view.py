"""What the layer view draws: numbers by hand, scales, marks and the sentence above it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import write_run

from fedstrata.diagnostics import Quantity
from fedstrata.report import layer_view
from fedstrata.report.layer_findings import finding, kept_norms
from fedstrata.report.layer_scales import Scale, difference_scale, round_step, scale_of
from fedstrata.report.layer_section import reading_aid
from fedstrata.report.layer_view import COLUMNS, LayerView, bins, merged_order
from fedstrata.report.opening import read_runs
from fedstrata.report.reading import Run
from fedstrata.report.view import View

RESULTS = Path(__file__).parents[2] / "results" / "lips-cifar100"
FACTS = {
    "layers": [
        {"layer": "stem", "kind": "conv", "role": "first", "parameters": 100},
        {"layer": "stem.norm", "kind": "norm", "role": "norm", "parameters": 8, "follows": "stem"},
        {"layer": "body", "kind": "conv", "role": "middle", "parameters": 5000},
        {"layer": "head", "kind": "linear", "role": "last", "parameters": 200},
    ],
    "masked": [],
}
Noted = Mapping[str, Mapping[str, Sequence[float]]]


def run_with(path: Path, noted: Noted, facts: Mapping[str, Any] | None = None, **settings: Any) -> Run:
    """A run whose layers have these numbers: metric, layer, a number for each round from 1 on (NaN for none)."""
    write_run(path, rounds=2, clients=2, samples=120, **settings)
    (run,) = read_runs([path])
    rows = [
        (number, layer, metric, value)
        for metric, layers in noted.items()
        for layer, values in layers.items()
        for number, value in enumerate(values, 1)
        if not math.isnan(value)
    ]
    columns = zip(*rows, strict=True) if rows else ([], [], [], [])
    names = ("round", "layer", "metric", "value")
    run.__dict__["layers"] = {name: np.array(column) for name, column in zip(names, columns, strict=True)}
    run.__dict__["layer_facts"] = facts or {}
    return run


def view_of(*runs: Run) -> LayerView:
    view = View.of(runs, None)
    found = LayerView.of(view.groups, view.methods)
    assert found is not None
    return found


def test_rows_hold_the_mean_and_the_deviation_over_seeds(tmp_path: Path) -> None:
    first = run_with(tmp_path / "a", {"cosine": {"stem": [1, 0.5], "head": [0.25, math.nan]}}, seed=0)
    second = run_with(tmp_path / "b", {"cosine": {"stem": [0.5, 0.25], "head": [0.75, 0.5]}}, seed=1)
    stem, head = view_of(first, second).rows()
    assert (stem["method"], stem["metric"], stem["layer"]) == ("fedavg", "cosine", "stem")
    assert stem["values"] == [0.75, 0.375]
    assert stem["spreads"] == [0.35, 0.18]  # sqrt(2 * 0.25^2) and sqrt(2 * 0.125^2), two digits
    assert (stem["last"], stem["last_spread"]) == (0.375, 0.18)
    assert head["values"] == [0.5, 0.5]
    assert head["spreads"] == [0.35, None]


def test_where_training_diverged_the_layers_are_those_of_the_other_runs_and_rounds(tmp_path: Path) -> None:
    lost = run_with(tmp_path / "a", {"update": {"stem": [math.inf, math.inf]}}, method="fedavg")
    late = run_with(
        tmp_path / "b", {"update": {"stem": [3, math.inf]}, "cosine": {"stem": [math.inf, math.inf]}}, method="fedbn"
    )
    view = view_of(lost, late)
    assert list(view.metrics) == ["update"]
    (row,) = view.rows()
    assert (row["method"], row["values"], row["last"]) == ("fedbn", [3], 3)
    alone = View.of([lost], None)
    assert LayerView.of(alone.groups, alone.methods) is None


def test_many_rounds_are_averaged_into_columns(tmp_path: Path) -> None:
    rounds = 4 * COLUMNS
    values = np.arange(rounds, dtype=float)
    view = view_of(run_with(tmp_path / "a", {"update": {"stem": values.tolist()}}))
    metric, (row,) = view.metrics["update"], view.rows()
    assert len(metric.columns) == COLUMNS
    assert metric.columns[:2] == ((1, 4), (5, 8))
    assert metric.columns[-1] == (rounds - 3, rounds)
    assert row["values"][:3] == [1.5, 5.5, 9.5]
    assert row["last"] == float(f"{values[-1]:.3g}")
    assert metric.rounds_in_a_column == "4"


def test_bins_are_as_equal_as_can_be() -> None:
    column, columns = bins(np.array([2, 3, 5, 8, 13]), 2)
    assert column.tolist() == [0, 0, 0, 1, 1]
    assert columns == ((2, 5), (8, 13))
    assert bins(np.array([7]), 120)[1] == ((7, 7),)


def test_where_there_is_little_room_columns_are_fewer_and_metrics_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = {f"m{number}": {layer: list(range(40)) for layer in "abcde"} for number in range(4)}
    run = run_with(tmp_path / "a", noted)
    monkeypatch.setattr(layer_view, "NUMBERS", 20 * (30 + 7))
    assert {len(metric.columns) for metric in view_of(run).metrics.values()} == {30}
    monkeypatch.setattr(layer_view, "NUMBERS", 10 * (12 + 7))
    view = view_of(run)
    assert list(view.metrics) == ["m0", "m1"]
    assert view.left_out == ("m2", "m3")
    assert {len(metric.columns) for metric in view.metrics.values()} == {12}
    assert "no room here for m2, m3" in reading_aid(view, methods=1)


def test_layers_stand_in_execution_order_with_what_is_known(tmp_path: Path) -> None:
    told = run_with(tmp_path / "a", {"cosine": {"head": [1, 0.5], "stem": [1, 0.5], "body": [1, 0.5]}}, FACTS)
    view = view_of(told)
    assert view.metrics["cosine"].layers == ("stem", "body", "head")
    body = view.layers["body"]
    assert (body.kind, body.role, body.parameters, body.norm) == ("conv", "middle", 5000, False)
    assert view.layers["stem"].norm
    assert merged_order([["a", "c"], ["a", "b", "c", "d"], ["z"]]) == ["a", "b", "c", "d", "z"]


def test_an_older_run_is_drawn_with_names_only(tmp_path: Path) -> None:
    view = view_of(run_with(tmp_path / "a", {"cosine": {"stem": [1.0], "head": [1.0]}}))
    assert [(layer.name, layer.kind, layer.parameters) for layer in view.layers.values()] == [
        ("stem", "", None),
        ("head", "", None),
    ]


def test_layers_that_stay_are_frozen_or_masked_are_marked(tmp_path: Path) -> None:
    everything = {"update": {"stem": [0.1, 0.1], "stem.norm": [0.1, 0.1], "body": [0.1, 0.1], "head": [0.1, 0.1]}}
    fedavg = run_with(tmp_path / "a", everything, FACTS)
    some = {"update": {"stem": [0.1, 0.1], "body": [0.1, 0.0], "head": [0.2, math.nan]}}
    other = run_with(tmp_path / "b", some, {**FACTS, "masked": ["stem"]}, method="fedbn")
    view = view_of(fedavg, other)
    assert view.stays == {"fedavg": frozenset(), "fedbn": {"stem.norm", "head"}}
    assert view.frozen == {"fedavg": frozenset(), "fedbn": {"body"}}
    assert view.masked == {"fedavg": frozenset(), "fedbn": {"stem"}}
    marks = {(row["method"], row["layer"]): row["mark"] for row in view.rows()}
    assert marks["fedbn", "stem.norm"] == "stays at clients"
    assert marks["fedbn", "body"] == "frozen"
    assert marks["fedbn", "stem"] == "weights masked"
    assert kept_norms(view) == "Norm layers stay at the clients in fedbn."


def test_a_density_below_one_is_a_mask(tmp_path: Path) -> None:
    noted = {"density": {"stem": [1.0, 1.0], "head": [1.0, 0.5]}}
    assert view_of(run_with(tmp_path / "a", noted)).masked["fedavg"] == {"head"}


def test_the_same_layer_of_another_method_is_found_by_its_key(tmp_path: Path) -> None:
    noted = {"cosine": {"stem": [1.0], "head": [1.0]}, "update": {"stem": [1.0], "head": [1.0]}}
    view = view_of(run_with(tmp_path / "a", noted), run_with(tmp_path / "b", noted, method="fedbn"))
    keys = {(row["method"], row["metric"], row["layer"]): row["key"] for row in view.rows()}
    assert len(set(keys.values())) == 8
    for (method, metric, layer), key in keys.items():
        if method == "fedbn":
            assert key - view.stride == keys["fedavg", metric, layer]


def test_the_published_runs_tell_what_one_sees() -> None:
    names = ("fedbn-0", "fedbn-1", "lips-0", "lips-1")
    view = view_of(*read_runs([RESULTS / name for name in names]))
    said = finding(view, view.metrics["cosine"])
    # The mean of the last column of cosine.csv over the eight layers between the first and the last, and two seeds.
    expected = {}
    lines = (RESULTS / "cosine.csv").read_text().splitlines()
    for method in ("fedbn", "lips"):
        rows = [line.split(",") for line in lines if line.startswith((f"{method}-0,300,", f"{method}-1,300,"))]
        expected[method] = np.mean([[float(cell) for cell in row[3:-1]] for row in rows])
    assert said == (
        f"In fedbn the middle layers keep a cosine of {expected['fedbn']:.2f} to round 2; "
        f"in lips they come down to {expected['lips']:.2f}."
    )
    assert not view.masked["fedbn"]
    assert "stages.2.0.conv1" in view.masked["lips"]
    assert "head" not in view.masked["lips"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            {"fedavg": [0.5, 0.8], "fedbn": [0.5, 0.8]},
            "Inertia: cosine to the reference round: the middle layer ends alike in all methods, at 0.80.",
        ),
        (
            {"fedavg": [1.0, 0.9996], "fedbn": [1.0, 0.9998]},  # which both are written 1.00
            "Inertia: cosine to the reference round: the middle layer ends alike in all methods, at 1.00.",
        ),
        (
            {"fedavg": [1.0, 0.9], "fedbn": [1.0, 0.2]},
            "In fedavg the middle layer keeps a cosine of 0.90 to round 1; in fedbn it comes down to 0.20.",
        ),
        (
            {"fedavg": [1.0, 0.2]},
            "Inertia: cosine to the reference round: in fedavg, after the last round, the first layer at 1.00, the "
            "middle layer at 0.20 and the last layer at 1.00.",
        ),
    ],
)
def test_the_sentence_is_honest(tmp_path: Path, values: Mapping[str, Sequence[float]], said: str) -> None:
    runs = [
        run_with(tmp_path / method, {"cosine": {"stem": [1, 1], "body": body, "head": [1, 1]}}, FACTS, method=method)
        for method, body in values.items()
    ]
    view = view_of(*runs)
    assert finding(view, view.metrics["cosine"]) == said


BODY = {"stem": [1, 1], "head": [1, 1]}


def test_runs_of_unequal_length_are_compared_in_a_round_that_all_have(tmp_path: Path) -> None:
    short = run_with(tmp_path / "a", {"cosine": {**BODY, "body": [1, 0.9, 0.8, 0.7]}}, FACTS)
    long = run_with(tmp_path / "b", {"cosine": {**BODY, "body": [1, 0.5, 0.4, 0.3, 0.2, 0.1]}}, FACTS, method="lips")
    view = view_of(short, long)
    assert finding(view, view.metrics["cosine"]) == (
        "After round 4, the last that all runs have, in fedavg the middle layer keeps a cosine of 0.70 to round 1; "
        "in lips it comes down to 0.30."
    )
    alike = run_with(tmp_path / "c", {"cosine": {**BODY, "body": [1, 0.9, 0.8, 0.7, 0.1]}}, FACTS, method="fedbn")
    view = view_of(short, alike)
    assert finding(view, view.metrics["cosine"]).endswith(
        ": after round 4, the last that all runs have, the middle layer is alike in all methods, at 0.70."
    )


def test_in_the_reference_round_there_is_nothing_to_find(tmp_path: Path) -> None:
    runs = [
        run_with(tmp_path / method, {"cosine": {"stem": [1.0], "body": [1.0]}}, FACTS, method=method)
        for method in ("fedavg", "fedbn")
    ]
    for view in (view_of(*runs), view_of(runs[0])):
        assert finding(view, view.metrics["cosine"]) == "Inertia: cosine to the reference round"


def test_methods_that_are_not_shown_are_not_spoken_for(tmp_path: Path) -> None:
    shown = [
        run_with(tmp_path / method, {"cosine": {**BODY, "body": [1, 0.5]}}, FACTS, method=method)
        for method in ("fedavg", "fedbn")
    ]
    lost = run_with(tmp_path / "lost", {"cosine": {"body": [math.inf, math.inf]}}, FACTS, method="lips")
    view = view_of(*shown, lost)
    assert finding(view, view.metrics["cosine"]).endswith("ends alike in the methods shown, at 0.50.")


def test_only_what_was_masked_in_some_round_is_marked(tmp_path: Path) -> None:
    planned = {**FACTS, "masked": ["stem", "body"]}
    noted = {"density": {"stem": [1.0, 0.5, 1.0], "body": [1.0, 1.0, 1.0]}}
    assert view_of(run_with(tmp_path / "a", noted, planned)).masked["fedavg"] == {"stem"}
    # It masks after each second round, of which a run of two has none to come: made-up runs have two rounds.
    moved = {"update": {"stem": [0.1, 0.1], "body": [0.1, 0.1]}}
    for place, (method, masked) in enumerate(
        {
            "lips(every=2)": set(),
            "lips(every=1)": {"stem", "body"},
            "lips(every=2, schedule=released)": {"stem", "body"},
            "of-another-time(every=9)": {"stem", "body"},
        }.items()
    ):
        run = run_with(tmp_path / f"{place}", moved, planned, method=method)
        assert view_of(run).masked[method] == masked


def test_seeds_that_differ_more_than_methods_give_no_finding(tmp_path: Path) -> None:
    bodies = {("fedavg", 0): 0.2, ("fedavg", 1): 0.8, ("fedbn", 0): 0.3, ("fedbn", 1): 0.9}
    runs = [
        run_with(
            tmp_path / f"{method}{seed}",
            {"cosine": {"stem": [1, 1], "body": [1, body], "head": [1, 1]}},
            FACTS,
            method=method,
            seed=seed,
        )
        for (method, seed), body in bodies.items()
    ]
    view = view_of(*runs)
    assert "ends alike in all methods, at 0.50 to 0.60" in finding(view, view.metrics["cosine"])


def test_scales_end_at_round_numbers_and_at_bounds() -> None:
    cosine = Quantity("cosine", "", low=-1, high=1)
    assert scale_of(cosine, np.array([0.29, 0.99997])) == Scale(0.2, 1.0, diverging=True)
    assert scale_of(cosine, np.array([0.29, 0.99997])).ticks() == [0.2, 0.4, 0.6, 0.8, 1.0]
    turning = Quantity("drift", "", low=-1, high=1, centre=0)
    assert scale_of(turning, np.array([-0.1, 0.33])) == Scale(-0.4, 0.4, diverging=True)
    assert scale_of(Quantity("update", "", low=0), np.array([0.0004, 0.002, 0.31])).logarithmic
    assert scale_of(Quantity("update", "", low=0), np.array([0.1, 0.31])) == Scale(0.1, 0.4)
    assert scale_of(Quantity("nothing", ""), np.array([math.nan])) == Scale(0.0, 1.0)
    constant = scale_of(Quantity("density", "", low=0, high=1), np.array([1.0, 1.0]))
    assert constant.low < constant.high == 1
    assert round_step(0.07) == 0.1


def test_few_values_far_beyond_the_others_do_not_bleach_the_rest() -> None:
    values = np.append(np.linspace(1, 2, 200), 50.0)
    scale = scale_of(Quantity("something", ""), values)
    assert scale.clipped
    assert scale.high <= 2.5


def test_differences_have_one_scale_for_every_pair() -> None:
    tables = [np.array([[0.1, 0.9]]), np.array([[0.4, 0.2]]), np.array([[math.nan, 0.5]])]
    assert difference_scale(Scale(0, 1), tables) == Scale(-1.0, 1.0, diverging=True)  # 0.7, rounded up to steps of 0.5
    log = difference_scale(Scale(0.001, 1, logarithmic=True), [np.array([[0.01]]), np.array([[1.0]])])
    assert (log.low, log.high) == (-2.0, 2.0)  # in powers of ten


@pytest.mark.parametrize("values", [[1.0, 1.0 - 1e-15], [0.0, 0.0], [-3.0, -3.0], [1e-12, 1e-12]])
def test_values_that_hardly_differ_have_a_scale_with_two_ends(values: list[float]) -> None:
    for quantity in (Quantity("a", "b"), Quantity("a", "b", low=-1.0, high=1.0), Quantity("a", "b", logarithmic=True)):
        scale = scale_of(quantity, np.array(values))
        assert scale.low < scale.high
        assert len(scale.ticks()) >= 2
