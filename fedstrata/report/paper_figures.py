"""The charts of the page as figures for a paper, with the data behind each, and the results as a table.

A figure is drawn once, as SVG, and the PNG and the PDF are made from that, so that all three look the same. It is drawn
larger and then made smaller as a whole, letters, lines and dots alike: as wide as a column or a page, with letters of
about eight points.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata import files
from fedstrata.errors import FedStrataError, FedStrataWarning, unknown_name
from fedstrata.report.charts import LIGHT, Drawing, encodings_of, require_charts, theme_config, with_legend
from fedstrata.report.document import vega_lite_version
from fedstrata.report.layer_section import NAME as LAYERS
from fedstrata.report.layer_view import LayerView
from fedstrata.report.opening import read_runs
from fedstrata.report.page import contents
from fedstrata.report.pareto import MEASURES
from fedstrata.report.series import Rows
from fedstrata.report.typeset import LABEL, Typeset, typeset_tables
from fedstrata.report.view import View

WIDTHS = {"column": 3.25, "page": 6.75}
"""The widths of figures, in inches: of one column of two, and of the text."""
FONTS = {
    "serif": "'Times New Roman', Times, 'Liberation Serif', 'Nimbus Roman', 'TeX Gyre Termes', serif, "
    "'Liberation Sans'",
    "sans": "Helvetica, Arial, 'Liberation Sans', 'Nimbus Sans', sans-serif",
}
"""Fonts that are as wide as Times or as Helvetica, the first that is there; the last one comes with vl-convert."""
INDEX = "index.json"
_POINTS = 72
_PIXELS_IN_A_POINT = 5 / 3
_FLATTEST = 0.62
"""How high a chart may be for its width, where its height is free."""
_TALLEST = 1.6
"""A figure that would be higher than that for its width, in a column, goes over the whole page."""
_DOTS_IN_AN_INCH = 300
_COLUMNS = {"spread": "std_over_seeds"}
_SMOOTHED = "over_"
_ONLY_FOR_DRAWING = {"offset", "position", "key", "mark", "right", "begins"}
"""Columns and tables that say where something stands in a chart, and nothing of the runs."""


@dataclass(frozen=True)
class FiguresAsked:
    """Where figures are to be written, and how; what is not possible is refused at once."""

    folder: Path
    width: str = "column"
    font: str = "serif"

    def __post_init__(self) -> None:
        require_charts()
        if self.width not in WIDTHS:
            raise unknown_name("width of figures", self.width, list(WIDTHS))
        if self.font not in FONTS:
            raise unknown_name("font of figures", self.font, list(FONTS))


def write_figures(
    runs: Sequence[Path], asked: FiguresAsked, title: str | None = None, reference: str | None = None
) -> Path:
    """Write every chart of the page over some runs as PNG, SVG, PDF and CSV, and the results as LaTeX and Markdown.

    Returns the index of what was written, ``index.json``.
    """
    started = [run for run in read_runs(runs) if run.series]
    if not started:
        raise FedStrataError("None of these runs has any numbers yet; give the folder of a run that has begun.")
    view, page = View.of(started, title, reference), contents(started, title, reference=reference)
    files.make_folder(asked.folder)
    told: dict[str, Any] = {"title": view.title, "font": asked.font, "figures": {}}
    for name, drawing in page.charts.items():
        told["figures"][name] = _write_figure(name, drawing, asked, view)
    told["tables"] = _write_tables(Typeset.of_results(view.rows), view.title, asked)
    files.write_atomically(asked.folder / INDEX, files.to_json(told))
    return asked.folder / INDEX


def write_drawings(
    drawings: Mapping[str, Drawing], table: Typeset, asked: FiguresAsked, title: str, label: str
) -> Path:
    """Do the same with charts that have their own legends, and a table of their own, by whose label texts name it."""
    files.make_folder(asked.folder)
    figures = {name: _write_figure(name, drawing, asked) for name, drawing in drawings.items()}
    told = {"title": title, "font": asked.font, "figures": figures, "tables": _write_tables(table, title, asked, label)}
    files.write_atomically(asked.folder / INDEX, files.to_json(told))
    return asked.folder / INDEX


def _write_tables(table: Typeset, title: str, asked: FiguresAsked, label: str = LABEL) -> list[str]:
    texts = typeset_tables(table, title, label)
    for name, text in texts.items():
        files.write_atomically(asked.folder / name, text)
    return list(texts)


def _write_figure(name: str, drawing: Drawing, asked: FiguresAsked, view: View | None = None) -> dict[str, Any]:
    import vl_convert

    width, font = asked.width, FONTS[asked.font]
    standing_alone = drawing.specification() if view is None else with_legend(drawing, view.methods, view.chosen)
    svg = _drawn(for_paper(standing_alone, WIDTHS[width], font), WIDTHS[width])
    across, down = _size(svg)
    if down > _TALLEST * across and width != "page":
        width = "page"
        svg = _drawn(for_paper(standing_alone, WIDTHS[width], font), WIDTHS[width])
    pdf = bytes(vl_convert.svg_to_pdf(svg))
    _warn_of_another_font(pdf, font)
    pictures: dict[str, bytes | str] = {
        f"{name}.png": bytes(vl_convert.svg_to_png(svg, ppi=_DOTS_IN_AN_INCH)),
        f"{name}.svg": _sized(svg, *_size(svg), "pt"),
        f"{name}.pdf": pdf,
    }
    data = dict(_data(name, standing_alone, drawing.rows, view))
    for file, content in {**pictures, **data}.items():
        files.write_atomically(asked.folder / file, content)
    return {"width_inches": WIDTHS[width], "pictures": list(pictures), "data": list(data)}


def _drawn(specification: Mapping[str, Any], inches: float) -> str:
    """Draw a chart as SVG, so wide; a unit is a point."""
    import vl_convert

    svg = str(vl_convert.vegalite_to_svg(json.dumps(specification), vega_lite_version(), allowed_base_urls=[]))
    across, down = _size(svg)
    return _sized(svg, inches * _POINTS, down * inches * _POINTS / across)


def for_paper(specification: Mapping[str, Any], inches: float, font: str) -> dict[str, Any]:
    """Fit a chart to the width of a figure on white paper; what only answers to a pointer is left out.

    Lengths are in pixels, of which five are three points.
    """
    width = round(inches * _POINTS * _PIXELS_IN_A_POINT)
    config = theme_config(LIGHT)
    letters = {"labelFontSize": 13, "titleFontSize": 13, "labelColor": LIGHT.text, "titleColor": LIGHT.text}
    config |= {
        "background": "white",
        "font": font,
        "axis": {**config["axis"], **letters, "labelPadding": 4, "titlePadding": 6},
        "legend": {**config["legend"], **letters, "columnPadding": 12},
        "title": {"fontSize": 14},
        "padding": 2,
    }
    specification = _with_axis_title(_without_pointer(specification))
    height = specification.get("height")
    free = isinstance(height, int | float) and not _has_lines_of_names(specification)
    flat = {"height": min(height, round(_FLATTEST * width))} if free and height is not None else {}
    return {**specification, "width": width, **flat, "config": config}


def _with_axis_title(specification: dict[str, Any]) -> dict[str, Any]:
    """Write below a chart what it is drawn against, which the page says in a menu or in the heading."""
    measure = next((one.get("value") for one in specification.get("params", []) if one["name"] == "measure"), None)
    copied: dict[str, Any] = json.loads(json.dumps({**specification, "datasets": {}}))
    for encoding in encodings_of(copied):
        x = encoding.get("x", {})
        if x.get("type") == "quantitative" and "title" in x and x["title"] is None:
            x["title"] = MEASURES.get(str(measure)) or x.get("field")
    return {**copied, "datasets": specification.get("datasets", {})}


def _without_pointer(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the layers that nobody sees until a pointer comes near, and what listens to it."""
    layers = specification.get("layer", [])
    unseen = [layer for layer in layers if _is_unseen(layer)]
    names = {layer.get("name") for layer in unseen}
    params = [one for one in specification.get("params", []) if not names & set(one.get("views", ()))]
    kept = {"layer": [layer for layer in layers if layer not in unseen]} if layers else {}
    return {**specification, **kept, **({"params": params} if params else {})}


