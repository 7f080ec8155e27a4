"""Datasets of other libraries as they are: of PyTorch, and of the Hugging Face hub."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import fedstrata
from fedstrata.data import Dataset, from_arrays, from_clients, read_data
from fedstrata.errors import FedStrataError, FedStrataWarning

hub = pytest.importorskip("datasets")


class Records(torch.utils.data.Dataset[Any]):
    """Yields what it was given, as users' datasets do."""

    def __init__(self, *items: Any, classes: list[str] | None = None) -> None:
        self.items = items
        if classes is not None:
            self.classes = classes

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index % len(self.items)]


def picture(red: int, mode: str = "RGB") -> Image.Image:
    return Image.new("RGB", (4, 4), (red, 0, 0)).convert(mode)


def pictures(labels: list[int], names: list[str] | None = None) -> Any:
    kind = hub.Value("int64") if names is None else hub.ClassLabel(names=names)
    features = hub.Features({"image": hub.Image(), "label": kind})
    columns = {"image": [picture(place) for place in range(len(labels))], "label": labels}
    return hub.Dataset.from_dict(columns, features=features)


def pairs(count: int = 8) -> TensorDataset:
    return TensorDataset(torch.arange(2.0 * count).reshape(count, 2), torch.arange(count) % 2)


def test_pairs_and_records_of_a_torch_dataset_are_alike() -> None:
    inputs = [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])]
    for dataset in (
        Records(*((one, place) for place, one in enumerate(inputs))),
        Records(*([one.numpy(), place] for place, one in enumerate(inputs))),
        Records(*({"x": one, "label": place} for place, one in enumerate(inputs))),
        Records(*({"target": np.int64(place), "pixels": one.tolist()} for place, one in enumerate(inputs))),
    ):
        made = from_arrays(dataset)
        assert made.inputs.tolist() == [[1, 2], [3, 4]]
        assert made.labels.tolist() == [0, 1]


def test_subsets_and_joined_datasets_are_taken_as_they_are() -> None:
    assert from_arrays(Subset(pairs(), [1, 3, 4, 6])).inputs[:, 0].tolist() == [2, 6, 8, 12]
    assert len(from_arrays(ConcatDataset([pairs(), pairs()])).labels) == 16


def test_class_names_come_from_the_dataset() -> None:
    named = Records((torch.rand(2), 0), (torch.rand(2), 1), (torch.rand(2), 1), classes=["cat", "dog", "cow"])
    assert from_arrays(named).class_names == ("cat", "dog", "cow")
    assert from_arrays(Subset(named, [0, 1])).class_names == ("cat", "dog", "cow")
    assert from_arrays(Records((torch.rand(2), 5), (torch.rand(2), 9), classes=["a"])).class_names == ("5", "9")
    assert from_arrays(pictures([0, 1], ["cat", "dog"])).class_names == ("cat", "dog")
    assert from_arrays(pictures([4, 2])).class_names == ("2", "4")


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "RGBA", "I;16"])
def test_pictures_of_all_modes(mode: str) -> None:
    dataset = from_arrays(Records((picture(200, mode), 0), (picture(0, mode), 1)))
    grey = mode in ("L", "1", "I;16")
    assert dataset.input_shape == (1 if grey else 3, 4, 4)
    assert dataset.inputs.dtype == (torch.float32 if mode == "I;16" else torch.uint8)
    assert dataset.inputs[0].max() > dataset.inputs[1].max() or mode == "1"


