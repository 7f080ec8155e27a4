"""Norms take along what follows them where an engine can compute it as one; everywhere else nothing changes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedstrata.engines import norms
from fedstrata.engines.forward import LoopForward, StackedForward
from fedstrata.engines.operations import GPU_OPERATIONS
from fedstrata.fused import fusing, norm_rectified
from fedstrata.models.blocks import BasicBlock, batch_norm, convolution_unit, group_norm

CLIENTS, BATCH = 3, 2


class TwoBlocks(nn.Module):
    """A stem, a block whose shortcut is a convolution, and one whose shortcut is the identity."""

    def __init__(self, norm):
        super().__init__()
        self.stem = convolution_unit(3, 4, norm=norm, bias=False, pool=nn.MaxPool2d(2))
        self.blocks = nn.Sequential(BasicBlock(4, 8, 2, norm), BasicBlock(8, 8, 1, norm))
        self.plain = convolution_unit(8, 8, norm=None, bias=True)

    def forward(self, images):
        return self.plain(self.blocks(self.stem(images))).mean((-2, -1))


@pytest.fixture
def tails(monkeypatch):
    """Note what norms took along: whether something was added, whether it was rectified, and pooled."""
    seen = []
    computed = norms._tail

    def note(normalised, added, rectified, pooled):
        seen.append((added is not None, rectified) if pooled is None else (added is not None, rectified, "pooled"))
        return computed(normalised, added, rectified, pooled)

    monkeypatch.setattr(norms, "_tail", note)
    return seen


def passed(forward, model, around=None):
    """Run a pass: outputs, buffers and gradients."""
    generator = torch.Generator().manual_seed(0)
    parameters, buffers = (
        {
            name: (tensor + torch.rand(CLIENTS, *tensor.shape, generator=generator)).detach()
            if tensor.is_floating_point()
            else tensor.expand(CLIENTS)
            for name, tensor in own
        }
        for own in (model.named_parameters(), model.named_buffers())
    )
    for tensor in parameters.values():
        tensor.requires_grad_()
    images = torch.randn(CLIENTS, BATCH, 3, 8, 8, dtype=torch.float64, generator=generator)
    keys = torch.zeros(CLIENTS, 2, dtype=torch.int64)
    outputs, after = forward(parameters, buffers, images, keys, training=True, around=around)
    gradients = torch.autograd.grad(outputs.square().sum(), list(parameters.values()))
    return [outputs, *after.values(), *gradients]


FUSED = [(False, True, "pooled"), (False, True), (False, False), (True, True), (False, True), (True, True)]
"""The stem; a block: its first norm, its shortcut's, its last one with the addition; a block with no norm beside it."""


@pytest.mark.parametrize("norm", [batch_norm, group_norm(2)], ids=["batch", "group"])
def test_a_stacked_pass_with_fused_norms_is_that_of_each_client(norm, tails):
    model = TwoBlocks(norm).double()
    ours = passed(StackedForward(model, GPU_OPERATIONS), model)
    assert tails == FUSED
    torch.testing.assert_close(ours, passed(LoopForward(model), model), rtol=1e-9, atol=1e-12)
    assert len(tails) == len(FUSED), "the loop fuses nothing"


def test_nothing_is_fused_around_an_operation_that_a_method_replaces(tails):
    model = TwoBlocks(batch_norm).double()
    rectified = []

    def watch(relu, *arguments, **options):
        rectified.append(1)
        return relu(*arguments, **options)

    passed(StackedForward(model, GPU_OPERATIONS), model, around={F.relu: watch})
    assert tails == [(False, False)] * 6
    assert len(rectified) == 6
    tails.clear()
    passed(StackedForward(model, GPU_OPERATIONS), model, around={F.conv2d: lambda conv, *given, **more: conv(*given)})
    assert tails == FUSED


def test_a_norm_whose_outputs_a_hook_looks_at_takes_nothing_along(tails):
    model = TwoBlocks(batch_norm).double()
    model.blocks[1].norm2.register_forward_hook(lambda module, inputs, outputs: None)
    passed(StackedForward(model, GPU_OPERATIONS), model)
    assert tails == [*FUSED[:-1], (False, False)]


@pytest.mark.parametrize(
    "pool", [nn.AvgPool2d(2), nn.MaxPool2d(2, dilation=2), nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(2)]
)
def test_a_pooling_of_another_kind_or_that_a_hook_looks_at_is_called_as_ever(pool, tails):
    model = TwoBlocks(batch_norm).double()
    model.stem.pool = pool
    seen = []
    pool.register_forward_hook(lambda module, inputs, outputs: seen.append(outputs.shape))
    ours = passed(StackedForward(model, GPU_OPERATIONS), model)
    assert tails == [(False, True), *FUSED[1:]]
    assert len(seen) == 1
    torch.testing.assert_close(ours, passed(LoopForward(model), model), rtol=1e-9, atol=1e-12)


def test_what_does_not_fit_is_computed_as_ever():
    """Another activation, another norm, and a shortcut that is broadcast."""
    inputs, narrow = torch.randn(2, 4, 3, 3), torch.randn(2, 4, 1, 1)
    norm, other = nn.BatchNorm2d(4), nn.InstanceNorm2d(4)
    with fusing(True):
        assert torch.equal(norm_rectified(norm, nn.Tanh(), inputs), torch.tanh(norm(inputs)))
        assert torch.equal(norm_rectified(other, nn.ReLU(), inputs), torch.relu(other(inputs)))
        broadcast = norm_rectified(norm, nn.ReLU(), inputs, lambda: narrow)
        nobody = norm_rectified(norm, nn.ReLU(), inputs, lambda: inputs)
    assert torch.equal(broadcast, torch.relu(norm(inputs) + narrow))
    assert torch.equal(nobody, torch.relu(norm(inputs) + inputs)), "nobody took it"


def test_modules_are_called_in_the_order_in_which_they_are_written():
    block = BasicBlock(2, 4, 2, batch_norm)
    names = {module: name for name, module in block.named_modules()}
    called = []
    for module in (*block.children(), *block.shortcut):
        module.register_forward_pre_hook(lambda module, inputs: called.append(names[module]))
    block(torch.randn(2, 2, 4, 4))
    written = ["conv1", "norm1", "relu", "conv2", "norm2", "shortcut", "shortcut.conv", "shortcut.norm", "relu"]
    assert called == written


def test_a_convolution_unit_is_a_chain():
    unit = convolution_unit(3, 4, norm=batch_norm, bias=False, pool=nn.MaxPool2d(2))
    assert [name for name, _ in unit.named_children()] == ["conv", "norm", "relu", "pool"]
    images = torch.randn(2, 3, 4, 4)
    assert torch.equal(unit.eval()(images), nn.Sequential(*unit)(images))
