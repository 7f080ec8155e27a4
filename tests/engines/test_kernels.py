"""The GPU kernels; skipped where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from fedstrata import rng
from fedstrata.engines.convolution import unfolded_windows

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("kernel", "stride", "padding"),
    [((3, 3), (1, 1), (1, 1)), ((7, 7), (2, 2), (3, 3)), ((1, 1), (2, 2), (0, 0)), ((3, 2), (2, 1), (0, 1))],
)
def test_windows_are_those_of_the_general_operation(kernel, stride, padding, dtype):
    from fedstrata.kernels.windows import windows

    images = torch.randn(4, 8, 10, 9, 7, device="cuda", dtype=dtype)
    columns, shape = windows(images, kernel, stride, padding)
    expected, expected_shape = unfolded_windows(images, kernel, stride, padding)
    assert shape == expected_shape
    assert torch.equal(columns, expected)


@pytest.mark.parametrize("order", [(1, 0, 2, 3, 4), (2, 0, 1, 3, 4), (1, 2, 0, 3, 4), (0, 1, 2, 4, 3)])
def test_windows_of_images_that_lie_in_another_order(order):
    """Group norm leaves ``[B, K, C, H, W]`` in memory, the input ``[K, B, C, H, W]``."""
    from fedstrata.kernels.windows import windows

    shape = torch.tensor([4, 8, 10, 9, 7])
    laid = torch.randn(*shape[list(order)].tolist(), device="cuda")
    images = laid.permute(*torch.tensor(order).argsort().tolist())
    assert images.shape == (4, 8, 10, 9, 7)
    columns, _ = windows(images, (3, 3), (1, 1), (1, 1))
    assert torch.equal(columns, unfolded_windows(images, (3, 3), (1, 1), (1, 1))[0])


def test_more_planes_than_a_grid_axis_allows():
    from fedstrata.kernels.windows import windows

    images = torch.randn(300, 256, 1, 3, 3, device="cuda")
    columns, _ = windows(images, (3, 3), (1, 1), (1, 1))
    expected, _ = unfolded_windows(images, (3, 3), (1, 1), (1, 1))
    assert torch.equal(columns, expected)


@pytest.mark.parametrize("shape", [(1,), (7,), (3, 1), (2, 5)])
@pytest.mark.parametrize("count", [1, 4, 5, 4099])
def test_the_random_words_of_the_kernel_are_those_of_the_operations(shape, count):
    from fedstrata.kernels.random_words import philox_words

    keys = torch.randint(0, 2**32, (*shape, 2), device="cuda")
    for stream in (0, 2**32 - 1, torch.arange(shape[-1], device="cuda")[:, None]):
        drawn = rng.philox(keys, count, stream)
        assert torch.equal(drawn, rng._philox_words(keys, stream, -(-count // 4)))
        assert torch.equal(
            drawn.cpu(), rng.philox(keys.cpu(), count, stream.cpu() if torch.is_tensor(stream) else stream)
        )
    assert rng._philox_kernels(keys.device).philox_words is philox_words
