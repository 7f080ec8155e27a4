"""The calls that most people need, from Python: what they take, what they say, and how results show themselves."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from torch import nn

import fedstrata
from fedstrata import Experiment, FedStrataError
from fedstrata.data.datasets.digits import Digits
from fedstrata.methods import Facts, Part
from fedstrata.methods.fedbn import FedBN
from fedstrata.runs.metrics import MetricLog, TimingLog

TINY: dict[str, Any] = {
    "model": "mlp(hidden=8)", "clients": 3, "rounds": 2, "epochs": 1, "engine": "stacked", "partition": "iid",
}  # fmt: skip


@dataclass(frozen=True)
class Shorter(Part):
    """A method that nobody registered."""

    facts: ClassVar[Facts] = Facts("own", "nobody")
    name: ClassVar[str] = "shorter"
    kind: ClassVar[str] = "method"


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Count how often the digits are loaded."""
    counted: list[object] = []
    original = Digits.load

    def load(self: Digits, root: Path | None = None) -> Any:
        counted.append(self)
        return original(self, root)

    monkeypatch.setattr(Digits, "load", load)
    return counted


@pytest.mark.parametrize(
    ("arguments", "keywords", "said"),
    [
        (("fedbn",), {}, r"'fedbn' is no experiment but a text; say what it names: run\(method='fedbn'\)"),
        (("fedbn+lips(every=1)",), {}, r"run\(method='fedbn\+lips\(every=1\)'\)"),
        (("digits",), {}, r"run\(data='digits'\)"),
        (("resnet8",), {}, r"run\(model='resnet8'\)"),
        (("whatever",), {}, r"say what it names: run\(method='fedbn'\)"),
        (("a.toml",), {}, r"run\(Experiment.read\(Path\('a.toml'\)\)\)"),
        (({"rounds": 2},), {}, r"run\(\*\*...\), or Experiment"),
        (({"rome": ([[1.0]], [0])},), {}, r"is data, not an experiment; write run\(data=...\)"),
        ((FedBN(),), {}, r"is a method, not an experiment; write run\(method=...\)"),
        ((3,), {}, "int is no experiment; give an Experiment"),
        ((), {"method": ["fedbn", "lips"]}, r"not a list: join its parts with '\+', such as method='fedbn\+lips'"),
        ((), {"method": FedBN}, r"FedBN is a class; give an object of it as the method: FedBN\(\)"),
        ((), {"method": 3}, "int is no method; give a text such as"),
        ((), {"lr": 0.1}, "There is no keyword of fedstrata.run called 'lr'. Did you mean 'learning_rate'"),
        ((), {"num_clients": 3}, "Did you mean 'clients'"),
        ((), {"roundz": 3}, "Did you mean 'rounds'"),
        ((), {"learning_rate": -1.0}, "'learning_rate' of the optimiser 'sgd' takes: more than 0"),
        ((), {"learning_rate": "fast"}, "it takes a number"),
        ((), {"out": 3}, "3 is no name of a folder; give a text or a Path, such as 'runs/first'"),
    ],
)
def test_a_mistake_is_told_in_a_sentence(arguments: tuple[Any, ...], keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(FedStrataError, match=said):
        fedstrata.run(*arguments, **keywords)


def test_what_names_no_folder_is_told_in_a_sentence() -> None:
    for ask in (fedstrata.resume, fedstrata.load, lambda given: fedstrata.extend(given, 5)):
        with pytest.raises(FedStrataError, match="3 is no name of a folder"):
            ask(3)  # type: ignore[no-untyped-call, arg-type]


def test_the_learning_rate_is_changed_inside_the_optimiser() -> None:
    result = fedstrata.run(**TINY, optimiser="sgd(momentum=0.5)", learning_rate=0.25)
    assert result.experiment.optimiser == "sgd(learning_rate=0.25, momentum=0.5)"
    as_text = fedstrata.run(**TINY, optimiser="sgd(learning_rate=0.25, momentum=0.5)")
    assert result.metrics.to_tables() == as_text.metrics.to_tables()
    with pytest.raises(FedStrataError, match=r"optimiser = 'sgd\(learning_rate=0.5\)'"):
        Experiment.from_mapping({"learning_rate": 0.5})


def test_a_module_that_counts_as_empty_is_still_the_model() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(64, 10)

        def __len__(self) -> int:
            return 0

        def forward(self, inputs: Any) -> Any:
            return self.head(inputs.flatten(1))

    result = fedstrata.run(**{**TINY, "model": Empty(), "rounds": 1})
    assert result.experiment.model == "python:Empty"
    assert set(result.model) == {"head.weight", "head.bias"}


def test_everything_shows_itself_in_a_line(tmp_path: Path) -> None:
    result = fedstrata.run(**TINY, out=tmp_path / "a")
    accuracy = result.summary["final"]["client_after.accuracy.mean"]
    assert repr(result) == (
        f"Result(fedavg on digits, 3 clients, 2 rounds: accuracy {100 * accuracy:.1f} %, in {tmp_path / 'a'})"
    )
    data, split = fedstrata.from_clients(
        {"rome": (np.zeros((6, 2), np.float32), [0, 1] * 3), "oslo": (np.ones((4, 2), np.float32), [0, 1] * 2)}
    )
    assert repr(data).startswith("Dataset(")
    assert repr(data).endswith("[2] float32, 2 classes, 2 sites)")
    assert repr(split).startswith("Split(2 clients, ")
    assert repr(split).endswith(f"hash {split.hash})")
    assert repr(Experiment(method="fedbn", rounds=2)) == "Experiment(method='fedbn', rounds=2)"
    assert repr(Experiment()) == "Experiment()"
    assert repr(result.metrics).startswith("MetricLog(")
    assert repr(result.metrics).endswith("up to round 2; see series, latest and to_tables)")
    assert repr(MetricLog()).startswith("MetricLog(0 metrics, up to round 0")
    assert repr(TimingLog()) == "TimingLog()"
    for shown in (result, data, split, result.metrics):
        assert len(repr(shown)) < 250


def test_a_notebook_draws_a_result() -> None:
    html = fedstrata.run(**TINY)._repr_html_()
    assert html.count("<tr>") >= 5
    assert "Own model after aggregation" in html
    assert "tensor" not in html


def test_methods_are_compared_as_on_the_command_line(loads: list[object]) -> None:
    comparison = fedstrata.compare(["fedavg", "local", "fedavg"], **TINY, seeds=2)
    assert len(loads) == 1
    assert [(one.summary["method"], one.summary["seed"]) for one in comparison.results] == [
        ("fedavg", 0), ("local", 0), ("fedavg", 1), ("local", 1),
    ]  # fmt: skip
    alone = [fedstrata.run(**TINY, method="local", seed=seed) for seed in (0, 1)]
    for seed in (0, 1):
        assert comparison.result("local", seed).metrics.to_tables() == alone[seed].metrics.to_tables()
    mean = np.mean([one.summary["final"]["client_after.accuracy.mean"] for one in alone])
    reference, row = comparison.to_rows()
    assert (row["method"], row["seeds"], row["bytes_up"]) == ("local", 2, 0)
    assert row["accuracy"] == pytest.approx(mean)
    assert row["difference"] == pytest.approx(row["accuracy"] - reference["accuracy"])
    assert reference["difference"] is None
    table = comparison.table()
    assert [line.split()[0] for line in table.splitlines()[-2:]] == ["fedavg", "local"]
    assert str(comparison).startswith(table)
    assert "Mean ± sample standard deviation over 2 seeds." in str(comparison)
    assert repr(comparison).startswith("Comparison(2 methods, 2 seeds, on digits; best: ")
    assert comparison._repr_html_().count("<tr>") == 4
    assert "<button" not in comparison._repr_html_()
    with pytest.raises(FedStrataError, match="Did you mean 'fedavg'"):
        comparison.result("fedavgg")
    with pytest.raises(FedStrataError, match="'local' was not run with the seed 7, but with 0, 1"):
        comparison.result("local", 7)


def test_a_comparison_with_a_folder_does_nothing_twice(tmp_path: Path, loads: list[object]) -> None:
    seen: list[str] = []
    first = fedstrata.compare("fedavg", **TINY, out=tmp_path)
    again = fedstrata.compare("fedavg, local", **TINY, out=tmp_path, callbacks=[lambda view: seen.append(view.method)])
    assert seen == ["local", "local"]
    assert again.result("fedavg").metrics.to_tables() == first.result("fedavg").metrics.to_tables()
    assert again.to_rows()[0] == pytest.approx(first.to_rows()[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fedavg-seed0", "local-seed0", "order.json"]
    assert len(loads) == 2


def test_objects_are_compared_too(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    data = {name: (generator.normal(size=(20, 4)).astype(np.float32), [0, 1] * 10) for name in ("rome", "oslo")}
    settings: dict[str, Any] = {"model": nn.Linear(4, 2), "rounds": 1, "epochs": 1}
    comparison = fedstrata.compare([Shorter(), "fedavg"], data=data, **settings, out=tmp_path)
    assert [row["method"] for row in comparison.to_rows()] == ["shorter", "fedavg"]
    again = fedstrata.compare([Shorter(), "fedavg"], data=data, **settings, out=tmp_path)
    assert again.to_rows() == comparison.to_rows()


def test_a_callback_ends_one_run_of_a_comparison() -> None:
    def stop(view: fedstrata.RoundView) -> None:
        if view.method == "fedavg":
            raise fedstrata.StopRun("enough")

    comparison = fedstrata.compare(["fedavg", "local"], **TINY, callbacks=[stop])
    assert [one.summary["rounds"] for one in comparison.results] == [1, 2]


@pytest.mark.parametrize(
    ("methods", "keywords", "said"),
    [
        ([], {}, "There is no method to compare"),
        (["fedavg"], {"seeds": 0}, "use at least 1"),
        (["fedavg"], {"seeds": "x"}, "'x' is no number of seeds"),
        (["fedavg"], {"out": 3}, "3 is no name of a folder"),
        (["fedavg"], {"method": "local"}, "A comparison takes its methods first"),
        (["fedavg"], {"lr": 1}, "There is no keyword of fedstrata.compare called 'lr'. Did you mean 'learning_rate'"),
        (["fedavgg"], {}, "Did you mean 'fedavg'"),
        ([FedBN], {}, "FedBN is a class"),
    ],
)
def test_a_mistake_in_a_comparison_is_told(methods: Any, keywords: dict[str, Any], said: str) -> None:
    with pytest.raises(FedStrataError, match=said):
        fedstrata.compare(methods, **{**TINY, **keywords})


def test_progress_is_shown_when_it_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    fedstrata.run(**TINY)
    assert capsys.readouterr() == ("", "")
    fedstrata.run(**TINY, progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1].startswith("fedavg, seed 0: accuracy ")
    fedstrata.compare(["fedavg", "local"], **TINY, progress=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if "accuracy" in line]
    assert [line.partition(":")[0] for line in lines] == ["fedavg, seed 0", "local, seed 0"]


def test_scikit_learn_is_not_imported_before_somebody_wants_its_digits() -> None:
    code = "import sys, fedstrata; fedstrata.compare; assert 'sklearn' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[1], check=True, timeout=120)
