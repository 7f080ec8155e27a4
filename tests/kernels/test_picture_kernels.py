"""The kernel that makes batches of images against the general operations, bit for bit."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE

from fedstrata import rng
from fedstrata.data import from_arrays, pictures
from fedstrata.data.transforms import parse_transforms
from fedstrata.kernels import pictures as kernels
from fedstrata.kernels.random_words import philox_words


@pytest.mark.parametrize(
    ("text", "own"),
    [
        ("flip+crop:2+normalise", False),
        ("crop:1+flip+normalise:site", True),
        ("normalise+flip", False),
        ("flip+rotate:15+normalise+crop:2", False),
        ("crop:2+normalise+rotate:180+flip", False),
        ("rotate:60+crop:1", False),
        ("none", False),
    ],
)
def test_pictures_are_those_of_the_general_operations(text, own, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    samples = torch.randint(0, 256, (12, 3, 6, 5), dtype=torch.uint8, generator=draw)
    dataset = from_arrays(samples, torch.arange(12) % 2)
    samples, positions = samples.to(DEVICE), torch.randint(0, 12, (2, 3), generator=draw).to(DEVICE)
    keys = rng.client_keys(0, 1, [4, 5], "transforms", DEVICE)
    statistics = tuple(torch.rand(2, 3, generator=draw).to(DEVICE) + 0.5 for _ in range(2)) if own else None
    chosen = parse_transforms(text)
    step = torch.tensor([2**32 - 3], device=DEVICE)
    given = chosen, samples, positions, torch.float32, dataset, keys, step, statistics
    monkeypatch.setattr(pictures, "_kernels", lambda: None)
    expected = pictures.make_inputs(*given)
    table = pictures._table([one for one in chosen if not one.random], samples, torch.float32, dataset, statistics)
    assert pictures._movable(chosen, samples, positions, step)
    assert torch.equal(pictures.moved(kernels, chosen, samples, positions, table, keys, step), expected)


def test_what_a_kernel_cannot_do_is_left_to_the_general_operations():
    samples, positions = torch.zeros(2, 3, 4, 4, dtype=torch.uint8), torch.zeros(1, 2, dtype=torch.int64)
    assert pictures._movable(parse_transforms("flip+rotate+normalise+crop"), samples, positions, 0)
    assert not pictures._movable(parse_transforms("flip+randaugment"), samples, positions, 0)
    assert not pictures._movable((), samples.float(), positions, 0)
    assert not pictures._movable((), samples, positions, torch.zeros(2, 1, dtype=torch.int64))


def test_random_words_are_those_of_the_operations():
    keys = torch.randint(0, 2**32, (3, 2), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    streams = torch.tensor([0, 7, 2**32 - 1], device=DEVICE)
    assert torch.equal(philox_words(keys, streams, 5), rng._philox_words(keys, streams[:, None], 5))
