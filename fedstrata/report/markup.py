"""HTML that is escaped by construction: plain text becomes markup only through these functions."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

_VOID = frozenset({"input", "meta", "br", "wbr"})


class Markup(str):
    """Text that already is HTML."""

    __slots__ = ()


def element(name: str, *children: str | None, **attributes: str | bool | None) -> Markup:
    """Build one element. Children that are not :class:`Markup`, and all attribute values, are escaped.

    ``class_`` stands for ``class`` and ``data_sort`` for ``data-sort``; an attribute of true stands alone, one of none
    or false is left out.

    >>> element("td", "a < b", class_="number")
    '<td class="number">a &lt; b</td>'
    """
    given = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{join(children)}</{name}>")


def join(parts: Iterable[str | None]) -> Markup:
    """Put pieces one after the other, escaping those that are not markup."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts if part is not None))


def breakable(text: str) -> Markup:
    """Escape a name such as ``fedprox(mu=0.01)+lws`` and let it break after its punctuation.

    >>> breakable("fedbn+lips(tau=1)")
    'fedbn+<wbr>lips(<wbr>tau=1)'
    """
    return join(
        piece if place % 2 == 0 else join((piece, element("wbr"))) for place, piece in enumerate(_BREAKS.split(text))
    )


_BREAKS = re.compile(r"([(+,/_]+)")


def _attribute(key: str, value: str | bool | None) -> str:
    name = key.rstrip("_").replace("_", "-")
    if value is None or value is False:
        return ""
    return f" {name}" if value is True else f' {name}="{escape(value)}"'
