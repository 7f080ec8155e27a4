"""The page of a part: its figure redrawn, the published numbers beside ours, and the report over our runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from fedstrata import files
from fedstrata.papers.at_hand import RunsAtHand
from fedstrata.papers.cells import Cell, by_settings
from fedstrata.papers.figures.material import Material
from fedstrata.papers.figures.section import glance, redrawn_section
from fedstrata.papers.judging import Judged
from fedstrata.papers.reading import Paper
from fedstrata.papers.told import note_lines, outcome_lines
from fedstrata.papers.words import (
    LONG_CELL_HEADS,
    WITHIN,
    cell_line,
    claim_line,
    digits_of,
    long_cell_line,
    order_line,
    ours_line,
    reported_line,
    seeds_line,
)
from fedstrata.report.charts import charts_are_possible
from fedstrata.report.document import document
from fedstrata.report.formats import ABSENT, plural
from fedstrata.report.markup import Markup, element, join
from fedstrata.report.page import contents
from fedstrata.report.paper_figures import FiguresAsked, write_drawings
from fedstrata.report.tables import Cell as TableCell
from fedstrata.report.tables import Column, table
from fedstrata.report.typeset import Typeset
from fedstrata.report.view import Section


def write_page(
    paper: Paper, judged: Judged, cells: Sequence[Cell], at_hand: RunsAtHand, output: Path, remark: str = ""
) -> Path:
    """Write one self-contained page; of cells whose runs are not at hand it has the numbers alone."""
    title = f"{paper.title}: {judged.recipe.part}"
    with_charts = charts_are_possible()
    sections, lead = sections_of(paper, judged, cells, at_hand, remark, with_charts), outcome_lines(judged)
    found = {name: run for name, cell in by_settings(cells).items() if (run := at_hand.find(cell)) is not None}
    if found:
        lead += _report_line(judged, cells, found)
        text = document(*contents(list(found.values()), title, with_charts, sections, lead))
    else:
        header = element("header", element("h1", title), element("p", " ".join(lead), class_="lead") if lead else None)
        body = [element("section", element("h2", one.title), one.body, id=one.anchor) for one in sections]
        drawn = {name: chart for one in sections for name, chart in one.charts.items()}
        text = document(title, join((header, element("main", *body))), drawn)
    files.make_folder(output.parent)
    files.write_atomically(output, text)
    return output


def _report_line(judged: Judged, cells: Sequence[Cell], found: Collection[str]) -> list[str]:
    """Say of how many runs the report below the numbers is, where it is not of all; several cells may be of one run."""
    there = Counter((cell.row, cell.column) for cell in cells if cell.settings in found)
    if all(one.ours is None or one.ours.count <= there[one.row, one.column] for one in judged.cells):
        return []
    return [f"The report below is of the {plural(len(found), 'run')} at hand; of the others, numbers alone are known."]


def write_part_figures(
    paper: Paper, judged: Judged, cells: Sequence[Cell], at_hand: RunsAtHand, asked: FiguresAsked
) -> Path:
    """Write the redrawn figure, or the picture of a table, as files for a paper, a file for each panel; and the table.

    That has the paper's rows and columns, and in each of these the published number and ours.
    """
    sections = sections_of(paper, judged, cells, at_hand, "", with_charts=True)
    drawn = {name: chart for one in sections for name, chart in one.charts.items()}
    recipe = judged.recipe
    title, label = f"{paper.title}: {recipe.part}", f"tab:{recipe.paper}-{recipe.part}"
    return write_drawings(drawn, _as_in_the_paper(judged), asked, title, label)


def _as_in_the_paper(judged: Judged) -> Typeset:
    names = list(dict.fromkeys(one.column for one in judged.cells))
    columns = [Column(title, numeric=True, group=name) for name in names for title in ("published", "ours")]
    digits = digits_of(judged)
    words = {(one.row, one.column): cell_line(one, digits)[2:4] for one in judged.cells}
    lines = [
        [row, *(text for name in names for text in words.get((row, name), (ABSENT, ABSENT)))]
        for row in dict.fromkeys(one.row for one in judged.cells)
    ]
    notes = [f"{reported_line(judged)}. {ours_line(judged.recipe)} {seeds_line(judged)}".rstrip()]
    notes += note_lines(judged.cells)
    return Typeset([Column("", numeric=False), *columns], lines, notes)


def sections_of(
    paper: Paper, judged: Judged, cells: Sequence[Cell], at_hand: RunsAtHand, remark: str, with_charts: bool
) -> list[Section]:
    """The sections that stand above the report."""
    own = [cell for cell in cells if cell.recipe.name == judged.recipe.name]
    redrawn = redrawn_section(Material(judged, own, at_hand), with_charts)
    return [*filter(None, (redrawn,)), published_section(paper, judged, remark, with_charts)]


def published_section(paper: Paper, judged: Judged, remark: str = "", with_charts: bool = True) -> Section:
    """The section with the published numbers, ours, and what that says."""
    recipe = judged.recipe
    picture, drawn = glance(judged, with_charts)
    said = [
        element("p", f"{recipe.title}. {paper.citation}"),
        element("p", " ".join(filter(None, (f"Reported is {reported_line(judged)}.", ours_line(recipe), remark)))),
        picture,
        cell_table(judged),
        _list("Claims", [claim_line(claim) for claim in judged.claims]),
        _list("Orders", [order_line(*pair) for pair in judged.orders.items()]),
        _list("Notes", [*filter(None, (recipe.note,)), *note_lines(judged.cells)]),
    ]
    return Section("published", "Published and ours", join(said), drawn)


def cell_table(judged: Judged) -> Markup:
    """The published numbers and ours, cell by cell."""
    digits = digits_of(judged)
    numeric = {"published", "ours", "seeds", "difference", WITHIN}
    columns = [Column(head, numeric=head in numeric) for head in LONG_CELL_HEADS]
    rows = [
        [
            TableCell(text, hint=" ".join(one.notes) if head == "verdict" else "")
            for head, text in zip(LONG_CELL_HEADS, long_cell_line(one, digits), strict=True)
        ]
        for one in judged.cells
    ]
    return table(f"{judged.recipe.part}: published and ours", columns, rows)


def _list(title: str, lines: Sequence[str]) -> Markup | None:
    if not lines:
        return None
    return join((element("h3", title), element("ul", *(element("li", line) for line in lines))))
