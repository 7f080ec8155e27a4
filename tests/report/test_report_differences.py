"""Two sides beside each other, number by number."""

import pytest
from made_up_runs import MakeRun

from fedstrata.report import read_run
from fedstrata.report.differences import Number, as_data, differences, numbers_of, page_data
from fedstrata.report.groups import group_runs
from fedstrata.significance import Estimate


def test_every_number_of_two_summaries_has_its_difference(make_run: MakeRun) -> None:
    runs = [read_run(make_run("a", epochs=2)), read_run(make_run("b", method="fedbn", personal=True))]
    first, second = group_runs(runs)
    found = as_data(differences(first, second))
    assert (found["first"], found["second"]) == (first.label, second.label)
    assert found["settings"] == {
        "method": {"first": "fedavg", "second": "fedbn"},
        "epochs": {"first": "2", "second": str(runs[1].experiment["epochs"])},
    }
    finals = [run.summary["final"] for run in runs]
    for metric in finals[0].keys() & finals[1].keys():
        told = found["numbers"][f"final.{metric}"]
        assert told["difference"] == pytest.approx(finals[1][metric] - finals[0][metric], abs=1e-12)
    only_here = found["numbers"]["final.global.accuracy"]
    assert (only_here["second"], only_here["difference"]) == (None, None)
    assert found["numbers"]["bytes_up"]["first"]["mean"] == runs[0].summary["bytes_up"]
    assert next(iter(found["numbers"])) == "final.client_after.accuracy.mean"


def test_seeds_of_a_side_are_averaged(make_run: MakeRun) -> None:
    runs = [read_run(make_run(f"{seed}", seed=seed)) for seed in (0, 1)]
    (group,) = group_runs(runs)
    number, value = next(iter(numbers_of(group).items()))
    own = [run.summary["final"]["client_after.accuracy.mean"] for run in runs]
    assert number.kind == "percent"
    assert value == Estimate(pytest.approx(sum(own) / 2), pytest.approx(abs(own[0] - own[1]) / 2**0.5), 2)


@pytest.mark.parametrize(
    ("kind", "first", "second", "written", "difference"),
    [
        ("percent", 0.5, 0.625, "62.50 %", "+12.50"),
        ("bytes", 2e6, 1.5e6, "1.50 MB", "−500 kB"),
        ("seconds", 4.0, 6.0, "6.0 s", "+2.0 s"),
        ("number", 15_420.0, 15_420.0, "15,420", "0"),
        ("number", 0.25, 0.125, "0.125", "−0.125"),
        ("number", 1.0, float("nan"), "NaN", "–"),
    ],
)
def test_numbers_and_differences_as_people_read_them(
    kind: str, first: float, second: float, written: str, difference: str
) -> None:
    number = Number("name", "title", kind)
    sides = Estimate(first, None, 1), Estimate(second, None, 1)
    assert number.write(sides[1]) == written
    assert number.write_difference(*sides) == difference
    assert number.write_difference(sides[0], None) == "–"


def test_a_page_holds_what_any_two_need(make_run: MakeRun) -> None:
    groups = group_runs([read_run(make_run(method, method=method)) for method in ("fedavg", "fedbn", "local")])
    held = page_data(groups)
    assert [method["label"] for method in held["methods"]] == ["fedavg", "fedbn", "local"]
    assert {len(method["texts"]) for method in held["methods"]} == {len(held["numbers"])}
    assert held["methods"][1]["settings"] == {"method": "fedbn"}
