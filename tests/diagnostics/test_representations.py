"""Centred kernel alignment against its definition, and what layers give against plain modules."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from seeing import ALL, FORWARDS, SIZES, first_round
from torch import nn

from fedstrata.diagnostics import diagnostics
from fedstrata.diagnostics.representations import gram_alignment, linear_cka, mean_of_others
from fedstrata.errors import FedStrataError, FedStrataWarning


def hsic(first, second):
    """The Hilbert-Schmidt independence criterion of two Gram matrices, entry by entry, up to a factor."""
    count = len(first)
    centring = np.eye(count) - np.full((count, count), 1 / count)
    return np.trace(first @ centring @ second @ centring)


def cka_by_definition(x, y):
    """Kornblith et al., Eq. 3: with linear kernels, from centred Gram matrices."""
    x, y = (given.flatten(1).numpy() for given in (x, y))
    k, l = x @ x.T, y @ y.T  # noqa: E741
    return hsic(k, l) / math.sqrt(hsic(k, k) * hsic(l, l))


@given(st.integers(0, 1000), st.integers(3, 9), st.integers(1, 12), st.integers(1, 5))
def test_linear_cka_is_its_definition(seed, count, wide, narrow):
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(count, wide, generator=chance, dtype=torch.float64) + 3
    y = torch.randn(count, narrow, generator=chance, dtype=torch.float64)
    found = float(linear_cka(x, y))
    assert found == pytest.approx(cka_by_definition(x, y), abs=1e-10)
    # as norms of products of centred features, PLayer-FL's Eq. A.3 without the squares of its denominator
    a, b = x - x.mean(0), y - y.mean(0)
    assert found == pytest.approx(float((b.T @ a).norm() ** 2 / ((a.T @ a).norm() * (b.T @ b).norm())), abs=1e-10)
    assert 0 <= found <= 1


def test_cka_by_hand_and_what_does_not_change_it():
    x = torch.tensor([[1.0], [-1.0], [0.0]], dtype=torch.float64)
    y = torch.tensor([[1.0], [1.0], [-2.0]], dtype=torch.float64)
    assert float(linear_cka(x, y)) == 0
    assert float(linear_cka(x, x + y)) == pytest.approx(0.25)  # the squared correlation, 2 / sqrt(2 * 8)
    both = torch.randn(7, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    turned = (
        both @ torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64))[0]
    )
    assert float(linear_cka(both, 5 * turned + 2)) == pytest.approx(1)
    assert math.isnan(linear_cka(both, torch.ones(7, 2, dtype=torch.float64)))
    with pytest.raises(FedStrataError, match="of the same samples"):
        linear_cka(both, both[:3])


def test_the_mean_over_others_leaves_out_itself_and_what_is_not_defined():
    pairs = torch.tensor([[1.0, 0.2, math.nan], [0.2, 1.0, math.nan], [math.nan] * 3])
    found = mean_of_others(pairs)
    assert found[:2].tolist() == pytest.approx([0.2, 0.2])
    assert math.isnan(found[2])
    assert math.isnan(mean_of_others(torch.ones(1, 1))[0])
    assert gram_alignment(torch.zeros(2, 3, 3)).isnan().all()


@pytest.mark.parametrize("engine", FORWARDS)
def test_dissimilarities_are_those_of_plain_modules_on_all_samples(engine):
    """The set is all that clients hold, because that is less than was asked for."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5), nn.Linear(72, 3)
    )
    round = first_round(engine, model.double())
    found = diagnostics.make(f"cka(samples={ALL})").compute(round.seen, {})
    inputs = torch.cat([round.samples(client)[0] for client in range(3)])
    outputs = {"0": [], "5": []}
    for client, name in product((*range(3), None), outputs):
        if client is None:
            module = round.ready.model.eval()
            module.load_state_dict(round.seen.after)
        else:
            module = round.module(client, training=False)
        outputs[name].append(module[: int(name) + 1](inputs).detach())
    for name, own in outputs.items():
        pairs = [[1 - cka_by_definition(one, other) for other in own] for one in own]
        for client in range(3):
            expected = sum(pairs[client][other] for other in range(3) if other != client) / 2
            assert float(found.clients_in_layers["cka.dissimilarity"][name][client]) == pytest.approx(
                expected, abs=1e-9
            )
            told = found.clients_in_layers["cka.to_global"][name][client]
            assert float(told) == pytest.approx(pairs[client][3], abs=1e-9)
        assert float(found.layers["cka.dissimilarity"][name]) == pytest.approx(
            (pairs[0][1] + pairs[0][2] + pairs[1][2]) / 3, abs=1e-9
        )


