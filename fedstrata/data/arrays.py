"""Datasets from what a program already holds: arrays, pairs, or a dict of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedstrata.data.channels import channel_statistics
from fedstrata.data.dataset import Dataset
from fedstrata.data.held_out import hold_out_for_testing
from fedstrata.data.split import Split
from fedstrata.errors import FedStrataError, unknown_name

_CLIENT_KEYS = ("inputs", "labels", "test_inputs", "test_labels")


class _Part(NamedTuple):
    """Samples from one source, which errors name."""

    source: str
    inputs: Tensor
    labels: Tensor


def from_arrays(
    inputs: Any,
    labels: Any = None,
    test_inputs: Any = None,
    test_labels: Any = None,
    *,
    name: str = "arrays",
    class_names: Sequence[str] | None = None,
    sites: Sequence[Any] | np.ndarray | None = None,
    test_fraction: float = 0.25,
) -> Dataset:
    """Build a dataset from tensors, NumPy arrays or lists, or from anything that yields (input, label) pairs.

    Pairs (a ``torch.utils.data.Dataset``, a generator) are given as ``inputs`` alone, and as ``test_inputs`` alone.
    Without test inputs, the fraction ``test_fraction`` of each class (and site) is held out, always the same samples.
    ``sites`` names the owner of each sample: first those of ``inputs``, then those of ``test_inputs``.

    >>> dataset = from_arrays(torch.rand(8, 2), [0, 0, 0, 0, 1, 1, 1, 1])
    >>> len(dataset.train), dataset.test.tolist(), dataset.class_names
    (6, [2, 6], ('0', '1'))
    """
    parts = [_read(inputs, labels, f"the dataset '{name}'")]
    if test_inputs is not None:
        parts.append(_read(test_inputs, test_labels, f"the test part of the dataset '{name}'"))
    pool, marks = _pool(parts)
    owners = None if sites is None else np.asarray(sites)
    if owners is not None and len(owners) != len(pool):
        raise FedStrataError(
            f"There are {len(owners)} sites for the {len(pool)} samples of the dataset '{name}'; give one per sample."
        )
    if test_inputs is None:
        train, test = hold_out_for_testing(_groups(marks, owners), _checked_fraction(test_fraction))
    else:
        train, test = np.split(np.arange(len(pool)), [len(parts[0].labels)])
    return _dataset(name, pool, marks, train, test, class_names, owners)


def from_clients(
    clients: Mapping[str, tuple[Any, ...] | Mapping[str, Any]],
    *,
    name: str = "clients",
    class_names: Sequence[str] | None = None,
    test_fraction: float = 0.25,
) -> tuple[Dataset, Split]:
    """Build a dataset and its split from the data of each client.

    A client is ``(inputs, labels)``, ``(inputs, labels, test_inputs, test_labels)``, or a dict with those keys. Of a
    client without test data, the fraction ``test_fraction`` of each class is held out. The client's name becomes the
    site of its samples.

    >>> site = (torch.rand(4, 2), [0, 0, 1, 1])
    >>> dataset, split = from_clients({"north": site, "south": site}, test_fraction=0.5)
    >>> split.sizes.tolist(), dataset.sites[split.train[1]].tolist()
    ([2, 2], ['south', 'south'])
    """
    if not clients:
        raise FedStrataError("There are no clients; give a dict from each client's name to its inputs and labels.")
    parts: list[_Part] = []
    owners: list[str] = []
    train: list[np.ndarray] = []
    test: list[np.ndarray] = []
    start = 0
    for client, given in clients.items():
        inputs, labels, test_inputs, test_labels = _client_arrays(client, given)
        own = [_read(inputs, labels, f"the client '{client}'")]
        count = len(own[0].labels)
        if test_inputs is None:
            trained, tested = hold_out_for_testing(own[0].labels.numpy(), _checked_fraction(test_fraction))
        else:
            own.append(_read(test_inputs, test_labels, f"the test part of the client '{client}'"))
            trained, tested = np.arange(count), np.arange(count, count + len(own[1].labels))
        train.append(start + trained)
        test.append(start + tested)
        parts += own
        owners += [str(client)] * sum(len(part.labels) for part in own)
        start = len(owners)
    pool, marks = _pool(parts)
    dataset = _dataset(name, pool, marks, np.concatenate(train), np.concatenate(test), class_names, np.asarray(owners))
    return dataset, Split(tuple(train), tuple(test))


def _client_arrays(client: str, given: tuple[Any, ...] | Mapping[str, Any]) -> tuple[Any, Any, Any, Any]:
    if isinstance(given, Mapping):
        for key in given:
            if key not in _CLIENT_KEYS:
                raise unknown_name(f"entry of the client '{client}' called", str(key), _CLIENT_KEYS)
        values = [given.get(key) for key in _CLIENT_KEYS]
    elif isinstance(given, tuple | list) and len(given) in (2, 4):
        values = [*given, None, None][:4]
    else:
        values = [None, None, None, None]
    if values[0] is None or values[1] is None or (values[2] is None) != (values[3] is None):
        raise FedStrataError(
            f"The client '{client}' must be (inputs, labels), (inputs, labels, test_inputs, test_labels) "
            f"or a dict with those keys."
        )
    return values[0], values[1], values[2], values[3]


def _dataset(
    name: str,
    pool: Tensor,
    labels: Tensor,
    train: np.ndarray,
    test: np.ndarray,
    class_names: Sequence[str] | None,
    sites: np.ndarray | None,
) -> Dataset:
    names = (
        tuple(class_names) if class_names is not None else tuple(str(label) for label in range(int(labels.max()) + 1))
    )
    mean, deviation = channel_statistics(pool[torch.from_numpy(train)])
    return Dataset(name, pool, labels, train, test, names, sites, mean, deviation, estimated=True)


def _groups(labels: Tensor, sites: np.ndarray | None) -> np.ndarray:
    """Number the combinations of label and site."""
    if sites is None:
        return labels.numpy()
    _, numbers = np.unique(sites, return_inverse=True)
    groups: np.ndarray = labels.numpy() * (numbers.max() + 1) + numbers.reshape(-1)
    return groups


def _checked_fraction(fraction: float) -> float:
    if not 0 <= fraction < 1:
        raise FedStrataError(f"The test fraction {fraction} is outside what is possible: at least 0 and less than 1.")
    return fraction


def _pool(parts: Sequence[_Part]) -> tuple[Tensor, Tensor]:
    first = parts[0]
    for part in parts:
        if part.inputs.shape[1:] != first.inputs.shape[1:] or part.inputs.dtype != first.inputs.dtype:
            raise FedStrataError(
                f"The samples of {part.source} are {_describe(part.inputs)}, "
                f"those of {first.source} {_describe(first.inputs)}; "
                f"all must be alike."
            )
    return torch.cat([part.inputs for part in parts]), torch.cat([part.labels for part in parts])


def _describe(inputs: Tensor) -> str:
    return f"{tuple(inputs.shape[1:])} of {str(inputs.dtype).removeprefix('torch.')}"


def _read(inputs: Any, labels: Any, source: str) -> _Part:
    if labels is None:
        inputs, labels = _unzip(inputs, source)
    pool = _inputs(inputs, source)
    marks = _labels(labels, source)
    if len(pool) != len(marks):
        raise FedStrataError(
            f"There are {len(pool)} inputs but {len(marks)} labels in {source}; give one label per input."
        )
    if len(pool) == 0:
        raise FedStrataError(f"There are no samples in {source}.")
    return _Part(source, pool, marks)


def _unzip(pairs: Any, source: str) -> tuple[Any, Any]:
    """Collect (input, label) pairs; a map-style torch dataset has a length and no end of its own."""
    if isinstance(pairs, Tensor | np.ndarray) or not (hasattr(pairs, "__iter__") or hasattr(pairs, "__getitem__")):
        raise FedStrataError(
            f"There are no labels for {source}; give them, or something that yields (input, label) pairs."
        )
    indexed = hasattr(pairs, "__len__") and hasattr(pairs, "__getitem__")
    items = [pairs[index] for index in range(len(pairs))] if indexed else list(pairs)
    if not all(isinstance(item, tuple | list) and len(item) == 2 for item in items):
        raise FedStrataError(f"What {source} yields are not (input, label) pairs.")
    return [_sample(item[0]) for item in items], [item[1] for item in items]


def _sample(value: Any) -> Tensor:
    if isinstance(value, Image.Image):
        pixels = np.array(value)
        return torch.from_numpy(pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1)))
    return torch.as_tensor(value).detach().cpu()


def _inputs(values: Any, source: str) -> Tensor:
    try:
        if isinstance(values, Sequence) and any(isinstance(value, Tensor) for value in values):
            return torch.stack([_sample(value) for value in values])
        return torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise FedStrataError(f"The inputs of {source} cannot become one tensor: {error}.") from None


def _labels(values: Any, source: str) -> Tensor:
    try:
        labels = torch.as_tensor(values).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise FedStrataError(f"The labels of {source} cannot become one tensor: {error}.") from None
    if labels.dim() == 2 and labels.shape[1] == 1:
        labels = labels.squeeze(1)
    if labels.dim() != 1:
        raise FedStrataError(
            f"The labels of {source} have the shape {tuple(labels.shape)}; "
            f"give one class number per sample, not batches or one-hot rows."
        )
    whole = labels.to(torch.int64)
    if labels.is_floating_point() and not torch.equal(whole.to(labels.dtype), labels):
        raise FedStrataError(f"The labels of {source} are not whole numbers; give one class number per sample.")
    return whole
