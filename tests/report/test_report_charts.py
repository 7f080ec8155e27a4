import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up_runs import MakeRun

from fedstrata.errors import FedStrataError
from fedstrata.report import charts, read_run, skew_chart, write_chart
from fedstrata.report.charts import DARK, LIGHT, Theme, with_legend
from fedstrata.report.client_charts import by_class
from fedstrata.report.document import compact
from fedstrata.report.groups import group_runs
from fedstrata.report.layer_section import layers
from fedstrata.report.names import fitting, shortened
from fedstrata.report.pareto import below, pareto
from fedstrata.report.sections import clients, costs, curves, data
from fedstrata.report.sweeps import axes, sweeps
from fedstrata.report.view import View

pytest.importorskip("altair")
vl_convert = pytest.importorskip("vl_convert")

COUNTS = np.array([[5, 0, 1], [0, 7, 2]])
NAMES = ("cat", "dog", "eel")


@pytest.mark.parametrize("build", [curves, clients, data, costs, layers])
def test_charts_are_valid_vega_lite_and_hold_finite_data(build: object, make_run: MakeRun) -> None:
    runs = [read_run(make_run(method, method=method, layers=True)) for method in ("fedavg", "fedbn")]
    section = build(View.of(runs, None), True)  # type: ignore[operator]
    assert section.charts
    for drawing in section.charts.values():
        drawing.chart.to_dict()
        assert json.dumps(drawing.specification(), allow_nan=False)


def test_a_chart_that_leaves_the_page_names_its_methods(make_run: MakeRun) -> None:
    view = View.of([read_run(make_run(method, method=method)) for method in ("fedavg", "fedbn", "local")], None)
    drawn = {name: chart for build in (curves, clients) for name, chart in build(view, True).charts.items()}  # type: ignore[union-attr]
    alone = with_legend(drawn["accuracy"], view.methods, ["fedbn"], "Accuracy")
    assert alone["title"]["text"] == "Accuracy"
    assert [param["value"] for param in alone["params"] if param["name"] == "chosen"] == [["fedbn"]]
    assert _texts(alone) & set(view.methods) == {"fedbn"}
    assert not _texts(drawn["accuracy"].specification()) & set(view.methods)
    along_an_axis = with_legend(drawn["clients"], view.methods, ["fedbn"])
    assert _texts(along_an_axis) >= set(view.methods)
    assert all("legend" not in json.dumps(one) or '"legend": null' in json.dumps(one) for one in along_an_axis["layer"])


def _texts(specification: dict[str, Any], width: int = 400) -> set[str]:
    """Draw a chart, and read what stands written in it."""
    picture = vl_convert.vegalite_to_svg(json.dumps({**specification, "width": width}))
    return set(re.findall(r">([^<>]+)</text>", picture))


def test_numbers_along_an_axis_keep_their_digits(make_run: MakeRun) -> None:
    rates = ("0.0125", "0.0375", "0.08")
    runs = [read_run(make_run(rate, optimiser=f"sgd(learning_rate={rate})")) for rate in rates]
    section = sweeps(View.of(runs, None), True)
    assert section is not None
    assert _texts(section.charts["sweep-0-accuracy"].specification()) >= set(rates)
    rows = [
        {"method": "fedavg", "metric": "loss", "round": at, "value": loss, "spread": None}
        for at, loss in ((1, 33.0), (2, 10.0))
    ]
    losses = charts.curves(rows, ["fedavg"], ["fedavg"], "loss", "loss", percent=False)
    assert _texts(losses.specification()) >= {"10", "30"}


def test_a_line_over_a_setting_is_named_by_what_differs_within_its_method(make_run: MakeRun) -> None:
    magnitude, random = ({"method": f"lips(criterion={one}, every={{}})"} for one in ("magnitude", "random"))
    made = [*(magnitude["method"].format(every) for every in (1, 2)), "fedavg"]
    runs = [read_run(make_run(f"{place}", method=method)) for place, method in enumerate(made)]
    (axis,) = axes(group_runs(runs))
    assert (axis.name, list(axis.lines)) == ("method.every", ["lips"])
    made = [random["method"].format(every) for every in (1, 2)]
    runs += [read_run(make_run(f"r{place}", method=method)) for place, method in enumerate(made)]
    every = next(axis for axis in axes(group_runs(runs)) if axis.name == "method.every")
    assert list(every.lines) == ["lips [criterion=magnitude]", "lips [criterion=random]"]


LONG = [f"fedprox(mu=0.1) [alpha={alpha}, learning_rate=0.1]" for alpha in (0.05, 0.1, 0.5)]


def test_long_names_stay_different_where_there_is_little_room() -> None:
    rows = [{"method": name, "direction": "up", "bytes": 10.0} for name in (*LONG, "fedavg")]
    shown = _texts(charts.traffic(rows, [*LONG, "fedavg"]).specification())
    # Of 200 pixels, those that an axis has where its page is not known.
    assert {name for name in shown if name.startswith("fedprox")} == set(shortened(LONG, 26))
    assert "fedavg" in shown
    assert fitting(["fedavg", "fedbn"], "datum.value", "100") == "datum.value"


def test_heat_maps_of_layers_have_titles_that_differ(make_run: MakeRun) -> None:
    methods = [f"lips(every=1, tau0=0.25, refill=init, criterion={one})" for one in ("magnitude", "random", "update")]
    runs = [read_run(make_run(f"{place}", method=method, layers=True)) for place, method in enumerate(methods)]
    view = View.of(runs, None)
    section = layers(view, True)
    assert section is not None
    titles = {text for text in _texts(section.charts["layers"].specification(), 900) if text.startswith("lips")}
    assert len(titles) == 3


