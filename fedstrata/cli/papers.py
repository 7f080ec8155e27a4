"""The command that runs the tables and figures of papers, and sets the published numbers beside ours."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedstrata.cli.loading import loading_pytorch
from fedstrata.cli.options import FigureFont, Figures, FigureWidth, Json, NoReport, Quiet, add_command
from fedstrata.cli.running import PAGE, read_figures, stoppable
from fedstrata.cli.terminal import messages, print_json, telling, telling_all
from fedstrata.errors import FedStrataError

if TYPE_CHECKING:
    from fedstrata.papers.at_hand import RunsAtHand
    from fedstrata.papers.cells import Cell, Smaller
    from fedstrata.papers.keeping import Kept
    from fedstrata.papers.reading import Paper, Recipe
    from fedstrata.papers.running import Planned
    from fedstrata.report.paper_figures import FiguresAsked

PAGE_SUFFIX = ".html"
DOCUMENT_SUFFIX = ".md"
_WHERE = ("data_root", "device", "engine", "chunk")
"""Keys of an experiment that decide where and how it runs, and no number of a paper."""
_OF_A_PLACE = ("--out", "--runs", "--known", "--data-root", "--jobs", "--figures", "--figure-width", "--figure-font")
_OF_WHAT_IS_SHOWN = ("--json", "--quiet", "-q", "--no-report", "--finished")
"""Options of the command that decide no number either, with a value and without."""


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    add_command(
        app,
        paper,
        _WHERE,
        (
            "fedstrata paper",
            "fedstrata paper lips table2 --only cifar100 --seeds 3 --out results/lips-table2",
            "fedstrata paper lips table2 --method 'FedBN, LIPS' --scale 0.1 --dry-run",
            "fedstrata paper --write docs/reproduction.md results",
            "fedstrata paper --write papers.html results",
        ),
    )


def paper(
    changes: dict[str, Any],
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PAPER [PART]]",
            help="A paper, to list its tables and figures, and one of these, to run it; with --write: files or folders "
            "with results.",
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Only cells with this data or model, or this in their column."),
    ] = None,
    method: Annotated[
        str | None, typer.Option(metavar="LIST", help="Only the rows of these names, or these methods.")
    ] = None,
    columns: Annotated[str | None, typer.Option(metavar="LIST", help="Only these columns.")] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            help="How many seeds; by default as many as the recipe says, and with --finished as many as are known."
        ),
    ] = None,
    rounds: Annotated[int | None, typer.Option(metavar="N", help="Run N rounds instead of the paper's.")] = None,
    scale: Annotated[float, typer.Option(help="Run this part of the rounds, on this part of the samples.")] = 1.0,
    jobs: Annotated[str, typer.Option(metavar="N|auto", help="How many runs to do at a time.")] = "1",
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Tell what it would cost, after a few steps; write nothing."),
    ] = False,
    finished: Annotated[
        bool,
        typer.Option("--finished", help="Run nothing: tell of the runs that are finished, such as a killed job left."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="The folder of the results; by default runs/PAPER-PART. Nothing is run twice.")
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder of the runs, which tables may share; by default runs/ in --out."),
    ] = None,
    known: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="CSV",
            help="More results.csv, or their folders, whose cells are not run again, and of whose tables figures are "
            "redrawn; may be repeated.",
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write what was reproduced, by some results: as a document (.md), or a page with pictures (.html).",
        ),
    ] = None,
    recipes: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Papers of your own: a folder with published.csv and recipes/PAPER/*.toml."),
    ] = None,
    figures: Figures = None,
    figure_width: FigureWidth = None,
    figure_font: FigureFont = None,
    no_report: NoReport = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Run a table or a figure of a paper, and set its published numbers beside ours, with a verdict on each.

    Without a PART it is listed what there is, and what of it can run here.
    """
    with loading_pytorch(quiet):
        from fedstrata.cli import papers_shown
        from fedstrata.papers.at_hand import RunsAtHand
        from fedstrata.papers.availability import Here
        from fedstrata.papers.cells import Choice, Smaller, cells_behind
        from fedstrata.papers.overview import write_overview
        from fedstrata.papers.reading import PAPERS, find_paper, read_papers
        from fedstrata.papers.writing import write_reproduction
        from fedstrata.side_by_side.how_many import read_jobs

    named = names or []
    drawn = read_figures(figures, figure_width, figure_font)
    if drawn is not None and dry_run:
        raise FedStrataError("'--figures' does nothing here: figures are drawn of finished runs.")
    if finished and (dry_run or jobs != "1"):
        raise FedStrataError(
            f"'{'--dry-run' if dry_run else '--jobs'}' does nothing beside --finished, which runs nothing."
        )
    papers = read_papers(recipes or PAPERS)
    of_a_part = {
        "--only": only, "--method": method, "--columns": columns, "--seeds": seeds, "--rounds": rounds,
        "--scale": scale != 1, "--jobs": jobs != "1", "--dry-run": dry_run, "--finished": finished,
        "--out": out, "--runs": runs, "--known": known, "--figures": figures, "--no-report": no_report,
    }  # fmt: skip
    if write is not None:
        _refuse_idle(of_a_part, "--write writes of kept results")
        _refuse_to_write(write, named)
        make = write_overview if write.suffix == PAGE_SUFFIX else write_reproduction
        make(write, papers, [Path(name) for name in named])
        papers_shown.show_places({"written": write}, json, quiet)
        return
    if len(named) > 2:
        raise FedStrataError(f"One paper and one of its parts at a time, not {len(named)} names: {' '.join(named)}.")
    chosen = {name: find_paper(papers, name) for name in named[:1]} or papers
    if len(named) < 2:
        name = next(iter(chosen))
        _refuse_idle(
            of_a_part,
            f"none is named: write 'fedstrata paper {name} PART'; 'fedstrata paper {name}' lists them",
        )
        with telling("looking for methods, models and data", quiet):
            here = Here()
            told = papers_shown.describe(chosen, changes, here)
        papers_shown.show_papers(told, here, changes.get("data_root"), json, quiet)
        return
    recipe = chosen[named[0]].part(named[1])
    if not recipe.runs:
        raise FedStrataError(f"Nothing is run for '{recipe.name}': {(recipe.note or recipe.title).rstrip('.')}.")
    smaller = Smaller(rounds, scale)
    choice = Choice.read(recipe, only, method, columns)
    folder = out or Path("runs") / f"{recipe.paper}-{recipe.part}"
    results = _known(known or [], folder)
    if finished and seeds is None:
        seeds = max(recipe.seeds, 1 + max((one.seed for one in results if one.paper == recipe.paper), default=0))
    cells = cells_behind(chosen[named[0]], recipe, seeds, smaller, choice, changes)
    planned = _plan(cells, runs or folder / "runs", results, quiet)
    if dry_run:
        read_jobs(jobs)
        _price(planned, json, quiet)
        return
    if planned.impossible and not finished:
        reasons = " ".join(dict.fromkeys(planned.problems.values()))
        raise FedStrataError(f"Nothing that was asked for of '{recipe.name}' can be run here. {reasons}")
    failed = {} if finished else _perform(planned, jobs, folder, quiet)
    at_hand = RunsAtHand.among(known or [], planned.folder)
    missing = planned.changed if finished else {**planned.problems, **failed}
    _show(chosen[named[0]], recipe, planned, failed, missing, at_hand, smaller, folder, no_report, json, quiet, drawn)
    if failed:
        raise FedStrataError(_failed_in_words(failed, planned))


