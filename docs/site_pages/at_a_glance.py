"""The page over all kept results, which ``fedstrata paper --write FILE.html results`` writes."""

from __future__ import annotations

from fedstrata.papers.at_hand import RunsAtHand
from fedstrata.papers.keeping import read_results
from fedstrata.papers.overview import overview
from fedstrata.papers.reading import read_papers
from fedstrata.report.charts import charts_are_possible
from site_pages.repository import ROOT

PAGE = "at-a-glance.html"
"""Where it lies in the site."""


def page() -> str:
    """Make the page from the results in the repository."""
    results = [ROOT / "results"]
    return overview(read_papers(), read_results(results), RunsAtHand.among(results), charts_are_possible())
