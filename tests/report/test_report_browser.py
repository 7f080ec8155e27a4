"""The page in a real browser: charts drawn, nothing fetched, nothing executed that is not ours, controls that act."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import CHROMIUM, Browser, Page, running
from made_up_runs import write_run

from fedstrata.report import skew_chart, write_chart, write_report

HOSTILE = "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">[a](b)"
METHODS = ("fedavg", HOSTILE, *(f"fedprox(mu={n / 10})" for n in range(1, 8)), "local")

pytest.importorskip("altair")
pytest.importorskip("vl_convert")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with running(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page over ten methods, of which one and a class have markup for names."""
    folder = tmp_path_factory.mktemp("runs")
    runs = [
        write_run(
            folder / f"{place}",
            method=method,
            level=0.5 + 0.04 * place,
            layers=place < 2,
            similarity=place < 2,
            class_names=(HOSTILE, *"123456789"),
        )
        for place, method in enumerate(METHODS)
    ]
    return write_report(runs, folder / "report.html", "A title")


@pytest.fixture(scope="module")
def page(browser: Browser, written: Path) -> Page:
    return browser.open(written.as_uri())


def column(page: Page, place: int) -> list[str]:
    return page.evaluate(  # type: ignore[no-any-return]
        f"Array.from(document.querySelectorAll('#results tbody')[0].rows, (row) => row.cells[{place}].textContent)"
    )


def chart(page: Page, name: str) -> str:
    return str(page.evaluate(f"document.getElementById('chart-{name}').innerHTML"))


def settle(page: Page) -> None:
    """Let what was begun come to its end."""
    page.evaluate("new Promise((done) => setTimeout(done, 150))")


def test_all_charts_are_drawn_and_names_are_text(page: Page) -> None:
    content = page.evaluate("document.body.innerHTML")
    assert "could not be drawn" not in re.sub(r"<script.*?</script>", "", content, flags=re.DOTALL)
    names = page.evaluate("Array.from(document.querySelectorAll('.chart'), (place) => place.id.slice(6))")
    assert {"accuracy", "loss", "clients", "client-table", "similarity", "skew", "pareto", "cost", "traffic"} <= {
        *names
    }
    for name in names:
        assert len(re.findall(r'<path [^>]*d="M', chart(page, name))) >= 2, name
    assert page.evaluate("document.title") == "A title"
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert HOSTILE in column(page, 0)


def test_methods_whose_names_begin_alike_can_be_told_apart_beside_the_page(page: Page) -> None:
    assert page.evaluate(
        "Array.from(document.querySelectorAll('.chip .name'), (name) => name.scrollWidth > name.clientWidth)"
    ) == [False] * page.evaluate("document.querySelectorAll('.chip').length")


def test_a_press_on_a_heading_sorts_and_another_turns_the_order(page: Page) -> None:
    head = "#results thead tr:last-child th:nth-child(2)"
    arrow = f"getComputedStyle(document.querySelector('{head} button'), '::after').content"
    assert page.evaluate(arrow) == '"↕"'
    page.click(f"{head} button")
    falling = [float(text) for text in column(page, 1)]
    assert falling == sorted(falling, reverse=True)
    assert page.evaluate(f"document.querySelector('{head}').getAttribute('aria-sort')") == "descending"
    assert page.evaluate(arrow) == '"↓"'
    page.press("Enter")
    assert [float(text) for text in column(page, 1)] == falling[::-1]
    assert page.evaluate(f"document.querySelector('{head}').getAttribute('aria-sort')") == "ascending"


def test_methods_are_found_and_taken_into_the_grey(page: Page) -> None:
    page.write("#find-method", "local")
    assert page.evaluate(
        "Array.from(document.querySelectorAll('.chip:not([hidden]) .name'), (n) => n.textContent)"
    ) == ["local"]
    lines = "document.querySelectorAll('#chart-accuracy path[stroke-width=\"2\"]')"
    colours = f"new Set(Array.from({lines}, (line) => line.getAttribute('stroke'))).size"
    before = page.evaluate(colours)
    page.click(".chip:not([hidden])")
    assert page.evaluate("document.querySelector('.chip:not([hidden])').getAttribute('aria-pressed')") == "false"
    page.until(f"{colours} === {before - 1}")
    page.press(" ")
    page.until(f"{colours} === {before}")
    page.evaluate(
        "(() => { const field = document.getElementById('find-method'); field.value = ''; "
        "field.dispatchEvent(new Event('input')); return null; })()"
    )


def test_the_pointer_brings_a_number(page: Page) -> None:
    page.hover("#chart-traffic path[aria-roledescription='bar']", across=0.3)
    page.until("document.querySelector('#vg-tooltip-element.visible') !== null")
    told = page.evaluate("document.getElementById('vg-tooltip-element').textContent")
    assert "bytes" in told
    assert "fed" in told
    page.point(0, 0)


def test_curves_are_smoothed_and_the_raw_ones_stay_faint(page: Page) -> None:
    faint = 'document.querySelectorAll(\'#chart-accuracy path[stroke-width="1"][opacity="0.3"]\').length'
    assert page.evaluate(faint) == 0
    before = chart(page, "accuracy")
    page.choose("select[data-chart='accuracy'][data-signal='smoothing']", "over_5")
    page.until(f"{faint} > 0")
    assert chart(page, "accuracy") != before


