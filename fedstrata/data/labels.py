"""Labels of any kind become class numbers: texts, truth values, and whole numbers that begin wherever they like."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedstrata.errors import FedStrataError, FedStrataWarning

_KINDS = {"U": "texts", "b": "truth values", "i": "whole numbers"}


class Marks(NamedTuple):
    """The labels of some samples as they were given, and where from, which errors name."""

    source: str
    values: np.ndarray


def read_labels(values: Any, source: str) -> Marks:
    """Read one label per sample, as an array of texts, truth values or whole numbers.

    >>> read_labels(["ill", "well"], "the study").values.tolist()
    ['ill', 'well']
    """
    return Marks(source, _plain(_as_array(values, source), source))


def number_labels(
    parts: Sequence[Marks], class_names: Sequence[Any] | None = None
) -> tuple[list[Tensor], tuple[str, ...]]:
    """Turn the labels of several parts into class numbers, int64, and name the classes.

    Without names, the classes are the distinct labels in their order, as texts. With names, a label is one of them; or,
    where labels are whole numbers that are no names, the position of one.

    >>> [numbers], names = number_labels([read_labels([3, 1, 3], "the study")])
    >>> numbers.tolist(), names
    ([1, 0, 1], ('1', '3'))
    >>> number_labels([read_labels([1, 0], "the study")], class_names=("well", "ill"))
    ([tensor([1, 0])], ('well', 'ill'))
    """
    values = np.concatenate(_alike(parts))
    present, places = np.unique(values, return_inverse=True)
    texts = [str(value) for value in present.tolist()]
    if class_names is None:
        names, numbers = tuple(texts), np.arange(len(texts))
    else:
        names = _checked(class_names, parts[0].source)
        numbers = _find(present, texts, names, parts)
    numbered = np.split(numbers.astype(np.int64)[places.reshape(-1)], np.cumsum([len(part.values) for part in parts]))
    return [torch.from_numpy(own) for own in numbered[:-1]], names


def refuse_untrained(labels: Tensor, train: np.ndarray, class_names: Sequence[str], source: str, named: bool) -> None:
    """Tell of a class that only test samples have, which no model can learn; refuse it where nobody named the classes.

    It is then most likely another way to write one of the others.
    """
    trained = np.unique(labels.numpy()[train])
    unknown = sorted(set(np.unique(labels.numpy())) - set(trained))
    if not unknown:
        return
    told = (
        f"The label '{class_names[unknown[0]]}' is only in the test samples of {source}: nobody trains on it, so that "
        f"no model can predict it"
    )
    if named:
        warnings.warn(f"{told}.", FedStrataWarning, stacklevel=3)
        return
    known = _some([class_names[number] for number in trained])
    raise FedStrataError(f"{told}; training knows {known}. Correct it, or name all classes with class_names=....")


def tell_alike(class_names: Sequence[str], source: str) -> None:
    """Tell of classes that nobody named and that differ only in capitals or in blanks: most likely, they are one."""
    if several := _names_alike(class_names):
        warnings.warn(
            f"The labels {several} of {source} differ only in capitals or blanks, but are classes of their own; write "
            "alike what is of one class, or name all classes with class_names=... if they are right.",
            FedStrataWarning,
            stacklevel=3,
        )


def tell_sites_alike(sites: Sequence[str], source: str) -> None:
    """Tell of sites that differ only in capitals or in blanks: most likely, they are one, too."""
    if several := _names_alike(sites):
        warnings.warn(
            f"The sites {several} of {source} differ only in capitals or blanks, but are clients of their own; write "
            "alike what is one site.",
            FedStrataWarning,
            stacklevel=3,
        )


def _names_alike(names: Sequence[str]) -> str:
    """Write, in groups, the names that differ only in capitals or in blanks; nothing where none do."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(" ".join(name.split()).casefold(), []).append(name)
    several = [group for group in alike.values() if len(group) > 1]
    return " and ".join(_some(group) for group in several[:4])


def label_texts(marks: Marks) -> tuple[str, ...]:
    """Write labels as texts, as the names of classes are."""
    return tuple(str(value) for value in marks.values.tolist())


def _find(present: np.ndarray, texts: list[str], names: tuple[str, ...], parts: Sequence[Marks]) -> np.ndarray:
    """Tell the class of each distinct label: by its name, else by its number."""
    if set(texts) <= set(names):
        return np.array([names.index(text) for text in texts])
    if present.dtype.kind != "U" and present[0] >= 0 and present[-1] < len(names):
        return present
    source, unknown = next(
        (part.source, text)
        for part in parts
        for value, text in zip(present, texts, strict=True)
        if text not in names and (part.values == value).any()
    )
    if present.dtype.kind == "U":
        raise FedStrataError(f"The label '{unknown}' of {source} is none of the classes {_some(names)}.")
    low, high = int(present[0]), int(present[-1])
    raise FedStrataError(
        f"The labels of {source} range from {low} to {high}, but its {len(names)} classes are 0 to {len(names) - 1}"
        f" ({_some(names)}); a label outside of them often marks a sample without one: drop it, or give other class "
        "names."
    )


