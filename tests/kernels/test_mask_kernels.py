"""The kernel of masks against PyTorch's operations."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, draw

from fedstrata.kernels import masks
from fedstrata.methods.mechanisms import masking


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(2, 33, 70), (1,), (3, 2048)])
def test_what_is_kept_is_bit_for_bit_what_it_was(shape, dtype):
    values = draw(*shape, dtype=dtype, learned=False)
    mask = draw(*shape, seed=1, learned=False) > 0
    values.view(-1)[0], mask.view(-1)[0] = torch.nan, False
    before = values.clone()
    kept = masks.keep(values, mask)
    assert torch.equal(kept, torch.where(mask, values, torch.zeros((), dtype=dtype, device=DEVICE)))
    assert torch.equal(values.isnan(), before.isnan())
    masks.keep_(values, mask)
    assert torch.equal(values, kept)


def test_masks_for_all_and_numbers_in_another_order_are_left_to_the_general_operations():
    values, mask = torch.ones(2, 4, device=DEVICE), torch.ones(2, 4, dtype=torch.bool, device=DEVICE)
    assert masks.takes(values, mask)
    assert not masks.takes(values, mask[:1])
    assert not masks.takes(values.t(), mask.t())
    assert not masks.takes(values, mask.to(torch.uint8))
    assert not masks.takes(values.bfloat16(), mask)
    assert not masks.takes(values[:0], mask[:0])


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU, where the kernel is chosen")
def test_gradients_go_through_the_general_operations():
    """Where weights are learned under a mask, PyTorch has to know how it was applied."""
    learned = draw(2, 3)
    mask = torch.tensor([[True, False, True]] * 2, device=DEVICE)
    kept, plain = (masking.keep({"a": weights}, {"a": mask})["a"] for weights in (learned, learned.detach()))
    assert torch.equal(kept, plain)
    (slope,) = torch.autograd.grad(kept.sum(), learned)
    assert torch.equal(slope, mask.to(slope.dtype))
