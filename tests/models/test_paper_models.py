"""The papers' larger models, made smaller: their parts against direct computations, both engines, and their layers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fedstrata
from fedstrata.files import to_safetensors
from fedstrata.layers import LayerMap
from fedstrata.models import build_model, models
from fedstrata.models.blocks import Bottleneck, batch_norm, convolution_unit, group_norm
from fedstrata.models.densenet import DenseLayer, Transition, dense_network
from fedstrata.models.player import NETWORKS, PlayerMlpSpec, kaiming_everywhere
from fedstrata.models.resnet import residual_network
from fedstrata.models.vit import TransformerBlock, fedlws_transformer
from fedstrata.testing import check_model

CIFAR = (3, 32, 32)
DIGITS = (1, 8, 8)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def small_resnet50() -> nn.Module:
    norm = group_norm(2)
    stem = convolution_unit(1, 4, norm=norm, bias=False)
    return residual_network(stem, (4, 8), (2, 1), 10, norm, Bottleneck)


def small_pooled_resnet18() -> nn.Module:
    stem = convolution_unit(1, 4, norm=batch_norm, bias=False, pool=nn.MaxPool2d(3, stride=2, padding=1))
    return residual_network(stem, (4, 8), (2, 2), 10, batch_norm)


def small_densenet() -> nn.Module:
    return dense_network(1, 3, (2, 2), 10)


def small_transformer() -> nn.Module:
    return fedlws_transformer(DIGITS, 10, patch=4, dropout=0.1, width=8, depth=1, heads=2)


def small_player(variant: str) -> Callable[[], nn.Module]:
    network = NETWORKS[variant]
    narrow = replace(network, channels=tuple(range(3, 3 + len(network.channels))), hidden=5)
    return lambda: kaiming_everywhere(narrow.build(1, 10))


SMALL = {
    "resnet50": small_resnet50,
    "resnet18 with pooling": small_pooled_resnet18,
    "densenet121": small_densenet,
    "fedlws_vit": small_transformer,
    "player_mlp": lambda: PlayerMlpSpec().build(DIGITS, 10),
    **{f"player_cnn:{variant}": small_player(variant) for variant in ("fashion_mnist", "cifar10", "isic2019")},
}


QUICK = ("resnet50", "densenet121", "fedlws_vit", "player_cnn:cifar10")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in SMALL]
)
def test_the_engines_agree(name: str) -> None:
    """One round of two clients on digits in double precision, with the dropout that there is."""
    loop, stacked = (
        fedstrata.run(
            data="digits",
            clients=2,
            partition="dirichlet(alpha=1.0, samples=12, test_samples=4)",
            model=SMALL[name],
            rounds=1,
            steps=2,
            batch_size=6,
            optimiser="sgd(learning_rate=0.05, momentum=0.9)",
            precision="fp64",
            engine=engine,
            device="cpu",
        ).model
        for engine in ("loop", "stacked")
    )
    for tensor_name, tensor in loop.items():
        torch.testing.assert_close(stacked[tensor_name], tensor, rtol=1e-9, atol=1e-9, msg=tensor_name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_they_are_what_engines_rely_on(name: str) -> None:
    check_model(SMALL[name])


def test_a_bottleneck_is_three_convolutions_beside_a_shortcut() -> None:
    block = Bottleneck(6, 4, 2, group_norm(2)).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    inputs = draw(2, 6, 5, 5)
    weight = dict(block.named_parameters())

    def normalised(values: Tensor, norm: str) -> Tensor:
        groups = values.unflatten(1, (2, -1)).flatten(2)
        deviation = (groups.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
        plain = ((groups - groups.mean(2, keepdim=True)) / deviation).reshape(values.shape)
        return plain * weight[f"{norm}.weight"][:, None, None] + weight[f"{norm}.bias"][:, None, None]

    hidden = normalised(F.conv2d(inputs, weight["conv1.weight"]), "norm1").clamp(min=0)
    hidden = normalised(F.conv2d(hidden, weight["conv2.weight"], stride=2, padding=1), "norm2").clamp(min=0)
    hidden = normalised(F.conv2d(hidden, weight["conv3.weight"]), "norm3")
    carried = normalised(F.conv2d(inputs[:, :, ::2, ::2], weight["shortcut.conv.weight"]), "shortcut.norm")
    torch.testing.assert_close(block(inputs), (hidden + carried).clamp(min=0))
    assert isinstance(Bottleneck(16, 4, 1, group_norm(2)).shortcut, nn.Identity)


def test_a_dense_layer_puts_what_it_finds_before_what_it_is_given() -> None:
    layer = DenseLayer(5, growth=2).double()
    inputs = draw(3, 5, 4, 4)
    outputs = layer(inputs)
    assert outputs.shape == (3, 7, 4, 4)
    assert torch.equal(outputs[:, 2:], inputs)

    def normalised(values: Tensor) -> Tensor:
        deviation = (values.var((0, 2, 3), correction=0, keepdim=True) + 1e-5).sqrt()
        return (values - values.mean((0, 2, 3), keepdim=True)) / deviation

    hidden = F.conv2d(normalised(inputs).clamp(min=0), layer.conv1.weight)
    assert hidden.shape[1] == 8
    torch.testing.assert_close(outputs[:, :2], F.conv2d(normalised(hidden).clamp(min=0), layer.conv2.weight, padding=1))


def test_a_transition_averages_two_by_two() -> None:
    transition = Transition(4, 2).double().eval()
    inputs = draw(1, 4, 5, 6)
    convolved = F.conv2d((inputs / math.sqrt(1 + 1e-5)).clamp(min=0), transition.conv.weight)
    expected = convolved[:, :, :4].unflatten(2, (2, 2)).unflatten(4, (3, 2)).mean((3, 5))
    torch.testing.assert_close(transition(inputs), expected)


def test_without_biases_is_with_biases_of_zero() -> None:
    without = TransformerBlock(width=12, heads=3, hidden=12, dropout=0.0, bias=False)
    zero = TransformerBlock(width=12, heads=3, hidden=12, dropout=0.0)
    lacking, unexpected = zero.load_state_dict(without.state_dict(), strict=False)
    assert sorted(lacking) == [f"attention.{name}.bias" for name in ("key", "query", "value")]
    assert not unexpected
    for name in lacking:
        nn.init.zeros_(zero.get_parameter(name))
    tokens = draw(2, 5, 12).float()
    torch.testing.assert_close(without(tokens), zero(tokens))


@pytest.mark.parametrize(
    ("name", "convolutions", "shortcuts"), [("resnet50", 49, 4), ("wrn56_4", 55, 2), ("densenet121", 120, 0)]
)
def test_layers_of_the_full_size_are_in_order(name: str, convolutions: int, shortcuts: int) -> None:
    """As many layers with weights as the name says, but for shortcuts; FedLWS's code counts 58 and 121 groups, too."""
    with torch.device("meta"):
        model = models.make(name).build(CIFAR, 10)
    layers = LayerMap.read(model, CIFAR)
    assert [layer.role for layer in layers.weighted] == ["first", *["middle"] * (convolutions + shortcuts - 1), "last"]
    assert sum("shortcut" in layer.name for layer in layers.weighted) == shortcuts
    assert layers.weighted[0].name.startswith("stem")
    assert layers.head_names == {"head.weight", "head.bias"}
    assert not layers.unused


