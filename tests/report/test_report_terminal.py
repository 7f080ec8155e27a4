import io
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from fedstrata.report import rich_table
from fedstrata.report.formats import data_size, duration, p_value, percent, points
from fedstrata.report.names import shortened
from fedstrata.report.rows import Row
from fedstrata.significance import Comparison, Estimate


def row(label: str, accuracy: float | None, comparison: Comparison | None = None, seconds: float = 83.2) -> Row:
    value = None if accuracy is None else Estimate(accuracy, 0.0123, 3)
    size = Estimate(123_456_789.0, None, 3)
    return Row(
        label, "client_after", (0, 1, 2), value, value, value, value, size, size, Estimate(seconds, 1, 3), comparison
    )


def rendered(rows: list[Row], width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as capture:
        console.print(rich_table(rows, width=width))
    return [line.rstrip() for line in capture.get().splitlines() if line.strip()]


def test_fifty_methods_fit_eighty_columns_with_no_number_cut() -> None:
    compared = Comparison("fedavg", Estimate(-0.1234, 0.02, 3), 0.0123, 0.0456, "")
    rows = [row("fedavg", 0.8)]
    rows += [row(f"fedprox(mu={n / 1000})+lips+lws", 1.0, compared, seconds=86_000) for n in range(49)]
    lines = rendered(rows)
    assert max(map(len, lines)) <= 80
    numbers = [line for line in lines if "±" in line]
    assert len(numbers) == 50
    assert len(lines) == 53  # two lines of heads, a rule, and one line for each method
    assert not any("…" in line.split(maxsplit=1)[1] for line in numbers)
    assert len({line.split()[0] for line in numbers}) == 50
    assert all(line.endswith("24 h") and "−12.3" in line and "0.046" in line for line in numbers[1:])


def test_long_methods_are_shortened_and_wide_terminals_leave_them_whole() -> None:
    compared = Comparison("fedavg", None, None, None, "")
    rows = [row("fedavg", 0.8), row("fedprox(mu=0.001)+lips(tau=0.5)+lws", 0.9, compared)]
    narrow = rendered(rows)
    assert [line.split()[0][:7] for line in narrow[-2:]] == ["fedavg", "fedprox"]
    assert narrow[-1].split()[0].endswith("…")
    wide = rendered(rows, width=120)
    assert wide[-1].startswith("fedprox(mu=0.001)+lips(tau=0.5)+lws ")


@given(st.lists(st.text("abc(=0.1)+", min_size=1, max_size=60), min_size=1, max_size=8), st.integers(4, 40))
def test_shortened_names_fit_and_short_ones_stay(names: list[str], width: int) -> None:
    cut = shortened(names, width)
    assert all(len(name) <= width for name in cut)
    assert all(short == name for short, name in zip(cut, names, strict=True) if len(name) <= width)


def test_one_method_has_no_comparison_and_absent_numbers_are_dashes() -> None:
    lines = rendered([row("local", None)])
    assert "diff" not in lines[0]
    assert lines[-1].split() == ["local", "–", "–", "–", "–", "123", "MB", "123", "MB", "83", "s"]


def test_hostile_names_are_shown_as_they_are() -> None:
    assert any("[bold]x[/bold]" in line for line in rendered([row("[bold]x[/bold]", 0.5)]))


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (percent(Estimate(0.87312, 0.0123, 3)), "87.3 ± 1.2"),
        (percent(Estimate(float("nan"), None, 1)), "NaN"),
        (percent(None), "–"),
        (points(Estimate(-0.0213, None, 1)), "−2.1"),
        (points(Estimate(0.1, None, 1)), "+10.0"),
        (p_value(0.0004), "< 0.001"),
        (p_value(0.0312), "0.031"),
        (p_value(None), "–"),
        (data_size(0), "0 B"),
        (data_size(999), "999 B"),
        (data_size(999.7), "1.00 kB"),
        (data_size(1_234_000), "1.23 MB"),
        (data_size(99_960_000), "100 MB"),
        (data_size(5e17), "500 PB"),
        (duration(4.25), "4.2 s"),
        (duration(99.4), "99 s"),
        (duration(99.6), "1.7 min"),
        (duration(5_950), "99 min"),
        (duration(400_000), "111 h"),
    ],
)
def test_numbers_as_people_read_them(written: str, expected: str) -> None:
    assert written == expected


def test_bold_and_a_star_mark_the_highest_of_several() -> None:
    table = rich_table([row("a", 0.5), row("b", 0.7)])
    styles = [str(cell.style) for cell in itertools.islice(table.columns[1].cells, 2)]  # type: ignore[union-attr]
    assert styles == ["", "bold"]
    assert [line.count("*") for line in rendered([row("a", 0.5), row("b", 0.7)])[-2:]] == [0, 4]
    assert not any("*" in line for line in rendered([row("a", 0.5)]))


def test_what_validation_samples_have_chosen_has_a_column_which_fits_eighty_columns() -> None:
    compared = Comparison("fedavg", Estimate(-0.1234, 0.02, 3), 0.0123, 0.0456, "")
    plain = [row("fedavg", 0.8), *(row(f"fedprox(mu={n / 1000})", 1.0, compared, seconds=86_000) for n in range(9))]
    rows = [replace(plain[0], validated=Estimate(0.777, 0.01, 3)), *plain[1:]]
    narrow, wide = rendered(rows), rendered(rows, width=120)
    assert max(map(len, narrow)) <= 80
    assert not any("…" in line.split(maxsplit=1)[1] for line in narrow[3:])
    assert "77.7" in narrow[3]
    assert ["chosen" in line[1] for line in (narrow, wide, rendered(plain))] == [True, True, False]
    assert ["last" in line[0].replace("last %", "") for line in (narrow, wide)] == [False, True]
