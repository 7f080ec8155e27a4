"""RandAugment: every operation against Pillow's, and what is drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps
from torch import Tensor

from fedstrata.data import Dataset, from_arrays, parse_transforms, transforms
from fedstrata.data.randaugment import OPERATIONS, change_all, change_in_groups
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.rng import client_keys
from fedstrata.testing.world import prepare

HEIGHT, WIDTH = 40, 32
SIZE = 9 / 30
"""The strength at torchvision's default magnitude."""


def photographs(count: int, channels: int = 3) -> Tensor:
    """Make images of whole levels, with edges, slopes and noise, of which none uses all levels."""
    chance = np.random.default_rng(0)
    down, right = np.mgrid[:HEIGHT, :WIDTH]
    waves = [np.sin(down / (3 + k) + k) + np.cos(right / (2 + k)) for k in range(count * channels)]
    noisy = 120 + 45 * np.stack(waves) + chance.normal(scale=9, size=(count * channels, HEIGHT, WIDTH))
    return torch.from_numpy(noisy.clip(0, 255).astype(np.uint8).reshape(count, channels, HEIGHT, WIDTH)) / 255


def to_pillow(image: Tensor) -> Image.Image:
    levels = (image * 255).round().to(torch.uint8).numpy()
    return Image.fromarray(levels[0] if len(levels) == 1 else levels.transpose(1, 2, 0))


def from_pillow(image: Image.Image) -> Tensor:
    values = torch.from_numpy(np.asarray(image).copy()) / 255
    return values[None] if values.dim() == 2 else values.permute(2, 0, 1)


def sheared(image: Image.Image, across: float, along: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, (1, across, 0, along, 1, 0), Image.Resampling.NEAREST)


def shifted(image: Image.Image, x: int, y: int) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, (1, 0, -x, 0, 1, -y), Image.Resampling.NEAREST)


def whole(number: float) -> int:
    return int(number)


PILLOWS = {
    "identity": lambda image, s: image,
    "shear-x": lambda image, s: sheared(image, 0.3 * s, 0),
    "shear-y": lambda image, s: sheared(image, 0, 0.3 * s),
    "translate-x": lambda image, s: shifted(image, whole(150 / 331 * WIDTH * s), 0),
    "translate-y": lambda image, s: shifted(image, 0, whole(150 / 331 * HEIGHT * s)),
    "rotate": lambda image, s: image.rotate(30 * s, Image.Resampling.NEAREST),
    "brightness": lambda image, s: ImageEnhance.Brightness(image).enhance(1 + 0.9 * s),
    "colour": lambda image, s: ImageEnhance.Color(image).enhance(1 + 0.9 * s),
    "contrast": lambda image, s: ImageEnhance.Contrast(image).enhance(1 + 0.9 * s),
    "sharpness": lambda image, s: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * s),
    "posterise": lambda image, s: ImageOps.posterize(image, 8 - round(4 * abs(s))),
    "solarise": lambda image, s: ImageOps.solarize(image, 255 * (1 - abs(s))),
    "auto-contrast": lambda image, s: ImageOps.autocontrast(image),
    "equalise": lambda image, s: ImageOps.equalize(image),
}
EXACT = {"identity", "shear-x", "shear-y", "translate-x", "translate-y", "posterise", "solarise", "equalise"}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("strength", [SIZE, -SIZE, 1.0, -0.5, 0.0])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_is_pillows(name: str, strength: float, channels: int) -> None:
    """Pillow rounds on the way, and turns about another point where pixels tie."""
    images = photographs(3, channels)
    found = OPERATIONS[name](images, torch.full((3,), strength, dtype=torch.float64))
    assert found.dtype == images.dtype
    for image, result in zip(images, found, strict=True):
        expected = from_pillow(PILLOWS[name](to_pillow(image), strength))
        difference = (result - expected).abs()
        if name == "rotate":
            assert (difference > 1e-6).double().mean() < 0.01
        else:
            assert difference.max() < (1e-6 if name in EXACT else 2.6 / 255), name


def test_every_operation_but_the_first_does_something() -> None:
    images = photographs(1)
    for name, operation in OPERATIONS.items():
        changed = not torch.equal(operation(images, torch.full((1,), SIZE, dtype=torch.float64)), images)
        assert changed == (name != "identity")


def test_channels_of_one_level_and_tiny_images_stay_as_they_are() -> None:
    flat = torch.full((1, 3, 2, 2), 0.4)
    for name in ("auto-contrast", "equalise", "contrast", "sharpness", "colour"):
        assert torch.allclose(OPERATIONS[name](flat, torch.ones(1, dtype=torch.float64)), flat, atol=1e-6)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return from_arrays(photographs(2), [0, 1], test_fraction=0)


def apply(text: str, images: Tensor, dataset: Dataset, clients: list[int], stream: int = 0) -> Tensor:
    return transforms.make(text).apply(images, client_keys(0, 1, clients, "augment"), stream, dataset)


