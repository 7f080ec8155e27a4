"""The kernels of optimisers against PyTorch's operations."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, draw

from fedstrata import optimisers
from fedstrata.kernels import updates


@pytest.mark.parametrize(
    "text",
    [
        "sgd(clip=1)",
        "sgd(momentum=0.9, weight_decay=0.01)",
        "sgd(momentum=0.9, nesterov=true, clip=30)",
        "adam(weight_decay=0.1, clip=2)",
        "adamw(weight_decay=0.3)",
    ],
)
def test_steps_are_those_of_the_general_operations(text, monkeypatch):
    def after_steps(kernels):
        monkeypatch.setattr(optimisers, "_kernels_for", lambda slopes, *stacks: (list(slopes.values()), kernels))
        optimiser = optimisers.optimisers.make(text)
        weights = {name: draw(2, *shape, learned=False) for name, shape in (("a", (33, 50)), ("b", ()), ("c", (3,)))}
        state = optimiser.state(weights)
        for step in range(2):
            slopes = {name: draw(*tensor.shape, seed=step, learned=False) for name, tensor in weights.items()}
            rate = torch.full((), 0.1 * (step + 1), dtype=torch.float64, device=DEVICE)
            optimiser.update_(weights, slopes, state, rate)
        return weights | state

    torch.testing.assert_close(after_steps(updates), after_steps(None), rtol=1e-12, atol=1e-12)


def test_squared_norms_of_stacks_of_unequal_size():
    stacks = [torch.ones(2, 5000, device=DEVICE), torch.full((2,), 3.0, device=DEVICE)]
    stacks[0][1] = 0
    assert updates.squared_norms(stacks).tolist() == [5009, 9]


def test_what_cannot_be_stepped_is_left_to_the_general_operations():
    whole = torch.zeros(2, 4, device=DEVICE)
    assert updates.takes([whole], [whole])
    assert not updates.takes([whole], [whole.t()])
    assert not updates.takes([whole], [whole.double()])
    assert not updates.takes([whole.bfloat16()])
    assert not updates.takes([whole[:, :0]])
