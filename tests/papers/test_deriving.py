"""Columns that are made of others: from the numbers of the same part or of other parts, as their runs give them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedstrata.cli import main
from fedstrata.papers.cells import Choice, cells_of
from fedstrata.papers.deriving import friedman_of, judge_part
from fedstrata.papers.judging import Judged, JudgedCell, judge
from fedstrata.papers.keeping import Kept, asked, read_results
from fedstrata.papers.published import Published
from fedstrata.papers.reading import PAPERS, Paper, read_papers
from fedstrata.papers.words import order_line, ours_line
from fedstrata.papers.writing import reproduction
from fedstrata.runs.folder import RunFolder
from fedstrata.significance import Estimate

FILES = {
    "paper.toml": """
title = "A paper of two measures"
citation = "A. Author, 2026."
link = ""
[experiment]
data = "digits"
model = "mlp(hidden=8)"
clients = 4
partition = "dirichlet(alpha=0.3, samples=40, test_samples=20)"
epochs = 1
rounds = 3
seed = 7
batch_size = 50
optimiser = "sgd(learning_rate=0.5)"
engine = "loop"
validation_fraction = 0.3
metrics = "f1"
""",
    "table1.toml": """
title = "Variance"
number = "client_after.accuracy"
over_clients = "variance"
at = "validated"
[rows]
FedProx = "fedprox(mu=0.1)"
Ditto = "ditto"
[columns]
a = {}
b = { epochs = 2 }
"Mean rank" = { derived = "mean_rank" }
""",
    "table2.toml": """
title = "Incentive"
like = "table1"
number = "client_after.f1"
over_clients = "incentive"
against = ["Local", "FedAvg"]
[rows]
Local = "local"
FedAvg = "fedavg"
FedProx = "fedprox(mu=0.1)"
Ditto = "ditto"
""",
    "table3.toml": """
title = "Mean ranks"
like = "table1"
[columns]
Fairness = { derived = "mean_rank", of = "table1" }
Incentive = { derived = "mean_rank", of = "table2" }
""",
}
PUBLISHED = """paper,part,row,column,mean,std,note
two,table1,FedProx,a,0.01,,
two,table1,FedProx,b,0.02,,
two,table1,FedProx,Mean rank,1.0,,
two,table1,Ditto,a,0.03,,
two,table1,Ditto,b,0.03,,
two,table1,Ditto,Mean rank,2.0,,
two,table2,FedProx,a,25,,
two,table2,FedProx,b,50,,
two,table2,FedProx,Mean rank,1.75,,
two,table2,Ditto,a,75,,
two,table2,Ditto,b,50,,
two,table2,Ditto,Mean rank,1.25,,
two,table3,FedProx,Fairness,1.0,,
two,table3,FedProx,Incentive,1.75,,
two,table3,Ditto,Fairness,2.0,,
two,table3,Ditto,Incentive,1.25,,
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "own" / "recipes" / "two"
    folder.mkdir(parents=True)
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (tmp_path / "own" / "published.csv").write_text(PUBLISHED)
    return tmp_path / "own"


def kept(paper: Paper, values: dict[tuple[str, str, str], float], seed: int = 0) -> list[Kept]:
    made = []
    for (part, row, column), value in values.items():
        cells = [cell for cell in cells_of(paper.part(part), seed + 1) if (cell.row, cell.column) == (row, column)]
        settings, number, at = asked(cells[seed])
        where = ("two", part, row, column, cells[seed].seed)
        clients = clients_of(part, value)
        mean = sum(clients) / len(clients)
        made.append(Kept(*where, mean, number, at, settings, 4, 1.0, 10, "abc", "words", "CPU", clients=clients))
    return made


def clients_of(part: str, value: float) -> tuple[float, ...]:
    """Clients with this variance, or of whom this part, in percent, has more than nothing."""
    return (0.0, 2 * value**0.5) if part == "table1" else tuple(float(client < value / 25) for client in range(4))