def test_clients_are_sorted_by_anything(page: Page) -> None:
    def order() -> list[int]:
        """The numbers of the clients from left to right."""
        told = re.findall(
            r"clients, sorted: (\d+); line: training samples; [^\"]*who: client (\d+);", chart(page, "client-table")
        )
        return [int(client) for _, client in sorted((int(place), client) for place, client in told)]

    first = order()
    assert sorted(first) == list(range(8))
    page.choose("select[data-chart='client-table'][data-signal='sort']", "client")
    settle(page)
    assert order() == list(range(8))
    page.choose("select[data-chart='client-table'][data-signal='against']", "m0")
    settle(page)
    assert "accuracy or gain: 0.0%" in chart(page, "client-table")


def test_any_two_stand_side_by_side(page: Page) -> None:
    page.choose("select[data-side='first']", "1")
    page.choose("select[data-side='second']", "0")
    heads = page.evaluate(
        "Array.from(document.querySelectorAll('.side-by-side table')[1].tHead.rows[0].cells, (c) => c.textContent)"
    )
    rows = page.evaluate(
        "Array.from(document.querySelectorAll('.side-by-side table')[1].tBodies[0].rows, (row) => "
        "Array.from(row.cells, (cell) => cell.textContent))"
    )
    labels = page.evaluate("Array.from(document.querySelectorAll('.chip'), (chip) => chip.dataset.method)")
    assert heads[1:3] == [labels[1], labels[0]]
    first, second = (float(text.split()[0]) for text in rows[0][1:3])
    assert float(rows[0][3].replace("−", "-")) == pytest.approx(second - first, abs=0.011)
    page.choose("select[data-side='second']", str(METHODS.index("fedavg") if labels[0] != "fedavg" else 1))
    assert page.evaluate("document.querySelectorAll('img').length") == 0


def test_a_saved_chart_is_light_has_a_ground_a_title_and_a_legend(page: Page, browser: Browser, tmp_path: Path) -> None:
    browser.send("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    page.theme(dark=True)
    page.until("document.documentElement.classList.contains('dark-charts')")
    page.until("document.documentElement.dataset.charts === 'drawn'")
    page.choose("select[data-chart='accuracy'][data-signal='smoothing']", "over_5")
    settle(page)
    assert "#d5dae0" in chart(page, "accuracy")
    for place, name in enumerate(("accuracy.png", "accuracy.svg"), 1):
        page.click(f"figure:has(#chart-accuracy) .save button:nth-child({place})")
        while not (tmp_path / name).exists():
            settle(page)
    assert (tmp_path / "accuracy.png").read_bytes().startswith(b"\x89PNG")
    saved = (tmp_path / "accuracy.svg").read_text(encoding="utf-8")
    assert re.search(r'<rect width="[^"]+" height="[^"]+" fill="white"', saved)
    assert "#d5dae0" not in saved
    texts = re.findall(r">([^<>]+)</t", saved)
    assert texts.count("fedavg") == 1
    assert "Accuracy" in texts
    assert any("mean of the last 5 rounds" in text for text in texts)
    page.theme(dark=False)
    page.until("!document.documentElement.classList.contains('dark-charts')")
    page.until("document.documentElement.dataset.charts === 'drawn'")


def test_every_control_is_reached_by_the_keyboard_and_shows_it(page: Page) -> None:
    wanted = page.evaluate("document.querySelectorAll('main button, main select, main summary').length")
    page.evaluate("(() => { document.querySelector('#results th button').focus(); return null; })()")
    seen: set[str] = set()
    for _ in range(3):
        page.press("Tab")
        seen.add(page.evaluate("document.activeElement.outerHTML"))
        style = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert style == "solid"
    assert len(seen) == 3
    blocked = (
        "Array.from(document.querySelectorAll('main button, main select, main summary')).filter((e) => e.tabIndex < 0)"
    )
    assert page.evaluate(f"{blocked}.length") == 0
    assert wanted > 20


def test_a_phone_and_a_sheet_of_paper_hold_the_page(page: Page) -> None:
    page.resize(390, 800)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.theme(dark=False, media="print")
    assert page.evaluate("getComputedStyle(document.querySelector('.save')).display") == "none"
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.theme(dark=False)
    page.resize(1400, 900)


def test_nothing_was_complained_of_and_nothing_asked_for(page: Page) -> None:
    """After all of the above."""
    assert page.complaints == []
    assert page.requests == []


def test_a_single_chart_is_a_page_of_its_own(browser: Browser, tmp_path: Path) -> None:
    path = write_chart(skew_chart([[5, 1], [0, 3]], ["cat", HOSTILE]), tmp_path / "skew.html", "Label skew")
    page = browser.open(path.as_uri())
    assert chart(page, "chart").count('aria-roledescription="circle"') == 3
    assert page.complaints == []


def test_a_comparison_of_four_methods_fits_a_laptop(browser: Browser, tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"{method}{seed}", method=method, seed=seed, level=0.7 + 0.1 * seed, seconds=8.0)
        for method in ("fedavg", "ssfl", "fedbn", "lips")
        for seed in (0, 1, 2)
    ]
    page = browser.open(write_report(runs, tmp_path / "report.html").as_uri(), width=1280)
    box = "document.querySelector('#results .table-box')"
    assert page.evaluate(f"{box}.scrollWidth <= {box}.clientWidth")


def test_names_along_an_axis_differ_on_a_narrow_page(browser: Browser, tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"{alpha}", method="fedavg", partition=f"dirichlet(alpha={alpha})")
        for alpha in (0.05, 0.1, 0.5)
    ]
    page = browser.open(write_report(runs, tmp_path / "report.html").as_uri(), width=360)
    labels = re.findall(r">(fed[^<]*)</text>", chart(page, "clients"))
    assert len(set(labels)) == len(labels) == 3
    assert all("alpha=0.…" not in label for label in labels)