def _is_unseen(layer: Mapping[str, Any]) -> bool:
    mark = layer.get("mark")
    opacity = layer.get("encoding", {}).get("opacity", {})
    return opacity.get("value") == 0 or (isinstance(mark, Mapping) and mark.get("opacity") == 0)


def _has_lines_of_names(part: Any) -> bool:
    """Tell whether names stand along the vertical axis, so that the height follows from how many there are."""
    if isinstance(part, list):
        return any(map(_has_lines_of_names, part))
    if not isinstance(part, Mapping):
        return False
    kind = part.get("encoding", {}).get("y", {}).get("type")
    return kind in ("nominal", "ordinal") or any(map(_has_lines_of_names, (part.get("layer"), part.get("spec"))))


def _size(svg: str) -> tuple[float, float]:
    found = re.search(r'<svg [^>]*?width="([\d.]+)" height="([\d.]+)"', svg)
    assert found is not None
    return float(found.group(1)), float(found.group(2))


def _sized(svg: str, across: float, down: float, unit: str = "") -> str:
    """Give a picture another size, or its unit: to programs that show it a number alone may be anything."""
    size = f'width="{across:g}{unit}" height="{down:g}{unit}"'
    return re.sub(r'width="[\d.]+" height="[\d.]+"', size, svg, count=1)


