"""Encoded images (PNG, WebP, JPEG, ...) to arrays."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from fedstrata.data.formats.bounds import refuse_irregular, refuse_large_image
from fedstrata.errors import FedStrataError

# Naming the formats spares Pillow from trying all its readers on each image: twice as fast for small ones.
FORMATS = ("PNG", "WEBP", "JPEG", "BMP", "GIF", "TIFF", "PPM")


Prepare = Callable[[Image.Image], Image.Image]
"""What is done to an image in its colours before it becomes an array."""


def decode_images(
    sources: Sequence[bytes | Path],
    mode: str,
    size: int | None,
    where: str,
    expected: int | None = None,
    prepare: Prepare | None = None,
    called: Callable[[int], str] | None = None,
) -> np.ndarray:
    """Decode images into bytes ``[n, channels, height, width]``.

    ``mode`` is Pillow's, ``RGB`` or ``L``. With a ``size`` each image is scaled to that many pixels in both
    directions; without one, all must be of the same size, with an ``expected`` one of so many pixels in both.
    ``prepare`` changes each image in a dataset's own way instead. ``where`` tells in errors where the images come
    from, and ``called`` which one is meant, if they are no files.
    """
    pixels: np.ndarray | None = None
    for number, source in enumerate(sources):
        if isinstance(source, Path):
            name = f"'{source}'"
        else:
            name = f"Image {number} of '{where}'" if called is None else called(number)
        image = _decode(source, mode, size, name, expected, prepare)
        if pixels is None:
            pixels = np.empty((len(sources), *image.shape), dtype=np.uint8)
        elif image.shape != pixels.shape[1:]:
            raise FedStrataError(
                f"{name} has {_measure(image)} pixels, the first image {_measure(pixels[0])}; all must be of one size: "
                "scale them with size=...."
            )
        pixels[number] = image
    if pixels is None:
        raise FedStrataError(f"There are no images in '{where}'.")
    if pixels.ndim == 3:
        return pixels[:, None]
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))


@contextmanager
def opened_image(source: bytes | Path, name: str) -> Iterator[Image.Image]:
    """Open an image whose pixels are still to be decoded.

    What is no file, too large, or of more shades than a byte holds is refused before that: Pillow would turn all that
    is above 255 into white, and fractions of one into black.
    """
    if isinstance(source, Path):
        refuse_irregular(source)
    try:
        with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
            image = Image.open(BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS)
        with image:
            refuse_large_image(image.size, name)
            if image.mode.startswith(("I", "F")):
                raise FedStrataError(
                    f"{name} has more than 256 shades of grey ({image.mode}), of which little would be left; scale the "
                    "images to 256 shades, all by the same range, or load them in Python and give them as data."
                )
            yield image
    except UnidentifiedImageError:
        raise FedStrataError(f"{name} is not a readable image: it is none of {', '.join(FORMATS)}.") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise FedStrataError(f"{name} is not a readable image: {error}.") from None


def _decode(
    source: bytes | Path, mode: str, size: int | None, name: str, expected: int | None, prepare: Prepare | None
) -> np.ndarray:
    with opened_image(source, name) as image:
        if expected is not None and image.size != (expected, expected):
            raise FedStrataError(
                f"{name} has {image.width} x {image.height} pixels, and those of this dataset {expected} x {expected}; "
                "fetch its files again."
            )
        converted = image.convert(mode)
        if prepare is not None:
            return np.asarray(prepare(converted))
        return np.asarray(converted if size is None else converted.resize((size, size), Image.Resampling.BILINEAR))


def _measure(image: np.ndarray) -> str:
    return f"{image.shape[1]} x {image.shape[0]}"
