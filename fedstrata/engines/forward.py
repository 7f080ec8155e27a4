"""The forward pass of many clients' models, behind one interface.

``forward(parameters, buffers, inputs, keys, training)`` takes stacks ``[K, ...]`` and inputs ``[K, B, ...]`` and
returns outputs ``[K, B, classes]`` and the buffers after the pass. Clients do not interact, so the gradient of the
summed loss is every client's own gradient.

:class:`LoopForward` runs plain PyTorch for one client at a time; :class:`StackedForward` runs all clients as one batch
of models through ``torch.func.vmap``, with hand-made operations where the generic rule is slow. Both draw dropout from
per-client keys, so they agree."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.overrides import TorchFunctionMode

from fedstrata.engines.operations import stacked_operations
from fedstrata.errors import FedStrataError
from fedstrata.rng import uniform
from fedstrata.stack import Tensors


class Forward(Protocol):
    """Run K clients' models on K batches."""

    def __call__(
        self, parameters: Tensors, buffers: Tensors, inputs: Tensor, keys: Tensor, *, training: bool
    ) -> tuple[Tensor, Tensors]:
        """Return the outputs ``[K, B, classes]`` and the buffers after the pass."""
        ...


class LoopForward:
    """One client after another, each through an ordinary call of the model."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(
        self, parameters: Tensors, buffers: Tensors, inputs: Tensor, keys: Tensor, *, training: bool
    ) -> tuple[Tensor, Tensors]:
        """Return the outputs ``[K, B, classes]`` and the buffers after the pass."""
        _set_mode(self.model, training)
        outputs, after = [], []
        for client in range(len(inputs)):
            own_parameters = {name: tensor[client] for name, tensor in parameters.items()}
            own_buffers = {name: tensor[client].clone() for name, tensor in buffers.items()}
            with KeyedRandomness(keys[client]):
                outputs.append(functional_call(self.model, (own_parameters, own_buffers), (inputs[client],)))
            after.append(own_buffers)
        return torch.stack(outputs), {name: torch.stack([own[name] for own in after]) for name in buffers}


class StackedForward:
    """All clients at once, as one batch of models."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(
        self, parameters: Tensors, buffers: Tensors, inputs: Tensor, keys: Tensor, *, training: bool
    ) -> tuple[Tensor, Tensors]:
        """Return the outputs ``[K, B, classes]`` and the buffers after the pass."""
        _set_mode(self.model, training)
        after = {name: tensor.clone() for name, tensor in buffers.items()}

        def one_client(own_parameters: Tensors, own_buffers: Tensors, own_inputs: Tensor, own_key: Tensor) -> Tensor:
            with KeyedRandomness(own_key, stacked_operations(inputs.device)):
                return functional_call(self.model, (own_parameters, own_buffers), (own_inputs,))  # type: ignore[no-any-return]

        outputs: Tensor = vmap(one_client)(parameters, after, inputs, keys)
        return outputs, after


class KeyedRandomness(TorchFunctionMode):
    """While it is active, dropout draws from one client's key instead of a global stream; other operations may be
    replaced too.

    The n-th random operation of a pass draws from stream n, so a layer draws the same numbers whichever engine runs it.
    """

    def __init__(self, key: Tensor, replacements: dict[Callable[..., Any], Callable[..., Any]] | None = None) -> None:
        super().__init__()
        self.key = key
        self.replacements = replacements or {}
        self.draws = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer one call of a torch function."""
        keywords = kwargs or {}
        if func in self.replacements:
            return self.replacements[func](*args, **keywords)
        if func in _DROPOUTS:
            return _DROPOUTS[func](self, *args, **keywords)
        if func is F.scaled_dot_product_attention and _dropout_of_attention(*args, **keywords) > 0:
            return self._attention(*args, **keywords)
        if func in _GLOBAL_DRAWS:
            raise FedStrataError(
                f"The model draws random numbers with '{func.__name__}', which cannot be repeated after a restart; "
                "use nn.Dropout, or pass the numbers in as inputs."
            )
        return func(*args, **keywords)

    def _keep(self, shape: tuple[int, ...], probability: float) -> Tensor:
        self.draws += 1
        return uniform(self.key, shape, stream=self.draws) >= probability

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Zero single entries."""
        return self._drop(input, tuple(input.shape), p, training)

    def channel_dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Zero whole channels."""
        return self._drop(input, (*input.shape[:2], *[1] * (input.dim() - 2)), p, training)

    def _drop(self, input: Tensor, shape: tuple[int, ...], p: float, training: bool) -> Tensor:
        if not training or p == 0:
            return input
        return input * self._keep(shape, p).to(input.dtype) / max(1 - p, 1e-12)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        scores = query @ key.transpose(-2, -1) * (scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
        if is_causal:
            causal = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~causal, -math.inf)
        if attn_mask is not None:
            scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        return self.dropout(scores.softmax(-1), dropout_p) @ value


def _dropout_of_attention(*args: Any, **keywords: Any) -> float:
    return float(keywords.get("dropout_p", args[4] if len(args) > 4 else 0.0))


_DROPOUTS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    F.dropout: KeyedRandomness.dropout,
    F.dropout1d: KeyedRandomness.channel_dropout,
    F.dropout2d: KeyedRandomness.channel_dropout,
    F.dropout3d: KeyedRandomness.channel_dropout,
}

_GLOBAL_DRAWS: frozenset[Callable[..., Any]] = frozenset(
    (
        torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like,
        torch.bernoulli, torch.multinomial, torch.normal, torch.dropout, F.alpha_dropout, F.feature_alpha_dropout,
        F.gumbel_softmax, F.rrelu,
    )
)  # fmt: skip


def _set_mode(model: nn.Module, training: bool) -> None:
    if model.training != training:
        model.train(training)
