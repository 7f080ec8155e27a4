"""Figures for a paper: their size, the data behind them, and a table that LaTeX can read."""

import csv
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from made_up_runs import write_run
from PIL import Image

from fedstrata.cli import main
from fedstrata.errors import FedStrataError
from fedstrata.report import read_runs
from fedstrata.report.paper_figures import FONTS, FiguresAsked, for_paper, write_figures
from fedstrata.report.rows import comparison_rows
from fedstrata.report.typeset import Typeset, escape_latex, latex_table, markdown_table

HOSTILE = r"fed_avg & 50% #1 $x^2$ ~{a}\b<i>|"
DRAWN = {"accuracy", "loss", "clients", "skew", "cost", "traffic", "time", "layers"}


def runs(folder: Path, seeds: int = 2, other: str = HOSTILE) -> list[Path]:
    return [
        write_run(folder / f"{place}-{seed}", method=method, seed=seed, layers=True, level=0.7 + 0.1 * place)
        for place, method in enumerate(("fedavg", other))
        for seed in range(seeds)
    ]


def read_cells(text: str) -> list[list[str]]:
    """Read the rows of a LaTeX table, whose braces must match and whose rows must be equally long."""
    depth = 0
    for character in re.sub(r"\\[{}]", "", re.sub(r"(?m)^%.*$", "", text)):
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0
    assert re.findall(r"\\begin\{(\w+)\}", text) == list(reversed(re.findall(r"\\end\{(\w+)\}", text)))
    columns = re.search(r"\\begin\{tabular\}\{(\w+)\}", text)
    assert columns is not None
    body = text[text.index(r"\midrule") + 8 : text.index(r"\bottomrule")]
    cells = [re.split(r" (?<!\\)& ", line.strip().removesuffix(r"\\").strip()) for line in body.strip().splitlines()]
    assert {len(line) for line in cells} == {len(columns.group(1))}
    assert text.count("$") % 2 == 0
    return cells


def test_the_latex_table_is_well_formed_and_escaped(tmp_path: Path) -> None:
    rows = comparison_rows(read_runs(runs(tmp_path)))
    text = latex_table(Typeset.of_results(rows), "A & B")
    cells = read_cells(text.replace(r"\$", ""))
    assert r"\caption{A \& B}" in text
    assert r"fed\_avg \& 50\% \#1 " in text
    by_hand = {row.label: row.last for row in rows}
    best = by_hand[HOSTILE]
    assert best is not None
    assert best.std is not None
    assert cells[1][1] == rf"$\mathbf{{{100 * best.mean:.1f} \pm {100 * best.std:.1f}}}$"
    assert cells[0][1].startswith("$7")
    assert escape_latex("\\{}") == r"\textbackslash{}\{\}"


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs LaTeX")
def test_latex_sets_the_table(tmp_path: Path) -> None:
    table = latex_table(Typeset.of_results(comparison_rows(read_runs(runs(tmp_path / "runs")))), "Results")
    document = rf"\documentclass{{article}}\usepackage{{booktabs,textcomp}}\begin{{document}}{table}\end{{document}}"
    (tmp_path / "paper.tex").write_text(document)
    subprocess.run(["pdflatex", "-halt-on-error", "paper.tex"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)


def test_the_markdown_table_has_a_row_for_each_method(tmp_path: Path) -> None:
    rows = comparison_rows(read_runs(runs(tmp_path)))
    lines = markdown_table(Typeset.of_results(rows)).splitlines()
    widths = {len(re.findall(r"(?<!\\)\|", line)) for line in lines[:4]}
    assert len(widths) == 1
    assert "&lt;i>" in lines[3]
    assert "**" in lines[3]


def test_what_only_answers_to_a_pointer_is_left_out() -> None:
    seen = {"mark": "line", "encoding": {"y": {"type": "quantitative"}}}
    unseen = {"name": "points", "mark": {"type": "circle"}, "encoding": {"opacity": {"value": 0, "condition": {}}}}
    chart = {"layer": [seen, unseen], "params": [{"name": "a"}, {"name": "near", "views": ["points"]}], "height": 900}
    drawn = for_paper(chart, 3.25, FONTS["serif"])
    assert (drawn["layer"], drawn["params"]) == ([seen], [{"name": "a"}])
    assert (drawn["width"], drawn["height"]) == (390, 242)
    assert drawn["config"]["background"] == "white"
    named = {"layer": [{"encoding": {"y": {"type": "nominal"}}}], "height": 900}
    assert for_paper(named, 3.25, FONTS["serif"])["height"] == 900


@pytest.mark.slow
def test_every_chart_is_a_figure_of_the_width_of_a_column_with_its_data(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    index = write_figures(runs(tmp_path / "runs"), FiguresAsked(tmp_path / "figures"))
    told = json.loads(index.read_text())
    assert set(told["figures"]) >= DRAWN
    written = {file.name for file in index.parent.iterdir()}
    listed = {file for figure in told["figures"].values() for file in (*figure["pictures"], *figure["data"])}
    assert written == {*listed, *told["tables"], "index.json"}
    for name, figure in told["figures"].items():
        inches = figure["width_inches"]
        assert inches == (6.75 if name == "layers" else 3.25)
        with Image.open(index.parent / f"{name}.png") as picture:
            assert abs(picture.width - 300 * inches) <= 1
            assert picture.convert("RGB").getpixel((0, 0)) == (255, 255, 255)
        assert f'width="{72 * inches:g}pt"' in (index.parent / f"{name}.svg").read_text()
        assert b"/MediaBox [0 0 %d " % (72 * inches) in (index.parent / f"{name}.pdf").read_bytes()
    svg = (index.parent / "accuracy.svg").read_text()
    assert "fedavg" in svg, "methods are named in the figure"
    with (index.parent / "accuracy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["metric"] for row in rows} == {"client_after.accuracy.mean"}
    assert {row["method"] for row in rows} == {"fedavg", HOSTILE}
    assert len(rows) == 2 * 12
    assert list(rows[0]) == ["method", "metric", "round", "value", "std_over_seeds"]


def test_what_is_not_possible_is_refused_before_anything_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("vl_convert")
    with pytest.raises(FedStrataError, match="column"):
        FiguresAsked(tmp_path, width="colunm")
    run = write_run(tmp_path / "run")
    assert main(["report", str(run), "--figure-width", "page"]) == 2
    assert "does nothing without --figures" in " ".join(capsys.readouterr().err.split())
    assert main(["report", str(run), "--figures", str(tmp_path / "f"), "--figure-font", "comic"]) == 2
    assert not (tmp_path / "f").exists()
