"""The page of a part: the published numbers beside ours on top, and below them the report over our runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedstrata import files
from fedstrata.papers.judging import Judged
from fedstrata.papers.reading import Paper
from fedstrata.papers.words import CELL_HEADS, cell_line, claim_line, digits_of, order_line
from fedstrata.report.charts import charts_are_possible
from fedstrata.report.document import document
from fedstrata.report.markup import Markup, element, join
from fedstrata.report.opening import read_runs
from fedstrata.report.page import contents
from fedstrata.report.tables import Cell, Column, table
from fedstrata.report.view import Section


def write_page(paper: Paper, judged: Judged, runs: Sequence[Path], output: Path, remark: str = "") -> Path:
    """Write one self-contained page; without runs on disk it has the table alone."""
    title = f"{paper.title}: {judged.recipe.part}"
    section = published_section(paper, judged, remark)
    if runs:
        text = document(*contents(read_runs(runs), title, charts_are_possible(), above=(section,)))
    else:
        body = element("section", element("h2", section.title), section.body)
        text = document(title, join((element("header", element("h1", title)), element("main", body))), {})
    files.make_folder(output.parent)
    files.write_atomically(output, text)
    return output


def published_section(paper: Paper, judged: Judged, remark: str = "") -> Section:
    """The section with the published numbers, ours, and what that says."""
    recipe = judged.recipe
    digits = digits_of(judged)
    numeric = {"published", "ours", "seeds", "difference"}
    columns = [Column(head, numeric=head in numeric) for head in CELL_HEADS]
    rows = [
        [Cell(text, hint=one.reason if head == "verdict" else "") for head, text in zip(CELL_HEADS, line, strict=True)]
        for one in judged.cells
        for line in [cell_line(one, digits)]
    ]
    said = [
        element("p", f"{recipe.title}. {paper.citation}"),
        element("p", f"Reported: {recipe.number}, {recipe.at.replace('_', ' ')}, {recipe.unit}. {remark}".strip()),
        table(f"{recipe.part}: published and ours", columns, rows),
        _list("Claims", [claim_line(claim) for claim in judged.claims]),
        _list("Orders", [order_line(*pair) for pair in judged.orders.items()]),
        _list("Notes", list(dict.fromkeys(_notes(judged)))),
        _list("The paper's figure", _drawn(judged)),
    ]
    return Section("published", "Published and ours", join(said))


def _notes(judged: Judged) -> list[str]:
    own = [judged.recipe.note] if judged.recipe.note else []
    return own + [f"{one.row}, {one.column}: {one.reason}" for one in judged.cells if one.reason]


def _drawn(judged: Judged) -> list[str]:
    """Say which charts below redraw the figure."""
    return [f"{name}: {value}" for name, value in judged.recipe.charts.items()]


def _list(title: str, lines: Sequence[str]) -> Markup | None:
    if not lines:
        return None
    return join((element("h3", title), element("ul", *(element("li", line) for line in lines))))
