"""DINO's ViT-S/16 from directories: its size, its weights, its resizing, both engines; nothing is ever fetched."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fedstrata
from fedstrata.errors import FedStrataError
from fedstrata.files import from_safetensors, to_safetensors
from fedstrata.layers import LayerMap
from fedstrata.models import build_model, models
from fedstrata.models.dino import DinoClassifier

transformers = pytest.importorskip("transformers")
ViTModel, ViTConfig = transformers.ViTModel, transformers.ViTConfig

SMALL = {
    "image_size": 16, "patch_size": 4, "hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3,
    "intermediate_size": 20,
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vision transformer as ``save_pretrained`` leaves it, much smaller than DINO's."""
    folder = tmp_path_factory.mktemp("dino")
    torch.manual_seed(0)
    ViTModel(ViTConfig(**SMALL), add_pooling_layer=False).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    asked: list[object] = []

    def refuse(*args: object, **keywords: object) -> None:
        asked.append(args)
        raise OSError("there is no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    yield
    assert not asked


def build(parameters: str, input_shape: tuple[int, ...] = (3, 16, 16), classes: int = 10, seed: int = 0) -> nn.Module:
    return build_model(f"dino-vit-s16({parameters})", input_shape, classes, seed)


def copied(directory: Path, target: Path, *, tensors: bool = True, **changes: Any) -> Path:
    """Copy a directory, with changes of its config."""
    target.mkdir()
    config = json.loads((directory / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    if tensors:
        (target / "model.safetensors").write_bytes((directory / "model.safetensors").read_bytes())
    return target


def test_number_of_parameters() -> None:
    with torch.device("meta"):
        model = models.make("dino-vit-s16(weights=none)").build((3, 32, 32), 100)
    sizes = {name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()}
    assert sizes == {"backbone": 21_665_664, "head": 38_500}


def test_a_directory_gives_sizes_and_weights_but_no_head(directory: Path) -> None:
    model, again = (build(f"weights='{directory}', image_size=16", seed=seed) for seed in (1, 2))
    reference = ViTModel.from_pretrained(directory, add_pooling_layer=False).state_dict()
    backbone = model.get_submodule("backbone").state_dict()
    assert backbone.keys() == reference.keys()
    assert all(torch.equal(backbone[name], tensor) for name, tensor in reference.items())
    assert not torch.equal(model.get_parameter("head.weight"), again.get_parameter("head.weight"))
    assert model.get_parameter("head.weight").shape == (10, 12)
    assert not model.get_parameter("head.bias").any()


def test_weights_in_half_precision_become_single(directory: Path, tmp_path: Path) -> None:
    half = copied(directory, tmp_path / "half", dtype="float16", torch_dtype="float16")
    file = half / "model.safetensors"
    file.write_bytes(to_safetensors({name: t.half() for name, t in from_safetensors(file.read_bytes(), file).items()}))
    assert {p.dtype for p in build(f"weights='{half}', image_size=16").parameters()} == {torch.float32}


def test_images_are_resized_and_grey_ones_repeated(directory: Path) -> None:
    model = build(f"weights='{directory}', image_size=16").eval()
    assert isinstance(model, DinoClassifier)
    grey = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    large = F.interpolate(grey.repeat(1, 3, 1, 1), (16, 16), mode="bilinear", align_corners=False)
    with torch.no_grad():
        tokens = model.backbone(pixel_values=large).last_hidden_state
        torch.testing.assert_close(model(grey), model.head(tokens[:, 0]))


def test_positions_are_interpolated_for_another_size(directory: Path) -> None:
    model = build(f"weights='{directory}', image_size=24")
    assert model.get_parameter("backbone.embeddings.position_embeddings").shape == (1, 17, 12)
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 10)


def test_layers_have_their_roles(directory: Path) -> None:
    layers = LayerMap.read(build(f"weights='{directory}', image_size=16"), (3, 16, 16))
    kinds = [layer.kind for layer in layers.weighted]
    assert kinds == ["conv", *["linear"] * 12, "linear"]
    assert layers.weighted[0].name == "backbone.embeddings.patch_embeddings.projection"
    assert layers.head_names == {"head.weight", "head.bias"}
    assert len(layers.norm_names) == 10
    assert {name.rpartition(".")[2] for name in layers.names(role="extra")} == {"cls_token", "position_embeddings"}
    assert not layers.unused


def test_the_engines_agree(directory: Path) -> None:
    """One round of two clients on digits in float64, with positions interpolated from 4x4 to 2x2 patches."""
    loop, stacked = (
        fedstrata.run(
            data="digits",
            clients=2,
            partition="dirichlet(alpha=1.0, samples=10, test_samples=10)",
            model=f"dino-vit-s16(weights='{directory}', image_size=8)",
            rounds=1,
            epochs=1,
            batch_size=8,
            optimiser="sgd(learning_rate=0.05, momentum=0.9)",
            precision="fp64",
            engine=engine,
            device="cpu",
        )
        for engine in ("loop", "stacked")
    )
    for name, tensor in loop.model.items():
        torch.testing.assert_close(stacked.model[name], tensor, rtol=1e-10, atol=1e-10, msg=name)


def test_a_name_of_the_hub_is_not_fetched_without_being_asked() -> None:
    for text in ("weights=nobody/nothing-of-that-name", "weights=/no/such/directory"):
        with pytest.raises(FedStrataError, match=r"neither a directory nor stored here .* download=true to fetch them"):
            build(text)


def test_what_was_fetched_before_is_found_by_its_name(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    stored = tmp_path / "models--nobody--small"
    (stored / "snapshots").mkdir(parents=True)
    (stored / "refs").mkdir()
    (stored / "refs" / "main").write_text("0123")
    copied(directory, stored / "snapshots" / "0123")
    assert build("weights=nobody/small, image_size=16").get_parameter("head.weight").shape == (10, 12)


def test_what_does_not_fit_is_refused(directory: Path) -> None:
    with pytest.raises(FedStrataError, match=r"patches of 4 pixels, which do not divide the image_size of 30; .* 32"):
        build(f"weights='{directory}', image_size=30")
    with pytest.raises(FedStrataError, match="takes images of 3 channels, or grey ones, but these have 2"):
        build(f"weights='{directory}'", input_shape=(2, 16, 16))
    with pytest.raises(FedStrataError, match=r"takes images .* shape \(64,\)"):
        build(f"weights='{directory}'", input_shape=(64,))


def test_directories_that_lack_something_are_refused(directory: Path, tmp_path: Path) -> None:
    deeper = copied(directory, tmp_path / "deeper", num_hidden_layers=3)
    with pytest.raises(FedStrataError, match=r"do not hold the tensor '.*layers?\.2\..*' in the shape"):
        build(f"weights='{deeper}'")
    wider = copied(directory, tmp_path / "wider", intermediate_size=24)
    with pytest.raises(FedStrataError, match=r"do not hold the tensor '.*layers?\.0\..*' in the shape"):
        build(f"weights='{wider}'")
    empty = copied(directory, tmp_path / "empty", tensors=False)
    with pytest.raises(
        FedStrataError, match=r"cannot be read from the directory .* config.json and a model.safetensors"
    ):
        build(f"weights='{empty}'")
    torch.save({}, empty / "pytorch_model.bin")
    with pytest.raises(FedStrataError, match="cannot be read from the directory"):
        build(f"weights='{empty}'")


def test_reading_is_silent_and_leaves_no_trace(directory: Path, capfd: pytest.CaptureFixture[str]) -> None:
    logging = transformers.utils.logging
    logging.set_verbosity_info()
    try:
        build(f"weights='{directory}', image_size=16")
        assert logging.get_verbosity() == logging.INFO
    finally:
        logging.set_verbosity_warning()
    assert logging.is_progress_bar_enabled()
    assert capfd.readouterr() == ("", "")


def test_without_the_extra_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(FedStrataError, match=r"needs the package transformers; .* pip install 'fedstrata\[vit\]'"):
        build("weights=none")
