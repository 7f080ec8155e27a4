"""Datasets from arrays, pairs and dicts of clients; channel statistics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import TensorDataset

from fedstrata.data import Split, from_arrays, from_clients, parse_transforms
from fedstrata.data.channels import channel_statistics
from fedstrata.engines.batches import DeviceData
from fedstrata.errors import FedStrataError, FedStrataWarning

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
    with pytest.warns(FedStrataWarning, match="The label 'd' is only in the test samples of the dataset 'arrays'"):
        dataset = from_arrays(
            torch.zeros(3, 1, 2, 2), [0, 1, 2], torch.ones(2, 1, 2, 2), [3, 0], class_names=list("abcde")
        )
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


@pytest.mark.parametrize(
    ("labels", "names", "numbers"),
    [
        ([1, 2, 3, 1], ("1", "2", "3"), [0, 1, 2, 0]),
        ([-1, 1, 1, -1], ("-1", "1"), [0, 1, 1, 0]),
        (["ill", "well", "ill", "well"], ("ill", "well"), [0, 1, 0, 1]),
        (np.array(["b", "a", "b", "a"]), ("a", "b"), [1, 0, 1, 0]),
        (pd.Series(["b", "a", "b", "a"]), ("a", "b"), [1, 0, 1, 0]),
        (pd.Categorical(["b", "a", "b", "a"]), ("a", "b"), [1, 0, 1, 0]),
        (pd.Series([10, 9, 10, 9]), ("9", "10"), [1, 0, 1, 0]),
        ([True, False, True, False], ("False", "True"), [1, 0, 1, 0]),
        ([2.0, 1.0, 2.0, 1.0], ("1", "2"), [1, 0, 1, 0]),
        (torch.tensor([[5], [7], [5], [7]]), ("5", "7"), [0, 1, 0, 1]),
    ],
)
def test_labels_of_any_kind(labels: object, names: tuple[str, ...], numbers: list[int]) -> None:
    for dataset in (from_arrays(torch.rand(4, 2), labels), from_clients({"a": (torch.rand(4, 2), labels)})[0]):
        assert dataset.class_names == names
        assert dataset.labels.tolist() == numbers


def test_labels_are_names_of_classes_or_number_them() -> None:
    for labels, names, numbers in (
        ([1, 2], ("1", "2", "3"), [0, 1]),
        ([1, 2], ("a", "b", "c"), [1, 2]),
        (["c", "a"], ("c", "b", "a"), [0, 2]),
        ([False, True], ("well", "ill"), [0, 1]),
    ):
        dataset = from_arrays(torch.rand(2, 2), labels, class_names=names)
        assert dataset.class_names == names
        assert dataset.labels.tolist() == numbers


def test_clients_may_have_different_classes() -> None:
    dataset, split = from_clients({"a": (torch.rand(2, 2), ["x", "z"]), "b": (torch.rand(2, 2), ["y", "x"])})
    assert dataset.class_names == ("x", "y", "z")
    assert dataset.labels.tolist() == [0, 2, 1, 0]
    assert split.clients == 2


def test_inputs_keep_what_they_are() -> None:
    for given, expected in (
        (np.zeros((2, 3), dtype=np.uint16), torch.int64),
        (torch.zeros(2, 3, dtype=torch.int32), torch.int64),
        ([[1, 2], [3, 4]], torch.int64),
        (np.zeros((2, 1, 4, 4), dtype=np.uint8), torch.uint8),
        (torch.zeros(2, 3, dtype=torch.float64), torch.float64),
        (torch.zeros(2, 3, dtype=torch.bool), torch.float32),
        (pd.DataFrame({"a": [1, 2], "b": [0.5, 1]}), torch.float32),
    ):
        dataset = from_arrays(given, [0, 1])
        assert dataset.inputs.dtype == expected
        assert dataset.whole_numbers == (expected == torch.int64)
        assert (dataset.mean is None) == dataset.whole_numbers


def test_whole_numbers_reach_the_model_untouched() -> None:
    dataset = replace(from_arrays([[7, 300], [8, 2]], [0, 1]), mean=(1.0, 1.0), deviation=(2.0, 2.0))
    split = Split((np.array([0, 1]),), (np.array([], dtype=np.int64),))
    data = DeviceData(dataset, split, parse_transforms("normalise"), torch.device("cpu"), torch.float32)
    inputs, _ = data.make(torch.tensor([[0, 1]]), None)
    assert inputs.dtype == torch.int64
    assert inputs.tolist() == [[[7, 300], [8, 2]]]


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
        ({"inputs": torch.rand(2, 2), "labels": [0, -1], "class_names": ["a", "b"]}, "range from -1"),
        ({"inputs": torch.rand(2, 2), "labels": ["a", 1]}, r"mixed types \(int, str\)"),
        ({"inputs": torch.rand(2, 2), "labels": ["a", None]}, "1 of the 2 samples .* have no label"),
        ({"inputs": torch.rand(2, 2), "labels": [0, float("nan")]}, "1 of the 2 samples .* have no label"),
        ({"inputs": torch.rand(2, 2), "labels": ["a", "c"], "class_names": ["a", "b"]}, "'c' .* none of the classes"),
        ({"inputs": torch.rand(2, 2), "labels": [0, 1], "class_names": ["a", "a"]}, "Two classes .* called 'a'"),
        ({"inputs": torch.rand(2, 2), "labels": torch.eye(2)}, r"labels.argmax\(1\)"),
        ({"inputs": ["some", "texts"], "labels": [0, 1]}, "hold texts; give numbers.* tokeniser"),
        ({"inputs": np.array([[1, None], [2, 3]]), "labels": [0, 1]}, "are objects, such as a int"),
        ({"inputs": pd.DataFrame({"sex": ["m", "f"]}), "labels": [0, 1]}, "'sex' .* holds texts; fedstrata.from_table"),
        ({"inputs": pd.DataFrame({"age": [1, None]}), "labels": [0, 1]}, "'age' .* has gaps; fedstrata.from_table"),
        ({"inputs": "file.csv", "labels": [0, 1]}, "the text 'file.csv'.* fedstrata.from_table"),
        ({"inputs": torch.rand(2, 2).cfloat(), "labels": [0, 1]}, "complex"),
        (
            {"inputs": torch.rand(2, 2), "labels": ["a", "b"], "test_inputs": torch.rand(1, 2), "test_labels": ["B"]},
            "The label 'B' is only in the test samples .*training knows 'a', 'b'",
        ),
        (
            {"inputs": torch.rand(2, 2), "labels": ["a", "b"], "test_inputs": torch.rand(1, 2), "test_labels": [0]},
            "are whole numbers, such as 0, those of .* texts, such as 'a'",
        ),
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


@pytest.mark.parametrize("gap", [None, float("nan"), pd.NA])
def test_a_sample_without_a_site_is_named(gap: object) -> None:
    """They were not to be compared with texts; among numbers, nan was a site of its own."""
    for sites in ([gap, "a"], [gap, 1]):
        owners = pd.Series(["b", "b", *sites])
        with pytest.raises(FedStrataError, match="Sample 3 of the dataset 'arrays' has no site; give one, or drop it"):
            from_arrays(torch.rand(4, 1), [0, 1, 0, 1], sites=owners)
    with pytest.raises(FedStrataError, match="Sample 2 of"):
        from_arrays(torch.rand(2, 1), [0, 1], sites=np.array([1.0, np.nan]))


def test_clients_are_not_of_one_name() -> None:
    """One of them was lost with all its samples."""
    one = (torch.rand(4, 2), [0, 0, 1, 1])
    with pytest.raises(FedStrataError, match="Two clients are called '0', written as a text"):
        from_clients({0: one, "0": one})


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_with_channels_last_are_refused(channels: int) -> None:
    images = np.zeros((4, 32, 32, channels), dtype=np.uint8)
    sentence = rf"\(4, 32, 32, {channels}\), which would be 32 channels of 32 x {channels} .*transpose\(0, 3, 1, 2\)"
    one_by_one = TensorDataset(torch.from_numpy(images), torch.tensor([0, 1, 0, 1]))
    for given in ((images, [0, 1] * 2), (images / 255, [0, 1] * 2), (one_by_one,), (images[:, :24], [0, 1] * 2)):
        if given[0] is not images and isinstance(given[0], np.ndarray) and given[0].dtype == np.uint8:
            sentence = sentence.replace("4, 32, 32", "4, 24, 32").replace("be 32", "be 24")
        with pytest.raises(FedStrataError, match=sentence):
            from_arrays(*given)
    assert from_arrays(images.transpose(0, 3, 1, 2), [0, 1] * 2).input_shape == (channels, 32, 32)
    signals = np.random.default_rng(0).normal(size=(4, 22, 100, 1))  # of 22 electrodes: no image
    assert from_arrays(signals, [0, 1] * 2).input_shape == (22, 100, 1)


def test_labels_that_differ_in_capitals_are_told_of() -> None:
    with pytest.warns(FedStrataWarning, match="'Yes', 'yes' of the dataset 'arrays' differ only in capitals"):
        from_arrays(torch.rand(4, 1), ["yes", "Yes", "no", "no"], test_fraction=0)
    with pytest.warns(FedStrataWarning, match="'Yes', 'yes' of the dataset 'clients' differ only in capitals"):
        from_clients({"a": (torch.rand(2, 1), ["yes", "no"]), "b": (torch.rand(2, 1), ["Yes", "no"])})
