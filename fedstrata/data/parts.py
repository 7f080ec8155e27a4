"""What the parts of a dataset are called: one rule for folders, columns and the keys of dicts."""

from __future__ import annotations

from typing import Literal

Part = Literal["train", "validation", "test"]

_NAMES: dict[str, Part] = {
    "train": "train",
    "training": "train",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "test": "test",
    "testing": "test",
}


def part_named(name: str) -> Part | None:
    """Tell which part of a dataset a name stands for, in capitals or not; none where it is another name.

    >>> [part_named(name) for name in ("Training", "val", "TEST", "trainers")]
    ['train', 'validation', 'test', None]
    """
    return _NAMES.get(name.strip().lower())
