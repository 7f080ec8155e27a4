"""The layer view as a picture in a file, for a paper, a talk or a README."""

from __future__ import annotations

import io
import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedstrata import files
from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.report import formats, layer_charts
from fedstrata.report.charts import COLOURS, LIGHT, require_charts, theme_config
from fedstrata.report.document import document, vega_lite_version
from fedstrata.report.export import FORMATS
from fedstrata.report.groups import group_runs
from fedstrata.report.layer_findings import finding, kept_norms
from fedstrata.report.layer_section import explanation, layers
from fedstrata.report.layer_view import LayerView, first_metric
from fedstrata.report.markup import element
from fedstrata.report.opening import read_runs
from fedstrata.report.reading import Run
from fedstrata.report.view import View

WIDTH = 1100
_SCALE = 2


def write_layer_picture(
    runs: Sequence[Path],
    output: Path,
    metric: str | None = None,
    methods: Sequence[str] = (),
    against: str | None = None,
    title: str | None = None,
    width: int = WIDTH,
) -> Path:
    """Draw the layers of some runs into a file: .png, .svg, .pdf, or a page (.html) with menus.

    ``metric`` is a metric of the layers, by default the inertia; ``methods`` are those to show, in this order;
    ``against`` is one to subtract from all others. The title is by default what one sees, in a sentence.
    """
    require_charts()
    output = Path(output)
    suffix = output.suffix.lower()
    if suffix not in FORMATS:
        raise FedStrataError(
            f"A picture cannot be written to '{output}': the name must end in one of {', '.join(FORMATS)}."
        )
    found = read_runs(runs)
    view = _view(found, methods)
    layer_view = LayerView.of(view.groups, view.methods)
    if layer_view is None:
        raise FedStrataError(
            "None of these runs has finite numbers of its layers; give runs that begin without diverging."
        )
    shown = first_metric(layer_view) if metric is None else metric
    if shown not in layer_view.metrics:
        raise unknown_name("metric of the layers in these runs", shown, list(layer_view.metrics))
    if against is not None and against not in view.methods:
        if against in _view(found, ()).methods:
            raise FedStrataError(
                f"'{against}' is not among the methods to show, {', '.join(view.methods)}: add it to them, as in "
                f"--methods '{', '.join((*view.methods, against))}', or name no methods to show all."
            )
        raise unknown_name("method in these runs", against, view.methods)
    too_many = len(view.methods) - (against is not None) > COLOURS
    if too_many and suffix != ".html":
        raise FedStrataError(
            f"A picture shows up to {COLOURS} methods, and these are {len(view.methods)}; choose some of: "
            f"{', '.join(view.methods)}."
        )
    content = (
        _page(view, title)
        if suffix == ".html"
        else _picture(view, layer_view, shown, against or "", title, width, suffix)
    )
    files.make_folder(output.parent)
    files.write_atomically(output, content)
    return output


def _view(runs: Sequence[Run], methods: Sequence[str]) -> View:
    """The runs of some methods, in the order in which these are given."""
    runs = [run for run in runs if run.series]
    if not runs:
        raise FedStrataError("None of these runs has any numbers yet; give the folder of a run that has begun.")
    if not methods:
        return View.of(runs, None)
    groups = {group.label: group.runs for group in group_runs(runs)}
    chosen: list[Run] = []
    for method in methods:
        found = groups.get(method) or [run for run in runs if run.experiment["method"] == method]
        if not found:
            raise unknown_name("method in these runs", method, list(groups))
        chosen += found
    return View.of(chosen, None)


def _page(view: View, title: str | None) -> str:
    section = layers(view, with_charts=True)
    assert section is not None
    heading = title or f"Inside the layers: {view.title}"
    return document(heading, element("main", element("h1", heading), section.body), section.charts, view.methods)


def _picture(
    view: View, layer_view: LayerView, shown: str, against: str, title: str | None, width: int, suffix: str
) -> bytes | str:
    import vl_convert

    metric = layer_view.metrics[shown]
    drawing = layer_charts.layers(layer_view, view.methods, shown, against)
    told = " ".join(part for part in (explanation(metric), kept_norms(layer_view)) if part)
    heading = {
        "text": textwrap.wrap(title or finding(layer_view, metric), max(30, width // 9)),
        "subtitle": [*textwrap.wrap(_setting(view), width // 6), *textwrap.wrap(told, max(40, width // 6))],
        "anchor": "start",
        "fontSize": 17,
        "subtitleFontSize": 12,
        "subtitleColor": LIGHT.faint,
        "subtitlePadding": 6,
        "subtitleLineHeight": 17,
        "color": LIGHT.text,
        "offset": 16,
    }
    specification: dict[str, Any] = {
        **drawing.specification(),
        "width": width,
        "title": heading,
        "padding": 14,
        "config": {**theme_config(LIGHT), "background": "white"},
    }
    text, version = json.dumps(specification), vega_lite_version()
    if suffix == ".svg":
        return str(vl_convert.vegalite_to_svg(text, version))
    if suffix == ".pdf":
        return bytes(vl_convert.vegalite_to_pdf(text, version))
    return _smaller(bytes(vl_convert.vegalite_to_png(text, version, scale=_SCALE)))


def _setting(view: View) -> str:
    """Name what all runs share: data, partition, model, numbers of clients, rounds and seeds."""
    facts = []
    for key in ("data", "partition", "model", "clients", "rounds"):
        values = {str(run.experiment.get(key, "")) for run in view.runs}
        if len(values) == 1 and (value := values.pop()):
            facts.append(f"{value} {key}" if key in ("clients", "rounds") else value)
    seeds = sorted({len(group.runs) for group in view.groups})
    facts.append(formats.plural(seeds[0], "seed") if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds")
    return " · ".join(facts)


def _smaller(picture: bytes) -> bytes:
    """Write a picture with fewer bytes, and the same pixels."""
    from PIL import Image

    with Image.open(io.BytesIO(picture)) as image:
        plain = image.convert("RGB")
    written = io.BytesIO()
    plain.save(written, "PNG", optimize=True)
    return min(picture, written.getvalue(), key=len)
