"""Watching other people's training loops: the numbers are those of a run that does the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn

from fedstrata.diagnostics import Diagnostic, Measured, Need, Quantity, Seen, Watch, diagnostics
from fedstrata.errors import FedStrataError
from fedstrata.stack import Stack
from fedstrata.testing.world import prepare

WATCHED = "inertia+drift"
SEEN: list[Seen] = []


@pytest.fixture(autouse=True)
def keeping() -> Iterator[None]:
    """Register a diagnostic that keeps all that it sees, outside of its memory as none should."""

    @diagnostics.register("keeping")
    @dataclass(frozen=True)
    class Keeping(Diagnostic):
        needs: ClassVar[frozenset[Need]] = frozenset({Need.MODELS})
        quantities: ClassVar[Mapping[str, Quantity]] = {"keeping.nothing": Quantity("Nothing", "Nothing at all.")}

        def compute(self, seen: Seen, memory: Stack) -> Measured:
            SEEN.append(seen)
            return Measured()

    yield
    SEEN.clear()
    diagnostics.put("keeping", None)


def test_a_loop_that_does_what_a_run_does_has_its_numbers() -> None:
    driver = prepare("fedavg", "stacked", diagnose=f"{WATCHED}+keeping", rounds=2, epochs=1, participation=0.6)
    driver.run()
    watch, rows = Watch(driver.setting.layers, WATCHED, rounds=2), []
    for seen in SEEN:
        clients = [{name: stack[row] for name, stack in seen.trained.items()} for row in range(len(seen.participants))]
        rows += watch.round(
            before=seen.before,
            after=seen.after,
            clients=clients,
            sizes=seen.sizes.tolist(),
            participants=seen.participants,
        )
    tables = driver.metrics.to_tables()
    for table in ("layers", "diagnostics"):
        told = [row for row in tables[table].to_pylist() if row["metric"] != "keeping.nothing"]
        assert told
        for row in told:
            [own] = (one["value"] for one in rows if _place(one) == _place(row))
            assert own == pytest.approx(row["value"], rel=1e-9, abs=1e-12), row


def _place(row: Mapping[str, object]) -> tuple[object, ...]:
    """Tell what a number belongs to; in tables, what it does not belong to is -1 or empty."""
    return (
        row["round"],
        row["metric"],
        row["layer"] or None,
        *(None if row.get(name, -1) in (-1, None) else row[name] for name in ("client", "other")),
    )


def test_what_is_missing_is_said() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    after = model.state_dict()
    with pytest.raises(FedStrataError, match="give the input_shape of one sample"):
        Watch(model)
    with pytest.raises(FedStrataError, match=r"the clients' samples, which a probe=... would have to offer"):
        Watch(model, "norms", input_shape=(4,))
    with pytest.raises(FedStrataError, match=r"looks at the clients' models; give clients=\[...\]"):
        Watch(model, "drift", input_shape=(4,)).round(after=after)
    with pytest.raises(FedStrataError, match="with which model the first round began"):
        Watch(Watch(model, input_shape=(4,)).layers).round(after=after)
    with pytest.raises(FedStrataError, match="There are 1 clients; give as many sizes"):
        Watch(model, "drift", input_shape=(4,)).round(after=after, clients=[model], sizes=[1, 2])


def test_models_may_go_on_changing_after_a_round_was_seen() -> None:
    model = nn.Sequential(nn.Linear(4, 2))
    watch = Watch(model, input_shape=(4,), reference_round=1)
    watch.round(after=model)
    with torch.no_grad():
        model[0].weight.mul_(-1)
    told = {row["metric"]: row["value"] for row in watch.round(after=model)}

    assert told["inertia.step"] == pytest.approx(-1)
    assert told["cosine"] == pytest.approx(-1)
