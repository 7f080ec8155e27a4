from __future__ import annotations

import io
from time import sleep

import pytest
from rich.console import Console

from fedstrata.callbacks import RoundView
from fedstrata.progress import Lines, Live, Notebook, Silence, TimeLeft, show_if_wanted, show_progress


def update(
    round: int, rounds: int = 4, accuracy: float | None = 0.5, seconds: float = 2.0, **metrics: float
) -> RoundView:
    values = {**metrics, **({} if accuracy is None else {"client_after.accuracy.mean": accuracy})}
    return RoundView("fedavg", 0, round, rounds, seconds, values)


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
        progress.on_round(update(round, accuracy=round / 10))
    progress.on_end(update(4, accuracy=0.4), {})
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "fedavg, seed 0: round 2/4, accuracy 20.0 %, 4.0 s left",
        "fedavg, seed 0: accuracy 40.0 %, 8.0 s",
    ]


def test_rounds_without_evaluation_show_the_last_accuracy() -> None:
    progress = Silence(1, 2)
    progress.begin("fedavg, seed 0")
    assert "accuracy –" in progress.outcome()
    progress.on_round(update(1, accuracy=0.25))
    progress.on_round(update(2, accuracy=None))
    assert "accuracy 25.0 %" in progress.outcome()


def test_after_a_final_adaptation_its_accuracy_is_shown() -> None:
    progress = Silence(1, 1)
    progress.begin("fedavg-ft, seed 0")
    progress.on_round(update(1, rounds=1, accuracy=0.25, **{"client_adapted.accuracy.mean": 0.75}))
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
            progress.on_round(update(1, rounds=1, accuracy=0.5, seconds=1.5))
            progress.on_end(update(1, rounds=1), {})
    text = file.getvalue()
    assert "✓ fedavg, seed 0: accuracy 50.0 %, 1.5 s" in text
    assert "✓ fedbn, seed 0: accuracy 50.0 %, 1.5 s" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")


def test_a_bar_below_a_cell_moves_now_and_then_and_leaves_a_line() -> None:
    shown: list[str] = []
    now = [0.0]
    progress = Notebook(2, 8, shown.append, clock=lambda: now[0])
    for name in ("fedavg, seed 0", "<b>, seed 0"):
        progress.begin(name)
        for round in (1, 2, 3, 4):
            now[0] += 0.15
            progress.on_round(update(round, accuracy=round / 10))
        progress.on_end(update(4), {})
    bar = '<progress value="{}"></progress> run {} of 2, {}, seed 0: {}'
    assert shown == [
        bar.format("0.000", 1, "fedavg", "preparing"),
        bar.format("0.250", 1, "fedavg", "round 2/4, accuracy 20.0 %, 12 s left"),
        bar.format("0.500", 1, "fedavg", "round 4/4, accuracy 40.0 %, 8.0 s left"),
        bar.format("0.500", 2, "&lt;b&gt;", "preparing"),
        bar.format("0.750", 2, "&lt;b&gt;", "round 2/4, accuracy 20.0 %, 4.0 s left"),
        bar.format("1.000", 2, "&lt;b&gt;", "round 4/4, accuracy 40.0 %, 0.0 s left"),
        "2 runs, 16 s",
    ]
    single = Notebook(1, 4, shown.append)
    single.begin("fedavg, seed 0")
    single.on_end(update(4), {})
    assert shown[-1] == "fedavg, seed 0: accuracy 50.0 %, 0.0 s"


def test_in_a_notebook_progress_is_shown_unless_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.progress._below_the_cell", lambda: print)
    original = Console.__init__
    monkeypatch.setattr(Console, "__init__", lambda self, **given: original(self, **given, force_jupyter=True))
    assert [type(show_if_wanted(wanted, 1, 1)) for wanted in (None, True, False)] == [Notebook, Notebook, Silence]


def test_in_a_script_progress_is_shown_only_where_it_is_asked_for() -> None:
    assert [type(show_if_wanted(wanted, 1, 1)) for wanted in (None, True, False)] == [Silence, Lines, Silence]


