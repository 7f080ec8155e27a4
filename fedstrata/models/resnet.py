"""Residual networks in the sizes of federated papers.

"Deep Residual Learning for Image Recognition" (He et al., CVPR 2016).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import nn

from fedstrata.models.base import ModelSpec, models
from fedstrata.models.blocks import (
    BasicBlock,
    Bottleneck,
    GlobalAverage,
    Norm,
    batch_norm,
    chain,
    convolution_unit,
    group_norm,
    image_channels,
    kaiming_convolutions,
)
from fedstrata.models.weights import WEIGHTS, find_weights, load_backbone
from fedstrata.spec import parameter


def residual_network(
    stem: nn.Module,
    widths: Sequence[int],
    blocks: Sequence[int],
    classes: int,
    norm: Norm,
    block: type[BasicBlock | Bottleneck] = BasicBlock,
) -> nn.Module:
    """Put stages of some blocks each behind a stem of ``widths[0]`` channels; each but the first halves the size."""
    stages = nn.Sequential()
    channels = widths[0]
    for stage, (width, number) in enumerate(zip(widths, blocks, strict=True)):
        first = block(channels, width, 1 if stage == 0 else 2, norm)
        channels = block.expansion * width
        stages.append(nn.Sequential(first, *(block(channels, width, 1, norm) for _ in range(number - 1))))
    return chain(stem=stem, stages=stages, pool=GlobalAverage(), head=nn.Linear(channels, classes))


class LipsResNetSpec(ModelSpec):
    """What the residual networks of LIPS share: a stem that quarters the size, and one basic block per stage."""

    widths: ClassVar[tuple[int, ...]]

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of this shape."""
        # The last halving must find at least two pixels: the stem halves twice, every stage but the first once.
        channels = image_channels(self.name, input_shape, smallest=2 ** len(self.widths) + 1)
        pool = nn.MaxPool2d(3, stride=2, padding=1)
        stem = convolution_unit(channels, self.widths[0], 7, stride=2, norm=batch_norm, bias=False, pool=pool)
        return kaiming_convolutions(residual_network(stem, self.widths, [1] * len(self.widths), classes, batch_norm))


@models.register("resnet6")
@dataclass(frozen=True)
class ResNet6Spec(LipsResNetSpec):
    """ResNet-6 with batch norm, of LIPS: two stages of one basic block, 64 and 128 channels.

    "When Aggregation Stops Collaborating: Layer-wise Inertia in Low-Data Federated Learning". The stem is a 7x7
    convolution of stride 2 and 3x3 max-pooling of stride 2, at 32x32 pixels too; shortcuts are 1x1 convolutions with
    batch norm; Kaiming normal convolutions.
    """

    widths: ClassVar[tuple[int, ...]] = (64, 128)


@models.register("resnet8")
@dataclass(frozen=True)
class ResNet8Spec(LipsResNetSpec):
    """ResNet-8 with batch norm, the CIFAR-100 model of LIPS: three stages of one basic block, 64 to 256 channels.

    "When Aggregation Stops Collaborating: Layer-wise Inertia in Low-Data Federated Learning". The stem is a 7x7
    convolution of stride 2 and 3x3 max-pooling of stride 2, at 32x32 pixels too; shortcuts are 1x1 convolutions with
    batch norm; Kaiming normal convolutions.
    """

    widths: ClassVar[tuple[int, ...]] = (64, 128, 256)


@models.register("resnet10")
@dataclass(frozen=True)
class ResNet10Spec(LipsResNetSpec):
    """ResNet-10 with batch norm, the Tiny-ImageNet model of LIPS: four stages of one basic block, 64 to 512 channels.

    "When Aggregation Stops Collaborating: Layer-wise Inertia in Low-Data Federated Learning". The stem is a 7x7
    convolution of stride 2 and 3x3 max-pooling of stride 2, at 32x32 pixels too; shortcuts are 1x1 convolutions with
    batch norm; Kaiming normal convolutions.
    """

    widths: ClassVar[tuple[int, ...]] = (64, 128, 256, 512)


