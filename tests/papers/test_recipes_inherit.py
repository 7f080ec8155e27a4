"""What a paper says of rows and columns is said once: parts name them, and change what is theirs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.papers.cells import cells_of
from fedstrata.papers.reading import Recipe, read_papers

SMALL = Path(__file__).parent / "small"
PAPER = """
[rows]
FedBN = "fedbn"
Local = { method = "local", epochs = 2 }

[columns]
".1" = { "partition.alpha" = 0.1, rounds = 9, "method.lips.tau0" = 0.5 }
".5" = { like = ".1", "partition.alpha" = 0.5 }
"""
LIPS = 'title = "b"\nrows = [{ LIPS = "lips" }]\ncolumns = [".1"]'


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A paper that describes its rows and columns, with one part that has them all."""
    folder = Path(shutil.copytree(SMALL, tmp_path / "own"))
    (folder / "published.csv").write_text("paper,part,row,column,mean,std,note\n")
    recipes = folder / "recipes" / "tiny"
    (recipes / "paper.toml").write_text((recipes / "paper.toml").read_text() + PAPER)
    (recipes / "table9.toml").write_text(LIPS)
    return folder


def part(own: Path, text: str, name: str = "table1") -> Recipe:
    (own / "recipes" / "tiny" / f"{name}.toml").write_text(f'title = "a"\n{text}')
    return read_papers(own)["tiny"].part(name)


def experiments(recipe: Recipe) -> dict[tuple[str, str], Experiment]:
    return {(cell.row, cell.column): cell.experiment for cell in cells_of(recipe)}


def test_a_list_names_rows_and_columns_of_the_paper(own: Path) -> None:
    found = experiments(part(own, 'rows = ["Local", "FedBN"]\ncolumns = [".5"]'))
    assert list(found) == [("Local", ".5"), ("FedBN", ".5")]
    assert found["Local", ".5"] == Experiment(
        data="digits", model="mlp(hidden=8)", clients=3, partition="dirichlet(alpha=0.5)", epochs=2, engine="stacked",
        rounds=9, method="local",
    )  # fmt: skip
    assert found == experiments(part(own, "[rows]\nLocal = {}\nFedBN = {}\n[columns]\n'.5' = {}"))


def test_what_a_part_says_of_a_row_or_a_column_is_laid_over_the_papers(own: Path) -> None:
    rows = "[rows]\nLocal = { at = 'best' }\nFedBN = 'fedbn+lws'\n"
    recipe = part(own, rows + "[columns]\n'.1' = { rounds = 3 }\nnew = {}")
    found = experiments(recipe)
    assert list(found) == [("Local", ".1"), ("Local", "new"), ("FedBN", ".1"), ("FedBN", "new")]
    assert recipe.of_cell("Local", "new").at == "best"
    assert [(one.method, one.epochs, one.rounds, one.partition) for one in found.values()] == [
        ("local", 2, 3, "dirichlet(alpha=0.1)"), ("local", 2, Experiment.rounds, "dirichlet:0.5"),
        ("fedbn+lws", 1, 3, "dirichlet(alpha=0.1)"), ("fedbn+lws", 1, Experiment.rounds, "dirichlet:0.5"),
    ]  # fmt: skip


def test_a_list_may_hold_tables_of_what_is_changed(own: Path) -> None:
    table = "[rows]\nFedBN = {}\nLocal = { epochs = 4 }\n[columns]\n'.1' = {}\nnew = { rounds = 3 }\n'.5' = {}"
    mixed = 'rows = ["FedBN", { Local = { epochs = 4 } }]\ncolumns = [".1", { new = { rounds = 3 } }, ".5"]'
    assert list(experiments(part(own, mixed)).items()) == list(experiments(part(own, table)).items())


def test_an_experiment_of_a_part_wins_over_the_papers_columns_and_loses_to_its_own(own: Path) -> None:
    [first, second] = experiments(
        part(own, "rows = ['Local']\n[experiment]\nrounds = 1\nepochs = 7\n[columns]\n'.1' = {}\n'.5' = { rounds = 2 }")
    ).values()
    assert (first.rounds, first.epochs, second.rounds, second.epochs) == (1, 7, 2, 7)


def test_a_text_wins_with_its_parameters(own: Path) -> None:
    words = "rows = ['FedBN']\n[experiment]\npartition = 'iid'\n[columns]\n'.1' = {}\n'.5' = { partition.alpha = 3.0 }"
    [first, _] = cells_of(part(own, words))
    assert (first.experiment.partition, first.problem) == ("iid", "")
    [cell] = cells_of(part(own, "rows = ['FedBN']\n[columns]\n'.1' = { partition = 'iid' }"))
    assert (cell.experiment.partition, cell.problem) == ("iid", "")


def test_a_column_is_like_another_one_of_the_paper(own: Path) -> None:
    words = "rows = ['FedBN']\n[columns]\nmany = { like = '.5', clients = 5 }\n'.1' = { like = '.5' }"
    [many, renamed] = experiments(part(own, words)).values()
    assert (many.partition, many.rounds, many.clients) == ("dirichlet(alpha=0.5)", 9, 5)
    assert renamed == many.with_changes({"clients": 3})


