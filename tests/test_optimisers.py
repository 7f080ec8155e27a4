from __future__ import annotations

import pytest
import torch

from fedstrata.errors import FedStrataError
from fedstrata.optimisers import optimisers
from fedstrata.stack import put_, take

CLIENTS, STEPS = 3, 6
SHAPES = {"weight": (4, 3), "bias": (4,), "scale": ()}


def start(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(CLIENTS, *shape, dtype=torch.float64, generator=generator) for name, shape in SHAPES.items()
    }


def gradients_of(step):
    return {name: (step + 1) * tensor for name, tensor in start(seed=100 + step).items()}


def stacked(text, steps=STEPS, learning_rate=None):
    """Run all clients at once: their parameters after each step."""
    optimiser = optimisers.make(text)
    parameters = start()
    state = optimiser.state(parameters)
    trace = []
    for step in range(steps):
        optimiser.update_(parameters, gradients_of(step), state, learning_rate or optimiser.learning_rate)
        trace.append({name: tensor.clone() for name, tensor in parameters.items()})
    return trace


def alone_in_torch(client, make, clip=None):
    """Run one client with ``torch.optim``."""
    parameters = {name: torch.nn.Parameter(tensor[client].clone()) for name, tensor in start().items()}
    optimiser = make(list(parameters.values()))
    trace = []
    for step in range(STEPS):
        for name, gradient in gradients_of(step).items():
            parameters[name].grad = gradient[client].clone()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(list(parameters.values()), clip)
        optimiser.step()
        trace.append({name: parameter.detach().clone() for name, parameter in parameters.items()})
    return trace


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("sgd(0.1)", lambda p: torch.optim.SGD(p, 0.1)),
        ("sgd(0.1, weight_decay=0.01)", lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.01)),
        ("sgd(0.1, momentum=0.9)", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        (
            "sgd(0.1, momentum=0.9, weight_decay=0.01, nesterov=true)",
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
        ),
        ("adam", lambda p: torch.optim.Adam(p, 0.001)),
        (
            "adam(0.02, weight_decay=0.1, beta1=0.8, beta2=0.95, epsilon=0.001)",
            lambda p: torch.optim.Adam(p, 0.02, betas=(0.8, 0.95), eps=0.001, weight_decay=0.1),
        ),
        ("adamw(0.02)", lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.01)),
        ("adamw(0.02, weight_decay=0.3)", lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.3)),
        ("adamw(0.02, amsgrad=true)", lambda p: torch.optim.AdamW(p, 0.02, weight_decay=0.01, amsgrad=True)),
        (
            "adam(0.02, weight_decay=0.3, beta2=0.5, amsgrad=true)",
            lambda p: torch.optim.Adam(p, 0.02, (0.9, 0.5), weight_decay=0.3, amsgrad=True),
        ),
    ],
)
@pytest.mark.parametrize("clip", [None, 2.0])
def test_every_client_moves_as_in_torch(text, make, clip):
    if clip is not None:
        text = f"{text}(clip={clip})" if "(" not in text else f"{text[:-1]}, clip={clip})"
    trace = stacked(text)
    for client in range(CLIENTS):
        for ours, theirs in zip(trace, alone_in_torch(client, make, clip), strict=True):
            for name in SHAPES:
                torch.testing.assert_close(ours[name][client], theirs[name], rtol=1e-12, atol=1e-12)


def test_one_step_by_hand():
    sgd = optimisers.make("sgd(momentum=0.5, weight_decay=0.1)")
    parameters, state = {"w": torch.tensor([[1.0], [2.0]])}, {"momentum/w": torch.tensor([[1.0], [0.0]])}
    sgd.update_(parameters, {"w": torch.tensor([[0.4], [-0.2]])}, state, learning_rate=0.1)
    # Velocity 0.5 * 1 + (0.4 + 0.1 * 1) = 1 and 0.5 * 0 + (-0.2 + 0.1 * 2) = 0.
    torch.testing.assert_close(state["momentum/w"], torch.tensor([[1.0], [0.0]]))
    torch.testing.assert_close(parameters["w"], torch.tensor([[0.9], [2.0]]))


