"""The kernels of norms against PyTorch's operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from triton_device import DEVICE, assert_same_both_ways, draw

from fedstrata.engines.forward import StackedForward
from fedstrata.kernels import batch_norm, group_norm
from fedstrata.models import build_model

ROWS, SAMPLES = 3, 2
TAILS = [(False, False), (True, False), (False, True), (True, True)]


@pytest.fixture
def small_blocks(monkeypatch):
    """Let a row of a hundred numbers be a long one."""
    for kernels in (batch_norm, group_norm):
        monkeypatch.setattr(kernels, "LARGEST", 64)


@pytest.mark.parametrize(("added", "rectified"), TAILS)
@pytest.mark.parametrize("count", [5, 64, 150])
def test_batch_norm_with_what_follows(count, added, rectified, small_blocks):
    inputs, beside = draw(ROWS, count), draw(ROWS, count, seed=1) if added else None
    weight, bias = draw(ROWS, seed=2), draw(ROWS, seed=3)
    learned = [inputs, weight, bias] + ([beside] if added else [])
    for training in (True, False):
        running = [torch.ones(ROWS, dtype=torch.float64, device=DEVICE) for _ in range(4)]
        options = weight, bias, training, 0.3, 1e-3
        ours = batch_norm.batch_norm(inputs, *running[:2], *options, beside, rectified)
        theirs = F.batch_norm(inputs[None], *running[2:], *options)[0]
        theirs = theirs if beside is None else theirs + beside
        assert_same_both_ways(ours, F.relu(theirs) if rectified else theirs, learned)
        torch.testing.assert_close(running[:2], running[2:])
        assert torch.equal(running[0], torch.ones_like(running[0])) != training


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("rectified", [True, False])
@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding"),
    [
        ((16, 16), (3, 3), (2, 2), (1, 1)),
        ((9, 7), (2, 3), (1, 2), (1, 0)),
        ((8, 8), (2, 2), (2, 2), (0, 0)),
        ((5, 5), (2, 2), (3, 3), (0, 0)),
    ],
)
def test_batch_norm_with_pooling(size, kernel, stride, padding, rectified, apart, small_blocks, monkeypatch):
    """Weights of both signs: under a negative one the smallest pixel of a window wins."""
    monkeypatch.setattr(batch_norm, "POOLED_APART", 4 if apart else 16)
    images = draw(ROWS, SAMPLES, *size)
    weight, bias = torch.tensor([1.5, -0.5, 0.1], dtype=torch.float64, device=DEVICE), draw(ROWS, seed=3)
    weight.requires_grad_()
    pooling = batch_norm.pooling_of(images, kernel, stride, padding)
    for training in (True, False):
        running = [torch.ones(ROWS, dtype=torch.float64, device=DEVICE) for _ in range(4)]
        options = weight, bias, training, 0.3, 1e-3
        ours = batch_norm.batch_norm(images.flatten(1), *running[:2], *options, None, rectified, pooling)
        theirs = F.batch_norm(images.transpose(0, 1), *running[2:], *options)
        theirs = F.max_pool2d(F.relu(theirs) if rectified else theirs, kernel, stride, padding).transpose(0, 1)
        assert_same_both_ways(ours.view(theirs.shape), theirs, [images, weight, bias])
        torch.testing.assert_close(running[:2], running[2:])


def test_batch_norm_by_hand():
    rows = torch.tensor([[1.0, 2.0, 3.0, 6.0]], device=DEVICE)
    mean, variance = torch.zeros(1, device=DEVICE), torch.zeros(1, device=DEVICE)
    outputs = batch_norm.batch_norm(rows, mean, variance, None, None, True, 0.5, 0.5, rectified=True)
    torch.testing.assert_close(outputs.cpu(), torch.tensor([[0.0, 0.0, 0.0, 3 / 2]]))  # 3.5 + 0.5 is 2 squared
    assert (mean.item(), round(variance.item(), 5)) == (1.5, round(14 / 3 / 2, 5))


def test_variances_far_from_zero_keep_their_digits(small_blocks):
    """The difference of the mean square and the squared mean would have none left."""
    inputs = (draw(ROWS, 150, learned=False) + 1e4).float()
    outputs = batch_norm.batch_norm(inputs, None, None, None, None, True, 0.1, 1e-5)
    exact = F.batch_norm(inputs.double()[None], None, None, training=True)[0]
    torch.testing.assert_close(outputs.double(), exact, rtol=1e-3, atol=2e-3)
    images = inputs[:, :144].reshape(1, ROWS, 1, 144).contiguous()
    outputs = group_norm.group_norm(images, 1, None, None, 1e-5)
    exact = F.group_norm(images.double().transpose(1, 2)[0], 1).transpose(0, 1)[None]
    torch.testing.assert_close(outputs.double(), exact, rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize(("added", "rectified"), TAILS)
@pytest.mark.parametrize(("channels", "groups", "pixels"), [(6, 2, 9), (2, 2, 40), (3, 1, 1)])
def test_group_norm_with_what_follows(channels, groups, pixels, added, rectified, small_blocks):
    clients, shape = 2, (2, channels, SAMPLES, pixels)
    inputs, beside = draw(*shape), draw(*shape, seed=1) if added else None
    weight, bias = draw(clients * channels, seed=2), draw(clients * channels, seed=3)
    ours = group_norm.group_norm(inputs, groups, weight, bias, 1e-3, beside, rectified)
    flat = inputs.permute(2, 0, 1, 3).reshape(SAMPLES, clients * channels, pixels)
    theirs = F.group_norm(flat, clients * groups, weight, bias, 1e-3)
    theirs = theirs.view(SAMPLES, clients, channels, pixels).permute(1, 2, 0, 3)
    theirs = theirs if beside is None else theirs + beside
    learned = [inputs, weight, bias] + ([beside] if added else [])
    assert_same_both_ways(ours, F.relu(theirs) if rectified else theirs, learned)


def test_types_of_results():
    """Norms keep bfloat16, unless something wider is added; parameters may be wider than inputs."""
    inputs, weight = draw(2, 8, dtype=torch.bfloat16), draw(2, seed=1, dtype=torch.float32)
    outputs = batch_norm.batch_norm(inputs, None, None, weight, weight, True, 0.1, 1e-5, rectified=True)
    images = inputs.view(1, 2, 2, 4)
    grouped = group_norm.group_norm(images, 2, weight, weight, 1e-5, rectified=True)
    wide = group_norm.group_norm(images, 2, weight, weight, 1e-5, added=images.float())
    assert (outputs.dtype, grouped.dtype, wide.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    for result in (outputs, grouped, wide):
        for_inputs, for_weight = torch.autograd.grad(result.float().square().sum(), (inputs, weight))
        assert (for_inputs.dtype, for_weight.dtype) == (torch.bfloat16, torch.float32)
    exact = F.relu(F.batch_norm(inputs.float()[None], None, None, weight, weight, True))[0]
    torch.testing.assert_close(outputs.float(), exact, rtol=1e-2, atol=1e-2)
    exact = F.relu(F.group_norm(inputs.float().view(2, 2, 4).transpose(0, 1), 2, weight, weight)).transpose(0, 1)
    torch.testing.assert_close(grouped[0].float(), exact, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("name", ["resnet8", "resnet18", "cnn(norm=group)"])
def test_models_on_a_gpu_compute_what_they_do_on_a_cpu(name):
    clients, shape = 4, (3, 16, 16)
    model = build_model(name, shape, 10, seed=0).double()
    images = draw(clients, 2, *shape, learned=False).cpu()
    results = []
    for device in ("cpu", "cuda", "cuda"):
        model.to(device)
        parameters, buffers = (
            {name: tensor.detach().expand(clients, *tensor.shape).clone().to(device) for name, tensor in own}
            for own in (model.named_parameters(), model.named_buffers())
        )
        for tensor in parameters.values():
            tensor.requires_grad_()
        keys = torch.zeros(clients, 2, dtype=torch.int64, device=device)
        outputs, after = StackedForward(model)(parameters, buffers, images.to(device), keys, training=True)
        gradients = torch.autograd.grad(outputs.square().sum(), list(parameters.values()))
        results.append([tensor.cpu() for tensor in (outputs.detach(), *after.values(), *gradients)])
    torch.testing.assert_close(results[0], results[1], rtol=1e-7, atol=1e-9)
    assert all(map(torch.equal, results[1], results[2])), "results must repeat bit for bit"