@models.register("resnet20")
@dataclass(frozen=True)
class ResNet20Spec(ModelSpec):
    """ResNet-20 for CIFAR with batch norm, as in FedLWS: three stages of three basic blocks, 16, 32 and 64 channels.

    "FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking" (Shi et al., ICLR 2025). The stem is a 3x3
    convolution; shortcuts are 1x1 convolutions with batch norm where the shape changes. PyTorch's default
    initialisation, as in the released code of FedLAW, on which FedLWS builds.
    """

    weights: str | None = parameter(None, WEIGHTS, local=True)

    def find(self) -> Path | None:
        """Find the file of the weights, if there is to be one."""
        return find_weights(self.weights, self.name)

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of this shape."""
        channels = image_channels(self.name, input_shape, smallest=3)
        stem = convolution_unit(channels, 16, norm=batch_norm, bias=False)
        model = residual_network(stem, (16, 32, 64), (3, 3, 3), classes, batch_norm)
        weights = self.find()
        return model if weights is None else load_backbone(model, weights)


@models.register("wrn56_4")
@dataclass(frozen=True)
class WideResNet56Spec(ModelSpec):
    """WRN-56-4 for CIFAR with batch norm, as in FedLWS: three stages of nine basic blocks, 64, 128 and 256 channels.

    "FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking" (Shi et al., ICLR 2025), after "Wide Residual
    Networks" (Zagoruyko and Komodakis, BMVC 2016). As in the code of FedLWS it is a ResNet-56 with four times the
    channels everywhere, in the stem too, and norms after the convolutions, not before them as in a wide residual
    network. PyTorch's default initialisation.
    """

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of this shape."""
        channels = image_channels(self.name, input_shape, smallest=3)
        stem = convolution_unit(channels, 64, norm=batch_norm, bias=False)
        return residual_network(stem, (64, 128, 256), (9, 9, 9), classes, batch_norm)


_NORMS: dict[str, Norm] = {"group": group_norm(32), "batch": batch_norm}
_WIDTHS = (64, 128, 256, 512)


@models.register("resnet18")
@dataclass(frozen=True)
class ResNet18Spec(ModelSpec):
    """ResNet-18 with group norm and a 3x3 stem without pooling, the model of SSFL: four stages of two basic blocks.

    "SSFL: Discovering Sparse Unified Subnetworks at Initialization for Efficient Federated Learning" (Ohib et al.),
    with the network of "DisPFL: Towards Communication-Efficient Personalized Federated Learning via Decentralized
    Sparse Training" (Dai et al., ICML 2022): 64 to 512 channels, 32 groups in every norm. Kaiming normal convolutions
    and PyTorch's default head, as SSFL states; it does not say whether the fan is counted at the input or, as here,
    at the output.

    ``resnet18(norm=batch, pool=true, initialisation=default)`` is the Tiny-ImageNet model of "FedLWS: Federated
    Learning with Adaptive Layer-wise Weight Shrinking" (Shi et al., ICLR 2025), for images of 64 pixels.
    """

    norm: str = parameter("group", "The norm layers: group norm with 32 groups, or batch norm.", choices=tuple(_NORMS))
    pool: bool = parameter(False, "Whether 3x3 max-pooling of stride 2 ends the stem, for larger images.")
    initialisation: str = parameter(
        "kaiming", "Of convolutions: Kaiming normal, or PyTorch's default.", choices=("kaiming", "default")
    )

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of this shape."""
        channels = image_channels(self.name, input_shape, smallest=9 if self.pool else 5)
        norm = _NORMS[self.norm]
        pool = nn.MaxPool2d(3, stride=2, padding=1) if self.pool else None
        stem = convolution_unit(channels, 64, norm=norm, bias=False, pool=pool)
        model = residual_network(stem, _WIDTHS, (2, 2, 2, 2), classes, norm)
        return kaiming_convolutions(model) if self.initialisation == "kaiming" else model


@models.register("resnet50")
@dataclass(frozen=True)
class ResNet50Spec(ModelSpec):
    """ResNet-50 with group norm and a 3x3 stem without pooling, of SSFL: stages of 3, 4, 6 and 3 bottleneck blocks.

    "SSFL: Discovering Sparse Unified Subnetworks at Initialization for Efficient Federated Learning" (Ohib et al.),
    Table 3. The paper says no more than ResNet-50; stem, norms and initialisation are those of its ResNet-18
    (``resnet18``): 256 to 2048 channels after the stages, 32 groups in every norm, Kaiming normal convolutions.
    """

    norm: str = parameter("group", "The norm layers: group norm with 32 groups, or batch norm.", choices=tuple(_NORMS))

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for images of this shape."""
        channels = image_channels(self.name, input_shape, smallest=5)
        norm = _NORMS[self.norm]
        stem = convolution_unit(channels, 64, norm=norm, bias=False)
        return kaiming_convolutions(residual_network(stem, _WIDTHS, (3, 4, 6, 3), classes, norm, Bottleneck))
