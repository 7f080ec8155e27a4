"""What is called while a run goes on sees everything and changes nothing, but for the end of the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fedstrata
from fedstrata import Callback, Experiment, FedStrataError, FedStrataWarning, RoundView, StopRun
from fedstrata.callbacks import HOOKS, Callbacks, as_callback, callbacks
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder

pytestmark = pytest.mark.usefixtures("fresh_imports")

NO_TIME = {"seconds": 0, "aggregation_seconds": 0}
TINY = Experiment(
    model="mlp(hidden=8)", clients=3, rounds=5, epochs=1, engine="stacked", evaluate_every=2, partition="iid"
)
WATCH = """
from pathlib import Path
from fedstrata.callbacks import Callback, StopRun, callbacks

@callbacks.register("watch")
class Watch(Callback):
    def on_round(self, view):
        with Path("seen.txt").open("a") as file:
            file.write(f"{view.method} {view.round} {len(view.model)}\\n")
"""


class Log(Callback):
    """Writes down what it sees."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.views: list[RoundView] = []
        self.summary: Any = None

    def on_round(self, view: RoundView) -> None:
        self.calls.append(("round", view.round))
        self.views.append(view)

    def on_evaluate(self, view: RoundView) -> None:
        self.calls.append(("evaluate", view.round))

    def on_end(self, view: RoundView, summary: Any) -> None:
        self.calls.append(("end", view.round))
        self.summary = summary


class StopAt(Callback):
    def __init__(self, round: int, reason: str = "it is good enough") -> None:
        self.round, self.reason = round, reason

    def on_round(self, view: RoundView) -> None:
        if view.round == self.round:
            raise StopRun(self.reason)


def test_hooks_are_called_in_the_order_of_the_run() -> None:
    log, rounds = Log(), []
    result = fedstrata.run(TINY, callbacks=[log, lambda view: rounds.append(view.round)])
    assert rounds == [1, 2, 3, 4, 5]
    assert log.calls == [
        ("round", 1), ("round", 2), ("evaluate", 2), ("round", 3), ("round", 4), ("evaluate", 4),
        ("round", 5), ("evaluate", 5), ("end", 5),
    ]  # fmt: skip
    assert log.summary == result.summary
    first, second = log.views[:2]
    assert (first.method, first.seed, first.rounds, first.evaluated) == ("fedavg", 0, 5, False)
    assert first.metrics["train.loss"] == result.metrics.of_round(1)["train.loss"]
    assert "client_after.accuracy.mean" not in first.metrics
    assert second.metrics == result.metrics.of_round(2)
    assert repr(second).startswith("RoundView(fedavg, seed 0, round 2 of 5, train.loss ")


def test_the_model_is_the_one_that_is_tested_and_a_copy() -> None:
    models: list[dict[str, torch.Tensor]] = []

    def spoil(view: RoundView) -> None:
        models.append({name: tensor.clone() for name, tensor in view.model.items()})
        for tensor in view.model.values():
            tensor.zero_()
        with pytest.raises(TypeError):
            view.metrics["train.loss"] = 0.0  # type: ignore[index]

    class SpoilTheEnd(Callback):
        def on_end(self, view: RoundView, summary: Any) -> None:
            summary["final"].clear()

    watched, alone = fedstrata.run(TINY, callbacks=[spoil, SpoilTheEnd()]), fedstrata.run(TINY)
    assert {**watched.summary, **NO_TIME} == {**alone.summary, **NO_TIME}
    assert watched.metrics.to_tables() == alone.metrics.to_tables()
    for name, tensor in alone.model.items():
        assert torch.equal(models[-1][name], tensor)
        assert not torch.equal(models[0][name], tensor)


def test_a_model_cannot_be_had_when_its_round_is_over() -> None:
    log = Log()
    fedstrata.run(TINY, rounds=2, callbacks=[log])
    assert log.views[1].model
    with pytest.raises(FedStrataError, match="The model of round 1 is gone, the run has come to round 2"):
        log.views[0].model  # noqa: B018
    with pytest.raises(FedStrataError, match="without models"):
        RoundView("fedavg", 0, 1, 1, 0.0, {}).model  # noqa: B018


def test_models_of_a_round_are_ready_to_use_whatever_validation_has_chosen() -> None:
    seen: list[tuple[int, dict[str, torch.Tensor], float]] = []

    def watch(view: RoundView) -> None:
        whole, own = view.global_model(), view.client_model(0)
        assert whole.predict(torch.rand(3, 1, 8, 8)).shape == (3,)
        assert own.card.origin["round"] == view.round
        assert all(torch.equal(tensor, view.model[name]) for name, tensor in whole.network.named_parameters())
        seen.append((view.round, own.plain_state_dict(), view.metrics["global.accuracy"]))
        assert whole.card.metrics["accuracy"] == view.metrics["global.accuracy"]

    experiment = TINY.with_changes({"rounds": 3, "validation_fraction": 0.2, "evaluate_every": 1})
    result = fedstrata.run(experiment, callbacks=[watch])
    assert [round for round, _, _ in seen] == [1, 2, 3]
    final = result.client_model(0, last=True).plain_state_dict()
    assert all(torch.equal(tensor, final[name]) for name, tensor in seen[-1][1].items())


def test_a_callback_ends_a_run_which_is_then_finished(tmp_path: Path) -> None:
    log = Log()
    result = fedstrata.run(TINY, out=tmp_path / "a", callbacks=[StopAt(3), log])
    assert log.calls[-2:] == [("round", 3), ("end", 3)]
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert (summary["stopped"], summary["rounds"]) == ("it is good enough", 3)
    assert result.summary["stopped"] == "it is good enough"
    # Round 3 was not to be evaluated, but a run ends with an evaluation.
    assert result.metrics.series("client_after.accuracy.mean")[0].tolist() == [2, 3]
    assert RunFolder.open(tmp_path / "a").finished
    with pytest.raises(FedStrataError, match="finished already"):
        fedstrata.resume(tmp_path / "a")
    as_long = fedstrata.run(TINY, rounds=3)
    assert as_long.summary["final"]["global.accuracy"] == result.summary["final"]["global.accuracy"]
    assert "stopped" not in as_long.summary


