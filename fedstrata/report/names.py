"""Names that are too long for their place, cut where the least is lost."""

from __future__ import annotations

import json
from collections.abc import Sequence

_LETTER = 7
"""About how many pixels a letter takes in a chart."""
_WIDTHS = (11, 14, 17, 21, 26, 32, 40, 50)
"""To how many letters names of charts are cut, as there is room."""


def shortened(names: Sequence[str], width: int) -> list[str]:
    """Cut names to ``width``, with an ellipsis where the least is lost: where they stay as different as possible.

    >>> shortened(["fedavg", "fedprox(mu=0.001)", "fedprox(mu=0.01)"], 12)
    ['fedavg', 'fedp…0.001)', 'fedp…=0.01)']
    """
    longest = max(map(len, names))
    head = width // 3
    room = width - head - 2

    def cut(name: str, start: int) -> str:
        """Keep the beginning, and what stands ``start`` characters after it."""
        if len(name) <= width:
            return name
        if start == 0:
            return f"{name[: width - 1]}…"
        first = min(head + start, len(name) - room)
        return f"{name[:head]}…{name[first : first + room]}{'…' if first + room < len(name) else ''}"

    starts = (0, *range(longest - head - room, 0, -1))
    ways = ([cut(name, start) for name in names] for start in starts)
    return max(ways, key=lambda way: len(set(way)))


def fitting(names: Sequence[str], name: str, room: str) -> str:
    """Write the Vega expression of a name (an expression, too) in as many letters as ``room`` pixels have place for.

    Names that always fit stay as they are; an expression that has none but these is ``name`` itself.
    """
    longest = max(map(len, names), default=0)
    if longest <= _WIDTHS[0]:
        return name
    widths = [*(width for width in _WIDTHS if width < longest), longest]
    ways = zip(*(shortened(names, width) for width in widths), strict=True)
    cut = {one: list(way) for one, way in zip(names, ways, strict=True) if len(one) > _WIDTHS[0]}
    steps = " + ".join(f"(({room}) >= {_LETTER * width} ? 1 : 0)" for width in widths[1:])
    return f"(({json.dumps(cut, ensure_ascii=False)})[{name}] || {{}})[{steps}] || {name}"
