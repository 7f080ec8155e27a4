"""Beginning a component of one's own: what is written works at once."""

from __future__ import annotations

import runpy
import shlex
from pathlib import Path

import pytest
from cli_calls import Call

from fedstrata.cli.beginning import KINDS

pytestmark = pytest.mark.usefixtures("fresh_imports")


@pytest.mark.parametrize(
    "kind", [kind if kind == "method" else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]
)
def test_what_is_written_can_be_run_and_tested_at_once(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    told = call("new", kind, f"my-{kind}", "--json").json
    assert (told["file"], told["test"]) == (f"my_{kind}.py", f"test_my_{kind}.py")
    assert told["run"].startswith(f"fedstrata run --import my_{kind}.py --{'data' if kind == 'dataset' else kind} my-")
    run = call(*shlex.split(told["run"])[1:], "--clients", "3", "--out", "run", "--quiet", "--no-report")
    assert (run.code, run.out) == (0, "")
    monkeypatch.syspath_prepend(str(tmp_path))
    tests = [test for name, test in runpy.run_path(told["test"]).items() if name.startswith("test_")]
    assert tests
    for test in tests:
        test()
    for line in Path(told["file"]).read_text().splitlines():
        if "fedstrata " in line and line.split(":")[0] in ("Run it", "Look at it"):
            command = shlex.split(line.partition(":")[2].strip())[1:]
            more = ("--out", "again", "--quiet", "--no-report") if command[0] == "run" else ("--json",)
            assert call(*command, *more).code == 0


def test_the_words_say_what_to_do_next(call: Call, tmp_path: Path) -> None:
    text = call("new", "method", "my-own-method", "--folder", "study/methods").out
    assert "fedstrata run --import study/methods/my_own_method.py --method my-own-method" in text.replace("\n", "")
    assert "class MyOwnMethod(Part):" in Path("study/methods/my_own_method.py").read_text()
    assert sorted(path.name for path in Path("study/methods").iterdir()) == [
        "my_own_method.py",
        "test_my_own_method.py",
    ]


def test_a_class_does_not_hide_what_its_file_needs(call: Call) -> None:
    assert call("new", "method", "part", "--json").code == 0
    assert "class PartMethod(Part):" in Path("part.py").read_text()
    assert call("methods", "part", "--import", "part.py").code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("method fedprox", "There is already a method 'fedprox'"),
        ("model cnn", "There is already a model 'cnn'"),
        ("method random", "'random' is the name of a Python module"),
        ("method 3rd", "'3rd' is no name for a method"),
        ("method ../up", "is no name for a method"),
        ("method class", "is no name for a method"),
        ("methd mine", "There is no template for a 'methd'. Did you mean 'method'?"),
        ("method", "Missing argument"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(call: Call, tmp_path: Path, arguments: str, said: str) -> None:
    assert said in call("new", *arguments.split()).sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["mine.py", "test_mine.py"])
def test_nothing_is_overwritten(call: Call, tmp_path: Path, name: str) -> None:
    Path(name).write_text("precious")
    assert f"already a file '{name}'" in call("new", "method", "mine").sentence
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert Path(name).read_text() == "precious"
