"""Datasets named as on the hub: saved by ``datasets``, or as Parquet shards; nothing is fetched unasked."""

from __future__ import annotations

import sys
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import fedstrata
from fedstrata.data import Dataset, datasets, download
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.testing import check_dataset

hub = pytest.importorskip("datasets")
NAMES = ["cat", "dog"]


@pytest.fixture(autouse=True)
def _no_other_roots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("FEDSTRATA_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))


def load(text: str, root: Path | None) -> Dataset:
    return datasets.make(text).load(root)


def picture(shade: int, mode: str = "RGB", side: int = 6) -> Image.Image:
    return Image.new(mode, (side, side), (shade, 0, 0) if mode == "RGB" else shade)


def pictures(shades: list[int], modes: str = "RGB") -> Any:
    features = {"picture": hub.Image(), "kind": hub.ClassLabel(names=NAMES)}
    features |= {"writer": hub.Value("string"), "id": hub.Value("int64")}
    columns = {
        "picture": [picture(shade, modes) for shade in shades],
        "kind": [shade % 2 for shade in shades],
        "writer": [f"w{shade % 3}" for shade in shades],
        "id": shades,
    }
    return hub.Dataset.from_dict(columns, features=hub.Features(features))


def test_images_that_datasets_saved(tmp_path: Path) -> None:
    parts = {"train": pictures([1, 2, 3, 4, 5, 6]), "test": pictures([7, 8, 9])}
    hub.DatasetDict(parts).save_to_disk(str(tmp_path / "owner" / "animals"))
    dataset = load("hub(owner/animals, site=writer)", tmp_path)
    assert dataset.inputs.shape == (9, 3, 6, 6)
    assert dataset.inputs[:, 0, 0, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert dataset.labels.tolist() == [1, 0, 1, 0, 1, 0, 1, 0, 1]
    assert dataset.class_names == ("cat", "dog")
    assert (len(dataset.train), dataset.test.tolist()) == (6, [6, 7, 8])
    assert dataset.sites is not None
    assert dataset.sites.tolist() == ["w1", "w2", "w0"] * 3
    assert dataset.name == "hub(repository=owner/animals, site=writer)"
    check_dataset(dataset)
    grown = load("hub(owner/animals, size=3, test=train, train=test)", tmp_path)
    assert grown.inputs.shape == (9, 3, 3, 3)
    assert len(grown.test) == 6


def test_one_saved_part_of_grey_images_in_several_files(tmp_path: Path) -> None:
    pictures([1, 2, 3, 4, 5, 6, 7, 8], "L").save_to_disk(str(tmp_path / "set"), num_shards=3)
    dataset = load("hub(owner/other, test_fraction=0.5)", tmp_path / "set")
    assert dataset.inputs.shape == (8, 1, 6, 6)
    assert dataset.inputs[:, 0, 0, 0].tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert np.bincount(dataset.labels.numpy()[dataset.test]).tolist() == [2, 2]


@pytest.mark.parametrize(
    "layout", ["data/{part}-00000-of-00001.parquet", "small/{part}/0000.parquet", "{part}.parquet"]
)
def test_parquet_as_on_the_hub(tmp_path: Path, layout: str) -> None:
    """The owner's layout, that of the hub's own conversion with a configuration, and plain files."""
    for part, shades in (("train", [1, 2, 3, 4]), ("validation", [5, 6])):
        path = tmp_path / "hub" / "owner" / "animals" / layout.format(part=part)
        path.parent.mkdir(parents=True, exist_ok=True)
        pictures(shades).to_parquet(str(path))
    dataset = load("hub:owner/animals", tmp_path)
    assert dataset.class_names == ("cat", "dog")
    assert dataset.test.tolist() == [4, 5]
    if "small" in layout:
        assert len(load("hub(owner/animals, configuration=small)", tmp_path).inputs) == 6
        pq.write_table(pa.table({"label": [1]}), path.parent.parent / "train.parquet")
        (path.parents[2] / "large").mkdir()
        pq.write_table(pa.table({"label": [1]}), path.parents[2] / "large" / "train.parquet")
        with pytest.raises(FedStrataError, match=r"configurations 'large', 'small'; name one with configuration="):
            load("hub:owner/animals", tmp_path)


def test_single_values_become_a_table(tmp_path: Path) -> None:
    rows = {"age": [30, 40, 50, 60] * 3, "sex": ["f", "m"] * 6, "clinic": ["a", "b", "c"] * 4, "label": [0, 1] * 6}
    features = {"age": hub.Value("int64"), "sex": hub.Value("string"), "clinic": hub.Value("string")}
    features |= {"label": hub.ClassLabel(names=["well", "ill"])}
    hub.Dataset.from_dict(rows, features=hub.Features(features)).save_to_disk(str(tmp_path / "patients"))
    dataset = load("hub(owner/patients, site=clinic)", tmp_path)
    assert dataset.table is not None
    assert dataset.table.inputs == ("age", "sex=f", "sex=m")
    assert dataset.class_names == ("well", "ill")
    assert dataset.labels.tolist() == [0, 1] * 6
    other = load("hub(owner/patients, features=age+sex, test_fraction=0)", tmp_path)
    assert datasets.make("hub:owner/patients").load_as(other.table, tmp_path).inputs.shape == (12, 3)  # type: ignore[attr-defined]
    ages = load("hub(owner/patients, features=age)", tmp_path)
    assert ages.inputs.tolist() == [[30.0], [40.0], [50.0], [60.0]] * 3


def test_texts_become_tokens(tmp_path: Path) -> None:
    """Of a set with a text and a label nothing has to be said; else the column of texts is named."""
    rows = {"text": ["good film", "bad film", "so good", "so bad"] * 2, "label": [1, 0] * 4}
    features = hub.Features({"text": hub.Value("string"), "label": hub.ClassLabel(names=["negative", "positive"])})
    parts = {"train": hub.Dataset.from_dict(rows, features), "test": hub.Dataset.from_dict(rows, features)}
    hub.DatasetDict(parts).save_to_disk(str(tmp_path / "reviews"))
    dataset = load("hub(owner/reviews, length=3)", tmp_path)
    assert dataset.vocabulary is not None
    assert dataset.vocabulary.tokens == ("[PAD]", "[UNK]", "bad", "film", "good", "so")
    assert dataset.inputs[[0, 3, 8]].tolist() == [[4, 3, 0], [5, 2, 0], [4, 3, 0]]
    assert dataset.class_names == ("negative", "positive")
    (tmp_path / "tokens.txt").write_text("film\ngood\n")
    given = load("hub(owner/reviews, text=text, length=3, vocabulary=tokens.txt)", tmp_path)
    assert given.inputs[[0, 3]].tolist() == [[3, 2, 0], [1, 1, 0]]
    again = datasets.make("hub(owner/reviews)").load_as(given.vocabulary, tmp_path)  # type: ignore[attr-defined]
    assert again.inputs[[0, 3]].tolist() == [[3, 2, 0], [1, 1, 0]]


def test_texts_beside_other_columns_are_told_what_to_do_about_and_each_way_works(tmp_path: Path) -> None:
    rows = {
        "id": [7 * number % 60 for number in range(60)],
        "review": [f"film {number}" for number in range(60)],
        "label": [0, 1] * 30,
    }
    hub.Dataset.from_dict(rows).save_to_disk(str(tmp_path / "reviews"))
    with pytest.raises(FedStrataError, match=r"'review' of 'acme/reviews' holds 60 different texts in 60 rows") as told:
        load("hub:acme/reviews", tmp_path)
    assert "with text=review, from other columns with features=..., or leave it out with drop=review." in str(
        told.value
    )
    for text in ("hub(acme/reviews, text=review)", "hub(acme/reviews, drop=id)"):
        assert load(text, tmp_path).vocabulary is not None
    for text in ("hub(acme/reviews, features=id)", "hub(acme/reviews, drop=review)"):
        table = load(text, tmp_path).table
        assert table is not None
        assert table.inputs == ("id",)
    with pytest.raises(FedStrataError, match="no column of 'acme/reviews' called 'reviews'"):
        load("hub(acme/reviews, drop=reviews)", tmp_path)


def test_an_error_of_the_network_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(**wishes: Any) -> None:
        raise OSError("The hub cannot be reached, try again.\nMore about it.")

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(FedStrataError, match=r"'owner/animals' could not be fetched .*: The hub .*, try again\.$"):
        download("hub:owner/animals", tmp_path)


def test_a_run_by_name(tmp_path: Path) -> None:
    hub.DatasetDict({"train": pictures(list(range(24))), "test": pictures([30, 31])}).save_to_disk(
        str(tmp_path / "owner" / "animals")
    )
    named = {"data": "hub(owner/animals, site=writer)", "data_root": str(tmp_path)}
    with pytest.warns(FedStrataWarning, match="Clients without test samples"):  # there are two, of three writers
        result = fedstrata.run(**named, model="mlp", rounds=1, epochs=1, engine="loop")
    assert result.experiment.clients == 3


def test_nothing_is_fetched_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def snapshot_download(**wishes: Any) -> None:
        asked.append(wishes)
        if wishes.get("revision") is not None:
            path = Path(wishes["local_dir"]) / "default" / "train" / "0000.parquet"
            path.parent.mkdir(parents=True)
            pictures([1, 2, 3, 4]).to_parquet(str(path))

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    with pytest.raises(FedStrataError, match=r"'fedstrata download hub:owner/animals' \(which needs: pip install"):
        load("hub:owner/animals", tmp_path)
    assert asked == []
    dataset = load("hub(owner/animals, download=true, test_fraction=0)", tmp_path)
    assert len(dataset.inputs) == 4
    assert dataset.name == "hub(repository=owner/animals, test_fraction=0.0)"
    # First what the owner put there, then what the hub made of it.
    assert [one.get("revision") for one in asked] == [None, "refs/convert/parquet"]
    assert {one["repo_id"] for one in asked} == {"owner/animals"}
    assert {one["local_dir"] for one in asked} == {str(tmp_path / "hub" / "owner" / "animals")}
    assert download("hub:owner/animals", tmp_path) == tmp_path / "hub" / "owner" / "animals"
    assert len(asked) == 3
    assert len(load("hub:owner/animals", tmp_path).inputs) == 4


@pytest.mark.parametrize("name", ["", "../secret", "a/b/c", "/etc/passwd", "owner/..", "~/x"])
def test_names_lead_nowhere_else(tmp_path: Path, name: str) -> None:
    with pytest.raises(FedStrataError, match="no name of a dataset on the hub; write hub:owner/name"):
        datasets.make(f"hub(repository='{name}')")
    with pytest.raises(FedStrataError, match="no name of a dataset on the hub"):
        download(f"hub:{name}", tmp_path)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("hub", "The dataset 'hub' needs a name; write hub:owner/name"),
        ("hub(owner/animals, label=kin)", "no column of 'owner/animals' called 'kin'.*kind"),
        ("hub(owner/animals, site=writers)", "no column of 'owner/animals' called 'writers'"),
        ("hub(owner/animals, image=id)", "The column 'id' of 'owner/animals' holds no encoded images, but int64"),
        ("hub(owner/animals, image=x)", "no column of 'owner/animals' called 'x'"),
        ("hub(owner/animals, test=valid)", "no part of 'owner/animals' called 'valid'"),
        ("hub(owner/animals, image=picture, features=id)", "are images; leave features out"),
        ("hub(owner/animals, drop=id)", "are images; leave drop out"),
        ("hub(owner/animals, features=id, size=8)", "are single values; leave size out"),
        ("hub(owner/animals, text=writer)", "are images; leave text out"),
        ("hub(owner/animals, features=id, text=id)", "The column 'id' of 'owner/animals' holds no texts, but int64"),
        ("hub(owner/animals, features=id, text=writers)", "no column of 'owner/animals' called 'writers'"),
        ("hub(owner/animals, features=id, length=9)", "are single values; leave length out"),
        ("hub(owner/animals, words=9, vocabulary=v.txt)", "All tokens of the vocabulary 'v.txt' are taken"),
        ("hub(owner/animals, configuration='../x')", "no plain name of a folder"),
        ("hub(owner/animals, configuration=large)", "with the configuration 'large' is in none of"),
    ],
)
def test_wishes_that_cannot_be_met_get_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    pictures([1, 2, 3, 4]).save_to_disk(str(tmp_path / "owner" / "animals"))
    with pytest.raises(FedStrataError, match=f"(?i){sentence}"):
        load(text, tmp_path)