def test_a_client_gets_the_same_in_any_stack_and_afresh_in_every_step(dataset: Dataset) -> None:
    images = photographs(6).expand(3, -1, -1, -1, -1)
    together = apply("randaugment", images, dataset, [4, 7, 9])
    for row, client in enumerate([4, 7, 9]):
        assert torch.equal(apply("randaugment", images[:1], dataset, [client])[0], together[row])
    assert not torch.equal(together[0], together[1])
    assert not torch.equal(together, apply("randaugment", images, dataset, [4, 7, 9], stream=1))


def test_operations_are_drawn_evenly_with_either_sign(dataset: Dataset) -> None:
    """Each image of a single operation is one of the results of all; every one of them comes up as often."""
    image, count = photographs(1), 1400
    results, signs = [], []
    for name, operation in OPERATIONS.items():
        for sign in (1, -1):
            results.append(operation(image, torch.full((1,), sign * SIZE, dtype=torch.float64))[0])
            signs.append((name, sign))
    drawn = apply("randaugment(operations=1)", image.expand(1, count, -1, -1, -1), dataset, [0])[0]
    equal = torch.stack([(drawn == result).flatten(1).all(1) for result in results])
    assert equal.any(0).all()
    shares = dict(zip(signs, equal.double().mean(1).tolist(), strict=True))
    signed = {"shear-x", "shear-y", "translate-x", "translate-y", "rotate", "brightness", "colour", "contrast"}
    for (name, _), share in shares.items():
        # A deviation of 0.005 and 0.007.
        assert share == pytest.approx(1 / 28 if name in signed | {"sharpness"} else 1 / 14, abs=0.025), name


def test_the_way_of_a_gpu_changes_images_as_that_of_a_cpu_does() -> None:
    images = photographs(2 * len(OPERATIONS))
    chosen = torch.arange(len(OPERATIONS)).repeat(2).flip(0)
    strength = torch.where(torch.arange(len(images)) % 3 == 0, -SIZE, SIZE).double()
    changed = change_all(images, chosen, strength)
    assert torch.equal(changed, change_in_groups(images, chosen, strength))
    assert torch.equal(changed[[13, 27]], images[[13, 27]]), "for these nothing was chosen"
    assert all(not torch.equal(changed[place], images[place]) for place in range(13))


def test_two_operations_follow_each_other(dataset: Dataset) -> None:
    """Only the identity twice leaves an image as it is: one in 196, of one operation one in 14."""
    image = photographs(1).expand(1, 2800, -1, -1, -1)
    for operations, share in ((1, 1 / 14), (2, 1 / 196)):
        drawn = apply(f"randaugment({operations})", image, dataset, [0])
        unchanged = (drawn == image).flatten(2).all(2).double().mean().item()
        assert unchanged == pytest.approx(share, abs=0.02 if operations == 1 else 0.005)


def test_magnitude_is_a_part_of_thirty(dataset: Dataset) -> None:
    image = photographs(1)
    brighter = [
        OPERATIONS["brightness"](image, torch.tensor([sign * 20 / 30], dtype=torch.float64)) for sign in (1, -1)
    ]
    drawn = apply("randaugment(1, 20)", image.expand(1, 300, -1, -1, -1), dataset, [0])[0]
    assert all((drawn == result).flatten(1).all(1).any() for result in brighter)


def test_both_engines_train_on_the_same_images() -> None:
    models = []
    for engine in ("loop", "stacked"):
        simulation = prepare("fedavg", engine, transforms="randaugment+normalise", evaluate_every=9, epochs=1)
        simulation.step()
        models.append(simulation.engine.server.model)
    for name, tensor in models[0].items():
        assert torch.allclose(tensor, models[1][name], rtol=1e-9, atol=1e-12), name


def test_it_needs_images_in_grey_or_colour_before_they_are_normalised() -> None:
    with pytest.raises(FedStrataError, match="1 or 3 channels, but those of the dataset"):
        transforms.make("randaugment").check(from_arrays(torch.rand(4, 2, 8, 8), [0, 1, 0, 1]))
    with pytest.raises(FedStrataError, match="works on images"):
        transforms.make("randaugment").check(from_arrays(torch.rand(4, 3), [0, 1, 0, 1]))
    with pytest.raises(FedStrataError, match="comes after 'normalise'; put it before"):
        parse_transforms("flip+normalise:imagenet+randaugment")
    assert [str(one) for one in parse_transforms("randaugment(3)+flip+normalise:imagenet")] == [
        "randaugment(operations=3)", "flip", "normalise(statistics=imagenet)",
    ]  # fmt: skip


def test_steps_that_it_keeps_from_being_replayed_name_it() -> None:
    """On a CPU it counts how many images are changed by each operation."""
    simulation = prepare("fedavg", "stacked", transforms="randaugment+normalise", replay=True)
    with pytest.warns(FedStrataWarning, match="longer: the transform 'randaugment' uses bincount, which looks"):
        simulation.step()