def test_pictures_of_the_hub() -> None:
    dataset = from_arrays(pictures([0, 1, 0, 1], ["cat", "dog"]))
    assert dataset.inputs.dtype == torch.uint8
    assert dataset.inputs[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
    assert dataset.labels.tolist() == [0, 1, 0, 1]


def test_tokens_of_the_hub_stay_whole_numbers() -> None:
    tokens = hub.Dataset.from_dict({"input_ids": [[5, 6], [7, 8]], "mask": [[1, 1], [1, 1]], "labels": [0, 1]})
    dataset = from_arrays(tokens, features="input_ids")
    assert dataset.inputs.tolist() == [[5, 6], [7, 8]]
    assert dataset.whole_numbers
    for changed in (tokens.with_format("torch"), tokens.with_format("numpy")):
        assert torch.equal(from_arrays(changed, features="input_ids").inputs, dataset.inputs)


def test_a_transform_of_the_user_applies() -> None:
    changed = pictures([0, 1]).with_transform(
        lambda batch: {"x": [np.full(3, np.array(one).max()) / 2 for one in batch["image"]], "label": batch["label"]}
    )
    assert from_arrays(changed).inputs.tolist() == [[0, 0, 0], [0.5, 0.5, 0.5]]


def test_single_values_of_the_hub_are_a_table() -> None:
    columns = {"age": [1.0, None, 3.0, 5.0], "sex": ["f", "m", "f", "m"], "ill": [0, 1, 1, 0]}
    kinds = {"age": hub.Value("float64"), "sex": hub.Value("string"), "ill": hub.ClassLabel(names=["well", "ill"])}
    rows = hub.Dataset.from_dict(columns, features=hub.Features(kinds))
    dataset = from_arrays(rows, test_fraction=0)
    assert dataset.class_names == ("well", "ill")
    assert from_clients({"a": rows, "b": rows}, label="ill")[0].class_names == ("well", "ill")
    assert dataset.labels.tolist() == [0, 1, 1, 0]
    assert dataset.inputs.tolist() == [[1, 0, 1, 0], [3, 1, 0, 1], [3, 0, 1, 0], [5, 0, 0, 1]]


def test_parts_of_the_hub_are_training_and_test() -> None:
    parts = hub.DatasetDict(train=pictures([0, 1, 0], ["a", "b"]), test=pictures([1], ["a", "b"]))
    dataset, split = read_data(parts)
    assert split is None
    assert dataset.train.tolist() == [0, 1, 2]
    assert dataset.test.tolist() == [3]
    parts["validation"] = parts.pop("test")
    parts["unlabelled"] = parts["train"]
    with pytest.warns(FedStrataWarning, match="'validation' is the part to test on, and 'unlabelled' not used"):
        assert len(read_data(parts)[0].test) == 1


def test_clients_have_datasets_of_any_kind() -> None:
    for one, tests in (
        (pairs(), 2),
        (Subset(pairs(16), range(8)), 2),
        ((pairs(), pairs(4)), 4),
        ({"train": pairs(), "test": pairs(4)}, 4),
        (pictures([0, 1] * 4, ["a", "b"]), 2),
        (hub.DatasetDict(train=pictures([0, 1] * 4), test=pictures([0, 1] * 2)), 4),
    ):
        dataset, split = from_clients({"north": one, "south": one})
        assert split.sizes.tolist() == [8 if tests == 4 else 6] * 2
        assert [len(part) for part in split.test] == [tests] * 2
        assert dataset.sites is not None
        assert dataset.sites[split.train[1]].tolist() == ["south"] * split.sizes[1]


def test_run_takes_them_as_they_are() -> None:
    settings: dict[str, Any] = {"model": "mlp:8", "rounds": 1, "epochs": 1, "partition": "iid", "clients": 2}
    arrays = (torch.rand(16, 2), torch.arange(16) % 2)
    for data in (pairs(16), (pairs(16), pairs(8)), pictures([0, 1] * 8), arrays, (*arrays, *arrays)):
        assert fedstrata.run(data=data, **settings).summary["clients"] == 2
    by_client = {"a": pictures([0, 1] * 8), "b": pictures([1, 0] * 8), "c": pictures([1, 0] * 8)}
    assert fedstrata.run(data=by_client, model="mlp:8", rounds=1, epochs=1).summary["clients"] == 3


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (7, "A int is no data; give the name of a dataset"),
        ([1, 2], "A list of int, int is no data"),
        (torch.rand(3, 2), "A Tensor is no data"),
        ((torch.rand(3, 2), torch.zeros(3), 1), "A tuple of Tensor, Tensor, int is no data"),
        ({"a": 7}, "The client 'a' must be .* it is a int"),
        ({"a": pairs(), "b": {"label": [1], "x": [1]}}, "no entry of the client 'b'"),
        (Records((torch.rand(2), 0, 1)), "not \\(input, label\\) pairs, but 3 values for a sample"),
        (Records(torch.rand(2)), "not \\(input, label\\) pairs, but a Tensor"),
        (Records({"a": 1, "b": 2}), "None of the columns .* with label=... .* it has 'a', 'b'"),
        (Records({"a": 1, "b": 2, "label": 2}), "2 entries beside the label \\('a', 'b'\\); name .* features=..."),
        (Records((picture(1), 0), (picture(1).resize((5, 5)), 1)), "scale images"),
        (pictures([-1, 0], ["a", "b"]), "range from -1 to 0.*often marks a sample without one"),
        ({"a": pictures([0, 1], ["a", "b"]), "b": pictures([0, 1], ["b", "a"])}, "name them alike"),
    ],
)
def test_bad_data_gets_one_sentence(given: Any, sentence: str) -> None:
    with pytest.raises(FedStrataError, match=sentence):
        read_data(given)