def encoded(image: Image.Image) -> bytes:
    buffer = BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("stream", "data-00000-of-00001.arrow' is damaged"),
        ("state", "state.json' is damaged or of another kind: it is no JSON"),
        ("elsewhere", "state.json' .* does not list the files"),
        ("gone", "data-00000-of-00001.arrow' leads nowhere"),
    ],
)
def test_damaged_folders_get_one_sentence(tmp_path: Path, what: str, sentence: str) -> None:
    folder = tmp_path / "owner" / "animals"
    pictures([1, 2, 3, 4]).save_to_disk(str(folder))
    stream, state = folder / "data-00000-of-00001.arrow", folder / "state.json"
    changes = {
        "stream": lambda: stream.write_bytes(stream.read_bytes()[:1200]),
        "state": lambda: state.write_text("{"),
        "elsewhere": lambda: state.write_text(state.read_text().replace("data-0", "../data-0")),
        "gone": stream.unlink,
    }
    changes[what]()
    with pytest.raises(FedStrataError, match=sentence):
        load("hub:owner/animals", tmp_path)


def write_pictures(path: Path, sides: list[int], labels: list[Any]) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    images = pa.array([{"bytes": encoded(picture(9, side=side)), "path": "x.png"} for side in sides], kind)
    pq.write_table(pa.table({"image": images, "label": labels}), path)


