"""The table of attacks in ``docs/security.md`` is made of the tests that there are."""

from __future__ import annotations

import attacks
import pytest
from attacks import BEGIN, END, ROOT, Performed, Table, marked_tests, read_rows, row_of, table

PAGE = ROOT / "docs" / "security.md"


def test_the_table_names_every_test_that_attacks_and_no_other():
    rows = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert read_rows(rows).keys() == marked_tests()
    assert "The test fails" not in rows


def test_a_failure_in_one_case_shows_in_the_table():
    good = Performed("tests/test_a.py::test_b", "A flood.", "It holds.", 3, 0, "61 MB")
    assert row_of(good) == "| A flood. | It holds. (3 of 3 cases.) Measured: 61 MB. | `test_a.py`<br>`test_b` |"
    assert "**The test fails.** (2 of 3 cases.)" in row_of(good._replace(failures=1))
    assert read_rows(table({"test_a.py::test_b": row_of(good)})) == {"test_a.py::test_b": row_of(good)}


def test_what_is_written_stands_between_the_marks(tmp_path):
    page = tmp_path / "page.md"
    old = "test_kills.py::test_a_kill_at_a_random_moment"
    rows = {name: row_of(Performed(name, "Old.", "It holds.", 1, 0, "")) for name in (old, "test_gone.py::test_gone")}
    page.write_text(f"before\n{BEGIN}{table(rows)}{END}after\n")
    written = Table(page)
    report = pytest.TestReport(
        "tests/test_a.py::test_b[1]", ("", 0, ""), {}, "passed", None, "call",
        user_properties=[("attack", "A flood."), ("outcome", "It holds.")],
    )  # fmt: skip
    for _ in range(2):
        written.pytest_runtest_logreport(report)
    written.pytest_sessionfinish()
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}| attack")
    assert text.endswith(f"{END}after\n")
    assert "| A flood. | It holds. (2 of 2 cases.) |" in text
    assert read_rows(text).keys() == {old, "test_a.py::test_b"}, "what was not run stays, if there is such a test"


def test_marked_tests_are_found_in_the_source():
    assert "test_kills.py::test_a_kill_at_a_random_moment" in attacks.marked_tests()
