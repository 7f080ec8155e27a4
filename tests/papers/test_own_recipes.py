"""Recipes of one's own: what a user writes wrongly is a sentence that names the file, before anything is run."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedstrata.cli import main
from fedstrata.errors import FedStrataError
from fedstrata.papers.cells import Choice, Smaller, cells_of
from fedstrata.papers.reading import PAPERS, Recipe, read_papers

SMALL = Path(__file__).parent / "small"
METHOD = """
from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods import Facts, Part, Touches, methods


@methods.register("mine")
@dataclass(frozen=True)
class Mine(Part):
    \"\"\"Change nothing.\"\"\"

    facts: ClassVar[Facts] = Facts("averaging", "A. Author, A method of mine, 2026", "https://example.org")
    touches: ClassVar[Touches] = Touches()
    size: int = 1
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SMALL, tmp_path / "own"))


def changed(own: Path, file: str, old: str, new: str) -> None:
    path = own / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new, 1))


def table(own: Path) -> Recipe:
    return read_papers(own)["tiny"].part("table1")


TABLE, PAPER = "recipes/tiny/table1.toml", "recipes/tiny/paper.toml"


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        (TABLE, "seeds = 2", 'seeds = "three"', "The seeds of 'tiny/table1.toml' is 'three'; write a whole number"),
        (TABLE, "seeds = 2", "seeds = 0", "The seeds of 'tiny/table1.toml' is 0; write a whole number of at least 1."),
        (TABLE, "seeds = 2", "seeds = -2", "The seeds of 'tiny/table1.toml' is -2;"),
        (TABLE, "seeds = 2", "seeds = 2.5", "The seeds of 'tiny/table1.toml' is 2.5;"),
        (TABLE, "seeds = 2", "seeds = true", "The seeds of 'tiny/table1.toml' is True;"),
        (PAPER, "published_seeds = 2", 'published_seeds = "x"', "The published_seeds of 'tiny/paper.toml' is 'x';"),
        (PAPER, "published_seeds = 2", "published_seeds = 0", "The published_seeds of 'tiny/paper.toml' is 0;"),
        (
            TABLE,
            '".5" = { }',
            '".5" = { published_seeds = 0 }',
            "published_seeds of the column '.5' of 'tiny/table1.toml'",
        ),
        (
            TABLE,
            '"local" }',
            '"local", runs = "no" }',
            "The runs of the row 'Local' of 'tiny/table1.toml' is 'no'; write",
        ),
        (TABLE, '"local" }', '"local", columns = ".1" }', "is '.1'; write a list of names, columns = [\"...\"]."),
        (TABLE, '"local" }', '"local", columns = [".2"] }', "which the row 'Local' names, called '.2'"),
        (
            TABLE,
            '"local" }',
            '"local", number = 3 }',
            "The number of the row 'Local' of 'tiny/table1.toml' is 3; write a",
        ),
        (TABLE, "seeds = 2", "note = 3", "The note of 'tiny/table1.toml' is 3; write a text"),
        (TABLE, "seeds = 2", "against = 3", "The against of 'tiny/table1.toml' is 3; write a list of names"),
        (TABLE, "seeds = 2", "cells = 3", "The cells of 'tiny/table1.toml' are no table of rows and columns: 3."),
        (TABLE, "[[claims]]", "[cells]\nFedBN = 3\n[[claims]]", "The [cells] of 'tiny/table1.toml' have 3 in the row"),
        (TABLE, "[[claims]]", "[cells]\nFedBN = { '.1' = 3 }\n[[claims]]", "have {'.1': 3} in the row 'FedBN'; write"),
        (TABLE, "[[claims]]", "[claims]", "The claims of 'tiny/table1.toml' are no tables:"),
        (TABLE, "by = 4.8", "by = inf", "a number above 0, not inf."),
        (TABLE, "by = 4.8", 'main = "yes"', "The main of a claim in 'tiny/table1.toml' is 'yes'; write true or false."),
        (
            TABLE,
            'columns = [".1"]',
            'columns = ".1"',
            "The columns of a claim in 'tiny/table1.toml' is '.1'; write a list",
        ),
        (TABLE, 'row = "FedBN"', 'row = ["FedBN"]', "row in 'tiny/table1.toml', which a claim names, called"),
        (TABLE, '"local" }', '"local", imports = "m.py" }', "names files to import; these stand in [experiment]."),
        (
            TABLE,
            "seeds = 2",
            'number = "client_after.accuracy.man"',
            "statistic over clients, as 'tiny/table1.toml' has it in 'client_after.accuracy.man', called 'man'",
        ),
        (TABLE, '"local" }', '"local", number = "client_after.accuracy" }', "write 'client_after.accuracy.mean', or"),
        (TABLE, "seeds = 2", 'number = "global.accuracy.mean"', "not summed up over clients; write 'global.accuracy'."),
        (TABLE, '".5" = { }', '".5" = { number = "global.acuracy" }', "'acuracy'. Did you mean 'accuracy'?"),
        (PAPER, "published_seeds = 2", "", "does not say of how many runs; write it like published_seeds = 3"),
        (TABLE, '"local" }', '"local", own_setting = true }', "Only whole columns are settings of one's own"),
        (
            TABLE,
            '".5" = { }',
            '".5" = { own_setting = 1 }',
            "own_setting of the column '.5' of 'tiny/table1.toml' is 1;",
        ),
        (TABLE, '".5" = { }', '".5" = { own_setting = true }', "says the paper does not have; leave out the number"),
    ],
)
def test_mistakes_in_recipes_name_the_key_and_what_is_possible(
    own: Path, file: str, old: str, new: str, words: str
) -> None:
    changed(own, file, old, new)
    with pytest.raises(FedStrataError) as caught:
        read_papers(own)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tiny,table1,Local,.1,nan,,", "The mean 'nan' in line 3 of 'published.csv' is no number; leave it empty"),
        ("tiny,table1,Local,.1,inf,,", "The mean 'inf' in line 3"),
        ("tiny,table1,Local,.1,60,-0.5,", "The std '-0.5' in line 3 of 'published.csv' is below 0;"),
        ("tiny,table1,Local,.1,95,0,0.5,", "There are 8 values in line 3 of 'published.csv', not 7; numbers have a"),
        ("tiny,table1,Local,.1,95,0", "There are 6 values in line 3 of 'published.csv', not 7; numbers have a"),
        ("tiny,table1,Local,.1,95,0,0.5", "The note '0.5' in line 3 of 'published.csv' is a number, and so none;"),
    ],
)
def test_mistakes_in_published_numbers_name_the_line(own: Path, line: str, words: str) -> None:
    changed(own, "published.csv", "tiny,table1,Local,.1,60,,", line)
    with pytest.raises(FedStrataError) as caught:
        read_papers(own)
    assert words in str(caught.value)