def test_images_of_another_size_in_the_test_part_get_one_sentence(tmp_path: Path) -> None:
    write_pictures(tmp_path / "train.parquet", [6, 6], [0, 1])
    write_pictures(tmp_path / "test.parquet", [8, 8], [0, 1])
    sentence = r"row 0 of the column 'image' \(part 'test' of 'a/b'\) has 8 x 8 pixels, the first image 6 x 6; all must"
    with pytest.raises(FedStrataError, match=f"{sentence} be of one size: scale them with size="):
        load("hub:a/b", tmp_path)
    assert load("hub(a/b, size=6)", tmp_path).inputs.shape == (4, 3, 6, 6)


@pytest.mark.parametrize("kind", ["images", "texts"])
def test_labels_that_only_the_test_part_has_make_no_class(kind: str, tmp_path: Path) -> None:
    """Rows of a test part whose labels are kept secret are often marked with -1."""
    for part, labels in (("train", [0, 1]), ("test", [-1, -1])):
        if kind == "images":
            write_pictures(tmp_path / f"{part}.parquet", [6, 6], labels)
        else:
            pq.write_table(pa.table({"text": ["good", "bad"], "label": labels}), tmp_path / f"{part}.parquet")
    with pytest.raises(FedStrataError, match=r"The label '-1' is only in the test samples of 'a/b'.* '0', '1'"):
        load("hub:a/b", tmp_path)
    named = pa.table({"text": ["good"], "label": [0]}).replace_schema_metadata({"class_names": '["bad", "good"]'})
    if kind == "texts":
        pq.write_table(named, tmp_path / "train.parquet")
        pq.write_table(pa.table({"text": ["good"], "label": [1]}), tmp_path / "test.parquet")
        with pytest.warns(FedStrataWarning, match="The label 'good' is only in the test samples of 'a/b'"):
            assert load("hub:a/b", tmp_path).class_names == ("bad", "good")


