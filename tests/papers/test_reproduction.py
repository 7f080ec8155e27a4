"""The document over all results: the same words from the same numbers, with nothing hidden and nothing claimed."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from fedstrata.cli import main
from fedstrata.papers.cells import Smaller, cells_of
from fedstrata.papers.gathering import gather
from fedstrata.papers.judging import judge
from fedstrata.papers.keeping import Kept, asked, changes_in_words, read_results, write_results
from fedstrata.papers.reading import Recipe, read_papers
from fedstrata.papers.told import note_lines, papers_in_numbers
from fedstrata.papers.words import claim_line, where_words
from fedstrata.papers.writing import reproduction

SMALL = Path(__file__).parent / "small"
ROOT = Path(__file__).parents[2]


def kept(
    recipe: Recipe, values: dict[tuple[str, str], list[float]], smaller: Smaller | None = None, **changes: object
) -> list[Kept]:
    """Results of seeds 0, 1 and so on, as they would be kept."""
    cells = {(cell.row, cell.column, cell.seed): cell for cell in cells_of(recipe, 9, smaller)}
    made = []
    for pair, numbers in values.items():
        for seed, value in enumerate(numbers):
            cell = cells[(*pair, seed)]
            settings, number, at = asked(cell)
            one = Kept(
                recipe.paper, recipe.part, *pair, seed, value, number, at, settings, cell.experiment.rounds, 60.0, 1000,
                "abc123", "fedstrata paper tiny table1 --rounds 1", "GPU", "torch 2", 1e9, changes_in_words(cell),
            )  # fmt: skip
            made.append(dataclasses.replace(one, **changes))
    return made


TABLE = read_papers(SMALL)["tiny"].part("table1")
FULL = kept(TABLE, {("FedBN", ".1"): [90.0, 91.0, 92.0], ("Local", ".1"): [84.0, 85.5, 87.0]})
SHORT = kept(TABLE, {("FedBN", ".1"): [50.0, 52.0], ("Local", ".1"): [51.0, 50.0]}, Smaller(rounds=1))


def text_of(results: list[Kept]) -> str:
    return reproduction(read_papers(SMALL), results)


def test_main_claims_stand_on_top_with_published_and_our_difference() -> None:
    # Agrees within t x sqrt(0.5^2 / 2 + 1 / 3) = 3.2125 x 0.6770, of 2.951 degrees of freedom.
    # Differences 6, 5.5 and 5: mean 5.5, std 0.5, 4.3027 x 0.5 / sqrt(3) = 1.242. Published: 90.5 - 60, one without ±.
    text = text_of(FULL)
    line = "| [tiny table1](#tiny-table1) | FedBN beats Local | .1 | +30.50 (single) | +5.50 (+4.26 to +6.74) | 3 |"
    assert f"{line} **shown** |" in text
    assert text.index(line) < text.index("## A small paper")
    assert "| .1 | FedBN | 90.50 ± 0.50 | 91.00 ± 1.00 | 3 | +0.50 | 2.17 | agrees |" in text
    assert "| paired t-test, p = 0.003; not as much | shown |" not in text  # 4.8 is in the interval
    assert "| paired t-test, p = 0.003; about as much | shown |" in text
    assert "Run with the paper's settings: 2 of 4 cells, 3 seeds each; 1 agrees, 1 above." in text
    assert "Not run: the column .5." in text
    assert (
        "Cost: 6 runs, 6.0 min of computing, 6.00 kB sent, 6.0e9 operations of training. On GPU with torch 2;" in text
    )
    assert "commit `abc123`." in text
    assert "fedstrata paper tiny table1 --columns .1 --seeds 3" in text
    assert "Not run: figure1 (Accuracy over rounds)." in text


@pytest.mark.parametrize(
    ("local", "words"),
    [
        ([80.0, 80.5, 82.0], "more than published"),
        ([84.0, 85.5, 87.0], "about as much"),
        ([88, 89.1, 90], "not as much"),
    ],
)
def test_a_difference_is_called_smaller_or_larger_than_the_published_one(local: list[float], words: str) -> None:
    """Published is 4.8; the differences are about 10, 5.5 and 2."""
    text = text_of([*FULL[:3], *kept(TABLE, {("Local", ".1"): local})])
    assert f"; {words} | shown |" in text


def test_runs_with_fewer_rounds_have_a_table_of_their_own_and_decide_nothing() -> None:
    text = text_of(SHORT)
    assert "#### At 1 of 2 rounds: not comparable with the published numbers" in text
    assert "Changed: `rounds=1`." in text
    assert "| .1 | FedBN | 90.50 ± 0.50 | 51.00 ± 1.41 | 2 |" in text
    assert "| not run; with other settings: [below](#tiny-table1) |" in text
    assert "**shown**" not in text
    # Differences -1 and 2: mean 0.5, std 2.1213; t_1 = 12.706 x 1.5 = 19.06.
    assert "FedBN beats Local (.1) in these runs: +0.50 (−18.56 to +19.56) over 2 seeds" in text
    assert "Nothing of it was run with the paper's settings." in text


def test_without_results_all_is_said_to_be_not_run() -> None:
    text = text_of([])
    assert "Nothing was run." in text
    assert "Not run: table1 (Accuracy on digits); figure1" in text


def test_the_same_results_make_the_same_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_results(Path("results/a/results.csv"), FULL[:3])
    write_results(Path("results/b/results.csv"), [*reversed(FULL[3:]), *SHORT])
    for name in ("one.md", "two.md"):
        assert main(["paper", "--recipes", str(SMALL), "--write", name, "results", "--quiet"]) == 0
    text = Path("one.md").read_text()
    assert text == Path("two.md").read_text().replace("--write two.md", "--write one.md")
    assert text == reproduction(read_papers(SMALL), [*FULL, *SHORT], "one.md results")
    assert max(len(line) for line in text.splitlines() if line[:1] != "|") <= 120
    assert "\n\n\n" not in text


def test_devices_and_commits_are_told_apart_and_other_outcomes_are_told() -> None:
    moved = [dataclasses.replace(one, device="CPU", commit="def456") for one in FULL[3:]]
    again = dataclasses.replace(FULL[0], value=89.0, device="CPU")
    text = " ".join(text_of([*FULL[:3], *moved]).split())
    assert "On CPU for Local (.1) and GPU for FedBN (.1) with torch 2;" in text
    assert "commit `abc123` for FedBN (.1) and `def456` for Local (.1)." in text
    text = " ".join(text_of([*FULL, again]).split())
    assert (
        "FedBN, .1, seed 0 was measured more than once, and the last counts: 90 (GPU, abc123), 89 (CPU, abc123)."
        in text
    )
    assert "| .1 | FedBN | 90.50 ± 0.50 | 90.67 ± 1.53 |" in text


def test_a_claim_of_single_numbers_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    papers = read_papers()
    text = reproduction({"sparse-ft": papers["sparse-ft"]}, [])
    line = "| sparse-ft table3 | Highest magnitude beats Least sensitive | N_c=10 J=8 | +1.49 (single) |"
    assert line in text


def test_what_is_missing_is_told_once_and_apart_from_what_is_known_of_numbers() -> None:
    """Else the same sentence about missing data comes once more behind each note on a published number."""
    cells = cells_of(TABLE, 1)
    found = judge(TABLE, cells, [], {cell.settings: "The data is not here." for cell in cells})
    assert note_lines(found.cells) == [
        "all rows (.1, .5): The data is not here.",
        "FedBN (.5): The column adds up to 31.",
    ]
    assert next(line["note"] for line in found.lines() if line["published"] == 30) == (
        "The column adds up to 31. The data is not here."
    )


def test_settings_that_the_paper_does_not_have_are_called_ours() -> None:
    paper = read_papers()["sparse-ft"]
    recipe = paper.part("table2")
    ours, theirs = (kept(recipe, {("Sparsity 20%", column): [35.0, 36.0]}) for column in ("Small ViT", "Test accuracy"))
    alone = reproduction({"sparse-ft": paper}, ours)
    assert "Run with settings of ours, which the paper does not have, in bf16: 1 of 16 cells" in alone
    assert "Run with the paper's settings" in reproduction({"sparse-ft": paper}, [*ours, *theirs])


@pytest.mark.parametrize(("number", "word"), [("global.loss", "shown"), ("aggregate.seconds", "shown"),
                                              ("bytes.up", "shown"), ("global.accuracy", "not shown")])  # fmt: skip
def test_who_has_less_loss_seconds_or_bytes_beats_who_has_more(number: str, word: str) -> None:
    """Differences are -2, -2.5 and -1.5; published ones are turned as ours are: 60 - 90.5."""
    recipe = dataclasses.replace(TABLE, number=number, unit="plain")
    results = kept(recipe, {("FedBN", ".1"): [1.0, 1.5, 2.0], ("Local", ".1"): [3.0, 4.0, 3.5]})
    claim = judge(recipe, cells_of(recipe, 3), results).claims[0]
    sign = -1 if word == "shown" else 1
    assert claim.word == word
    assert claim.found is not None
    assert claim.found.mean == pytest.approx(sign * -2.0)
    assert claim.published == (pytest.approx(sign * 30.5), None)


def test_seconds_of_another_device_are_compared_with_no_published_ones() -> None:
    recipe = dataclasses.replace(TABLE, number="aggregate.seconds", unit="plain")
    judged = judge(recipe, cells_of(recipe, 1), kept(recipe, {("FedBN", ".1"): [90.5], ("Local", ".1"): [1.0]}))
    assert {one.verdict for one in judged.cells if one.ours is not None} == {"not comparable"}


def test_further_readings_have_verdicts_and_no_place_in_the_order_of_rows() -> None:
    """Two rows of one method would be two places for one number of the paper."""
    paper = read_papers()["lips"]
    table = paper.part("table2")
    numbers = {"Separate": 79.6, "FedAvg": 18.5, "FedAvg server": 13.9, "FedBN": 80.3, "LIPS": 82.0}
    results = kept(table, {(row, "C100 .01"): [value, value + 0.1] for row, value in numbers.items()})
    text = reproduction({"lips": paper}, results)
    assert "5 of 78 cells, 1 further reading of rows among them, 2 seeds each; 4 agree, 1" in text
    assert "| C100 .01 | FedAvg server | 13.96 ± 0.12 | 13.95 ± 0.07 | 2 | −0.01 | 1.00 | agrees |" in text
    assert "- FedAvg server (C100 .01): another reading of the row FedAvg, beside its published number" in text
    assert "Order of the 4 rows (C100 .01)" in text


# Results from before there were recipes -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def keep_earlier() -> ModuleType:
    spec = importlib.util.spec_from_file_location("keep_earlier", ROOT / "benchmarks" / "keep_earlier.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_earlier_runs_are_cells_where_their_settings_are_and_only_there(keep_earlier: ModuleType) -> None:
    parts = [read_papers()["lips"].part("table4")]
    found = keep_earlier.earlier_results(parts, ROOT / "results" / "lips-cifar100")
    exact = {(one.row, one.seed): one.value for one in found if not one.changes}
    assert exact == pytest.approx({
        ("FedBN", 0): 42.7175, ("FedBN", 1): 44.4475, ("LIPS Sensitivity", 0): 47.105, ("LIPS Sensitivity", 1): 49.1775,
        ("LIPS Magnitude", 0): 42.9475,
    })  # fmt: skip
    assert len(found) == len(exact)
    table = read_papers()["ssfl"].part("table1")
    found = keep_earlier.earlier_results([table], ROOT / "results" / "ssfl-cifar10")
    assert all("rounds=" in one.changes for one in found)  # 30 and 135 of 500: no cell of the paper's
    assert {one.row for one in found} == {"SSFL"}  # FedAvg's cells are runs of fedavg-ft, those of the folder are not
    short = {(one.column, one.seed): one.value for one in found if "rounds=30" in one.changes}
    assert short == pytest.approx({
        ("CIFAR-10", 0): 40.864, ("CIFAR-10", 1): 45.034, ("Comms (MB)", 0): 223.70001, ("Comms (MB)", 1): 223.70001,
    })  # fmt: skip
    best = keep_earlier.earlier_results([dataclasses.replace(table, at="best")], ROOT / "results" / "ssfl-cifar10")
    [longest] = [one.value for one in best if one.column == "CIFAR-10" and "rounds=135" in one.changes]
    assert longest == pytest.approx(45.455)  # the twelfth of fourteen evaluations; the last has 40.56


@pytest.mark.slow
def test_the_document_is_the_one_that_the_kept_results_make() -> None:
    written = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    assert written == reproduction(read_papers(), read_results([ROOT / "results"]), "docs/reproduction.md results")


def test_who_beats_whom_in_a_column_that_the_paper_does_not_have_is_a_setting_of_ours() -> None:
    recipe = read_papers()["sparse-ft"].part("table2")
    judged = judge(recipe, cells_of(recipe, 1), [])
    told = {(where_words(claim), claim_line(claim).split(":")[0]) for claim in judged.claims}
    assert ("Test accuracy", "Sparsity 20% beats Sparsity 50% by 2.2 (Test accuracy)") in told
    where = "Small ViT (a setting of ours)"
    assert (where, f"Sparsity 20% beats Sparsity 50% ({where})") in told


def test_numbers_of_papers_are_counted_without_seconds() -> None:
    """One of two agrees; as seconds neither counts, also not as one that there is to run."""
    papers = read_papers(SMALL)
    assert papers_in_numbers({"tiny": gather(papers["tiny"], FULL)})[0][:7] == ("tiny", "3", "2", "1", "0", "1", "0")
    seconds = dataclasses.replace(TABLE, number="aggregate.seconds", unit="plain")
    timed = dataclasses.replace(papers["tiny"], parts={"table1": seconds})
    results = kept(seconds, {("FedBN", ".1"): [1.0]})
    assert papers_in_numbers({"tiny": gather(timed, results)})[0][:7] == ("tiny", "0", "0", "0", "0", "0", "0")
