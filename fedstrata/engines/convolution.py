"""Convolutions of K clients at once: three ways to compute each direction, and which one is taken.

- ``windows``: unfold the images into windows, and one batched matrix product over them. It works everywhere.
- ``implicit``: products that gather the windows as they go, in Triton (:mod:`fedstrata.kernels.convolution`).
- ``grouped``: PyTorch's convolution with one group for each client.

On a GPU with Triton the ways of a shape are measured once, when it is first met, and the quickest is kept in a file of
the cache (:mod:`fedstrata.engines.choosing`): runs on one machine repeat bit for bit. While a CUDA graph is recorded
nothing is measured, and under ``torch.use_deterministic_algorithms`` (``--deterministic``) never: then a rule by shape
decides, so that no bit depends on a clock or a file. Small convolutions follow the rule, too.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from functools import cache, partial
from importlib.util import find_spec
from types import FunctionType, ModuleType
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fedstrata.engines.choosing import Choice, Choices, choices_file, milliseconds_on_gpu, quickest
from fedstrata.engines.watching import bringing_once
from fedstrata.errors import FedStrataWarning
from fedstrata.kernels.finding import find_kernels

Pair = tuple[int, int]
WAYS = ("windows", "implicit", "grouped")
_MEASURED = "convolutions-2"
"""Where choices are kept: under another name whenever a way becomes quicker, so that all are measured again."""
_WORTH_MEASURING = 1e8
"""Multiplications of one convolution; below, the choice hardly matters."""
_MOST_TAPS = 15
_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_NARROW = (torch.bfloat16, torch.float16)
_HAS_WIDE_PRODUCT = "dtype" in torch.ops.aten.bmm.overloads()
"""Whether PyTorch can leave a product of narrow factors in float32, in which it is computed."""
_broken: list[str] = []


class StackedConvolution(torch.autograd.Function):
    """Convolve K clients' images ``[K, C, B, H, W]`` with K clients' weights ``[K, O, C, h, w]``.

    Weights may be more exact than images, as under autocast: they are narrowed where they are read, and their gradient,
    which is added up in float32 anyway, is not narrowed at all.
    """

    @staticmethod
    def forward(ctx: Any, images: Tensor, weights: Tensor, stride: Pair, padding: Pair) -> Tensor:
        """Return ``[K, O, B, H', W']``; windows are kept for the backward pass only where both directions use them."""
        geometry = (weights.shape[3], weights.shape[4]), stride, padding
        choice = _choice_ahead(images, weights, stride, padding, learning=any(ctx.needs_input_grad[:2]))
        columns = None
        ctx.weights_dtype = weights.dtype
        if choice["forward"] == "windows":
            columns, places = windows_of(images, *geometry)
            weights = weights.to(images.dtype)
            outputs = _by_windows(columns, weights, places)
        else:
            outputs = forward_by(choice["forward"], images, weights, stride, padding)
        kept = columns if columns is not None and choice["weights"] == "windows" else images
        ctx.save_for_backward(kept, weights)
        ctx.geometry = images.shape, stride, padding
        ctx.way_for_weights, ctx.unfolded = choice["weights"], kept is columns
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """Return the gradients for the images and the weights."""
        kept, weights = ctx.saved_tensors
        shape, stride, padding = ctx.geometry
        dtype = ctx.weights_dtype
        for_images = for_weights = None
        if ctx.needs_input_grad[1]:
            if ctx.unfolded:
                for_weights = _weights_by_windows(gradient, kept, weights.shape, dtype)
            else:
                for_weights = weights_by(ctx.way_for_weights, gradient, kept, weights.shape, stride, padding, dtype)
        if ctx.needs_input_grad[0]:
            way = _choice_back(gradient, weights, shape, stride, padding)
            for_images = images_by(way, gradient, weights, shape, stride, padding)
        return for_images, for_weights, None, None


# The choice --------------------------------------------------------------------------------------------------------


def _choice_ahead(images: Tensor, weights: Tensor, stride: Pair, padding: Pair, learning: bool) -> Choice:
    """Choose for the forward pass and the weights together: they may share their windows. Tests only go forward."""
    if not images.is_cuda or not _has_choice(weights.shape):
        return {"forward": "windows", "weights": "windows"}

    def measure() -> Choice:
        forward = _times(lambda way: forward_by(way, images, weights, stride, padding), WAYS)
        if not learning:
            return {"forward": quickest(forward), "weights": "windows"}
        gradient = forward_by("windows", images, weights, stride, padding)
        options = weights.shape, stride, padding, weights.dtype
        back = _times(lambda way: weights_by(way, gradient, images, *options), WAYS)
        kernel = (weights.shape[3], weights.shape[4])
        return quickest_pair(forward, back, milliseconds_on_gpu(lambda: windows_of(images, kernel, stride, padding)))

    case = case_of("forward" if learning else "tested", images.shape, weights.shape, stride, padding, images.dtype)
    rule = {
        part: rule_by_shape(part, images.shape, weights.shape, stride, padding, images.dtype)
        for part in ("forward", "weights")
    }
    places = places_of(images.shape, weights.shape, stride, padding)
    return _chosen(case, images.device, weights.numel() * places, measure, rule)


def _choice_back(gradient: Tensor, weights: Tensor, shape: torch.Size, stride: Pair, padding: Pair) -> str:
    if not gradient.is_cuda or not _has_choice(weights.shape):
        return "windows"

    def measure() -> Choice:
        times = _times(lambda way: images_by(way, gradient, weights, shape, stride, padding), WAYS)
        return {"images": quickest(times)}

    case = case_of("images", shape, weights.shape, stride, padding, gradient.dtype)
    rule = {"images": rule_by_shape("images", shape, weights.shape, stride, padding, gradient.dtype)}
    return _chosen(case, gradient.device, weights.numel() * gradient[0, 0].numel(), measure, rule)["images"]


def quickest_pair(forward: Mapping[str, float], weights: Mapping[str, float], unfolding: float) -> Choice:
    """Choose the ways forward and for the weights by the sum of their times; windows for both are unfolded once.

    >>> quickest_pair({"windows": 5.0, "implicit": 4.0}, {"windows": 5.0, "implicit": 4.0}, unfolding=3.0)
    {'forward': 'windows', 'weights': 'windows'}
    """
    times = {(one, other): forward[one] + weights[other] for one in forward for other in weights}
    if math.isfinite(times["windows", "windows"]):
        times["windows", "windows"] -= unfolding
    one, other = min(times, key=times.__getitem__)
    return {"forward": one, "weights": other}


def rule_by_shape(
    part: str, images: torch.Size, weights: torch.Size, stride: Pair, padding: Pair, dtype: torch.dtype
) -> str:
    """Tell which way was the quickest for such shapes on an H200, without measuring here.

    Windows cost most where each pixel lies in many of them. The implicit way rearranges the weights, which pays off
    where a client has far more places than outputs; for the images the other way does so, too, unless a step of two
    leaves few windows to add back. The gradient for the weights gains nothing from it where a tile holds several taps,
    because there are few channels.
    """
    taps, steps = weights[3] * weights[4], stride[0] * stride[1]
    if dtype not in _KERNEL_DTYPES:
        return "windows"
    channels = weights[2]
    if part == "weights" and (channels % 64 or channels * weights[4] <= 32):
        return "windows"
    if part == "images":
        return "implicit" if taps > 1 and (steps == 1 or taps >= 4 * steps) else "windows"
    many = places_of(images, weights, stride, padding) >= 10 * weights[1]
    return "implicit" if taps >= 4 * steps and many else "windows"


def places_of(images: torch.Size, weights: torch.Size, stride: Pair, padding: Pair) -> int:
    """Count the places ``B * H' * W'`` of the windows of one client."""
    rows = (images[3] + 2 * padding[0] - weights[3]) // stride[0] + 1
    across = (images[4] + 2 * padding[1] - weights[4]) // stride[1] + 1
    return int(images[2] * rows * across)


def case_of(part: str, images: torch.Size, weights: torch.Size, stride: Pair, padding: Pair, dtype: torch.dtype) -> str:
    """Describe in one line what a measurement holds for.

    Clients and samples are rounded up to powers of two: groups shrink within an epoch, and last batches are smaller.
    """
    rounded = tuple(1 << (size - 1).bit_length() if axis in (0, 2) else size for axis, size in enumerate(images))
    shapes = "x".join(map(str, rounded)), "x".join(map(str, weights[1:]))
    return f"{part} {_precision(dtype)} {shapes[0]} by {shapes[1]} stride {stride} padding {padding}"


def _chosen(
    case: str, device: torch.device, multiplications: int, measure: Callable[[], Choice], rule: Choice
) -> Choice:
    if torch.are_deterministic_algorithms_enabled() or multiplications < _WORTH_MEASURING:
        return rule
    choices = _choices(device)
    if torch.cuda.is_current_stream_capturing():
        return choices.remembered(case) or rule
    return choices.choose(case, measure)


@cache
def _choices(device: torch.device) -> Choices:
    return Choices(choices_file(_MEASURED, torch.cuda.get_device_name(device)), WAYS)


def _times(work: Callable[[str], Tensor], ways: Collection[str]) -> dict[str, float]:
    """Time some ways; one that does not work here, lacks memory, or gives another result is never the quickest."""
    with torch.no_grad():
        expected = work("windows")
        return {way: _timed(partial(work, way), expected, way) for way in ways}


bringing_once(cast(FunctionType, _times))


def _timed(work: Callable[[], Tensor], expected: Tensor, way: str) -> float:
    try:
        found = work()
        error = relative_error(found, expected)
        if error > _TOLERANCES[_precision(expected.dtype)]:
            text = f"Convolutions by '{way}' are not used for {list(expected.shape)}: the result is off by {error:.1g}."
            warnings.warn(text, FedStrataWarning, stacklevel=2)
            return math.inf
        time = milliseconds_on_gpu(work)
    except RuntimeError:
        return math.inf
    return math.inf if way == "implicit" and _broken else time


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Tell how far off a result is, by its norm; infinitely, if it is not finite where the expected one is.

    >>> relative_error(torch.tensor([3.0, 4.5]), torch.tensor([3.0, 4.0]))
    0.1
    >>> relative_error(torch.tensor([3.0, torch.nan]), torch.tensor([3.0, 4.0]))
    inf
    """
    error = float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
    return error if math.isfinite(error) else math.inf