def _warn_of_another_font(pdf: bytes, font: str) -> None:
    """Say where letters come out without serifs though they should have some: there is no such font here."""
    written = pdf + b"".join(_inflated(pdf))
    names = {name.decode() for name in re.findall(rb"/BaseFont\s*/[A-Z]{6}\+([\w-]+)", written)}
    if font == FONTS["serif"] and names and all("Sans" in name for name in names):
        warnings.warn(
            "This machine has no font like Times, so figures are set in Liberation Sans; install one (Liberation "
            "Serif, Nimbus Roman or TeX Gyre Termes), or ask for --figure-font sans.",
            FedStrataWarning,
            stacklevel=2,
        )


def _inflated(pdf: bytes) -> Iterator[bytes]:
    for found in re.finditer(rb"stream\r?\n(.*?)\r?\nendstream", pdf, re.DOTALL):
        try:
            yield zlib.decompress(found.group(1))
        except zlib.error:
            continue


def _data(
    name: str, specification: Mapping[str, Any], rows: Mapping[str, Rows], view: View | None
) -> Iterator[tuple[str, str]]:
    """Write the rows that a chart shows, a file for each of its tables; those of other menus are left out."""
    chosen = dict(_choices(specification))
    for table, all_rows in rows.items():
        if table in _ONLY_FOR_DRAWING:
            continue
        if name == LAYERS and view is not None:
            all_rows = _layer_rows(view)
        shown = [row for row in all_rows if all(row[key] == value for key, value in chosen.items() if key in row)]
        if not shown:
            continue
        columns = [key for key in shown[0] if key not in _ONLY_FOR_DRAWING and not key.startswith(_SMOOTHED)]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(_heading(key, () if view is None else view.methods) for key in columns)
        writer.writerows([row[key] for key in columns] for row in shown)
        yield (f"{name}.csv" if len(rows) == 1 else f"{name}-{table}.csv"), text.getvalue()


def _heading(column: str, methods: Sequence[str]) -> str:
    """Name a column as people do; one with the numbers of a method has its place as its name."""
    place = re.fullmatch(r"m(\d+)", column)
    return methods[int(place.group(1))] if place else _COLUMNS.get(column, column)


def _layer_rows(view: View) -> Rows:
    """The numbers of the layers, a row for each round, or for each stretch of rounds that the chart takes together."""
    found = LayerView.of(view.groups, view.methods)
    return (
        []
        if found is None
        else [
            {
                "method": method,
                "metric": metric.name,
                "layer": layer,
                "first_round": first,
                "last_round": last,
                "value": float(table.mean[line, place]),
                "spread": None if table.spread is None else float(table.spread[line, place]),
            }
            for metric in found.metrics.values()
            for method, table in metric.tables.items()
            for line, layer in enumerate(metric.layers)
            for place, (first, last) in enumerate(metric.columns)
            if not math.isnan(table.mean[line, place])
        ]
    )


def _choices(specification: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Find which column has which value in what is shown: filters of the kind ``datum.metric === shown``."""
    values = {one["name"]: one.get("value") for one in specification.get("params", ())}
    filters = re.findall(r"datum\.(\w+) === (\w+)", json.dumps(_without_data(specification)))
    return ((column, values[name]) for column, name in filters if isinstance(values.get(name), str))


def _without_data(specification: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in specification.items() if key != "datasets"}
