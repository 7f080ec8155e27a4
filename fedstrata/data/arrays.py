"""Datasets from what a program already holds: arrays, pairs, datasets of other libraries, or a dict of clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedstrata.data.channels import channel_statistics
from fedstrata.data.columns import Texts, is_table, read_column, read_table
from fedstrata.data.dataset import Dataset
from fedstrata.data.held_out import checked_fraction, groups_of, hold_out_for_testing
from fedstrata.data.labels import Marks, number_labels, read_labels, refuse_untrained, tell_alike, tell_sites_alike
from fedstrata.data.objects import as_sample, by_text, is_sample_dataset, read_items, train_and_test
from fedstrata.data.split import Split
from fedstrata.data.tables import SiteTables, from_table
from fedstrata.errors import FedStrataError, unknown_name

_IMAGE_CHANNELS = (1, 3, 4)
_CLIENT_KEYS = ("inputs", "labels", "test_inputs", "test_labels")


class _Part(NamedTuple):
    """Samples from one source, which errors name, and the names of their classes, where the source tells them."""

    source: str
    inputs: Tensor
    labels: Marks
    class_names: tuple[str, ...] | None


def from_arrays(
    inputs: Any,
    labels: Any = None,
    test_inputs: Any = None,
    test_labels: Any = None,
    *,
    name: str = "arrays",
    label: str | int | None = None,
    features: str | int | None = None,
    class_names: Sequence[Any] | None = None,
    sites: Sequence[Any] | np.ndarray | None = None,
    test_fraction: float = 0.25,
) -> Dataset:
    """Build a dataset from tensors, NumPy arrays or lists, or from a dataset of another library.

    A ``torch.utils.data.Dataset``, a ``datasets.Dataset`` of the Hugging Face hub or anything else that yields
    (input, label) pairs, or dicts with an input and a label, is given as ``inputs`` alone, and as ``test_inputs``
    alone; ``label`` and ``features`` name the columns where they are called otherwise than usual. Without test inputs,
    the fraction ``test_fraction`` of each class (and site) is held out, always the same samples. ``sites`` names the
    owner of each sample: first those of ``inputs``, then those of ``test_inputs``.

    Labels are texts or whole numbers of any range: the classes are the distinct ones in their order, or
    ``class_names``, which labels either are or number from 0 on. Inputs that are bytes are images, scaled to [0, 1];
    other whole numbers, such as those of tokens, stay as they are.

    >>> dataset = from_arrays(torch.rand(8, 2), ["no", "no", "no", "no", "yes", "yes", "yes", "yes"])
    >>> len(dataset.train), dataset.test.tolist(), dataset.class_names
    (6, [2, 6], ('no', 'yes'))
    """
    if labels is None and (is_table(inputs) or isinstance(inputs, Mapping)) and sites is None:
        return from_table(
            inputs, label=label, test=test_inputs, test_fraction=test_fraction, features=features,
            class_names=class_names, name=name,
        )  # fmt: skip
    parts = [_read(inputs, labels, f"the dataset '{name}'", label, features)]
    if test_inputs is not None:
        parts.append(_read(test_inputs, test_labels, f"the test part of the dataset '{name}'", label, features))
    pool = _pool(parts)
    numbers, names = _number(parts, class_names)
    marks = torch.cat(numbers)
    owners = None if sites is None else _owners(sites, len(pool), f"the dataset '{name}'")
    if owners is not None:
        tell_sites_alike([str(owner) for owner in np.unique(owners)], f"the dataset '{name}'")
    if test_inputs is None:
        train, test = hold_out_for_testing(groups_of(marks, owners), checked_fraction(test_fraction))
    else:
        train, test = np.split(np.arange(len(pool)), [len(parts[0].inputs)])
    named = _are_named(parts, class_names)
    refuse_untrained(marks, train, names, parts[0].source, named)
    if not named:
        tell_alike(names, parts[0].source)
    return _dataset(name, pool, marks, train, test, names, owners)


def from_clients(
    clients: Mapping[Any, Any],
    *,
    name: str = "clients",
    label: str | int | None = None,
    features: str | int | None = None,
    class_names: Sequence[Any] | None = None,
    test_fraction: float = 0.25,
) -> tuple[Dataset, Split]:
    """Build a dataset and its split from the data of each client.

    A client is ``(inputs, labels)``, ``(inputs, labels, test_inputs, test_labels)``, a dict with those keys, a dataset
    of PyTorch or of the Hugging Face hub (see :func:`from_arrays`), a pair of those or a ``DatasetDict`` to train and
    to test on, or a table (see :func:`from_table`), in which ``label`` names the column of the classes. Of a client
    without test data, the fraction ``test_fraction`` of each class is held out. The client's name becomes the site of
    its samples.

    >>> site = (torch.rand(4, 2), [0, 0, 1, 1])
    >>> dataset, split = from_clients({"north": site, "south": site}, test_fraction=0.5)
    >>> split.sizes.tolist(), dataset.sites[split.train[1]].tolist()
    ([2, 2], ['south', 'south'])
    """
    if not clients:
        raise FedStrataError("There are no clients; give a dict from each client's name to its inputs and labels.")
    given = {client: _client_arrays(client, one) for client, one in by_text(clients, "clients").items()}
    if any(labels is None and is_table(inputs) for inputs, labels, _, _ in given.values()):
        return _from_tables(given, name, label, features, class_names, test_fraction)
    parts: list[_Part] = []
    owners: list[str] = []
    whose: list[list[_Part]] = []
    for client, (inputs, labels, test_inputs, test_labels) in given.items():
        own = [_read(inputs, labels, f"the client '{client}'", label, features)]
        if test_inputs is not None:
            own.append(_read(test_inputs, test_labels, f"the test part of the client '{client}'", label, features))
        whose.append(own)
        parts += own
        owners += [client] * sum(len(part.inputs) for part in own)
    pool = _pool(parts)
    numbers, names = _number(parts, class_names)
    marks = torch.cat(numbers)
    train: list[np.ndarray] = []
    test: list[np.ndarray] = []
    start = 0
    for own in whose:
        count, end = len(own[0].inputs), start + sum(len(part.inputs) for part in own)
        if len(own) == 1:
            trained, tested = hold_out_for_testing(marks[start:end].numpy(), checked_fraction(test_fraction))
        else:
            trained, tested = np.arange(count), np.arange(count, end - start)
        train.append(start + trained)
        test.append(start + tested)
        start = end
    trained, tested = np.concatenate(train), np.concatenate(test)
    named = _are_named(parts, class_names)
    refuse_untrained(marks, trained, names, f"the dataset '{name}'", named)
    if not named:
        tell_alike(names, f"the dataset '{name}'")
    dataset = _dataset(name, pool, marks, trained, tested, names, np.asarray(owners))
    return dataset, Split(tuple(train), tuple(test))


def _from_tables(
    given: Mapping[str, tuple[Any, Any, Any, Any]],
    name: str,
    label: str | int | None,
    features: str | int | None,
    class_names: Sequence[Any] | None,
    test_fraction: float,
) -> tuple[Dataset, Split]:
    """Build the dataset of clients that have a table each."""
    for client, (inputs, labels, _, _) in given.items():
        if labels is not None or not is_table(inputs):
            raise FedStrataError(
                f"Some clients have a table, but the client '{client}' a {type(inputs).__name__}; give all of them "
                "tables, or all of them arrays."
            )
    tests = {client: test for client, (_, _, test, _) in given.items() if test is not None}
    if tests and len(tests) < len(given):
        lacking = next(client for client in given if client not in tests)
        raise FedStrataError(f"The client '{lacking}' has no table to test on, but others have; give all one, or none.")
    dataset = from_table(
        SiteTables({client: table for client, (table, _, _, _) in given.items()}),
        label=label, test=tests or None, test_fraction=test_fraction, features=features, class_names=class_names,
        name=name,
    )  # fmt: skip
    assert dataset.sites is not None
    sites = dataset.sites
    parts = ([part[sites[part] == client] for client in given] for part in (dataset.train, dataset.test))
    return dataset, Split(*map(tuple, parts))


def _client_arrays(client: str, given: Any) -> tuple[Any, Any, Any, Any]:
    pair = train_and_test(given)
    values: list[Any]
    if pair is not None:
        return pair[0], None, pair[1], None
    if is_sample_dataset(given) or is_table(given):
        return given, None, None, None
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
            f"The client '{client}' must be (inputs, labels), (inputs, labels, test_inputs, test_labels), a dict with "
            f"those keys, a dataset of PyTorch or of the Hugging Face hub, or a table; it is a {type(given).__name__}."
        )
    return values[0], values[1], values[2], values[3]


def _dataset(
    name: str,
    pool: Tensor,
    labels: Tensor,
    train: np.ndarray,
    test: np.ndarray,
    class_names: tuple[str, ...],
    sites: np.ndarray | None,
) -> Dataset:
    mean, deviation = channel_statistics(pool[torch.from_numpy(train)])
    return Dataset(name, pool, labels, train, test, class_names, sites, mean, deviation, estimated=True)


def _number(parts: Sequence[_Part], class_names: Sequence[Any] | None) -> tuple[list[Tensor], tuple[str, ...]]:
    """Number the labels of all parts; the names of classes are those given, or those that the sources tell alike."""
    told = [part for part in parts if part.class_names is not None]
    if class_names is None and told:
        class_names = told[0].class_names
        for part in parts:
            if part.class_names != class_names:
                raise FedStrataError(
                    f"The classes of {part.source} are {part.class_names or 'not named'}, those of {told[0].source} "
                    f"{class_names}; name them alike, or give class_names=...."
                )
    return number_labels([part.labels for part in parts], class_names)


def _are_named(parts: Sequence[_Part], class_names: Sequence[Any] | None) -> bool:
    return class_names is not None or any(part.class_names is not None for part in parts)


def _pool(parts: Sequence[_Part]) -> Tensor:
    first = parts[0]
    for part in parts:
        if part.inputs.shape[1:] != first.inputs.shape[1:] or part.inputs.dtype != first.inputs.dtype:
            raise FedStrataError(
                f"The samples of {part.source} are {_describe(part.inputs)}, "
                f"those of {first.source} {_describe(first.inputs)}; "
                f"all must be alike."
            )
    return torch.cat([part.inputs for part in parts])


def _describe(inputs: Tensor) -> str:
    return f"{tuple(inputs.shape[1:])} of {str(inputs.dtype).removeprefix('torch.')}"


def _owners(sites: Sequence[Any] | np.ndarray, samples: int, source: str) -> np.ndarray:
    """Read the owner of each sample; a sample without one is refused."""
    owners = np.asarray(sites)
    if len(owners) != samples:
        raise FedStrataError(
            f"There are {len(owners)} sites for the {samples} samples of {source}; give one per sample."
        )
    if owners.dtype.kind not in "Of":
        return owners
    lacking = next((place for place, one in enumerate(owners.tolist()) if _is_missing(one)), None)
    if lacking is not None:
        raise FedStrataError(f"Sample {lacking + 1} of {source} has no site; give one, or drop it.")
    return owners.astype(str) if owners.dtype.kind == "O" else owners


def _is_missing(value: Any) -> bool:
    return value is None or type(value).__name__ == "NAType" or bool(value != value)


def _read(inputs: Any, labels: Any, source: str, label: str | int | None, features: str | int | None) -> _Part:
    names = None
    if labels is None:
        inputs, labels, names = read_items(inputs, source, label, features)
    pool = _inputs(inputs, source)
    marks = read_labels(labels, source)
    if len(pool) != len(marks.values):
        raise FedStrataError(
            f"There are {len(pool)} inputs but {len(marks.values)} labels in {source}; give one label per input."
        )
    if len(pool) == 0:
        raise FedStrataError(f"There are no samples in {source}.")
    return _Part(source, pool, marks, names)


def _inputs(values: Any, source: str) -> Tensor:
    """Read inputs as bytes, which are images, as floating-point numbers, or as whole numbers, int64."""
    if is_table(values):
        return _quantities(values, source)
    try:
        listed = isinstance(values, Sequence)
        if listed and any(isinstance(value, Tensor | np.ndarray | Image.Image) for value in values):
            inputs = torch.stack([as_sample(value) for value in values])
        elif isinstance(values, Tensor):
            inputs = values.detach().cpu()
        else:
            inputs = _from_numpy(np.asarray(values), source)
    except (TypeError, ValueError, RuntimeError) as error:
        raise FedStrataError(
            f"The inputs of {source} cannot become one tensor: {str(error).rstrip('.')}. All must be of one shape and "
            "type; scale images and pad tokens first."
        ) from None
    if inputs.is_complex():
        raise FedStrataError(f"The inputs of {source} are complex numbers; give real and imaginary parts instead.")
    if inputs.dim() == 0:
        raise FedStrataError(f"The inputs of {source} are a single number; give one input per sample.")
    _refuse_channels_last(inputs, source)
    if inputs.dtype == torch.bool:
        return inputs.to(torch.float32)
    return inputs if inputs.is_floating_point() or inputs.dtype == torch.uint8 else inputs.to(torch.int64)


def _refuse_channels_last(inputs: Tensor, source: str) -> None:
    """Refuse images whose channels are the last axis: bytes, and squares of other numbers."""
    if inputs.dim() != 4 or inputs.shape[3] not in _IMAGE_CHANNELS or inputs.shape[1] in _IMAGE_CHANNELS:
        return
    if inputs.dtype == torch.uint8 or inputs.shape[1] == inputs.shape[2]:
        height, width, channels = inputs.shape[1:]
        raise FedStrataError(
            f"The inputs of {source} have the shape {tuple(inputs.shape)}, which would be {height} channels of "
            f"{width} x {channels} numbers; give [n, channels, height, width], for example inputs.transpose(0, 3, 1, 2)"
            " of an array, and sample.transpose(2, 0, 1) in a dataset that yields one sample at a time."
        )


def _from_numpy(array: np.ndarray, source: str) -> Tensor:
    if array.dtype.kind in "OUST":
        known = [item for item in array.flat[:1000] if item is not None]
        texts = array.dtype.kind != "O" or any(isinstance(item, str) for item in known)
        what = "hold texts" if texts else f"are objects, such as a {type(known[0]).__name__}" if known else "are empty"
        raise FedStrataError(
            f"The inputs of {source} {what}; give numbers of one shape. Tables with texts and gaps go through "
            "fedstrata.from_table, texts to be read through a tokeniser first."
        )
    if array.dtype.kind in "iu" and array.dtype != np.uint8:
        array = array.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(array))


def _quantities(values: Any, source: str) -> Tensor:
    """Read a table that is given as inputs, all of whose columns must then be numbers."""
    if isinstance(values, str | Path):
        raise FedStrataError(
            f"The inputs of {source} are the text '{values}'; a file with a table goes through fedstrata.from_table."
        )
    table = read_table(values, f"the inputs of {source}")
    columns = []
    for name in table.column_names:
        column = read_column(table, name, f"the inputs of {source}")
        gaps = column is None or (not isinstance(column, Texts) and bool(np.isnan(column.values).any()))
        if gaps or isinstance(column, Texts):
            raise FedStrataError(
                f"The column '{name}' of the inputs of {source} {'has gaps' if gaps else 'holds texts'}; "
                "fedstrata.from_table(table, label=...) takes tables with texts and gaps, labels among their columns."
            )
        assert column is not None
        columns.append(column.values)
    return torch.from_numpy(np.stack(columns, axis=1).astype(np.float32))