_TOLERANCES = {"float32": 1e-4, "tf32": 5e-3, "bfloat16": 5e-2, "float16": 5e-2}
"""How far two ways may differ that both are right: a few times more than rounding does."""


def _precision(dtype: torch.dtype) -> str:
    if dtype != torch.float32:
        return str(dtype).removeprefix("torch.")
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "float32"


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _has_choice(weights: torch.Size) -> bool:
    """Tell whether there is a choice: kernels of one tap have windows that are the images, and need no other way."""
    return _has_triton() and not _broken and weights[3] * weights[4] > 1 and max(weights[3:]) <= _MOST_TAPS


# The ways ----------------------------------------------------------------------------------------------------------


def forward_by(way: str, images: Tensor, weights: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """Convolve in one of the ways."""
    if way == "implicit" and _can_be_implicit(images):
        from fedstrata.kernels import convolution

        return _attempted(
            lambda: convolution.forward(images, weights, stride, padding, _kernel_precision(images.dtype)),
            lambda: forward_by("windows", images, weights, stride, padding),
        )
    weights = weights.to(images.dtype)
    if way == "grouped":
        with _repeatable():
            outputs = F.conv2d(_joined(images), weights.flatten(0, 1), None, stride, padding, 1, len(weights))
        return _apart(outputs, len(weights))
    columns, places = windows_of(images, (weights.shape[3], weights.shape[4]), stride, padding)
    return _by_windows(columns, weights, places)


def weights_by(
    way: str,
    gradient: Tensor,
    images: Tensor,
    shape: torch.Size,
    stride: Pair,
    padding: Pair,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute the gradient for weights ``[K, O, C, h, w]`` of some type, or that of the images, in one of the ways."""
    dtype = dtype or images.dtype
    if way == "implicit" and _can_be_implicit(images):
        from fedstrata.kernels import convolution

        kernel = (shape[3], shape[4])
        return _attempted(
            lambda: convolution.for_weights(
                gradient, images, kernel, stride, padding, _kernel_precision(images.dtype), dtype
            ),
            lambda: weights_by("windows", gradient, images, shape, stride, padding, dtype),
        )
    if way == "grouped":
        nothing = images.new_empty(1).expand(shape[0] * shape[1], *shape[2:])
        return _grouped_back(gradient, _joined(images), nothing, stride, padding, shape[0], 1).view(shape).to(dtype)
    columns, _ = windows_of(images, (shape[3], shape[4]), stride, padding)
    return _weights_by_windows(gradient, columns, shape, dtype)


def images_by(way: str, gradient: Tensor, weights: Tensor, shape: torch.Size, stride: Pair, padding: Pair) -> Tensor:
    """Compute the gradient for images ``[K, C, B, H, W]`` in one of the ways."""
    clients, outputs, channels, height, width = weights.shape
    if way == "implicit" and _can_be_implicit(gradient):
        from fedstrata.kernels import convolution

        size = (shape[3], shape[4])
        return _attempted(
            lambda: convolution.for_images(gradient, weights, size, stride, padding, _kernel_precision(gradient.dtype)),
            lambda: images_by("windows", gradient, weights, shape, stride, padding),
        )
    weights = weights.to(gradient.dtype)
    if way == "grouped":
        nothing = gradient.new_empty(1).expand(shape[2], clients * channels, *shape[3:])
        return _apart(_grouped_back(gradient, nothing, weights.flatten(0, 1), stride, padding, clients, 0), clients)
    if stride == (1, 1) and padding[0] < height and padding[1] < width:
        return _correlate_back(gradient, weights, padding).view(shape)
    back = torch.bmm(weights.reshape(clients, outputs, -1).transpose(1, 2), gradient.reshape(clients, outputs, -1))
    return folded(back, shape, (gradient.shape[3], gradient.shape[4]), (height, width), stride, padding)


def _attempted(work: Callable[[], Tensor], instead: Callable[[], Tensor]) -> Tensor:
    """Run a kernel, or from the first failure on what does the same without it."""
    try:
        return work()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        reason = (str(error) or type(error).__name__).strip().splitlines()[-1][:120]
        _broken.append(reason)
        text = f"The GPU kernels for convolutions without windows are not used ({reason})."
        warnings.warn(text, FedStrataWarning, stacklevel=2)
        return instead()


def _can_be_implicit(images: Tensor) -> bool:
    return not _broken and images.is_cuda and images.dtype in _KERNEL_DTYPES


def _kernel_precision(dtype: torch.dtype) -> str:
    """Name Triton's way of multiplying: without tf32, three products for each make up for its missing bits."""
    return "tf32x3" if _precision(dtype) == "float32" else "tf32"


def _repeatable() -> AbstractContextManager[None]:
    """Keep cuDNN to algorithms that add up in one order."""
    cudnn = torch.backends.cudnn
    flags: AbstractContextManager[None] = cudnn.flags(True, False, deterministic=True, allow_tf32=cudnn.allow_tf32)
    return flags


def _joined(images: Tensor) -> Tensor:
    """Lay ``[K, C, B, H, W]`` out as ``[B, K * C, H, W]``."""
    return images.permute(2, 0, 1, 3, 4).flatten(1, 2)


def _apart(joined: Tensor, clients: int) -> Tensor:
    batch, channels, height, width = joined.shape
    return joined.view(batch, clients, channels // clients, height, width).permute(1, 2, 0, 3, 4)


def _grouped_back(
    gradient: Tensor, images: Tensor, weights: Tensor, stride: Pair, padding: Pair, clients: int, place: int
) -> Tensor:
    wanted = [place == 0, place == 1, False]
    with _repeatable():
        gradients = torch.ops.aten.convolution_backward(
            _joined(gradient), images, weights, None, stride, padding, (1, 1), False, (0, 0), clients, wanted
        )
    result: Tensor = gradients[place]
    return result


def windows_of(images: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> tuple[Tensor, tuple[int, int, int]]:
    """Unfold ``[K, C, B, H, W]`` into columns ``[K, C * h * w, B * H' * W']``, and tell ``(B, H', W')``."""
    kernels = _windows_kernels() if images.is_cuda else None
    if kernels is None:
        return unfolded_windows(images, kernel, stride, padding)
    found: tuple[Tensor, tuple[int, int, int]] = kernels.windows(images, kernel, stride, padding)
    return found


def _windows_kernels() -> ModuleType | None:
    """Find the GPU kernel for windows, if it can be compiled here."""

    def trial(kernels: ModuleType) -> None:
        columns, places = kernels.windows(torch.zeros(1, 1, 1, 3, 3, device="cuda"), (3, 3), (1, 1), (1, 1))
        kernels.fold(columns, torch.Size((1, 1, 1, 3, 3)), places[1:], (3, 3), (1, 1), (1, 1))

    return find_kernels("windows", "windows of convolutions", trial)


def unfolded_windows(images: Tensor, kernel: Pair, stride: Pair, padding: Pair) -> tuple[Tensor, tuple[int, int, int]]:
    """Unfold windows as :func:`windows_of` does, by PyTorch's general copy."""
    if padding != (0, 0):
        images = F.pad(images, (padding[1], padding[1], padding[0], padding[0]))
    windows = images.unfold(3, kernel[0], stride[0]).unfold(4, kernel[1], stride[1])
    clients, channels, batch, height, width = windows.shape[:5]
    columns = windows.permute(0, 1, 5, 6, 2, 3, 4).reshape(clients, channels * kernel[0] * kernel[1], -1)
    return columns, (batch, height, width)


def _by_windows(columns: Tensor, weights: Tensor, places: tuple[int, int, int]) -> Tensor:
    return torch.bmm(weights.reshape(*weights.shape[:2], -1), columns).view(*weights.shape[:2], *places)


def _weights_by_windows(gradient: Tensor, columns: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    factors = gradient.reshape(*gradient.shape[:2], -1), columns.transpose(1, 2)
    if dtype == torch.float32 and columns.dtype in _NARROW and columns.is_cuda and _HAS_WIDE_PRODUCT:
        return torch.bmm(*factors, out_dtype=dtype).view(shape)
    return torch.bmm(*factors).view(shape).to(dtype)


def _correlate_back(gradient: Tensor, weights: Tensor, padding: Pair) -> Tensor:
    """At stride one the gradient for the images is itself a convolution: of the gradient with the flipped weights."""
    clients, _, channels, height, width = weights.shape
    opposite = (height - 1 - padding[0], width - 1 - padding[1])
    columns, _ = windows_of(gradient, (height, width), (1, 1), opposite)
    flipped = weights.flip(3, 4).transpose(1, 2).reshape(clients, channels, -1)
    return torch.bmm(flipped, columns)


def folded(columns: Tensor, shape: torch.Size, places: Pair, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Add columns back to where their windows stood, the adjoint of :func:`windows_of`; ``places`` are ``(H', W')``."""
    kernels = _windows_kernels() if columns.is_cuda else None
    if kernels is None:
        return added_back(columns, shape, places, kernel, stride, padding)
    images: Tensor = kernels.fold(columns, shape, places, kernel, stride, padding)
    return images


def added_back(columns: Tensor, shape: torch.Size, places: Pair, kernel: Pair, stride: Pair, padding: Pair) -> Tensor:
    """Fold columns as :func:`folded` does, by one of PyTorch's additions for each tap."""
    clients, channels, batch, height, width = shape
    padded = columns.new_zeros(clients, channels, batch, height + 2 * padding[0], width + 2 * padding[1])
    rows, across = places
    windows = columns.view(clients, channels, *kernel, batch, rows, across)
    for i in range(kernel[0]):
        for j in range(kernel[1]):
            target = padded[
                ..., i : i + stride[0] * (rows - 1) + 1 : stride[0], j : j + stride[1] * (across - 1) + 1 : stride[1]
            ]
            target += windows[:, :, i, j]
    return padded[..., padding[0] : padding[0] + height, padding[1] : padding[1] + width]
