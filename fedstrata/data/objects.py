"""Samples from the objects of other libraries: datasets of PyTorch and of the Hugging Face hub, pairs, records.

Nothing of theirs is imported: what an object can do tells what it is.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedstrata.data.parts import Part, part_named
from fedstrata.errors import FedStrataError, FedStrataWarning, unknown_name

LABELS = ("label", "labels", "target")
"""What a column with labels is called where nobody says."""


class Items(NamedTuple):
    """Inputs and labels, one of each for every sample, and the names of the classes where the object tells them."""

    inputs: Any
    labels: Any
    class_names: tuple[str, ...] | None


def is_hub_dataset(given: Any) -> bool:
    """Tell a ``datasets.Dataset``, such as a partition of ``flwr-datasets``."""
    return all(
        hasattr(given, name) for name in ("features", "column_names", "with_format", "select_columns", "__len__")
    )


def is_transformed(given: Any) -> bool:
    """Tell whether a hub's dataset goes through a function of the user's, after which other columns may be there."""
    return bool(given.format["type"] == "custom")


def train_and_test(given: Any) -> tuple[Any, Any] | None:
    """Take a dict of parts, such as a ``DatasetDict``, or a pair of datasets, apart; none where it is none.

    A dict is one of parts where all its names are those of parts (see :func:`are_parts`), or where one is the name of
    the part to train on and all are datasets of samples.
    """
    if isinstance(given, tuple | list) and len(given) == 2 and all(map(is_sample_dataset, given)):
        return given[0], given[1]
    if not isinstance(given, Mapping) or not are_parts(given, others=all(map(is_sample_dataset, given.values()))):
        return None
    train, test = choose_parts(given)
    return _samples(given[train]), None if test is None else _samples(given[test])


def are_parts(names: Iterable[Any], others: bool = False) -> bool:
    """Tell whether names are those of parts, one of them to train on; ``others`` may stand beside them.

    >>> are_parts(["Train", "val"]), are_parts(["train", "north"]), are_parts(["test", "val"])
    (True, False, False)
    """
    parts = [part_named(str(name)) for name in names]
    return "train" in parts and (others or None not in parts)


def choose_parts(names: Iterable[Any]) -> tuple[Any, Any | None]:
    """Choose the part to train on and the one to test on: ``test``, else ``validation``; what is not used is told."""
    found: dict[Part | None, list[Any]] = {}
    for name in names:
        found.setdefault(part_named(str(name)), []).append(name)
    for part, same in found.items():
        if part is not None and len(same) > 1:
            raise FedStrataError(
                f"'{same[0]}' and '{same[1]}' would both be the part called {part}; join them, or leave one out."
            )
    chosen = next((part for part in ("test", "validation") if part in found), None)
    test = None if chosen is None else found[chosen][0]
    unused = [name for part, same in found.items() if part not in ("train", chosen) for name in same]
    if chosen == "validation" or unused:
        told = [f"'{test}' is the part to test on"] if chosen == "validation" else []
        told += [f"{', '.join(map(repr, unused))} not used"] if unused else []
        warnings.warn(f"Of the parts of the data, {', and '.join(told)}.", FedStrataWarning, stacklevel=4)
    return found["train"][0], test


def _samples(part: Any) -> Any:
    """Tell apart what stands in one part: inputs and labels, else whatever yields both."""
    if isinstance(part, Mapping) and set(part) == {"inputs", "labels"}:
        return Items(part["inputs"], part["labels"], None)
    if isinstance(part, tuple | list) and len(part) == 2 and not is_sample_dataset(part):
        return Items(part[0], part[1], None)
    return part


def by_text(given: Mapping[Any, Any], what: str) -> dict[str, Any]:
    """Write the names of a dict as texts, as they stand in run folders; two that are then equal are refused."""
    named: dict[str, Any] = {}
    for name, one in given.items():
        if str(name) in named:
            raise FedStrataError(f"Two {what} are called '{name}', written as a text; give each a name of its own.")
        named[str(name)] = one
    return named


def is_sample_dataset(given: Any) -> bool:
    """Tell whether an object is a dataset of samples by itself: one of the hub, or a map-style one of PyTorch."""
    return is_hub_dataset(given) or isinstance(given, torch.utils.data.Dataset)


def read_items(given: Any, source: str, label: str | int | None = None, features: str | int | None = None) -> Items:
    """Collect the samples of an object that yields (input, label) pairs, or records with an input and a label.

    In a record, ``label`` and ``features`` name what is what; without, the label is called ``label``, ``labels`` or
    ``target``, or is the only column of classes, and the input is the only other entry.
    """
    if isinstance(given, Items):
        return given
    if isinstance(given, Tensor | np.ndarray) or not (hasattr(given, "__iter__") or hasattr(given, "__getitem__")):
        raise FedStrataError(
            f"There are no labels for {source}; give them, or something that yields (input, label) pairs."
        )
    if is_hub_dataset(given) and not is_transformed(given):
        label = label_column(given, label, source)
        features = _input_column([name for name in given.column_names if name != label], features, source)
        given = given.select_columns([features, label])
    items = list(_each(given))
    if items and isinstance(items[0], Mapping):
        label = find_label(list(items[0]), label, source)
        features = _input_column([key for key in items[0] if key != label], features, source)
        items = [(item[features], item[label]) for item in items]
    for item in items:
        if not isinstance(item, tuple | list) or len(item) != 2:
            given_instead = f"{len(item)} values" if isinstance(item, tuple | list) else f"a {type(item).__name__}"
            raise FedStrataError(
                f"What {source} yields are not (input, label) pairs, but {given_instead} for a sample; let it yield "
                "pairs, or dicts with an input and a label."
            )
    labels, names = [item[1] for item in items], class_names_of(given, label)
    if names is not None and not is_hub_dataset(given) and not _fit(labels, names):
        names = None
    return Items([item[0] for item in items], labels, names)


def label_column(given: Any, label: str | int | None, source: str) -> str:
    """Find the column of a hub's dataset that holds labels: by its name, or as the only one of classes."""
    classes = [name for name, feature in given.features.items() if hasattr(feature, "names")]
    if label is None and not set(LABELS) & set(given.column_names) and len(classes) == 1:
        return str(classes[0])
    return find_label(given.column_names, label, source)