def judged(
    place: Path, part: str, values: dict[tuple[str, str, str], float]
) -> dict[tuple[str, str], tuple[object, ...]]:
    paper = read_papers(place)["two"]
    cells = [cell for name in ("table1", "table2") for cell in cells_of(paper.part(name), 1)]
    found = judge_part(paper, paper.part(part), cells, kept(paper, values))
    return {
        (one.row, one.column): (None if one.ours is None else one.ours.mean, one.verdict, " ".join(one.notes))
        for one in found.cells
    }


FAIRNESS = {("table1", "FedProx", "a"): 0.02, ("table1", "FedProx", "b"): 0.01, ("table1", "Ditto", "a"): 0.03}
INCENTIVES = {
    ("table2", row, column): value
    for row, values in {"Local": (0, 0), "FedAvg": (0, 0), "FedProx": (0, 50), "Ditto": (25, 50)}.items()
    for column, value in zip("ab", values, strict=True)
}


def test_mean_ranks_are_computed_from_other_parts(place: Path) -> None:
    """The lower variance is the better one, the higher incentive too; what is only measured against has no rank."""
    found = judged(place, "table3", {**FAIRNESS, ("table1", "Ditto", "b"): 0.02, **INCENTIVES})
    assert found == {
        ("FedProx", "Fairness"): (1.0, "agrees", ""),
        ("Ditto", "Fairness"): (2.0, "agrees", ""),
        ("FedProx", "Incentive"): (1.75, "agrees", ""),
        ("Ditto", "Incentive"): (1.25, "agrees", ""),
    }


def test_the_document_has_them_too(place: Path) -> None:
    papers = read_papers(place)
    text = reproduction(papers, kept(papers["two"], {**FAIRNESS, **INCENTIVES}))
    assert "| Fairness | FedProx | – | 1.000 | – | – | – | not published |" in text
    assert "| Incentive | Ditto | 1.250 | 1.250 | – | +0.000 | – | agrees |" in text
    text = text.replace("\n  ", " ")
    assert "- all rows (Fairness): The rank in a alone, which is no mean rank." in text
    assert "fedstrata paper two table3 --seeds 1" in text


def test_of_mean_ranks_no_deviation_is_told(place: Path) -> None:
    """They have none; the runs that they are made of have."""
    paper = read_papers(place)["two"]
    assert paper.part("table3").is_derived
    assert ours_line(paper.part("table3")) == ""
    assert ours_line(paper.part("table1")).startswith("Behind our ± is the standard error")
    assert ours_line(replace(paper.part("table1"), published={})) == "", "there is nothing to set ours beside"


def test_over_fewer_columns_the_published_numbers_of_these_count(place: Path) -> None:
    with_a_third_column(place)
    two = {**FAIRNESS, ("table1", "Ditto", "b"): 0.02}
    found = judged(place, "table3", two)
    told = "Mean rank over a, b alone, in our numbers and in the published ones."
    assert found["FedProx", "Fairness"] == (1.0, "agrees", told)
    assert found["FedProx", "Incentive"] == (None, "not run", "")
    turned = judged(place, "table1", {one: 0.05 - value for one, value in two.items()})
    assert turned["FedProx", "Mean rank"] == (2.0, "above", told), "they have changed places"


def with_a_third_column(place: Path) -> None:
    table, published = place / "recipes/two/table1.toml", place / "published.csv"
    table.write_text(table.read_text().replace("b = { epochs = 2 }", "b = { epochs = 2 }\nc = { epochs = 3 }"))
    published.write_text(published.read_text() + "two,table1,FedProx,c,0.02,,\ntwo,table1,Ditto,c,0.03,,\n")


def test_a_rank_in_one_column_is_no_mean_rank(place: Path) -> None:
    """The paper has none of it, so it neither agrees nor does it not."""
    told = "The rank in a alone, which is no mean rank."
    assert judged(place, "table3", FAIRNESS)["FedProx", "Fairness"] == (1.0, "not published", told)