def test_names_on_the_pareto_front_do_not_run_into_each_other(make_run: MakeRun) -> None:
    near = {"fedrep": (100.0, 0.90), "fedrod": (110.0, 0.905), "ditto": (250.0, 0.95)}
    names = {name: name for name in near}
    points = [(0.0, 0.5), *near.values(), (1000.0, 0.99)]
    # Six letters are some 42 pixels and the first two points 5 apart; the third has its place further right and up.
    assert below(near, names, points, 600.0) == {"fedrod"}
    runs = [read_run(make_run(method, method=method)) for method in ("fedavg", "fedbn")]
    assert {row["below"] for row in pareto(group_runs(runs)).points} <= {True, False}


def test_the_first_slanted_name_has_room_beside_the_axis() -> None:
    names = ["University hospital of the north", *(f"site {one}, of the others" for one in "abc")]
    chart = skew_chart([[1, 2]] * 4, ["cat", "dog"], names).to_dict()
    # 150 pixels at an angle of 35 degrees, from the middle of a place of 24 pixels.
    assert chart["encoding"]["y"]["axis"]["minExtent"] == pytest.approx(150 * math.cos(math.radians(35)) - 12)
    assert skew_chart([[1, 2]] * 4, ["cat", "dog"]).to_dict()["encoding"]["y"]["axis"]["minExtent"] == 0


def test_a_chart_of_classes_names_its_metric() -> None:
    rows = [
        {"metric": name, "method": "fedavg", "class": own, "value": value, "spread": None}
        for name, value in (("recall", 0.5), ("f1", 0.25))
        for own in ("cat", "dog")
    ]
    drawing = by_class(rows, ["fedavg"], ["fedavg"], ["cat", "dog"], "recall")
    assert "recall" in _texts(drawing.specification())


@pytest.mark.parametrize(
    ("suffix", "beginning"), [(".png", b"\x89PNG"), (".svg", b"<svg"), (".pdf", b"%PDF"), (".html", b"<!doctype html>")]
)
def test_the_label_skew_can_be_written_in_every_format(tmp_path: Path, suffix: str, beginning: bytes) -> None:
    path = write_chart(skew_chart(COUNTS, NAMES), tmp_path / "new" / f"skew{suffix}", "Label skew")
    assert path.read_bytes().startswith(beginning)


def test_bubbles_for_few_clients_and_a_heat_map_for_many() -> None:
    assert skew_chart(COUNTS, NAMES).to_dict()["mark"]["type"] == "circle"
    many = np.ones((100, 3), dtype=int)
    assert skew_chart(many, NAMES).to_dict()["mark"]["type"] == "rect"


def test_a_wrong_ending_and_wrong_counts_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FedStrataError, match=r"must end in one of \.html, \.png, \.svg, \.pdf"):
        write_chart(skew_chart(COUNTS, NAMES), tmp_path / "skew.jpeg")
    with pytest.raises(FedStrataError, match=r"shape \[2, 3\] do not fit 2 class names"):
        skew_chart(COUNTS, NAMES[:2])
    assert list(tmp_path.iterdir()) == []


def test_compact_turns_rows_into_columns_with_each_text_once() -> None:
    rows = [{"a": 1.5, "b": "x", "c": None}, {"a": None, "b": "y", "c": None}, {"a": 2, "b": "x", "c": None}]
    assert compact({"mark": "bar", "datasets": {"rows": rows, "none": []}}) == {
        "mark": "bar",
        "datasets": {"rows": {"a": [1.5, None, 2], "b": {"texts": ["x", "y"], "codes": [0, 1, 0]}}, "none": {}},
    }


@pytest.mark.parametrize(("theme", "background"), [(LIGHT, "#ffffff"), (DARK, "#1b2026")])
def test_colours_can_be_seen_and_texts_read(theme: Theme, background: str) -> None:
    # The thresholds of WCAG 2.1: 3 for graphics, 4.5 for text.
    assert all(_contrast(colour, background) >= 3 for colour in theme.methods)
    assert all(_contrast(colour, background) >= 4.5 for colour in (theme.text, theme.faint))


# Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision deficiency", 2009:
# what eyes without green cones and without red cones see, in linear RGB.
DEUTERANOPIA = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.01182, 0.04294, 0.968881))
PROTANOPIA = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998))


@pytest.mark.parametrize("theme", [LIGHT, DARK])
@pytest.mark.parametrize("seen", [np.eye(3), np.array(DEUTERANOPIA), np.array(PROTANOPIA)])
def test_methods_are_told_apart_by_all_eyes(theme: Theme, seen: np.ndarray) -> None:
    colours = _lab(np.clip(_linear(theme.methods) @ seen.T, 0, 1))
    apart = np.linalg.norm(colours[:, None] - colours[None], axis=-1) + 1000 * np.eye(len(colours))
    # In CIELAB, where 2.3 can just be seen side by side. The lines of all of these are solid: nothing else tells
    # them apart; the colours that most comparisons use are further apart.
    assert apart.min() > (25 if (seen == np.eye(3)).all() else 15)
    assert apart[:4, :4].min() > 20


def _linear(colours: Sequence[str]) -> np.ndarray:
    parts = np.array([[int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)] for colour in colours])
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def _lab(linear: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt((linear @ to_xyz.T) / to_xyz.sum(1)).T
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)


def _contrast(first: str, second: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    low, high = sorted((luminance(first), luminance(second)))
    return (high + 0.05) / (low + 0.05)
