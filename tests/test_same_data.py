"""Data that has changed since a run began is noticed, down to a single value."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedstrata
from fedstrata.data import Dataset
from fedstrata.data.contents import fingerprint
from fedstrata.errors import FedStrataError

SMALL = {"clients": 2, "partition": "iid", "model": "mlp(hidden=4)", "method": "fedavg", "epochs": 1, "engine": "loop"}


def pool(inputs: torch.Tensor | None = None, **changes: Any) -> Dataset:
    values = torch.arange(12, dtype=torch.float32).reshape(6, 2) if inputs is None else inputs
    labels = torch.tensor([0, 1, 0, 1, 0, 1])
    return dataclasses.replace(Dataset("pool", values, labels, np.arange(4), np.arange(4, 6), ("no", "yes")), **changes)


def images(folder: Path) -> Path:
    """Write two classes of eight images each."""
    for number, name in enumerate(("cat", "dog")):
        (folder / name).mkdir(parents=True)
        for place in range(8):
            Image.new("RGB", (4, 4), (100 * number, 10 * place, 0)).save(folder / name / f"{place}.png")
    return folder


def begun(folder: Path, data: str | Dataset, rounds: int = 1) -> Path:
    fedstrata.run(data=data, rounds=rounds, out=folder / "run", **SMALL)
    return folder / "run"


def test_a_fingerprint_is_that_of_all_values():
    first = fingerprint(pool())
    assert first == fingerprint(pool())
    assert first == fingerprint(pool(mean=(0.0, 0.0), deviation=(1.0, 1.0), name="other")), "not of what is said of it"
    changed = torch.arange(12, dtype=torch.float32).reshape(6, 2)
    changed[5, 1] = float(np.nextafter(np.float32(11), np.float32(12)))
    others = [
        pool(changed),
        pool(pool().inputs.double()),
        pool(pool().inputs.reshape(6, 2, 1)),
        pool(labels=torch.tensor([0, 1, 0, 1, 1, 0])),
        pool(train=np.arange(1, 4)),
        pool(test=np.array([5, 4])),
    ]
    assert len({first, *map(fingerprint, others)}) == 1 + len(others)


@pytest.mark.parametrize("kind", [torch.uint8, torch.bfloat16, torch.float64, torch.int64])
def test_every_type_and_layout_has_one(kind):
    values = torch.arange(12).reshape(2, 6).to(kind)
    assert fingerprint(pool(values.T)) == fingerprint(pool(values.T.contiguous()))


def test_large_pools_are_hashed_piece_by_piece(monkeypatch):
    whole = fingerprint(pool())
    monkeypatch.setattr("fedstrata.data.contents._CHUNK_BYTES", 16)
    assert fingerprint(pool()) == whole


def test_samples_of_which_only_the_number_is_known_have_none():
    assert fingerprint(pool(torch.zeros(1).expand(6, 1000, 1000))) is None


@pytest.mark.attack(
    "Between two sessions of a run, one pixel of one image changes; names, number and sizes of the files stay.",
    "Neither 'fedstrata resume' nor a longer run goes on: a sentence says that the data has changed.",
)
def test_a_changed_pixel_is_noticed(tmp_path):
    data = f"image_folder(path='{images(tmp_path / 'images')}', size=4)"
    folder = begun(tmp_path, data)
    path = tmp_path / "images" / "dog" / "3.png"
    before = path.read_bytes()
    with Image.open(path) as image:
        changed = image.convert("RGB")
    changed.putpixel((2, 1), (100, 30, 1))
    changed.save(path)
    with pytest.raises(FedStrataError, match="has changed since it began: some inputs or labels are others"):
        fedstrata.extend(folder, 2)
    path.write_bytes(before)
    assert fedstrata.extend(folder, 2).summary["rounds"] == 2, "with the data as it was, it goes on"


def test_arrays_that_have_changed_are_noticed(tmp_path):
    folder = begun(tmp_path, pool())
    other = pool(labels=torch.tensor([0, 1, 0, 1, 1, 0]))
    with pytest.raises(FedStrataError, match="has changed"):
        fedstrata.extend(folder, 2, data=other)


def test_a_run_from_before_goes_on_without_a_fingerprint(tmp_path):
    folder = begun(tmp_path, pool())
    described = json.loads((folder / "data.json").read_text())
    del described["contents"]
    (folder / "data.json").write_text(json.dumps(described))
    assert fedstrata.extend(folder, 2, data=pool()).summary["rounds"] == 2
