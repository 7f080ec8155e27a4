"""Datasets from arrays, pairs and dicts of clients; channel statistics."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset

from fedstrata.data import from_arrays, from_clients
from fedstrata.data.channels import channel_statistics
from fedstrata.errors import FedStrataError

LABELS = [0, 1, 0, 1, 0, 1, 0, 1]


def test_channel_statistics_by_hand() -> None:
    images = torch.tensor([[[[0, 255]], [[51, 51]]], [[[255, 0]], [[51, 51]]]], dtype=torch.uint8)
    mean, deviation = channel_statistics(images)
    assert mean == pytest.approx((0.5, 0.2))
    assert deviation == pytest.approx((0.5, 1.0))
    assert channel_statistics(torch.tensor([[1.0], [3.0]])) == ((2.0,), (1.0,))
    assert channel_statistics(torch.zeros(2, 5, dtype=torch.int64)) == (None, None)


def test_channel_statistics_over_many_chunks_equal_numpy() -> None:
    values = torch.from_numpy(np.random.default_rng(0).normal(100, 3, (9001, 2)))
    mean, deviation = channel_statistics(values)
    assert mean == pytest.approx(values.numpy().mean(0).tolist())
    assert deviation == pytest.approx(values.numpy().std(0).tolist())


@pytest.mark.parametrize("kind", ["tensor", "numpy", "list"])
def test_arrays_of_any_kind(kind: str) -> None:
    values = np.arange(16.0).reshape(8, 2)
    inputs = {"tensor": torch.from_numpy(values), "numpy": values, "list": values.tolist()}[kind]
    dataset = from_arrays(inputs, LABELS, name="mine")
    assert dataset.inputs.shape == (8, 2)
    assert dataset.labels.tolist() == LABELS
    assert dataset.test.tolist() == [4, 5]
    assert dataset.class_names == ("0", "1")
    assert dataset.mean == pytest.approx(values[dataset.train].mean(0).tolist())


def test_given_test_arrays_are_the_test_part() -> None:
    dataset = from_arrays(torch.zeros(3, 1, 2, 2), [0, 1, 2], torch.ones(2, 1, 2, 2), [3, 0], class_names=list("abcde"))
    assert dataset.train.tolist() == [0, 1, 2]
    assert dataset.test.tolist() == [3, 4]
    assert dataset.classes == 5
    assert dataset.mean == (0.0,)


def test_pairs_from_a_torch_dataset_a_generator_and_pictures() -> None:
    pairs = TensorDataset(torch.arange(8.0)[:, None], torch.tensor(LABELS))
    assert from_arrays(pairs).labels.tolist() == LABELS

    class Endless(torch.utils.data.Dataset[tuple[Tensor, int]]):
        """Knows its length but never raises IndexError, as many user datasets do."""

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.tensor([float(index)]), index % 2

    assert from_arrays(Endless(), test_inputs=Endless()).inputs.flatten().tolist() == [0, 1, 2, 3, 0, 1, 2, 3]

    def pictures() -> Iterator[tuple[Image.Image, int]]:
        for label in range(4):
            yield Image.new("RGB", (5, 3), (label, 10, 20)), label

    dataset = from_arrays(pictures())
    assert dataset.inputs.shape == (4, 3, 3, 5)
    assert dataset.inputs.dtype == torch.uint8
    assert dataset.inputs[2, :, 0, 0].tolist() == [2, 10, 20]


def test_sites_are_held_out_each_for_itself() -> None:
    dataset = from_arrays(torch.rand(16, 1), [0] * 16, sites=["a"] * 4 + ["b"] * 12)
    assert dataset.sites is not None
    assert dataset.sites[dataset.test].tolist() == ["a", "b", "b", "b"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"inputs": torch.rand(3, 2), "labels": [0, 1]}, "3 inputs but 2 labels"),
        ({"inputs": torch.rand(2, 2), "labels": [0.5, 1]}, "not whole numbers"),
        ({"inputs": torch.rand(2, 2), "labels": torch.eye(2)}, r"shape \(2, 2\).*one class number"),
        ({"inputs": torch.rand(2, 2)}, "no labels"),
        ({"inputs": [1, 2, 3]}, "not \\(input, label\\) pairs"),
        ({"inputs": [[1.0], [1.0, 2.0]], "labels": [0, 1]}, "cannot become one tensor"),
        ({"inputs": torch.empty(0, 2), "labels": []}, "no samples"),
        ({"inputs": torch.tensor([[1.0], [float("nan")]]), "labels": [0, 1]}, "NaN"),
        ({"inputs": torch.rand(2, 2), "labels": [0, -1]}, "range from -1"),
        ({"inputs": torch.rand(2, 2), "labels": [0, 5], "class_names": ["a", "b"]}, "0 to 5"),
        ({"inputs": torch.rand(2, 2), "labels": [0, 1], "sites": ["a"]}, "1 sites for the 2 samples"),
        ({"inputs": torch.rand(2, 2), "labels": [0, 1], "test_fraction": 1.0}, "test fraction 1.0"),
        ({"inputs": torch.rand(2, 2), "labels": [0, 1], "test_inputs": torch.rand(1, 3), "test_labels": [0]}, "alike"),
    ],
)
def test_bad_arrays_get_one_sentence(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(FedStrataError, match=sentence):
        from_arrays(**arguments)  # type: ignore[arg-type]


def test_clients_become_a_pool_and_a_split() -> None:
    dataset, split = from_clients(
        {
            "north": (torch.zeros(4, 2), [0, 0, 1, 1]),
            "south": {
                "inputs": torch.ones(3, 2),
                "labels": [2, 2, 2],
                "test_inputs": torch.full((2, 2), 5.0),
                "test_labels": [2, 1],
            },
        },
        test_fraction=0.5,
    )
    assert [part.tolist() for part in split.train] == [[0, 2], [4, 5, 6]]
    assert [part.tolist() for part in split.test] == [[1, 3], [7, 8]]
    assert dataset.train.tolist() == [0, 2, 4, 5, 6]
    assert dataset.inputs[split.test[1]].unique().tolist() == [5.0]
    assert dataset.sites is not None
    assert dataset.sites.tolist() == ["north"] * 4 + ["south"] * 5
    assert dataset.classes == 3


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        ({}, "no clients"),
        ({"a": (torch.rand(2, 2),)}, "must be \\(inputs, labels\\)"),
        ({"a": {"inputs": torch.rand(2, 2), "label": [0, 1]}}, "Did you mean 'labels'"),
        ({"a": {"inputs": torch.rand(2, 2), "labels": [0, 1], "test_inputs": torch.rand(1, 2)}}, "must be"),
        ({"a": (torch.rand(2, 2), [0, 1]), "b": (torch.rand(2, 3), [0, 1])}, "client 'b' are \\(3,\\)"),
    ],
)
def test_bad_clients_get_one_sentence(clients: dict[str, object], sentence: str) -> None:
    with pytest.raises(FedStrataError, match=sentence):
        from_clients(clients)  # type: ignore[arg-type]
