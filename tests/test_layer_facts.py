"""What a run folder tells of the layers of its model."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedstrata
from fedstrata.layers import LayerMap
from fedstrata.methods import Method
from fedstrata.models import build_model
from fedstrata.report.reading import read_run
from fedstrata.runs.layer_facts import layer_facts

SHAPE = (1, 8, 8)
LAYERS = LayerMap.read(build_model("cnn", SHAPE, 10, seed=0), SHAPE)


@pytest.mark.parametrize(
    ("method", "masked"),
    [
        ("fedavg", []),
        ("fedbn", []),
        ("lips", ["stages.0.conv", "stages.1.conv"]),
        ("lips(tau0=0)", []),
        ("transient(layers=first)", ["stem.conv"]),
        ("ssfl", ["stem.conv", "stages.0.conv", "stages.1.conv", "head"]),
    ],
)
def test_masked_layers_are_named(method: str, masked: list[str]) -> None:
    assert layer_facts(LAYERS, Method.make(method))["masked"] == masked


def test_layers_are_told_in_execution_order() -> None:
    rows = layer_facts(LAYERS, Method.make("fedavg"))["layers"]
    assert rows[:2] == [
        {"layer": "stem.conv", "kind": "conv", "role": "first", "parameters": 144},
        {"layer": "stem.norm", "kind": "norm", "role": "norm", "parameters": 32, "follows": "stem.conv"},
    ]
    assert [row["layer"] for row in rows] == [layer.name for layer in LAYERS.all]


def test_a_run_leaves_them_and_an_older_one_has_none(tmp_path: Path) -> None:
    fedstrata.run(
        method="fedavg", model="mlp(hidden=8)", clients=2, rounds=1, epochs=1, engine="stacked", out=tmp_path / "run"
    )
    told = read_run(tmp_path / "run").layer_facts
    assert [row["role"] for row in told["layers"]] == ["first", "last"]
    (tmp_path / "run" / "layers.json").unlink()
    assert read_run(tmp_path / "run").layer_facts == {}
