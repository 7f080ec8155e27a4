"""Models of the package timm by name; all but the first tests need it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fedstrata.errors import FedStrataError
from fedstrata.files import to_safetensors
from fedstrata.layers import LayerMap
from fedstrata.models import build_model, models
from fedstrata.testing import check_model

IMAGES = (1, 32, 32)


def test_without_the_package_a_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    assert str(models.make("timm:resnet10t")) == "timm(architecture=resnet10t)"
    with pytest.raises(FedStrataError, match=r"needs the package timm; .* pip install 'fedstrata\[timm\]'\.$"):
        build_model("timm:resnet10t", IMAGES, 10, seed=0)
    with pytest.raises(FedStrataError, match="needs the name of a model of timm, such as timm:resnet10t"):
        build_model("timm", IMAGES, 10, seed=0)


@pytest.mark.parametrize(
    ("imported", "said"),
    [
        (
            "import not_there.ops",
            "timm is installed, but finds no not_there, which it imports; .* of not_there that fits",
        ),
        (
            "from json import not_there",
            "timm is installed, but cannot be imported: .*'not_there'.* that fit each other",
        ),
        ("raise RuntimeError('operator nms does not exist')", "cannot be imported: operator nms does not exist"),
    ],
)
def test_what_timm_itself_lacks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, imported: str, said: str
) -> None:
    (tmp_path / "timm.py").write_text(imported)
    for name in [name for name in sys.modules if name.split(".")[0] == "timm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(FedStrataError, match=said):
        build_model("timm:resnet10t", IMAGES, 10, seed=0)


def test_channels_and_classes_are_those_of_the_data() -> None:
    pytest.importorskip("timm", exc_type=ImportError)
    model = build_model("timm:resnet10t", IMAGES, 7, seed=0)
    layers = LayerMap.read(model, IMAGES)
    assert model.get_parameter(str(layers.weighted[0].weight)).shape[1] == 1
    assert layers.head_names == {"fc.weight", "fc.bias"}
    assert model.get_parameter("fc.weight").shape[0] == 7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "mobilenetv3_small_050"])
def test_they_are_federated_by_either_engine(name: str) -> None:
    pytest.importorskip("timm", exc_type=ImportError)
    check_model(f"timm:{name}", IMAGES)


def test_a_name_that_timm_does_not_know_is_refused() -> None:
    pytest.importorskip("timm", exc_type=ImportError)
    for name in ("resnet1O", "'hf-hub:timm/resnet10t'"):
        with pytest.raises(FedStrataError, match=r"timm .* has no model .*\(did you mean '\w*resnet1\w+'\?\)"):
            build_model(f"timm:{name}", IMAGES, 10, seed=0)


def test_stochastic_depth_is_refused_in_training() -> None:
    timm = pytest.importorskip("timm", exc_type=ImportError)

    def deep(input_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        model: torch.nn.Module = timm.create_model(
            "resnet10t", in_chans=input_shape[0], num_classes=classes, drop_path_rate=0.5
        )
        return model

    with pytest.raises(FedStrataError, match="draws random numbers with 'bernoulli_'"):
        check_model(deep, IMAGES)


def test_weights_come_from_a_file_and_a_head_for_other_classes_stays_fresh(tmp_path: Path) -> None:
    pytest.importorskip("timm", exc_type=ImportError)
    pretrained = build_model("timm:resnet10t", IMAGES, 4, seed=1).state_dict()
    path = tmp_path / "resnet10t.safetensors"
    path.write_bytes(to_safetensors(pretrained))
    fresh = build_model("timm:resnet10t", IMAGES, 7, seed=2).state_dict()
    loaded = build_model(f"timm(resnet10t, weights='{path}')", IMAGES, 7, seed=2).state_dict()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, (fresh if name.startswith("fc.") else pretrained)[name])