@pytest.mark.parametrize(("printed", "verdict"), [(1.05, "agrees"), (1.9, "agrees")])
def test_what_the_paper_s_own_numbers_make_counts_where_something_else_is_printed(
    place: Path, printed: float, verdict: str
) -> None:
    """Ranks of 2 each, as printed, would be above those of 1 and 2 that its columns have; so its own numbers do."""
    published = place / "published.csv"
    published.write_text(published.read_text().replace("Ditto,Mean rank,2.0,,", f"Ditto,Mean rank,{printed},,"))
    found = judged(place, "table1", {**FAIRNESS, ("table1", "Ditto", "b"): 0.02})
    told = f"Printed is {printed:g}; the paper's own numbers make 2.00."
    assert found["Ditto", "Mean rank"] == (2.0, verdict, told)
    assert found["FedProx", "Mean rank"] == (1.0, "agrees", "")


def test_among_fewer_rows_the_published_numbers_of_these_count(tmp_path: Path) -> None:
    """Third and fourth of four are first and second of two, and no other ranks than the published ones."""
    folder = tmp_path / "recipes" / "four"
    folder.mkdir(parents=True)
    (folder / "paper.toml").write_text(FILES["paper.toml"])
    (folder / "table1.toml").write_text(
        'title = "Accuracy"\nnumber = "client_after.accuracy.mean"\n[rows]\nA = "fedavg"\nB = "local"\nC = "ditto"\n'
        'D = "fedbn"\n[columns]\na = {}\n"Mean rank" = { derived = "mean_rank" }\n'
    )
    lines = [f"four,table1,{row},a,{90 - place},,\nfour,table1,{row},Mean rank,{place},," for place, row in
             enumerate("ABCD", 1)]  # fmt: skip
    (tmp_path / "published.csv").write_text("\n".join(["paper,part,row,column,mean,std,note", *lines, ""]))
    paper = read_papers(tmp_path)["four"]
    recipe = paper.part("table1")
    cells = cells_of(recipe, 1, choice=Choice(methods=("C", "D")))
    values = {"C": 0.5, "D": 0.4}
    own = [
        Kept("four", "table1", cell.row, cell.column, 0, 100 * values[cell.row], *asked(cell)[1:], asked(cell)[0],
             4, 1.0, 10, "abc", "words", "CPU")
        for cell in cells
    ]  # fmt: skip
    ranks = {one.row: one for one in judge_part(paper, recipe, cells, own).cells if one.column == "Mean rank"}
    assert [(one.published.mean, one.ours and one.ours.mean, one.verdict) for one in ranks.values()] == [
        (1.0, 1.0, "agrees"),
        (2.0, 2.0, "agrees"),
    ]
    assert ranks["C"].notes == ("Mean rank among C, D alone, in our numbers and in the published ones.",)


def test_commands_of_other_settings_can_be_given_again(place: Path) -> None:
    """They hold names with blanks, which the shell would take for several words."""
    papers = read_papers(place)
    told = "fedstrata paper two table1 --columns 'a, b' --method 'FedProx' --seeds 1"
    others = [replace(one, settings="other", changes="epochs=9", command=told) for one in kept(papers["two"], FAIRNESS)]
    text = reproduction(papers, others)
    assert "Changed: `epochs=9`." in text
    assert "\nfedstrata paper two table1 --columns 'a, b' --method FedProx --seeds 1\n" in text


def test_rows_of_unequal_numbers_of_seeds_are_said_to_be_so(place: Path) -> None:
    papers = read_papers(place)
    both = {**FAIRNESS, ("table1", "Ditto", "b"): 0.02}
    once_more = {("table1", "Ditto", "a"): 0.05}
    text = reproduction(papers, kept(papers["two"], both) + kept(papers["two"], once_more, seed=1))
    assert "Rows are ranked over 1 to 2 seeds, and seeds differ, too." in text.replace("\n  ", " ")
    assert "ranked over" not in reproduction(papers, kept(papers["two"], both) + kept(papers["two"], both, seed=1))


def test_the_command_asks_for_as_many_seeds_as_reach_the_last_that_was_run(place: Path) -> None:
    papers = read_papers(place)
    text = reproduction(papers, kept(papers["two"], FAIRNESS, seed=3))
    assert "fedstrata paper two table1 --seeds 4" in text


