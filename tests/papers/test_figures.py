"""Figures redrawn from runs: the axes, the lines and the published marks of their charts, and what is said instead."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fedstrata.papers.at_hand import RunsAtHand
from fedstrata.papers.cells import Cell, cells_of
from fedstrata.papers.figures import marks
from fedstrata.papers.figures.asked import Asked
from fedstrata.papers.figures.glance import cells_at_a_glance, claims_at_a_glance
from fedstrata.papers.figures.kinds import draw
from fedstrata.papers.figures.marks import Ruler
from fedstrata.papers.figures.material import Material
from fedstrata.papers.figures.panels import Figure, new_row
from fedstrata.papers.figures.section import missing_words, redrawn_section
from fedstrata.papers.judging import Judged, JudgedCell, judge
from fedstrata.papers.keeping import Kept, asked
from fedstrata.papers.page import sections_of, write_page, write_part_figures
from fedstrata.papers.published import Published
from fedstrata.papers.reading import Paper, Recipe, read_papers
from fedstrata.papers.running import collect, perform, plan
from fedstrata.progress import Silence
from fedstrata.significance import Estimate

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

SMALL = Path(__file__).parent / "small"
ROOT = Path(__file__).parents[2]
FIGURE = """
title = "All kinds of charts"
kind = "figure"
seeds = 2
number = "client_after.accuracy.mean"

[experiment]
data = "fraction(of='digits', keep=0.3)"
rounds = 2
diagnose = "weights(every=1)+drift(details_every=1)"

[rows]
FedAvg = "fedavg"
FedProx = "fedprox(mu=0.01)"

[columns]
"alpha 0.1" = { "partition.alpha" = 0.1 }
"alpha 0.5" = { "partition.alpha" = 0.5 }

[[charts]]
curves = "client_after.accuracy.mean"
sweep = "partition.alpha"
layers = "cosine"
layers_last = "update"
bars = "client_after.accuracy.mean"
histogram = "weights"
clients = ["labels", "client_after.accuracy"]
matrices = "drift.similarity"
"""
Drawn = Callable[[str], list[Figure]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Papers with a figure of all kinds, of which two numbers were published."""
    own = Path(shutil.copytree(SMALL, tmp_path_factory.mktemp("papers") / "own"))
    (own / "recipes/tiny/figure9.toml").write_text(FIGURE)
    with (own / "published.csv").open("a") as file:
        file.write("tiny,figure9,FedAvg,alpha 0.1,70.5,1.5,\ntiny,figure9,FedAvg,alpha 0.5,60,,\n")
    return own


@pytest.fixture(scope="module")
def paper(place: Path) -> Paper:
    return read_papers(place)["tiny"]


@pytest.fixture(scope="module")
def cells(paper: Paper) -> list[Cell]:
    return cells_of(paper.part("figure9"))


