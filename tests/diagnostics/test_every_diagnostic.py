"""Every diagnostic is held to the contract, whoever wrote it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import pytest
import torch

from fedstrata.diagnostics import Diagnostic, Measured, Need, Quantity, Seen, diagnostics
from fedstrata.stack import Stack
from fedstrata.testing import check_diagnostic
from fedstrata.testing.diagnostics import Examined

OF_MASKS = ("masks", "oracle", "zeros")
"""Diagnostics that have nothing to measure under FedAvg."""
MASKS = "top-k+transient(every=1)"
"""A method under which they have: masks in uploads, and zeros before training."""


examined = cache(Examined.of)  # many diagnostics in the same few runs


@pytest.mark.parametrize("name", diagnostics.names())
def test_a_diagnostic_keeps_the_contract_and_measures_what_it_explains(name: str) -> None:
    runs = examined(", ".join(OF_MASKS), MASKS) if name in OF_MASKS else examined("all")

    assert runs.check(name) == diagnostics.get(name).quantities.keys()


def of(quantity: Quantity, metric: str = "odd.number") -> Mapping[str, Quantity]:
    return {metric: quantity}


GOOD = Quantity("Odd", "A number that is odd.")


@pytest.fixture
def registered():
    yield lambda cls: diagnostics.register("odd")(dataclass(frozen=True)(cls))
    diagnostics.put("odd", None)


@pytest.mark.slow
def test_one_that_changes_a_model_is_caught(registered) -> None:
    class Meddling(Diagnostic):
        quantities: ClassVar[Mapping[str, Quantity]] = of(GOOD)

        def compute(self, seen: Seen, memory: Stack) -> Measured:
            seen.after["head.bias"].add_(1)
            return Measured(of_round={"odd.number": 1.0})

    registered(Meddling)
    with pytest.raises(AssertionError, match="not the same beside it"):
        check_diagnostic("odd")


@pytest.mark.slow
def test_one_that_counts_outside_of_its_memory_is_caught(registered) -> None:
    class Counting(Diagnostic):
        quantities: ClassVar[Mapping[str, Quantity]] = of(GOOD)
        count: ClassVar[list[int]] = []

        def compute(self, seen: Seen, memory: Stack) -> Measured:
            self.count.append(1)
            return Measured(of_round={"odd.number": len(self.count)})

    registered(Counting)
    with pytest.raises(AssertionError, match="a run that was resumed tells"):
        check_diagnostic("odd")


def test_one_that_measures_what_it_does_not_explain_is_caught(registered) -> None:
    class Silent(Diagnostic):
        quantities: ClassVar[Mapping[str, Quantity]] = of(GOOD)

        def compute(self, seen: Seen, memory: Stack) -> Measured:
            return Measured(of_round={"odd.other": 1.0})

    registered(Silent)
    with pytest.raises(AssertionError, match=r"measures 'odd\.other', which its 'quantities' do not explain"):
        check_diagnostic("odd")


@pytest.mark.slow
def test_a_matrix_of_clients_that_is_not_declared_is_caught(registered) -> None:
    class Square(Diagnostic):
        quantities: ClassVar[Mapping[str, Quantity]] = of(GOOD)

        def compute(self, seen: Seen, memory: Stack) -> Measured:
            return Measured(clients_in_layers={"odd.number": {"": torch.eye(len(seen.participants))}})

    registered(Square)
    with pytest.raises(AssertionError, match="pairs=True"):
        check_diagnostic("odd")


@pytest.mark.slow
def test_one_sees_what_it_asks_for_and_counts_in_its_memory(registered) -> None:
    class Curious(Diagnostic):
        needs: ClassVar[frozenset[Need]] = frozenset({Need.UPLOADS})
        quantities: ClassVar[Mapping[str, Quantity]] = of(GOOD)

        def update(self, seen: Seen, memory: Stack) -> Stack:
            return Stack(count=memory.get("count", torch.zeros(())) + 1)

        def compute(self, seen: Seen, memory: Stack) -> Measured:
            assert seen.uploads.tensors["head.bias"].shape == (len(seen.participants), 10)
            assert [seen.received, seen.started, seen.trained, seen.client_memory, seen.probe] == [{}, {}, {}, {}, None]
            assert memory["count"] == seen.round
            return Measured(of_round={"odd.number": memory["count"]})

    registered(Curious)

    assert check_diagnostic("odd") == {"odd.number"}
