"""The kernel that marks the lowest numbers of rows, against sorting."""

from __future__ import annotations

import math

import pytest
import torch
from triton_device import DEVICE, draw

from fedstrata.functional import _entries
from fedstrata.kernels import selecting


def by_sorting(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    places = rows.cpu().argsort(dim=1, stable=True)
    ranks = torch.empty_like(places).scatter_(1, places, torch.arange(rows.shape[1]).expand_as(places))
    return (ranks < counts.cpu()[:, None]).to(rows.device)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(selecting, "_BLOCK", 16)
    monkeypatch.setattr(selecting, "_WARPS", 1)


@pytest.mark.parametrize("size", [1, 15, 16, 50])
def test_the_lowest_are_those_of_a_stable_sort(size):
    rows = draw(4, size, dtype=torch.float32, learned=False)
    rows[1] = rows[1].round()  # many are equal
    counts = torch.tensor([0, size // 2, size, 1], device=DEVICE)
    assert torch.equal(selecting.lowest(rows, counts), by_sorting(rows, counts))


def test_zeros_have_no_sign_and_infinite_numbers_are_at_the_ends():
    rows = torch.tensor([[0.0, -0.0, 1e-45, -1e-45, math.inf, -math.inf]], device=DEVICE)
    for count in range(7):
        counts = torch.tensor([count], device=DEVICE)
        expected = [False] * 6
        for place in (5, 3, 0, 1, 2, 4)[:count]:
            expected[place] = True
        assert selecting.lowest(rows, counts).tolist() == [expected]


def test_of_equal_numbers_the_first_are_marked_over_the_bounds_of_blocks():
    rows = torch.ones(2, 40, device=DEVICE)
    rows[1, 35] = 0
    marks = selecting.lowest(rows, torch.tensor([20, 20], device=DEVICE))
    assert marks.nonzero()[:, 1].tolist() == [*range(20), *range(19), 35]


def test_which_rows_the_kernel_takes():
    rows = torch.ones(16, 4, device=DEVICE)
    assert selecting.takes(rows)
    assert not selecting.takes(rows[:15])
    assert not selecting.takes(rows.double())
    assert not selecting.takes(rows[:, ::2])
    assert not selecting.takes(rows[:, :0])


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU, where the kernel is chosen")
@pytest.mark.parametrize("count", [7, torch.arange(20)])
def test_masks_on_a_gpu_are_those_on_a_cpu(count):
    rows = draw(20, 3000, dtype=torch.float32, learned=False).round(decimals=1)
    counts = count.to(DEVICE) if isinstance(count, torch.Tensor) else count
    assert torch.equal(_entries.lowest(rows, counts).cpu(), _entries.lowest(rows.cpu(), count))