@pytest.fixture(scope="module")
def folder(cells: list[Cell], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of all but one cell."""
    runs = tmp_path_factory.mktemp("runs")
    there = [cell for cell in cells if (cell.row, cell.column) != ("FedProx", "alpha 0.5")]
    assert perform(plan(there, runs), Silence(len(there), 1)) == {}
    return runs


@pytest.fixture(scope="module")
def judged(paper: Paper, cells: list[Cell], folder: Path) -> Judged:
    return judge(paper.part("figure9"), cells, collect(plan(cells, folder), "a test"))


@pytest.fixture
def material(judged: Judged, cells: list[Cell], folder: Path) -> Material:
    return Material(judged, cells, RunsAtHand(folder))


@pytest.fixture
def drawn(material: Material) -> Drawn:
    kinds = {one.kind: one for one in material.recipe.charts}
    return lambda kind: draw(material, kinds[kind])


def rows(figure: Figure, panel: int = 0) -> list[dict[str, Any]]:
    return figure.panels[panel].drawing.specification()["datasets"]["rows"]  # type: ignore[no-any-return]


def axis(figure: Figure, channel: str, panel: int = 0) -> dict[str, Any]:
    """What the lines or bars of a panel encode on one axis."""
    specification = figure.panels[panel].drawing.specification()
    parts = specification.get("layer", [specification])
    found = [part["encoding"][channel] for part in parts if part.get("encoding", {}).get(channel, {}).get("title")]
    return found[0]  # type: ignore[no-any-return]


def test_curves_have_a_panel_for_each_column_and_a_line_for_each_row(drawn: Drawn, judged: Judged) -> None:
    [figure] = drawn("curves")
    assert [panel.title for panel in figure.panels] == ["alpha 0.1", "alpha 0.5"]
    first = rows(figure)
    assert [(row["line"], row["at"]) for row in first] == [("FedAvg", 1), ("FedAvg", 2), ("FedProx", 1), ("FedProx", 2)]
    assert (axis(figure, "x")["title"], axis(figure, "y")["title"]) == ("round", "accuracy, %")
    # The published number stands at the last round; ours is in the paper's unit, over two seeds.
    assert [row["published"] for row in first] == [None, 70.5, None, None]
    assert first[1]["published_spread"] == 1.5
    ours = judged.cells[0].ours
    assert ours is not None
    assert first[1]["value"] == pytest.approx(ours.mean, rel=1e-3)
    assert first[1]["spread"] == pytest.approx(ours.std, rel=1e-3)
    hollow = [
        layer["mark"]
        for layer in figure.panels[0].drawing.specification()["layer"]
        if layer["encoding"].get("y", {}).get("field") == "published"
    ]
    assert [mark["filled"] for mark in hollow] == [False]
    assert {row["line"] for row in rows(figure, 1)} == {"FedAvg"}


def test_a_sweep_has_the_key_for_its_axis(drawn: Drawn, material: Material) -> None:
    [figure] = drawn("sweep")
    assert figure.title == "Accuracy over alpha"
    assert axis(figure, "x")["title"] == "alpha"
    assert [(row["line"], row["at"], row["published"]) for row in rows(figure)] == [
        ("FedAvg", 0.1, 70.5),
        ("FedAvg", 0.5, 60.0),
        ("FedProx", 0.1, None),
    ]
    assert missing_words(material) == ["Not drawn: FedProx, alpha 0.5: it was not run."]


def test_a_gain_is_over_the_first_row(paper: Paper, cells: list[Cell]) -> None:
    recipe = paper.part("figure9")
    values = {
        ("FedAvg", "alpha 0.1"): [70.0, 72.0], ("FedAvg", "alpha 0.5"): [80.0, 82.0],
        ("FedProx", "alpha 0.1"): [72.0, 75.0], ("FedProx", "alpha 0.5"): [80.0, 81.0],
    }  # fmt: skip
    made_up = Material(judge(recipe, cells, kept(recipe, values)), cells, RunsAtHand())
    [figure] = draw(made_up, Asked("sweep", ("partition.alpha",), ("gain",)))
    assert figure.title == "Gain over FedAvg over alpha"
    assert [(row["line"], row["at"], row["value"]) for row in rows(figure)] == [
        ("FedProx", 0.1, 2.5),
        ("FedProx", 0.5, -0.5),
    ]


def test_one_point_is_no_sweep(material: Material) -> None:
    """FedProx was run at one value only, so there is no gain to be seen over that key."""
    assert draw(material, Asked("sweep", ("partition.alpha",), ("gain",))) == []
    assert "a line needs 2 values of 'alpha' that were run" in " ".join(missing_words(material))


def test_layers_over_rounds_and_in_the_last_one(drawn: Drawn) -> None:
    [cosine], [update] = drawn("layers"), drawn("layers_last")
    assert [panel.title for panel in cosine.panels] == ["alpha 0.1, FedAvg", "alpha 0.5, FedAvg", "alpha 0.1, FedProx"]
    layers = list(dict.fromkeys(row["line"] for row in rows(cosine)))
    assert len(layers) == 2
    assert [(row["at"], row["value"]) for row in rows(cosine)] == [(2, 1.0), (2, 1.0)]  # the reference round itself
    assert axis(update, "x")["title"] == "layer"
    assert [row["at"] for row in rows(update) if row["line"] == "FedAvg"] == layers
    told = update.panels[0].told
    assert len(told) == 2 * len(layers)
    # Layers have colours by their depth, methods those that are easy to tell apart.
    kinds = [
        {part["encoding"]["color"]["type"] for part in one.panels[0].drawing.specification()["layer"]}
        for one in (cosine, update)
    ]
    assert kinds == [{"ordinal"}, {"nominal"}]


@pytest.mark.parametrize("published", [None, 1e-4])
def test_a_deviation_larger_than_its_number_does_not_spoil_a_logarithmic_axis(published: float | None) -> None:
    """Its bar would reach below zero, where such an axis has no place, and all points would lie on one line."""
    import vl_convert

    made_up = [new_row("Local", "first", 1e-5, 2e-5), new_row("Local", "second", 1e-2, 1e-3)]
    made_up[0] |= {"published": published, "published_spread": published and 3e-4}
    drawing = marks.lines(made_up, ["Local"], Ruler("layer", ("first", "second")), Ruler("x", logarithmic=True), True)
    picture = vl_convert.vegalite_to_svg(drawing.specification())
    labelled = re.findall(
        r'aria-label="layer: (first|second); x: [^"]*"[^>]*transform="translate\(([^,]+),([^)]+)\)', picture
    )
    heights = {name: float(up) for name, _, up in labelled}
    assert heights.keys() == {"first", "second"}
    assert 0 < heights["second"] < heights["first"] < marks.HEIGHT
    assert "NaN" not in picture


def test_rows_together_and_layers_relative_to_the_first(material: Material) -> None:
    [figure] = draw(material, Asked("layers", ("update",), together=True, columns=("alpha 0.1",)))
    assert [panel.title for panel in figure.panels] == ["alpha 0.1"]
    assert {(row["line"], row["kind"]) for row in rows(figure)} == {
        (layer, row) for layer in ("stages.0.linear", "head") for row in ("FedAvg", "FedProx")
    }
    specification = figure.panels[0].drawing.specification()
    [dash] = [part["encoding"]["strokeDash"] for part in specification["layer"] if "strokeDash" in part["encoding"]]
    assert (dash["field"], dash["scale"]["range"][0]) == ("kind", [1, 0])
    asked = Asked("layers_last", ("update",), columns=("alpha 0.1",), rows=("FedAvg",))
    [plain], [relative] = draw(material, asked), draw(material, replace(asked, relative=True))
    first, last = (row["value"] for row in rows(plain))
    assert [row["value"] for row in rows(relative)] == pytest.approx([100, 100 * last / first], rel=1e-3)
    assert axis(relative, "y")["title"] == "Size of the update, % of the first layer"


def test_bars_have_the_published_number_beside_them(drawn: Drawn) -> None:
    [figure] = drawn("bars")
    assert [(row["line"], row["published"]) for row in rows(figure)] == [("FedAvg", 70.5), ("FedProx", None)]
    assert axis(figure, "x")["title"] == "accuracy, %"


def test_weights_clients_and_pairs(drawn: Drawn, material: Material) -> None:
    [weights] = drawn("histogram")
    assert sum(row["value"] for row in rows(weights) if row["line"] == "FedAvg") == pytest.approx(100, abs=0.5)
    labels, accuracies = drawn("clients")
    assert sum(row["count"] for row in rows(labels)) == sum(material.runs(("FedAvg", "alpha 0.1"))[0].data["sizes"])
    assert [panel.title for panel in labels.panels] == ["alpha 0.1", "alpha 0.5"]
    assert sorted(row["client"] for row in rows(accuracies)) == [0, 1, 2]
    assert axis(accuracies, "x")["title"] == "client"  # all have as many samples
    first = drawn("matrices")[0]
    assert len(rows(first)) == 9
    assert {row["value"] for row in rows(first) if row["client"] == row["other"]} == {1.0}


def test_what_runs_do_not_hold_is_said(material: Material) -> None:
    assert draw(material, Asked("curves", ("global.magic",), columns=("alpha 0.1",))) == []
    assert draw(material, Asked("layers", ("magic",), rows=("FedAvg",))) == []
    assert draw(material, Asked("sweep", ("epochs",))) == []
    assert missing_words(material) == [
        "Not drawn: alpha 0.1: its run holds no 'global.magic'.",
        "Not drawn: FedAvg: its run holds no 'magic' of layers.",
        "Not drawn: epochs: nothing of the recipe sets 'epochs' to several numbers.",
    ]


def test_numbers_without_runs_are_drawn_as_far_as_they_go(
    judged: Judged, cells: list[Cell], paper: Paper, tmp_path: Path
) -> None:
    section = redrawn_section(Material(judged, cells[:3], RunsAtHand(tmp_path)), with_charts=True)
    assert section is not None
    assert "of its run only the number is kept here" in section.body
    assert "Not drawn: FedProx, alpha 0.5: it was not asked for." in section.body
    assert set(section.charts) == {
        "figure9-partition-alpha-client-after-accuracy-mean",
        "figure9-client-after-accuracy-mean-alpha-0-1",
        "figure9-client-after-accuracy-mean-alpha-0-5",
    }
    without = redrawn_section(Material(judged, cells, RunsAtHand(tmp_path)), with_charts=False)
    assert without is not None
    assert "fedstrata[report]" in without.body
    assert without.charts == {}


# Runs of which tables were published ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def publish() -> Any:
    """The program that makes tables of runs."""
    spec = importlib.util.spec_from_file_location("publish", ROOT / "benchmarks" / "publish.py")
    assert spec is not None
    assert spec.loader is not None
    publish = sys.modules["publish"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(publish)
    return publish


@pytest.fixture(scope="module")
def published(publish: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the tables of the runs are kept, as ``results/`` keeps them."""
    results = tmp_path_factory.mktemp("results")
    runs = [publish.Finished(f"run-{place.name}", place) for place in sorted(folder.iterdir())]
    publish.publish(runs, results / "comparison", None, ["cosine"], pairs=["drift.similarity"])
    return results


def test_figures_are_redrawn_from_published_tables(
    judged: Judged, cells: list[Cell], material: Material, published: Path
) -> None:
    from_tables = Material(judged, cells, RunsAtHand.among([published]))
    kinds = {one.kind: one for one in material.recipe.charts}
    for kind in ("curves", "layers", "layers_last", "matrices"):
        ours, whole = (draw(one, kinds[kind]) for one in (from_tables, material))
        assert [panel.title for panel in ours[0].panels] == [panel.title for panel in whole[0].panels]
        for place in range(len(whole[0].panels)):
            values = [[row["value"] for row in rows(one[0], place)] for one in (ours, whole)]
            assert values[0] == pytest.approx(values[1], rel=1e-4), kind
    assert not draw(from_tables, kinds["clients"])
    assert from_tables.number(("FedAvg", "alpha 0.1"), "bytes.up") is None
    assert "only tables are kept here, which do not tell 'bytes.up'" in " ".join(missing_words(from_tables))


def test_of_a_series_every_so_many_rounds_may_be_kept_and_its_ends(
    publish: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted = [(round, layer, "cosine", round / 10) for round in range(2, 9) for layer in ("stem", "head")]
    table = pa.table(dict(zip(("round", "layer", "metric", "value"), zip(*noted, strict=True), strict=True)))
    monkeypatch.setattr(publish.Finished, "table", lambda self, name: table)
    finished = publish.Finished("one", tmp_path)
    kept = list(finished.series("cosine", every=3))
    assert kept == [{"run": "one", "round": round, "stem": round / 10, "head": round / 10} for round in (2, 3, 6, 8)]
    assert [row["round"] for row in finished.series("cosine")] == [2, 3, 4, 5, 6, 7, 8]
    assert list(finished.series("update", every=3)) == []


@pytest.mark.parametrize("where", [".", "comparison", "comparison/summary.csv"])
def test_published_runs_are_found_in_folders_and_beside_files(cells: list[Cell], published: Path, where: str) -> None:
    at_hand = RunsAtHand.among([published / where])
    found = {(cell.row, cell.column, cell.seed): at_hand.find(cell) for cell in cells}
    assert {key for key, run in found.items() if run is None} == {
        ("FedProx", "alpha 0.5", 0),
        ("FedProx", "alpha 0.5", 1),
    }
    assert all(run.experiment["seed"] == seed for (_, _, seed), run in found.items() if run is not None)


def test_a_run_without_diagnostics_stands_in_but_none_with_other_ones(
    cells: list[Cell], published: Path, tmp_path: Path
) -> None:
    """Else a figure of the Hessian could be drawn beside rounds of which another diagnostic was kept."""
    own = Path(shutil.copytree(published / "comparison", tmp_path / "comparison"))
    for file in own.glob("*.toml"):
        file.write_text("".join(line for line in file.read_text().splitlines(True) if "diagnose" not in line))
    plain = RunsAtHand.among([own])
    assert plain.find(cells[0]) is not None
    other = replace(cells[0], experiment=replace(cells[0].experiment, diagnose="norms"))
    assert plain.find(other) is not None
    assert RunsAtHand.among([published]).find(other) is None
    longer = replace(cells[0], experiment=replace(cells[0].experiment, rounds=3))
    assert plain.find(longer) is None


def test_a_whole_run_comes_before_its_tables(cells: list[Cell], folder: Path, published: Path) -> None:
    found = RunsAtHand.among([published], folder).find(cells[0])
    assert found is not None
    assert found.path == folder / cells[0].settings


def test_the_page_of_a_figure_is_made_of_published_tables(
    paper: Paper, judged: Judged, cells: list[Cell], published: Path, tmp_path: Path
) -> None:
    text = write_page(paper, judged, cells, RunsAtHand.among([published]), tmp_path / "page.html").read_text()
    assert "Only tables of these runs were kept" in text
    assert 'id="chart-figure9-cosine' in text


def kept(recipe: Recipe, values: dict[tuple[str, str], list[float]]) -> list[Kept]:
    """Results as they would be kept of runs with the paper's settings."""
    own = {(cell.row, cell.column, cell.seed): cell for cell in cells_of(recipe, 9)}
    return [
        Kept(recipe.paper, recipe.part, *pair, seed, value, *asked(own[*pair, seed])[1:], own[*pair, seed].settings,
             2, 1.5, 10, "abc", "words", "GPU")
        for pair, listed in values.items()
        for seed, value in enumerate(listed)
    ]  # fmt: skip


@pytest.fixture
def table(paper: Paper) -> Judged:
    """The small table with made-up numbers: FedBN agrees, Local is above, and a column was not run."""
    recipe = paper.part("table1")
    values = {("FedBN", ".1"): [90.0, 91.0, 92.0], ("Local", ".1"): [84.0, 85.5, 87.0]}
    return judge(recipe, cells_of(recipe, 3), kept(recipe, values))


def test_a_table_at_a_glance(table: Judged) -> None:
    figure = cells_at_a_glance(table)
    assert figure is not None
    assert [panel.title for panel in figure.panels] == [".1"]
    assert figure.caption.endswith("Nothing was run of .5.")
    assert rows(figure) == [
        {"row": "FedBN", "published": 90.5, "published_spread": 0.5, "ours": 91.0, "spread": 1.0, "seeds": 3,
         "verdict": "agrees"},
        {"row": "Local", "published": 60.0, "published_spread": None, "ours": 85.5, "spread": 1.5, "seeds": 3,
         "verdict": "above"},
    ]  # fmt: skip
    shapes = [
        (layer["mark"]["shape"], layer["mark"]["style"])
        for layer in figure.panels[0].drawing.specification()["layer"]
        if "shape" in layer["mark"]
    ]
    assert shapes == [("circle", "accent"), ("triangle-up", "apart")]


def test_claims_at_a_glance(table: Judged) -> None:
    figure = claims_at_a_glance(table)
    assert figure is not None
    [row] = rows(figure)
    assert (row["claim"], row["ours"], row["published"], row["word"]) == (".1: FedBN over Local", 5.5, 30.5, "shown")
    # Differences of 6, 5.5 and 5: the mean, and Student's quantile for two degrees times 0.5 / sqrt(3).
    reach = 4.3027 * 0.5 / 3**0.5
    assert (row["low"], row["high"]) == pytest.approx((5.5 - reach, 5.5 + reach), rel=1e-4)


def test_the_page_opens_with_the_figure(paper: Paper, judged: Judged, cells: list[Cell], folder: Path) -> None:
    short = replace(judged.recipe, charts=judged.recipe.charts[:2])
    first, second = sections_of(paper, replace(judged, recipe=short), cells, RunsAtHand(folder), "", with_charts=True)
    assert (first.title, second.title) == ("The paper's figure 9, redrawn", "Published and ours")
    assert "hollow marks are published" in first.body
    assert first.body.count('class="panels"') == 2
    assert first.body.count("The same as a table") == 2
    assert all(f'id="chart-{name}"' in first.body for name in first.charts)
    assert second.charts == {}


@pytest.mark.slow
def test_panels_as_files_for_a_paper(
    paper: Paper, judged: Judged, cells: list[Cell], folder: Path, tmp_path: Path
) -> None:
    from fedstrata.report.paper_figures import FiguresAsked

    index = write_part_figures(
        paper, judged, cells, RunsAtHand(folder), FiguresAsked(tmp_path / "figures", "column", "sans")
    )
    names = {path.name for path in index.parent.iterdir()}
    first = "figure9-client-after-accuracy-mean-alpha-0-1"
    assert {f"{first}.pdf", f"{first}.svg", f"{first}.png", f"{first}.csv"} <= names
    assert (index.parent / f"{first}.csv").read_text().startswith("line,at,value,std_over_seeds,published,")


def test_a_page_opens_with_what_the_table_came_to(
    paper: Paper, table: Judged, judged: Judged, cells: list[Cell], folder: Path, tmp_path: Path
) -> None:
    """Also where no run is at hand; the finding of the report, which is of another number, is not there."""
    page = write_page(paper, table, [], RunsAtHand(), tmp_path / "table.html").read_text()
    assert "2 of 4 cells have a number of ours: 1 agrees, 1 above. Of 1 claim of the paper&#x27;s, 1 shown.</p>" in page
    for published, there, missing in ((judged.recipe.published, "lead", "finding"), ({}, "finding", "lead")):
        drawn = replace(judged, recipe=replace(judged.recipe, published=published))
        page = write_page(paper, drawn, cells, RunsAtHand(folder), tmp_path / "figure.html").read_text()
        assert f'class="{there}"' in page
        assert f'class="{missing}"' not in page


def test_a_page_of_all_runs_says_so_also_where_cells_share_them(
    paper: Paper, judged: Judged, cells: list[Cell], folder: Path, tmp_path: Path
) -> None:
    """Two rows have one run; of the second run that one of them has, the number alone is known."""
    first = next(cell for cell in cells if (folder / cell.settings / "summary.json").exists())
    pairs = [(first.row, first.column), ("FedProx", first.column)]
    shared = [replace(first, row=row) for row, _ in pairs]
    of_pairs = [JudgedCell(*pair, Published(None, None), Estimate(50.0, None, 1), "not published") for pair in pairs]
    said = "numbers alone are known"
    both = replace(judged, cells=tuple(of_pairs))
    assert said not in write_page(paper, both, shared, RunsAtHand(folder), tmp_path / "all.html").read_text()
    more = replace(judged, cells=(replace(of_pairs[0], ours=Estimate(50.0, 1.0, 2)), of_pairs[1]))
    assert said in write_page(paper, more, shared, RunsAtHand(folder), tmp_path / "fewer.html").read_text()


def test_the_table_is_typeset_as_the_paper_has_it(paper: Paper, table: Judged, tmp_path: Path) -> None:
    """Rows and columns of the paper, with the published number and ours in each; what was not run is a dash."""
    from fedstrata.report.paper_figures import FiguresAsked

    index = write_part_figures(paper, table, [], RunsAtHand(), FiguresAsked(tmp_path / "figures", "column", "sans"))
    latex, markdown = ((index.parent / name).read_text() for name in json.loads(index.read_text())["tables"])
    assert r" & \multicolumn{2}{c}{.1} & \multicolumn{2}{c}{.5} \\" in latex
    assert r"FedBN & $90.50 \pm 0.50$ & $91.00 \pm 1.00$ & $30.00 \pm 0.10$ & -- \\" in latex
    assert "| Local | 60.00 | 85.50 ± 1.50 | – | – |" in markdown
    assert "- FedBN (.5): The column adds up to 31." in markdown


@pytest.mark.slow
@pytest.mark.parametrize(("width", "dark"), [(1400, False), (420, True)])
def test_a_browser_draws_all_panels(
    paper: Paper, judged: Judged, cells: list[Cell], folder: Path, tmp_path: Path, width: int, dark: bool
) -> None:
    sys.path.append(str(Path(__file__).parents[1] / "report"))
    import browser

    if browser.CHROMIUM is None:
        pytest.skip("needs Chromium")
    path = write_page(paper, judged, cells, RunsAtHand(folder), tmp_path / "page.html")
    with browser.running(tmp_path / "profile") as running:
        page = running.open(path.as_uri(), width, 900, dark)
        assert page.complaints == []
        assert page.evaluate("document.querySelectorAll('.failed').length") == 0
        beyond = (
            "Array.from(document.querySelectorAll('.panels svg'), (one) => {"
            " const box = one.getBoundingClientRect();"
            " return Array.from(one.querySelectorAll('.role-legend-label text, .role-axis-title text'))"
            ".filter((text) => { const own = text.getBoundingClientRect();"
            " return own.right > box.right + 2 || own.bottom > box.bottom + 2; }).map((text) => text.textContent); })"
            ".flat()"
        )
        assert page.evaluate(beyond) == []
        assert page.evaluate("document.querySelectorAll('.panels svg').length") > 10
        assert page.evaluate("document.documentElement.scrollWidth") <= width