def test_columns_that_are_named_must_be_there() -> None:
    with pytest.raises(FedStrataError, match=r"no column of the dataset 'arrays' called 'lable'.*Did you mean 'label'"):
        from_arrays(pictures([0, 1]), label="lable")
    with pytest.raises(FedStrataError, match=r"called 'img'.*Known: image"):
        from_arrays(pictures([0, 1]), features="img")


def test_tables_and_arrays_do_not_mix() -> None:
    table = {"age": [1.0, 2.0], "label": [0, 1]}
    given = {"a": hub.Dataset.from_dict(table), "b": (torch.rand(2, 1), [0, 1])}
    with pytest.raises(FedStrataError, match="Some clients have a table, but the client 'b' a Tensor"):
        from_clients(given)


def test_data_that_changed_its_classes_is_not_gone_on_with(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def data(labels: list[str]) -> Dataset:
        return from_arrays(torch.arange(16.0).reshape(8, 2), labels)

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    settings: dict[str, Any] = {"model": "mlp:4", "partition": "iid", "clients": 2, "epochs": 1, "checkpoint_every": 1}
    monkeypatch.setattr("fedstrata.api.Driver.run", stop)  # whichever module was loaded before
    with pytest.raises(KeyboardInterrupt):
        fedstrata.run(data=data(["a", "b"] * 4), rounds=2, out=tmp_path / "run", **settings)
    monkeypatch.undo()
    with pytest.raises(FedStrataError, match="nobody trained on the label 'c'; its classes were a, b"):
        fedstrata.resume(tmp_path / "run", data=data(["a", "c"] * 4), model=None)


def test_a_client_without_samples_gets_one_sentence() -> None:
    with pytest.raises(FedStrataError, match="There are no samples in the client 'b'"):
        from_clients({"a": pairs(), "b": Subset(pairs(), [])})


def test_arrays_called_as_parts_are_these_and_not_clients() -> None:
    """They were two clients, train and test, each of which trained on most of its samples."""
    first, last = (torch.rand(16, 2), torch.arange(16) % 2), (torch.rand(8, 2), torch.arange(8) % 2)
    for given in (
        {"train": first, "test": last},
        {"Test": {"inputs": last[0], "labels": last[1]}, "TRAINING": list(first)},
        {"train": TensorDataset(*first), "testing": last},
    ):
        dataset, split = read_data(given)
        assert split is None
        assert torch.equal(dataset.inputs[torch.from_numpy(dataset.train)], first[0])
        assert torch.equal(dataset.inputs[torch.from_numpy(dataset.test)], last[0])
    columns = {"age": [1.0, 2.0, 4.0, 3.0], "label": [0, 1, 0, 1]}
    assert len(read_data({"train": columns, "test": columns})[0].test) == 4
    with pytest.warns(FedStrataWarning, match="'val' is the part to test on"):
        assert len(read_data({"train": first, "val": last})[0].test) == 8
    result = fedstrata.run(
        data={"train": first, "test": last}, model="mlp:4", clients=4, partition="iid", rounds=1, epochs=1
    )
    assert result.summary["clients"] == 4
    assert read_data({"north": first, "test": last})[1] is not None
    assert len(from_clients({"train": first, "test": last})[1].train) == 2
    assert [len(part) for part in from_clients({"north": {"train": first, "test": last}})[1].test] == [8]
