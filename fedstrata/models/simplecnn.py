"""The plain convolutional network of FedLAW and FedLWS."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fedstrata.models.base import ModelSpec, models
from fedstrata.models.blocks import chain, image_channels


@models.register("simplecnn")
@dataclass(frozen=True)
class SimpleCnnSpec(ModelSpec):
    """Three 3x3 convolutions without padding or norm, and two linear layers: the CNN of FedLAW and FedLWS.

    "FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking" (Shi et al., ICLR 2025) and "Revisiting
    Weighted Aggregation in Federated Learning with Neural Networks" (Li et al., ICML 2023). 32, 64 and 64 channels,
    2x2 max-pooling after the first two, then 1024-64-classes for 32x32 images. PyTorch's default initialisation.
    """

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of this shape."""
        channels = image_channels(self.name, input_shape, smallest=18)
        height, width = (_size_after_convolutions(size) for size in input_shape[1:])
        return chain(
            stem=chain(conv=nn.Conv2d(channels, 32, 3), relu=nn.ReLU(), pool=nn.MaxPool2d(2)),
            stages=nn.Sequential(
                chain(conv=nn.Conv2d(32, 64, 3), relu=nn.ReLU(), pool=nn.MaxPool2d(2)),
                chain(conv=nn.Conv2d(64, 64, 3), relu=nn.ReLU(), flatten=nn.Flatten()),
                chain(linear=nn.Linear(64 * height * width, 64), relu=nn.ReLU()),
            ),
            head=nn.Linear(64, classes),
        )


def _size_after_convolutions(size: int) -> int:
    return ((size - 2) // 2 - 2) // 2 - 2
