"""Max pooling on a CPU gives the bits of PyTorch's, and its gradients too."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.func import vmap

from fedstrata.engines.cpu_pooling import MaxPooling, max_pool2d


def images(*shape, kind="ties", dtype=torch.float32):
    """Few different numbers, so that windows have several largest ones; or some that are no numbers."""
    drawn = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return drawn.masked_fill(drawn == 2, float("nan")) if kind == "nan" else drawn


def both(given, *arguments, **options):
    """Pool by the replacement and by PyTorch, for all clients, and send a gradient back through both."""
    results = []
    for pool in (max_pool2d, F.max_pool2d):
        own = given.clone().requires_grad_()
        pooled = vmap(lambda one, pool=pool: pool(one, *arguments, **options))(own)
        slope = torch.arange(pooled.numel(), dtype=own.dtype).view(pooled.shape)
        results.append((pooled, *torch.autograd.grad(pooled, own, slope)))
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
    ours, theirs = both(images(*shape, kind=kind, dtype=dtype), windows)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.nan_to_num(77), other.nan_to_num(77))
        assert one.is_contiguous() == other.is_contiguous(), "what comes next sees the same layout"


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((3,), {"stride": 2}),
        ((2,), {"padding": 1}),
        ((2,), {"dilation": 2}),
        ((3,), {"ceil_mode": True}),
        ((2, 2, 0, 1, False), {}),
        (((2, 2),), {"stride": (2, 2)}),
        ((2,), {"stride": 3}),
    ],
)
def test_what_else_may_be_asked_is_as_ever(arguments, options):
    ours, theirs = both(images(2, 3, 4, 8, 8), *arguments, **options)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


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

    def noting(beside, windows):
        found.append((beside.shape[1], beside.is_contiguous(memory_format=torch.channels_last)))
        return pool(beside, windows)

    monkeypatch.setattr(F, "max_pool2d_with_indices", noting)
    given = images(4, 5, 6, 8, 8).permute(order)
    ours, theirs = both(given, 2)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert found[0] == (given.shape[0] * given.shape[2], True)


def test_gradients_have_gradients():
    given = torch.randn(2, 3, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda one: MaxPooling.apply(one, (2, 2)), given)