def test_shards_of_unlike_types_become_one_or_get_one_sentence(tmp_path: Path) -> None:
    def write(number: int, label: pa.Array, **more: Any) -> None:
        table = pa.table({"text": ["good film", "bad film"], "label": label, **more})
        pq.write_table(table, tmp_path / f"train-0000{number}-of-00002.parquet")

    write(0, pa.array([0, 1], pa.int64()))
    write(1, pa.array([1, 0], pa.int32()))
    assert load("hub(a/b, test_fraction=0)", tmp_path).labels.tolist() == [0, 1, 1, 0]
    write(1, pa.array(["1", "0"]))
    sentence = (
        r"'label' is int64 in one file, string in another of '.*', which do not go together; write all files with"
    )
    with pytest.raises(FedStrataError, match=sentence):
        load("hub:a/b", tmp_path)


@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_a_column_that_one_file_lacks_is_named_with_those_that_it_has(ending: str, tmp_path: Path) -> None:
    tables = {
        "train": hub.Dataset.from_dict({"text": ["good", "bad"], "label": [0, 1]}),
        "test": hub.Dataset.from_dict({"number": [7], "words": ["good"]}),
    }
    for part, table in tables.items():
        if ending == "parquet":
            table.to_parquet(str(tmp_path / f"{part}.parquet"))
        else:
            table.save_to_disk(str(tmp_path / part))
            (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    sentence = r"has no column 'text', 'label', as other files of the dataset have; it has 'number', 'words'\. Fetch"
    with pytest.raises(FedStrataError, match=sentence):
        load("hub:a/b", tmp_path)


def test_odd_images_and_labels_get_one_sentence(tmp_path: Path) -> None:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])

    def write(blobs: list[bytes | None], labels: list[int]) -> None:
        images = pa.array([{"bytes": blob, "path": "x.png"} for blob in blobs], kind)
        pq.write_table(pa.table({"image": images, "label": labels}), tmp_path / "train.parquet")

    good = encoded(picture(1))
    write([good, None], [0, 1])
    named = r"The image in row {} of the column 'image' \(part 'train' of 'a/b'\)"
    with pytest.raises(FedStrataError, match=f"{named.format(1)} is not inside of the dataset"):
        load("hub:a/b", tmp_path)
    write([good, b"nothing"], [0, 1])
    with pytest.raises(FedStrataError, match=f"^{named.format(1)} is not a readable image: it is none of PNG, "):
        load("hub:a/b", tmp_path)
    write([good, encoded(picture(1, side=7))], [0, 1])
    with pytest.raises(FedStrataError, match=f"{named.format(1)} has 7 x 7 pixels, .* 6 x 6; .* with size=") as told:
        load("hub:a/b", tmp_path)
    assert "BytesIO" not in str(told.value)
    assert load("hub(a/b, size=5)", tmp_path).inputs.shape == (2, 3, 5, 5)
    write([encoded(Image.new("I;16", (6, 6)))] * 2, [0, 1])
    with pytest.raises(FedStrataError, match=f"{named.format(0)} has more than 256 shades of grey"):
        load("hub:a/b", tmp_path)
    unlabelled = pictures([1, 2]).map(lambda row: {"kind": -1})
    unlabelled.to_parquet(str(tmp_path / "train.parquet"))
    with pytest.raises(FedStrataError, match=r"Row 0 of a part has no class in the column 'kind'"):
        load("hub:a/b", tmp_path)
