"""The page in a real browser: charts drawn, nothing fetched, nothing executed that is not ours."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from made_up_runs import write_run

from fedstrata.report import skew_chart, write_chart, write_report

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
HOSTILE = "</script><script>document.title='pwned'</script><img src=x onerror=\"document.title='pwned'\">[a](b)"

pytest.importorskip("altair")
pytest.importorskip("vl_convert")
pytestmark = pytest.mark.skipif(BROWSER is None, reason="needs Chromium")


def dom(page: Path, profile: Path) -> tuple[str, list[str]]:
    """Load a page without a network; return what became of it, and the messages on its console."""
    assert BROWSER is not None
    done = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={profile}",
            "--enable-logging=stderr",
            "--virtual-time-budget=30000",
            "--dump-dom",
            page.as_uri(),
        ],
        capture_output=True,
        timeout=120,
        check=True,
    )
    messages = [line for line in done.stderr.decode(errors="replace").splitlines() if "CONSOLE" in line]
    return done.stdout.decode(), messages


def test_all_charts_of_the_report_are_drawn(tmp_path: Path) -> None:
    runs = [
        write_run(
            tmp_path / f"{place}-{seed}", method=method, seed=seed, layers=True, class_names=(HOSTILE, *"123456789")
        )
        for place, method in enumerate(("fedavg", HOSTILE))
        for seed in (0, 1)
    ]
    page = write_report(runs, tmp_path / "report.html", "A title")
    content, messages = dom(page, tmp_path / "profile")
    assert messages == []
    assert 'data-charts="drawn"' in content
    assert "could not be drawn" not in re.sub(r"<script>.*?</script>", "", content, flags=re.DOTALL)
    assert content.count('<svg xmlns="http://www.w3.org/2000/svg"') >= 8
    for name in ("accuracy", "loss", "clients", "skew", "cost", "traffic", "time", "layers"):
        drawn = re.search(rf'<div id="chart-{name}".*?</svg>', content, re.DOTALL)
        assert drawn, name
        assert len(re.findall(r"<path [^>]*d=\"M", drawn.group())) >= 2, name
    assert "<title>A title</title>" in content
    assert "<img" not in re.sub(r"<script.*?</script>", "", content, flags=re.DOTALL)


def test_a_single_chart_is_a_page_of_its_own(tmp_path: Path) -> None:
    page = write_chart(skew_chart([[5, 1], [0, 3]], ["cat", HOSTILE]), tmp_path / "skew.html", "Label skew")
    content, messages = dom(page, tmp_path / "profile")
    assert messages == []
    assert 'data-charts="drawn"' in content
    drawn = re.search(r'<div id="chart-chart".*?</svg>', content, re.DOTALL)
    assert drawn
    assert drawn.group().count('aria-roledescription="circle"') == 3
