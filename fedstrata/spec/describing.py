"""What a component says of itself, and where the defaults of its parameters come from, read off its docstring."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import Any

from fedstrata.spec.parameters import Spec, range_in_words, type_hints, type_in_words

_DEFAULTS = re.compile(r"\n+Defaults:\n((?:[ ]{4}.*(?:\n|$))+)\s*$")
"""The last section of a docstring, which tells where the defaults of parameters come from."""


def describe_parameters(cls: type[Spec]) -> list[dict[str, Any]]:
    """Tell all that is known of the parameters of a component, as plain data."""
    hints, origins = type_hints(cls), sources(cls)
    return [
        {
            "name": field.name,
            "type": type_in_words(hints[field.name]),
            "default": field.default,
            "source": origins.get(field.name),
            "meaning": field.metadata.get("doc", ""),
            "choices": list(field.metadata["choices"]) if field.metadata.get("choices") else None,
            "limits": range_in_words(field.metadata) or None,
        }
        for field in dataclasses.fields(cls)
    ]


def description(cls: type) -> str:
    """Take the docstring of a component without the section about its defaults."""
    return _DEFAULTS.sub("", inspect.getdoc(cls) or "")


def sources(cls: type[Spec]) -> dict[str, str]:
    """Tell where the defaults of the parameters come from, by the last section of the docstring, ``Defaults:``.

    Each of its lines names one or more parameters and a source: a repository and a file, a section of the paper, or
    ``ours``. What it does not name, the docstrings of the classes that it derives from may.

    >>> class Example(Spec):
    ...     '''Do something.
    ...
    ...     Defaults:
    ...         rate, decay: someone/something, a.py.
    ...         size: paper, Table 2,
    ...             second row.
    ...     '''
    >>> sources(Example)
    {'rate': 'someone/something, a.py', 'decay': 'someone/something, a.py', 'size': 'paper, Table 2, second row'}
    """
    told: dict[str, str] = {}
    for ancestor in reversed(cls.__mro__):
        section = _DEFAULTS.search(inspect.cleandoc(ancestor.__doc__ or ""))
        for line in re.split(r"\n(?! {8})", section.group(1).rstrip()) if section else ():
            names, _, source = " ".join(line.split()).partition(": ")
            told |= dict.fromkeys(names.split(", "), source.removesuffix("."))
    return told


def summary(cls: type) -> str:
    """Take the first paragraph of a docstring as one line."""
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())
