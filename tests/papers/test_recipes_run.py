"""Every recipe runs from its file to its page, as a toy, on generated data of the right shape, so that none rots."""

from __future__ import annotations

import dataclasses
import shutil
import warnings
from pathlib import Path

import pytest
from generated import MANY_TESTS, TESTS, generated, toy

from fedstrata.methods import Method
from fedstrata.papers.at_hand import RunsAtHand
from fedstrata.papers.availability import Here
from fedstrata.papers.cells import Cell, cells_of
from fedstrata.papers.deriving import with_derived
from fedstrata.papers.figures.kinds import draw
from fedstrata.papers.figures.material import Material
from fedstrata.papers.figures.section import missing_words
from fedstrata.papers.judging import NOT_COMPARABLE, NOT_RUN, judge
from fedstrata.papers.page import write_page
from fedstrata.papers.reading import PAPERS, PUBLISHED, Recipe, read_papers
from fedstrata.papers.running import collect, perform, plan
from fedstrata.progress import Silence
from fedstrata.runs.preparing import Ingredients

RECIPES = read_papers() if (PAPERS / PUBLISHED).exists() else {}
PARTS = [(paper.name, part.part) for paper in RECIPES.values() for part in paper.parts.values() if cells_of(part, 1)]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:fedstrata")


@pytest.fixture(autouse=True)
def tables_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.papers.page.charts_are_possible", lambda: False)


def toys(recipe: Recipe, most: int | None = None) -> list[Cell]:
    """Every row once and every column once, whose methods and models exist here."""
    cells, here = cells_of(recipe, 1), Here(data=False)
    firsts = {**{cell.row: cell for cell in reversed(cells)}, **{("", cell.column): cell for cell in reversed(cells)}}
    chosen = {(cell.row, cell.column): cell for cell in firsts.values()}.values()
    small = [
        dataclasses.replace(cell, experiment=cell.experiment.with_changes(toy(cell.experiment))) for cell in chosen
    ]
    return [cell for cell in small if not here.problem(cell)][:most]


def needed(cell: Cell) -> tuple[str, int]:
    """The data of a cell, and how many samples there must be to test on."""
    proxy = Method.make(cell.experiment.method).needs.proxy
    return cell.experiment.data, MANY_TESTS if proxy else TESTS


def run(paper: str, part: str, folder: Path, most: int | None = None) -> None:
    recipe = RECIPES[paper].part(part)
    cells = toys(recipe, most)
    if not cells:
        pytest.skip("its methods or models do not exist yet")
    kept, failed = [], {}
    for data, tests in dict.fromkeys(map(needed, cells)):
        own = [cell for cell in cells if needed(cell) == (data, tests)]
        planned = plan(own, folder, given=Ingredients(dataset=generated(own[0].experiment, tests)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            failed |= perform(planned, Silence(len(own), len(own)))
        kept += collect(planned, "a test")
    assert failed == {}
    judged = with_derived(judge(recipe, cells, kept))
    assert {one.verdict for one in judged.cells} <= {NOT_COMPARABLE, NOT_RUN}
    assert len(kept) == len(cells)
    page = write_page(RECIPES[paper], judged, cells, RunsAtHand(folder), folder / "page.html")
    text = page.read_text()
    assert "Published and ours" in text
    assert (", redrawn</h2>" in text) == bool(recipe.charts)
    draw_all(Material(judged, cells, RunsAtHand(folder)))


def draw_all(material: Material) -> None:
    """Every chart that a recipe asks for can be drawn of runs that were done: they hold all that it names."""
    pytest.importorskip("altair")
    for asked in material.recipe.charts:
        figures = draw(material, asked)
        said = [words for words in missing_words(material) if "'cosine'" not in words]  # it begins with the third round
        assert figures or missing_words(material)
        assert not [words for words in said if "holds no" in words or "nothing of the recipe" in words]
        for figure in figures:
            assert all(panel.drawing.specification()["datasets"]["rows"] for panel in figure.panels)


@pytest.mark.slow
@pytest.mark.parametrize(("paper", "part"), PARTS)
def test_every_recipe(paper: str, part: str, tmp_path: Path) -> None:
    run(paper, part, tmp_path)
    shutil.rmtree(tmp_path)  # the models of all would fill a disk


@pytest.mark.skipif(not RECIPES, reason="there are no recipes")
@pytest.mark.parametrize(("paper", "part"), [("lips", "table2"), ("lips", "figure1")])
def test_a_table_and_a_figure(paper: str, part: str, tmp_path: Path) -> None:
    run(paper, part, tmp_path, most=2 if part.startswith("table") else 1)
