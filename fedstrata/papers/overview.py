"""One page over all kept results: claims and tables of the papers at a glance, and figures redrawn from what is kept.

It says what the document of :mod:`fedstrata.papers.writing` says, with pictures, and for those who cannot see them with
the same tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from fedstrata import files
from fedstrata._version import __version__
from fedstrata.papers.at_hand import RunsAtHand
from fedstrata.papers.costs import cost_line
from fedstrata.papers.figures.glance import claims_of_papers
from fedstrata.papers.figures.material import Material
from fedstrata.papers.figures.section import Charts, glance, redrawn_section, shown
from fedstrata.papers.gathering import Gathered, OtherSettings, all_kept, claims_of, gather, papers_told
from fedstrata.papers.judging import Judged
from fedstrata.papers.keeping import Kept, read_results
from fedstrata.papers.page import cell_table
from fedstrata.papers.reading import Paper
from fedstrata.papers.told import (
    COUNTED,
    PAPER_HEADS,
    anchor_of,
    cells_run,
    claims_missing_line,
    command_of,
    has_results,
    is_told,
    missing_line,
    note_lines,
    order_lines,
    papers_in_numbers,
    repeated_lines,
    run_line,
)
from fedstrata.papers.words import CLAIM_HEADS, claim_cells, claim_line, statistics_line
from fedstrata.report.charts import HOW_TO_GET_CHARTS, charts_are_possible
from fedstrata.report.document import document
from fedstrata.report.formats import plural
from fedstrata.report.markup import Markup, element, join
from fedstrata.report.tables import Column, table
from fedstrata.report.view import Section

TITLE = "The papers at a glance"
INTRODUCTION = (
    "What of the papers was run, what came out against the published numbers, and whether their claims show, from kept "
    "results and from nothing else. A claim is shown where the 95 % interval of the difference, over seeds that both "
    "methods have, lies above 0, and not shown where it lies below 0, or below half of the published difference. What "
    "was not run is said to be so."
)


def write_overview(path: Path, papers: Mapping[str, Paper], results: Sequence[Path]) -> None:
    """Write the page; figures are redrawn from the tables of runs that lie beside the results."""
    kept = read_results(results)
    text = overview(papers, kept, RunsAtHand.among(results), charts_are_possible())
    files.make_folder(path.resolve().parent)
    files.write_atomically(path, text)


def overview(papers: Mapping[str, Paper], kept: Sequence[Kept], at_hand: RunsAtHand, with_charts: bool) -> str:
    """Build the page as text; papers of which nothing is kept are left out, unless that is so of all."""
    papers = papers_told(papers, kept)
    gathered = {paper.name: gather(paper, kept) for paper in papers.values()}
    parts = {name: _parts(of_paper, at_hand, with_charts) for name, of_paper in gathered.items()}
    sections = [*filter(None, (_numbers_of_papers(gathered),)), _claims(papers, gathered, with_charts)]
    sections += [_paper(paper, gathered[paper.name], parts[paper.name]) for paper in papers.values()]
    everything = [one for parts in gathered.values() for part in parts for one in all_kept(part)]
    runs = plural(len({one.settings for one in everything}), "run")
    header = element(
        "header",
        element("h1", TITLE),
        element("p", f"{plural(len(papers), 'paper')} · {runs}", class_="facts"),
        element("p", INTRODUCTION),
        None if with_charts else element("p", f"This page has tables only. For the charts: {HOW_TO_GET_CHARTS}."),
    )
    body = [element("section", element("h2", one.title), one.body, id=one.anchor) for one in sections]
    layout = element("div", element("aside", _contents(sections, parts)), element("main", *body), class_="layout")
    footer = element("footer", element("p", f"Written by FedStrata {__version__} from kept results alone."))
    drawn = {name: chart for one in sections for name, chart in one.charts.items()}
    return document(TITLE, join((header, layout, footer)), drawn)


def _contents(sections: Sequence[Section], parts: Mapping[str, Mapping[str, Section]]) -> Markup:
    """Links to the sections, those of papers by their short names, with their parts."""
    lines = []
    for section in sections:
        told = parts.get(section.anchor, {})
        inside = [element("li", element("a", name, href=f"#{one.anchor}")) for name, one in told.items()]
        name = section.anchor if section.anchor in parts else section.title
        link = element("a", name, href=f"#{section.anchor}", title=section.title)
        lines.append(element("li", link, element("ul", *inside, class_="inside") if inside else None))
    return element("nav", element("ul", *lines), aria_label="Contents")


def _numbers_of_papers(gathered: Mapping[str, Sequence[Gathered]]) -> Section | None:
    """How many numbers of each paper were run, and how many of these agree; nothing where nothing was run."""
    lines = papers_in_numbers(gathered)
    if not lines:
        return None
    columns = [Column(head, numeric=head in PAPER_HEADS[1:-1]) for head in PAPER_HEADS]
    listed = table("Published numbers and runs", columns, lines)
    return Section("numbers", "In numbers", join((listed, element("p", COUNTED, class_="hint"))))


def _claims(papers: Mapping[str, Paper], gathered: Mapping[str, Sequence[Gathered]], with_charts: bool) -> Section:
    """The main claims of all papers: a picture, and a table with those that were not run, too."""
    main = [(part.recipe, part.judged.claims[place]) for part, place in claims_of(gathered)]
    by_paper = {name: [(recipe, claim) for recipe, claim in main if recipe.paper == name] for name in papers}
    charts = Charts("papers")
    figure = claims_of_papers(by_paper) if with_charts else None
    picture = None if figure is None else shown(figure, charts)
    heads = [*CLAIM_HEADS, "so it is", "part"]
    columns = [Column(head, numeric=head in CLAIM_HEADS[2:]) for head in heads]
    lines = [(*claim_cells(claim), claim.word, recipe.name) for recipe, claim in main]
    listed = table("The main claims", columns, lines)
    return Section("claims", "The main claims", join((picture, listed)), charts.drawn)


def _paper(paper: Paper, gathered: Sequence[Gathered], parts: Mapping[str, Section]) -> Section:
    """All parts of a paper of which there is a number or a picture, and the names of the others."""
    left = [one for one in gathered if one.recipe.part not in parts and one.recipe.runs]
    numbers = [one.recipe.part for one in left if has_results(one)]
    without = [f"{one.recipe.part} ({one.recipe.title})" for one in left if not has_results(one)]
    told = [
        element("p", paper.citation),
        *(element("section", element("h3", one.title), one.body, id=one.anchor) for one in parts.values()),
        element("p", f"Only numbers are kept of {', '.join(numbers)}, and nothing to draw.") if numbers else None,
        element("p", f"Not run: {'; '.join(without)}.") if without else None,
        _details("Settings", [element("p", paper.note)]) if paper.note else None,
    ]
    drawn = {name: chart for one in parts.values() for name, chart in one.charts.items()}
    return Section(paper.name, paper.title, join(told), drawn)


def _parts(gathered: Sequence[Gathered], at_hand: RunsAtHand, with_charts: bool) -> dict[str, Section]:
    """The parts of which there is something to show, by their names."""
    found = {part.recipe.part: _part(part, at_hand, with_charts) for part in gathered}
    return {name: section for name, section in found.items() if section is not None}


def _part(part: Gathered, at_hand: RunsAtHand, with_charts: bool) -> Section | None:
    """What is known of a part; none of figures that cannot be drawn from what is kept, and of what was not run."""
    recipe, judged, prefix = part.recipe, part.judged, f"{part.recipe.paper}-"
    redrawn = redrawn_section(Material(judged, part.cells, at_hand), with_charts, prefix)
    drawn = {} if redrawn is None else dict(redrawn.charts)
    if not drawn and not is_told(part):
        return None
    body: list[Markup | None] = [redrawn.body if redrawn is not None and drawn else None]
    if cells_run(judged):
        picture, charts = glance(_without_empty_columns(judged), with_charts, prefix)
        drawn |= charts
        published = recipe.published and not recipe.is_derived
        body += [
            element("p", run_line(part) + (f" Published: {statistics_line(recipe)}." if published else "")),
            picture,
            _list(map(claim_line, [claim for claim in judged.claims if claim.found is not None])),
            _numbers(part),
        ]
    body += [_other(other) for other in part.others]
    return Section(anchor_of(recipe), f"{recipe.part}: {recipe.title}", join(body), drawn)


def _without_empty_columns(judged: Judged) -> Judged:
    run = {one.column for one in cells_run(judged)}
    return dataclasses.replace(judged, cells=tuple(one for one in judged.cells if one.column in run))


def _numbers(part: Gathered) -> Markup:
    """The table behind the picture, with all that is to be said of it."""
    judged = part.judged
    lines = [*order_lines(judged), *note_lines(cells_run(judged)), *repeated_lines(part), missing_line(judged)]
    lines += [claims_missing_line(judged.claims), f"Settings: {part.recipe.note}" if part.recipe.note else ""]
    return _details(
        "Numbers, settings and cost",
        [
            cell_table(_without_empty_columns(judged)),
            _list(filter(None, lines)),
            element("p", f"Cost: {cost_line(part.kept)}".replace("`", "")),
            element("pre", " ".join(command_of(part))),
        ],
    )


def _other(other: OtherSettings) -> Markup:
    """The numbers of runs with other settings, which no picture sets beside the published ones."""
    changed = f" Changed: {other.changes}." if other.changes else ""
    said = element("p", f"Who beats whom in these runs is told, but decides no claim.{changed}")
    claims = _list(map(claim_line, [claim for claim in other.judged.claims if claim.found is not None]))
    title = f"With other settings, {plural(other.rounds, 'round')}: not comparable with the published numbers"
    return _details(title, [said, cell_table(other.judged), claims])


def _details(title: str, body: Iterable[Markup | None]) -> Markup:
    return element("details", element("summary", title), *body)


def _list(lines: Iterable[str]) -> Markup | None:
    listed = [element("li", line) for line in lines]
    return element("ul", *listed, class_="notes") if listed else None
