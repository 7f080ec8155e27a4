"""The kernels of max-pooling against PyTorch's operation."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from triton_device import DEVICE, assert_same_both_ways

from fedstrata.kernels import pooling


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [((3, 3), (2, 2), (1, 1)), ((2, 2), (2, 2), (0, 0)), ((2, 3), (1, 2), (1, 0)), ((2, 2), (3, 3), (0, 0))],
)
def test_pooling_is_that_of_the_general_operation(kernel, stride, padding):
    """Also where several pixels are largest, and where all of them are minus infinity."""
    images = torch.randint(-2, 3, (4, 9, 7), generator=torch.Generator().manual_seed(0)).to(DEVICE, torch.float64)
    images[0] = -torch.inf
    images.requires_grad_()
    assert pooling.takes(images, kernel, stride, padding)
    ours = pooling.max_pool(images, kernel, stride, padding)
    assert_same_both_ways(ours, F.max_pool2d(images, kernel, stride, padding), [images])


def test_a_window_with_what_is_no_number_is_none():
    images = torch.zeros(1, 2, 4, device=DEVICE)
    images[0, 1, 0] = torch.nan
    assert pooling.max_pool(images, (2, 2), (2, 2), (0, 0)).isnan().tolist() == [[[True, False]]]


def test_what_cannot_be_pooled_is_left_to_the_general_operation():
    images = torch.zeros(1, 20, 20, device=DEVICE)
    assert not pooling.takes(images, (16, 16), (1, 1), (0, 0)), "a window has more pixels than a byte can tell apart"
    assert not pooling.takes(images, (2, 2), (1, 1), (2, 2)), "PyTorch refuses such a padding"
    assert not pooling.takes(images, (21, 2), (1, 1), (0, 0)), "there is no window"
    assert not pooling.takes(images.int(), (2, 2), (1, 1), (0, 0))