def _checked(class_names: Sequence[Any], source: str) -> tuple[str, ...]:
    names = tuple(str(name) for name in class_names)
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise FedStrataError(f"Two classes of {source} are called '{twice[0]}'; give each a name of its own.")
    return names


def _alike(parts: Sequence[Marks]) -> list[np.ndarray]:
    """Bring the labels of all parts to one kind: numbers and texts do not mix."""
    kinds = {part.values.dtype.kind for part in parts}
    if kinds == {"b", "i"}:
        return [part.values.astype(np.int64) for part in parts]
    first = parts[0]
    for part in parts:
        if part.values.dtype.kind != first.values.dtype.kind:
            raise FedStrataError(
                f"The labels of {part.source} are {_KINDS[part.values.dtype.kind]}, such as {_example(part)}, those of "
                f"{first.source} {_KINDS[first.values.dtype.kind]}, such as {_example(first)}; "
                "label alike what is of one class."
            )
    return [part.values for part in parts]


def _example(part: Marks) -> str:
    return repr(part.values[0].item()) if len(part.values) else "none"


def _as_array(values: Any, source: str) -> np.ndarray:
    """Put labels into a NumPy array, whatever holds them: a tensor, a list, a column of a table."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().numpy()
    elif isinstance(values, list | tuple):
        values = [value.tolist() if isinstance(value, Tensor | np.ndarray | np.generic) else value for value in values]
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise FedStrataError(f"The labels of {source} cannot become one array: {error}.") from None
    if array.dtype.kind in "US" and isinstance(values, list | tuple):
        array = np.array([*values, None], dtype=object)[:-1]  # NumPy makes texts of numbers that stand beside texts
    if array.ndim == 2 and array.shape[1] == 1:
        array = array[:, 0]
    if array.ndim != 1:
        one_hot = array.ndim == 2 and array.dtype.kind in "biuf" and bool((array.sum(1) == 1).all())
        advice = "one-hot rows become class numbers by labels.argmax(1)" if one_hot else "not batches or one-hot rows"
        raise FedStrataError(
            f"The labels of {source} have the shape {array.shape}; give one class number or name per sample, {advice}."
        )
    return array


def _plain(array: np.ndarray, source: str) -> np.ndarray:
    """Bring labels to one of three types: texts, truth values, whole numbers."""
    kind = array.dtype.kind
    if kind in "bU":
        return array
    if kind in "iu":
        return array.astype(np.int64)
    if kind == "S":
        return np.char.decode(array, "utf-8")
    if kind == "f":
        return _whole(array, source)
    if kind not in "OT":
        raise FedStrataError(
            f"The labels of {source} are of the type {array.dtype}; give one class number or name per sample."
        )
    items = array.tolist()
    missing = sum(item is None or type(item).__name__ == "NAType" or item != item for item in items)
    if missing:
        raise _without_label(missing, len(items), source)
    for wanted, dtype in ((bool, np.bool_), (int, np.int64), (str, np.str_)):
        if all(isinstance(item, wanted) and (wanted is bool or not isinstance(item, bool)) for item in items):
            return np.array(items, dtype=dtype)
    if all(isinstance(item, int | float) for item in items):
        return _whole(np.array(items, dtype=np.float64), source)
    kinds = sorted({type(item).__name__ for item in items})
    mixed = f"mixed types ({', '.join(kinds)})" if len(kinds) > 1 else f"the type {kinds[0]}"
    raise FedStrataError(f"The labels of {source} are of {mixed}; give class numbers, or give class names.")


def _whole(array: np.ndarray, source: str) -> np.ndarray:
    missing = int(np.isnan(array).sum())
    if missing:
        raise _without_label(missing, len(array), source)
    whole = array.astype(np.int64)
    if not np.array_equal(whole, array):
        raise FedStrataError(
            f"The labels of {source} are not whole numbers, such as {array[whole != array][0]:g}; give one class "
            "number or name per sample, since models here tell classes apart."
        )
    return whole


def _without_label(missing: int, samples: int, source: str) -> FedStrataError:
    return FedStrataError(f"{missing} of the {samples} samples of {source} have no label; drop them first.")


def _some(names: Sequence[str], shown: int = 8) -> str:
    return ", ".join(f"'{name}'" for name in names[:shown]) + (", ..." if len(names) > shown else "")
