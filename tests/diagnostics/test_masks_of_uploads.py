"""Masks in uploads: density, overlap of clients, steadiness over rounds."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds_by_hand import LAYERS, SHAPES, drawn, measured, seen

from fedstrata.diagnostics.masks import Masks, between_clients, one_by_one, upload_masks
from fedstrata.errors import FedStrataWarning
from fedstrata.functional import overlaps
from fedstrata.methods.contract.composition import Method
from fedstrata.methods.contract.views import Message

FIRST = {
    "0.weight": torch.tensor([[[1, 1], [0, 0]], [[1, 0], [1, 0]]]).bool(),
    "2.weight": torch.tensor([[[1, 1]], [[0, 1]]]).bool(),
}


def test_by_hand():
    """Layer 0: 2 of 4 kept by both clients, 1 shared, 3 kept by one; layer 2: 2 and 1 of 2, 1 shared."""
    found = measured(Masks(), seen(drawn(2), masks=FIRST))
    assert {layer: float(value) for layer, value in found.layers["masks.density"].items()} == {"0": 0.5, "2": 0.75}
    assert found.clients["masks.density"].tolist() == pytest.approx([4 / 6, 3 / 6])
    assert found.layers["masks.jaccard"] == {"0": pytest.approx(1 / 3), "2": 0.5}
    assert found.layers["masks.hamming"] == {"0": 0.5, "2": 0.5}
    assert found.of_round["masks.jaccard"] == pytest.approx(2 / 5)
    assert found.of_round["masks.hamming"] == pytest.approx(3 / 6)
    matrix = found.clients_in_layers["masks.jaccard"][""]
    assert matrix.flatten().tolist() == pytest.approx([1, 2 / 5, 2 / 5, 1])


def test_what_was_sent_counts_all_parameters():
    """Layer 0 has 4 weights, 2 of them sent, and 2 biases, sent whole; the norm is the server's and not sent."""
    uploads = {name: tensor for name, tensor in drawn(2).items() if not name.startswith("1.")}
    before = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    found = measured(Masks(), seen(uploads, before, FIRST))
    sent = {layer: float(value) for layer, value in found.layers["masks.sent"].items()}
    assert sent == {"0": pytest.approx(4 / 6), "1": 0, "2": 0.75}
    assert found.clients["masks.sent"].tolist() == pytest.approx([6 / 12, 5 / 12])


def test_over_rounds_clients_are_compared_with_themselves():
    """Client 7 comes back with one of its two weights of layer 0 exchanged, client 5 is new, client 3 is away."""
    first = seen(drawn(2), masks=FIRST, participants=(3, 7))
    moved = {name: torch.stack([mask[1], mask[0]]) for name, mask in FIRST.items()}
    moved["0.weight"][0] = torch.tensor([[1, 0], [0, 1]]).bool()
    second = seen(drawn(2), masks=moved, participants=(7, 5), round=2)
    assert "masks.steady" not in measured(Masks(), first).layers
    found = measured(Masks(), first, second)
    assert found.layers["masks.steady"] == {"0": pytest.approx(1 / 3), "2": 1}
    assert found.layers["masks.moved"] == {"0": 0.5, "2": 0}
    assert found.of_round["masks.moved"] == pytest.approx(2 / 6)
    away = seen(drawn(2), masks=moved, participants=(1, 2), round=2)
    assert "masks.steady" not in measured(Masks(), first, away).layers
    assert "masks.steady" not in measured(Masks(remembered=0), first, second).layers


def test_bits_in_the_place_of_weights_are_masks():
    uploads = {**drawn(2), "0.weight": FIRST["0.weight"]}
    found = measured(Masks(), seen(uploads, {name: torch.zeros(shape) for name, shape in SHAPES.items()}))
    assert found.layers["masks.density"] == {"0": 0.5}
    assert found.layers["masks.sent"]["0"] == 1


def test_masks_that_broadcast_are_spread():
    """A mask of whole layers, as of FedLP, has one entry for each client."""
    given_masks = {"0.weight": torch.tensor([True, False]).reshape(2, 1, 1)}
    masks = upload_masks(LAYERS, Message(drawn(2), given_masks))
    assert masks["0.weight"].shape == (2, 2, 2)
    assert measured(Masks(), seen(drawn(2), masks=given_masks)).clients["masks.density"].tolist() == [1, 0]


def test_without_masks_it_says_so():
    assert "nothing under a mask" in str(Masks().unfit(Method.make("fedavg"), LAYERS))
    assert "'zeros' tells" in str(Masks().unfit(Method.make("lips"), LAYERS))
    for method in ("ssfl", "dispfl", "top-k", "fedpm", "sparsyfed", "fedlp", "sparse-ft", "subfedavg", "feddst"):
        assert Masks().unfit(Method.make(method), LAYERS) is None, method
    with pytest.warns(FedStrataWarning, match="found no mask"):
        found = measured(Masks(), seen(drawn(2), round=1, rounds=1))
    assert set(found.layers) == {"masks.sent"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        measured(Masks(), seen(drawn(2), masks=FIRST), seen(drawn(2), masks=FIRST, round=2, rounds=2))


@st.composite
def masks_of_clients(draw):
    clients, entries = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    rows = draw(
        st.lists(st.lists(st.booleans(), min_size=entries, max_size=entries), min_size=clients, max_size=clients)
    )
    return torch.tensor(rows)


@settings(max_examples=40, deadline=None)
@given(masks_of_clients(), st.randoms(use_true_random=False))
def test_what_holds_for_all_masks(masks, chance):
    found, sets = between_clients([masks]), [{place for place, kept in enumerate(row) if kept} for row in masks]
    for i, one in enumerate(sets):
        for j, other in enumerate(sets):
            expected = len(one & other) / len(one | other) if one | other else 1
            assert float(found.jaccard[i, j]) == pytest.approx(expected)
            assert float(found.hamming[i, j]) == pytest.approx(len(one ^ other) / masks.shape[1])
    assert (found.jaccard == found.jaccard.T).all()
    assert (found.jaccard.diagonal() == 1).all()
    order = list(range(len(masks)))
    chance.shuffle(order)
    assert (between_clients([masks[order]]).jaccard == found.jaccard[order][:, order]).all()
    assert (one_by_one([(masks, masks[order])]).hamming == found.hamming[range(len(masks)), order]).all()
    whole = {"0.weight": masks.float().mean(1).reshape(-1, 1, 1) * torch.ones(len(masks), 2, 2)}
    density = measured(Masks(), seen(whole, masks={"0.weight": whole["0.weight"] > 0.5})).clients["masks.density"]
    assert (density == (whole["0.weight"] > 0.5).double().mean((1, 2))).all()
    kept = masks.sum(1)
    if (kept == kept[0]).all() and kept[0] > 0:  # of masks of one size, FedCAC's overlap is a function of Jaccard's
        torch.testing.assert_close(overlaps({"": masks}), 2 * found.jaccard / (1 + found.jaccard))
