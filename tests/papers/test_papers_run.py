"""A part of a paper is run once, goes on where it stopped, and is set beside what was published."""

from __future__ import annotations

import csv
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedstrata.cli import main
from fedstrata.papers.cells import cells_of
from fedstrata.papers.judging import judge
from fedstrata.papers.keeping import Kept, asked, read_results, write_results
from fedstrata.papers.reading import Recipe, read_papers

SMALL = Path(__file__).parent / "small"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr("fedstrata.papers.page.charts_are_possible", lambda: False)  # tables alone are quick

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["paper", "--recipes", str(SMALL), *arguments])
        return (code, *capfd.readouterr())

    return run


def lines(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def kept(recipe: Recipe, values: dict[tuple[str, str, int], float]) -> list[Kept]:
    """Results as they would be kept of runs with the paper's settings."""
    cells = {(cell.row, cell.column, cell.seed): cell for cell in cells_of(recipe, 9)}
    made = []
    for place, value in values.items():
        settings, number, at = asked(cells[place])
        made.append(
            Kept(recipe.paper, recipe.part, *place, value, number, at, settings, 2, 1.5, 10, "abc", "words", "GPU")
        )
    return made


def test_a_table_is_run_once_and_shared_with_a_figure(call: Call) -> None:
    code, out, err = call("tiny", "table1", "--seeds", "1", "--no-report", "--out", "a")
    assert code == 0
    assert "seed 0" in err
    table = {(line["row"], line["column"]): line for line in lines(Path("a/cells.csv"))}
    assert table["FedBN", ".1"]["verdict"] == "below"
    assert table["Local", ".5"]["verdict"] == "not published"
    assert table["FedBN", ".5"]["note"] == "The column adds up to 31."
    results = read_results([Path("a")])
    assert [(one.row, one.column, one.rounds) for one in results][:2] == [("FedBN", ".1", 2), ("FedBN", ".5", 2)]
    assert "FedBN beats Local by 4.8 (.1): undecided" in out
    again = call("tiny", "table1", "--seeds", "1", "--no-report", "--out", "a")
    assert "4 of 4 cells are known already" in again[2]
    assert "seed 0" not in again[2]
    assert again[1] == out
    shared = call("tiny", "figure1", "--runs", "a/runs", "--out", "f", "--json")
    assert "seed 0" not in shared[2]
    told = json.loads(shared[1])
    assert told["cells"][0]["ours"] == float(table["FedBN", ".5"]["ours"])
    page = Path("f/report.html").read_text()
    assert "Published and ours" in page
    assert "client_after.accuracy.mean" in page


def test_a_cell_in_a_csv_is_not_run_again(call: Call, tmp_path: Path) -> None:
    table = read_papers(SMALL)["tiny"].part("table1")
    write_results(Path("known.csv"), kept(table, {("FedBN", ".5", 0): 30.5, ("Local", ".1", 7): 1.0}))
    code, out, err = call(
        "tiny", "table1", "--seeds", "1", "--method", "FedBN", "--columns", ".5", "--known", "known.csv", "--json"
    )
    assert (code, "seed 0" in err) == (0, False)
    told = json.loads(out)
    assert [(one["ours"], one["verdict"]) for one in told["cells"]] == [(30.5, "agrees")]
    assert not Path("runs/tiny-table1/runs").exists()
    assert "Published and ours" in Path(told["files"]["report"]).read_text()


def test_a_short_run_is_never_called_agreement(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = ("tiny", "table1", "--seeds", "1", "--columns", ".1", "--no-report", "--json")
    monkeypatch.setattr(sys, "argv", ["fedstrata", "paper", *choice, "--rounds", "1", "--out", "/home/me/short"])
    code, out, _ = call(*choice, "--rounds", "1", "--out", "short")
    told = json.loads(out)
    assert code == 0
    commands = {one.command for one in read_results([Path("short")])}
    assert commands == {"fedstrata paper tiny table1 --seeds 1 --columns .1 --rounds 1"}, "no word of where files lay"
    assert {one["verdict"] for one in told["cells"]} == {"not comparable"}
    assert told["claims"][0]["verdict"] == "not comparable"
    assert told["remark"] == "Smaller than in the paper: 1 round."


def test_what_is_finished_is_told_without_running_the_rest(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a job that was killed: its runs lie there, and no table of them."""
    call("tiny", "table1", "--seeds", "1", "--method", "FedBN", "--columns", ".1", "--no-report", "--out", "a")
    for path in Path("a").glob("*.csv"):
        path.unlink()
    whole = ("tiny", "table1", "--seeds", "1", "--no-report", "--out", "a", "--finished")
    monkeypatch.setattr(sys, "argv", ["fedstrata", "paper", *whole])
    code, out, err = call(*whole, "--json")
    assert (code, "seed 0" in err) == (0, False)
    assert [one["verdict"] for one in json.loads(out)["cells"]] == ["below", "not run", "not run", "not run"]
    [one] = read_results([Path("a")])
    assert (one.row, one.column) == ("FedBN", ".1")
    assert one.command == "fedstrata paper tiny table1 --seeds 1"


def test_all_seeds_that_are_known_are_told_of_where_nothing_is_run(call: Call) -> None:
    """The recipe has two; a number of a third one is no less known."""
    table = read_papers(SMALL)["tiny"].part("table1")
    write_results(Path("c/results.csv"), kept(table, {("FedBN", ".1", seed): 90.0 + seed for seed in range(3)}))
    told = {}
    for further in ((), ("--seeds", "2")):
        _, out, _ = call(
            "tiny", "table1", "--known", "c", "--finished", "--no-report", "--out", "d", "--json", *further
        )
        told[further] = [one["seeds"] for one in json.loads(out)["cells"]]
    assert told == {(): [3, 0, 0, 0], ("--seeds", "2"): [2, 0, 0, 0]}


def test_a_dry_run_writes_nothing(call: Call) -> None:
    code, out, _ = call("tiny", "table1", "--dry-run", "--json", "--method", "FedBN")
    told = json.loads(out)
    assert (code, told["cells"], told["runs"], told["rounds"]) == (0, 4, 4, 8)
    # 64 inputs x 8 hidden and 8 x 10: two operations each, three passes, 1,346 samples, four rounds of either column.
    assert told["settings"][0]["flops"] == pytest.approx(4 * 3 * 2 * (64 * 8 + 8 * 10) * 1346, rel=0.01)
    assert told["seconds"] > 0
    assert list(Path().iterdir()) == []


def test_what_is_missing_is_said_and_the_rest_is_run(call: Call, tmp_path: Path) -> None:
    shutil.copytree(SMALL, "own")
    path = Path("own/recipes/tiny/table1.toml")
    path.write_text(path.read_text().replace('{ method = "local" }', '{ method = "fedmystery" }'))
    path.write_text(path.read_text().replace('".5" = { }', '".5" = { data = "mnist" }'))
    own = ("--recipes", "own", "--data-root", str(tmp_path))
    _, out, _ = call(*own, "tiny", "--json")
    part = json.loads(out)[0]["parts"][0]
    assert (part["cells"], part["cells_here"]) == (4, 1)
    assert part["missing"][0].startswith("The files of the dataset 'mnist' are in none of")
    assert part["missing"][1].startswith("There is no method 'fedmystery'.")
    code, out, _ = call(*own, "tiny", "table1", "--seeds", "1", "--no-report", "--out", "a", "--json")
    verdicts = [(one["row"], one["column"], one["verdict"]) for one in json.loads(out)["cells"]]
    assert code == 0
    assert [one[2] for one in verdicts] == ["below", "not run", "not run", "not run"]


def test_where_nothing_can_be_run_that_is_the_user_s_mistake_unless_it_is_known(call: Call, tmp_path: Path) -> None:
    shutil.copytree(SMALL, "own")
    path = Path("own/recipes/tiny/table1.toml")
    path.write_text(path.read_text().replace('".5" = { }', '".5" = { data = "mnist" }'))
    own = ("--recipes", "own", "--data-root", str(tmp_path), "tiny", "table1", "--columns", ".5", "--method", "fedbn")
    code, out, err = call(*own, "--seeds", "1", "--out", "a")
    assert (code, out, Path("a").exists()) == (2, "", False)
    assert "Nothing that was asked for of 'tiny table1' can be run here. The files of the dataset 'mnist'" in err
    code, out, _ = call(*own, "--seeds", "1", "--out", "b", "--finished", "--no-report")
    assert (code, "not run" in out) == (0, True)
    table = read_papers(Path("own"))["tiny"].part("table1")
    write_results(Path("c/results.csv"), kept(table, {("FedBN", ".5", 0): 90.0}))
    code, out, _ = call(*own, "--seeds", "2", "--out", "d", "--known", "c", "--no-report")
    assert (code, "90.00" in out) == (0, True)


def test_verdicts_of_cells_and_claims() -> None:
    table = read_papers(SMALL)["tiny"].part("table1")
    values = {("FedBN", ".1", seed): 90.0 + seed for seed in range(3)}
    values |= {("Local", ".1", seed): 84.0 + 1.5 * seed for seed in range(3)}
    judged = judge(table, cells_of(table, 3), kept(table, values))
    words = {(one.row, one.column): one.verdict for one in judged.cells}
    assert words == {
        ("FedBN", ".1"): "agrees", ("FedBN", ".5"): "not run", ("Local", ".1"): "above", ("Local", ".5"): "not run",
    }  # fmt: skip
    [claim] = judged.claims
    assert claim.found is not None
    assert (claim.word, claim.found.mean, claim.found.seeds) == ("shown", 5.5, 3)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("lips",), "There is no paper called 'lips'"),
        (("tiny", "table2"), "Did you mean 'table1'?"),
        (("tiny", "figure2"), "Nothing is run for 'tiny figure2': an illustration"),
        (("tiny", "table1", "--seeds", "0"), "0 seeds make no table"),
        (("tiny", "table1", "figure1"), "One paper and one of its parts"),
        (("tiny", "--figures", "f"), "--figures is for a table or a figure"),
        (("tiny", "table1", "--figures", "f", "--dry-run"), "'--figures' does nothing here"),
        (("tiny", "table1", "--figure-width", "page"), "does nothing without --figures DIR"),
        (("tiny", "--finished"), "--finished is for a table or a figure"),
        (("--write", "a.md", "r", "--jobs", "2", "--finished"), "'--jobs' does nothing beside --finished"),
        (
            ("--write", "a.md", "r", "--only", "c"),
            "--only is for a table or a figure, and --write writes of kept results",
        ),
        (("--write", "a.md", "r", "--figures", "f"), "--figures is for a table or a figure, and --write writes of"),
        (("tiny", "table1", "--jobs", "0", "--dry-run"), "0"),
        (("tiny", "table1", "--finished", "--dry-run"), "'--dry-run' does nothing beside --finished"),
        (("tiny", "table1", "--finished", "--jobs", "2"), "'--jobs' does nothing beside --finished"),
    ],
)
def test_mistakes_are_sentences(call: Call, words: tuple[str, ...], sentence: str) -> None:
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert sentence in err


def test_notes_name_the_cells_that_they_are_of(call: Call) -> None:
    table = read_papers(SMALL)["tiny"].part("table1")
    write_results(Path("c/results.csv"), kept(table, {("FedBN", ".5", 0): 30.0}))
    _, out, _ = call("tiny", "table1", "--known", "c", "--finished", "--no-report", "--out", "d")
    assert "note: FedBN (.5): The column adds up to 31." in out
