from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import nn
from watching import assert_same_bits, run, server_view

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Facts, Message, Method, Needs, Part, Touches, methods


def test_parts_keep_their_order_and_parameters():
    assert str(Method.make("fedbn + fedprox(mu=0.5)")) == "fedbn+fedprox(mu=0.5)"
    assert [part.name for part in Method.make("fedbn+fedprox").parts] == ["fedbn", "fedprox"]


def test_a_part_that_stands_twice_counts_once():
    assert Method.make("fedbn+fedprox+fedbn").parts == Method.make("fedbn+fedprox").parts


def test_a_part_that_stands_twice_with_other_parameters_is_refused():
    with pytest.raises(
        FedStrataError, match=r"'fedprox' twice with different parameters: fedprox\(mu=0.1\) and fedprox\(mu=0.2\)"
    ):
        Method.make("fedprox(mu=0.1)+fedprox(mu=0.2)")


def test_two_owners_of_one_decision_are_refused_by_name():
    class Other(type(methods.make("fedavgm"))):
        pass

    Other.name = "other"
    with pytest.raises(
        FedStrataError, match="'fedavgm' and 'other' cannot be combined: each of them decides the server's step"
    ):
        Method("x", (methods.make("fedavgm"), Other()))


# What a part says of itself ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Silent(Part):
    """Says nothing of what it touches."""

    name: ClassVar[str] = "silent"
    facts: ClassVar[Facts] = Facts("test", "none")


@dataclass(frozen=True)
class Harmless(Silent):
    """Says that it touches nothing."""

    name: ClassVar[str] = "harmless"
    touches: ClassVar[Touches] = Touches()


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("local", "'local' shares nothing, and 'silent' does not say whether it works on what clients share"),
        ("fedpm", "'fedpm' does not train weights, and 'silent' does not say whether it works on the weights of the"),
        ("fedper", "'fedper' keeps the head at each client, and 'silent' does not say whether it works on a head that"),
    ],
)
def test_a_part_that_says_nothing_is_refused_where_something_is_taken_away(other, reason):
    taking = methods.make(other)
    for parts in ((Silent(), taking), (taking, Silent())):
        with pytest.raises(FedStrataError) as caught:
            Method("x", parts)
        assert reason in str(caught.value)
        assert "(declare its 'touches')" in str(caught.value)
    assert Method("x", (Harmless(), taking)).parts == (Harmless(), taking)
    assert Method("x", (Silent(), methods.make("fedprox"))).parts[0] == Silent()


def test_a_method_needs_what_its_parts_need():
    needs = Method.make("fedrod+fedavg").needs
    assert (needs.features, needs.previous, needs.replies, needs.mean_gradients) == (True, False, False, False)
    joined = Needs.join(
        [
            Needs(proxy=3, held_out=0.2, last_gradients=True, operations={abs: max}),
            Needs(proxy=5, held_out=0.1, previous=True, samples_per_epoch=7, operations={round: min}),
            Needs(),
        ]
    )
    assert joined == Needs(
        proxy=5, held_out=0.2, last_gradients=True, previous=True, samples_per_epoch=7,
        operations={abs: max, round: min},
    )  # fmt: skip


# The order of parts --------------------------------------------------------------------------------------------------


def test_the_part_that_decides_the_loss_comes_before_those_that_add_to_it():
    left, right = (run(text, rounds=1).engine.server.model for text in ("fedprox(mu=5)+fedir", "fedir+fedprox(mu=5)"))
    assert_same_bits(left, right)
    alone = run("fedir", rounds=1).engine.server.model
    assert not torch.equal(alone["head.weight"], left["head.weight"])


@pytest.mark.parametrize(("early", "expected"), [(True, 1.0 + 2 * (6.0 - 1.0)), (False, 2 * (1.0 + 2 * (3.0 - 1.0)))])
def test_what_refines_the_merged_model_comes_before_the_servers_step(early, expected):
    """The merged weight is 3 and doubled; the server goes from 1 twice as far, before or after that."""

    class Doubling(Harmless):
        refines_merged: ClassVar[bool] = early

        def refine(self, server, model, replies):
            assert replies == Message()
            return {name: 2 * tensor for name, tensor in model.items()}, server.memory

    method = Method("x", (methods.make("fedavgm(beta=0, learning_rate=2)"), Doubling()))
    layers = LayerMap.read(nn.Linear(1, 1, bias=False), (1,))
    first = server_view(layers, {"weight": torch.tensor([[1.0]])})
    server = server_view(layers, first.model, memory=method.server_memory(first))
    new, _ = method.advance(server, {"weight": torch.tensor([[3.0]])}, Message())
    assert new["weight"].item() == expected


def test_each_part_sees_its_own_memory_only():
    seen = []

    class Remembering(Harmless):
        def client_memory(self, clients, model):
            return {"count": torch.zeros_like(clients.sizes)}

        def server_memory(self, server):
            return {"count": torch.tensor(0)}

        def start(self, clients, message, model):
            seen.append(set(clients.memory))
            return model, {"count": clients.memory["count"] + 1}

        def refine(self, server, model, replies):
            seen.append(set(server.memory))
            return model, {"count": server.memory["count"] + 10}

    driver = run(Method("x", (methods.make("feddyn"), Remembering())), rounds=2)
    assert all(names == {"count"} for names in seen)
    assert driver.engine.clients()["memory/harmless/count"].tolist() == [2] * 5
    assert driver.engine.server.memory["harmless/count"] == 20


# Sentences -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fedagv", "There is no method 'fedagv'. Did you mean 'fedavg'?"),
        ("fedprox(nu=1)", "no parameter of the method 'fedprox' called 'nu'. Did you mean 'mu'?"),
        ("fedprox(mu=-1)", "-1.0 is outside what the parameter 'mu' of the method 'fedprox' takes: at least 0."),
        ("fedbn+", "a name is missing"),
        ("", "a name is missing"),
        ("fedprox(mu=1", "unmatched parenthesis"),
    ],
)
def test_what_cannot_be_read_gets_a_sentence(text, sentence):
    with pytest.raises(FedStrataError) as caught:
        Method.make(text)
    assert sentence in str(caught.value)
