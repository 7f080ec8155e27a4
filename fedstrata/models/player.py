"""The convolutional networks and the perceptron of PLayer-FL."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from torch import nn

from fedstrata.models.base import ModelSpec, models
from fedstrata.models.blocks import GlobalAverage, chain, image_channels
from fedstrata.models.mlp import MlpSpec
from fedstrata.spec import parameter


@dataclass(frozen=True)
class PlayerNetwork:
    """The sizes of one of the networks: by convolution its channels, whether it is pooled, and its dropout."""

    kernel: int
    padding: int
    channels: tuple[int, ...]
    pooled: tuple[bool, ...]
    dropout: tuple[float, ...]
    hidden: int
    smallest: int

    def build(self, channels: int, classes: int) -> nn.Module:
        """Chain the convolutions, an average over all positions, a hidden layer and the head."""
        sizes = itertools.pairwise((channels, *self.channels))
        stem, *others = (
            chain(
                conv=nn.Conv2d(inputs, outputs, self.kernel, padding=self.padding),
                relu=nn.ReLU(),
                pool=nn.MaxPool2d(2) if pooled else None,
                dropout=nn.Dropout(dropout) if dropout else None,
            )
            for (inputs, outputs), pooled, dropout in zip(sizes, self.pooled, self.dropout, strict=True)
        )
        hidden = chain(pool=GlobalAverage(), linear=nn.Linear(self.channels[-1], self.hidden), relu=nn.ReLU())
        return chain(stem=stem, stages=nn.Sequential(*others, hidden), head=nn.Linear(self.hidden, classes))


_GREY = PlayerNetwork(5, 2, (64, 128, 256), (True,) * 3, (0.0,) * 3, hidden=100, smallest=8)
NETWORKS = {
    "fashion_mnist": _GREY,
    "emnist": _GREY,
    "cifar10": PlayerNetwork(
        3, 2, (64, 128, 256, 512, 512), (False, True, False, True, False), (0.3,) * 5, hidden=100, smallest=1
    ),
    "isic2019": PlayerNetwork(
        3, 1, (32, 64, 128, 256, 512), (False, False, True, True, True), (0.0, 0.0, 0.2, 0.2, 0.2), 256, smallest=8
    ),
}
"""By the data for which they were made."""


@models.register("player_cnn")
@dataclass(frozen=True)
class PlayerCnnSpec(ModelSpec):
    """The convolutional networks of PLayer-FL, one for each of its image datasets: no norm layers, two linear layers.

    "PLayer-FL: A Principled Approach to Personalized Layer-wise Cross-Silo Federated Learning". For Fashion-MNIST and
    EMNIST three 5x5 convolutions of 64 to 256 channels with 2x2 max-pooling; for CIFAR-10 five 3x3 ones of 64 to 512
    with a padding of two pixels, pooling after the second and the fourth and dropout of 0.3 after each; for ISIC-2019
    five 3x3 ones of 32 to 512, pooling and dropout of 0.2 after the last three. Positions are averaged before the
    linear layers. Weights are drawn from N(0, 2 / fan_in), biases are zero, as in the released code.
    """

    variant: str = parameter("fashion_mnist", "The data for which the network was made.", choices=tuple(NETWORKS))

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of this shape."""
        network = NETWORKS[self.variant]
        channels = image_channels(self.name, input_shape, network.smallest)
        return kaiming_everywhere(network.build(channels, classes))


@models.register("player_mlp")
@dataclass(frozen=True)
class PlayerMlpSpec(ModelSpec):
    """The perceptron of PLayer-FL for heart disease: hidden layers of 50, 20 and 20, with ReLU.

    "PLayer-FL: A Principled Approach to Personalized Layer-wise Cross-Silo Federated Learning", which gives it ten
    features of a patient and five classes; 2,095 parameters. Weights are drawn from N(0, 2 / fan_in), biases are zero,
    as in the released code; else it is ``mlp(hidden=50-20-20)``.
    """

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for inputs of this shape."""
        return kaiming_everywhere(MlpSpec(hidden="50-20-20").build(input_shape, classes))


def kaiming_everywhere(model: nn.Module) -> nn.Module:
    """Draw weights of convolutions and linear layers from N(0, 2 / fan_in) and set their biases to zero.

    Returns the same model.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model