def test_an_order_tells_of_how_many_seeds_its_rows_are() -> None:
    def cell(row: str, published: float, ours: float, seeds: int) -> JudgedCell:
        return JudgedCell(row, "a", Published(published, None, ""), Estimate(ours, None, seeds), "agrees")

    cells = (cell("x", 1.0, 1.5, 1), cell("y", 2.0, 4.0, 3), cell("z", 3.0, 2.5, 2))
    recipe = next(iter(read_papers(PAPERS)["lips"].parts.values()))
    order = Judged(recipe, cells, ()).orders["a"]
    assert (order.spearman, order.count, order.seeds) == (0.5, 3, (1, 3))
    assert order_line("a", order).endswith("0.50, over rows of 1 to 3 seeds")
    alike = [replace(one, ours=Estimate(4.0, None, 2)) for one in cells]
    assert Judged(recipe, tuple(alike), ()).orders == {}


def test_rows_are_tested_over_the_columns_that_all_have(place: Path) -> None:
    paper = read_papers(place)["two"]
    cells = cells_of(paper.part("table1"), 1)
    assert friedman_of(judge_part(paper, paper.part("table1"), cells, kept(paper, FAIRNESS))) is None


def test_incentives_bring_along_what_they_are_measured_against(place: Path) -> None:
    recipe = read_papers(place)["two"].part("table2")
    cells = cells_of(recipe, 1, choice=Choice(methods=("Ditto",), columns=("a",)))
    assert [(cell.row, cell.column) for cell in cells] == [("Local", "a"), ("FedAvg", "a"), ("Ditto", "a")]


def test_a_part_of_others_is_run_and_what_is_over_clients_is_that_of_the_chosen_models(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    own = ["paper", "--recipes", str(place), "two", "table3", "--only", "a", "--out", "o", "--no-report", "--json"]
    assert main(own) == 0
    told = json.loads(capfd.readouterr().out)
    assert {one["column"] for one in told["cells"]} == {"Fairness", "Incentive"}
    assert all(one["ours"] in (1.0, 1.5, 2.0) for one in told["cells"])
    kept = read_results([Path("o")])
    found = {(one.part, one.row): one for one in kept}
    runs = {row: RunFolder.open(Path("o/runs") / found["table2", row].settings) for row in ("Local", "FedAvg", "Ditto")}
    chosen = {row: of_chosen_models(folder, "f1") for row, folder in runs.items()}
    accuracies = of_chosen_models(runs["Ditto"], "accuracy")
    assert found["table1", "Ditto"].clients == pytest.approx([accuracies[client] for client in range(4)], abs=1e-5)
    for row, numbers in chosen.items():
        assert found["table2", row].clients == pytest.approx([numbers[client] for client in range(4)], abs=1e-5)
    recipe = read_papers(place)["two"]
    of_parts = {
        part: judge(recipe.part(part), cells_of(recipe.part(part), choice=Choice(columns=("a",))), kept).cells
        for part in ("table1", "table2")
    }
    [variance, incentive] = [next(one.ours for one in cells if one.row == "Ditto") for cells in of_parts.values()]
    mean = sum(accuracies.values()) / 4
    assert variance == Estimate(pytest.approx(sum((value - mean) ** 2 for value in accuracies.values()) / 4), None, 1)
    better = [
        chosen["Ditto"][client] > max(chosen["Local"][client], chosen["FedAvg"][client]) for client in chosen["Ditto"]
    ]
    assert incentive == Estimate(pytest.approx(100 * sum(better) / 4), None, 1)


def of_chosen_models(folder: RunFolder, metric: str) -> dict[int, float]:
    """Look a client's number up where its validation accuracy was first the best, or that of all on average."""
    table = folder.metrics().to_tables()["clients"].to_pylist()
    found: dict[str, dict[tuple[int, int], float]] = {}
    for row in table:
        found.setdefault(row["metric"], {})[row["client"], row["round"]] = row["value"]
    summary = folder.summary()
    if "validated_round" in summary:
        return {client: found[f"client_after.{metric}"][client, summary["validated_round"]] for client in range(4)}
    validation = found["client_validation.accuracy"]
    rounds = sorted({round for _, round in validation})
    best = {client: max(rounds, key=lambda round: (validation[client, round], -round)) for client in range(4)}
    return {client: found[f"client_after.{metric}"][client, best[client]] for client in range(4)}
