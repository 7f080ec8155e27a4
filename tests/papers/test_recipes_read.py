"""Recipes are data: what is misspelt is refused with a sentence, and equal runs have equal hashes."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.papers.cells import Choice, Smaller, cells_of, changes_in_words, settings_hash
from fedstrata.papers.reading import Recipe, StatedClaim, read_papers
from fedstrata.papers.words import statistics_line

SMALL = Path(__file__).parent / "small"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return Path(shutil.copytree(SMALL, tmp_path / "own"))


def recipe(part: str = "table1") -> Recipe:
    return read_papers(SMALL)["tiny"].part(part)


def test_a_part_inherits_from_its_paper() -> None:
    table = recipe()
    assert (table.seeds, table.unit, table.at, list(table.rows)) == (2, "percent", "last", ["FedBN", "Local"])
    assert table.published_at("FedBN", ".1").std == 0.5
    assert table.published_at("Local", ".5").mean is None
    cells = cells_of(table)
    assert [(cell.row, cell.column, cell.seed) for cell in cells[3:6]] == [
        ("Local", ".5", 0), ("FedBN", ".1", 1), ("FedBN", ".5", 1),
    ]  # fmt: skip
    assert cells[0].experiment == Experiment(
        data="digits", model="mlp(hidden=8)", clients=3, partition="dirichlet(alpha=0.1)", epochs=1, engine="stacked",
        rounds=2, method="fedbn",
    )  # fmt: skip
    assert all(cell.comparable for cell in cells)


@pytest.mark.parametrize(
    ("file", "old", "new", "words"),
    [
        ("tiny/paper.toml", "clients = 3", "client = 3", "[experiment] of 'tiny/paper.toml'"),
        ("tiny/table1.toml", "seeds = 2", "seed = 2", "Did you mean 'seeds'?"),
        (
            "tiny/table1.toml",
            'FedBN = "fedbn"',
            "FedBN = { rounds = 3 }",
            "The row 'FedBN' of 'tiny/table1.toml' has no",
        ),
        ("tiny/table1.toml", '"partition.alpha"', '"partitions.alpha"', "column '.1' of 'tiny/table1.toml'"),
        ("tiny/table1.toml", 'over = "Local"', 'over = "Lokal"', "which a claim names, called 'Lokal'"),
        ("tiny/table1.toml", "by = 4.8", "by = -4.8", "'FedBN' is better than 'Local', a number above 0, not -4.8."),
        (
            "tiny/table1.toml",
            "seeds = 2",
            'number = "client_after.acuracy.mean"',
            "'client_after.acuracy.mean', 'acuracy'. Did you mean 'accuracy'?",
        ),
        ("tiny/table1.toml", 'columns = [".1"]', 'columns = [".2"]', "which a claim names, called '.2'"),
        ("tiny/table1.toml", '".5" = { }', "", "the row 'FedBN' and the column '.5', which"),
        ("tiny/figure1.toml", 'kind = "figure"', 'kind = "picture"', "kind, which 'tiny/figure1.toml' asks for"),
        ("tiny/table1.toml", 'title = "Accuracy on digits"', "", "'tiny/table1.toml' has no title"),
    ],
)
def test_mistakes_are_sentences_that_name_the_file(own: Path, file: str, old: str, new: str, words: str) -> None:
    path = own / "recipes" / file
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(FedStrataError) as caught:
        read_papers(own)
    assert words in str(caught.value)


def test_published_numbers_need_a_recipe_and_stand_once(own: Path) -> None:
    numbers = own / "published.csv"
    text = numbers.read_text()
    numbers.write_text(f"{text}tiny,table9,a,b,1,,\n")
    with pytest.raises(FedStrataError, match=r"there is no recipe 'tiny/table9\.toml'"):
        read_papers(own)
    numbers.write_text(f"{text}tiny,table1,FedBN,.1,1,,\n")
    with pytest.raises(FedStrataError, match=r"repeats tiny / table1 / FedBN / \.1"):
        read_papers(own)
    numbers.write_text(text.replace("90.5", "about 90"))
    with pytest.raises(FedStrataError, match="'about 90' in line 2"):
        read_papers(own)


def test_a_row_and_a_column_do_not_set_the_same_key(own: Path) -> None:
    path = own / "recipes" / "tiny" / "table1.toml"
    path.write_text(path.read_text().replace('".5" = { }', '".5" = { method = "local" }'))
    with pytest.raises(FedStrataError, match="both set method"):
        cells_of(read_papers(own)["tiny"].part("table1"))


def test_a_hash_knows_what_decides_and_nothing_else() -> None:
    base = Experiment(partition="dirichlet:0.5", rounds=7)
    same = base.with_changes(
        {
            "partition": "dirichlet(alpha=0.5)",
            "device": "cpu",
            "data_root": "x",
            "checkpoint_every": 3,
            "engine": "loop",
        }
    )
    assert settings_hash(base) == settings_hash(same)
    other = [
        {"seed": 1},
        {"rounds": 8},
        {"partition": "dirichlet:0.1"},
        {"method": "fedprox(mu=0.5)"},
        {"metrics": "f1"},
    ]
    assert len({settings_hash(base.with_changes(changes)) for changes in ({}, *other)}) == 6
    assert settings_hash(Experiment(method="fedprox:0.5")) == settings_hash(Experiment(method="fedprox(mu=0.5)"))


def test_tables_share_runs() -> None:
    shared = {cell.settings for cell in cells_of(recipe())} & {cell.settings for cell in cells_of(recipe("figure1"))}
    assert len(shared) == 1


def test_smaller_runs_are_another_experiment_and_not_comparable() -> None:
    cells = cells_of(recipe(), 1, Smaller(scale=0.5))
    [cell, *_] = cells
    assert (cell.experiment.rounds, cell.experiment.data) == (1, "fraction(of=digits, keep=0.5)")
    assert not cell.comparable
    assert not cells_of(recipe(), 1, Smaller(rounds=1))[0].comparable
    assert cells_of(recipe(), 1, Smaller(rounds=2))[0].comparable
    words = "Smaller than in the paper: 50 % of the samples and of the rounds."
    assert Smaller(scale=0.5).words(cells) == words
    with pytest.raises(FedStrataError, match="scale of 2"):
        Smaller(scale=2)


def test_cells_are_chosen_by_data_row_method_or_column() -> None:
    def chosen(**words: tuple[str, ...]) -> list[tuple[str, str]]:
        return [(cell.row, cell.column) for cell in cells_of(recipe(), 1, choice=Choice(**words))]

    assert chosen(methods=("local",), columns=(".5",)) == [("Local", ".5")]
    assert chosen(methods=("FedBN",)) == [("FedBN", ".1"), ("FedBN", ".5")]
    assert len(chosen(only=("digits",))) == 4
    assert chosen(only=(".1",)) == [("FedBN", ".1"), ("Local", ".1")]
    with pytest.raises(FedStrataError, match=r"no row or method of 'tiny table1' called 'loca'\. Did you mean"):
        chosen(methods=("FedBN", "loca"))
    with pytest.raises(FedStrataError, match=r"no data, model or column .* called 'cifar'"):
        chosen(only=("cifar",))
    with pytest.raises(FedStrataError, match=r"is all of what is asked for: \.1, \.5; ask for less"):
        chosen(only=(".1",), columns=(".5",))


def test_a_word_is_not_found_in_the_middle_of_a_number() -> None:
    def columns(paper: str, word: str) -> list[str]:
        part = read_papers()[paper].part("table1" if paper == "ssfl" else "table2")
        return list(dict.fromkeys(cell.column for cell in cells_of(part, 1, choice=Choice(only=(word,)))))

    assert "CIFAR-10" in columns("ssfl", "CIFAR-10")
    assert "CIFAR-100" not in columns("ssfl", "CIFAR-10")
    assert columns("lips", "c10") == ["C10 .1", "C10 .5", "C10 1"]
    assert columns("lips", "C100") == ["C100 .01", "C100 .1", "C100 .5"]
    assert columns("lips", "10 1") == ["C10 1"]


def test_the_name_of_a_row_means_that_row_also_where_others_have_its_method() -> None:
    table = read_papers()["fedlws"].part("table1")

    def rows(*words: str) -> set[str]:
        return {cell.row for cell in cells_of(table, 1, choice=Choice(methods=words, columns=("C10 .1",)))}

    assert rows("FedAvg+LWS") == {"FedAvg+LWS"}
    kinds = ("", " released", " drawn", " all", " released all")
    assert rows("fedavg+lws") == {f"FedAvg+LWS{kind}" for kind in kinds}
    assert rows("FedAvg", "fedprox") == {"FedAvg", "FedProx"}
    assert rows("fedprox+lws") == {"FedProx+LWS", "FedProx+LWS released"}


def test_none_takes_back_what_a_paper_says_of_a_key(own: Path) -> None:
    paper, table = own / "recipes" / "tiny" / "paper.toml", own / "recipes" / "tiny" / "table1.toml"
    paper.write_text(paper.read_text().replace("clients = 3", "clients = 3\nvalidation_fraction = 0.3"))
    fractions = {cell.experiment.validation_fraction for cell in cells_of(read_papers(own)["tiny"].part("table1"))}
    assert fractions == {0.3}
    row = 'FedBN = { method = "fedbn", validation_fraction = "none" }'
    table.write_text(table.read_text().replace('FedBN = "fedbn"', row))
    cells = cells_of(read_papers(own)["tiny"].part("table1"))
    assert {(cell.row, cell.experiment.validation_fraction) for cell in cells} == {("FedBN", None), ("Local", 0.3)}
    assert all(cell.comparable for cell in cells)


def test_a_parameter_of_a_named_component_leaves_others_alone(own: Path) -> None:
    table = own / "recipes" / "tiny" / "table1.toml"
    text = table.read_text().replace('FedBN = "fedbn"', 'FedBN = { method = "fedbn", optimiser = "adamw" }')
    table.write_text(text.replace('{ "partition.alpha"', '{ "optimiser.adamw.amsgrad" = true, "partition.alpha"'))
    cells = cells_of(read_papers(own)["tiny"].part("table1"), 1)
    assert {(cell.row, cell.experiment.optimiser) for cell in cells if cell.column == ".1"} == {
        ("FedBN", "adamw(amsgrad=true)"), ("Local", Experiment().optimiser),
    }  # fmt: skip
    assert not any(cell.problem for cell in cells)
    table.write_text(text.replace('{ "partition.alpha"', '{ "optimiser.adamx.amsgrad" = true, "partition.alpha"'))
    with pytest.raises(FedStrataError, match=r"'optimiser\.adamx\.amsgrad' .* is a parameter of no row's optimiser"):
        cells_of(read_papers(own)["tiny"].part("table1"), 1)


def with_a_reading(own: Path, of: str, column: str = "{ }") -> Recipe:
    """The small table with one more row, which reads another one differently."""
    table = own / "recipes" / "tiny" / "table1.toml"
    row = f'FedBN = "fedbn"\n"FedBN longer" = {{ reading_of = "{of}", method = "fedbn", epochs = 2 }}'
    text = (SMALL / "recipes" / "tiny" / "table1.toml").read_text()
    table.write_text(text.replace('FedBN = "fedbn"', row).replace('".5" = { }', f'".5" = {column}'))
    return read_papers(own)["tiny"].part("table1")


def test_a_further_reading_of_a_row_is_held_against_the_published_number_of_that_row(own: Path) -> None:
    table = with_a_reading(own, of="FedBN")
    papers, further = (table.published_at(row, ".1") for row in ("FedBN", "FedBN longer"))
    assert (further.mean, further.std) == (papers.mean, papers.std) == (90.5, 0.5)
    assert further.note == "another reading of the row FedBN, beside its published number"
    cells = {cell.row: cell for cell in cells_of(table, 1) if cell.column == ".1"}
    assert (cells["FedBN longer"].experiment.epochs, cells["FedBN"].experiment.epochs) == (2, 1)
    assert cells["FedBN longer"].comparable


@pytest.mark.parametrize(
    ("of", "column", "words"),
    [
        ("FedBM", "{ }", "row in 'tiny/table1.toml', of which 'FedBN longer' is a reading, called 'FedBM'"),
        ("FedBN", '{ reading_of = ".1" }', "Only whole rows are readings of others, but 'tiny/table1.toml' says so"),
    ],
)
def test_only_a_row_with_a_number_has_further_readings(own: Path, of: str, column: str, words: str) -> None:
    with pytest.raises(FedStrataError, match=words):
        with_a_reading(own, of, column)


def test_a_further_reading_has_no_published_number_of_its_own(own: Path) -> None:
    with_a_reading(own, of="FedBN")
    numbers = own / "published.csv"
    numbers.write_text(numbers.read_text() + "tiny,table1,FedBN longer,.1,1.0,,\n")
    with pytest.raises(FedStrataError, match="so that it has no published number of its own"):
        read_papers(own)


def test_what_published_numbers_are_is_said_by_paper_part_or_column(own: Path) -> None:
    table = recipe()
    assert (table.spread, table.middle, table.published_seeds) == ("deviation", "mean", 2)
    assert recipe("figure1").published_seeds == 2
    folder = own / "recipes" / "tiny"
    paper, part = folder / "paper.toml", folder / "table1.toml"
    text = paper.read_text().replace("published_seeds = 2", "published_seeds = 10")
    paper.write_text('spread = "interval95"\nmiddle = "median"\n' + text)
    part.write_text(part.read_text().replace('".5" = { }', '".5" = { published_seeds = 50 }'))
    table = read_papers(own)["tiny"].part("table1")
    assert [(one.spread, one.middle, one.published_seeds) for one in (table, table.of_cell("FedBN", ".5"))] == [
        ("interval95", "median", 10), ("interval95", "median", 50),
    ]  # fmt: skip
    assert statistics_line(table) == "medians of 10 runs (.5: 50), ± half of the 95 % interval"
    part.write_text('spread = "variance"\n' + part.read_text())
    with pytest.raises(FedStrataError, match="asks for, called 'variance'"):
        read_papers(own)


def test_a_claim_of_several_columns_has_a_number_for_each(own: Path) -> None:
    path = own / "recipes" / "tiny" / "table1.toml"
    old = 'by = 4.8\ncolumns = [".1"]'
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, 'by = { ".5" = 1, ".1" = 4.8 }\nmain = true'))
    [first, second] = read_papers(own)["tiny"].part("table1").claims
    assert first == StatedClaim("FedBN", "Local", 1.0, (".5",), True)
    assert second == StatedClaim("FedBN", "Local", 4.8, (".1",), True)
    path.write_text(text.replace(old, 'by = { ".2" = 1 }'))
    with pytest.raises(FedStrataError, match=r"which a claim names, called '\.2'"):
        read_papers(own)
    path.write_text(text.replace(old, 'by = { ".1" = 1 }\ncolumns = [".1"]'))
    with pytest.raises(FedStrataError, match=r"A claim in 'tiny/table1\.toml' has columns beside"):
        read_papers(own)


def test_a_column_is_derived_from_a_part_that_there_is(own: Path) -> None:
    path = own / "recipes" / "tiny" / "table1.toml"
    path.write_text(
        path.read_text().replace('".5" = { }', '".5" = { }\nrank = { derived = "mean_rank", of = "table9" }')
    )
    with pytest.raises(FedStrataError, match="no part of the paper 'tiny' called 'table9'"):
        read_papers(own)


def test_what_is_changed_is_told_in_words() -> None:
    [cell, *_] = cells_of(recipe(), 1, Smaller(rounds=1))
    assert changes_in_words(cell) == "rounds=1"
    assert changes_in_words(cells_of(recipe(), 1)[0]) == ""
