"""Densely connected networks.

"Densely Connected Convolutional Networks" (Huang et al., CVPR 2017).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from fedstrata.fused import norm_rectified
from fedstrata.models.base import ModelSpec, models
from fedstrata.models.blocks import GlobalAverage, batch_norm, chain, image_channels

_BOTTLENECK = 4
"""How many times the growth a dense layer is wide inside."""


class DenseLayer(nn.Module):
    """A 1x1 and a 3x3 convolution, each behind batch norm and ReLU, that put a few channels before those given."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.norm1 = batch_norm(inputs)
        self.conv1 = nn.Conv2d(inputs, _BOTTLENECK * growth, 1, bias=False)
        self.norm2 = batch_norm(_BOTTLENECK * growth)
        self.conv2 = nn.Conv2d(_BOTTLENECK * growth, growth, 3, padding=1, bias=False)
        self.relu = nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        """Turn ``[n, inputs, height, width]`` into ``[n, growth + inputs, height, width]``."""
        hidden = self.conv1(norm_rectified(self.norm1, self.relu, inputs))
        found = self.conv2(norm_rectified(self.norm2, self.relu, hidden))
        return torch.cat((found, inputs), dim=1)


class Transition(nn.Module):
    """Batch norm, ReLU and a 1x1 convolution, then 2x2 average pooling: fewer channels in half the size."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norm = batch_norm(inputs)
        self.relu = nn.ReLU()
        self.conv = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.pool = nn.AvgPool2d(2)

    def forward(self, inputs: Tensor) -> Tensor:
        """Turn ``[n, inputs, height, width]`` into ``[n, outputs, height / 2, width / 2]``."""
        return cast(Tensor, self.pool(self.conv(norm_rectified(self.norm, self.relu, inputs))))


class RectifiedNorm(nn.Module):
    """Batch norm and ReLU; an engine may compute them as one."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = batch_norm(channels)
        self.relu = nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalise and rectify."""
        return norm_rectified(self.norm, self.relu, inputs)


def dense_network(channels: int, growth: int, layers: Sequence[int], classes: int) -> nn.Module:
    """Put blocks of some dense layers each behind a 3x3 stem; between them, transitions halve channels and size."""
    width = 2 * growth
    stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
    stages = nn.Sequential()
    for block, number in enumerate(layers):
        stage = nn.Sequential()
        if block:
            stage.append(Transition(width, width // 2))
            width //= 2
        for _ in range(number):
            stage.append(DenseLayer(width, growth))
            width += growth
        stages.append(stage)
    return chain(
        stem=stem, stages=stages, final=RectifiedNorm(width), pool=GlobalAverage(), head=nn.Linear(width, classes)
    )


@models.register("densenet121")
@dataclass(frozen=True)
class DenseNet121Spec(ModelSpec):
    """DenseNet-121 for CIFAR with batch norm, as in FedLWS: blocks of 6, 12, 24 and 16 dense layers, growth 32.

    "FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking" (Shi et al., ICLR 2025), after "Densely
    Connected Convolutional Networks" (Huang et al., CVPR 2017). The stem is a 3x3 convolution of 64 channels without
    norm or pooling; transitions halve the channels. PyTorch's default initialisation, as in the released code of
    FedLAW, on which FedLWS builds.
    """

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of this shape."""
        channels = image_channels(self.name, input_shape, smallest=8)
        return dense_network(channels, 32, (6, 12, 24, 16), classes)
