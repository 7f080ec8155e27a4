"""A model of texts keeps its vocabulary, and takes raw texts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import fedstrata
from fedstrata.data import datasets
from fedstrata.errors import FedStrataError
from fedstrata.runs.evaluating import evaluate_model
from fedstrata.trained.export import export, readme

TOPICS = ("war", "cup", "oil", "chip")
DATA = "ag_news(words=30, length=6)"
MODEL = "textcnn(words=30, width=4, channels=4, kernels=1-2)"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "ag_news").mkdir()
    for part, count in (("train", 40), ("test", 8)):
        rows = [f'"{1 + row % 4}","news {row}","about {TOPICS[row % 4]}"\n' for row in range(count)]
        (folder / "ag_news" / f"{part}.csv").write_text("".join(rows))
    return folder


@pytest.fixture(scope="module")
def run(root: Path) -> Path:
    fedstrata.run(
        data=DATA, model=MODEL, data_root=str(root), partition="iid", clients=2, rounds=8, learning_rate=0.1,
        batch_size=4, engine="loop", out=root / "run", progress=False,
    )  # fmt: skip
    return root / "run"


def test_raw_texts_are_predicted_as_the_tokens_of_the_data(run: Path, root: Path) -> None:
    model, data = fedstrata.load(run), datasets.make(DATA).load(root)
    texts = ["news 1 about cup", "About OIL !"]
    assert data.vocabulary is not None
    expected = model.predict_proba(data.vocabulary.encode(texts))
    assert model.predict(texts).tolist() == ["Sports", "Business"]
    frame = pd.DataFrame({"text": texts, "other": [1, 2]})
    (root / "texts.txt").write_text("\n".join(texts) + "\n")
    frame.to_csv(root / "texts.csv")
    forms = (tuple(texts), np.array(texts), frame["text"], frame, root / "texts.txt", root / "texts.csv")
    for given in (texts, *forms, str(root / "texts.txt"), [{"text": text} for text in texts]):
        assert np.array_equal(model.predict_proba(given), expected)
    assert np.array_equal(model.predict_proba(texts[0]), expected[:1])
    tokens = data.vocabulary.encode(texts).numpy()
    assert np.array_equal(model.predict_proba(tokens), expected)


def test_the_vocabulary_is_on_the_card_and_goes_with_exported_models(run: Path, root: Path) -> None:
    model = fedstrata.load(run)
    data = datasets.make(DATA).load(root)
    assert data.vocabulary is not None
    assert json.loads((run / "model.json").read_text())["vocabulary"] == data.vocabulary.to_mapping()
    again = fedstrata.load(export(model, root / "exported"))
    assert again.predict("about war").tolist() == model.predict("about war").tolist() == ["World"]
    assert "| vocabulary | 30 tokens |" in readme(model.card)
    client = fedstrata.load(run, client=1)
    assert client.card.vocabulary == model.card.vocabulary


def test_other_texts_are_tested_with_the_vocabulary_of_the_model(run: Path, root: Path) -> None:
    model = fedstrata.load(run)
    own, other = (
        evaluate_model(model, run, data, None if data is None else str(root))["metrics"]
        for data in (None, "ag_news(words=12, length=9)")
    )
    assert own == other
    assert own["accuracy"] == 1


def test_what_is_no_text_gets_a_sentence(run: Path, root: Path) -> None:
    model = fedstrata.load(run)
    (root / "latin.txt").write_bytes(b"caf\xe9")
    for given, reason in [
        (root / "nothing.txt", "leads nowhere"),
        (root / "latin.txt", "UTF-8"),
        (pd.DataFrame({"words": ["a"]}), "the model takes one called 'text'"),
        (pd.DataFrame({"text": ["a", None]}), "cannot become one tensor|texts, or samples"),
        ([1.5] * 6, "not whole numbers, but the model takes texts, or samples"),
        (root / "run", "no images"),
    ]:
        with pytest.raises(FedStrataError, match=reason):
            model.predict(given)


def test_a_model_with_too_few_words_is_refused_before_it_trains(root: Path) -> None:
    with pytest.raises(FedStrataError, match="needs at least words=30"):
        fedstrata.run(data=DATA, model="textcnn(words=29)", data_root=str(root), rounds=1, out=root / "never")


def test_a_card_of_earlier_versions_is_read(run: Path, tmp_path: Path) -> None:
    folder = fedstrata.load(run).save(tmp_path / "model")
    card = json.loads((folder / "model.json").read_text())
    del card["vocabulary"]
    (folder / "model.json").write_text(json.dumps(card))
    model = fedstrata.load(folder)
    assert len(model.predict(torch.ones(1, 6, dtype=torch.int64))) == 1
    with pytest.raises(FedStrataError, match="no file or folder 'about war'"):
        model.predict("about war")
