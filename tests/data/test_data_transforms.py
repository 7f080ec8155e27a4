"""Transforms: by hand, against plain loops, and the same for a client whatever the stack around it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedstrata.data import Dataset, apply_transforms, from_arrays, parse_transforms, transforms
from fedstrata.data.transforms import Normalise, rotated
from fedstrata.errors import FedStrataError
from fedstrata.rng import client_keys

RANDOM = ["flip", "crop:2", "rotate:40"]


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    images = torch.tensor([[0.0, 1.0], [0.5, 1.5]]).reshape(2, 2, 1, 1).expand(2, 2, 6, 5).clone()
    return from_arrays(images, [0, 1], test_fraction=0)


@pytest.fixture(scope="module")
def images() -> Tensor:
    return torch.rand(3, 8, 2, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1


@pytest.fixture(scope="module")
def keys() -> Tensor:
    return client_keys(0, 1, [4, 7, 9], "augment")


def apply(text: str, inputs: Tensor, keys: Tensor, dataset: Dataset, stream: int = 0) -> Tensor:
    return transforms.make(text).apply(inputs, keys, stream, dataset)


def test_normalise_by_hand(dataset: Dataset, keys: Tensor) -> None:
    assert dataset.mean == (0.25, 1.25)
    assert dataset.deviation == (0.25, 0.25)
    result = apply("normalise", torch.ones(3, 1, 2, 6, 5), keys, dataset)
    assert result[:, :, 0].unique().tolist() == [3.0]
    assert result[:, :, 1].unique().tolist() == [-1.0]


def test_numbers_may_be_written_as_numbers_or_as_texts(dataset: Dataset, keys: Tensor) -> None:
    """The written form is that of a text, by which runs and recipes know their settings."""
    [written] = parse_transforms("normalise(mean='0.5', deviation='0.25')")
    assert str(written) == "normalise(mean='0.5', deviation='0.25')"
    assert parse_transforms("normalise(mean=0.5, deviation=0.25)") == (written,)
    assert Normalise(mean=0.5, deviation=0.25) == written
    assert parse_transforms("normalise(mean='1.0', deviation='2.0')") == parse_transforms(
        "normalise(mean=1,deviation=2)"
    )
    result = apply("normalise(mean=0.5, deviation=0.25)", torch.ones(3, 1, 2, 6, 5), keys, dataset)
    assert result.unique().tolist() == [2.0]
    with pytest.raises(FedStrataError, match="must be above 0"):
        parse_transforms("normalise(mean=0, deviation=0)")


def test_normalise_without_statistics_and_on_tables(keys: Tensor) -> None:
    plain = from_arrays(torch.zeros(2, 5, dtype=torch.int64), [0, 1])
    inputs = torch.rand(3, 4, 5)
    assert apply("normalise", inputs, keys, plain) is inputs
    table = from_arrays(torch.tensor([[0.0, 10.0], [2.0, 30.0]]), [0, 1], test_fraction=0)
    result = apply("normalise", torch.tensor([[[1.0, 20.0], [3.0, 10.0]]]), keys[:1], table)
    assert result.tolist() == [[[0.0, 0.0], [2.0, -1.0]]]


def test_the_statistics_of_imagenet(keys: Tensor) -> None:
    colour = from_arrays(torch.rand(4, 3, 6, 5), [0, 1, 0, 1])
    result = apply("normalise:imagenet", torch.ones(1, 1, 3, 6, 5, dtype=torch.float64), keys[:1], colour)
    expected = [(1 - 0.485) / 0.229, (1 - 0.456) / 0.224, (1 - 0.406) / 0.225]
    assert result[0, 0, :, 2, 3].tolist() == pytest.approx(expected, rel=1e-12)
    transforms.make("normalise:imagenet").check(colour)
    for inputs in (torch.rand(4, 1, 6, 5), torch.rand(4, 3)):
        with pytest.raises(FedStrataError, match="images in colour"):
            transforms.make("normalise:imagenet").check(from_arrays(inputs, [0, 1, 0, 1]))


@pytest.mark.parametrize("text", RANDOM)
def test_a_client_gets_the_same_in_any_stack(images: Tensor, keys: Tensor, dataset: Dataset, text: str) -> None:
    together = apply(text, images, keys, dataset, stream=5)
    for row in range(3):
        assert torch.equal(
            apply(text, images[row : row + 1], keys[row : row + 1], dataset, stream=5), together[row : row + 1]
        )
    order = torch.tensor([2, 0, 1])
    assert torch.equal(apply(text, images[order], keys[order], dataset, stream=5), together[order])


@pytest.mark.parametrize("text", RANDOM)
def test_both_precisions_take_the_same_pixels(images: Tensor, keys: Tensor, dataset: Dataset, text: str) -> None:
    wide, narrow = apply(text, images, keys, dataset), apply(text, images.float(), keys, dataset)
    assert narrow.dtype == torch.float32
    assert torch.equal(wide.float(), narrow)


@pytest.mark.parametrize("text", RANDOM)
def test_steps_and_clients_and_images_differ(keys: Tensor, dataset: Dataset, text: str) -> None:
    images = torch.rand(1, 1, 2, 6, 5, generator=torch.Generator().manual_seed(1)).expand(3, 30, 2, 6, 5) + 0.1
    first, second = apply(text, images, keys, dataset, stream=0), apply(text, images, keys, dataset, stream=1)
    assert not torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert len(torch.unique(first[0], dim=0)) > 1


def test_transforms_draw_independently(keys: Tensor) -> None:
    inputs = torch.zeros(3, 1000, 1, 2, 2)
    draws = {text: transforms.make(text).uniform(inputs, keys, 0, 1).flatten() for text in RANDOM}
    correlation = torch.corrcoef(torch.stack(list(draws.values())))
    assert (correlation - torch.eye(3)).abs().max() < 0.1


def test_flip_mirrors_with_its_probability(images: Tensor, keys: Tensor, dataset: Dataset) -> None:
    assert torch.equal(apply("flip:1", images, keys, dataset), images.flip(-1))
    assert torch.equal(apply("flip:0", images, keys, dataset), images)
    many = torch.arange(2.0).expand(3, 1000, 1, 1, 2)
    assert float(apply("flip", many, keys, dataset)[..., 0].mean()) == pytest.approx(0.5, abs=0.03)
    assert float(apply("flip:0.1", many, keys, dataset)[..., 0].mean()) == pytest.approx(0.1, abs=0.03)


def test_crop_cuts_out_of_the_padded_image(keys: Tensor, dataset: Dataset) -> None:
    images = torch.rand(1, 1, 2, 6, 5, generator=torch.Generator().manual_seed(0)).expand(3, 200, 2, 6, 5) + 0.1
    padded = F.pad(images[0, 0], (2, 2, 2, 2))
    windows = {(top, left): padded[:, top : top + 6, left : left + 5] for top in range(5) for left in range(5)}
    seen = set()
    for image in apply("crop:2", images, keys, dataset).flatten(0, 1):
        matches = [place for place, window in windows.items() if torch.equal(window, image)]
        assert len(matches) == 1
        seen.add(matches[0])
    assert seen == set(windows)


def test_a_quarter_turn_is_counter_clockwise() -> None:
    image = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[None]
    assert rotated(image, torch.tensor(math.pi / 2))[0].tolist() == [[2.0, 4.0], [1.0, 3.0]]
    assert rotated(image, torch.tensor(0.0))[0].tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_rotation_equals_a_sampling_grid(images: Tensor) -> None:
    angles = torch.linspace(-3, 3, 24, dtype=torch.float64)
    flat = images.flatten(0, 1)
    height, width = flat.shape[-2:]
    cosine, sine, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    first = torch.stack([cosine, -sine * height / width, zero], -1)
    second = torch.stack([sine * width / height, cosine, zero], -1)
    grid = F.affine_grid(torch.stack([first, second], 1), list(flat.shape), align_corners=False)
    expected = F.grid_sample(flat, grid, mode="nearest", padding_mode="zeros", align_corners=False)
    assert torch.equal(rotated(flat, angles), expected)


def test_rotation_stays_within_its_angle(dataset: Dataset, keys: Tensor) -> None:
    images = torch.rand(3, 50, 2, 6, 5) + 0.1
    assert torch.equal(apply("rotate(degrees=0.01)", images, keys, dataset), images)
    turned = apply("rotate:180", images, keys, dataset)
    assert (turned == 0).any()
    assert (turned != images).flatten(2).any(-1).float().mean() > 0.9


def test_transforms_apply_in_the_order_written(images: Tensor, keys: Tensor, dataset: Dataset) -> None:
    chosen = parse_transforms("flip+rotate:15+normalise+crop:1")
    assert [str(transform) for transform in chosen] == ["flip", "rotate", "normalise", "crop(padding=1)"]
    step = images
    for text in ("flip", "rotate:15", "normalise", "crop:1"):
        step = apply(text, step, keys, dataset, stream=3)
    result = apply_transforms(chosen, images, dataset, keys, stream=3)
    assert torch.equal(result, step)
    other = apply_transforms(parse_transforms("flip+rotate:15+crop:1+normalise"), images, dataset, keys, stream=3)
    assert not torch.equal(other, result)


def test_evaluation_applies_only_what_is_not_random(images: Tensor, keys: Tensor, dataset: Dataset) -> None:
    result = apply_transforms(parse_transforms("flip+crop:4+normalise+rotate:15"), images, dataset)
    assert torch.equal(result, apply("normalise", images, keys, dataset))


@pytest.mark.parametrize("text", ["none", "None", ""])
def test_nothing_can_be_asked_for(text: str) -> None:
    assert parse_transforms(text) == ()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("flop", "Did you mean 'flip'"),
        ("flip+crop:2+flip", "'flip' is given twice"),
        ("crop:0", "is outside what"),
        ("flip:2", "is outside what"),
        ("rotate:-3", "is outside what"),
        ("flip++crop", "a name is missing"),
    ],
)
def test_bad_transforms_get_one_sentence(text: str, sentence: str) -> None:
    with pytest.raises(FedStrataError, match=sentence):
        parse_transforms(text)


@pytest.mark.parametrize("text", RANDOM)
def test_tables_are_not_images(text: str, keys: Tensor) -> None:
    table = from_arrays(torch.rand(4, 7), [0, 1, 0, 1], name="table")
    with pytest.raises(FedStrataError, match=r"works on images.*'table' have the shape \(7,\)"):
        apply(text, torch.rand(3, 2, 7), keys, table)
