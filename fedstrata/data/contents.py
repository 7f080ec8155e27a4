"""A fingerprint of a dataset's samples, by which data that has changed since a run began is noticed.

What is hashed is what was loaded, not the files: so nothing that changes a sample goes unnoticed, wherever it comes
from, and nothing else counts. The 180 MB of CIFAR-10 take 0.1 to 0.3 seconds, far less than to load them, so that
nothing has to be remembered of the files' sizes and times, which can lie.
"""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import torch

from fedstrata.data.dataset import Dataset

_CHUNK_BYTES = 2**24
_WHEN_LOADED, _KNOWN = "_fingerprint_when_loaded", "_fingerprint"


def fingerprint(dataset: Dataset) -> str | None:
    """Hash all inputs and labels, and which of them are to train and to test on.

    There is none for samples of which only the number is known, as at a server of real sites.
    """
    if _KNOWN in vars(dataset):
        return str(vars(dataset)[_KNOWN])
    inputs = dataset.inputs.detach()
    if inputs.untyped_storage().nbytes() < inputs.nbytes:  # one value stands for all
        return None
    digest = sha256(f"{inputs.dtype} {list(inputs.shape)}".encode())
    for pool in (inputs, dataset.labels):
        rows = max(1, _CHUNK_BYTES * len(pool) // max(1, pool.nbytes))
        for start in range(0, len(pool), rows):
            chunk = pool[start : start + rows]
            digest.update(chunk.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    for positions in (dataset.train, dataset.test):
        digest.update(len(positions).to_bytes(8, "little"))
        digest.update(np.ascontiguousarray(positions, dtype="<i8").tobytes())
    return digest.hexdigest()


def remember(dataset: Dataset, found: str | None) -> None:
    """Note the fingerprint that samples had when they were loaded."""
    vars(dataset)[_WHEN_LOADED] = found


def untouched(dataset: Dataset) -> Dataset:
    """Let the fingerprint stand that was found while loading, if it was: nobody has had the samples in hand since."""
    found = vars(dataset).get(_WHEN_LOADED)
    if found is not None:
        vars(dataset)[_KNOWN] = found
    return dataset
