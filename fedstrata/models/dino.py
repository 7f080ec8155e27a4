"""The vision transformer that DINO trained without labels, through the package ``transformers``.

"Emerging Properties in Self-Supervised Vision Transformers" (Caron et al., ICCV 2021).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstrata.errors import FedStrataError
from fedstrata.models.base import ModelSpec, models
from fedstrata.models.blocks import image_channels
from fedstrata.models.probe import first_line
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
    another size than the weights were trained with, the positions are interpolated. A directory may hold a vision
    transformer of any other size, which its config.json describes. Needs: pip install 'fedstrata[vit]'.
    """

    weights: str | None = parameter(
        HUB_NAME,
        "A directory with config.json and model.safetensors, or a name on the Hugging Face hub; none: drawn at random.",
    )
    download: bool = parameter(
        False, "Whether the weights may be fetched from the hub; else they must be here already."
    )
    image_size: int = parameter(224, "The side to which images are resized, a multiple of the patch.", low=1)

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
        raise FedStrataError(
            f"The model '{model}' needs the package transformers; install it with: pip install 'fedstrata[vit]'."
        ) from None


def _pretrained(transformers: Any, weights: str, download: bool) -> Any:
    """Load a backbone with all its weights, in single precision, from a directory or from what the hub has."""
    directory = Path(weights).expanduser()
    local = directory.is_dir()
    try:
        with _quiet(transformers), torch.random.fork_rng(devices=[]):
            backbone, report = transformers.ViTModel.from_pretrained(
                str(directory) if local else weights,
                add_pooling_layer=False,
                local_files_only=local or not download,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    # What transformers and the hub raise has no base in common: errors of the system, of values, of HTTP libraries.
    except Exception as error:
        raise _refusal(weights, local, download, first_line(error)) from error
    if report["missing_keys"]:
        raise FedStrataError(
            f"The weights '{weights}' lack the tensor '{min(report['missing_keys'])}'; give those of a vision "
            "transformer."
        )
    if report["mismatched_keys"]:
        name, found, wanted = min(report["mismatched_keys"])
        raise FedStrataError(
            f"The tensor '{name}' of the weights '{weights}' has the shape {list(found)}, but their config.json asks "
            f"for {list(wanted)}; give the config.json that belongs to the weights."
        )
    return backbone.float()


def _refusal(weights: str, local: bool, download: bool, reason: str) -> FedStrataError:
    if local:
        return FedStrataError(
            f"The directory '{weights}' holds no weights that can be read ({reason.rstrip('.')}); it must hold the "
            "config.json and model.safetensors of a vision transformer."
        )
    if download:
        return FedStrataError(f"The weights '{weights}' could not be fetched from the Hugging Face hub: {reason}")
    return FedStrataError(
        f"The weights '{weights}' are neither a directory nor stored here by an earlier download; give the directory "
        "where they lie, or download=true to fetch them from the Hugging Face hub, or weights=none for random ones."
    )


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
