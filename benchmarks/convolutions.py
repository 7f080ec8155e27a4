"""Measure every way of every convolution of three settings, and check them all against float64.

    python benchmarks/convolutions.py --settings resnet8 resnet18 resnet20 --precisions tf32 bf16 fp32

For each convolution and direction: milliseconds of each way, the floor (the operations at the measured speed of matrix
products, or the bytes at that of memory, whichever takes longer), and the relative error of the worst way. ``windows``
for the weights includes unfolding, which is shared with the forward pass where both take it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstrata.engines.choosing import milliseconds_on_gpu
from fedstrata.engines.convolution import WAYS, forward_by, images_by, rule_by_shape, weights_by

DIRECTIONS = ("forward", "images", "weights")
BYTES_PER_SECOND = 4.3e12
OPERATIONS_PER_SECOND = {"tf32": 400e12, "bf16": 790e12, "fp32": 55e12}
TOLERANCE = {"tf32": 1e-3, "bf16": 1e-2, "fp32": 1e-5}


@dataclass(frozen=True)
class Layer:
    """A convolution of all clients, and how often a model has it."""

    channels: int
    outputs: int
    size: int
    kernel: int
    stride: int
    padding: int
    times: int = 1

    def __str__(self) -> str:
        return f"{self.channels}-{self.outputs} {self.kernel}x{self.kernel}/{self.stride} at {self.size}"


@dataclass(frozen=True)
class Setting:
    """Clients, the images of a batch, and the layers."""

    clients: int
    batch: int
    layers: tuple[Layer, ...]


def stages(widths: tuple[int, ...], size: int, blocks: int) -> Iterator[Layer]:
    """List the layers and shortcuts of stages of residual blocks, each at half the size of the one before."""
    before = widths[0]
    for stage, width in enumerate(widths):
        first = size >> max(stage - 1, 0)
        if stage:
            yield Layer(before, width, first, 3, 2, 1)
            yield Layer(before, width, first, 1, 2, 0)
        yield Layer(width, width, size >> stage, 3, 1, 1, 2 * blocks - (stage > 0))
        before = width


SETTINGS = {
    "resnet8": Setting(100, 100, (Layer(3, 64, 32, 7, 2, 3), *stages((64, 128, 256), 8, 1))),
    "resnet18": Setting(10, 16, (Layer(3, 64, 32, 3, 1, 1), *stages((64, 128, 256, 512), 32, 2))),
    "resnet20": Setting(20, 128, (Layer(3, 16, 32, 3, 1, 1), *stages((16, 32, 64), 32, 3))),
}


def ways(layer: Layer, images: Tensor, weights: Tensor, gradient: Tensor) -> dict[str, Callable[[str], Tensor]]:
    """Return for each direction the function that takes the name of a way."""
    stride, padding = (layer.stride, layer.stride), (layer.padding, layer.padding)
    return {
        "forward": lambda way: forward_by(way, images, weights, stride, padding),
        "images": lambda way: images_by(way, gradient, weights, images.shape, stride, padding),
        "weights": lambda way: weights_by(way, gradient, images, weights.shape, stride, padding),
    }


def exact(layer: Layer, images: Tensor, weights: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """Compute all directions of one client in float64."""
    image, weight = (tensor[0].double().requires_grad_() for tensor in (images.transpose(1, 2), weights))
    outputs = F.conv2d(image, weight, None, layer.stride, layer.padding)
    for_image, for_weight = torch.autograd.grad(outputs, (image, weight), gradient[0].transpose(0, 1).double())
    return {"forward": outputs.detach().transpose(0, 1), "images": for_image.transpose(0, 1), "weights": for_weight}


def tensors(setting: Setting, layer: Layer, precision: str) -> tuple[Tensor, Tensor, Tensor]:
    """Draw images, weights and a gradient."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    clients, kernel = setting.clients, layer.kernel
    places = (layer.size + 2 * layer.padding - kernel) // layer.stride + 1
    drawn = (
        torch.randn(clients, layer.channels, setting.batch, layer.size, layer.size, device="cuda"),
        torch.randn(clients, layer.outputs, layer.channels, kernel, kernel, device="cuda") / kernel,
        torch.randn(clients, layer.outputs, setting.batch, places, places, device="cuda"),
    )
    images, weights, gradient = (tensor.to(dtype) for tensor in drawn)
    return images, weights, gradient


def floor(images: Tensor, weights: Tensor, gradient: Tensor, precision: str) -> float:
    """Tell below how many milliseconds no way can be."""
    operations = 2 * gradient.numel() * weights[0, 0].numel()
    moved = images.nbytes + weights.nbytes + gradient.nbytes
    return 1e3 * max(operations / OPERATIONS_PER_SECOND[precision], moved / BYTES_PER_SECOND)


def measure(name: str, precision: str) -> None:
    """Print one line for each layer and direction, and what a step of the setting takes with each way alone."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    setting, sums = SETTINGS[name], dict.fromkeys(("floor", *WAYS, "quickest", "by rule"), 0.0)
    for layer in setting.layers:
        images, weights, gradient = tensors(setting, layer, precision)
        right, computed = exact(layer, images, weights, gradient), ways(layer, images, weights, gradient)
        for direction in DIRECTIONS:
            if direction == "images" and layer.channels == 3:
                continue  # nobody asks for the gradient of the data
            errors, times = {}, {}
            for way in WAYS:
                error = computed[direction](way)[0].double() - right[direction]
                errors[way] = float(error.norm() / right[direction].norm())
                times[way] = milliseconds_on_gpu(partial(computed[direction], way))
            geometry = (layer.stride, layer.stride), (layer.padding, layer.padding)
            rule = rule_by_shape(direction, images.shape, weights.shape, *geometry, images.dtype)
            least = floor(images, weights, gradient, precision)
            worst = max(errors.values())
            line = "  ".join(f"{way} {times[way]:.3f}" for way in WAYS)
            remark = "" if worst < TOLERANCE[precision] else f"  WRONG {errors}"
            print(f"{name} {precision} {layer!s:22} {direction:8} floor {least:.3f}  {line}  error {worst:.0e}{remark}")
            more = {"floor": least, "quickest": min(times.values()), "by rule": times[rule]}
            for part, time in (times | more).items():
                sums[part] += layer.times * time
    print(f"{name} {precision} all: " + "  ".join(f"{part} {time:.2f} ms" for part, time in sums.items()), flush=True)


def main() -> None:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=list(SETTINGS))
    parser.add_argument("--precisions", nargs="+", choices=TOLERANCE, default=list(TOLERANCE))
    asked = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "There is no GPU here: this benchmark measures GPU kernels.\n")
    for name in asked.settings:
        for precision in asked.precisions:
            measure(name, precision)


if __name__ == "__main__":
    main()
