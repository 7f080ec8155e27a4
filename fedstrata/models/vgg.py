"""The plain batch-norm network of LIPS."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import nn

from fedstrata.models.base import ModelSpec, models
from fedstrata.models.blocks import (
    GlobalAverage,
    batch_norm,
    chain,
    convolution_unit,
    image_channels,
    kaiming_convolutions,
)


@models.register("vgg6")
@dataclass(frozen=True)
class Vgg6Spec(ModelSpec):
    """VGG with five convolutions and one linear layer, the CIFAR-10 model of LIPS.

    "When Aggregation Stops Collaborating: Layer-wise Inertia in Low-Data Federated Learning", after "Very Deep
    Convolutional Networks for Large-Scale Image Recognition" (Simonyan and Zisserman, ICLR 2015). 3x3 convolutions with
    bias, of 64, 128, 256, 512 and 512 channels, each followed by batch norm, ReLU and 2x2 max-pooling, so that a
    32x32 image ends as 512 numbers; of a larger image, the positions that are left are averaged. Kaiming normal
    convolutions; the head is drawn from N(0, 0.01^2).
    """

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of this shape."""
        widths = (image_channels(self.name, input_shape, smallest=32), 64, 128, 256, 512, 512)
        stem, *stages = (
            convolution_unit(inputs, outputs, norm=batch_norm, bias=True, pool=nn.MaxPool2d(2))
            for inputs, outputs in itertools.pairwise(widths)
        )
        head = nn.Linear(512, classes)
        nn.init.normal_(head.weight, std=0.01)
        nn.init.zeros_(head.bias)
        return kaiming_convolutions(chain(stem=stem, stages=nn.Sequential(*stages), pool=GlobalAverage(), head=head))
