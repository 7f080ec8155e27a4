"""Every registered model: its size, its output, its initialisation, and that all clients can be run as one batch."""

import math
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy

from fedstrata.engines.forward import KeyedRandomness
from fedstrata.engines.operations import stacked_operations
from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.models import build_model, models
from fedstrata.models.mlp import MlpSpec

CIFAR = (3, 32, 32)

SIZES = [
    ("mlp", CIFAR, {10: 656_810, 100: 674_900, 200: 695_000}),
    ("mlp(hidden=none)", CIFAR, {10: 30_730}),
    ("mlp:32", (64,), {10: 64 * 32 + 32 + 320 + 10}),
    ("cnn", (1, 8, 8), {10: 15_418, 100: 27_028, 200: 39_928}),
    ("cnn(norm=group)", (1, 8, 8), {10: 15_418}),
    ("cnn(norm=none)", (1, 8, 8), {10: 15_418 - 2 * (16 + 32 + 32) + (16 + 32 + 32)}),
    ("simplecnn", CIFAR, {10: 122_570, 100: 128_420, 200: 134_920}),
    ("vgg6", CIFAR, {10: 3_918_858, 100: 3_965_028, 200: 4_016_328}),
    ("resnet6", CIFAR, {10: 314_954, 100: 326_564, 200: 339_464}),
    ("resnet8", CIFAR, {10: 1_235_274, 100: 1_258_404, 200: 1_284_104}),
    ("resnet10", CIFAR, {10: 4_910_922, 100: 4_957_092}),
    ("resnet10", (3, 64, 64), {200: 5_008_392}),
    ("resnet20", CIFAR, {10: 272_474, 100: 278_324, 200: 284_824}),
    ("resnet18", CIFAR, {10: 11_173_962, 100: 11_220_132}),
    ("resnet18", (3, 64, 64), {200: 11_271_432}),
    ("resnet18(norm=batch)", CIFAR, {10: 11_173_962}),
    ("vit", CIFAR, {10: 2_693_578, 100: 2_710_948}),
]

SMALLEST = {
    "mlp": None,
    "cnn": 4,
    "simplecnn": 18,
    "vgg6": 32,
    "resnet6": 5,
    "resnet8": 9,
    "resnet10": 17,
    "resnet20": 3,
    "resnet18": 5,
    "vit": 4,
}

NEEDING_AN_EXTRA = {"dino-vit-s16"}  # with tests of their own
OF_TEXTS = {"textcnn", "transformer"}  # with tests of their own, too

SMALL_INPUTS = {name: (2, size or 4, size or 4) for name, size in SMALLEST.items()}


def build(text: str, input_shape: tuple[int, ...], classes: int = 10, seed: int = 0) -> nn.Module:
    return build_model(text, input_shape, classes, seed)


@pytest.mark.parametrize(("text", "input_shape", "sizes"), SIZES)
def test_number_of_parameters(text: str, input_shape: tuple[int, ...], sizes: dict[int, int]) -> None:
    spec = models.make(text)
    with torch.device("meta"):
        found = {classes: sum(p.numel() for p in spec.build(input_shape, classes).parameters()) for classes in sizes}
    assert found == sizes


def test_these_lists_name_all_models() -> None:
    assert set(SMALLEST) | NEEDING_AN_EXTRA | OF_TEXTS == set(models.names())
    assert {text.partition("(")[0].partition(":")[0] for text, _, _ in SIZES} == set(SMALLEST)


@pytest.mark.parametrize(
    ("name", "maskable"), [("vgg6", 3_907_584), ("resnet6", 303_104), ("resnet8", 1_220_608), ("resnet10", 4_890_624)]
)
def test_weights_of_middle_convolutions_that_lips_masks(name: str, maskable: int) -> None:
    model = build(name, CIFAR)
    layers = LayerMap.read(model, CIFAR).layers
    weights = [layer.weight for layer in layers if layer.kind == "conv" and layer.role == "middle"]
    assert sum(model.get_parameter(weight).numel() for weight in weights if weight) == maskable


def test_resnet18_has_the_tensors_and_weights_of_ssfl() -> None:
    model = build("resnet18", CIFAR)
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    assert len(list(model.parameters())) == 62
    assert not list(model.buffers())
    assert sum(weight.numel() for weight in weights) == 11_164_352


@pytest.mark.parametrize(
    ("name", "input_shape", "feature_map"),
    [("resnet8", CIFAR, (256, 2, 2)), ("resnet10", (3, 64, 64), (512, 2, 2)), ("vgg6", CIFAR, (512, 1, 1))],
)
def test_last_feature_map(name: str, input_shape: tuple[int, ...], feature_map: tuple[int, ...]) -> None:
    model = build(name, input_shape).eval()
    stem, stages = model.get_submodule("stem"), model.get_submodule("stages")
    with torch.no_grad():
        assert stages(stem(torch.zeros(1, *input_shape))).shape == (1, *feature_map)


def test_vgg6_averages_the_positions_left_of_a_larger_image() -> None:
    model = build("vgg6", (1, 64, 96)).eval()
    assert model(torch.zeros(2, 1, 64, 96)).shape == (2, 10)


