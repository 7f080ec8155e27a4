"""How many floating-point operations a model takes, which weights take them, and what local training costs.

The convention is that of the literature on sparse training (RigL, and DisPFL among federated methods): a multiplication
and an addition are two operations, only products with weights and between activations count, and the two backward
passes, for the weights and for the activations, take as many operations each as the forward pass.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedstrata.models.trial import forward, undisturbed, zero_samples
from fedstrata.private_torch import OperationMode
from fedstrata.stack import Tensors, constant, narrow

PASSES = 3
"""A local step in forward passes: the forward one, and as much again for each of the two backward ones."""


@dataclass(frozen=True)
class Cost:
    """What local training took K clients, ``[K]`` each: all operations, and those that weights other than zero take."""

    dense: Tensor
    sparse: Tensor

    @classmethod
    def total(cls, costs: Iterable[Cost]) -> Cost:
        """Add up what the same clients did one after another."""
        every = list(costs)
        return cls(*(torch.stack([getattr(cost, kind) for cost in every]).sum(0) for kind in ("dense", "sparse")))

    @classmethod
    def join(cls, costs: Sequence[Cost]) -> Cost:
        """Put several groups of clients together, in their order."""
        return cls(*(torch.cat([getattr(cost, kind) for cost in costs]) for kind in ("dense", "sparse")))


@dataclass(frozen=True)
class Flops:
    """The operations of the forward pass of one sample.

    ``weights`` has those of each parameter that is multiplied with activations; each of its entries takes an equal
    share, so that an entry that is zero saves that. ``others`` are those without a parameter, such as the products of
    attention between its activations.

    >>> model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(144, 10))
    >>> flops = Flops.read(model, (1, 8, 8))
    >>> flops.weights, flops.forward
    ({'0.weight': 2592.0, '2.weight': 2880.0}, 5472.0)
    """

    weights: Mapping[str, float]
    others: float

    @classmethod
    def read(cls, model: nn.Module, input_shape: tuple[int, ...], sample: Tensor | None = None) -> Flops:
        """Count the operations of one forward pass of a copy in evaluation mode; the model is not touched.

        The pass sees zeros of ``input_shape``, or ``sample``, a batch, where zeros are no valid input (token numbers).
        Products are counted wherever they are computed, by convolutions, linear and recurrent layers, attention or the
        model's own code. What is not a product counts nothing: norms, activations, pooling, looking tokens up.
        """
        name = type(model).__name__
        with undisturbed(model, name) as copy, torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):  # not fused
            samples = zero_samples(copy, input_shape) if sample is None else sample
            for parameter in copy.parameters():
                parameter.requires_grad_(parameter.is_floating_point())  # without gradients attention is fused too
            products = _Products(copy)
            with products:
                forward(copy, samples, name)
        counted = {weight: count / len(samples) for weight, count in products.counted.items()}
        others = counted.pop("", 0.0)
        return cls(counted, others)

    @property
    def forward(self) -> float:
        """All operations of the forward pass."""
        return sum(self.weights.values()) + self.others

    def training(self, samples: Tensor, begin: Tensors, end: Tensors) -> Cost:
        """Tell what it cost K clients to train on so many samples ``[K]``, from one model to another ``[K, ...]``.

        A weight that is zero in both was zero all the time, as masked weights are.
        """
        steps = PASSES * samples.to(torch.float64)
        zeros = [zero_in_both(begin[name], end[name]) for name in self.weights]
        each = tuple(count / end[name][0].numel() for name, count in self.weights.items())
        saved = torch.zeros_like(steps)
        if zeros:
            saved = (torch.stack(zeros, 1) * constant(each, torch.float64, steps.device)).sum(1)
        return Cost(steps * self.forward, steps * (self.forward - saved))


def zero_in_both(begin: Tensor, end: Tensor) -> Tensor:
    """Count for each of K clients the entries that are zero in two stacks ``[K, ...]``: ``[K]``, in float64.

    >>> zero_in_both(torch.tensor([[0.0, 0.0, 1.0]]), torch.tensor([[0.0, 2.0, 0.0]]))
    tensor([1.], dtype=torch.float64)
    """
    begin = narrow(begin)  # what all clients begin with is looked at once
    if end.is_cuda:  # where a sum of truth values would first be a copy of them in eight times the memory
        used = torch.where(begin == 0, end, 1).flatten(1)
        rest: Tensor = torch.linalg.vector_norm(used, 0, dim=1, dtype=torch.float64)
        return used.shape[1] - rest
    return ((begin == 0) & (end == 0)).flatten(1).sum(1).to(torch.float64)


class _Products(OperationMode):
    """Counts the operations of products as they are computed, by the parameter that takes part, or under no name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.counted: defaultdict[str, float] = defaultdict(float)
        self._places = [(*_place(parameter), name) for name, parameter in model.named_parameters()]

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute what was to be computed, and note what it took."""
        result = func(*args, **kwargs)
        for factors, count in _OPERATIONS.get(func.overloadpacket, _nothing)(args, result):
            names = (name for factor in factors for name in self._names_of(factor))
            self.counted[next(names, "")] += count
        return result

    def _names_of(self, factor: Tensor) -> Iterator[str]:
        """Name the parameter of which a factor is a view, if it is one; several may lie in one piece of memory."""
        begin, _ = _place(factor)
        return (name for first, last, name in self._places if first <= begin < last)


def _place(tensor: Tensor) -> tuple[int, int]:
    """Tell where a tensor lies in memory: the address of its first entry, and where it ends."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + reach * tensor.element_size()


Counted = Iterable[tuple[tuple[Tensor, Tensor], int]]
"""The two factors of each product in an operation of PyTorch, and how many floating-point operations it takes."""


def _nothing(args: tuple[Any, ...], result: Any) -> Counted:
    return ()


def _matrices(args: tuple[Any, ...], result: Tensor) -> Counted:
    """Count a product of matrices or vectors, the last two arguments: of ``[.., m, k]`` and ``[.., k, n]``, 2 m k n."""
    left, right = args[-2:]
    yield (left, right), 2 * left.shape[-1] * result.numel()


def _convolution(args: tuple[Any, ...], result: Tensor) -> Counted:
    """Count a convolution: each entry of the kernel, at every position of the output (transposed: of the input)."""
    inputs, kernel, transposed = args[0], args[1], args[6]
    over = inputs if transposed else result
    yield (inputs, kernel), 2 * kernel.numel() * over.shape[0] * prod(over.shape[2:])


def _bilinear(args: tuple[Any, ...], result: Tensor) -> Counted:
    """Count a bilinear form: each entry of the weight, for every row of the output."""
    inputs, weight = args[:2]
    yield (inputs, weight), 2 * weight.numel() * prod(result.shape[:-1])


def _recurrent(args: tuple[Any, ...], result: Any) -> Counted:
    """Count a recurrent layer ``[T, B, ...]``: each entry of the weights for inputs and state, in every step."""
    inputs = args[0]
    for weight in args[1:3]:
        yield (inputs, weight), 2 * weight.numel() * prod(inputs.shape[:2])


_ATEN = torch.ops.aten
_OPERATIONS: Mapping[Any, Callable[[tuple[Any, ...], Any], Counted]] = {
    **dict.fromkeys((_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm, _ATEN.mv, _ATEN.addmv), _matrices),
    _ATEN.convolution: _convolution,
    _ATEN._trilinear: _bilinear,
    _ATEN.mkldnn_rnn_layer: _recurrent,
}