def test_what_takes_long_before_the_first_round_gets_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.waiting.PATIENCE", 0.05)
    console = Console(file=io.StringIO(), width=200)
    with Lines(1, 4, console) as progress:
        progress.begin("fedavg, seed 0")
        progress.show_doing("loading the data digits")
        sleep(0.2)
        progress.show_doing("building the model cnn")
        progress.on_round(update(1))
    sleep(0.1)
    assert console.file.getvalue() == "fedavg, seed 0: loading the data digits\n"  # type: ignore[attr-defined]


def test_rounds_that_a_run_did_not_come_to_are_not_waited_for() -> None:
    progress = Silence(2, 8)
    progress.begin("fedavg, seed 0")
    progress.on_round(update(1))
    progress.on_end(update(1), {"stopped": "enough"})
    assert (progress.left.rounds, progress.left.seconds) == (4, 8.0)


def test_runs_side_by_side_have_a_bar_each_and_one_for_all() -> None:
    file = io.StringIO()
    with Live(3, 12, Console(file=file, force_terminal=True, width=100, color_system=None), at_a_time=2) as progress:
        progress.begin("fedavg, seed 0")
        progress.begin("local, seed 0")
        progress.turn_to("fedavg, seed 0")
        progress.on_round(update(1, accuracy=0.5, seconds=2.0))
        progress.turn_to("local, seed 0")
        progress.on_round(update(1, accuracy=0.75, seconds=4.0))
        progress.turn_to("fedavg, seed 0")
        progress.on_round(update(2, accuracy=0.625, seconds=2.0))
        shown = {task.description: task.fields["state"] for task in progress._bars.tasks if task.visible}
        assert shown == {
            "fedavg, seed 0": "round 2/4, accuracy 62.5 %, 4.0 s left",
            "local, seed 0": "round 1/4, accuracy 75.0 %, 12 s left",
            "0 of 3 runs done": "14 s left",  # nine rounds of three seconds, two at a time
        }
        progress.on_end(update(2), {"stopped": "enough"})
        progress.begin("fedbn, seed 0")
        assert [task.description for task in progress._bars.tasks if task.visible] == [
            "fedbn, seed 0", "local, seed 0", "1 of 3 runs done",
        ]  # fmt: skip
        progress.turn_to("local, seed 0")
        progress.leave(rounds=3)
        assert [task.description for task in progress._bars.tasks if task.visible] == [
            "fedbn, seed 0", "1 of 3 runs done",
        ]  # fmt: skip
    assert "✓ fedavg, seed 0: accuracy 50.0 %, 4.0 s" in file.getvalue()
    assert progress.left.rounds == 12 - 3 - 2 - 3


def test_a_line_tells_of_all_runs_side_by_side() -> None:
    console, now = Console(file=io.StringIO(), width=200), [0.0]
    with Lines(2, 8, console, at_a_time=2, clock=lambda: now[0]) as progress:
        for name in ("fedavg, seed 0", "local, seed 0"):
            progress.begin(name)
        progress.on_round(update(1, accuracy=0.25))
        now[0] = 11.0
        progress.turn_to("fedavg, seed 0")
        progress.on_round(update(1, accuracy=0.5))
        progress.on_end(update(4, accuracy=0.75), {})
    assert console.file.getvalue().splitlines() == [  # type: ignore[attr-defined]
        "fedavg, seed 0: round 1/4, accuracy 50.0 %; local, seed 0: round 1/4, accuracy 25.0 %, 6.0 s left",
        "fedavg, seed 0: accuracy 75.0 %, 2.0 s",
    ]


def test_a_notebook_lists_all_runs_side_by_side() -> None:
    shown: list[str] = []
    progress = Notebook(3, 12, shown.append, at_a_time=2, clock=lambda: float(len(shown)))
    progress.begin("fedavg, seed 0")
    progress.begin("<b>, seed 0")
    progress.turn_to("fedavg, seed 0")
    progress.on_round(update(1))
    assert shown[-1] == (
        '<progress value="0.083"></progress> 0 of 3 runs done<br>'
        "fedavg, seed 0: round 1/4, accuracy 50.0 %, 11 s left<br>&lt;b&gt;, seed 0: preparing"
    )