def test_samples_come_from_the_clients_in_turn_and_others_in_other_rounds():
    probe = first_round("loop").seen.probe
    positions, owners = probe._common(7, 0)
    assert owners.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert len(set(positions.tolist())) == 7
    bounds = np.cumsum((0, *SIZES))
    assert all(bounds[owner] <= position < bounds[owner + 1] for position, owner in zip(positions, owners, strict=True))
    assert probe._common(7, 0)[0].tolist() == positions.tolist() != probe._common(7, 1)[0].tolist()
    everything, _ = probe._common(ALL, 0)
    assert sorted(everything.tolist()) == list(range(sum(SIZES)))


def test_a_client_alone_has_nobody_to_differ_from_but_the_global_model():
    round = first_round("loop")
    alone = {name: tensor[:1] for name, tensor in round.seen.trained.items()}
    seen = replace(round.seen, trained=alone, participants=(0,), probe=round.side.probe([0], 1))
    with pytest.warns(FedStrataWarning, match="no two clients to compare"):
        found = diagnostics.make("cka").compute(seen, {})
    assert math.isnan(found.of_round["cka.split"])
    assert all(math.isnan(value) for value in found.layers["cka.dissimilarity"].values())
    assert all(0 < float(value) < 1 for value in found.layers["cka.to_global"].values())


@pytest.mark.parametrize(("method", "told"), [("fedbn", 1), ("fedper", 2), ("local", 0)])
def test_the_global_model_is_compared_up_to_the_first_layer_that_it_lacks(method, told):
    """With personal norms, a personal head, and nothing in common."""
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 4), nn.Linear(4, 3)
    )
    found = diagnostics.make("cka").compute(first_round("stacked", model.double(), method=method).seen, {})
    to_global = found.layers.get("cka.to_global", {})
    assert [name for name, value in to_global.items() if not math.isnan(value)] == ["1", "4", "5"][:told]
    assert not any(math.isnan(value) for value in found.layers["cka.dissimilarity"].values())


class WithoutACall(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(64, 4), nn.Linear(4, 3)

    def forward(self, inputs):
        return nn.functional.linear(self.body(inputs.flatten(1)), self.head.weight, self.head.bias)


class Positions(nn.Module):
    """Eight rows of a picture with their positions, which are the same for all samples."""

    def __init__(self):
        super().__init__()
        self.body, self.positions, self.head = nn.Linear(8, 4), nn.Embedding(8, 4), nn.Linear(4, 3)

    def forward(self, inputs):
        rows = self.body(inputs.flatten(0, 1).flatten(0, 1)).view(-1, 8, 4)  # each row as a sample of its own
        return self.head((rows + self.positions(torch.arange(8, device=inputs.device))).tanh().mean(1))


@pytest.mark.parametrize("engine", FORWARDS)
def test_what_does_not_depend_on_the_samples_has_no_number_and_does_not_hinder_the_split(engine):
    """Also where there are as many positions as samples; rows that are samples of their own stay with theirs."""
    torch.manual_seed(0)
    round = first_round(engine, Positions().double())
    found = diagnostics.make("cka(samples=8)").compute(round.seen, {})
    told = {name: float(value) for name, value in found.layers["cka.dissimilarity"].items()}
    assert list(told) == ["body", "positions", "head"]
    assert math.isnan(told["positions"])
    split = found.of_round["cka.split"]
    curve = [told["body"], told["body"], told["body"] + told["head"]]
    assert split == (2 if curve[2] > 2 * curve[1] else 3)
    positions, _ = round.seen.probe._common(8, 0)
    pictures = round.ready.data.make(positions[None], None)[0][0]
    own = [round.module(client, False).body(pictures).flatten(1).detach() for client in range(3)]
    pairs = [1 - cka_by_definition(own[one], own[other]) for one, other in ((0, 1), (0, 2), (1, 2))]
    assert told["body"] == pytest.approx(sum(pairs) / 3, abs=1e-9)


@pytest.mark.parametrize("engine", FORWARDS)
def test_a_layer_whose_weights_are_used_without_a_call_is_refused_by_name(engine):
    with pytest.raises(FedStrataError, match="What the layer 'head' gives cannot be seen"):
        diagnostics.make("cka").compute(first_round(engine, WithoutACall().double()).seen, {})


def test_equal_models_differ_in_nothing_and_all_layers_may_be_shared():
    """As those of clients that use the global model are, once a run is finished."""
    round = first_round("stacked")
    same = {name: tensor[:1].expand_as(tensor) for name, tensor in round.seen.trained.items()}
    found = diagnostics.make("cka").compute(replace(round.seen, trained=same), {})
    assert set(map(float, found.layers["cka.dissimilarity"].values())) == {0.0}
    assert found.of_round["cka.split"] == len(found.layers["cka.federated"]) == 3
