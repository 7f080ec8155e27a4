"""Saying what does not hold."""

from __future__ import annotations


def require(condition: object, otherwise: str) -> None:
    """Raise an assertion error with a sentence, also where Python runs without assertions."""
    if not condition:
        raise AssertionError(otherwise)