def test_a_part_names_some_rows_of_the_part_that_it_is_like(own: Path) -> None:
    rows = "rows = ['Local', { Mine = { method = 'fedprox', epochs = 3 } }]\n"
    part(own, "number = 'global.loss'\n" + rows + "columns = ['.1']")
    recipe = part(own, "like = 'table1'\nrows = [{ Mine = { at = 'best' } }, 'FedBN']", "table2")
    assert [(one.method, one.epochs) for one in experiments(recipe).values()] == [("fedprox", 3), ("fedbn", 1)]
    assert (recipe.of_cell("Mine", ".1").at, recipe.number, list(recipe.columns)) == ("best", "global.loss", [".1"])
    assert list(part(own, "like = 'table1'", "table3").rows) == ["Local", "Mine"]


def test_parameters_in_the_papers_columns_are_for_parts_with_that_method(own: Path) -> None:
    plain = part(own, "rows = ['FedBN']\ncolumns = ['.1']")
    assert plain.columns[".1"] == {"partition.alpha": 0.1, "rounds": 9}
    cells_of(plain)
    [cell] = cells_of(read_papers(own)["tiny"].part("table9"))
    assert cell.experiment.method == "lips(tau0=0.5)"
    with pytest.raises(FedStrataError, match=r"'method\.lips\.tau0' in the columns of 'tiny table1'"):
        cells_of(part(own, "rows = ['FedBN']\n[columns]\n'.1' = { 'method.lips.tau0' = 0.5 }"))


def test_a_paper_says_the_number_for_parts_that_are_run(own: Path) -> None:
    path = own / "recipes" / "tiny" / "paper.toml"
    path.write_text("number = 'global.loss'\nat = 'best'\n" + path.read_text())
    recipe = part(own, "rows = ['FedBN']")
    assert (recipe.number, recipe.at, recipe.unit) == ("global.loss", "best", "plain")
    recipe = part(own, "number = 'global.f1'\nrows = ['FedBN']")
    assert (recipe.number, recipe.at, recipe.unit) == ("global.f1", "best", "percent")
    assert part(own, "runs = false").number == Recipe.number


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("rows = ['FedBM']", "no row that 'tiny/table1.toml' could take over called 'FedBM'. Did you mean 'FedBN'?"),
        ("columns = ['.2']", "no column that 'tiny/table1.toml' could take over called '.2'. Did you mean"),
        ("like = 'table9'\nrows = ['LIPZ']", "could take over called 'LIPZ'. Did you mean 'LIPS'?"),
        ("[columns]\nnew = { like = '1' }", "no column that 'tiny/table1.toml' could take over called '1'."),
        ("rows = [3]", "The rows of 'tiny/table1.toml' are no table, and no list of names or tables: '3'."),
        ("columns = [{ new = 'fedavg' }]", "The column 'new' of 'tiny/table1.toml' is no table of keys"),
        ("rows = ['Local']\ncolumns = ['.1']\n[cells]\nLocal = { '.1' = { like = '.5' } }", "cell 'Local', '.1' of"),
    ],
)
def test_what_is_not_there_to_be_taken_over_is_refused(own: Path, text: str, words: str) -> None:
    with pytest.raises(FedStrataError) as caught:
        part(own, text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("epochs = 2", "epoch = 2", "as the row 'Local' of 'tiny/paper.toml' has it, called 'epoch'"),
        ("rounds = 9", "at = 'lats'", "at, which the column '.1' of 'tiny/paper.toml' asks for, called 'lats'"),
        ('like = ".1"', 'like = ".7"', "no column that 'tiny/paper.toml' could take over called '.7'"),
        ("lips.tau0", "lisp.tau0", "'method.lisp.tau0' in the columns of 'tiny/paper.toml' is a parameter of no row's"),
    ],
)
def test_mistakes_of_a_paper_are_told_with_its_own_file(own: Path, old: str, new: str, words: str) -> None:
    path = own / "recipes" / "tiny" / "paper.toml"
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(FedStrataError) as caught:
        read_papers(own)
    assert words in str(caught.value)


def test_cells_of_a_part_are_laid_over_those_of_the_part_that_it_is_like(own: Path) -> None:
    """Both cells of the first part are still there, one of them with a change; a third has one of its own."""
    entries = 'rows = ["Local", "FedBN"]\ncolumns = [".1", ".5"]\n'
    first = "[cells]\nLocal = { '.1' = { rounds = 2, epochs = 4 }, '.5' = { runs = false } }"
    part(own, entries + first, "table1")
    second = part(
        own, "like = 'table1'\n[cells]\nLocal = { '.1' = { rounds = 3 } }\nFedBN = { '.5' = { epochs = 7 } }", "table2"
    )
    found = experiments(second)
    assert ("Local", ".5") not in found
    assert (found["Local", ".1"].rounds, found["Local", ".1"].epochs) == (3, 4)
    assert found["FedBN", ".5"].epochs == 7
