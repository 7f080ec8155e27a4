"""The layer view in a real browser: drawn without a complaint, names are text, menus and chips act, a cell tells."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, Page, running
from made_up_runs import write_run

from fedstrata.report.opening import read_runs
from fedstrata.report.page import report

pytest.importorskip("altair")
pytest.importorskip("vl_convert")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

HOSTILE = "<script>document.title='pwned'</script>"
LAYERS = ("stem", HOSTILE, "body", "head")


def facts(masked: list[str]) -> dict[str, Any]:
    roles = ("first", "middle", "middle", "last")
    rows = [
        {"layer": layer, "kind": "conv", "role": role, "parameters": 1000}
        for layer, role in zip(LAYERS, roles, strict=True)
    ]
    return {"layers": rows, "masked": masked}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("layers")
    runs = []
    for place, method in enumerate(("fedavg", "fedbn", "lips")):
        (run,) = read_runs([write_run(folder / method, method=method, rounds=6, clients=2, samples=120)])
        rows = [
            (number, layer, metric, 1 - 0.1 * number * (place + 1) / 2)
            for metric in ("cosine", "update")
            for layer in LAYERS[: 3 if method == "fedbn" else 4]
            for number in range(1, 5)
        ]
        names = ("round", "layer", "metric", "value")
        columns = {name: np.array(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}
        run.__dict__.update(layers=columns, layer_facts=facts(["body"] if method == "lips" else []))
        runs.append(run)
    written = folder / "report.html"
    written.write_text(report(runs), encoding="utf-8")
    with running(folder / "profile") as browser:
        yield browser.open(written.as_uri())


def texts(page: Page) -> list[str]:
    """What is written in the chart."""
    found: list[str] = page.evaluate(
        "Array.from(document.querySelectorAll('#chart-layers svg text'), (t) => t.textContent)"
    )
    return found


def settled(page: Page) -> list[str]:
    page.evaluate("new Promise((done) => setTimeout(done, 150))")
    return texts(page)


def test_it_is_drawn_with_names_as_texts(page: Page) -> None:
    written = texts(page)
    assert [name for name in written if name in ("fedavg", "fedbn", "lips")] == ["fedavg", "fedbn", "lips"]
    assert any((name.startswith("…") and name.endswith("'pwned'</script>")) or name == HOSTILE for name in written)
    assert written.count("stays at clients") == 1
    assert "weights masked" in written
    assert {"awake", "asleep", "after the last round", "first", "middle", "last"} <= set(written)
    assert page.evaluate("document.title") != "pwned"
    # 3 methods, 4 rounds, 4 layers but for the one that stays: cells, and the colours of the legend beside them.
    cells = "document.querySelectorAll('#chart-layers .mark-rect path').length"
    assert page.evaluate(cells) >= 4 * (4 + 3 + 4)


def test_a_cell_tells_what_it_is(page: Page) -> None:
    page.hover("#chart-layers .mark-rect path")
    page.until("document.querySelector('#vg-tooltip-element.visible') !== null")
    told = " ".join(page.evaluate("document.querySelector('#vg-tooltip-element').innerText").split())
    assert told.startswith("method fedavg layer stem role first kind convolution parameters 1,000 round 1 value 0.95")


def test_menus_change_the_metric_and_subtract_a_method(page: Page) -> None:
    heading = "Array.from(document.querySelectorAll('#layers h3')).filter((h) => !h.hidden).map((h) => h.textContent)"
    (said,) = page.evaluate(heading)
    assert said == "In fedavg the middle layers keep a cosine of 0.80 to round 1; in lips they come down to 0.40."
    page.choose("#layers select[data-signal=shown]", "update")
    page.choose("#layers select[data-signal=against]", "fedavg")
    written = settled(page)
    assert "Size of the update: difference to fedavg" in written
    assert "fedavg" not in written
    (said,) = page.evaluate(heading)
    assert said.startswith("Size of the update: the middle layers end at 0.8 in fedavg")
    page.evaluate(
        "HTMLAnchorElement.prototype.click = () => {};"
        "URL.createObjectURL = (blob) => { window.saved = blob.text(); return 'blob:nowhere'; }; 0"
    )
    page.click("#layers button[title*=SVG]")
    page.until("window.saved !== undefined")
    saved = page.evaluate("window.saved")
    assert "Size of the update: the middle layers end at 0.8 in fedavg" in saved
    assert "keep a cosine" not in saved
    page.choose("#layers select[data-signal=against]", "")
    page.choose("#layers select[data-signal=shown]", "cosine")
    settled(page)


def test_chips_choose_the_heat_maps_and_none_is_no_mistake(page: Page) -> None:
    tall = "document.querySelector('#chart-layers svg').getBoundingClientRect().height"
    before = page.evaluate(tall)
    for method in ("fedavg", "fedbn", "lips"):
        page.click(f".chip[data-method={method}]")
        assert method not in settled(page)
    assert page.evaluate(tall) < before
    page.click(".chip[data-method=lips]")
    assert "lips" in settled(page)


def test_on_a_phone_heat_maps_stand_below_each_other(page: Page) -> None:
    for method in ("fedavg", "fedbn"):
        page.click(f".chip[data-method={method}]")
    page.resize(390, 800)
    settled(page)
    places = page.evaluate(
        "Array.from(document.querySelectorAll('#chart-layers svg text')).filter((t) => ['fedavg', 'fedbn', 'lips']"
        ".includes(t.textContent)).map((t) => t.getBoundingClientRect().y)"
    )
    assert len(set(places)) == 3
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_nothing_was_fetched_or_complained_of(page: Page) -> None:
    assert page.complaints == []
    assert page.requests == []
