"""What hooks return is looked at, and a hook whose name is misspelt is refused."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch

from fedstrata.errors import FedStrataError
from fedstrata.methods import Facts, Message, Method, Part, Touches
from fedstrata.methods.contract.checks import Checks
from fedstrata.testing.world import prepare


@dataclass(frozen=True)
class Own(Part):
    """A part to go wrong with."""

    name: ClassVar[str] = "own"
    facts: ClassVar[Facts] = Facts("averaging", "made up for a test")
    touches: ClassVar[Touches] = Touches()


def part_with(**hooks):
    return dataclass(frozen=True)(type("Own", (Own,), hooks))()


WRONG = {
    "a loss that is one number": (
        {"loss": lambda self, clients, step, loss: loss.sum()},
        r"The hook 'loss' of 'own' must return one number for each client \(\[1\]\), and it returned a tensor \[\]",
    ),
    "a model without its memory": (
        {"start": lambda self, clients, message, model: model},
        "'start' of 'own' must return a pair",
    ),
    "weights of another shape": (
        {"finish": lambda self, clients, training: ({n: t[0] for n, t in training.trained.items()}, clients.memory)},
        r"'finish' of 'own' must return 'stem.weight' \(\[1, 4, 1, 3, 3\]\), and it returned a tensor \[4, 1, 3, 3\]",
    ),
    "a part of the model": (
        {"deployed": lambda self, clients, model: {"head.bias": model["head.bias"]}},
        "'deployed' of 'own' must return the whole model",
    ),
    "a name that nobody knows": (
        {"gradients": lambda self, clients, step, gradients: {**gradients, "more": gradients["head.bias"]}},
        "'gradients' of 'own' must return the model's own names .* it returned 'more' too",
    ),
    "something that is no tensor": (
        {"merge": lambda self, server, replies, shares: {"head.bias": 0.5}},
        "'merge' of 'own' must return 'head.bias' .* it returned a float",
    ),
    "no message": (
        {"upload": lambda self, clients, training, message: message.tensors},
        "'upload' of 'own' must return a message",
    ),
    "a message without clients": (
        {"upload": lambda self, clients, training, message: Message({"head.bias": torch.tensor(1.0)})},
        "'head.bias' with a leading axis",
    ),
    "one weight for all": (
        {"weigh": lambda self, declared: torch.tensor(1.0)},
        "'weigh' of 'own' must return one number for each client",
    ),
    "no tensor at all": (
        {"loss": lambda self, clients, step, loss: 0.5},
        r"'loss' of 'own' must return one number for each client \(\[1\]\), and it returned a float",
    ),
    "more than a pair": (
        {"start": lambda self, clients, message, model: (model, clients.memory, 1)},
        r"'start' of 'own' must return a pair \(a model and the part's memory\), and it returned a tuple",
    ),
    "a memory that is no dict": (
        {"start": lambda self, clients, message, model: (model, 3)},
        r"'start' of 'own' must return the part's memory \(a dict of tensors\), and it returned a int",
    ),
    "a message of other clients": (
        {"broadcast": lambda self, server, message: Message({"head.bias": torch.zeros(3, 10)})},
        r"'broadcast' of 'own' .*'head.bias' with a leading axis \(1 or 5\), and it returned a tensor \[3, 10\]",
    ),
    "a refined model without memory": (
        {"refine": lambda self, server, model, replies: model},
        "'refine' of 'own' must return a pair",
    ),
    "nothing": (
        {"server_step": lambda self, server, merged: None},
        "'server_step' of 'own' must return a pair .* it returned nothing",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_return_is_told(wrong):
    hooks, sentence = WRONG[wrong]
    with pytest.raises(FedStrataError, match=sentence):
        prepare(Method.make(part_with(**hooks)), rounds=1).run()


def one_of(model):
    return {"head.bias": model["head.bias"]}


PARTIAL = {
    "initial": lambda self, layers, model, seed: one_of(model),
    "receive": lambda self, clients, message, model: (one_of(model), clients.memory),
    "start": lambda self, clients, message, model: (one_of(model), clients.memory),
    "effective": lambda self, clients, parameters, step: one_of(parameters),
    "project": lambda self, clients, step, parameters: (one_of(parameters), clients.memory),
    "finish": lambda self, clients, training: (one_of(training.trained), clients.memory),
    "server_step": lambda self, server, merged: (one_of(merged), server.memory),
    "deployed": lambda self, clients, model: one_of(model),
}


@pytest.mark.parametrize("hook", PARTIAL)
def test_whatever_returns_a_model_returns_all_of_it(hook):
    with pytest.raises(FedStrataError, match=f"'{hook}' of 'own' must return the whole model .*a part of it"):
        prepare(Method.make(part_with(**{hook: PARTIAL[hook]})), rounds=1).run()


LESS = {
    "gradients": lambda self, clients, step, gradients: one_of(gradients),
    "merge": lambda self, server, replies, shares: {"head.bias": replies.tensors["head.bias"].mean(0)},
    "refine": lambda self, server, model, replies: (one_of(model), server.memory),
}


@pytest.mark.parametrize("hook", LESS)
def test_what_a_hook_leaves_out_stays_as_it_is(hook):
    driver = prepare(Method.make(part_with(**{hook: LESS[hook]})), rounds=1)
    driver.step()
    initial, model = driver.setting.initial, driver.engine.server.model
    assert [name for name in driver.setting.layers.parameter_names if not torch.equal(model[name], initial[name])] == [
        "head.bias"
    ]


def test_a_hook_is_looked_at_once():
    """Looking costs time in every step."""
    checks, part = Checks(), part_with()
    checks.numbers(part, "loss", torch.zeros(2), 2)
    checks.numbers(part, "loss", torch.zeros(3), 2)
    with pytest.raises(FedStrataError, match=r"'weigh' .*\(\[2\]\), and it returned a tensor \[3\]"):
        checks.numbers(part, "weigh", torch.zeros(3), 2)


def test_a_misspelt_hook_is_told():
    with pytest.raises(FedStrataError, match=r"defines 'gradient', which is no hook.*did you mean 'gradients'"):
        Method.make(part_with(gradient=lambda self, clients, step, gradients: gradients))


def test_a_hook_with_other_arguments_is_told():
    with pytest.raises(FedStrataError, match=r"'loss' of Own takes \(self, loss\); it is called with \(self, clients"):
        Method.make(part_with(loss=lambda self, loss: loss))


def test_helpers_of_a_part_may_have_any_other_name():
    Method.make(part_with(stage_one=lambda self: 1, _gradient=lambda self: 1, metric="accuracy"))
