"""A self-contained HTML document: styles, scripts and charts inside, and nothing that a browser would have to fetch.

The page carries a content security policy that admits no network at all and no script but its own (by hash), so that a
name with markup in it could not do harm even if it were not escaped. A live page may ask whoever has served it, and
nobody else.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from importlib import metadata, resources
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from fedstrata import files
from fedstrata.caching import kept_directory
from fedstrata.errors import FedStrataError
from fedstrata.report.charts import (
    COLOURS,
    DARK,
    LIGHT,
    METHOD_LEGEND,
    Drawing,
    charts_are_possible,
    dash_of,
    theme_config,
)
from fedstrata.report.markup import Markup, element, join


class Contents(NamedTuple):
    """What a page shows: see :func:`document`."""

    title: str
    body: Markup
    charts: Mapping[str, Drawing]
    methods: Sequence[str] = ()


def document(
    title: str, body: Markup, charts: Mapping[str, Drawing], methods: Sequence[str] = (), live: bool = False
) -> str:
    """Assemble a page; one that is ``live`` has a script that asks whoever has served it for news.

    A chart is drawn into the element ``chart-<name>``; ``methods`` are in the order of colours.
    """
    with_charts = bool(charts) or (live and charts_are_possible())
    scripts = [
        *([_chart_library()] if with_charts else []),
        *([_resource("live.js")] if live else []),
        _resource("page.js"),
    ]
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'"
    policy += "; connect-src 'self'" if live else ""
    hashes = " ".join(_hash(script) for script in scripts)
    return Template(_resource("page.html")).substitute(
        policy=element("meta", http_equiv="Content-Security-Policy", content=f"{policy}; script-src {hashes}"),
        title=element("title", title),
        style=Markup(_resource("page.css") + (_resource("live.css") if live else "")),
        body=body,
        data=chart_data(charts, methods),
        scripts=join(element("script", Markup(script)) for script in scripts),
    )


def chart_data(charts: Mapping[str, Drawing], methods: Sequence[str]) -> Markup:
    """Write the charts as the data that the page's script draws; nothing where there are none."""
    if not charts:
        return Markup("")
    payload = {
        "charts": {name: compact(chart.specification()) for name, chart in charts.items()},
        "themes": {"light": theme_config(LIGHT), "dark": theme_config(DARK)},
        "methods": list(methods),
        "dashes": [list(dash_of(position)) for position in range(len(methods))],
        "colours": COLOURS,
        "legend": METHOD_LEGEND,
    }
    return element("script", _json(payload), type="application/json", id="charts")


def compact(specification: Mapping[str, Any]) -> dict[str, Any]:
    """Turn the rows of a chart into columns, with each text once: a fraction of the size. The page's script undoes it.

    >>> compact({"datasets": {"rows": [{"a": 1, "b": "x"}, {"a": 2, "b": "x"}]}})
    {'datasets': {'rows': {'a': [1, 2], 'b': {'texts': ['x'], 'codes': [0, 0]}}}}
    """
    columns = {name: _columns(rows) for name, rows in specification["datasets"].items()}
    return {**specification, "datasets": columns}


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Part rows into columns; one that holds nothing at all is left out."""
    names = [name for name in (rows[0] if rows else ()) if any(row[name] is not None for row in rows)]
    return {name: _column([row[name] for row in rows]) for name in names}


def _column(values: list[Any]) -> Any:
    if not all(isinstance(value, str) for value in values):
        return values
    texts = {text: code for code, text in enumerate(dict.fromkeys(values))}
    return {"texts": list(texts), "codes": [texts[value] for value in values]}


def _json(payload: Any) -> Markup:
    """Write JSON that cannot end the script element it stands in."""
    return Markup(json.dumps(payload, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(sha256(script.encode()).digest()).decode()}'"


def _resource(name: str) -> str:
    return resources.files("fedstrata.report").joinpath(name).read_text(encoding="utf-8")


@cache
def _chart_library() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, of the version for which Altair writes its charts.

    It stands in a function of its own, because its short names at the top level would become names of the page. To put
    it together takes longer than all else of a page, so it is kept in the cache.
    """
    import vl_convert

    version = vega_lite_version()
    kept = kept_directory("charts")
    path = None if kept is None else kept / f"vega-lite-{version}-vl-convert-{metadata.version('vl-convert-python')}.js"
    library = None if path is None else _kept_script(path)
    if library is None:
        library = str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", version))
        if path is not None:
            _keep_script(path, library)
    return re.sub(r"</(script)", r"<\\/\1", f"(function () {{\n{library}\n}})();", flags=re.IGNORECASE)


def _kept_script(path: Path) -> str | None:
    """Read a script whose hash stands in its first line; none where there is no such script, or it is damaged."""
    try:
        first, _, script = path.read_bytes().decode("utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return script if first == f"// {_hash(script)}" else None


def _keep_script(path: Path, script: str) -> None:
    """Keep a script, if that is possible."""
    with suppress(FedStrataError, OSError):
        files.make_folder(path.parent, private=True)
        files.write_atomically(path, f"// {_hash(script)}\n{script}", private=True)


def vega_lite_version() -> str:
    """The version of Vega-Lite for which Altair writes its charts, as vl-convert names it, such as ``6.4``."""
    import altair

    return ".".join(altair.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
