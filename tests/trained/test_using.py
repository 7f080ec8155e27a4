"""The commands predict, evaluate and export, as somebody with a run would use them."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import fedstrata
from fedstrata.cli import main
from fedstrata.data import datasets
from fedstrata.runs.evaluating import evaluate_model, measured
from fedstrata.trained.export import export

DIGITS = datasets.make("digits").load(None)
SMALL = {"clients": 3, "rounds": 2, "steps": 10, "model": "cnn", "partition": "dirichlet:0.5"}


@pytest.fixture(scope="module")
def ditto(tmp_path_factory: pytest.TempPathFactory) -> fedstrata.Result:
    return fedstrata.run(method="ditto", out=tmp_path_factory.mktemp("runs") / "ditto", **SMALL)


def said(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([str(one) for one in arguments]) == 0
    return capsys.readouterr().out


def test_predict_names_classes(ditto: fedstrata.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = DIGITS.inputs[DIGITS.test[:30]].numpy()
    np.save(tmp_path / "inputs.npy", inputs)
    expected = ditto.client_model(1).predict(inputs).tolist()
    out = tmp_path / "predicted.csv"
    told = json.loads(said(capsys, "predict", ditto.out, tmp_path / "inputs.npy", "--client", 1, "--json"))
    assert [one["class"] for one in told["predictions"]] == expected
    text = said(capsys, "predict", ditto.out, tmp_path / "inputs.npy", "--client", 1, "--out", out)
    assert "and 10 more; all are in the file" in text
    rows = list(csv.reader(out.open()))
    assert [row[1] for row in rows[1:]] == expected
    assert rows[0][:3] == ["sample", "class", "probability of 0"]
    assert float(rows[1][2 + int(expected[0])]) == max(map(float, rows[1][2:]))


def test_evaluate_repeats_what_was_reported(ditto: fedstrata.Result, capsys: pytest.CaptureFixture[str]) -> None:
    told = json.loads(said(capsys, "evaluate", ditto.out, "--client", 2, "--json"))
    number = ditto.metrics.of_client(2, "client_after.accuracy")
    assert told["metrics"]["accuracy"] == pytest.approx(number, abs=1e-9)
    assert told["metrics"]["loss"] == pytest.approx(ditto.metrics.of_client(2, "client_after.loss"), abs=1e-4)
    assert told["samples"] == len(ditto.driver.split.test[2])
    both = json.loads(said(capsys, "evaluate", ditto.out, "--client", 2, "--part", "all", "--json"))
    assert both["samples"] == told["samples"] + len(ditto.driver.split.train[2])
    other = json.loads(said(capsys, "evaluate", ditto.out, "--client", 2, "--data", "digits", "--json"))
    assert other["samples"] == len(DIGITS.test)
    assert "accuracy" in said(capsys, "evaluate", ditto.out, "--client", 2)


@pytest.mark.filterwarnings("ignore::fedstrata.FedStrataWarning")
def test_what_cannot_be_used_gets_a_sentence(
    ditto: fedstrata.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = export(ditto.client_model(0), tmp_path / "exported")
    for arguments, sentence in {
        ("predict", tmp_path / "none", "x.npy"): "There is no folder",
        ("predict", ditto.out, "x.npy", "--client", 7): "There is no client 7; the run has 3, from 0 to 2.",
        ("evaluate", exported): "is not the folder of a run, so that its data is not known; give --data.",
        ("evaluate", ditto.out, "--client", 0, "--part", "half"): "'half' is no part of a dataset",
        ("export", ditto.out, "--client", 0, "-o", exported): "exists already and is not empty",
    }.items():
        assert main([str(one) for one in arguments]) == 2
        assert sentence in " ".join(capsys.readouterr().err.split()), arguments


def test_the_shared_model_of_a_personal_method_comes_with_a_word(
    ditto: fedstrata.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(ditto.out), "-o", str(tmp_path / "shared")]) == 0
    assert "With 'ditto' clients use models of their own" in " ".join(capsys.readouterr().err.split())
    with pytest.warns(fedstrata.FedStrataWarning, match="this is the one that they share"):
        ditto.global_model()


def test_export_is_read_by_others(ditto: fedstrata.Result, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    folder = tmp_path / "exported"
    text = said(capsys, "export", ditto.out, "--client", 1, "--onnx", "--hub", "-o", folder)
    assert f"{folder}: README.md, model.json, model.onnx, model.safetensors" in text.replace("\n", "")
    model = ditto.client_model(1)
    inputs = DIGITS.inputs[:7]
    session = runtime.InferenceSession(folder / "model.onnx")
    (found,) = session.run(None, {"inputs": inputs.numpy()})
    assert np.allclose(found, model.predict_proba(inputs), atol=1e-5)
    assert session.get_modelmeta().custom_metadata_map["class_names"].split("\n") == list(model.class_names)
    again = fedstrata.load(folder)
    assert np.array_equal(again.predict_proba(inputs), model.predict_proba(inputs))
    readme = (folder / "README.md").read_text()
    assert readme.startswith("---\nlibrary_name: fedstrata\ntags:\n- federated-learning\n")
    assert f"| accuracy | {model.card.metrics['accuracy']:.4f} |" in readme


def test_an_onnx_file_that_computes_something_else_is_not_written(
    ditto: fedstrata.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = ditto.client_model(1)
    right = model.predict_proba
    monkeypatch.setattr(model, "predict_proba", lambda inputs: right(inputs) + 0.01)
    with pytest.raises(fedstrata.FedStrataError, match=r"differs from PyTorch by 0\.01 in probability"):
        export(model, tmp_path / "exported", onnx=True)
    assert not (tmp_path / "exported").exists()


def test_classes_go_by_their_names(ditto: fedstrata.Result) -> None:
    """Data that lists them in another order is tested rightly, and a class that nobody trained on is refused."""
    model, some = ditto.client_model(0), DIGITS.test[:40]
    turned = fedstrata.from_arrays(
        DIGITS.inputs[some], DIGITS.labels[some], class_names=[str(9 - number) for number in range(10)], test_fraction=0
    )
    assert turned.labels.tolist() == (9 - DIGITS.labels[some]).tolist()
    right = (model.predict(DIGITS.inputs[some]) == np.array(DIGITS.class_names)[DIGITS.labels[some]]).mean()
    assert measured(model, turned, np.arange(40))["accuracy"] == pytest.approx(right, abs=1e-9)
    other = replace(turned, class_names=(*turned.class_names[:-1], "zero"))
    with pytest.raises(fedstrata.FedStrataError, match="samples of the class 'zero', which the model does not know"):
        measured(model, other, np.arange(40))


def test_from_a_table_to_predictions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One CSV of two hospitals in, a model out that takes rows of another CSV, columns in another order."""
    lines = [f"{'ab'[n % 2]},{n % 7},{'fm'[n % 3 == 0]},{'ill' if n % 7 > 3 else 'well'}" for n in range(120)]
    (tmp_path / "hospitals.csv").write_text("\n".join(["hospital,score,sex,outcome", *lines]))
    (tmp_path / "new.csv").write_text("sex,score\nf,6\nm,0\nf,\n")
    table = f"table(path={tmp_path / 'hospitals.csv'}, label=outcome, site=hospital)"
    run = tmp_path / "run"
    said(capsys, "run", "--data", table, "--model", "mlp(hidden=16)", "--rounds", 10, "--out", run, "--no-report")
    told = json.loads(said(capsys, "predict", run, tmp_path / "new.csv", "--json"))["predictions"]
    assert [one["class"] for one in told[:2]] == ["ill", "well"]
    found = json.loads(said(capsys, "evaluate", run, "--metrics", "f1+auc", "--json"))["metrics"]
    assert list(found) == ["accuracy", "loss", "f1", "auc"]
    summary = json.loads((run / "summary.json").read_text())
    assert found["accuracy"] == pytest.approx(summary["final"]["global.accuracy"], abs=1e-9)
    (tmp_path / "other.csv").write_text("outcome,sex,score\nwell,m,0\nill,f,6\nill,f,5\nwell,x,1\n")
    other = f"table(path={tmp_path / 'other.csv'}, label=outcome, test_fraction=0)"
    with pytest.warns(fedstrata.FedStrataWarning):  # nobody had the value 'x' in training
        found = evaluate_model(fedstrata.load(run), run, other, part="all")
    assert found["samples"] == 4
    counted = evaluate_model(fedstrata.load(run), run, metrics="confusion")["metrics"]
    assert list(counted)[2:] == ["confusion.ill.ill", "confusion.ill.well", "confusion.well.ill", "confusion.well.well"]
    assert found["metrics"]["accuracy"] == 1.0
