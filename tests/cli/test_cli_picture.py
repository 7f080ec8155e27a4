"""The command that draws the layers into a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_calls import ROOT, Call

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

PUBLISHED = ROOT / "results" / "lips-cifar100"
RUNS = [str(PUBLISHED / name) for name in ("fedbn-0", "lips-0")]


def test_a_picture_says_what_one_sees_and_names_its_methods(call: Call, tmp_path: Path) -> None:
    outcome = call("picture", *RUNS, "-o", "new/layers.svg", "--json")
    assert outcome.json == {"picture": "new/layers.svg"}
    drawn = (tmp_path / "new" / "layers.svg").read_text()
    for text in ("In fedbn the middle layers keep a cosine of", ">fedbn<", ">lips<", ">asleep<", ">stages.2.0.conv1<"):
        assert text in drawn, text
    assert 'fill="white"' in drawn  # on paper too


def test_metric_methods_title_and_difference(call: Call, tmp_path: Path) -> None:
    chosen = ("--methods", "lips, fedbn", "--against", "fedbn", "--metric", "update", "--title", "A title")
    assert "layers.svg" in call("picture", *RUNS, *chosen, "-o", "layers.svg").out
    drawn = (tmp_path / "layers.svg").read_text()
    assert ">A title<" in drawn
    assert "difference to fedbn" in drawn


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("-o", "layers.gif"), "the name must end in one of .html, .png, .svg, .pdf"),
        (("--metric", "cosin"), "'cosine'"),
        (("--methods", "lisp"), "'lips'"),
        (("--against", "local"), "local"),
        (("--methods", "lips", "--against", "fedbn"), "add it to them, as in --methods 'lips, fedbn'"),
    ],
)
def test_mistakes_are_sentences(call: Call, tmp_path: Path, given: tuple[str, ...], said: str) -> None:
    assert said in call("picture", *RUNS, *given).sentence
    assert list(tmp_path.iterdir()) == []


def test_too_many_methods_for_a_picture_are_refused(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.report.layer_picture.COLOURS", 1)
    assert (
        "A picture shows up to 1 methods, and these are 2; choose some of: fedbn, lips."
        in call("picture", *RUNS).sentence
    )
