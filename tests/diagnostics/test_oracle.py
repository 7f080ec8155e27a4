"""Masks against the oracle's."""

from __future__ import annotations

import pytest
import torch
from rounds_by_hand import LAYERS, drawn, measured, seen

from fedstrata.diagnostics.oracle import Oracle
from fedstrata.methods.contract.composition import Method


class Slopes:
    """A probe with given gradients, which notes at which weights it was asked."""

    def __init__(self, gradients):
        self.gradients_of_all = gradients

    def gradients(self, model, batch_size, all_samples):
        assert all_samples
        self.model = model
        return self.gradients_of_all


def test_by_hand():
    """Client 0 has 3 times the samples of client 1. Of layer 2 the products are 1 and 2 at client 0 and 1 and -8 at
    client 1: in the mean 1 and -1/2, so that the oracle keeps the first weight. Client 0 keeps it too, client 1 not.
    What client 1 masks counts at its initial value."""
    model = drawn(2) | {"2.weight": torch.tensor([[[1.0, 0.0]], [[0.0, 4.0]]])}
    masks = {"2.weight": torch.tensor([[[True, False]], [[False, True]]])}
    probe = Slopes(drawn(2) | {"2.weight": torch.tensor([[[1.0, 1.0]], [[0.5, -2.0]]])})
    sizes, initial = torch.tensor([3, 1]), {"2.weight": torch.tensor([[2.0, 2.0]])}
    one = seen(model, masks=masks, received=model, sizes=sizes, initial=initial, probe=probe)
    found = measured(Oracle(), one)
    assert probe.model["2.weight"].tolist() == [[[1, 2]], [[2, 4]]]
    assert found.clients["oracle.error"].tolist() == [0, 1]
    assert float(found.layers["oracle.error"]["2"]) == float(found.of_round["oracle.error"]) == 0.5


def test_masks_that_keep_all_or_nothing_have_no_error():
    masks = {"2.weight": torch.tensor([[[True, True]], [[False, False]]])}
    one = seen(drawn(2), masks=masks, received=drawn(2), probe=Slopes(drawn(2, seed=1)))
    assert measured(Oracle(), one).clients["oracle.error"].tolist() == [0, 0]


def test_training_that_diverged_does_not_end_a_run():
    wild = drawn(2) | {"2.weight": torch.full((2, 1, 2), torch.nan)}
    masks = {"2.weight": torch.tensor([[[True, False]]])}
    assert not measured(Oracle(), seen(drawn(2), masks=masks, received=drawn(2), probe=Slopes(wild))).layers


@pytest.mark.parametrize(("method", "word"), [("fedavg", "under a mask"), ("fedpm", "plain weights")])
def test_without_masks_of_weights_it_says_so(method, word):
    assert word in str(Oracle().unfit(Method.make(method), LAYERS))
    assert Oracle().unfit(Method.make("ssfl"), LAYERS) is None
