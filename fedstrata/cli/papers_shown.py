"""What is known of papers, for people and as JSON: their parts, what runs cost, and what came out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from fedstrata.cli.terminal import new_table, print_json, print_table, results
from fedstrata.data.datasets.base import ROOT_VARIABLE, data_roots
from fedstrata.papers.availability import Here
from fedstrata.papers.cells import cells_of
from fedstrata.papers.judging import NOT_RUN, Judged
from fedstrata.papers.pricing import HOW, Price
from fedstrata.papers.reading import Paper, Recipe
from fedstrata.papers.running import Planned
from fedstrata.papers.told import note_lines
from fedstrata.papers.words import (
    CELL_HEADS,
    cell_line,
    claim_line,
    digits_of,
    order_line,
    ours_line,
    reported_line,
    statistics_line,
)
from fedstrata.report.formats import data_size, duration, plural

_STYLES = {
    "agrees": "green", "shown": "green", "above": "yellow", "below": "yellow", "diverged": "red", NOT_RUN: "dim",
}  # fmt: skip


def describe(papers: Mapping[str, Paper], changes: Mapping[str, Any], here: Here) -> list[dict[str, Any]]:
    """Tell of papers as plain data: each part with the number of its cells, and what keeps some from running here."""
    return [
        {
            "paper": paper.name,
            "title": paper.title,
            "citation": paper.citation,
            "link": paper.link,
            "parts": [_describe_part(part, here, changes) for part in paper.parts.values()],
        }
        for paper in papers.values()
    ]


def _describe_part(recipe: Recipe, here: Here, changes: Mapping[str, Any]) -> dict[str, Any]:
    cells = cells_of(recipe, 1, where=changes)
    possible = [cell for cell in cells if not here.problem(cell)]
    return {
        "part": recipe.part,
        "kind": recipe.kind,
        "title": recipe.title,
        "note": recipe.note,
        "runs": recipe.runs,
        "cells": len(cells),
        "cells_here": len(possible),
        "seeds": recipe.seeds,
        "published": len(recipe.published),
        "missing": here.problems(cells),
    }


def show_papers(told: Sequence[Mapping[str, Any]], here: Here, root: str | None, json: bool, quiet: bool) -> None:
    """Show the papers with their parts, and at the end what is missing here for any of them."""
    if json:
        print_json(told)
        return
    if quiet:
        return
    for paper in told:
        results.print(Text.assemble((f"{paper['paper']}  {paper['title']}", "bold")), soft_wrap=True)
        results.print(Text(f"{paper['citation']} {paper['link']}", style="dim"), soft_wrap=True)
        table = new_table("part", "cells", "run here", "what", right=("cells", "run here"))
        for part in paper["parts"]:
            table.add_row(part["part"], str(part["cells"]), str(part["cells_here"]), Text(_titled(part)))
        results.print(table)
        results.print()
    _show_missing(told, here, root)


def _titled(part: Mapping[str, Any]) -> str:
    """The title of a part; where nothing is run for it, with the reason."""
    if part["cells"] or not part["note"]:
        return str(part["title"])
    return f"{part['title']} ({'' if part['runs'] else 'nothing is run: '}{part['note'].rstrip('.')})"


def _show_missing(told: Sequence[Mapping[str, Any]], here: Here, root: str | None) -> None:
    """Say each thing that is missing once, with the papers that need it, and where data is looked for."""
    needed: dict[str, dict[str, None]] = {}
    for paper in told:
        for text in dict.fromkeys(text for part in paper["parts"] for text in part["missing"]):
            needed.setdefault(here.briefs.get(text, text), {})[paper["paper"]] = None
    if not needed:
        return
    table = new_table("missing here", *(["for"] if len(told) > 1 else []))
    for words, papers in needed.items():
        table.add_row(Text(words, style="yellow"), *([", ".join(papers)] if len(told) > 1 else []))
    results.print(table)
    places = " and ".join(f"'{place}'" for place in data_roots(None if root is None else Path(root)))
    results.print(
        Text(
            f"\nData is looked for in {places}, in a folder of its name or without one; name another place with "
            f"--data-root or {ROOT_VARIABLE}. 'fedstrata download' needs: pip install 'fedstrata[hub]'."
        ),
        soft_wrap=True,
    )


def show_prices(planned: Planned, prices: Sequence[Price], refused: Mapping[str, str], json: bool, quiet: bool) -> None:
    """Show what it would cost, and what cannot be run: for want of something here, or because it is refused."""
    total = {key: sum(getattr(one, key) for one in prices) for key in ("runs", "rounds", "flops", "bytes", "seconds")}
    cannot = [*dict.fromkeys(planned.problems.values()), *(f"{name}: {why}" for name, why in refused.items())]
    if json:
        print_json(
            {
                "cells": len(planned.cells),
                **total,
                "settings": [asdict(one) for one in prices],
                "how": HOW,
                "cannot_run": cannot,
            }
        )
        return
    if quiet:
        return
    heads = ("runs", "rounds", "operations", "bytes", "time")
    table = new_table("setting", *heads, right=heads)
    for one in [*prices, Price("all", **total)]:
        table.add_row(
            Text(one.setting), str(one.runs), f"{one.rounds:,}", f"{one.flops:.2e}", data_size(one.bytes),
            duration(one.seconds),
        )  # fmt: skip
    results.print(table if prices else "There is nothing to run here.")
    finished = sum(run.state == "finished" for run in planned.runs.values())
    results.print(
        f"\n{plural(len(planned.cells), 'cell')}, seeds counted; {plural(finished, 'run')} finished already; "
        f"{plural(len(planned.problems), 'run')} cannot be done here.{f' {HOW}' * bool(prices)}",
        soft_wrap=True,
    )
    _show_problems(cannot)


def show_judged(judged: Judged, remark: str) -> None:
    """Show the published numbers beside ours, and the claims."""
    recipe = judged.recipe
    results.print(Text(f"{recipe.name}: {recipe.title}", style="bold"), soft_wrap=True)
    results.print(Text(f"{reported_line(judged)}. {remark}".strip(), style="dim"))
    if recipe.published and not recipe.is_derived:
        results.print(Text(f"Published: {statistics_line(recipe)}. {ours_line(recipe)}", style="dim"), soft_wrap=True)
    heads = [head.replace("difference", "diff") for head in CELL_HEADS]  # a line has little room
    table = new_table(*heads, right=("published", "ours", "seeds", "diff"))
    for one in judged.cells:
        *words, verdict = cell_line(one, digits_of(judged))
        table.add_row(*map(Text, words), Text(verdict, style=_STYLES.get(verdict, "")))
    print_table(table)
    if judged.claims:
        results.print("\nClaims:")
    for claim in judged.claims:
        results.print(Text(f"  {claim_line(claim)}", style=_STYLES.get(claim.word, "")), soft_wrap=True)
    for column, found in judged.orders.items():
        results.print(Text(f"  {order_line(column, found)}"), soft_wrap=True)
    _show_problems(note_lines(judged.cells))


def _show_problems(problems: Sequence[str]) -> None:
    for text in problems:
        results.print(Text(f"note: {text}", style="yellow"), soft_wrap=True)


def show_places(places: Mapping[str, Path], json: bool, quiet: bool) -> None:
    """Tell where things were written."""
    if json:
        print_json({name: str(path) for name, path in places.items()})
    elif not quiet:
        for name, path in places.items():
            results.print(Text.assemble(f"{name}  ", (str(path), "bold")), soft_wrap=True)
