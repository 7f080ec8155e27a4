"""Zeros that fall before local training, and come back in it."""

from __future__ import annotations

import math

import pytest
import torch
from rounds_by_hand import LAYERS, drawn, measured, seen

from fedstrata.diagnostics.zeros import Zeros
from fedstrata.methods.contract.composition import Method


def test_by_hand():
    """In layer 2 client 0 zeroes 3 and 4 and gets 1 back, of 5; client 1 zeroes 2 of (2, 0) and gets 1 back, of 2."""
    received = drawn(2) | {"2.weight": torch.tensor([[[3.0, 4.0]], [[2.0, 0.0]]])}
    started = received | {"2.weight": torch.zeros(2, 1, 2)}
    trained = drawn(2, seed=1) | {"2.weight": torch.tensor([[[1.0, 0.0]], [[1.0, 7.0]]])}
    found = measured(Zeros(), seen(drawn(2), received=received, started=started, trained=trained))
    assert {layer: float(part) for layer, part in found.layers["zeros.fell"].items()} == {"0": 0, "2": 0.75}
    assert found.layers["zeros.returned"]["2"] == 0.75
    assert float(found.layers["zeros.regrown"]["2"]) == pytest.approx((1 / 5 + 1 / 2) / 2)
    assert found.layers["zeros.returned"]["0"].isnan(), "nothing fell there that could come back"
    assert found.clients["zeros.fell"].tolist() == pytest.approx([2 / 6, 1 / 6])
    assert {*found.layers, *found.clients} == set(Zeros.quantities)


def test_a_round_without_an_event_has_no_zeros():
    model = drawn(3)
    found = measured(Zeros(), seen(model, received=model, started=model, trained=drawn(3, seed=1)))
    assert float(found.of_round["zeros.fell"]) == 0
    assert math.isnan(found.of_round["zeros.returned"])


def test_who_zeroes_nothing_is_told_so():
    assert "put no weights to zero" in str(Zeros().unfit(Method.make("fedbn+fedprox"), LAYERS))
    assert Zeros().unfit(Method.make("lips"), LAYERS) is None
