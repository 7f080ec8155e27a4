"""What may be handed over as data: each kind finds the way by which it becomes a dataset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.data.arrays import from_arrays, from_clients
from fedstrata.data.columns import is_table
from fedstrata.data.dataset import Dataset
from fedstrata.data.objects import is_sample_dataset, train_and_test
from fedstrata.data.split import Split
from fedstrata.data.tables import from_table
from fedstrata.errors import FedStrataError


def read_data(given: Any) -> tuple[Dataset, Split | None]:
    """Make a dataset of what a user holds, and a split, where it tells who has what.

    That is a dataset, alone or with its split; arrays ``(inputs, labels)`` or ``(inputs, labels, test_inputs,
    test_labels)``; a dataset of PyTorch or of the Hugging Face hub, a pair of these or a ``DatasetDict``; a table; or a
    dict from each client's name to any of those.
    """
    if isinstance(given, Dataset):
        return given, None
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], Dataset) and isinstance(given[1], Split):
        return given[0], given[1]
    pair = train_and_test(given)
    if pair is not None:
        return from_arrays(pair[0], test_inputs=pair[1]), None
    if isinstance(given, Mapping):
        return from_clients(given)
    if isinstance(given, Path) or is_table(given):
        return from_table(given), None
    if is_sample_dataset(given):
        return from_arrays(given), None
    if isinstance(given, tuple) and len(given) in (2, 4) and not any(isinstance(one, Dataset | Split) for one in given):
        return from_arrays(*given), None
    raise FedStrataError(
        f"{_described(given)} is no data; give the name of a dataset, a fedstrata.Dataset alone or with its split, "
        "(inputs, labels), a dataset of PyTorch or of the Hugging Face hub, a table, or a dict from each client's name "
        "to one of these. fedstrata.from_arrays, from_table and from_clients take more to say about them."
    )


def _described(given: Any) -> str:
    if isinstance(given, tuple | list):
        return f"A {type(given).__name__} of {', '.join(type(one).__name__ for one in given[:4]) or 'nothing'}"
    return f"A {type(given).__name__}"
