"""What can run here is found by looking for files, packages and weights: nothing is read, and each is told once."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from fedstrata.cli import main
from fedstrata.data import datasets
from fedstrata.errors import FedStrataError, NotHereError
from fedstrata.models import models
from fedstrata.papers.availability import Here
from fedstrata.papers.cells import Cell, cells_of
from fedstrata.papers.reading import read_papers

SMALL = Path(__file__).parent / "small"
ON_DISK = (
    "cifar10", "cifar100", "mnist", "fashion_mnist", "emnist(split=byclass)", "tiny_imagenet", "heart_disease",
    "ag_news", "ag_news(part=test)", "sogou_news", "amazon_reviews", "sentiment140", "isic2019", "mimic_notes",
    "image_folder(path=none-such)", "table(path=none-such.csv)", "hub:owner/none-such",
    "fraction(of=cifar10, keep=0.5)",
)  # fmt: skip
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of this machine is found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FEDSTRATA_DATA", raising=False)
    monkeypatch.setenv("FEDSTRATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def call(capfd: pytest.CaptureFixture[str]) -> Call:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["paper", *arguments])
        return (code, *capfd.readouterr())

    return run


def cell_of(**changes: str) -> Cell:
    [cell, *_] = cells_of(read_papers(SMALL)["tiny"].part("table1"), 1)
    return Cell(cell.recipe, cell.row, cell.column, cell.experiment.with_changes(changes), "")


@pytest.mark.parametrize("text", ON_DISK)
def test_looking_for_a_dataset_says_what_loading_it_says(text: str, tmp_path: Path) -> None:
    said = []
    for ask in (datasets.make(text).find, datasets.make(text).load):
        with pytest.raises(NotHereError) as caught:
            ask(tmp_path / "data")
        said.append((str(caught.value), caught.value.brief))
    assert said[0] == said[1]
    assert len(said[0][1]) < len(said[0][0])
    assert Here().problem(cell_of(data=text, data_root=str(tmp_path / "data"))) == said[0][0]


def test_nothing_is_read_where_files_are_there(tmp_path: Path) -> None:
    """Empty files are found, and are told to be damaged only when they are read."""
    for name in ("train-00000-of-00001.parquet", "test-00000-of-00001.parquet"):
        (tmp_path / name).touch()
    (tmp_path / "cifar-100-python").mkdir()
    for name in ("train", "test", "meta"):
        (tmp_path / "cifar-100-python" / name).touch()
    for text in ("cifar10", "cifar100", "mnist", "ag_news", "amazon_reviews"):
        datasets.make(text).find(tmp_path)
        with pytest.raises(FedStrataError):
            datasets.make(text).load(tmp_path)
    (tmp_path / "train-00001-of-00003.parquet").touch()
    with pytest.raises(FedStrataError, match="Shard 2 of 3 is missing beside"):
        datasets.make("cifar10").find(tmp_path)


def test_weights_and_packages_that_are_missing_are_told_with_what_makes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Here(data=False)
    told = here.problem(cell_of(model="resnet20(weights='start.safetensors')"))
    assert told.startswith("'start.safetensors' cannot be read: no such file.")
    assert "fedstrata run --model resnet20 --clients 1 --out DIR" in told
    assert "examples/pretrain_vit.py" in here.problem(cell_of(model="vit(weights='start.safetensors')"))
    assert here.briefs[told] in told
    (tmp_path / "start.safetensors").touch()
    assert Here(data=False).problem(cell_of(model="resnet20(weights='start.safetensors')")) == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for model, extra in (("dino-vit-s16", "vit"), ("timm:resnet10t", "timm")):
        assert f"pip install 'fedstrata[{extra}]'" in here.problem(cell_of(model=model))
    assert models.make("cnn").find() is None


def test_each_thing_that_is_missing_is_told_once_over_all_papers(call: Call, tmp_path: Path) -> None:
    code, out, _ = call("--data-root", str(tmp_path / "data"))
    assert code == 0
    words = " ".join(out.split())
    for name in ("tiny_imagenet", "cifar10", "cifar100", "fashion_mnist", "heart_disease", "isic2019"):
        assert words.count(f" {name}: ") == 1, name
    assert words.count("Data is looked for in") == 1
    assert "fedlws, lips, ssfl" in words
    code, out, _ = call("lips", "--data-root", str(tmp_path / "data"), "--json")
    [paper] = json.loads(out)
    table = next(part for part in paper["parts"] if part["part"] == "table2")
    assert (table["cells"], table["cells_here"], len(table["missing"])) == (78, 0, 3)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--dry-run",), "--dry-run is for a table or a figure, and none is named"),
        (("lips", "--scale", "0.1", "--jobs", "2"), "--scale, --jobs is for a table or a figure"),
        (("lips", "table2", "--only", "cifar100, cifar1000"), "called 'cifar1000'. Did you mean 'cifar100'?"),
        (("lips", "table2", "--method", "LIPS, fedbm"), "called 'fedbm'. Did you mean 'fedbn'?"),
        (("lips", "table2", "--columns", "C100 .2"), "There is no column of 'lips table2' called 'C100 .2'."),
    ],
)
def test_what_names_nothing_is_refused(call: Call, words: tuple[str, ...], sentence: str) -> None:
    code, out, err = call(*words)
    assert (code, out) == (2, "")
    assert sentence in err
