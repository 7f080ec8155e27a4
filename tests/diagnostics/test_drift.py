"""Clients' updates against their mean, and against each other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rounds_by_hand import SHAPES, drawn, measured, seen

from fedstrata.diagnostics import diagnostics
from fedstrata.diagnostics.drift import Drift, disagreement


def slow(uploads, before, shares, names, masks=None):
    """Compute a layer's numbers client by client, over one long list of plain numbers."""
    rows = []
    for client in range(len(shares)):
        row = []
        for name in names:
            change = uploads[name][client].double() - before[name].double()
            held = (masks or {}).get(name)
            row += (change if held is None else change * held.expand_as(uploads[name])[client]).flatten().tolist()
        rows.append(row)
    mean = [sum(share * row[place] for share, row in zip(shares, rows, strict=True)) for place in range(len(rows[0]))]

    def product(left, right):
        return sum(one * other for one, other in zip(left, right, strict=True))

    def cosine(left, right):
        return product(left, right) / math.sqrt(product(left, left) * product(right, right))

    distances = [math.dist(row, mean) for row in rows]
    return (
        [math.hypot(*row) for row in rows],
        distances,
        [cosine(row, mean) for row in rows],
        [[cosine(row, other) for other in rows] for row in rows],
    )


def test_by_hand():
    """Two clients, 3 : 1. Layer 2 moves by (4, 0) and (0, 4): mean (3, 1), distances sqrt 2 and sqrt 18, cosines
    3 / sqrt 10 and 1 / sqrt 10, 0 between them. Layer 0 moves by (0, 3) at both, in its bias."""
    none = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    uploads = {name: torch.zeros(2, *shape) for name, shape in SHAPES.items()}
    uploads["2.weight"] = torch.tensor([[[5.0, 1.0]], [[1.0, 5.0]]])
    uploads["0.bias"] = torch.tensor([[0.0, 3.0], [0.0, 3.0]])
    before = {**none, "2.weight": torch.tensor([[1.0, 1.0]])}
    found = measured(Drift(), seen(uploads, before, sizes=torch.tensor([30, 10])))
    inside = found.clients_in_layers
    assert inside["drift.norm"]["2"].tolist() == [4, 4]
    assert inside["drift.distance"]["2"].tolist() == pytest.approx([math.sqrt(2), math.sqrt(18)])
    assert inside["drift.cosine"]["2"].tolist() == pytest.approx([3 / math.sqrt(10), 1 / math.sqrt(10)])
    assert inside["drift.norm"]["0"].tolist() == [3, 3]
    assert inside["drift.distance"]["0"].tolist() == [0, 0]
    assert inside["drift.cosine"]["1"].isnan().all(), "a layer that nobody moves has no direction"
    assert found.layers["drift.cosine"]["2"] == pytest.approx(2 / math.sqrt(10))
    assert found.layers["drift.similarity"]["2"] == 0
    assert found.layers["drift.similarity"]["0"] == 1
    assert found.clients["drift.norm"].tolist() == [5, 5]
    assert inside["drift.similarity"][""].tolist() == [[1, pytest.approx(9 / 25)], [pytest.approx(9 / 25), 1]]
    assert found.of_round["drift.similarity"] == pytest.approx(9 / 25)


def test_as_a_slow_loop_finds_it_also_under_masks():
    uploads, before = drawn(5, seed=1), {name: tensor[0] for name, tensor in drawn(1, seed=2).items()}
    masks = {"0.weight": torch.rand(5, 2, 2, generator=torch.Generator().manual_seed(3)) < 0.6}
    sizes = torch.tensor([1, 2, 3, 4, 10])
    found = measured(Drift(by_layer=True), seen(uploads, before, masks, sizes=sizes))
    layers = {"0": ["0.weight", "0.bias"], "1": ["1.weight", "1.bias"], "2": ["2.weight"], "": list(SHAPES)}
    for layer, names in layers.items():
        norms, distances, cosines, similarity = slow(uploads, before, (sizes / 20).tolist(), names, masks)
        if layer:
            mine = found.clients_in_layers
            assert mine["drift.norm"][layer].tolist() == pytest.approx(norms)
            assert mine["drift.distance"][layer].tolist() == pytest.approx(distances)
            assert mine["drift.cosine"][layer].tolist() == pytest.approx(cosines)
            assert float(found.layers["drift.distance"][layer]) == pytest.approx(sum(distances) / 5)
            off = [similarity[i][j] for i in range(5) for j in range(5) if i != j]
            assert float(found.layers["drift.similarity"][layer]) == pytest.approx(sum(off) / 20)
        else:
            assert found.clients["drift.cosine"].tolist() == pytest.approx(cosines)
        matrix = found.clients_in_layers["drift.similarity"][layer]
        assert matrix.flatten().tolist() == pytest.approx([entry for row in similarity for entry in row])


