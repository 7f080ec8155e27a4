"""What people have becomes what a model takes, or a sentence says what it takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image

import fedstrata
from fedstrata.errors import FedStrataError
from fedstrata.trained import Card
from fedstrata.trained.inputs import names_of, read_inputs

SCALE = {"step": "scale", "divide_by": 255}
IMAGES = Card("cnn", (1, 4, 6), "uint8", (SCALE,), ("no", "yes"))
COLOURS = Card("cnn", (3, 4, 6), "uint8", (SCALE,), ("no", "yes"))
NUMBERS = Card("mlp", (3,), "float32", (), ("no", "yes"))
TOKENS = Card("python:Net", (5,), "int64", (), ("no", "yes"))


def test_arrays_of_the_right_shape_are_taken_and_one_sample_is_a_batch_of_one() -> None:
    for given in ([[1, 2, 3]], [1, 2, 3], np.array([1.0, 2, 3]), torch.tensor([[1, 2, 3]])):
        assert torch.equal(read_inputs(given, NUMBERS), torch.tensor([[1.0, 2.0, 3.0]]))
    assert read_inputs([[1, 2, 3, 4, 5]], TOKENS).dtype == torch.int64
    for given in ([[1, 2]], np.zeros((2, 2, 3))):
        with pytest.raises(FedStrataError, match=r"have the shape .*, but the model takes samples of shape \[3\]"):
            read_inputs(given, NUMBERS)
    with pytest.raises(FedStrataError, match="not whole numbers"):
        read_inputs([[1, 2, 3, 4, 0.5]], TOKENS)
    with pytest.raises(FedStrataError, match="NaN"):
        read_inputs([[1, 2, float("nan")]], NUMBERS)
    with pytest.raises(FedStrataError, match="cannot become one tensor"):
        read_inputs(["a", "b", 3], NUMBERS)


def test_images_of_bytes_may_come_scaled_but_nothing_in_between() -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(1, 1, 4, 6)
    assert read_inputs(pixels, IMAGES).dtype == torch.uint8
    assert torch.equal(read_inputs(pixels.astype(int), IMAGES), torch.from_numpy(pixels))
    assert read_inputs(pixels / 255, IMAGES).is_floating_point()
    for wrong in (pixels * 2.0, pixels.astype(int) - 1, pixels.astype(int) * 100):
        with pytest.raises(FedStrataError, match="These inputs range from"):
            read_inputs(wrong, IMAGES)


def test_images_and_their_files_are_read(tmp_path: Path) -> None:
    pixels = np.arange(24, dtype=np.uint8).reshape(4, 6)
    image = Image.fromarray(pixels)
    expected = torch.from_numpy(pixels)[None, None]
    assert torch.equal(read_inputs(image, IMAGES), expected)
    assert torch.equal(read_inputs([image, image], IMAGES), torch.cat([expected, expected]))
    assert read_inputs(image, COLOURS).shape == (1, 3, 4, 6)
    image.save(tmp_path / "b.png")
    image.save(tmp_path / "a.png")
    (tmp_path / "notes.txt").write_text("x")
    assert torch.equal(read_inputs(tmp_path / "a.png", IMAGES), expected)
    assert torch.equal(read_inputs([tmp_path / "a.png"], IMAGES), expected)
    assert len(read_inputs(str(tmp_path), IMAGES)) == 2
    assert names_of(tmp_path) == ["a.png", "b.png"]
    assert names_of(tmp_path / "a.png") == ["a.png"]
    np.save(tmp_path / "x.npy", pixels[None, None])
    assert torch.equal(read_inputs(tmp_path / "x.npy", IMAGES), expected)
    assert names_of(tmp_path / "x.npy") is None
    with pytest.raises(FedStrataError, match="images of 6 x 4 pixels, and this one has 4 x 6"):
        read_inputs(image.rotate(90, expand=True), IMAGES)
    with pytest.raises(FedStrataError, match="takes no images"):
        read_inputs(image, NUMBERS)


def test_files_that_are_none_get_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.png").write_bytes(b"no image")
    (tmp_path / "data.xyz").write_text("1")
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object), allow_pickle=True)
    for name, sentence in {
        "nowhere": "There is no file",
        "empty": "There are no images",
        "broken.png": "is not a readable image",
        "data.xyz": "of no kind that can be read",
        "objects.npy": "holds no plain NumPy array",
    }.items():
        with pytest.raises(FedStrataError, match=sentence):
            read_inputs(tmp_path / name, IMAGES)


def test_a_model_of_tables_takes_rows(tmp_path: Path) -> None:
    """Encoded as for training: categories, gaps and the order of columns are those of the card."""
    rows = {"age": [63, None, 41, 50], "sex": ["m", "f", "m", "m"], "ill": ["yes", "no", "no", "yes"]}
    data = fedstrata.from_table(rows, label="ill", test_fraction=0)
    assert data.table is not None
    card = Card("mlp", (4,), "float32", (), data.class_names, data.table.to_mapping())
    new = {"sex": ["f"], "age": [None]}
    for given in (new, [{"sex": "f", "age": None}], pa.table(new), pd.DataFrame(new)):
        assert read_inputs(given, card).tolist() == [[50.0, 1.0, 1.0, 0.0]]
    (tmp_path / "new.csv").write_text("sex,age\nf,\nm,20\n")
    assert read_inputs(tmp_path / "new.csv", card).tolist() == [[50.0, 1.0, 1.0, 0.0], [20.0, 0.0, 0.0, 1.0]]
    assert read_inputs([[50.0, 1.0, 1.0, 0.0]], card).tolist() == [[50.0, 1.0, 1.0, 0.0]]
    with pytest.raises(FedStrataError, match="The column 'age' is missing"):
        read_inputs({"sex": ["f"]}, card)
    with pytest.raises(FedStrataError, match="the model takes rows of a table, or samples of shape"):
        read_inputs([[1.0, 2.0]], card)
