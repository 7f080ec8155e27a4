"""The kernels that unfold windows and add them back, against PyTorch's operations."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, draw

from fedstrata.engines.convolution import added_back, unfolded_windows
from fedstrata.kernels import windows

GEOMETRIES = [
    ((3, 3), (2, 2), (1, 1)),
    ((1, 1), (2, 2), (0, 0)),
    ((3, 3), (1, 1), (1, 1)),
    ((2, 3), (3, 4), (1, 0)),
    ((7, 7), (2, 2), (3, 3)),
    ((2, 2), (3, 3), (2, 2)),
]


@pytest.mark.parametrize("size", [(8, 8), (9, 7)])
@pytest.mark.parametrize(("kernel", "stride", "padding"), GEOMETRIES)
def test_unfolding_and_adding_back_are_those_of_the_general_operations(kernel, stride, padding, size):
    images = draw(2, 3, 4, *size, learned=False)
    columns, places = windows.windows(images, kernel, stride, padding)
    expected, expected_places = unfolded_windows(images, kernel, stride, padding)
    assert torch.equal(columns, expected)
    assert places == expected_places
    back = draw(*columns.shape, seed=1, learned=False)
    geometry = images.shape, places[1:], kernel, stride, padding
    torch.testing.assert_close(windows.fold(back, *geometry), added_back(back, *geometry))


def test_adding_back_is_the_adjoint_of_unfolding():
    """The products of any images with columns folded, and of the images unfolded with the columns, are the same."""
    images = draw(2, 3, 4, 6, 5, learned=False)
    geometry = (3, 2), (2, 3), (1, 1)
    columns, places = windows.windows(images, *geometry)
    back = draw(*columns.shape, seed=1, learned=False)
    folded = windows.fold(back, images.shape, places[1:], *geometry)
    torch.testing.assert_close((images * folded).sum(), (columns * back).sum())


def test_narrow_columns_are_added_up_in_wide_numbers():
    columns = torch.zeros(1, 4, 4, dtype=torch.bfloat16, device=DEVICE)
    for tap, place, value in ((0, 3, 256.0), (1, 2, 1.0), (2, 1, 1.0)):  # all of the pixel in the middle
        columns[0, tap, place] = value
    folded = windows.fold(columns, torch.Size((1, 1, 1, 3, 3)), (2, 2), (2, 2), (1, 1), (0, 0))
    assert folded[0, 0, 0, 1, 1].item() == 258, "one by one in bfloat16 it would stay 256"