def test_published_numbers_as_spreadsheets_write_them(own: Path) -> None:
    numbers = own / "published.csv"
    text = numbers.read_text()
    numbers.write_text(text, encoding="utf-8-sig", newline="\r\n")
    assert table(own).published == read_papers(SMALL)["tiny"].part("table1").published
    numbers.write_text(text.replace(",", ";"))
    with pytest.raises(FedStrataError, match=r"but with 'paper;part;row;.*commas stand between them"):
        read_papers(own)
    numbers.write_bytes(text.replace("31.", "31 \N{EURO SIGN}.").encode("cp1252"))
    with pytest.raises(FedStrataError, match="cannot be read as a CSV in UTF-8"):
        read_papers(own)


def test_only_texts_have_parameters(own: Path) -> None:
    changed(own, TABLE, '"local" }', '"local", rounds = { most = 1 } }')
    problems = {cell.problem for cell in cells_of(table(own), 1) if cell.row == "Local"}
    assert problems == {"There is no 'most' to change in the rounds '2'."}
    changed(own, TABLE, "rounds = { most = 1 }", "partition = 2.5")
    with pytest.raises(FedStrataError, match=r"In 'tiny table1', row 'Local', column '\.1': .* parameter 'partition'"):
        cells_of(table(own))


def test_of_two_parts_one_is_like_the_other(own: Path) -> None:
    changed(own, TABLE, "seeds = 2", 'like = "figure1"')
    changed(own, "recipes/tiny/figure1.toml", "[experiment]", 'like = "table1"\n[experiment]')
    with pytest.raises(FedStrataError, match="is like 'table1', which is like it; one of them has to begin"):
        read_papers(own)