def test_initialisation_of_vgg6() -> None:
    model = build("vgg6", CIFAR)
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert all(module.bias is not None and not module.bias.any() for module in convolutions)
    for module in convolutions:
        assert module.weight.std().item() == pytest.approx(math.sqrt(2 / (9 * module.out_channels)), rel=0.05)
    head = model.get_submodule("head")
    assert isinstance(head, nn.Linear)
    assert head.weight.std().item() == pytest.approx(0.01, rel=0.05)
    assert not head.bias.any()


@pytest.mark.parametrize("name", ["resnet8", "resnet18"])
def test_initialisation_of_residual_networks(name: str) -> None:
    for module in build(name, CIFAR).modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 5000:
            fan_out = module.out_channels * math.prod(module.kernel_size)
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.05)


@pytest.mark.parametrize("name", SMALLEST)
def test_seed_decides_the_weights(name: str) -> None:
    first, again, other = (build(name, SMALL_INPUTS[name], seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[key], again[key]) for key in first)
    drawn = [key for key in first if key.endswith("weight") and first[key].dim() > 1]
    assert drawn
    assert not any(torch.equal(first[key], other[key]) for key in drawn)


@pytest.mark.parametrize("name", [name for name, size in SMALLEST.items() if size])
def test_images_that_are_too_small_are_refused(name: str) -> None:
    size = SMALLEST[name]
    assert size is not None
    assert build(name, (1, size, 2 * size)).eval()(torch.zeros(2, 1, size, 2 * size)).shape == (2, 10)
    for shape in [(1, size, size - 1), (size, size), (1, 1, size, size)]:
        with pytest.raises(
            FedStrataError, match=rf"'{name}' takes images .* at least {size} x {size} pixels, but .*shape"
        ):
            build(name, shape)


@pytest.mark.parametrize("hidden", ["", "200x200", "0", "10-0", "-3", "10-", "10--3", -5, 0])
def test_hidden_sizes_that_make_no_sense_are_refused(hidden: str | int) -> None:
    with pytest.raises(FedStrataError, match="hidden"):
        MlpSpec(hidden=hidden)


def test_a_model_is_written_as_it_was_read() -> None:
    for text in ["mlp(hidden=64)", "mlp(hidden=none)", "mlp(hidden=64-32)", "cnn(norm=none)", "resnet18(norm=batch)"]:
        assert str(models.make(text)) == text


VARIANTS = [*SMALLEST, "cnn(norm=group)", "cnn(norm=none)"]


@pytest.mark.parametrize("text", VARIANTS)
def test_clients_in_one_batch_equal_clients_one_by_one(text: str) -> None:
    """Training-mode loss, gradients and running statistics of two clients, by vmap and by the loop, in float64."""
    input_shape = SMALL_INPUTS[text.partition("(")[0]]
    clients = [build(text, input_shape, classes=3, seed=seed).double().train() for seed in (1, 2)]
    inputs = torch.randn(2, 3, *input_shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([[0, 1, 2], [2, 2, 0]])
    parameters, buffers = stack_module_state(clients)
    template, key = deepcopy(clients[0]), torch.zeros(2, dtype=torch.int64)

    def loss(
        parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        with KeyedRandomness(key, stacked_operations(inputs.device)):
            value = cross_entropy(functional_call(template, (parameters, buffers), (inputs,)), labels)
        return value, value

    gradients, losses = vmap(grad(loss, has_aux=True))(parameters, buffers, inputs, labels)

    for client, model in enumerate(clients):
        value = cross_entropy(model(inputs[client]), labels[client])
        value.backward()  # type: ignore[no-untyped-call]
        torch.testing.assert_close(losses[client], value.detach(), rtol=1e-11, atol=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(gradients[name][client], parameter.grad, rtol=1e-8, atol=1e-11)
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffers[name][client], buffer, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("text", VARIANTS)
def test_the_layer_map_covers_every_model(text: str) -> None:
    input_shape = SMALL_INPUTS[text.partition("(")[0]]
    model = build(text, input_shape)
    layers = LayerMap.read(model, input_shape)
    types = nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm
    norms = {name: module for name, module in model.named_modules() if isinstance(module, types)}
    assert sorted(layers.parameter_names) == sorted(name for name, _ in model.named_parameters())
    assert sorted(layers.buffer_names) == sorted(name for name, _ in model.named_buffers())
    assert layers.norm_names == {f"{name}.{tensor}" for name, module in norms.items() for tensor in module.state_dict()}
    assert layers.head_names == {"head.weight", "head.bias"}
    assert not layers.unused
    # What a LayerNorm of a transformer normalises is the sum of several layers.
    followers = [layer for layer in layers.layers if layer.kind == "norm" and layer.module_type != "LayerNorm"]
    assert all(layer.follows is not None for layer in followers)


def test_the_norm_of_a_shortcut_is_found_although_no_name_says_so() -> None:
    model = build("resnet8", CIFAR)
    norm_names = LayerMap.read(model, CIFAR).norm_names
    shortcut = [name for name in norm_names if "shortcut" in name]
    assert sorted(shortcut) == sorted(
        f"stages.{stage}.0.shortcut.norm.{tensor}"
        for stage in (1, 2)
        for tensor in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    )
    assert not any("bn" in name for name in model.state_dict())
