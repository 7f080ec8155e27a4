"""What is told of a part cannot be misread: of runs that failed or diverged, several numbers, readings, columns."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import pytest
from test_papers_run import SMALL, Call, call, kept

from fedstrata.cli.papers import DOCUMENT_SUFFIX
from fedstrata.errors import FedStrataError
from fedstrata.papers.cells import cells_of
from fedstrata.papers.costs import cost_line
from fedstrata.papers.gathering import gather, papers_told
from fedstrata.papers.judging import judge
from fedstrata.papers.numbers import number_of
from fedstrata.papers.reading import Recipe, StatedClaim, read_papers
from fedstrata.papers.told import command_of, outcome_lines, papers_in_numbers
from fedstrata.papers.words import claim_line, reported_line, seeds_line, statistics_line
from fedstrata.runs.folder import RunFolder

__all__ = ["call"]

TABLE = read_papers(SMALL)["tiny"].part("table1")


def with_own(recipe: Recipe, row: str = "", column: str = "", **told: object) -> Recipe:
    """The recipe with something that one row or column says of itself."""
    there = {**recipe.own.get((row, column), {}), **told}
    return dataclasses.replace(recipe, own={**recipe.own, (row, column): there})


def failing(call: Call, folder: str, *more: str) -> tuple[int, str, str]:
    """Run two seeds of a method; the run of the first one is held by somebody else."""
    cell = next(cell for cell in cells_of(TABLE, 1) if (cell.row, cell.column) == ("FedBN", ".1"))
    held = Path(folder) / "runs" / cell.settings
    held.mkdir(parents=True)
    (held / "notes.txt").write_text("Somebody's.")
    choice = ("tiny", "table1", "--seeds", "2", "--method", "FedBN", "--columns", ".1", "--no-report", "--out", folder)
    return call(*choice, *more)


def test_a_seed_that_failed_is_named_beside_the_number_of_the_others(call: Call) -> None:
    code, out, err = failing(call, "a")
    assert code == 2
    assert "note: FedBN (.1): Seed 0: The folder" in out
    last = err.strip().splitlines()[-1]
    assert last.startswith("Error: 1 of 2 runs has failed, the others are finished. fedbn, .1, seed 0: The folder")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_what_fails_in_ones_own_file_costs_no_other_run(call: Call, jobs: str) -> None:
    shutil.copytree(SMALL, "own")
    folder = Path("own/recipes/tiny")
    (folder / "breaks.py").write_text(BREAKS)
    table = folder / "table1.toml"
    table.write_text(table.read_text().replace("rounds = 2", 'rounds = 2\nimports = ["breaks.py"]').replace(
        '{ method = "local" }', '{ method = "breaks" }'))  # fmt: skip
    choice = ("--recipes", "own", "tiny", "table1", "--seeds", "1", "--columns", ".5", "--no-report", "--jobs", jobs)
    code, out, err = call(*choice, "--json")
    told = json.loads(out)
    assert code == 2, out
    assert {one["row"]: one["ours"] is None for one in told["cells"]} == {"FedBN": False, "Local": True}
    [why] = told["failed"].values()
    assert why.startswith("'breaks.py' failed in line 15, in 'metrics': ZeroDivisionError")
    assert "bug" not in err


BREAKS = """from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods import Facts, Part, methods


@methods.register("breaks")
@dataclass(frozen=True)
class Breaks(Part):
    \"\"\"It fails.\"\"\"

    facts: ClassVar[Facts] = Facts("averaging", "Nobody")

    def metrics(self, server):
        return {"half": 1 / 0}