def test_norms_of_dense_layers_follow_what_alone_feeds_them() -> None:
    layers = LayerMap.read(small_densenet(), DIGITS)
    follows = {layer.name: layer.follows for layer in layers.layers if layer.kind == "norm"}
    assert follows == {
        "stages.0.0.norm1": "stem",
        "stages.0.0.norm2": "stages.0.0.conv1",
        "stages.0.1.norm1": None,
        "stages.0.1.norm2": "stages.0.1.conv1",
        "stages.1.0.norm": None,
        "stages.1.1.norm1": "stages.1.0.conv",
        "stages.1.1.norm2": "stages.1.1.conv1",
        "stages.1.2.norm1": None,
        "stages.1.2.norm2": "stages.1.2.conv1",
        "final.norm": None,
    }


def test_initialisation_of_player_fl() -> None:
    """N(0, 2 / fan_in), counted at the input."""
    model = build_model("player_cnn:cifar10", CIFAR, 10, seed=0)
    modules = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    assert len(modules) == 7
    for module in modules:
        fan_in = module.weight[0].numel()
        assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_in), rel=0.1)
        assert module.bias is not None
        assert not module.bias.any()


def test_maps_of_player_fl_on_cifar() -> None:
    """A padding of two pixels makes maps larger; the second and the fourth convolution are pooled."""
    model = build_model("player_cnn:cifar10", CIFAR, 10, seed=0).eval()
    sides, images = [], torch.zeros(1, *CIFAR)
    for unit in (model.get_submodule("stem"), *list(model.get_submodule("stages").children())[:-1]):
        images = unit(images)
        sides.append(images.shape[-1])
    assert sides == [34, 18, 20, 11, 13]


@pytest.mark.parametrize(("parameters", "side"), [("", 64), ("pool=true", 32)])
def test_pooling_halves_what_leaves_the_stem(parameters: str, side: int) -> None:
    with torch.device("meta"):
        model = models.make(f"resnet18({parameters})").build((3, 64, 64), 200)
        assert model.get_submodule("stem")(torch.zeros(1, 3, 64, 64)).shape == (1, 64, side, side)


@pytest.mark.parametrize("name", ["resnet18(initialisation=default)", "resnet20"])
def test_the_default_initialisation_of_convolutions_is_pytorchs(name: str) -> None:
    """Uniform between plus and minus the root of 1 / fan_in."""
    for module in build_model(name, CIFAR, 10, seed=0).modules():
        if isinstance(module, nn.Conv2d):
            bound = math.sqrt(1 / module.weight[0].numel())
            assert 0.9 * bound < module.weight.abs().max() <= bound


def test_the_transformer_of_fedlws_starts_as_its_code_does() -> None:
    model = build_model("fedlws_vit", CIFAR, 10, seed=0)
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            bound = math.sqrt(1 / module.weight[0].numel())
            assert 0.9 * bound < module.weight.abs().max() <= bound, name
        if isinstance(module, nn.LayerNorm):
            assert module.eps == 1e-5
    assert model.get_parameter("stem.positions").std().item() == pytest.approx(1, rel=0.05)


def test_resnet20_starts_from_a_file(tmp_path: Path) -> None:
    pretrained = build_model("resnet20", CIFAR, 100, seed=1).state_dict()
    pretrained["stem.norm.running_mean"] += 0.25
    path = tmp_path / "resnet20.safetensors"
    path.write_bytes(to_safetensors(pretrained))
    fresh = build_model("resnet20", CIFAR, 10, seed=2).state_dict()
    loaded = build_model(f"resnet20(weights='{path}')", CIFAR, 10, seed=2).state_dict()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, (fresh if name.startswith("head.") else pretrained)[name])