def test_a_mistake_is_no_bug(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(own, TABLE, "seeds = 2", 'seeds = "three"')
    assert main(["paper", "--recipes", str(own), "tiny", "table1"]) == 2
    assert "is 'three'; write a whole number" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("key", ["validation = 20", "validation_fraction = 0.2"])
def test_models_are_chosen_where_samples_are_held_out(own: Path, key: str) -> None:
    changed(own, TABLE, "seeds = 2", 'at = "validated"')
    words = r"'tiny table1', row 'FedBN', column '\.1': at = \"validated\" reports models"
    with pytest.raises(FedStrataError, match=words):
        cells_of(table(own))
    changed(own, TABLE, "rounds = 2", f"rounds = 2\n{key}")
    assert len(cells_of(table(own), 1)) == 4
    changed(own, TABLE, 'at = "validated"', 'at = "validated_before"')
    if key == "validation = 20":  # of all samples: no client has any to judge its own model by
        with pytest.raises(FedStrataError, match=r"write validation_fraction = 0\.2 of each client's samples in"):
            cells_of(table(own))
    else:
        assert len(cells_of(table(own), 1)) == 4


def test_nobody_says_how_many_runs_are_behind_a_published_number(own: Path) -> None:
    changed(own, PAPER, "published_seeds = 2\n", "")
    numbers = own / "published.csv"
    numbers.write_text(numbers.read_text().replace(",0.5,", ",,").replace(",0.1,", ",,"))
    assert (table(own).seeds, table(own).published_seeds) == (2, 1)
    changed(own, TABLE, '".5" = { }', '".5" = { published_seeds = 4 }')
    assert table(own).of_cell("FedBN", ".5").published_seeds == 4


def test_tables_of_ssfl_of_which_no_number_of_runs_is_stated_are_single_numbers() -> None:
    parts = read_papers()["ssfl"].parts
    counts = {name: parts[name].published_seeds for name in ("table1", "table2", "table3", "table5", "table6")}
    assert counts == {"table1": 5, "table2": 5, "table3": 1, "table5": 1, "table6": 1}
    runs = {column: parts["figure2"].of_cell("SSFL", column).published_seeds for column in ("C10 50%", "C10 70%")}
    assert runs == {"C10 50%": 5, "C10 70%": 1}


def test_settings_of_ones_own_are_columns_that_say_so(own: Path) -> None:
    assert table(own).own_settings == frozenset()
    changed(own, TABLE, '".5" = { }', '".5" = { }\n"another model" = { own_setting = true, epochs = 2 }')
    assert table(own).own_settings == {"another model"}
    papers = read_papers()
    ours = {part.name for paper in papers.values() for part in paper.parts.values() if part.own_settings}
    assert ours == {f"sparse-ft {part}" for part in ("table2", "table3", "figure3", "figure4")}
    assert papers["sparse-ft"].part("table2").own_settings == {"Small ViT"}


# Choosing -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("paper", "part"), [("lips", "figure7"), ("ssfl", "figure7")])
def test_every_column_of_a_shipped_part_can_be_chosen(paper: str, part: str) -> None:
    recipe = read_papers(PAPERS)[paper].part(part)
    for column in recipe.columns:
        chosen = cells_of(recipe, 1, choice=Choice.read(recipe, None, None, column))
        assert {cell.column for cell in chosen} == {column}
    assert Choice.read(recipe, None, None, ", ".join(recipe.columns)).columns == tuple(recipe.columns)


def test_names_with_commas_are_found_in_lists(own: Path) -> None:
    changed(own, TABLE, '".5" = { }', '".5" = { }\n".5, longer" = { epochs = 2 }')

    def choose(text: str) -> tuple[str, ...]:
        return Choice.read(table(own), None, None, text).columns

    assert choose(".5, longer") == (".5, longer",)
    assert choose(".5, .5, Longer,.1") == (".5", ".5, Longer", ".1")
    assert choose(".5,longer") == (".5", "longer")
    chosen = cells_of(table(own), 1, choice=Choice.read(table(own), None, None, ".5, Longer"))
    assert {cell.column for cell in chosen} == {".5, longer"}


# What is smaller than in the paper ------------------------------------------------------------------------------------


def test_only_what_is_smaller_is_called_smaller(own: Path) -> None:
    def said(**changes: float) -> str:
        smaller = Smaller(**changes)  # type: ignore[arg-type]
        return smaller.words(cells_of(table(own), 1, smaller))

    assert said() == ""
    assert said(rounds=2) == ""
    assert said(rounds=1) == "Smaller than in the paper: 1 round."
    assert said(rounds=5) == "Longer than in the paper: 5 rounds."
    assert said(scale=0.5) == "Smaller than in the paper: 50 % of the samples and of the rounds."
    assert said(scale=0.5, rounds=2) == "Smaller than in the paper: 50 % of the samples."
    assert said(scale=0.5, rounds=3) == (
        "Smaller than in the paper: 50 % of the samples. Longer than in the paper: 3 rounds."
    )
    changed(own, TABLE, '".5" = { }', '".5" = { rounds = 9 }')
    assert said(rounds=5) == "5 rounds are fewer than some cells have in the paper, and more than others."


# Methods of one's own -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("fresh_imports")
def test_a_recipe_imports_a_method_from_its_own_folder(own: Path, tmp_path: Path) -> None:
    changed(own, TABLE, "rounds = 2", 'rounds = 2\nimports = ["../my_method.py"]')
    changed(own, TABLE, '"local" }', '"mine", "method.mine.size" = 2 }')
    with pytest.raises(FedStrataError, match=r"In 'tiny table1', row 'FedBN', column '\.1': There is no file"):
        cells_of(table(own))
    file = own / "recipes" / "my_method.py"
    file.write_text(METHOD)
    first = cells_of(table(own), 1)
    assert {cell.experiment.method for cell in first if cell.row == "Local"} == {"mine(size=2)"}
    assert not any(cell.problem for cell in first)
    out = tmp_path / "out"
    command = [
        "paper",
        "--recipes",
        str(own),
        "tiny",
        "table1",
        "--seeds",
        "1",
        "--columns",
        ".5",
        "--no-report",
        "--quiet",
    ]
    assert main([*command, "--out", str(out)]) == 0
    runs = {path.name for path in (out / "runs").glob("*/") if (path / "summary.json").exists()}
    assert runs == {cell.settings for cell in first if cell.column == ".5"}
    file.write_text(METHOD.replace("Change nothing", "Still change nothing"))
    assert not {cell.settings for cell in cells_of(table(own), 1)} & {cell.settings for cell in first}
