"""The live page in a real browser: news appear in place, and what the reader has set stays."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import CHROMIUM, running
from going_runs import GoingRun
from made_up_runs import write_run

from fedstrata.report.serving import PageServer
from fedstrata.report.watching import Watcher

pytest.importorskip("altair")
pytest.importorskip("vl_convert")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
HOSTILE = "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">"


@contextmanager
def served(place: Path, **options: str) -> Iterator[PageServer]:
    server = PageServer(Watcher([place]), **options)  # type: ignore[arg-type]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


LINE = "document.querySelector('#chart-accuracy .mark-line path[stroke-width=\"2\"]').getAttribute('d')"
"""The first line of the chart of accuracies, as an expression."""


def shown_rounds(chart: str) -> str:
    """The last round on the axis of a chart, as an expression."""
    ticks = f"document.querySelectorAll('#chart-{chart} .role-axis-label text')"
    return f"Math.max(...Array.from({ticks}).map((tick) => Number(tick.textContent)).filter(Number.isInteger))"


@pytest.mark.slow
def test_new_rounds_appear_without_a_reload_and_settings_stay(tmp_path: Path) -> None:
    write_run(tmp_path / "b", method="fedavg", rounds=4, clients=4, layers=True)
    names = (HOSTILE, *"123456789")
    with (
        GoingRun(tmp_path / "a", method="fedbn", class_names=names, rounds=12) as run,
        served(tmp_path) as server,
        running(tmp_path / "profile", network=True) as browser,
    ):
        run.step()
        page = browser.open(server.url, height=700)
        page.evaluate("window.notReloaded = true")
        assert "round 1 of 12" in page.evaluate("document.querySelector('#live').textContent")
        page.click("#results th button")
        page.click("#results th button")
        order = page.evaluate("document.querySelector('#results th[aria-sort]').getAttribute('aria-sort')")
        page.click(".chip[data-method='fedavg']")
        page.choose("select[data-chart='accuracy']", "client_before.accuracy.mean")
        page.evaluate("document.querySelector('#results details').open = true")
        page.evaluate("window.scrollTo({ top: 500, behavior: 'instant' })")
        assert page.evaluate("window.scrollY") == 500
        chart = "document.querySelector('#chart-accuracy svg.marks, #chart-accuracy svg')"
        page.evaluate(f"window.drawnFirst = {chart}")
        page.evaluate("window.layersFirst = document.querySelector('#chart-layers')")
        for _ in range(8):
            run.step()
        page.until("document.querySelector('#live').textContent.includes('round 9 of 12')")
        page.until("document.documentElement.dataset.charts === 'drawn'")
        page.until(f"{shown_rounds('accuracy')} >= 8")
        assert page.evaluate("window.notReloaded && window.scrollY") == 500
        assert page.evaluate(f"window.drawnFirst === {chart}"), "new rows go into the chart that is there"
        assert page.evaluate("window.layersFirst === document.querySelector('#chart-layers')"), "also below a new title"
        assert page.evaluate("document.querySelector('#results th[aria-sort]').getAttribute('aria-sort')") == order
        assert page.evaluate("document.querySelector(\".chip[data-method='fedavg']\").ariaPressed") == "false"
        menu = "document.querySelector(\"select[data-chart='accuracy']\").value"
        assert page.evaluate(menu) == "client_before.accuracy.mean"
        assert page.evaluate("document.querySelector('#results details').open")
        line = page.evaluate(LINE)
        page.choose("select[data-chart='accuracy']", "client_after.accuracy.mean")
        page.until(f"{LINE} !== {json.dumps(line)}")
        page.choose("select[data-chart='accuracy']", "client_before.accuracy.mean")
        page.until(f"{LINE} === {json.dumps(line)}")
        page.click("#results th button")
        assert page.evaluate("document.querySelector('#results th[aria-sort]').getAttribute('aria-sort')") != order
        assert page.evaluate("document.title") == "fedbn and fedavg on digits"
        assert page.complaints == []
        assert set(page.requests) == {f"{server.url}data.json"}


@pytest.mark.slow
def test_a_page_that_waits_becomes_one_with_charts_and_the_death_of_a_run_is_shown(tmp_path: Path) -> None:
    with (
        served(tmp_path, host="0.0.0.0") as server,
        running(tmp_path / "profile", network=True) as browser,
    ):
        page = browser.open(f"http://127.0.0.1:{server.server_address[1]}/?token={server.token}", 390, 800)
        assert "token" not in page.evaluate("window.location.href")
        assert "There is no run" in page.evaluate("document.body.textContent")
        with GoingRun(tmp_path / "a", method="fedbn") as run:
            run.step()
            page.until("document.documentElement.dataset.charts === 'drawn'")
            page.until("document.querySelector('#live').textContent.includes('running')")
            assert page.evaluate("document.querySelectorAll('.chart svg').length") > 3
        page.until("document.querySelector('#live .state').textContent === 'died'")
        assert page.evaluate("document.querySelector('#live time').textContent").endswith(("ago", "now"))
        assert page.complaints == []
        again = browser.open(f"http://127.0.0.1:{server.server_address[1]}/", 390, 800)
        assert "died" in again.evaluate("document.querySelector('#live').textContent")
        assert again.evaluate("document.documentElement.scrollWidth") <= 390