def _failed_in_words(failed: Mapping[str, str], planned: Planned) -> str:
    """Say how many of the runs that were to be done have failed, and why the first did."""
    from fedstrata.report.formats import plural

    settings, why = next(iter(failed.items()))
    of = plural(len(planned.to_do), "run")
    others = ", the others are finished" if len(failed) < len(planned.to_do) else ""
    said = f"{len(failed)} of {of} {'has' if len(failed) == 1 else 'have'} failed{others}."
    return f"{said} {planned.runs[settings].name}: {why}"


def _refuse_to_write(file: Path, results: Sequence[str]) -> None:
    """Refuse to write of nothing, over what was written of something, and what is neither a document nor a page."""
    if not results:
        raise FedStrataError(f"'--write {file}' is of kept results; name their files or folders behind it.")
    if file.suffix not in (PAGE_SUFFIX, DOCUMENT_SUFFIX):
        raise FedStrataError(
            f"'{file}' is neither a document nor a page; its name has to end in {DOCUMENT_SUFFIX} or {PAGE_SUFFIX}."
        )


def _refuse_idle(options: Mapping[str, object], why: str) -> None:
    """Refuse what means nothing where no table or figure is run."""
    given = [name for name, value in options.items() if value]
    if given:
        raise FedStrataError(f"{', '.join(given)} is for a table or a figure, and {why}.")


