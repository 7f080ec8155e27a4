"""A single chart as a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from fedstrata import files
from fedstrata.errors import FedStrataError
from fedstrata.report.charts import LIGHT, Drawing, require_charts, theme_config
from fedstrata.report.document import document, vega_lite_version
from fedstrata.report.markup import element

if TYPE_CHECKING:
    from fedstrata.report.charts import Chart

FORMATS = (".html", ".png", ".svg", ".pdf")
_WIDTH = 760


def write_chart(chart: Chart, path: Path, title: str = "Chart") -> Path:
    """Write a chart as a self-contained page or as a picture, by the ending of the file's name."""
    require_charts()
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in FORMATS:
        raise FedStrataError(
            f"A chart cannot be written to '{path}': the name must end in one of {', '.join(FORMATS)}."
        )
    files.make_folder(path.parent)
    files.write_atomically(path, _page(chart, title) if suffix == ".html" else _picture(chart, suffix))
    return path


def _page(chart: Chart, title: str) -> str:
    figure = element("figure", element("div", id="chart-chart", class_="chart", role="img", aria_label=title))
    return document(title, element("main", element("h1", title), figure), {"chart": Drawing(chart)})


def _picture(chart: Chart, suffix: str) -> bytes | str:
    import vl_convert

    spec = {**chart.to_dict(), "width": _WIDTH, "config": {**theme_config(LIGHT), "background": "white"}}
    text, version = json.dumps(spec), vega_lite_version()
    if suffix == ".svg":
        return str(vl_convert.vegalite_to_svg(text, version))
    if suffix == ".pdf":
        return bytes(vl_convert.vegalite_to_pdf(text, version))
    return bytes(vl_convert.vegalite_to_png(text, version, scale=2))
