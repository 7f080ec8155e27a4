"""The kinds of charts: from the runs of rows and columns to the panels of a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from fedstrata.papers.figures import marks
from fedstrata.papers.figures.asked import LABELS, Asked
from fedstrata.papers.figures.distributions import histogram_rows, matrix_panels
from fedstrata.papers.figures.marks import Ruler
from fedstrata.papers.figures.material import Material, Pair
from fedstrata.papers.figures.panels import (
    Figure,
    Panel,
    add_published,
    axis_title,
    by_panel,
    in_order,
    last_of_each,
    metric_words,
    named,
    new_row,
    sentence,
    times,
    unit_at,
)
from fedstrata.papers.figures.swept import sweep
from fedstrata.papers.reading import unit_of
from fedstrata.report.charts import skew
from fedstrata.report.layer_scales import Scale, scale_of
from fedstrata.report.layer_view import ROLES, LayerView, MetricView, Table, plain_quantity
from fedstrata.report.series import Rows, curve_rows, short, skew_rows

LINES_OF_LAYERS = 12
"""Up to how many layers they are lines over rounds, as papers draw them; more are a heat map."""
_LOGARITHMIC_FROM = 100
"""How many times its smallest value the largest one of layers must be for a logarithmic axis."""


def draw(material: Material, asked: Asked) -> list[Figure]:
    """Draw what is asked for; of what the runs do not hold, the material notes why."""
    found = _KINDS[asked.kind](material, asked)
    return [figure for figure in found if figure.panels]


def _curves(material: Material, asked: Asked) -> Iterator[Figure]:
    for metric in asked.of:
        factor = 100.0 if unit_of(metric) == "percent" else 1.0
        panels = []
        for title, members in by_panel(material, asked).items():
            groups = [material.group(line, pair) for line, pair in members]
            having = [group for group in groups if group.runs]
            rows: Rows = []
            for row in curve_rows(having, [metric]):
                rows.append(
                    new_row(row["method"], row["round"], times(row["value"], factor), times(row["spread"], factor))
                )
            found = {row["line"] for row in rows}
            for line, pair in members:
                if line in found:
                    if metric == material.recipe.of_cell(*pair).number:
                        add_published(material, pair, [row for row in rows if row["line"] == line][-1])
                elif material.runs(pair):
                    material.lacks(f"its run holds no '{metric}'", pair)
            if rows:
                drawing = marks.lines(
                    rows, in_order(rows), Ruler("round", rounds=True), Ruler(axis_title(metric)), False
                )
                panels.append(Panel(title, drawing, last_of_each(rows)))
        yield Figure(metric, f"{sentence(named(metric))} over rounds", metric_words(metric), tuple(panels))


def _layers(material: Material, asked: Asked) -> Iterator[Figure]:
    for metric in asked.of:
        views = _layer_views(material, asked, metric)
        every = [part for view in views.values() for table in view.tables.values() for part in (table.mean, table.last)]
        quantity = plain_quantity(metric)
        scale = scale_of(quantity, np.concatenate([part.ravel() for part in every])) if every else Scale(0, 1)
        several = len({row for row, _ in views}) > 1
        panels: dict[str, list[tuple[str, MetricView]]] = {}
        for (row, column), view in views.items():
            shared = asked.together and len(_layers_with(view)) <= LINES_OF_LAYERS
            title = column if shared or not several else ", ".join(filter(None, (column, row)))
            panels.setdefault(title, []).append((row, view))
        drawn = tuple(_layer_panel(title, members, scale, quantity.title) for title, members in panels.items())
        yield Figure(metric, f"{sentence(quantity.title)}, by layer and round", quantity.explanation, drawn)


def _layer_panel(title: str, members: Sequence[tuple[str, MetricView]], scale: Scale, words: str) -> Panel:
    rows: Rows = []
    told: Rows = []
    layers: dict[str, None] = {}
    for kind, view in members:
        [table] = view.tables.values()
        for line, layer in _layers_with(view):
            layers.setdefault(layer)
            for place, (first, last) in enumerate(view.columns):
                if math.isfinite(table.mean[line, place]):
                    spread = None if table.spread is None else short(float(table.spread[line, place]))
                    row = new_row(layer, first, short(float(table.mean[line, place])), spread)
                    rows.append({**row, "until": last, "kind": kind})
            named_line = f"{layer}, {kind}" if len(members) > 1 else layer
            told.append(new_row(named_line, view.columns[-1][1], short(float(table.last[line])), None))
    names = list(layers)
    if len(names) <= LINES_OF_LAYERS:
        y = Ruler(words, logarithmic=scale.logarithmic and all((row["value"] or 0) > 0 for row in rows))
        dashed = [kind for kind, _ in members] if len(members) > 1 else []
        drawing = marks.lines(rows, names, Ruler("round", rounds=True), y, False, dashed, ordered=True)
        return Panel(title, drawing, told)
    return Panel(title, marks.heat(rows, names, scale, words), told)


def _layers_with(view: MetricView) -> list[tuple[int, str]]:
    """The layers that have a number, with their places."""
    [table] = view.tables.values()
    return [(line, layer) for line, layer in enumerate(view.layers) if np.isfinite(table.mean[line]).any()]


def _layers_last(material: Material, asked: Asked) -> Iterator[Figure]:
    for metric in asked.of:
        quantity = plain_quantity(metric)
        views = _layer_views(material, asked, metric)
        panels = []
        for title, members in by_panel(material, asked).items():
            rows: Rows = []
            layers: dict[str, None] = {}
            for line, pair in members:
                if pair not in views:
                    continue
                [table] = views[pair].tables.values()
                if asked.relative and not table.last[0]:
                    material.lacks(f"'{metric}' of its first layer is 0, of which others have no percentage", pair)
                    continue
                factor = 100 / float(table.last[0]) if asked.relative else 1.0
                for place, layer in enumerate(views[pair].layers):
                    if math.isfinite(factor * table.last[place]):
                        of_seeds = table.last_spread
                        spread = None if of_seeds is None else short(abs(factor) * float(of_seeds[place]))
                        layers.setdefault(layer)
                        rows.append(new_row(line, layer, short(factor * float(table.last[place])), spread))
            if rows:
                values = [float(row["value"]) for row in rows]
                wide = min(values) > 0 and max(values) / min(values) >= _LOGARITHMIC_FROM
                y = Ruler(quantity.title + (", % of the first layer" if asked.relative else ""), logarithmic=wide)
                drawing = marks.lines(rows, in_order(rows), Ruler("layer", tuple(layers)), y, True)
                panels.append(Panel(title, drawing, rows))
        yield Figure(
            f"last-{metric}", f"{sentence(quantity.title)}, layer by layer", quantity.explanation, tuple(panels)
        )


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
            views[pair] = _with_weights(view, view.metrics[metric])
    return views


def _with_weights(view: LayerView, found: MetricView) -> MetricView:
    """Leave norm layers out, as papers do, where layers with weights have numbers."""
    kept = [line for line, layer in _layers_with(found) if view.layers[layer].role in ROLES]
    if not kept:
        return found
    [(method, table)] = found.tables.items()
    parts = (table.mean, table.spread, table.last, table.last_spread)
    mean, spread, last, last_spread = (None if part is None else part[kept] for part in parts)
    assert mean is not None
    assert last is not None
    layers = tuple(found.layers[line] for line in kept)
    return replace(found, layers=layers, tables={method: Table(mean, spread, last, last_spread)})


def _bars(material: Material, asked: Asked) -> Iterator[Figure]:
    for metric in asked.of:
        panels = []
        for title, members in by_panel(material, asked).items():
            rows: Rows = []
            for line, pair in members:
                found = material.number(pair, metric)
                row = new_row(
                    line, title, None if found is None else short(found.mean, 6), None if found is None else found.std
                )
                if metric == material.recipe.of_cell(*pair).number:
                    add_published(material, pair, row)
                rows.append(row)
            if any(row["value"] is not None for row in rows):
                unit = unit_at(material, metric)
                panels.append(Panel(title, marks.bars(rows, in_order(rows), Ruler(axis_title(metric, unit))), rows))
        yield Figure(metric, sentence(named(metric)), metric_words(metric), tuple(panels))


def _histogram(material: Material, asked: Asked) -> Iterator[Figure]:
    panels = []
    for title, members in by_panel(material, asked).items():
        rows: Rows = []
        for line, pair in members:
            runs = material.runs(pair)
            found = histogram_rows(line, runs[0]) if runs else []
            if runs and not found:
                material.lacks("its run holds no histogram of weights", pair)
            rows += found
        if rows:
            x, y = Ruler("weight", rounds=False), Ruler("part of all weights, %", logarithmic=False)
            panels.append(Panel(title, marks.steps(rows, in_order(rows), x, y), []))
    words = "Where the weights of the whole merged model lie after the last round; of the first seed."
    yield Figure("weights", "The weights in the end", words, tuple(panels))


def _clients(material: Material, asked: Asked) -> Iterator[Figure]:
    for metric in asked.of:
        panels = []
        for title, members in by_panel(material, asked).items():
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
            words = f"{metric_words(metric)} In the last round; of the first seed."
            yield Figure(f"clients-{metric}", f"{sentence(named(metric))}, client by client", words, tuple(panels))


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
    "sweep": sweep,
    "layers": _layers,
    "layers_last": _layers_last,
    "bars": _bars,
    "histogram": _histogram,
    "clients": _clients,
    "matrices": _matrices,
}
