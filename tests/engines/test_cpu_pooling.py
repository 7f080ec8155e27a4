"""Max pooling on a CPU gives the bits of PyTorch's, and its gradients too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad, vmap

from fedstrata.engines import cpu_pooling
from fedstrata.engines.cpu_pooling import MaxPooling, largest, max_pool2d
from fedstrata.engines.forward import LoopForward
from fedstrata.fused import Windows


def images(*shape, kind="ties", dtype=torch.float32):
    """Few different numbers, so that windows have several largest ones; or some that are no numbers."""
    drawn = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return drawn.masked_fill(drawn == 2, float("nan")) if kind == "nan" else drawn


def both(given, *arguments, **options):
    """Pool by the replacement and by PyTorch, for all clients, and send a gradient back through both.

    The replacement pools without gradients, too, and the clients one by one.
    """
    results = []
    for pool in (max_pool2d, F.max_pool2d):
        own = given.clone().requires_grad_()
        pooled = vmap(lambda one, pool=pool: pool(one, *arguments, **options))(own)
        slope = torch.randn(pooled.shape, dtype=own.dtype, generator=torch.Generator().manual_seed(1))
        results.append((pooled, *torch.autograd.grad(pooled, own, slope)))
    alone = [one.clone().requires_grad_() for one in given]
    pooled_alone = [max_pool2d(one, *arguments, **options) for one in alone]
    slopes = [torch.autograd.grad(one, own, part) for one, own, part in zip(pooled_alone, alone, slope, strict=True)]
    only = vmap(lambda one: max_pool2d(one, *arguments, **options))(given)
    for same in (torch.stack(pooled_alone), only, *(max_pool2d(one, *arguments, **options)[None] for one in given[:1])):
        assert torch.equal(same.nan_to_num(77), results[0][0][: len(same)].nan_to_num(77))
    assert only.is_contiguous()
    assert torch.equal(torch.stack([slope for (slope,) in slopes]), results[0][1])
    return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["ties", "nan"])
@pytest.mark.parametrize(
    ("shape", "windows"),
    [
        ((3, 4, 5, 8, 8), 2),
        ((2, 3, 1, 7, 9), 2),
        ((1, 2, 17, 6, 9), (2, 3)),
        ((4, 1, 3, 9, 9), 3),
        ((2, 2, 2, 2, 2), 1),
    ],
)
def test_the_bits_are_pytorchs(shape, windows, kind, dtype):
    assert_same_bits(*both(images(*shape, kind=kind, dtype=dtype), windows))


@pytest.mark.parametrize("kind", ["ties", "nan"])
@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((3, 2, 1), {}),
        ((3,), {"stride": 2}),
        ((2,), {"padding": 1}),
        (((2, 3), (1, 2)), {"padding": (1, 0)}),
        (((2, 2),), {"stride": (2, 2)}),
        ((2,), {"stride": 3}),
        ((4, 1, 2), {}),
        ((8,), {}),
    ],
)
def test_the_bits_are_pytorchs_where_windows_overlap_or_reach_over_the_border(arguments, options, kind):
    assert_same_bits(*both(images(3, 4, 5, 8, 9, kind=kind), *arguments, **options))


def test_a_window_of_nothing_but_the_least_is_that():
    given = torch.full((2, 1, 1, 4, 4), -torch.inf)
    assert_same_bits(*both(given, 3, 2, 1))


def assert_same_bits(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.nan_to_num(77), other.nan_to_num(77))
        assert one.is_contiguous() == other.is_contiguous(), "what comes next sees the same layout"


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((2,), {"dilation": 2}),
        ((3,), {"ceil_mode": True}),
        ((2, 2, 0, 1, False), {}),
    ],
)
def test_what_else_may_be_asked_is_as_ever(arguments, options):
    ours, theirs = both(images(2, 3, 4, 8, 8), *arguments, **options)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("arguments", [(9,), (3, 1, 2), (2, 0)])
def test_what_cannot_be_pooled_is_refused_in_pytorchs_words(arguments):
    given = images(2, 3, 8, 8)
    with pytest.raises(RuntimeError) as theirs:
        F.max_pool2d(given, *arguments)
    with pytest.raises(RuntimeError) as ours:
        max_pool2d(given, *arguments)
    assert str(ours.value) == str(theirs.value)


def test_places_are_pytorchs_own():
    given = images(2, 3, 4, 4)
    ours, theirs = (pool(given, 2, return_indices=True) for pool in (max_pool2d, F.max_pool2d))
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_images_of_one_client_without_a_batch_go_to_pytorch():
    given = images(3, 4, 4)
    assert torch.equal(max_pool2d(given, 2), F.max_pool2d(given, 2))


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4), (1, 0, 2, 3, 4), (1, 2, 0, 4, 3)])
def test_pytorch_always_finds_the_channels_side_by_side(order, monkeypatch):
    """Also where they lie as after a convolution of all clients: samples first, then clients, then channels."""
    found, pool = [], F.max_pool2d_with_indices

    def noting(beside, *windows):
        found.append((beside.shape[1], beside.is_contiguous(memory_format=torch.channels_last)))
        return pool(beside, *windows)

    monkeypatch.setattr(F, "max_pool2d_with_indices", noting)
    given = images(4, 5, 6, 8, 8).permute(order)
    ours, theirs = both(given, 2)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert found[0] == (given.shape[0] * given.shape[2], True)


def test_gradients_have_gradients():
    given = torch.randn(2, 3, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    for windows in (Windows((2, 2), (2, 2), (0, 0)), Windows((3, 3), (1, 1), (1, 1))):
        assert torch.autograd.gradgradcheck(lambda one, windows=windows: MaxPooling.apply(one, windows), given)


def test_inside_of_other_transforms_it_is_left_to_pytorch():
    given = torch.randn(2, 3, 4, 6, 6, dtype=torch.float64)
    ours, theirs = (vmap(grad(lambda one, pool=pool: pool(one, 2).square().sum()))(given) for pool in
                    (max_pool2d, F.max_pool2d))  # fmt: skip
    assert torch.equal(ours, theirs)


def test_clients_one_by_one_are_pooled_so_too(monkeypatch):
    """But for second derivatives, where all is left to PyTorch."""
    model = nn.Sequential(nn.MaxPool2d(3, 2, 1), nn.Flatten(), nn.Linear(4, 2))
    parameters = {name: tensor.detach()[None] for name, tensor in model.named_parameters()}
    given = (parameters, {}, images(1, 3, 1, 4, 4), torch.zeros(1, 2, dtype=torch.int64))
    seen = []
    monkeypatch.setattr(cpu_pooling, "largest", lambda *found: seen.append(found) or largest(*found))
    ours, _ = LoopForward(model)(*given, training=False)
    assert len(seen) == 1
    theirs, _ = LoopForward(model).twice_differentiable()(*given, training=False)
    assert len(seen) == 1
    assert torch.equal(ours, theirs)
