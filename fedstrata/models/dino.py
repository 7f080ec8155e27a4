"""The vision transformer that DINO trained without labels, through the package ``transformers``.

"Emerging Properties in Self-Supervised Vision Transformers" (Caron et al., ICCV 2021).
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstrata.errors import FedStrataError, NotHereError
from fedstrata.models.base import ModelSpec, models
from fedstrata.models.blocks import image_channels
from fedstrata.models.trial import first_line
from fedstrata.spec import parameter

HUB_NAME = "facebook/dino-vits16"
_VIT_S16 = {
    "patch_size": 16, "hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 6, "intermediate_size": 1536,
}  # fmt: skip


class DinoClassifier(nn.Module):
    """A backbone of ``transformers`` with a linear head on its class token; images come in any size."""

    def __init__(self, backbone: Any, image_size: int, classes: int) -> None:
        super().__init__()
        self.channels = int(backbone.config.num_channels)
        self.sides = (image_size, image_size)
        self.backbone = backbone
        self.head = nn.Linear(backbone.config.hidden_size, classes)
        nn.init.normal_(self.head.weight, std=0.01)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        """Turn images ``[n, channels, height, width]``, grey or in colour, into class scores ``[n, classes]``."""
        images = images.expand(-1, self.channels, -1, -1)
        if images.shape[-2:] != self.sides:
            images = F.interpolate(images, self.sides, mode="bilinear", align_corners=False, antialias=True)
        tokens = self.backbone(pixel_values=images, interpolate_pos_encoding=True).last_hidden_state
        scores: Tensor = self.head(tokens[:, 0])
        return scores


@models.register("dino-vit-s16")
@dataclass(frozen=True)
class DinoViTSpec(ModelSpec):
    """The vision transformer ViT-S/16 of DINO, trained on ImageNet without labels, with a new linear head.

    "Emerging Properties in Self-Supervised Vision Transformers" (Caron et al., ICCV 2021): 12 blocks of width 384 with
    6 heads, 21.7 million parameters. Images are resized to ``image_size``; grey ones are repeated in every channel; for
    another size than the weights were trained with, the positions are interpolated. The weights were trained on images
    normalised with ImageNet's statistics: give ``transforms="normalise:imagenet"``. A directory may hold a vision
    transformer of any other size, which its config.json describes. Needs: pip install 'fedstrata[vit]'.
    """

    weights: str | None = parameter(
        HUB_NAME,
        "A directory with config.json and model.safetensors, or a name on the Hugging Face hub; none: drawn at random.",
        local=True,
    )
    download: bool = parameter(
        False, "Whether the weights may be fetched from the hub; else they must be here already.", local=True
    )
    image_size: int = parameter(224, "The side to which images are resized, a multiple of the patch.", low=1)

    def find(self) -> Path | None:
        """See that transformers is installed, and find the directory of the weights; none where they are fetched."""
        if importlib.util.find_spec("transformers") is None:
            raise _not_installed(self.name)
        return None if self.weights is None else _found(self.weights, self.download)

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of this shape."""
        channels = image_channels(self.name, input_shape, smallest=1)
        transformers = _transformers(self.name)
        if self.weights is None:
            backbone = transformers.ViTModel(transformers.ViTConfig(**_VIT_S16), add_pooling_layer=False)
        else:
            backbone = _pretrained(transformers, self.weights, self.download)
        wanted, patch = backbone.config.num_channels, backbone.config.patch_size
        if channels not in (1, wanted):
            raise FedStrataError(
                f"The model '{self.name}' takes images of {wanted} channels, or grey ones, but these have {channels}."
            )
        if self.image_size % patch:
            raise FedStrataError(
                f"The model '{self.name}' cuts images into patches of {patch} pixels, which do not divide the "
                f"image_size of {self.image_size}; choose a multiple, such as {patch * -(-self.image_size // patch)}."
            )
        return DinoClassifier(backbone, self.image_size, classes)


def _transformers(model: str) -> Any:
    try:
        return importlib.import_module("transformers")
    except ImportError:
        raise _not_installed(model) from None


def _not_installed(model: str) -> NotHereError:
    remedy = "install it with: pip install 'fedstrata[vit]'."
    return NotHereError(
        f"The model '{model}' needs the package transformers; {remedy}",
        f"the package transformers, which the model {model} needs; {remedy}",
    )


def _found(weights: str, download: bool) -> Path | None:
    """Find the directory of weights; none where they are not here, and may be fetched."""
    directory = _directory(weights)
    if directory is None and not download:
        remedy = (
            "give the directory where they lie, or download=true to fetch them from the Hugging Face hub, or "
            "weights=none for random ones."
        )
        raise NotHereError(
            f"The weights '{weights}' are neither a directory nor stored here by an earlier download; {remedy}",
            f"the weights '{weights}': any run with --model 'dino-vit-s16(download=true)' fetches them, once.",
        )
    return directory


def _pretrained(transformers: Any, weights: str, download: bool) -> Any:
    """Load a backbone with all its weights, in single precision, from a directory or, if allowed, from the hub."""
    directory = _found(weights, download)
    try:
        with _quiet(transformers), torch.random.fork_rng(devices=[]):
            backbone, report = transformers.ViTModel.from_pretrained(
                weights if directory is None else str(directory),
                add_pooling_layer=False,
                local_files_only=directory is not None,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    # What transformers and the hub raise has no base in common: errors of the system, of values, of HTTP libraries.
    except Exception as error:
        where = "from the Hugging Face hub" if directory is None else f"from the directory '{directory}'"
        raise FedStrataError(
            f"The weights '{weights}' cannot be read {where}, where a config.json and a model.safetensors of a vision "
            f"transformer must be: {first_line(error)}"
        ) from error
    # Some versions list tensors of another shape by name, others together with the shapes.
    mismatched = (entry if isinstance(entry, str) else entry[0] for entry in report["mismatched_keys"])
    for name in sorted((*report["missing_keys"], *mismatched)):
        raise FedStrataError(
            f"The weights '{weights}' do not hold the tensor '{name}' in the shape that their config.json asks for; "
            "give weights of a vision transformer together with their own config.json."
        )
    return backbone.float()


def _directory(weights: str) -> Path | None:
    """Find the directory of this name, or that in which the hub's library has stored what it once fetched.

    Only the disk is looked at: the library itself goes to the network even when it is told to use local files only.
    """
    directory = Path(weights).expanduser()
    if directory.is_dir():
        return directory
    hub = importlib.import_module("huggingface_hub")
    try:
        stored = hub.try_to_load_from_cache(weights, "config.json")
    except ValueError:  # not the name of a repository
        return None
    return Path(stored).parent if isinstance(stored, str) else None


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence progress bars and reports: what matters of them becomes an error."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
