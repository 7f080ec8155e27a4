"""The small vision transformer: its parts against PyTorch's own, both engines, and pretrained weights."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import fedstrata
from fedstrata.errors import FedStrataError
from fedstrata.files import from_safetensors, to_safetensors
from fedstrata.layers import LayerMap
from fedstrata.models import build_model
from fedstrata.models.vit import PatchEmbedding, TransformerBlock

ROOT = Path(__file__).parents[2]
SMALL = "patch=4, width=12, depth=2, heads=3"
DIGITS = (1, 8, 8)
KINDS = ("weight", "bias")


def build(parameters: str = "", input_shape: tuple[int, ...] = DIGITS, classes: int = 10, seed: int = 0) -> nn.Module:
    return build_model(f"vit({SMALL}{parameters})", input_shape, classes, seed)


def saved(path: Path, tensors: dict[str, Tensor]) -> str:
    path.write_bytes(to_safetensors(tensors))
    return f", weights='{path}'"


def test_patches_are_read_row_by_row_behind_the_class_token() -> None:
    embedding = PatchEmbedding((1, 4, 6), patch=2, width=1, dropout=0.0)
    with torch.no_grad():
        nn.init.ones_(embedding.projection.weight)
        nn.init.zeros_(embedding.get_parameter("projection.bias"))
        embedding.class_token.fill_(-1)
        embedding.positions.copy_(100 * torch.arange(7.0)[None, :, None])
        tokens = embedding(torch.arange(24.0).reshape(1, 1, 4, 6))
    # The image holds 0 to 5 in its first row, 6 to 11 in its second: the first patch is 0 + 1 + 6 + 7.
    sums = [-1, 14, 22, 30, 62, 70, 78]
    assert tokens.flatten().tolist() == [100 * place + value for place, value in enumerate(sums)]


def test_a_block_is_that_of_pytorch() -> None:
    block = TransformerBlock(width=12, heads=3, hidden=20, dropout=0.0)
    reference = nn.TransformerEncoderLayer(
        12, 3, 20, dropout=0.0, activation="gelu", layer_norm_eps=1e-6, batch_first=True, norm_first=True
    )
    own = block.state_dict()
    projections = [f"attention.{name}" for name in ("query", "key", "value")]
    renamed = {
        **{f"self_attn.in_proj_{kind}": torch.cat([own[f"{name}.{kind}"] for name in projections]) for kind in KINDS},
        **{f"self_attn.out_proj.{kind}": own[f"attention.output.{kind}"] for kind in KINDS},
        **{f"{norm}.{kind}": own[f"{norm}.{kind}"] for norm in ("norm1", "norm2") for kind in KINDS},
        **{f"linear1.{kind}": own[f"mlp.hidden.{kind}"] for kind in KINDS},
        **{f"linear2.{kind}": own[f"mlp.output.{kind}"] for kind in KINDS},
    }
    reference.load_state_dict(renamed)
    tokens = torch.randn(2, 5, 12, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(block(tokens), reference(tokens))


def test_the_class_token_after_the_last_norm_is_classified() -> None:
    model = build().eval()
    images = torch.randn(3, *DIGITS, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        tokens = model.get_submodule("norm")(model.get_submodule("stages")(model.get_submodule("stem")(images)))
        assert tokens.shape == (3, 5, 12)
        torch.testing.assert_close(model(images), model.get_submodule("head")(tokens[:, 0]))


def test_initialisation() -> None:
    model = build_model("vit", (3, 32, 32), 10, seed=0)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / sum(module.weight.shape)), rel=0.05), name
            assert not module.bias.any()
    assert model.get_parameter("stem.positions").std().item() == pytest.approx(1, rel=0.05)
    assert model.get_parameter("stem.projection.weight").std().item() == pytest.approx(math.sqrt(1 / 48), rel=0.05)


def test_dropout_acts_in_training_only() -> None:
    model = build(", dropout=0.5")
    images = torch.ones(1, *DIGITS)
    assert not torch.equal(model.train()(images), model(images))
    assert torch.equal(model.eval()(images), model(images))


def test_layers_have_their_roles() -> None:
    layers = LayerMap.read(build(), DIGITS)
    roles = {layer.name: layer.role for layer in layers.layers}
    of_a_block = ["attention.query", "attention.key", "attention.value", "attention.output", "mlp.hidden", "mlp.output"]
    middle = [f"stages.{block}.{name}" for block in range(2) for name in of_a_block]
    assert [layer.name for layer in layers.weighted] == ["stem.projection", *middle, "head"]
    assert {name for name, role in roles.items() if role == "extra"} == {"stem"}
    assert layers.layer("stem").parameters == ("stem.class_token", "stem.positions")
    assert not layers.unused


@pytest.mark.parametrize(
    ("parameters", "input_shape", "words"),
    [
        ("patch=3", (1, 8, 8), r"patches of 3 x 3 pixels, which do not divide images of 8 x 8; .* such as 1\."),
        ("patch=8", (3, 28, 28), r"do not divide images of 28 x 28; .* such as 4\."),
        ("patch=16", (1, 8, 8), "at least 16 x 16 pixels"),
        ("", (64,), r"takes images .* shape \(64,\)"),
        ("width=64", (1, 8, 8), "3 heads of the model 'vit' do not divide its width of 64"),
    ],
)
def test_what_does_not_fit_is_refused(parameters: str, input_shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(FedStrataError, match=words):
        build_model(f"vit({parameters})", input_shape, 10, seed=0)


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_the_engines_agree(precision: str) -> None:
    """Two rounds of three clients on digits, with dropout; in bf16 the engines round at different places."""
    loop, stacked = (
        fedstrata.run(
            data="digits",
            clients=3,
            partition="dirichlet(alpha=1.0, samples=20, test_samples=20)",
            model=f"vit({SMALL}, dropout=0.1)",
            rounds=2,
            epochs=1,
            batch_size=8,
            optimiser="sgd(learning_rate=0.05, momentum=0.9)",
            precision=precision,
            engine=engine,
            device="cpu",
        )
        for engine in ("loop", "stacked")
    )
    assert loop.model.keys() == stacked.model.keys() == build().state_dict().keys()
    tolerance = 1e-10 if precision == "fp64" else 0.02
    for name, tensor in loop.model.items():
        assert tensor.dtype == (torch.float64 if precision == "fp64" else torch.float32)
        torch.testing.assert_close(stacked.model[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


def test_weights_of_a_run_are_the_start_of_another(tmp_path: Path) -> None:
    few = {"data": "digits", "clients": 2, "partition": "iid", "rounds": 1, "steps": 2, "engine": "loop"}
    before = fedstrata.run(model=f"vit({SMALL})", out=tmp_path / "run", **few)
    file = tmp_path / "run" / "model.safetensors"
    model = build(f", weights='{file}'", seed=5).state_dict()
    assert all(torch.equal(model[name], tensor.cpu()) for name, tensor in before.model.items())
    fedstrata.run(model=f"vit({SMALL}, weights='{file}')", **few)


def test_a_head_for_other_classes_stays_fresh(tmp_path: Path) -> None:
    pretrained = build(classes=4, seed=1).state_dict()
    weights = saved(tmp_path / "vit.safetensors", pretrained)
    fresh, model = build(classes=7, seed=2).state_dict(), build(weights, classes=7, seed=2).state_dict()
    for name, tensor in model.items():
        assert torch.equal(tensor, (fresh if name.startswith("head.") else pretrained)[name])
    backbone = {name: tensor for name, tensor in pretrained.items() if not name.startswith("head.")}
    without = build(saved(tmp_path / "backbone.safetensors", backbone), classes=7, seed=2).state_dict()
    assert all(torch.equal(without[name], tensor) for name, tensor in model.items())


def test_weights_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "vit.safetensors"
    tensors = build().state_dict()
    name = "stages.1.norm2.bias"
    with pytest.raises(FedStrataError, match=rf"does not hold the tensor '{name}'"):
        build(saved(path, {key: tensor for key, tensor in tensors.items() if key != name}))
    with pytest.raises(FedStrataError, match=r"holds the tensor 'stages\.2\.scale', which the model has not"):
        build(saved(path, {**tensors, "stages.2.scale": torch.ones(1)}))
    with pytest.raises(FedStrataError, match=r"'stem.positions' in .* shape \[1, 5, 12\], but .* \[1, 10, 12\]"):
        build(saved(path, tensors), input_shape=(1, 12, 12))
    path.write_bytes(b"no weights")
    with pytest.raises(FedStrataError, match="is damaged: it is not safetensors"):
        build(f", weights='{path}'")
    with pytest.raises(FedStrataError, match=r"missing.safetensors' cannot be read: no such file"):
        build(f", weights='{tmp_path / 'missing.safetensors'}'")


def test_the_pretraining_script_learns_and_saves(tmp_path: Path) -> None:
    path = tmp_path / "digits.safetensors"
    model = "vit(patch=2, width=32, depth=1, heads=2)"
    options = {
        "--data": "digits", "--model": model, "--transforms": "normalise", "--epochs": "3", "--batch-size": "64",
        "--learning-rate": "0.003", "--mixup": "0.1", "--device": "cpu", "--out": str(path),
    }  # fmt: skip
    finished = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "pretrain_vit.py"),
            *(word for pair in options.items() for word in pair),
        ],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert finished.returncode == 0, finished.stderr
    told = re.findall(r"epoch +(\d+) of 3: training loss ([\d.]+), test accuracy ([\d.]+)%", finished.stdout)
    assert [int(epoch) for epoch, _, _ in told] == [1, 2, 3]
    assert float(told[-1][2]) > float(told[0][2])
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["pretraining"])
    assert facts["accuracy"] == pytest.approx(float(told[-1][2]) / 100, abs=1e-4)
    assert facts["recipe"]["model"] == model
    assert facts["recipe"]["epochs"] == 3
    kept = json.loads(path.with_suffix(".json").read_text())
    assert kept["sha256"] == sha256(path.read_bytes()).hexdigest()
    assert [f"{100 * accuracy:.2f}" for accuracy in kept["accuracies"]] == [accuracy for _, _, accuracy in told]
    pretrained = from_safetensors(path.read_bytes(), path)
    loaded = build_model(f"{model[:-1]}, weights='{path}')", DIGITS, 10, seed=3).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in pretrained.items())
