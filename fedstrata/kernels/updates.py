"""Steps of optimisers: all that happens to a stack of weights ``[K, ...]`` in one step, in one launch.

Clipping, decay, momentum and the step itself read and write each number once. The learning rate lies on the device and
is read there, so that a recorded launch follows the schedule.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as language
from torch import Tensor
from triton.language import constexpr

from fedstrata.kernels.launching import exact_type, on_device_of

_BLOCK = 1024
_SUMMED = 4096


@triton.jit  # type: ignore[untyped-decorator]
def _sgd(  # type: ignore[no-untyped-def]
    weights, gradients, velocities, scales, rate, count, blocks,
    DECAY: constexpr, MOMENTUM: constexpr, NESTEROV: constexpr, TYPE: constexpr, BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    program = language.program_id(0)
    client = (program // blocks).to(language.int64)
    within = program % blocks * BLOCK + language.arange(0, BLOCK)
    inside = within < count
    places = client * count + within
    weight = language.load(weights + places, mask=inside, other=0.0).to(TYPE)
    direction = language.load(gradients + places, mask=inside, other=0.0).to(TYPE)
    if scales is not None:
        direction = direction * language.load(scales + client).to(TYPE)
    if DECAY != 0:
        direction = direction + DECAY * weight
    if velocities is not None:
        velocity = MOMENTUM * language.load(velocities + places, mask=inside, other=0.0).to(TYPE) + direction
        language.store(velocities + places, velocity, mask=inside)
        direction = direction + MOMENTUM * velocity if NESTEROV else velocity
    language.store(weights + places, weight - language.load(rate).to(TYPE) * direction, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _adam(  # type: ignore[no-untyped-def]
    weights, gradients, means, squares, scales, rate, rates, corrections, count, blocks,
    BETA1: constexpr, BETA2: constexpr, EPSILON: constexpr, ADDED: constexpr, SHRUNK: constexpr,  # noqa: N803
    TYPE: constexpr, BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    program = language.program_id(0)
    client = (program // blocks).to(language.int64)
    within = program % blocks * BLOCK + language.arange(0, BLOCK)
    inside = within < count
    places = client * count + within
    weight = language.load(weights + places, mask=inside, other=0.0).to(TYPE)
    slope = language.load(gradients + places, mask=inside, other=0.0).to(TYPE)
    if scales is not None:
        slope = slope * language.load(scales + client).to(TYPE)
    if ADDED != 0:
        slope = slope + ADDED * weight
    if SHRUNK != 0:
        weight = weight * (1 - language.load(rate) * SHRUNK).to(TYPE)
    mean = language.load(means + places, mask=inside, other=0.0).to(TYPE)
    mean = mean + (1 - BETA1) * (slope - mean)
    square = BETA2 * language.load(squares + places, mask=inside, other=0.0).to(TYPE) + (1 - BETA2) * slope * slope
    language.store(means + places, mean, mask=inside)
    language.store(squares + places, square, mask=inside)
    below = language.sqrt(square) / language.load(corrections + client).to(TYPE) + EPSILON
    language.store(weights + places, weight - mean * language.load(rates + client).to(TYPE) / below, mask=inside)


@triton.jit(do_not_specialize=["column"])  # type: ignore[untyped-decorator]
def _squares(  # type: ignore[no-untyped-def]
    values, sums, count, blocks, column, columns,
    TYPE: constexpr, BLOCK: constexpr,  # noqa: N803
):  # fmt: skip
    program = language.program_id(0)
    client = (program // blocks).to(language.int64)
    block = program % blocks
    within = block * BLOCK + language.arange(0, BLOCK)
    value = language.load(values + client * count + within, mask=within < count, other=0.0).to(TYPE)
    language.store(sums + client * columns + column + block, language.sum(value * value, 0))


def takes(*stacks: Sequence[Tensor]) -> bool:
    """Tell whether these lists hold stacks that a kernel can change: of one type, in one piece, not too large."""
    dtype = stacks[0][0].dtype
    return dtype in (torch.float32, torch.float64) and all(
        tensor.dtype == dtype and tensor.is_contiguous() and 0 < tensor.numel() < 2**31 - _SUMMED
        for tensors in stacks
        for tensor in tensors
    )


def squared_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Compute each client's squared norm over stacks ``[K, ...]``: ``[K]``, added up in a fixed order."""
    clients = len(gradients[0])
    counts = [gradient.numel() // clients for gradient in gradients]
    blocks = [triton.cdiv(count, _SUMMED) for count in counts]
    sums = gradients[0].new_empty(clients, sum(blocks))
    column = 0
    with on_device_of(sums):
        for gradient, count, own in zip(gradients, counts, blocks, strict=True):
            kind = exact_type(gradient.dtype)
            _squares[(clients * own,)](gradient, sums, count, own, column, sum(blocks), kind, _SUMMED, num_warps=8)
            column += own
    return sums.sum(1)


def sgd_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    velocities: Sequence[Tensor] | None,
    scales: Tensor | None,
    rate: Tensor,
    decay: float,
    momentum: float,
    nesterov: bool,
) -> None:
    """Make a step of gradient descent in place; ``scales`` ``[K]`` shorten the gradients, ``rate`` is one number."""
    with on_device_of(rate):
        for place, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            clients, count, blocks = _grid(weight, scales)
            _sgd[(clients * blocks,)](
                weight, gradient, None if velocities is None else velocities[place], scales, rate, count, blocks,
                decay, momentum, nesterov, exact_type(weight.dtype), _BLOCK,
            )  # fmt: skip


def adam_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    scales: Tensor | None,
    rate: Tensor,
    rates: Tensor,
    corrections: Tensor,
    betas: tuple[float, float],
    epsilon: float,
    added: float,
    shrunk: float,
) -> None:
    """Make a step of Adam in place; ``rates`` and ``corrections`` ``[tensors, K]`` hold what corrects the bias.

    The decay is ``added`` to the gradients, or the weights are ``shrunk`` by it.
    """
    with on_device_of(rate):
        for place, (weight, gradient) in enumerate(zip(weights, gradients, strict=True)):
            clients, count, blocks = _grid(weight, rates)
            _adam[(clients * blocks,)](
                weight, gradient, means[place], squares[place], scales, rate, rates[place], corrections[place],
                count, blocks, *betas, epsilon, added, shrunk, exact_type(weight.dtype), _BLOCK,
            )  # fmt: skip


def _grid(weight: Tensor, per_client: Tensor | None) -> tuple[int, int, int]:
    """Count clients, what each has, and the blocks of it; where clients need not be told apart, they are one."""
    clients = 1 if per_client is None else len(weight)
    count = weight.numel() // clients
    return clients, count, triton.cdiv(count, _BLOCK)
