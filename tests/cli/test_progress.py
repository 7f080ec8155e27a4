from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedstrata.progress import Lines, Live, Silence, TimeLeft, show_progress
from fedstrata.runs.driver import Update


def update(round: int, rounds: int = 4, accuracy: float | None = 0.5, seconds: float = 2.0, **metrics: float) -> Update:
    values = {**metrics, **({} if accuracy is None else {"client_after.accuracy.mean": accuracy})}
    return Update("fedavg", 0, round, rounds, seconds, values)


def test_time_left_is_the_rounds_left_times_their_mean_without_the_first() -> None:
    left = TimeLeft(5)
    assert left.seconds is None
    left.note(10.0)
    assert left.seconds == 40.0
    left.note(1.0)
    left.note(3.0)
    assert left.seconds == 4.0


def test_lines_come_now_and_then_and_at_the_end() -> None:
    console, now = Console(file=io.StringIO(), width=200), [0.0]
    progress = Lines(1, 4, console, clock=lambda: now[0])
    progress.begin("fedavg, seed 0")
    for round, time in ((1, 5.0), (2, 11.0), (3, 12.0), (4, 13.0)):
        now[0] = time
        progress.note(update(round, accuracy=round / 10))
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "fedavg, seed 0: round 2/4, accuracy 20.0 %, 4.0 s left",
        "fedavg, seed 0: accuracy 40.0 %, 8.0 s",
    ]


def test_rounds_without_evaluation_show_the_last_accuracy() -> None:
    progress = Silence(1, 2)
    progress.begin("fedavg, seed 0")
    assert "accuracy –" in progress.outcome()
    progress.note(update(1, accuracy=0.25))
    progress.note(update(2, accuracy=None))
    assert "accuracy 25.0 %" in progress.outcome()


def test_after_a_final_adaptation_its_accuracy_is_shown() -> None:
    progress = Silence(1, 1)
    progress.begin("fedavg-ft, seed 0")
    progress.note(update(1, rounds=1, accuracy=0.25, **{"client_adapted.accuracy.mean": 0.75}))
    assert "accuracy 75.0 %" in progress.outcome()


@pytest.mark.parametrize(
    ("terminal", "quiet", "kind"), [(True, False, Live), (False, False, Lines), (True, True, Silence)]
)
def test_the_display_fits_the_place(terminal: bool, quiet: bool, kind: type) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal)
    assert type(show_progress(console, 1, 1, quiet)) is kind


def test_the_live_display_leaves_a_line_per_run_and_gives_the_cursor_back() -> None:
    file = io.StringIO()
    with Live(2, 2, Console(file=file, force_terminal=True, width=100, color_system=None)) as progress:
        for name in ("fedavg, seed 0", "fedbn, seed 0"):
            progress.begin(name)
            progress.note(update(1, rounds=1, accuracy=0.5, seconds=1.5))
    text = file.getvalue()
    assert "✓ fedavg, seed 0: accuracy 50.0 %, 1.5 s" in text
    assert "✓ fedbn, seed 0: accuracy 50.0 %, 1.5 s" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
