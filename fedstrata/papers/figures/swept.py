"""The number of each cell over a key of the experiments that was set to several values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fedstrata.papers.figures import marks
from fedstrata.papers.figures.asked import GAIN, Asked
from fedstrata.papers.figures.marks import Ruler
from fedstrata.papers.figures.material import Axis, Material, Pair, Place, axis_of
from fedstrata.papers.figures.panels import (
    Figure,
    Panel,
    add_published,
    axis_title,
    in_order,
    metric_words,
    named,
    new_row,
    sentence,
    unit_at,
)
from fedstrata.report.series import Rows, short
from fedstrata.significance import Estimate


def sweep(material: Material, asked: Asked) -> Iterator[Figure]:
    """A figure for each number and key; where all have one panel, they are the panels of one figure."""
    figures = []
    for key in asked.of:
        axis = axis_of(material.recipe, asked, key)
        if axis is None:
            material.missing.setdefault(f"nothing of the recipe sets '{key}' to several numbers", []).append(("", key))
            continue
        for y in asked.y or ("",):
            panels = [panel for panel in _sweep_panels(material, asked, axis, key, y) if panel is not None]
            name = y or material.recipe.number
            said = f"Gain over {next(iter(material.recipe.rows))}" if y == GAIN else sentence(named(name))
            words = _GAIN_WORDS if y == GAIN else metric_words(name)
            figures.append(Figure(f"{key}-{name}", f"{said} over {_short_key(key)}", words, tuple(panels)))
    drawn = [figure for figure in figures if figure.panels]
    if len(drawn) < 2 or any(len(figure.panels) > 1 or figure.panels[0].title for figure in drawn):
        yield from figures
        return
    together = tuple(replace(figure.panels[0], title=figure.title) for figure in drawn)
    captions = " ".join(dict.fromkeys(figure.caption for figure in drawn))
    yield Figure("", f"Over {' and '.join(dict.fromkeys(map(_short_key, asked.of)))}", captions, together)


_PLACES = 2
_GAIN_WORDS = "The difference of the means over seeds."


def _sweep_panels(material: Material, asked: Asked, axis: Axis, key: str, y: str) -> Iterator[Panel | None]:
    pairs = material.pairs(asked)
    several = max(len(places) for places in axis.groups.values()) > 1
    for shared, places in axis.groups.items():
        if several and len(places) < 2:
            continue
        if axis.by == "columns":
            rows_of = [row for row in asked.rows or material.recipe.rows if any((row, one) in pairs for one in places)]
            members = {row: {name: (row, name) for name in places} for row in rows_of}
            yield _sweep_panel(material, shared, members, places, key, y, pairs)
        else:
            columns = [
                one for one in asked.columns or material.recipe.columns if any((row, one) in pairs for row in places)
            ]
            lines = {column: {name: (name, column) for name in places} for column in columns}
            if asked.lines == "columns":
                yield _sweep_panel(material, shared, lines, places, key, y, pairs)
            else:
                for column, one in lines.items():
                    title = " ".join(filter(None, (column, shared)))
                    yield _sweep_panel(material, title, {shared or column: one}, places, key, y, pairs)


def _sweep_panel(
    material: Material, title: str, lines: Mapping[str, Mapping[str, Pair]], places: Mapping[str, Place], key: str,
    y: str, pairs: Sequence[Pair],
) -> Panel | None:  # fmt: skip
    names = any(place.number is None for place in places.values())
    order = sorted(places.values(), key=lambda place: math.inf if place.number is None else place.number)
    first = next(iter(lines), "")
    rows: Rows = []
    for line, members in lines.items():
        if y == GAIN and line == first:
            continue
        for name, pair in members.items():
            if pair not in pairs:
                continue
            place = places[name]
            at = _written(place) if names else place.number
            found = _gain(material, pair, lines[first][name]) if y == GAIN else material.number(pair, y)
            row = new_row(
                line, at, None if found is None else short(found.mean, 6), None if found is None else found.std
            )
            if y in ("", material.recipe.number):
                add_published(material, pair, row)
            if found is not None or row["published"] is not None:
                rows.append(row)
    places_run = {row["at"] for row in rows if row["value"] is not None}
    if len(places_run) < _PLACES and not any(row["published"] is not None for row in rows):
        for pair in (pair for members in lines.values() for pair in members.values() if pair in pairs):
            material.lacks(f"a line needs {_PLACES} values of '{_short_key(key)}' that were run", pair)
        return None
    if not places_run:
        return None
    rows = [row for _, row in sorted(enumerate(rows), key=lambda pair: (_line(lines, pair[1]), _at(pair[1], order)))]
    x = Ruler(_short_key(key), tuple(_written(place) for place in order) if names else ())
    title_y = "gain, points" if y == GAIN else axis_title(y or material.recipe.number, unit_at(material, y))
    return Panel(title, marks.lines(rows, in_order(rows), x, Ruler(title_y), True), rows)


def _line(lines: Mapping[str, object], row: Mapping[str, object]) -> int:
    return list(lines).index(str(row["line"]))


def _at(row: Mapping[str, object], order: Sequence[Place]) -> int:
    return next(place for place, one in enumerate(order) if row["at"] in (one.number, _written(one)))


def _written(place: Place) -> str:
    return place.name if place.number is None else f"{place.number:g}"


def _gain(material: Material, pair: Pair, first: Pair) -> Estimate | None:
    """The difference of two means; its spread would need the differences seed by seed."""
    ours, other = material.number(pair), material.number(first)
    return None if ours is None or other is None else Estimate(ours.mean - other.mean, None, ours.count)


def _short_key(key: str) -> str:
    """Name a key of an experiment beside an axis.

    >>> _short_key("partition.per_client"), _short_key("method.lips.every")
    ('per client', 'every (lips)')
    """
    _, *owner, last = key.split(".") if "." in key else ("", key)
    return last.replace("_", " ") + (f" ({owner[0]})" if owner else "")