def find_label(keys: Sequence[str], label: str | int | None, source: str) -> str:
    """Find the labels among the names of columns or entries."""
    if label is not None:
        if label not in keys:
            raise unknown_name(f"column of {source} called", str(label), map(str, keys))
        return keys[keys.index(label)]
    found = next((name for name in LABELS if name in keys), None)
    if found is None:
        raise FedStrataError(
            f"None of the columns of {source} is called {', '.join(map(repr, LABELS[:-1]))} or {LABELS[-1]!r}; "
            f"name the one that holds the labels with label=... of from_table, from_clients or from_arrays: it has "
            f"{', '.join(map(repr, keys))}."
        )
    return found


def class_names_of(given: Any, label: str | int | None) -> tuple[str, ...] | None:
    """Ask an object for the names of its classes: the hub's features, or ``classes`` as torchvision's datasets have."""
    if is_hub_dataset(given):
        names = getattr(given.features.get(label), "names", None)
        return None if names is None else tuple(names)
    if isinstance(given, torch.utils.data.Subset):
        return class_names_of(given.dataset, label)
    names = getattr(given, "classes", None)
    named = isinstance(names, list | tuple) and bool(names) and all(isinstance(name, str) for name in names)
    return tuple(names) if named and names is not None else None


def _fit(labels: list[Any], names: tuple[str, ...]) -> bool:
    """Tell whether what an object calls its classes are those of its labels."""
    plain = [label.tolist() if isinstance(label, Tensor | np.ndarray | np.generic) else label for label in labels]
    return all(label in names if isinstance(label, str) else label in range(len(names)) for label in plain)


def as_sample(value: Any) -> Tensor:
    """Turn one input into a tensor; a picture becomes bytes ``[channels, height, width]``."""
    if isinstance(value, Image.Image):
        return _pixels(value)
    return torch.as_tensor(value).detach().cpu()


def _pixels(image: Image.Image) -> Tensor:
    if image.mode == "1":
        image = image.convert("L")
    elif image.mode not in ("L", "RGB") and not image.mode.startswith(("I", "F")):
        image = image.convert("RGB")
    pixels = np.array(image)
    if pixels.dtype != np.uint8:
        pixels = pixels.astype(np.float32)  # grey in more than 256 steps
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _each(given: Any) -> Iterable[Any]:
    """Go through an object; a map-style dataset of PyTorch has a length and no end of its own."""
    indexed = hasattr(given, "__len__") and hasattr(given, "__getitem__") and not isinstance(given, Mapping)
    return (given[index] for index in range(len(given))) if indexed else iter(given)


def _input_column(others: Sequence[str], features: str | int | None, source: str) -> str:
    if features is not None:
        if features not in others:
            raise unknown_name(f"column of {source} called", str(features), map(str, others))
        return others[others.index(features)]
    if len(others) != 1:
        raise FedStrataError(
            f"The samples of {source} have {len(others)} entries beside the label ({', '.join(map(repr, others))}); "
            "name the one that is the input with features=...."
        )
    return others[0]
