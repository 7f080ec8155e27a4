"""What hooks see, and what travels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn
from watching import clients_view, server_view, step_view, training_view

from fedstrata.layers import LayerMap
from fedstrata.methods import Clients, Declared, LocalStep, Message, Phase, Server
from fedstrata.methods.contract.views import Stretch
from fedstrata.optimisers import SGD, AdamW
from fedstrata.stack import Stack

LAYERS = LayerMap.read(nn.Linear(1, 1), (1,))
FIRST_AND_LAST = torch.tensor([2, 0])
OF_THREE = Message(
    {"own": torch.tensor([[1.0], [2.0], [3.0]]), "same": torch.tensor([[9.0]]), "group/own": torch.tensor([4, 5, 6])},
    {"own": torch.tensor([[True], [False], [True]])},
    {"count": torch.tensor([7, 8, 9])},
)


# Messages ------------------------------------------------------------------------------------------------------------


def test_rows_of_a_message_are_those_of_some_clients_and_what_is_for_all():
    few = OF_THREE.rows(FIRST_AND_LAST)
    assert {name: tensor.flatten().tolist() for name, tensor in few.tensors.items()} == {
        "own": [3.0, 1.0], "same": [9.0], "group/own": [6, 4]
    }  # fmt: skip
    assert few.masks["own"].flatten().tolist() == [True, True]
    assert few.numbers["count"].tolist() == [9, 7]
    assert OF_THREE.rows(None) == OF_THREE


def test_a_message_without_some_tensors_has_the_rest():
    rest = OF_THREE.without(["own"])
    assert (list(rest.tensors), rest.masks, rest.numbers) == (["same", "group/own"], {}, OF_THREE.numbers)
    kept = OF_THREE.without(["same"])
    assert (list(kept.tensors), kept.masks) == (["own", "group/own"], OF_THREE.masks)


def test_further_tensors_take_the_place_of_those_of_their_name():
    more = OF_THREE.plus({"own": torch.zeros(3), "new": torch.ones(3)})
    assert list(more.tensors) == ["own", "same", "group/own", "new"]
    assert not more.tensors["own"].any()
    assert (more.masks, more.numbers) == (OF_THREE.masks, OF_THREE.numbers)


def test_a_group_of_a_message():
    assert {name: tensor.tolist() for name, tensor in OF_THREE.group("group").items()} == {"own": [4, 5, 6]}


@pytest.mark.parametrize("kind", ["tensors", "masks", "numbers"])
def test_a_message_is_common_if_nothing_in_it_is_of_single_clients(kind):
    assert Message().common
    assert Message({"a": torch.zeros(1, 3)}, {"a": torch.ones(1, 3)}, {"b": torch.zeros(1)}).common
    assert not Message(**{kind: {"a": torch.zeros(2), "b": torch.zeros(1)}}).common


def test_messages_of_groups_of_clients_join_in_their_order():
    joined = Message.join([OF_THREE.rows(torch.tensor([row])) for row in (1, 0)])
    assert {name: tensor.flatten().tolist() for name, tensor in joined.tensors.items()} == {
        "own": [2.0, 1.0], "same": [9.0, 9.0], "group/own": [5, 4]
    }  # fmt: skip
    assert joined.masks["own"].flatten().tolist() == [False, True]
    assert joined.numbers["count"].tolist() == [8, 7]
    assert Message.join([OF_THREE]) is OF_THREE


# Clients and server --------------------------------------------------------------------------------------------------


def bare_clients() -> Clients:
    return Clients(1, 3, 1, LAYERS, (4, 5, 6), 0, torch.tensor([1, 2, 3]), torch.eye(3), frozenset())


def test_declarations_of_some_clients():
    few = Declared(torch.tensor([1, 2, 3]), torch.eye(3)).rows(FIRST_AND_LAST)
    assert (few.sizes.tolist(), few.label_counts.tolist()) == ([3, 1], [[0, 0, 1], [1, 0, 0]])


def test_a_view_of_some_clients_is_theirs_in_everything():
    numbers = torch.tensor([10, 20, 30])
    of_three = replace(
        bare_clients(), memory=Stack(a=numbers), everybody=Stack(b=numbers + 1), previous=Stack(c=numbers + 2),
        trained=torch.tensor([True, False, False]),
    )  # fmt: skip
    few = of_three.rows(FIRST_AND_LAST)
    assert few.ids == (6, 4)
    assert (few.sizes.tolist(), few.label_counts.tolist()) == ([3, 1], [[0, 0, 1], [1, 0, 0]])
    assert [stack.popitem()[1].tolist() for stack in (few.memory, few.everybody, few.previous)] == [
        [30, 10], [31, 11], [32, 12]
    ]  # fmt: skip
    assert few.trained.tolist() == [False, True]
    assert of_three.rows(None) is of_three
    assert bare_clients().rows(FIRST_AND_LAST).trained.tolist() == []


def test_clients_probe_with_what_all_parts_remember():
    """What a part sees is narrowed to its own memory; where nothing was narrowed, that is all."""
    own, all_parts = Stack(mask=torch.ones(3)), Stack({"ssfl/mask": torch.ones(3)})
    asked = replace(bare_clients(), memory=own, probing=lambda clients: clients.memory)
    assert asked.probe == own
    assert replace(asked, everybody=all_parts).probe == all_parts


def test_draws_of_clients_differ_by_round_and_purpose():
    clients = clients_view(LAYERS, 2)
    drawn = torch.cat([clients.keys("a"), clients.keys("b"), replace(clients, round=2).keys("a")])
    assert drawn.shape == (6, 2)
    assert len({tuple(key.tolist()) for key in drawn}) == 6
    assert torch.equal(clients.keys("a"), clients.keys("a"))


def test_draws_of_the_server_differ_by_round_and_purpose():
    server = server_view(LAYERS, {})
    assert len({server.key("a"), server.key("b"), replace(server, round=2).key("a")}) == 3


@pytest.mark.parametrize(("view", "shape"), [(clients_view(LAYERS, 2), (2, 3, 5)), (server_view(LAYERS, {}), (3, 5))])
def test_noise_is_a_function_of_its_place_in_a_simulation_and_of_nothing_at_a_real_site(view, shape):
    places = [(view, "a", 0), (view, "b", 0), (view, "a", 1), (replace(view, round=2), "a", 0)]
    drawn = [asked.noise(purpose, (3, 5), stream) for asked, purpose, stream in places]
    assert {(one.shape, one.dtype) for one in drawn} == {(shape, torch.float64)}
    assert len({float(one.flatten()[0]) for one in drawn}) == 4
    assert torch.equal(drawn[0], view.noise("a", (3, 5)))
    secret = replace(view, secret=True)
    again = [secret.noise("a", (3, 5)) for _ in range(3)]
    assert {(one.shape, one.dtype) for one in again} == {(shape, torch.float64)}
    assert len({float(value) for one in (*again, drawn[0]) for value in one.flatten()}) == 4 * drawn[0].numel()


def test_views_print_no_secret():
    server = Server(1, 3, LAYERS, 0, 2, (0, 1), torch.ones(2), torch.ones(2, 1), {})
    assert (server.memory, server.initial, server.proxy, server.testing) == ({}, {}, None, False)
    clients = replace(bare_clients(), secret=True, everybody=Stack(others=torch.ones(3)), probing=print)
    assert (clients.memory, clients.initial, clients.previous, clients.trained.tolist()) == ({}, {}, {}, [])
    printed = f"{clients} {replace(server, secret=True)}"
    assert [word for word in ("others", "probing", "secret", "everybody") if word in printed] == []


# Training ------------------------------------------------------------------------------------------------------------


def test_a_phase_is_all_of_local_training_unless_it_says_less():
    assert Phase() == Phase(
        trains=None, epochs=None, steps=None, model=None, repeats=1, continues=False, optimiser=None, rate=1.0, name="",
        span=(0.0, 1.0), before=None, stage=None,
    )  # fmt: skip


def test_a_step_is_the_first_of_a_phase_and_without_features_unless_it_says_so():
    step = step_view({"weight": torch.zeros(1, 1)})
    assert isinstance(step, LocalStep)
    assert (step.phase, step.number, step.repeat, step.features.numel()) == (Phase(), 0, 0, 0)


def test_effective_steps_add_up_over_phases():
    """Momentum 1/2: two fresh steps go 1 + 1.5; a third, which still remembers them, 0.5 * 1.5 + 1 = 1.75."""
    momentum, one = SGD(0.1, momentum=0.5), {"weight": torch.zeros(1, 1)}
    stretches = (
        Stretch(torch.tensor([2]), torch.tensor([0]), momentum, 0.1),
        Stretch(torch.tensor([1]), torch.tensor([2]), momentum, 0.1),
        Stretch(torch.tensor([4]), torch.tensor([0]), AdamW(0.1), 0.1),
    )
    training = training_view(one, one, steps=torch.tensor([7]), stretches=stretches)
    assert training.effective_steps().tolist() == [2.5 + 1.75 + 4]
    assert training.effective_steps().dtype == torch.float64


def test_a_proximal_term_shortens_effective_steps():
    """Strength 2 at a learning rate of 1/4 takes half of the way back: 1, then 1 + 1 - 1/2."""
    one = {"weight": torch.zeros(1, 1)}
    stretches = (Stretch(torch.tensor([2]), torch.tensor([0]), SGD(0.1), 0.25),)
    training = training_view(one, one, steps=torch.tensor([2]), stretches=stretches)
    assert training.effective_steps().tolist() == [2.0]
    assert training.effective_steps(2.0).tolist() == [1.5]
