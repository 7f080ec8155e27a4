"""The kinds of charts: from the runs of rows and columns to the panels of a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedstrata.papers.figures import marks
from fedstrata.papers.figures.asked import GAIN, LABELS, Asked
from fedstrata.papers.figures.distributions import histogram_rows, matrix_panels
from fedstrata.papers.figures.marks import Ruler
from fedstrata.papers.figures.material import Axis, Material, Pair, Place, axis_of
from fedstrata.papers.reading import UNIT_WORDS, unit_of
from fedstrata.report.charts import Drawing, skew
from fedstrata.report.labels import LABELS as MODELS
from fedstrata.report.labels import STATISTICS, label_of
from fedstrata.report.layer_scales import Scale, scale_of
from fedstrata.report.layer_view import LayerView, MetricView, plain_quantity
from fedstrata.report.series import Rows, curve_rows, short, skew_rows
from fedstrata.significance import Estimate

LINES_OF_LAYERS = 12
"""Up to how many layers they are lines over rounds, as papers draw them; more are a heat map."""
_LOGARITHMIC_FROM = 100
"""How many times its smallest value the largest one of layers must be for a logarithmic axis."""


@dataclass(frozen=True)
class Panel:
    """A panel of a figure: its title, its chart, and the rows that a table tells of it."""

    title: str
    drawing: Drawing
    told: Rows
    """Each with a ``line``, where it is (``at``), ``value``, ``spread`` and ``published``."""


@dataclass(frozen=True)
class Figure:
    """One thing that a recipe asks for: what it shows in words, and its panels."""

    name: str
    title: str
    caption: str
    panels: tuple[Panel, ...]


def draw(material: Material, asked: Asked) -> list[Figure]:
    """Draw what is asked for; of what the runs do not hold, the material notes why."""
    found = _KINDS[asked.kind](material, asked)
    return [figure for figure in found if figure.panels]


def axis_title(metric: str, unit: str | None = None) -> str:
    """Name a metric beside an axis, with its unit.

    >>> axis_title("client_after.accuracy.mean"), axis_title("global.loss"), axis_title("oracle.error")
    ('accuracy, %', 'loss', 'Error of the masks against the oracle')
    """
    unit_words = UNIT_WORDS.get(unit_of(metric) if unit is None else unit, "")
    quantity = plain_quantity(metric)
    words = ", ".join(filter(None, (quantity.unit, unit_words)))
    return named(metric) + (f", {words}" if words else "")


def named(metric: str) -> str:
    """Name a metric in a few words.

    >>> named("client_after.accuracy.worst10")
    'accuracy, mean of the worst 10 % of clients'
    """
    label, *rest = metric.split(".")
    if label not in MODELS:
        return plain_quantity(metric).title
    if rest and rest[-1] == "mean":
        rest = rest[:-1]
    *names, last = rest or [metric]
    return f"{' '.join(names)}, {STATISTICS[last]}" if last in STATISTICS else " ".join(rest or [metric])


def _curves(material: Material, asked: Asked) -> Iterator[Figure]:
    for metric in asked.of:
        factor = 100.0 if unit_of(metric) == "percent" else 1.0
        panels = []
        for title, members in _by_panel(material, asked).items():
            groups = [material.group(line, pair) for line, pair in members]
            having = [group for group in groups if group.runs]
            rows: Rows = []
            for row in curve_rows(having, [metric]):
                rows.append(_row(row["method"], row["round"], _times(row["value"], factor), _times(row["spread"], factor)))
            found = {row["line"] for row in rows}
            for line, pair in members:
                if line in found:
                    if metric == material.recipe.of_cell(*pair).number:
                        _add_published(material, pair, [row for row in rows if row["line"] == line][-1])
                elif material.runs(pair):
                    material.lacks(f"its run holds no '{metric}'", pair)
            if rows:
                drawing = marks.lines(rows, _in_order(rows), Ruler("round", rounds=True), Ruler(axis_title(metric)), False)
                panels.append(Panel(title, drawing, _last_of_each(rows)))
        yield Figure(metric, f"{_sentence(named(metric))} over rounds", _metric_words(metric), tuple(panels))


def _sweep(material: Material, asked: Asked) -> Iterator[Figure]:
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
            said = f"Gain over {next(iter(material.recipe.rows))}" if y == GAIN else _sentence(named(name))
            words = _GAIN_WORDS if y == GAIN else _metric_words(name)
            figures.append(Figure(f"{key}-{name}", f"{said} over {_short_key(key)}", words, tuple(panels)))
    drawn = [figure for figure in figures if figure.panels]
    if len(drawn) < 2 or any(len(figure.panels) > 1 or figure.panels[0].title for figure in drawn):
        yield from figures
        return
    together = tuple(replace(figure.panels[0], title=figure.title) for figure in drawn)
    captions = " ".join(dict.fromkeys(figure.caption for figure in drawn))
    yield Figure("", f"Over {' and '.join(dict.fromkeys(map(_short_key, asked.of)))}", captions, together)


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
            columns = [one for one in asked.columns or material.recipe.columns if any((row, one) in pairs for row in places)]
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
            row = _row(line, at, None if found is None else short(found.mean, 6), None if found is None else found.std)
            if y in ("", material.recipe.number):
                _add_published(material, pair, row)
            if found is not None or row["published"] is not None:
                rows.append(row)
    if all(row["value"] is None for row in rows):
        return None
    rows = [row for _, row in sorted(enumerate(rows), key=lambda pair: (_line(lines, pair[1]), _at(pair[1], order)))]
    x = Ruler(_short_key(key), tuple(_written(place) for place in order) if names else ())
    title_y = "gain, points" if y == GAIN else axis_title(y or material.recipe.number, _unit(material, y))
    return Panel(title, marks.lines(rows, _in_order(rows), x, Ruler(title_y), True), rows)


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


def _unit(material: Material, y: str) -> str:
    return material.recipe.unit if y in ("", material.recipe.number) else "plain"


def _layers(material: Material, asked: Asked) -> Iterator[Figure]:
    for metric in asked.of:
        views = _layer_views(material, asked, metric)
        every = [part for view in views.values() for table in view.tables.values() for part in (table.mean, table.last)]
        quantity = plain_quantity(metric)
        scale = scale_of(quantity, np.concatenate([part.ravel() for part in every])) if every else Scale(0, 1)
        panels = []
        for (row, column), view in views.items():
            title = ", ".join(filter(None, (column, row if len({one for one, _ in views}) > 1 else "")))
            panels.append(_layer_panel(title, view, scale, quantity.title))
        yield Figure(metric, f"{_sentence(quantity.title)}, by layer and round", quantity.explanation, tuple(panels))


def _layer_panel(title: str, view: MetricView, scale: Scale, words: str) -> Panel:
    [table] = view.tables.values()
    layers = [(line, layer) for line, layer in enumerate(view.layers) if np.isfinite(table.mean[line]).any()]
    rows: Rows = []
    for line, layer in layers:
        for place, (first, last) in enumerate(view.columns):
            if math.isfinite(table.mean[line, place]):
                spread = None if table.spread is None else short(float(table.spread[line, place]))
                row = _row(layer, first, short(float(table.mean[line, place])), spread)
                rows.append({**row, "until": last})
    told = [_row(layer, view.columns[-1][1], short(float(table.last[line])), None) for line, layer in layers]
    names = [layer for _, layer in layers]
    if len(names) <= LINES_OF_LAYERS:
        y = Ruler(words, logarithmic=scale.logarithmic and all((row["value"] or 0) > 0 for row in rows))
        return Panel(title, marks.lines(rows, names, Ruler("round", rounds=True), y, False), told)
    return Panel(title, marks.heat(rows, names, scale, words), told)


def _layers_last(material: Material, asked: Asked) -> Iterator[Figure]:
    for metric in asked.of:
        quantity = plain_quantity(metric)
        views = _layer_views(material, asked, metric)
        panels = []
        for title, members in _by_panel(material, asked).items():
            rows: Rows = []
            layers: dict[str, None] = {}
            for line, pair in members:
                if pair in views:
                    [table] = views[pair].tables.values()
                    for place, layer in enumerate(views[pair].layers):
                        if math.isfinite(table.last[place]):
                            spread = None if table.last_spread is None else short(float(table.last_spread[place]))
                            layers.setdefault(layer)
                            rows.append(_row(line, layer, short(float(table.last[place])), spread))
            if rows:
                values = [float(row["value"]) for row in rows]
                wide = min(values) > 0 and max(values) / min(values) >= _LOGARITHMIC_FROM
                drawing = marks.lines(rows, _in_order(rows), Ruler("layer", tuple(layers)), Ruler(quantity.title, logarithmic=wide), True)
                panels.append(Panel(title, drawing, rows))
        yield Figure(f"last-{metric}", f"{_sentence(quantity.title)}, layer by layer", quantity.explanation, tuple(panels))


def _layer_views(material: Material, asked: Asked, metric: str) -> dict[Pair, MetricView]:
    """The metric of layers of each cell that has it."""
    views = {}
    for pair in material.pairs(asked):
        if not material.runs(pair):
            continue
        view = LayerView.of([material.group("", pair)], [""], only=metric)
        if view is None:
            material.lacks(f"its run holds no '{metric}' of layers", pair)
        else:
            views[pair] = view.metrics[metric]
    return views


def _bars(material: Material, asked: Asked) -> Iterator[Figure]:
    for metric in asked.of:
        panels = []
        for title, members in _by_panel(material, asked).items():
            rows: Rows = []
            for line, pair in members:
                found = material.number(pair, metric)
                row = _row(line, title, None if found is None else short(found.mean, 6), None if found is None else found.std)
                if metric == material.recipe.of_cell(*pair).number:
                    _add_published(material, pair, row)
                rows.append(row)
            if any(row["value"] is not None for row in rows):
                unit = _unit(material, metric)
                panels.append(Panel(title, marks.bars(rows, _in_order(rows), Ruler(axis_title(metric, unit))), rows))
        yield Figure(metric, _sentence(named(metric)), _metric_words(metric), tuple(panels))


def _histogram(material: Material, asked: Asked) -> Iterator[Figure]:
    panels = []
    for title, members in _by_panel(material, asked).items():
        rows: Rows = []
        for line, pair in members:
            runs = material.runs(pair)
            found = histogram_rows(line, runs[0]) if runs else []
            if runs and not found:
                material.lacks("its run holds no histogram of weights", pair)
            rows += found
        if rows:
            x, y = Ruler("weight", rounds=False), Ruler("part of all weights, %", logarithmic=False)
            panels.append(Panel(title, marks.steps(rows, _in_order(rows), x, y), []))
    words = "Where the weights of the whole merged model lie after the last round; of the first seed."
    yield Figure("weights", "The weights in the end", words, tuple(panels))


def _clients(material: Material, asked: Asked) -> Iterator[Figure]:
    for metric in asked.of:
        panels = []
        for title, members in _by_panel(material, asked).items():
            for line, pair in members[:1] if metric == LABELS else members:
                runs = material.runs(pair)
                if not runs:
                    continue
                heading = title if len(members) == 1 or metric == LABELS else ", ".join(filter(None, (title, line)))
                if metric == LABELS and "label_counts" in runs[0].data:
                    counts = np.asarray(runs[0].data["label_counts"], dtype=np.int64)
                    classes = [str(one) for one in runs[0].data["class_names"]]
                    rows = skew_rows(counts, classes, split="")
                    panels.append(Panel(heading, skew(rows, len(counts), classes, ""), []))
                elif metric in runs[0].clients:
                    factor = 100.0 if unit_of(metric) == "percent" else 1.0
                    sizes = runs[0].data.get("sizes", ())
                    unequal = len(set(sizes)) > 1
                    rows = [
                        {
                            "client": int(client),
                            "at": sizes[int(client)] if unequal else int(client),
                            "value": short(factor * float(value)),
                        }
                        for client, value in zip(*runs[0].clients[metric], strict=True)
                    ]
                    x = Ruler("training samples of the client" if unequal else "client")
                    panels.append(Panel(heading, marks.clients(rows, Ruler(axis_title(metric)), x), []))
                else:
                    material.lacks(f"its run holds no '{metric}' of clients", pair)
        if metric == LABELS:
            yield Figure("labels", "Who holds which classes", "Training samples; of the first seed.", tuple(panels))
        else:
            words = f"{_metric_words(metric)} In the last round; of the first seed."
            yield Figure(f"clients-{metric}", f"{_sentence(named(metric))}, client by client", words, tuple(panels))


def _matrices(material: Material, asked: Asked) -> Iterator[Figure]:
    pairs = material.pairs(asked)
    for pair in pairs:
        runs = material.runs(pair)
        found = matrix_panels(runs[0], asked.of) if runs else {}
        for metric in asked.of if runs else ():
            if metric not in found:
                material.lacks(f"its run holds no '{metric}' of pairs of clients", pair)
        panels = tuple(Panel(plain_quantity(metric).title, drawing, []) for metric, drawing in found.items())
        title = "Pair by pair of clients" + (f": {', '.join(pair)}" if len(pairs) > 1 else "")
        yield Figure("pairs", title, "In the last round that has them; of the first seed, all layers together.", panels)


_KINDS: Mapping[str, Callable[[Material, Asked], Iterator[Figure]]] = {
    "curves": _curves,
    "sweep": _sweep,
    "layers": _layers,
    "layers_last": _layers_last,
    "bars": _bars,
    "histogram": _histogram,
    "clients": _clients,
    "matrices": _matrices,
}


def _by_panel(material: Material, asked: Asked) -> dict[str, list[tuple[str, Pair]]]:
    """Part rows and columns into panels: the lines of each, with their cells."""
    panels: dict[str, list[tuple[str, Pair]]] = {}
    for row, column in material.pairs(asked):
        title, line = (row, column) if asked.lines == "columns" else (column, row)
        panels.setdefault(title, []).append((line, (row, column)))
    return panels


def _row(line: str, at: object, value: float | None, spread: float | None) -> dict[str, object]:
    return {
        "line": line, "at": at, "value": value, "spread": spread, "published": None, "published_spread": None,
    }  # fmt: skip


def _add_published(material: Material, pair: Pair, row: dict[str, object]) -> None:
    published = material.recipe.published_at(*pair)
    row["published"], row["published_spread"] = published.mean, published.std


def _in_order(rows: Rows) -> list[str]:
    return list(dict.fromkeys(str(row["line"]) for row in rows))


def _last_of_each(rows: Rows) -> Rows:
    return list({row["line"]: row for row in rows}.values())


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else short(factor * value, 5)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _short_key(key: str) -> str:
    """Name a key of an experiment beside an axis.

    >>> _short_key("partition.per_client"), _short_key("method.lips.every")
    ('per client', 'every (lips)')
    """
    _, *owner, last = key.split(".") if "." in key else ("", key)
    return last.replace("_", " ") + (f" ({owner[0]})" if owner else "")


def _metric_words(metric: str) -> str:
    label = label_of(metric)
    return MODELS[label].meaning if label in MODELS else plain_quantity(metric).explanation
