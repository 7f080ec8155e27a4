"""Bytes by encoding, against bytes that are really written."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedstrata.methods.contract.views import Message
from fedstrata.wire import ENCODINGS, bytes_by_encoding, encode


def message(clients: int = 1) -> Message:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(clients, 40, 25, generator=generator)
    mask = torch.rand(clients, 40, 25, generator=generator) < 0.1
    return Message({"weight": weights, "bias": torch.ones(clients, 40)}, {"weight": mask})


def test_sizes_are_those_of_written_bytes() -> None:
    one = message()
    sizes = bytes_by_encoding(one)
    assert list(sizes) == list(ENCODINGS)
    dense = encode(Message(one.tensors))
    assert sizes["dense"] == len(dense)
    assert sizes["first"] == len(encode(one))
    assert sizes["held"] == len(encode(one, one.masks))
    mask, values = one.masks["weight"].numpy().reshape(-1), one.tensors["weight"].numpy().reshape(-1)
    rest = len(dense) - values.nbytes  # the bias, the frame and the description
    positions = np.flatnonzero(mask).astype(np.uint32)
    assert sizes["COO"] == rest + len(positions.tobytes() + values[mask].tobytes())
    assert sizes["bitmask"] == rest + len(np.packbits(mask).tobytes() + values[mask].tobytes())


def test_clients_are_added_up() -> None:
    together = message(3)
    alone = [bytes_by_encoding(together.rows(torch.tensor([client]))) for client in range(3)]
    assert bytes_by_encoding(together, 3) == {name: sum(one[name] for one in alone) for name in ENCODINGS}


def test_without_masks_all_are_dense() -> None:
    assert len(set(bytes_by_encoding(Message({"weight": torch.ones(1, 10)})).values())) == 1


@pytest.mark.parametrize(
    ("every", "percents"), [(2, {"dense": 100, "bitmask": 53.1, "COO": 100, "held": 50}), (20, {"COO": 10, "held": 5})]
)
def test_the_percentages_of_the_paper(every: int, percents: dict[str, float]) -> None:
    """SSFL, table 5: what is left out of it are the frame and the description, a few dozen bytes of 400,000."""
    mask = (torch.arange(100_000) % every == 0)[None]
    sizes = bytes_by_encoding(Message({"weight": torch.ones(1, 100_000)}, {"weight": mask}))
    for name, percent in percents.items():
        assert 100 * sizes[name] / sizes["dense"] == pytest.approx(percent, abs=0.05)