def _known(known: Sequence[Path], folder: Path) -> list[Kept]:
    """Read what is known from other results, and from those that lie in the folder already."""
    from fedstrata.papers.keeping import RESULTS, read_results

    own = [folder / RESULTS] if (folder / RESULTS).exists() else []
    return read_results([*known, *own])


def _plan(cells: Sequence[Cell], runs: Path, results: Sequence[Kept], quiet: bool) -> Planned:
    from fedstrata.papers.running import plan

    with telling("looking for finished runs, methods, models and data", quiet):
        return plan(cells, runs, results)


def _price(planned: Planned, json: bool, quiet: bool) -> None:
    from fedstrata.cli import papers_shown
    from fedstrata.papers.pricing import price

    with telling_all(quiet) as tell:
        prices, refused = price(planned, tell)
    papers_shown.show_prices(planned, prices, refused, json, quiet)


def _perform(planned: Planned, jobs: str, folder: Path, quiet: bool) -> dict[str, str]:
    """Do what is to do; whatever comes, the numbers of finished runs are kept."""
    from fedstrata import comparing
    from fedstrata.papers.running import perform
    from fedstrata.progress import show_progress

    to_do = planned.to_do
    done = len(planned.cells) - sum(cell.settings in planned.waiting for cell in planned.cells)
    if done and not quiet:
        messages.print(f"{done} of {len(planned.cells)} cells are known already and are not run again.")
    if not to_do:
        return {}
    at_a_time = comparing.choose_jobs(jobs, to_do)
    rounds = sum(run.rounds_left for run in to_do)
    try:
        with (
            stoppable("the same command", planned.folder),
            show_progress(messages, len(to_do), rounds, quiet, at_a_time) as progress,
        ):
            return perform(planned, progress, at_a_time)
    except BaseException:
        _keep(planned, folder)
        raise


def _keep(planned: Planned, folder: Path) -> list[Kept]:
    """Write the numbers of all cells that are known, those of other commands into the same folder too."""
    from fedstrata.papers.keeping import RESULTS, merged, read_results, write_results
    from fedstrata.papers.running import collect

    path = folder / RESULTS
    found = collect(planned, command_to_keep(sys.argv[1:]))
    write_results(path, merged(read_results([path]) if path.exists() else [], found))
    return found


def command_to_keep(words: Sequence[str]) -> str:
    """Write a command as results keep it: what decides their numbers, not where files lie and what is shown.

    >>> command_to_keep(["paper", "lips", "table2", "--only", "c10 .1", "--jobs=2", "--out", "/home/me/t2", "--quiet"])
    "fedstrata paper lips table2 --only 'c10 .1'"
    """
    kept: list[str] = []
    left = iter(words)
    for word in left:
        name, equals, _ = word.partition("=")
        if name in _OF_A_PLACE:
            if not equals:
                next(left, None)
        elif name not in _OF_WHAT_IS_SHOWN:
            kept.append(word)
    return f"fedstrata {shlex.join(kept)}"


def _show(
    paper: Paper, recipe: Recipe, planned: Planned, failed: Mapping[str, str], missing: Mapping[str, str],
    at_hand: RunsAtHand, smaller: Smaller, folder: Path, no_report: bool, json: bool, quiet: bool,
    figures: FiguresAsked | None,
) -> None:  # fmt: skip
    from fedstrata.cli import papers_shown
    from fedstrata.papers.deriving import judge_part
    from fedstrata.papers.judging import LINE
    from fedstrata.papers.keeping import RESULTS, write_csv
    from fedstrata.papers.page import write_page, write_part_figures

    remark = smaller.words(planned.cells)
    kept = _keep(planned, folder)
    judged = judge_part(paper, recipe, planned.cells, kept, missing)
    write_csv(folder / "cells.csv", LINE, judged.lines())
    places = {"cells": folder / "cells.csv", "results": folder / RESULTS}
    if not no_report:
        with telling("writing the page", quiet):
            places["report"] = write_page(paper, judged, planned.cells, at_hand, folder / PAGE, remark)
    if figures is not None:
        with telling("drawing figures", quiet):
            places["figures"] = write_part_figures(paper, judged, planned.cells, at_hand, figures)
    if json:
        print_json(
            {
                **judged.told(),
                "remark": remark,
                "failed": {planned.runs[settings].name: why for settings, why in failed.items()},
                "files": {key: str(path) for key, path in places.items()},
            }
        )
    elif not quiet:
        papers_shown.show_judged(judged, remark)
        papers_shown.show_places(places, json, quiet)
