"""What a worker tells, and when it does not begin."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Container
from typing import Any

import pytest

from fedstrata.callbacks import RoundView
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.runs.signals import Interrupted, ask_to_stop, noted_stops, stop_requests
from fedstrata.side_by_side import worker
from fedstrata.side_by_side.failures import as_error, describe
from fedstrata.side_by_side.worker import Told, _Printed, _telling, as_message


class Heard:
    """A connection whose other end is here."""

    def __init__(self) -> None:
        self.messages: list[Any] = []

    def tell(self, **message: Any) -> None:
        self.messages.append(json.loads(json.dumps(message)))


def test_a_round_comes_back_as_displays_show_it() -> None:
    values = {"client_after.accuracy.mean": 0.1, "client_adapted.accuracy.mean": math.nan, "train.loss": 2.0}
    view = RoundView("fedavg", 3, 2, 9, 0.25, values, True)
    again = RoundView(**json.loads(json.dumps(as_message(view))))
    assert (again.method, again.seed, again.round, again.rounds, again.seconds) == ("fedavg", 3, 2, 9, 0.25)
    assert again.metrics["client_after.accuracy.mean"] == 0.1
    assert math.isnan(again.metrics["client_adapted.accuracy.mean"])
    assert "train.loss" not in again.metrics


def test_what_is_printed_and_warned_about_is_told_line_by_line() -> None:
    heard = Heard()
    with _telling(heard):  # type: ignore[arg-type]
        print("one\ntwo", end="")
        print("", "three")
        warnings.warn("Mind the gap.", FedStrataWarning, stacklevel=1)
        warnings.warn("of another package", DeprecationWarning, stacklevel=1)
    assert heard.messages == [{"printed": "one"}, {"printed": "two three"}, {"warning": "Mind the gap."}]
    assert _Printed(heard).write("half") == 4  # type: ignore[arg-type]


def test_who_is_asked_to_stop_before_the_first_round_does_not_begin() -> None:
    heard = Heard()
    with noted_stops() as stop:
        shown = Told(heard, stop)  # type: ignore[arg-type]
        shown.show_doing("preparing")
        ask_to_stop(15)
        with pytest.raises(Interrupted) as stopped:
            shown.show_doing("choosing an engine")
        with stop_requests() as received:
            assert received == [15]
    assert (stopped.value.signal_number, stopped.value.round) == (15, 0)
    assert heard.messages == [{"doing": "preparing"}]
    with stop_requests() as received:
        assert received == []


@pytest.mark.parametrize(
    ("held", "tested_in", "told_after"),
    [(17, range(1, 9), 6), (17, {8}, 8), (17, {2}, 6), (17, (), None), (0, range(1, 9), None)],
    ids=["each round tested", "tested late", "tested early", "never tested", "no GPU"],
)
def test_what_a_run_holds_is_told_once_when_all_its_steps_were_met(
    monkeypatch: pytest.MonkeyPatch, held: int, tested_in: Container[int], told_after: int | None
) -> None:
    monkeypatch.setattr(worker, "memory_held", lambda: held)
    heard = Heard()
    shown = Told(heard, [])  # type: ignore[arg-type]
    found = []
    for round in range(1, 9):
        shown.show_round(RoundView("fedavg", 0, round, 9, 0.1, {}, round in tested_in))
        found += [(round, message["held"]) for message in heard.messages if "held" in message]
        heard.messages.clear()
    assert found == ([] if told_after is None else [(told_after, held)])


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (FedStrataError("No."), FedStrataError, "a: No."),
        (MemoryError(), FedStrataError, "a: there is not enough memory"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), FedStrataError, "a: there is not enough memory"),
        (FileNotFoundError(2, "No such file", "x"), FileNotFoundError, "No such file: 'x'"),
        (KeyError("x"), Exception, "a: KeyError: 'x'"),
    ],
    ids=["mistake", "memory", "memory of a GPU", "system", "bug"],
)
def test_errors_travel(error: Exception, kind: type[Exception], text: str) -> None:
    there = as_error("a", json.loads(json.dumps(describe(error))))
    assert isinstance(there, kind)
    assert text in str(there)
