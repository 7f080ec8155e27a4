"""A small vision transformer.

"An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale" (Dosovitskiy et al., ICLR 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstrata.errors import FedStrataError
from fedstrata.models.base import ModelSpec, models
from fedstrata.models.blocks import chain, image_channels
from fedstrata.models.weights import WEIGHTS, find_weights, load_backbone
from fedstrata.spec import parameter

_EPSILON = 1e-6


class PatchEmbedding(nn.Module):
    """Turns an image into tokens: a class token, then one token per patch, each with a learned position.

    Patches are projected by weights from N(0, 1 / fan_in) and keep the size of the pixels, about 1 where images are
    normalised. Class token and positions are drawn from N(0, 1), as large: from smaller ones the network finds out
    only late where a patch lies.
    """

    def __init__(self, input_shape: tuple[int, int, int], patch: int, width: int, dropout: float) -> None:
        super().__init__()
        channels, height, across = input_shape
        tokens = 1 + (height // patch) * (across // patch)
        self.projection = nn.Conv2d(channels, width, patch, stride=patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, tokens, width))
        self.dropout = nn.Dropout(dropout)
        nn.init.kaiming_normal_(self.projection.weight, nonlinearity="linear")

    def forward(self, images: Tensor) -> Tensor:
        """Turn ``[n, channels, height, width of the image]`` into ``[n, tokens, width]``."""
        patches = self.projection(images).flatten(2).transpose(1, 2)
        tokens = torch.cat((self.class_token.expand(len(images), -1, -1), patches), dim=1)
        embedded: Tensor = self.dropout(tokens + self.positions)
        return embedded


class SelfAttention(nn.Module):
    r"""Lets every token take from all tokens: :math:`\mathrm{softmax}(Q K^\top / \sqrt{d}) V` in each head."""

    def __init__(self, width: int, heads: int, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width, bias=bias) for _ in range(3))
        self.output = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Mix tokens ``[n, tokens, width]``."""
        query, key, value = (
            projection(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed: Tensor = self.output(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))
        return mixed


class TransformerBlock(nn.Module):
    """Attention among tokens, then a perceptron on each; both see normalised tokens and add to what is there."""

    def __init__(
        self, width: int, heads: int, hidden: int, dropout: float, *, bias: bool = True, epsilon: float = _EPSILON
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=epsilon)
        self.attention = SelfAttention(width, heads, bias)
        self.norm2 = nn.LayerNorm(width, eps=epsilon)
        self.mlp = chain(
            hidden=nn.Linear(width, hidden),
            gelu=nn.GELU(),
            dropout=nn.Dropout(dropout),
            output=nn.Linear(hidden, width),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """Change tokens ``[n, tokens, width]``."""
        tokens = tokens + self.dropout(self.attention(self.norm1(tokens)))
        changed: Tensor = tokens + self.dropout(self.mlp(self.norm2(tokens)))
        return changed


class ClassToken(nn.Module):
    """Takes the class token, the first, for the whole image."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Reduce ``[n, tokens, width]`` to ``[n, width]``."""
        return tokens[:, 0]


@models.register("vit")
@dataclass(frozen=True)
class ViTSpec(ModelSpec):
    """A small vision transformer for images such as CIFAR's, with a class token and norms before attention and MLP.

    "An Image is Worth 16x16 Words: Transformers for Image Recognition at Scale" (Dosovitskiy et al., ICLR 2021), in a
    size that trains on small images from scratch: by default 2.7 million parameters for 32x32 pixels. Xavier uniform
    linear layers, as there; class token and positions of the size of the projected patches.
    """

    patch: int = parameter(4, "The side of a patch in pixels; it must divide the sides of the images.", low=1)
    width: int = parameter(192, "The numbers per token; the heads must divide it.", low=1)
    depth: int = parameter(6, "The number of blocks.", low=1)
    heads: int = parameter(3, "The attention heads of a block.", low=1)
    mlp_ratio: float = parameter(4.0, "The hidden layer of a block's MLP, as a multiple of the width.", above=0)
    dropout: float = parameter(0.0, "Dropout after the embedding, after attention and in the MLPs.", low=0, below=1)
    weights: str | None = parameter(None, WEIGHTS, local=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width % self.heads:
            raise FedStrataError(
                f"The {self.heads} heads of the model 'vit' do not divide its width of {self.width}; choose a multiple "
                "of the heads as the width."
            )

    def find(self) -> Path | None:
        """Find the file of the weights, if there is to be one."""
        return find_weights(self.weights, self.name, ", or of examples/pretrain_vit.py")

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of this shape."""
        shape, weights = patchable(self.name, input_shape, self.patch), self.find()
        hidden = max(round(self.width * self.mlp_ratio), 1)
        stem = PatchEmbedding(shape, self.patch, self.width, self.dropout)
        blocks = [TransformerBlock(self.width, self.heads, hidden, self.dropout) for _ in range(self.depth)]
        model = vision_transformer(stem, blocks, classes)
        _initialise(model)
        return model if weights is None else load_backbone(model, weights)


@models.register("fedlws_vit")
@dataclass(frozen=True)
class FedLwsViTSpec(ModelSpec):
    """The vision transformer of FedLWS, without biases in its queries, keys and values: 6 blocks of width 512.

    "FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking" (Shi et al., ICLR 2025), with the network of
    its code: 8 heads, a hidden layer as wide as the tokens, a class token, 9.5 million parameters for 32x32 pixels.
    PyTorch's default initialisation; class token and positions are drawn from N(0, 1).
    """

    patch: int = parameter(4, "The side of a patch in pixels; it must divide the sides of the images.", low=1)
    dropout: float = parameter(0.1, "Dropout after the embedding, after attention and in the MLPs.", low=0, below=1)
    weights: str | None = parameter(None, WEIGHTS, local=True)

    def find(self) -> Path | None:
        """Find the file of the weights, if there is to be one."""
        return find_weights(self.weights, self.name)

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of this shape."""
        shape, weights = patchable(self.name, input_shape, self.patch), self.find()
        model = fedlws_transformer(shape, classes, patch=self.patch, dropout=self.dropout)
        return model if weights is None else load_backbone(model, weights)


def fedlws_transformer(
    input_shape: tuple[int, int, int],
    classes: int,
    *,
    patch: int,
    dropout: float,
    width: int = 512,
    depth: int = 6,
    heads: int = 8,
) -> nn.Module:
    """Build FedLWS's transformer, in its size or another, with PyTorch's default initialisation."""
    epsilon = 1e-5
    stem = PatchEmbedding(input_shape, patch, width, dropout)
    stem.projection.reset_parameters()
    blocks = [TransformerBlock(width, heads, width, dropout, bias=False, epsilon=epsilon) for _ in range(depth)]
    return vision_transformer(stem, blocks, classes, epsilon)


def vision_transformer(
    stem: PatchEmbedding, blocks: list[TransformerBlock], classes: int, epsilon: float = _EPSILON
) -> nn.Module:
    """Chain an embedding, blocks, a norm and a linear head on the class token."""
    width = stem.projection.out_channels
    return chain(
        stem=stem,
        stages=nn.Sequential(*blocks),
        norm=nn.LayerNorm(width, eps=epsilon),
        token=ClassToken(),
        head=nn.Linear(width, classes),
    )


def patchable(model: str, input_shape: tuple[int, ...], patch: int) -> tuple[int, int, int]:
    """Return the shape of images that can be cut into patches; refuse others."""
    channels = image_channels(model, input_shape, smallest=patch)
    _, height, across = input_shape
    fitting = math.gcd(height, across, patch)
    if fitting != patch:
        raise FedStrataError(
            f"The model '{model}' cuts images into patches of {patch} x {patch} pixels, which do not divide images of "
            f"{height} x {across}; choose a patch that does, such as {fitting}."
        )
    return channels, height, across


def _initialise(model: nn.Module) -> None:
    """Draw the weights of linear layers from Xavier's uniform distribution and set their biases to zero."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
