"""The files that are kept of papers' runs: each thing stands once, and what does not belong together is refused."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from fedstrata import files
from fedstrata.cli import main
from fedstrata.errors import FedStrataError
from fedstrata.papers.keeping import COMMANDS, RESULTS, RUNS, Kept, merged, read_results, write_results

SMALL = Path(__file__).parent / "small"
SCORE = Kept(
    "tiny", "table1", "FedBN", ".1", 0, 100 / 3, "f1 (percent)", "last", "5e771465", 2, None, 10, "abc123",
    "run table1", "GPU", "torch 2", 1e9,
)  # fmt: skip
"""A number of a run whose seconds were not kept."""
LOSS = dataclasses.replace(SCORE, part="table2", value=0.25, number="loss (plain)", command="run table2")
"""Another number, which another command read off the same run."""
LATER = dataclasses.replace(LOSS, part="table3", number="time (plain)", commit="def456", command="run table3")
"""A number of another run with the same settings, at a later commit."""
OTHER = dataclasses.replace(SCORE, seed=1, settings="07e4", seconds=1.5)
"""A number of a run with another seed, which the same command made."""


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def as_read(one: Kept, **changes: object) -> Kept:
    return dataclasses.replace(one, value=float(f"{one.value:.8g}"), **changes)


def test_every_run_and_every_command_is_written_once(tmp_path: Path) -> None:
    write_results(tmp_path / RESULTS, [OTHER, SCORE, LOSS])
    results, runs = lines(tmp_path / RESULTS), lines(tmp_path / RUNS)
    assert [tuple(line.values()) for line in results] == [
        ("tiny", "FedBN", ".1", "0", "", runs[0]["run"], "33.333333", "0.25"),
        ("tiny", "FedBN", ".1", "1", "", runs[1]["run"], "33.333333", ""),
    ]  # fmt: skip
    assert list(results[0])[-2:] == ["table1: f1 (percent), last", "table2: loss (plain), last"]
    assert [(line["settings"], line["seconds"]) for line in runs] == [("5e771465", ""), ("07e4", "1.5")]
    [told] = json.loads((tmp_path / COMMANDS).read_text()).values()
    assert told == {"commit": "abc123", "device": "GPU", "software": "torch 2", "command": "run table1"}
    assert not set(results[0]) & (set(told) | set(runs[0]) - {"run"})


def test_numbers_of_clients_stand_in_one_column(tmp_path: Path) -> None:
    of_clients = dataclasses.replace(SCORE, part="tableA5", number="f1 of each client", value=0.5, clients=(0.25, 0.75))
    alone = dataclasses.replace(OTHER, part="tableA5", number="f1 of each client", value=1 / 3, clients=(1 / 3,))
    unknown = dataclasses.replace(of_clients, seed=2, settings="07e5", value=0.5, clients=(0.5, math.nan))
    write_results(tmp_path / RESULTS, [SCORE, of_clients, alone, unknown])
    found = {one.seed: one for one in read_results([tmp_path]) if one.part == "tableA5"}
    assert found[0] == of_clients
    assert (found[1].clients, found[1].value) == ((0.33333,), 0.33333)
    assert (str(found[2].clients), found[2].value) == ("(0.5, nan)", 0.5)
    assert [line["tableA5: f1 of each client, last"] for line in lines(tmp_path / RESULTS)] == [
        "0.25 0.75", "0.33333", "0.5 nan",
    ]  # fmt: skip


def test_a_run_keeps_the_command_that_made_it_also_when_another_table_is_made_of_it(tmp_path: Path) -> None:
    """Tables are in the order of their names, so what stands first in the file is not what was first."""
    write_results(tmp_path / RESULTS, [LOSS])
    write_results(tmp_path / RESULTS, merged(read_results([tmp_path]), [SCORE]))
    assert [(one.part, one.command) for one in read_results([tmp_path])] == [
        ("table1", "run table2"), ("table2", "run table2"),
    ]  # fmt: skip


def test_numbers_of_two_runs_with_the_same_settings_keep_saying_where_they_are_from(tmp_path: Path) -> None:
    """As when a table needs a number that was not read off the runs before their folders were deleted."""
    write_results(tmp_path / RESULTS, [SCORE, LOSS])
    write_results(tmp_path / RESULTS, merged(read_results([tmp_path]), [LATER]))
    assert read_results([tmp_path]) == [as_read(SCORE), as_read(LOSS, command="run table1"), LATER]
    assert [(one.part, one.commit) for one in read_results([tmp_path])] == [
        ("table1", "abc123"), ("table2", "abc123"), ("table3", "def456"),
    ]  # fmt: skip


def test_a_run_may_be_in_several_folders(tmp_path: Path) -> None:
    write_results(tmp_path / "a" / RESULTS, [SCORE, OTHER])
    write_results(tmp_path / "b" / RESULTS, [dataclasses.replace(SCORE, device="CPU", value=1.0)])
    found = read_results([tmp_path])
    assert [(one.settings, one.value, one.device) for one in found if one.seed == 0] == [
        ("5e771465", 33.333333, "GPU"), ("5e771465", 1.0, "CPU"),
    ]  # fmt: skip
    write_results(tmp_path / "both" / RESULTS, merged(read_results([tmp_path / "a"]), [LATER]))
    assert {line["run"] for line in lines(tmp_path / "a" / RUNS)} < {
        line["run"] for line in lines(tmp_path / "both" / RUNS)
    }


def test_the_same_results_are_the_same_files(tmp_path: Path) -> None:
    kept = [SCORE, LOSS, LATER, OTHER]
    write_results(tmp_path / RESULTS, kept)
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(first) == {RESULTS, RUNS, COMMANDS}
    write_results(tmp_path / RESULTS, read_results([tmp_path]))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first
    write_results(tmp_path / RESULTS, [OTHER, LATER, SCORE, LOSS])
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first


def test_results_are_merged_and_read_back(tmp_path: Path) -> None:
    again = dataclasses.replace(OTHER, value=3.0)
    write_results(tmp_path / RESULTS, merged([SCORE, OTHER], [again]))
    assert [one.value for one in read_results([tmp_path])] == [33.333333, 3.0]


def test_whenever_writing_ends_what_lies_there_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_results(tmp_path / RESULTS, [SCORE])
    write, written = files.write_atomically, []
    for full_after in range(3):
        written.clear()

        def until_full(path: Path, content: str, most: int = full_after) -> None:
            if len(written) == most:
                raise FedStrataError("no space")
            written.append(path.name)
            write(path, content)

        monkeypatch.setattr(files, "write_atomically", until_full)
        with pytest.raises(FedStrataError, match="no space"):
            write_results(tmp_path / RESULTS, [SCORE, LATER, OTHER])
        assert read_results([tmp_path]) == [as_read(SCORE)]


def deleted(path: Path) -> None:
    path.unlink()


def without_last_line(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))


def cut_off(path: Path) -> None:
    path.write_text(path.read_text().rstrip()[:-20])


def emptied(path: Path) -> None:
    path.write_text("{}")


def replaced(old: str, new: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(path.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("name", "damage", "sentence"),
    [
        (RUNS, deleted, "There is no 'k/runs.csv', without which 'k/results.csv' tells of no run"),
        (COMMANDS, deleted, "There is no 'k/commands.json', without which 'k/results.csv' tells of no run"),
        (
            RUNS,
            without_last_line,
            "'k/runs.csv' does not hold the run 'RUN', which 'k/results.csv' names: results.csv,",
        ),
        (COMMANDS, emptied, "'k/commands.json' does not hold the command 'COMMAND', which 'k/runs.csv' names: results"),
        (RUNS, emptied, "'k/runs.csv' holds no runs of papers: its columns are not run, settings, rounds, seconds,"),
        (RESULTS, replaced(",run", ",settings"), "'k/results.csv' holds no results of papers: its columns are not pap"),
        (RESULTS, replaced("table1: ", "table1 "), "row, column, seed, changes, run, and those of numbers."),
        (RESULTS, replaced("33.3", "a third"), "'k/results.csv' is damaged: could not convert string to float: 'a thi"),
        (RUNS, cut_off, "'k/runs.csv' is damaged: line 3 does not have 7 values."),
        (RESULTS, cut_off, "'k/results.csv' is damaged: line 3 does not have 7 values."),
        (RUNS, replaced("1.5", "soon"), "'k/runs.csv' is damaged: could not convert string to float: 'soon'."),
        (COMMANDS, cut_off, "'k/commands.json' is damaged"),
        (COMMANDS, replaced("device", "machine"), "'k/commands.json' is damaged: 'COMMAND' does not tell commit, dev"),
        (COMMANDS, replaced('"GPU"', "1"), "'k/commands.json' is damaged: 'COMMAND' does not tell commit, device,"),
    ],
)
def test_files_that_do_not_belong_together_are_refused_with_a_sentence(
    name: str, damage: Callable[[Path], object], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    write_results(Path("k") / RESULTS, [SCORE, OTHER])
    last = lines(Path("k") / RUNS)[-1]
    damage(Path("k") / name)
    said = sentence.replace("RUN", last["run"]).replace("COMMAND", last["made_by"])
    for words in (("tiny", "table1", "--known", "k/results.csv"), ("--write", "page.md", "k")):
        assert main(["paper", "--recipes", str(SMALL), *words]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in Path().iterdir()] == ["k"], "nothing was run or written"


def test_a_folder_without_results_is_refused() -> None:
    with pytest.raises(FedStrataError, match=r"There is no 'results\.csv' in"):
        read_results([SMALL])
