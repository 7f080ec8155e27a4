"""Tests that perform an attack or a fault, and the table that ``docs/security.md`` makes of them.

Such a test says what it does and what comes of it::

    @pytest.mark.attack("A site reports a loss of 10**400.", "Its reply is refused by name; the round goes on.")
    def test_an_endless_loss(record_property):
        ...
        record_property("measured", "at most 61 MB")   # where something was measured

``pytest -m attack --report docs/security.md`` performs all of them, slow ones too, and writes what happened between the
two marks in that file: the outcome where the test has passed, and that it failed where it has not. Where only some are
run, the rows of the others stay, as long as there are such tests.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest

BEGIN, END = "<!-- attacks: begin -->\n", "<!-- attacks: end -->\n"
ROOT = Path(__file__).parent.parent


class Performed(NamedTuple):
    """An attack that was performed by a test, and what came of it."""

    test: str
    attack: str
    outcome: str
    cases: int
    failures: int
    measured: str


def note_attack(item: pytest.Item) -> None:
    """Let the report of a test tell what it performs, in whichever process it runs."""
    mark = item.get_closest_marker("attack")
    if mark is not None:
        item.user_properties += [("attack", mark.args[0]), ("outcome", mark.args[1])]


@dataclass
class Table:
    """Gathers what the tests have performed, and writes it into a page."""

    page: Path

    def __post_init__(self) -> None:
        self.performed: dict[str, Performed] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        told = dict(report.user_properties)
        if "attack" not in told or report.skipped or (report.when != "call" and report.passed):
            return
        test = report.nodeid.partition("[")[0]
        before = self.performed.get(test)
        cases, failures, measured = (0, 0, "") if before is None else (before.cases, before.failures, before.measured)
        self.performed[test] = Performed(
            test,
            str(told["attack"]),
            str(told["outcome"]),
            cases + 1,
            failures + (not report.passed),
            str(told.get("measured", measured)),
        )

    def pytest_sessionfinish(self) -> None:
        content = self.page.read_text()
        head, _, rest = content.partition(BEGIN)
        rows, _, tail = rest.partition(END)
        known = {test: row for test, row in read_rows(rows).items() if test in marked_tests()}
        performed = {short_name(one.test): row_of(one) for one in self.performed.values()}
        self.page.write_text(head + BEGIN + table(known | performed) + END + tail)


def table(rows: Mapping[str, str]) -> str:
    """Write attacks as a table, those of one file of tests together."""
    lines = ["| attack or fault | what happened | test |", "|---|---|---|"]
    return "\n".join([*lines, *(row for _, row in sorted(rows.items()))]) + "\n"


def row_of(one: Performed) -> str:
    """Write what a test has performed as a row."""
    outcome = "**The test fails.**" if one.failures else one.outcome
    outcome += f" ({one.cases - one.failures} of {one.cases} cases.)" if one.cases > 1 else ""
    measured = f" Measured: {one.measured}." if one.measured else ""
    file, _, name = short_name(one.test).partition("::")
    return f"| {one.attack} | {outcome}{measured} | `{file}`<br>`{name}` |"


def read_rows(text: str) -> dict[str, str]:
    """Read the rows of a table, by the names of their tests."""
    found = ((re.search(r"`(test_\w+\.py)`<br>`(\w+)` \|$", line), line) for line in text.splitlines())
    return {f"{match[1]}::{match[2]}": line for match, line in found if match is not None}


def short_name(test: str) -> str:
    """Name a test by its file, without folders."""
    return test.rpartition("/")[2]


def marked_tests() -> set[str]:
    """Name all tests that are marked as attacks, from their source."""
    return {
        f"{path.name}::{node.name}"
        for path in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and any(ast.unparse(decorator).startswith("pytest.mark.attack(") for decorator in node.decorator_list)
    }
