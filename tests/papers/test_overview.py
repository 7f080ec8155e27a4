"""The page over all kept results: the same words as the document, with pictures of nothing but what was kept."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from test_reproduction import FULL, SHORT, SMALL

from fedstrata.cli import main
from fedstrata.papers.at_hand import RunsAtHand
from fedstrata.papers.keeping import RESULTS, Kept, read_results, write_results
from fedstrata.papers.overview import overview
from fedstrata.papers.reading import read_papers

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

KEPT = Path(__file__).parents[2] / "results"


def page_of(results: list[Kept], with_charts: bool = True) -> str:
    return overview(read_papers(SMALL), results, RunsAtHand(), with_charts)


def charts_in(text: str) -> dict[str, Any]:
    [data] = re.findall(r'<script type="application/json" id="charts">(.*?)</script>', text)
    return json.loads(data)["charts"]  # type: ignore[no-any-return]


def places_in(text: str) -> list[str]:
    return re.findall(r'id="chart-([^"]+)"', text)


def test_claims_and_tables_are_pictures_with_the_same_numbers_as_text() -> None:
    text = page_of(FULL)
    assert places_in(text) == ["papers-claims-tiny", "tiny-table1-glance-0-1", "tiny-table1-claims-who-beats-whom"]
    assert list(charts_in(text)) == places_in(text)
    assert charts_in(text)["papers-claims-tiny"]["datasets"]["rows"]["ours"] == [5.5]
    assert "Run with the paper&#x27;s settings: 2 of 4 cells, 3 seeds each; 1 agrees, 1 above." in text
    assert "<td>+5.50 (+4.26 to +6.74)</td>" in re.sub(r"<td[^>]*>", "<td>", text)
    assert "Not run: the column .5." in text
    assert "Not run: figure1 (Accuracy over rounds)." in text
    assert "fedstrata paper tiny table1 --columns .1 --seeds 3" in text
    assert '<a href="#tiny-table1">table1</a>' in text


def test_runs_with_other_settings_are_told_but_not_drawn() -> None:
    text = page_of(SHORT)
    assert "With other settings, 1 round: not comparable with the published numbers" in text
    assert "Changed: rounds=1" in text
    assert places_in(text) == []


def test_without_results_nothing_is_claimed() -> None:
    text = page_of([])
    assert places_in(text) == []
    assert "1 paper · 0 runs" in text
    assert "Not run: table1 (Accuracy on digits); figure1 (Accuracy over rounds)." in text
    assert re.search(r"FedBN beats Local.*not run", text)


def test_without_charts_the_tables_stay() -> None:
    text = page_of(FULL, with_charts=False)
    assert "This page has tables only. For the charts: pip install &#x27;fedstrata[report]&#x27;." in text
    assert places_in(text) == []
    assert "Numbers, settings and cost" in text


@pytest.mark.parametrize(("name", "begins"), [("all.html", "<!doctype html>"), ("all.md", "# Reproduction")])
def test_what_is_written_is_told_by_the_name_of_the_file(
    name: str, begins: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_results(tmp_path / RESULTS, FULL)
    assert main(["paper", "--recipes", str(SMALL), "--write", str(tmp_path / "new" / name), str(tmp_path)]) == 0
    assert (tmp_path / "new" / name).read_text().lower().startswith(begins.lower())
    assert str(tmp_path / "new" / name) in capsys.readouterr().out


@pytest.fixture(scope="module")
def of_the_repository() -> str:
    return overview(read_papers(), read_results([KEPT]), RunsAtHand.among([KEPT]), with_charts=True)


def test_the_kept_results_are_drawn_once_each(of_the_repository: str) -> None:
    places = places_in(of_the_repository)
    assert len(places) == len(set(places))
    assert set(charts_in(of_the_repository)) == set(places)
    assert "lips-figure1-cosine-c100-0-1" in places, "redrawn from the tables in results/lips-cifar100"
    anchors = re.findall(r'<a href="#([^"]+)"', of_the_repository)
    assert anchors
    assert all(f'id="{anchor}"' in of_the_repository for anchor in anchors)


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (420, True)])
def test_a_browser_draws_all_of_it(of_the_repository: str, tmp_path: Path, width: int, dark: bool) -> None:
    sys.path.append(str(Path(__file__).parents[1] / "report"))
    import browser

    if browser.CHROMIUM is None:
        pytest.skip("needs Chromium")
    (tmp_path / "page.html").write_text(of_the_repository, encoding="utf-8")
    with browser.running(tmp_path / "profile") as running:
        page = running.open((tmp_path / "page.html").as_uri(), width, 900, dark)
        assert page.complaints == []
        assert page.evaluate("document.querySelectorAll('.failed').length") == 0
        assert page.evaluate("document.querySelectorAll('.chart svg').length") == len(places_in(of_the_repository))
        assert page.evaluate("document.documentElement.scrollWidth") <= width