"""


def test_json_tells_which_runs_failed(call: Call) -> None:
    code, out, _ = failing(call, "a", "--json")
    told = json.loads(out)
    assert code == 2
    assert [(one["seeds"], one["note"][:8]) for one in told["cells"]] == [(1, "Seed 0: ")]
    assert list(told["failed"]) == ["fedbn, .1, seed 0"]
    assert told["failed"]["fedbn, .1, seed 0"].startswith("The folder")


def test_what_is_only_told_of_needs_no_data_and_no_word_of_what_is_missing(call: Call) -> None:
    shutil.copytree(SMALL, "own")
    path = Path("own/recipes/tiny/table1.toml")
    path.write_text(path.read_text().replace('".5" = { }', '".5" = { data = "mnist" }'))
    own = ("--recipes", "own", "--data-root", ".", "tiny", "table1", "--seeds", "1", "--no-report")
    code, out, _ = call(*own, "--finished")
    assert (code, "not run" in out, "mnist" in out) == (0, True, False)
    assert "mnist" in call(*own)[1]


def test_numbers_of_a_file_that_was_changed_are_not_told_as_those_of_the_new_one(call: Call) -> None:
    shutil.copytree(SMALL, "own")
    path = Path("own/recipes/tiny/paper.toml")
    path.write_text(path.read_text().replace('"digits"', '"table(path=tab.csv, label=ill)"'))
    rows = [f"{score},{score % 2}" for score in range(60)]
    Path("tab.csv").write_text("\n".join(["score,ill", *rows]))
    choice = ("--recipes", "own", "tiny", "table1", "--seeds", "1", "--columns", ".5", "--no-report", "--json")
    first = json.loads(call(*choice)[1])["cells"]
    assert [one["ours"] for one in json.loads(call(*choice)[1])["cells"]] == [one["ours"] for one in first]
    Path("tab.csv").write_text("\n".join(["score,ill", *reversed(rows)]))
    code, _, err = call(*choice)
    assert code == 2
    assert "'tab.csv' is not the file with which the run in" in err
    told = json.loads(call(*choice, "--finished")[1])["cells"]
    assert {one["ours"] for one in told} == {None}
    assert all("'tab.csv' is not the file with which" in one["note"] for one in told)
    elsewhere = json.loads(call(*choice, "--out", "b")[1])["cells"]
    assert None not in [one["ours"] for one in elsewhere]


def test_which_number_is_reported_is_told_of_each_that_is_shown() -> None:
    recipe = with_own(TABLE, row="Local", number="global.accuracy", at="best")
    judged = judge(recipe, cells_of(recipe, 1), [])
    most = "client_after.accuracy.mean, last round, in percent"
    assert reported_line(judged) == f"{most}; of Local (.1, .5) global.accuracy, best round, in percent"
    own = judge(recipe, cells_of(recipe, 1), kept(recipe, {("Local", ".1", 0): 50.0}))
    assert reported_line(own, "`{}`") == "`global.accuracy`, best round, in percent", "of what has a number of ours"


def test_nobody_s_numbers_are_said_to_be_of_runs_that_nobody_counted(tmp_path: Path) -> None:
    assert statistics_line(TABLE) == "means of 2 runs, ± their standard deviation"
    shutil.copytree(SMALL, tmp_path / "own")
    for path in (tmp_path / "own/recipes/tiny/paper.toml", tmp_path / "own/published.csv"):
        path.write_text(
            path.read_text().replace("published_seeds = 2", "").replace(",0.5,", ",,").replace(",0.1,", ",,")
        )
    own = read_papers(tmp_path / "own")["tiny"].part("table1")
    assert statistics_line(own) == "single numbers, of how many runs is not said"


def test_cells_are_named_by_their_numbers_of_seeds() -> None:
    values = {("FedBN", ".1", 0): 90.0, ("FedBN", ".1", 1): 91.0, ("Local", ".1", 0): 60.0}
    assert seeds_line(judge(TABLE, cells_of(TABLE, 2), kept(TABLE, values))) == (
        "Ours are of 2 seeds; of 1 seed Local (.1)."
    )
    assert seeds_line(judge(TABLE, cells_of(TABLE, 2), [])) == ""


def test_a_claim_over_columns_with_numbers_of_their_own_is_one_of_each_the_right_way_round() -> None:
    recipe = with_own(TABLE, column=".5", number="bytes.up", unit="MB")
    recipe = dataclasses.replace(recipe, claims=(StatedClaim("FedBN", "Local", None, ()),))
    values = {("FedBN", ".1"): 90.0, ("Local", ".1"): 60.0, ("FedBN", ".5"): 0.4, ("Local", ".5"): 0.9}
    judged = judge(recipe, cells_of(recipe, 1), kept(recipe, {(*pair, 0): value for pair, value in values.items()}))
    found = [(claim.columns, claim.found.mean) for claim in judged.claims if claim.found is not None]
    assert found == [((".1",), 30.0), ((".5",), pytest.approx(0.5))]


def test_columns_are_settings_of_ours_where_the_recipe_says_so() -> None:
    """Not where the paper has numbers of other columns alone: it may claim in words what it has no number of."""
    assert not any(claim.own_setting for claim in judge(TABLE, cells_of(TABLE, 1), []).claims)
    own = with_own(TABLE, column=".1", own_setting=True)
    [claim] = judge(own, cells_of(own, 1), []).claims
    assert claim.own_setting
    assert "(.1 (a setting of ours))" in claim_line(claim)
    ssfl = read_papers()["ssfl"].part("figure3")
    assert not any(claim.own_setting for claim in judge(ssfl, cells_of(ssfl, 1), []).claims)


def test_a_run_that_diverged_is_neither_above_nor_below_and_costs_no_other_cell(call: Call) -> None:
    values = {("FedBN", ".1", 0): math.nan, ("FedBN", ".1", 1): 90.0, ("FedBN", ".5", 0): 30.0}
    judged = judge(TABLE, cells_of(TABLE, 2), kept(TABLE, values))
    words = {(one.row, one.column): one.verdict for one in judged.cells}
    assert (words["FedBN", ".1"], words["FedBN", ".5"]) == ("diverged", "agrees")
    choice = ("tiny", "table1", "--seeds", "1", "--method", "FedBN", "--columns", ".1", "--no-report", "--out", "a")
    call(*choice)
    folder = RunFolder.open(next(Path("a/runs").iterdir()))
    summary = json.loads((folder.path / "summary.json").read_text())
    summary["final"][TABLE.number] = None  # which is how what is no number is saved
    (folder.path / "summary.json").write_text(json.dumps(summary))
    assert math.isnan(number_of(TABLE, folder))


def test_readings_are_no_claims_of_the_papers() -> None:
    recipe = with_own(TABLE, row="Local", reading_of="FedBN")
    claims = (*TABLE.claims, StatedClaim("FedBN", "FedBN", 1.0, (".1",)))
    recipe = dataclasses.replace(recipe, claims=claims)
    values = {(row, ".1", seed): number + seed for row, number in (("FedBN", 90.0), ("Local", 60.0)) for seed in (0, 1)}
    judged = judge(recipe, cells_of(recipe, 2), kept(recipe, values))
    assert [claim.reading for claim in judged.claims] == [True, False]
    assert "beats Local (another reading)" in claim_line(judged.claims[0])
    said = outcome_lines(judged)
    assert said[0].startswith("2 of 4 cells have a number of ours, 1 further reading of rows among them: ")
    assert [line[:32] for line in said[1:]] == ["Of 1 claim of the paper's, 1 not", "Of 1 claim of other readings, 1 "]


def test_a_number_that_two_tables_have_of_the_same_runs_counts_once() -> None:
    paper = read_papers(SMALL)["tiny"]
    twice = dataclasses.replace(paper, parts={"table1": TABLE, "table2": dataclasses.replace(TABLE, part="table2")})
    results = kept(TABLE, {("FedBN", ".1", seed): 90.0 + seed for seed in range(3)})
    once, both = (papers_in_numbers({"tiny": gather(one, results)})[0] for one in (paper, twice))
    assert once[:5] == both[:5] == ("tiny", "3", "1", "1", "0")
    of_clients = {name: dataclasses.replace(TABLE, part=name, over_clients=name) for name in ("variance", "incentive")}
    other = dataclasses.replace(paper, parts={"table1": TABLE, **of_clients})
    assert papers_in_numbers({"tiny": gather(other, results)})[0][1] == "9", "other numbers of the same runs"


def test_seeds_that_were_made_with_another_commit_are_named() -> None:
    one, two = kept(TABLE, {("FedBN", ".1", 0): 90.0, ("FedBN", ".1", 1): 91.0})
    told = cost_line([one, dataclasses.replace(two, commit="def")])
    assert "commit `abc` for FedBN (.1), seed 0 and `def` for FedBN (.1), seed 1." in told


def test_commands_name_the_folder_of_ones_own_recipes() -> None:
    gathered = gather(read_papers(SMALL)["tiny"], kept(TABLE, {("FedBN", ".1", 0): 90.0}))
    [part] = [part for part in gathered if part.recipe.part == "table1"]
    assert command_of(part)[-2:] == ["--recipes", str(SMALL)]
    assert read_papers()["lips"].part("table2").place is None


def test_results_of_no_known_paper_are_refused_and_nothing_is_written_of_none(call: Call, tmp_path: Path) -> None:
    results = kept(TABLE, {("FedBN", ".1", 0): 90.0})
    with pytest.raises(FedStrataError, match=r"results of the paper 'tiny', which is none of .* with --recipes\."):
        papers_told(read_papers(), results)
    written = tmp_path / f"told{DOCUMENT_SUFFIX}"
    written.write_text("What was found.")
    code, _, err = call("--write", str(written))
    assert (code, written.read_text()) == (2, "What was found.")
    assert "is of kept results; name their files or folders behind it." in err
    code, _, err = call("--write", "told.txt", "results")
    assert code == 2
    assert "'told.txt' is neither a document nor a page; its name has to end in .md or .html." in err