def test_clip_shortens_each_client_by_its_own_norm():
    sgd = optimisers.make("sgd(clip=1)")
    gradients = {"a": torch.tensor([[3.0, 0.0], [0.3, 0.0]]), "b": torch.tensor([4.0, 0.4])}
    clipped = sgd.clipped(gradients)
    torch.testing.assert_close(clipped["a"], torch.tensor([[0.6, 0.0], [0.3, 0.0]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(clipped["b"], torch.tensor([0.8, 0.4]), atol=1e-6, rtol=0)
    assert gradients["a"][0, 0] == 3
    assert optimisers.make("sgd").clipped(gradients) is gradients
    assert sgd.clipped({}) == {}


@pytest.mark.parametrize("text", ["sgd(momentum=0.9, clip=1)", "adam(clip=1)", "adamw", "adam(amsgrad=true)"])
def test_clients_with_unequal_numbers_of_steps_move_as_if_alone(text):
    """The training loop takes rows of parameters and state, steps, and puts them back."""
    optimiser = optimisers.make(text)
    parameters = start()
    state = optimiser.state(parameters)
    for step in range(STEPS):
        rows = torch.tensor([client for client in range(CLIENTS) if step < STEPS - 2 * client])
        some, some_state = take(parameters, rows), take(state, rows)
        optimiser.update_(some, take(gradients_of(step), rows), some_state, 0.05)
        put_(parameters, rows, some)
        put_(state, rows, some_state)
    trace = stacked(text, learning_rate=0.05)
    for client in range(CLIENTS):
        for name in SHAPES:
            expected = trace[STEPS - 2 * client - 1][name][client]
            torch.testing.assert_close(parameters[name][client], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("text", "make"),
    [
        ("sgd(0.1, momentum=0.9)", lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        ("adam(0.1)", lambda p: torch.optim.Adam(p, 0.1)),
        ("adamw(0.1)", lambda p: torch.optim.AdamW(p, 0.1)),
    ],
)
def test_a_parameter_without_a_gradient_rests_and_its_step_does_not_count(text, make):
    """Phases that train the head first and the body later keep one state for both."""
    optimiser = optimisers.make(text)
    parameters = start()
    state = optimiser.state(parameters)
    reference = {name: torch.nn.Parameter(tensor[1].clone()) for name, tensor in start().items()}
    theirs = make(list(reference.values()))
    for step in range(STEPS):
        gradients = gradients_of(step)
        moving = ["bias"] if step < 3 else list(SHAPES)
        optimiser.update_(parameters, {name: gradients[name] for name in moving}, state, 0.1)
        for name in SHAPES:
            reference[name].grad = gradients[name][1].clone() if name in moving else None
        theirs.step()
        if step == 2:
            assert torch.equal(parameters["weight"], start()["weight"])
    for name in SHAPES:
        torch.testing.assert_close(parameters[name][1], reference[name].detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "text", ["sgd", "sgd(momentum=0.9, clip=1)", "adam(clip=1, weight_decay=0.1)", "adamw(amsgrad=true)"]
)
def test_without_gradients_nothing_moves(text):
    optimiser, parameters = optimisers.make(text), start()
    optimiser.update_(parameters, {}, optimiser.state(parameters), 0.1)
    assert all(torch.equal(parameters[name], tensor) for name, tensor in start().items())


def test_state_is_a_stack_of_zeros():
    assert optimisers.make("sgd").state(start()) == {}
    for text, names in (("sgd(momentum=0.9)", 3), ("adam", 9)):
        state = optimisers.make(text).state(start())
        assert len(state) == names
        assert all(len(tensor) == CLIENTS and not tensor.any() for tensor in state.values())


def test_state_carries_on_where_it_was_kept():
    whole = stacked("adam(0.05)")
    optimiser = optimisers.make("adam(0.05, keep=true)")
    parameters = start()
    state = optimiser.state(parameters)
    for step in range(STEPS):
        if step == 3:
            state = {name: tensor.clone() for name, tensor in state.items()}
        optimiser.update_(parameters, gradients_of(step), state, 0.05)
    for name in SHAPES:
        assert torch.equal(parameters[name], whole[-1][name])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sgd(learning_rate=0)", "more than 0"),
        ("sgd(momentum=1)", "less than 1"),
        ("sgd(nesterov=true)", "needs a momentum"),
        ("adam(beta1=1)", "less than 1"),
        ("adam(clip=0)", "more than 0"),
        ("rmsprop", "no optimiser 'rmsprop'"),
    ],
)
def test_impossible_optimisers_are_refused(text, reason):
    with pytest.raises(FedStrataError, match=reason):
        optimisers.make(text)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "text",
    ["sgd", "sgd(momentum=0.9, weight_decay=0.1, nesterov=true)", "sgd(clip=1)", "adam(weight_decay=0.1)", "adamw"],
)
def test_a_rate_on_the_device_steps_as_a_constant_does_bit_for_bit(text, dtype):
    def after_steps(rate):
        optimiser = optimisers.make(text)
        draw = torch.Generator().manual_seed(0)
        parameters = {name: torch.randn(3, *shape, dtype=dtype, generator=draw) for name, shape in SHAPES.items()}
        parameters["large"] = torch.randn(3, 101, dtype=dtype, generator=draw)
        state = optimiser.state(parameters)
        for _ in range(3):
            gradients = {name: torch.randn(own.shape, dtype=dtype, generator=draw) for name, own in parameters.items()}
            optimiser.update_(parameters, gradients, state, rate)
        return parameters | state

    constant, on_device = after_steps(0.0137), after_steps(torch.tensor(0.0137, dtype=torch.float64))
    for name, tensor in constant.items():
        assert torch.equal(tensor, on_device[name]), name
