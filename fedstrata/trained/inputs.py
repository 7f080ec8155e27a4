"""What people have (arrays, images, tables, texts, files) as the tensor that a model takes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from fedstrata.data.columns import read_table
from fedstrata.data.formats.bounds import refuse_irregular
from fedstrata.data.formats.images import opened_image
from fedstrata.data.tables import Table
from fedstrata.data.vocabulary import Vocabulary
from fedstrata.errors import FedStrataError
from fedstrata.trained.card import Card

IMAGE_ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp")
_ARRAY_ENDINGS = (".npy",)
_TABLE_ENDINGS = (".csv", ".csv.gz", ".parquet")
_TEXT_ENDING, _TEXT_COLUMN = ".txt", "text"


def read_inputs(given: Any, card: Card) -> Tensor:
    """Turn samples into the tensor ``[n, ...]`` that a model takes, or say what it takes instead.

    ``given`` is an array or tensor of samples (or of one sample), an image or several, or the path of a file or folder:
    a NumPy array (``.npy``), or images. A model of tables takes the rows of one: a data frame, an Arrow table, a dict
    of columns, a CSV or Parquet file. A model of texts takes one or several, a table with a column ``text``, or the
    path of such a table or of a file with one text a line.
    """
    if card.vocabulary is not None and (texts := _texts(given)) is not None:
        return Vocabulary.from_mapping(card.vocabulary).encode(texts)
    if card.table is not None and _is_table(given):
        return Table.from_mapping(card.table).encode(given)
    if isinstance(given, str | Path):
        return _of_path(Path(given), card)
    if isinstance(given, Image.Image):
        return _of_images([given], card)
    if isinstance(given, Sequence) and given and all(isinstance(one, Image.Image) for one in given):
        return _of_images(given, card)
    if isinstance(given, Sequence) and given and all(isinstance(one, str | Path) for one in given):
        return torch.cat([_of_path(Path(one), card) for one in given])
    return _of_array(given, card)


def _texts(given: Any) -> list[str] | None:
    """Find raw texts in what a model of texts is given; none where it is something else, such as numbers of tokens."""
    if isinstance(given, str):
        if not os.path.isfile(given):  # noqa: PTH113 - a long text is no path, and no error
            return [given]
        given = Path(given)
    if isinstance(given, Path) and given.suffix.lower() == _TEXT_ENDING:
        refuse_irregular(given)
        try:
            return given.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise FedStrataError(f"'{given}' cannot be read as texts in UTF-8: {error}.") from None
    if _is_table(given):
        table = read_table(given, "the texts")
        if _TEXT_COLUMN not in table.column_names:
            raise FedStrataError(
                f"The table has the columns {', '.join(table.column_names)}; the model takes one called 'text'."
            )
        given = table.column(_TEXT_COLUMN).to_pylist()
    if getattr(getattr(given, "dtype", None), "kind", "") in ("U", "O", "T"):
        given = given.tolist()
    texts = isinstance(given, Sequence) and len(given) > 0 and all(isinstance(one, str) for one in given)
    return list(given) if texts else None


def _is_table(given: Any) -> bool:
    """Tell rows of a table, with names of columns, from arrays of inputs."""
    if isinstance(given, str | Path):
        return str(given).lower().endswith(_TABLE_ENDINGS)
    rows = isinstance(given, Sequence) and len(given) > 0 and all(isinstance(one, Mapping) for one in given)
    return rows or isinstance(given, Mapping) or hasattr(given, "columns") or hasattr(given, "column_names")


def names_of(given: str | Path) -> list[str] | None:
    """Name the samples of a folder of images, or of one image; those of other files only have numbers."""
    path = Path(given)
    if path.is_dir():
        return [file.name for file in _images_in(path)]
    return [path.name] if path.suffix.lower() in IMAGE_ENDINGS else None


def _of_path(path: Path, card: Card) -> Tensor:
    if not path.exists():
        raise FedStrataError(f"There is no file or folder '{path}'.")
    if path.is_dir():
        found = _images_in(path)
        if not found:
            raise FedStrataError(f"There are no images in '{path}'; give a folder of images, or a file.")
        return _of_images([_opened(file) for file in found], card)
    ending = path.suffix.lower()
    if ending in IMAGE_ENDINGS:
        return _of_images([_opened(path)], card)
    if ending in _ARRAY_ENDINGS:
        refuse_irregular(path)
        try:
            return _of_array(np.load(path, allow_pickle=False), card)
        except (ValueError, OSError) as error:
            raise FedStrataError(f"'{path}' holds no plain NumPy array: {error}.") from None
    tables = _TABLE_ENDINGS if card.table or card.vocabulary else ()
    texts = (_TEXT_ENDING,) if card.vocabulary else ()
    known = ", ".join((*_ARRAY_ENDINGS, *tables, *(texts or IMAGE_ENDINGS)))
    raise FedStrataError(f"'{path}' is of no kind that can be read; give a file that ends in {known}.")


def _images_in(folder: Path) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.suffix.lower() in IMAGE_ENDINGS)


def _opened(path: Path) -> Image.Image:
    with opened_image(path, f"'{path}'") as image:
        image.load()
        return image


def _of_images(images: Sequence[Image.Image], card: Card) -> Tensor:
    shape = card.input_shape
    if card.input_type != "uint8" or len(shape) != 3 or shape[0] not in (1, 3):
        raise FedStrataError(f"The model takes no images, but {_wanted(card)}.")
    channels, height, width = shape
    pixels = []
    for image in images:
        if image.size != (width, height):
            raise FedStrataError(
                f"The model takes images of {width} x {height} pixels, and this one has "
                f"{image.size[0]} x {image.size[1]}; resize it as the training images were."
            )
        array = np.array(image.convert("L" if channels == 1 else "RGB"))
        pixels.append(array[None] if channels == 1 else array.transpose(2, 0, 1))
    return torch.from_numpy(np.stack(pixels))


def _of_array(given: Any, card: Card) -> Tensor:
    try:
        inputs = torch.as_tensor(np.asarray(given) if isinstance(given, Sequence) else given).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as error:
        raise FedStrataError(
            f"These inputs cannot become one tensor: {error}. The model takes {_wanted(card)}."
        ) from None
    if tuple(inputs.shape) == card.input_shape:
        inputs = inputs.unsqueeze(0)
    if tuple(inputs.shape[1:]) != card.input_shape:
        raise FedStrataError(f"These inputs have the shape {list(inputs.shape)}, but the model takes {_wanted(card)}.")
    if inputs.is_floating_point() and not bool(torch.isfinite(inputs).all()):
        raise FedStrataError("These inputs hold a NaN or an infinity; clean or drop such samples first.")
    if card.input_type == "uint8":
        return _bytes(inputs, card)
    wanted: torch.dtype = getattr(torch, card.input_type)
    if not wanted.is_floating_point and not torch.equal(inputs.to(wanted).to(inputs.dtype), inputs):
        raise FedStrataError(f"These inputs are not whole numbers, but the model takes {_wanted(card)}.")
    return inputs.to(wanted)


def _bytes(inputs: Tensor, card: Card) -> Tensor:
    """Take bytes as they are, and numbers from 0 to 1 as scaled already; what could be either is refused."""
    if inputs.dtype == torch.uint8 or len(inputs) == 0:
        return inputs
    low, high = float(inputs.min()), float(inputs.max())
    if inputs.is_floating_point() and low >= 0 and high <= 1:
        return inputs
    if not inputs.is_floating_point() and low >= 0 and high <= 255:
        return inputs.to(torch.uint8)
    raise FedStrataError(
        f"These inputs range from {low:g} to {high:g}, but the model takes {_wanted(card)}, or numbers from 0 to 1."
    )


def _wanted(card: Card) -> str:
    numbers = "bytes from 0 to 255" if card.input_type == "uint8" else f"numbers of type {card.input_type}"
    rows = "rows of a table, or " if card.table else "texts, or " if card.vocabulary else ""
    return f"{rows}samples of shape {list(card.input_shape)}, {numbers}"