def test_a_run_that_ends_early_is_adapted_as_after_its_last_round() -> None:
    result = fedstrata.run(TINY, method="fedavg-ft", callbacks=[StopAt(2)])
    assert result.metrics.series("client_adapted.accuracy.mean")[0].tolist() == [2]
    assert result.metrics.series("client_after.accuracy.mean")[0].tolist() == [2]
    assert "accuracy" in repr(result)
    assert "(stopped early)" in repr(result)


def test_stopping_with_the_last_round_is_no_stop() -> None:
    assert "stopped" not in fedstrata.run(TINY, rounds=2, callbacks=[StopAt(2)]).summary


def test_a_stop_without_a_reason_still_says_that_there_was_one() -> None:
    assert fedstrata.run(TINY, callbacks=[StopAt(1, "")]).summary["stopped"] == "a callback asked for it"


def test_a_run_that_was_killed_at_its_early_end_still_ends_there(tmp_path: Path, monkeypatch: Any) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Driver, "summary", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fedstrata.run(TINY, out=tmp_path / "a", callbacks=[StopAt(3)])
    again, whole = fedstrata.resume(tmp_path / "a"), fedstrata.run(TINY, callbacks=[StopAt(3)])
    assert {**again.summary, **NO_TIME} == {**whole.summary, **NO_TIME}
    assert again.metrics.to_tables() == whole.metrics.to_tables()


def test_an_error_of_a_callback_comes_through_as_it_is(tmp_path: Path) -> None:
    class OwnError(Exception):
        pass

    def fail(view: RoundView) -> None:
        if view.round == 2:
            raise OwnError

    with pytest.raises(OwnError):
        fedstrata.run(TINY, out=tmp_path / "a", checkpoint_every=1, callbacks=[fail])
    assert fedstrata.resume(tmp_path / "a").summary["rounds"] == 5


class Misspelt(Callback):
    def on_rounds(self, view: RoundView) -> None: ...


class Squeezed(Callback):
    def onEnd(self, view: RoundView) -> None: ...  # noqa: N802


class Unknown(Callback):
    def on_batch_begin(self, view: RoundView) -> None: ...


class TooFew(Callback):
    def on_end(self, view: RoundView) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (Misspelt(), "Misspelt defines 'on_rounds', .* did you mean 'on_round'"),
        (Squeezed(), "Squeezed defines 'onEnd', .* did you mean 'on_end'"),
        (Unknown(), "Unknown defines 'on_batch_begin', which is no hook"),
        (TooFew(), r"'on_end' of TooFew takes \(self, view\); it is called with \(self, view, summary\)"),
        (Log, r"The callback Log is a class; give an object of it: Log\(\)"),
        (None, r"callbacks takes a list: callbacks=\[Log\(...\)\]"),
        (3, "3 is no callback: it has none of on_round, on_evaluate, on_end"),
    ],
)
def test_what_would_not_be_called_is_refused_before_anything_runs(given: object, said: str, tmp_path: Path) -> None:
    with pytest.raises(FedStrataError, match=said):
        fedstrata.run(TINY, out=tmp_path / "a", callbacks=Log() if given is None else [given])  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()


def test_any_object_with_a_hook_is_a_callback() -> None:
    class Plain:
        rounds: list[int] = []  # noqa: RUF012

        def on_evaluate(self, view: RoundView) -> None:
            self.rounds.append(view.round)

    fedstrata.run(TINY, callbacks=[Plain()])
    assert Plain.rounds == [2, 4, 5]
    assert set(HOOKS) == {"on_round", "on_evaluate", "on_end"}
    assert list(Callbacks([Plain()])) != []
    assert isinstance(as_callback(print), Callback)


def test_callbacks_of_an_imported_file_are_called_also_when_the_run_is_resumed(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("watch.py").write_text(WATCH)

    def fail(view: RoundView) -> None:
        if view.round == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(TINY, imports=["watch.py"], out="a", checkpoint_every=1, callbacks=[fail])
    fedstrata.resume("a")
    seen = Path("seen.txt").read_text().splitlines()
    assert [line.split()[1] for line in seen] == ["1", "2", "2", "3", "4", "5"]
    Path("seen.txt").unlink()
    fedstrata.run(TINY, rounds=1)
    assert not Path("seen.txt").exists()


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("def on_round(self, view):\n        view.nothing", "'watch' failed in on_round of round 1: AttributeError"),
        ("def on_rund(self, view): ...", "defines 'on_rund', which is no hook of a callback"),
        ("def __init__(self, path): ...", "cannot be made without arguments: missing a required argument: 'path'"),
    ],
)
def test_what_is_wrong_with_an_imported_callback_is_a_sentence(tmp_path: Path, body: str, said: str) -> None:
    (tmp_path / "watch.py").write_text(WATCH[: WATCH.index("    def")] + f"    {body}\n")
    with pytest.raises(FedStrataError, match=said):
        fedstrata.run(TINY, imports=[tmp_path / "watch.py"])


def test_a_callback_that_is_registered_where_nobody_imports_it_gets_a_word() -> None:
    with pytest.warns(FedStrataWarning, match=r"give an object of its class to callbacks=\[...\]"):
        callbacks.register("lost")(Log)
    callbacks.put("lost", None)
