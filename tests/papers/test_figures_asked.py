"""What recipes ask to be drawn is data: read from ``[charts]``, refused where it is misspelt, found in the recipes."""

from __future__ import annotations

from typing import Any

import pytest

from fedstrata.errors import FedStrataError
from fedstrata.papers.figures.asked import Asked, read_charts
from fedstrata.papers.figures.material import Place, axis_of, shared_name, value_of
from fedstrata.papers.reading import Recipe, read_papers

PAPERS = read_papers()


def read(given: Any) -> tuple[Asked, ...]:
    return read_charts(given, ["A", "B"], ["x", "y"], "'own/figure1.toml'")


def test_one_table_may_ask_for_several_kinds() -> None:
    assert read({}) == ()
    assert read({"curves": "global.loss", "clients": ["labels"]}) == (
        Asked("curves", ("global.loss",)),
        Asked("clients", ("labels",)),
    )


def test_tables_of_their_own_show_other_rows_and_columns() -> None:
    assert read({"layers": "cosine", "layers_last": "update", "together": True}) == (
        Asked("layers", ("cosine",), together=True),
        Asked("layers_last", ("update",)),
    )
    given = [{"sweep": "clients", "y": "gain", "rows": ["B"]}, {"layers": "cosine", "columns": ["y"], "lines": "rows"}]
    assert read(given) == (
        Asked("sweep", ("clients",), ("gain",), ("B",)),
        Asked("layers", ("cosine",), columns=("y",)),
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"curve": "global.loss"}, "chart or option of charts in 'own/figure1.toml' called 'curve'. Did you mean"),
        ({"curves": True}, "'curves' in the [charts] of 'own/figure1.toml' is no name"),
        ({"curves": []}, "is an empty list"),
        ({"curves": "global.loss", "rows": ["C"]}, "one of the rows in 'own/figure1.toml'"),
        ({"curves": "global.loss", "columns": ["A"]}, "one of the columns in 'own/figure1.toml'"),
        ({"curves": "global.loss", "lines": "cells"}, "lines of charts"),
        ({"curves": "global.loss", "y": "gain"}, "have a 'y', but no 'sweep'"),
        (
            {"curves": "global.loss", "relative": True},
            "'relative' in the [charts] of 'own/figure1.toml' is true",
        ),
        ({"layers": "cosine", "together": 1}, "only goes with 'layers'"),
        ({"rows": ["A"]}, "name no chart; there are curves, sweep"),
        ({"histogram": "biases"}, "a histogram of biases; there is one of 'weights'"),
        ("curves", "are no table: 'curves'"),
    ],
)
def test_mistakes_are_sentences(given: Any, words: str) -> None:
    with pytest.raises(FedStrataError) as caught:
        read(given)
    assert words in str(caught.value)


FIGURES = [part for paper in PAPERS.values() for part in paper.parts.values() if part.kind == "figure" and part.runs]


@pytest.mark.parametrize("recipe", FIGURES, ids=lambda recipe: recipe.name.replace(" ", "-"))
def test_every_figure_says_what_it_shows(recipe: Recipe) -> None:
    assert recipe.charts
    for asked in recipe.charts:
        for key in asked.of if asked.kind == "sweep" else ():
            axis = axis_of(recipe, asked, key)
            assert axis is not None
            assert max(len(places) for places in axis.groups.values()) > 1


def test_a_figure_that_draws_a_table_has_its_numbers() -> None:
    paper = PAPERS["sparse-ft"]
    assert paper.part("figure3").published == paper.part("table2").published != {}
    assert paper.part("figure2").published_at("N_c=10", "J=4").mean == 82.64


def test_where_cells_stand_on_the_axis_of_a_sweep() -> None:
    def groups(paper: str, part: str, place: int = 0) -> dict[str, dict[str, Place]]:
        recipe = PAPERS[paper].part(part)
        asked = [one for one in recipe.charts if one.kind == "sweep"][place]
        axis = axis_of(recipe, asked, asked.of[0])
        assert axis is not None
        return {name: dict(places) for name, places in axis.groups.items()}

    samples = groups("lips", "figure4")
    assert list(samples) == ["C10", "C100"]
    assert [place.number for place in samples["C10"].values()] == [60, 100, 300, 500, 700]
    # The same column sets a sparsity for some methods and a density for others.
    assert [place.number for place in groups("ssfl", "figure2")["C100"].values()] == [0.5, 0.7, 0.8, 0.9, 0.95]
    # Inside the texts of rows; what has no number there stands at the end, by its name.
    assert list(groups("lips", "figure7")[""]) == ["k=1", "k=2", "k=5", "k=10", "k=20"]
    classes = groups("sparse-ft", "figure2")[""]
    assert [place.number for place in classes.values()] == [1, 5, 10, 50, None]
    assert classes["N_c=IID"].name == "IID"
    # Rounds change with the steps, and yet it is one line.
    assert [place.number for place in groups("sparse-ft", "figure2", 1)[""].values()] == [4, 8, 16]


def test_values_of_keys_are_found_alone_and_inside_texts() -> None:
    changes = {"method": "fedbn+lips(every=5)", "method.ssfl.sparsity": 0.5, "clients": 3}
    assert value_of(changes, "clients") == 3
    assert value_of(changes, "sparsity") == 0.5
    assert value_of(changes, "method.lips.every") == 5
    assert value_of(changes, "method.every") == 5
    assert value_of(changes, "method.fedbn.every") is None
    assert value_of(changes, "rounds") is None
    assert shared_name(["C10 ResNet20 alpha 0.1", "C10 ResNet20 alpha 0.4"], "partition.alpha") == "C10 ResNet20"