NUMBERS = st.floats(-100, 100, width=32)


@st.composite
def updates_of_clients(draw):
    clients, entries = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    rows = draw(st.lists(st.lists(NUMBERS, min_size=entries, max_size=entries), min_size=clients, max_size=clients))
    sizes = draw(st.lists(st.integers(1, 9), min_size=clients, max_size=clients))
    shares = torch.tensor(sizes, dtype=torch.float64)
    return torch.tensor(rows, dtype=torch.float64), shares / shares.sum()


@settings(max_examples=40, deadline=None)
@given(updates_of_clients(), st.randoms(use_true_random=False))
def test_what_holds_for_all_updates(drawn_updates, chance):
    updates, shares = drawn_updates
    found = disagreement([updates], shares)
    matrix, moved = found.similarity, updates.abs().amax(1) > 1e-3
    for cosines in (found.cosines[moved], matrix[moved][:, moved]):
        defined = cosines[~cosines.isnan()]
        assert ((defined >= -1) & (defined <= 1)).all()
    torch.testing.assert_close(matrix, matrix.T, equal_nan=True, rtol=0, atol=1e-12)
    assert (matrix.diagonal()[moved] == 1).all()
    order = list(range(len(updates)))
    chance.shuffle(order)
    other = disagreement([updates[order]], shares[order])
    torch.testing.assert_close(other.norms, found.norms[order])
    torch.testing.assert_close(other.similarity, matrix[order][:, order], equal_nan=True)
    halves = disagreement(torch.split(updates, 2, dim=1), shares)
    torch.testing.assert_close(halves.apart, found.apart)
    torch.testing.assert_close(halves.products, found.products)


@settings(max_examples=40, deadline=None)
@given(updates_of_clients())
def test_the_mean_agrees_with_itself(drawn_updates):
    """Clients that all did what the mean did have the cosine 1 with it and no distance."""
    updates, shares = drawn_updates
    mean = shares @ updates
    found = disagreement([mean.expand_as(updates)], shares)
    if mean.abs().max() > 1e-3:
        torch.testing.assert_close(found.cosines, torch.ones_like(shares))
        torch.testing.assert_close(found.distances, torch.zeros_like(shares), atol=1e-6, rtol=0)


def test_only_the_first_clients_are_compared_and_only_when_due():
    uploads = drawn(4)
    found = measured(Drift(clients=2, details_every=5), seen(uploads))
    matrix = found.clients_in_layers["drift.similarity"][""]
    assert matrix.shape == (4, 4)
    assert matrix[:2, :2].isfinite().all()
    assert matrix[2:].isnan().all()
    assert matrix[:, 2:].isnan().all()
    assert found.of_round["drift.similarity"] == matrix[0, 1]
    later = measured(Drift(clients=2, details_every=5), seen(uploads, round=3))
    assert not later.clients_in_layers
    assert later.layers["drift.similarity"] == found.layers["drift.similarity"]


def test_bits_and_what_the_server_lacks_are_no_updates():
    uploads = {"0.weight": torch.ones(2, 2, 2, dtype=torch.bool), "fedproto/prototypes": torch.ones(2, 3)}
    found = measured(Drift(), seen(uploads, {"0.weight": torch.zeros(2, 2)}))
    assert not found.layers
    assert not found.clients_in_layers


def test_one_client_has_nobody_to_disagree_with():
    found = measured(Drift(), seen(drawn(1)))
    assert found.of_round["drift.cosine"] == pytest.approx(1)
    assert float(found.of_round["drift.distance"]) == 0
    assert found.of_round["drift.similarity"].isnan()


def test_its_names_are_those_that_it_declares():
    found = measured(Drift(by_layer=True), seen(drawn(3)))
    used = {*found.of_round, *found.layers, *found.clients, *found.clients_in_layers}
    assert used == set(diagnostics.make("drift").quantities)
