"""The small convolutional network for first experiments."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedstrata.models.base import ModelSpec, models
from fedstrata.models.blocks import (
    Norm,
    batch_norm,
    chain,
    convolution_unit,
    group_norm,
    image_channels,
    kaiming_convolutions,
)
from fedstrata.spec import parameter

_NORMS: dict[str | None, Norm | None] = {"batch": batch_norm, "group": group_norm(8), None: None}


@models.register("cnn")
@dataclass(frozen=True)
class CnnSpec(ModelSpec):
    """A small convolutional network, quick on a CPU, for images from 8x8 to about 32x32.

    Three 3x3 convolutions of 16, 32 and 32 channels, or more of 32, each with a norm and ReLU, 2x2 max-pooling after
    the first two, and a linear head. Convolutions are drawn from the Kaiming normal distribution.
    """

    norm: str | None = parameter(
        "batch", "The norm layers: batch norm, group norm with 8 groups, or none.", choices=("batch", "group")
    )
    depth: int = parameter(
        3, "How many convolutions; what is beyond three makes the middle of the network longer.", low=3
    )

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of this shape."""
        channels = image_channels(self.name, input_shape, smallest=4)
        _, height, width = input_shape
        norm = _NORMS[self.norm]
        bias = norm is None
        model = chain(
            stem=convolution_unit(channels, 16, norm=norm, bias=bias, pool=nn.MaxPool2d(2)),
            stages=nn.Sequential(
                convolution_unit(16, 32, norm=norm, bias=bias, pool=nn.MaxPool2d(2)),
                *(convolution_unit(32, 32, norm=norm, bias=bias) for _ in range(self.depth - 2)),
            ),
            flatten=nn.Flatten(),
            head=nn.Linear(32 * (height // 4) * (width // 4), classes),
        )
        return kaiming_convolutions(model)
