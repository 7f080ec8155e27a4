"""How mkdocstrings reads the package: docstrings as Markdown, with references as Python would resolve them there."""

from __future__ import annotations

from typing import Any

import griffe

from site_pages.docstrings import to_markdown


class Docstrings(griffe.Extension):
    """Turn all docstrings of a package into Markdown."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Do so once everything that they may refer to has been read."""
        _rewrite(pkg)


def _rewrite(thing: griffe.Object) -> None:
    if isinstance(thing, griffe.Attribute):
        thing.value = _default(thing.value)
    if thing.docstring is not None:
        thing.docstring.value = to_markdown(thing.docstring.value, lambda name: _path(thing, name))
    for member in thing.members.values():
        if isinstance(member, griffe.Object):
            _rewrite(member)


def _default(value: str | griffe.Expr | None) -> str | griffe.Expr | None:
    """Show the default of a field that is declared with :func:`fedstrata.parameter`, not the declaration."""
    if isinstance(value, griffe.ExprCall) and str(value.function) == "parameter":
        return value.arguments[0]
    return value


def _path(place: griffe.Object, name: str) -> str | None:
    """Find the whole path of a name, as Python would find it where the docstring stands."""
    if name.startswith("fedstrata."):
        return name
    first, _, rest = name.partition(".")
    try:
        found = place.resolve(first)
    except griffe.NameResolutionError:
        return None
    return f"{found}.{rest}" if rest else found
