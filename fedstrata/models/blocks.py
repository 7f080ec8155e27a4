"""The pieces that several models are built of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from fedstrata.errors import FedStrataError
from fedstrata.fused import norm_rectified

Norm = Callable[[int], nn.Module]
"""Makes the norm layer for a number of channels."""


def batch_norm(channels: int) -> nn.Module:
    """Normalise each channel over the batch, with running statistics (Ioffe and Szegedy, ICML 2015)."""
    return nn.BatchNorm2d(channels)


def group_norm(groups: int) -> Norm:
    """Normalise each sample over groups of channels, without running statistics (Wu and He, ECCV 2018)."""
    return lambda channels: nn.GroupNorm(groups, channels)


def chain(**modules: nn.Module | None) -> nn.Sequential:
    """Run modules one after another, each under its own name; those that are none are left out."""
    sequence = nn.Sequential()
    for name, module in modules.items():
        if module is not None:
            sequence.add_module(name, module)
    return sequence


def convolution_unit(
    inputs: int,
    outputs: int,
    kernel_size: int = 3,
    *,
    stride: int = 1,
    norm: Norm | None,
    bias: bool,
    pool: nn.Module | None = None,
) -> nn.Sequential:
    """Chain a padded convolution, a norm, ReLU and a pooling; norm and pooling may be absent."""
    unit = chain(
        conv=nn.Conv2d(inputs, outputs, kernel_size, stride, padding=kernel_size // 2, bias=bias),
        norm=None if norm is None else norm(outputs),
        relu=nn.ReLU(),
        pool=pool,
    )
    return unit if norm is None else ConvolutionUnit(OrderedDict(unit.named_children()))


class ConvolutionUnit(nn.Sequential):
    """A convolution, a norm, ReLU and perhaps a pooling; an engine may compute all but the first as one."""

    conv: nn.Module
    norm: nn.Module
    relu: nn.Module
    pool: nn.Module

    def forward(self, inputs: Tensor) -> Tensor:
        """Run the modules one after another."""
        return norm_rectified(self.norm, self.relu, self.conv(inputs), pool=getattr(self, "pool", None))


class GlobalAverage(nn.Module):
    """The mean of each channel over all positions of a feature map."""

    def forward(self, features: Tensor) -> Tensor:
        """Average ``[n, channels, height, width]`` to ``[n, channels]``."""
        return features.mean(dim=(-2, -1))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut (He et al., CVPR 2016).

    The shortcut is the identity or, where the shape changes, a 1x1 convolution with a norm.
    """

    expansion: ClassVar[int] = 1
    """How many times its width the block puts out."""

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.norm1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = norm(width)
        self.relu = nn.ReLU()
        self.shortcut = _shortcut(inputs, width, stride, norm)

    def forward(self, inputs: Tensor) -> Tensor:
        """Add what the convolutions find to what the shortcut carries."""
        hidden = norm_rectified(self.norm1, self.relu, self.conv1(inputs))
        return norm_rectified(self.norm2, self.relu, self.conv2(hidden), lambda: self.shortcut(inputs))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 ones, the last four times as wide, beside a shortcut (He et al., CVPR 2016).

    The 3x3 convolution has the stride. The shortcut is that of :class:`BasicBlock`.
    """

    expansion: ClassVar[int] = 4
    """How many times its width the block puts out."""

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        outputs = self.expansion * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = norm(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm3 = norm(outputs)
        self.relu = nn.ReLU()
        self.shortcut = _shortcut(inputs, outputs, stride, norm)

    def forward(self, inputs: Tensor) -> Tensor:
        """Add what the convolutions find to what the shortcut carries."""
        hidden = norm_rectified(self.norm1, self.relu, self.conv1(inputs))
        hidden = norm_rectified(self.norm2, self.relu, self.conv2(hidden))
        return norm_rectified(self.norm3, self.relu, self.conv3(hidden), lambda: self.shortcut(inputs))


def _shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    if stride == 1 and inputs == outputs:
        return nn.Identity()
    return chain(conv=nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm=norm(outputs))


def kaiming_convolutions(model: nn.Module) -> nn.Module:
    """Draw the weights of convolutions from N(0, 2 / fan_out) and set their biases to zero (He et al., ICCV 2015).

    Returns the same model.
    """
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model


def image_channels(model: str, input_shape: tuple[int, ...], smallest: int) -> int:
    """Return the channels of an image; refuse what is no image or has a side of less than ``smallest`` pixels."""
    if len(input_shape) != 3 or min(input_shape[1:]) < smallest:
        raise FedStrataError(
            f"The model '{model}' takes images (channels, height, width) of at least {smallest} x {smallest} pixels, "
            f"but the inputs have the shape {input_shape}; use other data or another model ('mlp' takes any shape)."
        )
    return input_shape[0]
