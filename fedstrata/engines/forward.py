"""The forward pass of many clients' models, behind one interface.

``forward(parameters, buffers, inputs, keys, training)`` takes stacks ``[K, ...]`` and inputs ``[K, B, ...]`` and
returns outputs ``[K, B, classes]`` and the buffers after the pass. Clients do not interact, so the gradient of the
summed loss is every client's own gradient. ``around`` lets a method compute single torch functions in its own way (see
:attr:`fedstrata.methods.Needs.operations`).

:class:`LoopForward` runs plain PyTorch for one client at a time; :class:`StackedForward` runs all clients as one batch
of models through ``torch.func.vmap``, with hand-made operations where the generic rule is slow. Both draw dropout from
per-client keys, so they agree.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from inspect import signature
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap
from torch.overrides import TorchFunctionMode

from fedstrata.engines.norms import fuses
from fedstrata.engines.operations import (
    CORRECTED_OPERATIONS,
    Operations,
    attention,
    loop_operations,
    stacked_operations,
)
from fedstrata.errors import FedStrataError
from fedstrata.fused import fusing
from fedstrata.layers import ROOT
from fedstrata.private_torch import calling, opened
from fedstrata.rng import uniform
from fedstrata.stack import Tensors, clone

Stacks = tuple[Tensors, Tensors, Tensor, Tensor]
"""Parameters, buffers, inputs and keys of K clients."""


class Forward(ABC):
    """Run K clients' models on K batches; ``head`` names the layer whose inputs are the features.

    ``around`` replaces torch functions inside the model, as a method's own operations do.
    """

    def __init__(self, model: nn.Module, head: str | None = None) -> None:
        self.model = model.train()
        self.head = head
        self._call = _Call(model)

    def __call__(
        self,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        keys: Tensor,
        *,
        training: bool,
        around: Operations | None = None,
    ) -> tuple[Tensor, Tensors]:
        """Return the outputs ``[K, B, classes]`` and the buffers after the pass."""
        _set_mode(self.model, training)
        (outputs,), after = self.run(self._call, (parameters, buffers, inputs, keys), around)
        return outputs, after

    def features(
        self,
        parameters: Tensors,
        buffers: Tensors,
        inputs: Tensor,
        keys: Tensor,
        *,
        training: bool,
        around: Operations | None = None,
    ) -> tuple[Tensor, Tensor, Tensors]:
        """Return the outputs, the inputs of the model's head ``[K, B, ...]``, and the buffers after the pass."""
        _set_mode(self.model, training)
        (outputs, features), after = self.run(self._call_with_features, (parameters, buffers, inputs, keys), around)
        return outputs, features, after

    def activations(
        self, layers: Sequence[str], parameters: Tensors, buffers: Tensors, inputs: Tensor, keys: Tensor
    ) -> Tensors:
        """Return what some layers give ``[K, B, ...]``, by their names, in evaluation mode."""
        _set_mode(self.model, False)
        caught, _ = self.run(_CallWithActivations(self.model, layers), (parameters, buffers, inputs, keys), None)
        return dict(zip(layers, caught, strict=True))

    def twice_differentiable(self) -> Forward:
        """Return what computes the same in operations that have second derivatives; quicker ones may have none."""
        return self

    @cached_property
    def _call_with_features(self) -> _CallWithFeatures:
        return _CallWithFeatures(self.model, self.head)

    @abstractmethod
    def run(self, call: _Call, stacks: Stacks, around: Operations | None) -> tuple[tuple[Tensor, ...], Tensors]:
        """Make a call for each client: return what the calls return, as stacks, and the buffers after them."""


class LoopForward(Forward):
    """One client after another, each through an ordinary call of the model.

    ``operations`` replaces those that are slow on the device of the inputs, by others with the same bits.
    """

    def __init__(self, model: nn.Module, head: str | None = None, operations: Operations | None = None) -> None:
        super().__init__(model, head)
        self.operations = operations

    def run(self, call: _Call, stacks: Stacks, around: Operations | None) -> tuple[tuple[Tensor, ...], Tensors]:
        """Make the calls one by one."""
        parameters, buffers, inputs, keys = stacks
        operations = loop_operations(inputs.device) if self.operations is None else self.operations
        outputs, after = [], []
        pieces = {name: _pieces(tensor) for name, tensor in parameters.items()}
        for client in range(len(inputs)):
            own_parameters = {name: pieces[name][client] for name in parameters}
            own_buffers = {name: tensor[client].clone() for name, tensor in buffers.items()}
            with KeyedRandomness(keys[client], operations, around):
                own_outputs, own_after = call(own_parameters, own_buffers, inputs[client])
            outputs.append(own_outputs)
            after.append(own_after)
        stacked = tuple(map(_stacked, zip(*outputs, strict=True)))
        return stacked, {name: _stacked([own[name] for own in after]) for name in buffers}

    def twice_differentiable(self) -> Forward:
        """Leave all operations to PyTorch."""
        return LoopForward(self.model, self.head, {})


def _pieces(stack: Tensor) -> Sequence[Tensor]:
    """Take the tensors of K clients apart; not by an index, whose gradient is a whole stack of zeros for each."""
    return (stack.squeeze(0),) if len(stack) == 1 else stack.unbind(0)


def _stacked(pieces: Sequence[Tensor]) -> Tensor:
    """Put the tensors of K clients together; that of one alone is not copied."""
    return pieces[0].unsqueeze(0) if len(pieces) == 1 else torch.stack(list(pieces))


class StackedForward(Forward):
    """All clients at once, as one batch of models; ``operations`` replaces those that suit the device of the inputs."""

    def __init__(self, model: nn.Module, operations: Operations | None = None, head: str | None = None) -> None:
        super().__init__(model, head)
        self.operations = operations

    def run(self, call: _Call, stacks: Stacks, around: Operations | None) -> tuple[tuple[Tensor, ...], Tensors]:
        """Make all calls as one."""
        parameters, buffers, inputs, keys = stacks
        operations = stacked_operations(inputs.device) if self.operations is None else self.operations

        def one_client(
            own_parameters: Tensors, own_buffers: Tensors, own_inputs: Tensor, own_key: Tensor
        ) -> tuple[tuple[Tensor, ...], Tensors]:
            with KeyedRandomness(own_key, operations, around), fusing(fuses(operations, around)):
                return call(own_parameters, own_buffers, own_inputs)

        outputs, after = vmap(one_client)(dict(parameters), dict(clone(buffers)), inputs, keys)
        return outputs, after

    def twice_differentiable(self) -> Forward:
        """Leave the operations to the generic rules, but for those that these get wrong."""
        return StackedForward(self.model, CORRECTED_OPERATIONS, self.head)


class _Call:
    """Calls the model with one client's tensors; its buffers may be changed in place or replaced by new ones."""

    def __init__(self, model: nn.Module) -> None:
        self.call = calling(model)

    def __call__(self, parameters: Tensors, buffers: Tensors, inputs: Tensor) -> tuple[tuple[Tensor, ...], Tensors]:
        state = {**parameters, **buffers}
        outputs = self.call(state, inputs)
        return (outputs,), {name: state[name].detach() for name in buffers}


class _CallWithFeatures(_Call):
    """Calls the model and catches what its head gets."""

    def __init__(self, model: nn.Module, head: str | None) -> None:
        super().__init__(model)
        if head is None:
            raise FedStrataError("The method needs the input of the model's head, but the model has no linear head.")
        self.head = model.get_submodule(head)

    def __call__(self, parameters: Tensors, buffers: Tensors, inputs: Tensor) -> tuple[tuple[Tensor, ...], Tensors]:
        caught: list[Tensor] = []
        handle = self.head.register_forward_pre_hook(lambda module, arguments: caught.append(arguments[0]))
        try:
            outputs, after = super().__call__(parameters, buffers, inputs)
        finally:
            handle.remove()
        return (*outputs, caught[-1]), after


class _CallWithActivations(_Call):
    """Calls the model and catches what some layers give, sample by sample; of several calls of a layer the last.

    Which results have the samples as an axis is seen from a call with a single one. Others, such as the embeddings of
    positions, are the same for all samples, and stand as zeros.
    """

    def __init__(self, model: nn.Module, layers: Sequence[str]) -> None:
        super().__init__(model)
        self.modules = {name: model if name == ROOT else model.get_submodule(name) for name in layers}

    def __call__(self, parameters: Tensors, buffers: Tensors, inputs: Tensor) -> tuple[tuple[Tensor, ...], Tensors]:
        alone, _ = self._caught(parameters, buffers, inputs[:1])
        given, after = self._caught(parameters, buffers, inputs)
        samples = len(inputs)
        by_sample = tuple(
            given[name].reshape(samples, -1)
            if len(given[name]) == samples * len(alone[name])
            else given[name].new_zeros(samples, 1)
            for name in self.modules
        )
        return by_sample, after

    def _caught(self, parameters: Tensors, buffers: Tensors, inputs: Tensor) -> tuple[Tensors, Tensors]:
        """Call the model once, and return what the layers gave, the samples first, and the buffers after the pass."""
        caught: Tensors = {}

        def catch(name: str, module: nn.Module, arguments: Any, given: Any) -> None:
            while isinstance(given, tuple | list) and given:  # of several results, such as outputs and a state
                given = given[0]
            if isinstance(given, Tensor) and given.dim():
                caught[name] = given if getattr(module, "batch_first", True) else given.transpose(0, 1)

        handles = [module.register_forward_hook(partial(catch, name)) for name, module in self.modules.items()]
        try:
            _, after = super().__call__(parameters, buffers, inputs)
        finally:
            for handle in handles:
                handle.remove()
        for name in self.modules:
            if name not in caught:
                raise FedStrataError(
                    f"What the layer '{name}' gives cannot be seen, because its weights are used without a call of it "
                    "or it gives no tensor; call it in the model's forward, or leave 'cka' out."
                )
        return caught, after


def differentiable_attention(run: Callable[..., Tensor], *args: Any, **keywords: Any) -> Tensor:
    """Compute attention by matrix products, because the fused kernels have no second derivatives; for ``around``."""
    if _dropout_of_attention(*args, **keywords) > 0:
        return run(*args, **keywords)
    mixed: Tensor = attention(*args, **keywords)
    return mixed


class KeyedRandomness(TorchFunctionMode):
    """While it is active, dropout draws from one client's key instead of a global stream; other operations may be
    replaced too.

    The n-th random operation of a pass draws from stream n, so a layer draws the same numbers whichever engine runs it.
    """

    def __init__(self, key: Tensor, replacements: Operations | None = None, around: Operations | None = None) -> None:
        super().__init__()
        self.key = key
        self.replacements = replacements or {}
        self.around = around or {}
        self.draws = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Answer one call of a torch function."""
        keywords = kwargs or {}
        if func in self.around:
            return self.around[func](partial(self._answer, func), *args, **keywords)
        if func in _LOOKED_AT or func in self.replacements:
            return self._answer(func, *args, **keywords)
        return func(*args, **keywords)

    def _answer(self, func: Callable[..., Any], *args: Any, **keywords: Any) -> Any:
        if _draws_from_global_stream(func, args, keywords):
            raise FedStrataError(
                f"The model draws random numbers with '{func.__name__}', which cannot be repeated after a restart; "
                "use nn.Dropout, or pass the numbers in as inputs."
            )
        if func is F.batch_norm:
            _refuse_single_values(*args, **keywords)
        if func is F.scaled_dot_product_attention and _dropout_of_attention(*args, **keywords) > 0:
            return attention(*args, **{**keywords, "drop": self.dropout})
        if func in self.replacements:
            return self.replacements[func](*args, **keywords)
        if func is F.dropout:
            return self.dropout(*args, **keywords)
        if func in _CHANNEL_DROPOUTS:
            return self.channel_dropout(_CHANNEL_DROPOUTS[func], *args, **keywords)
        if func is F.multi_head_attention_forward:
            if _MULTI_HEAD_ATTENTION is not None:
                with self:
                    return _MULTI_HEAD_ATTENTION(*args, **keywords)
            _refuse_dropout_in_attention(*args, **keywords)
        return func(*args, **keywords)

    def dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Zero single entries."""
        return self._drop(input, input.dim(), p, training, inplace)

    def channel_dropout(
        self, alone: int | None, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        """Zero whole channels; an input of ``alone`` dimensions is a single sample without a batch axis."""
        return self._drop(input, 1 if input.dim() == alone else 2, p, training, inplace)

    def _drop(self, input: Tensor, drawn: int, p: float, training: bool, inplace: bool) -> Tensor:
        """Draw one number for each index of the first ``drawn`` axes: below ``p`` is zero, the others are scaled up."""
        if not training or p == 0:
            return input
        self.draws += 1
        shape = (*input.shape[:drawn], *[1] * (input.dim() - drawn))
        kept = (uniform(self.key, shape, stream=self.draws) >= p).to(input.dtype) / max(1 - p, 1e-12)
        return input.mul_(kept) if inplace else input * kept


def _dropout_of_attention(*args: Any, **keywords: Any) -> float:
    return float(keywords.get("dropout_p", args[4] if len(args) > 4 else 0.0))


def _refuse_single_values(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> None:
    """Refuse to normalise by the variance of a single number."""
    if training and input.numel() == input.shape[1]:
        raise FedStrataError(
            f"A batch norm layer got a batch of shape {list(input.shape)}, a single value per channel, which has no "
            "variance; use a larger batch_size, or last_batch=drop, and give every client at least two samples."
        )


def _refuse_dropout_in_attention(*args: Any, **keywords: Any) -> None:
    given = signature(F.multi_head_attention_forward).bind(*args, **keywords).arguments
    if given["dropout_p"] > 0 and given.get("training", True):
        raise FedStrataError(
            "The dropout of nn.MultiheadAttention cannot be drawn from each client's key with PyTorch "
            f"{torch.__version__}; use dropout=0 there, F.scaled_dot_product_attention, or an older PyTorch."
        )


_MULTI_HEAD_ATTENTION = opened(F.multi_head_attention_forward)

# With the number of dimensions of a sample without a batch axis; two-dimensional dropout always takes the first for it.
_CHANNEL_DROPOUTS: dict[Callable[..., Any], int | None] = {F.dropout1d: 2, F.dropout2d: None, F.dropout3d: 4}

_GLOBAL_DRAWS: frozenset[Callable[..., Any]] = frozenset(
    (
        torch.rand, torch.randn, torch.randint, torch.randperm, torch.rand_like, torch.randn_like, torch.randint_like,
        torch.bernoulli, torch.multinomial, torch.normal, torch.poisson, torch.binomial,
        torch.Tensor.bernoulli, torch.Tensor.bernoulli_, torch.Tensor.multinomial, torch.Tensor.normal_,
        torch.Tensor.uniform_, torch.Tensor.random_, torch.Tensor.exponential_, torch.Tensor.geometric_,
        torch.Tensor.cauchy_, torch.Tensor.log_normal_, F.gumbel_softmax, F.fractional_max_pool2d,
        F.fractional_max_pool2d_with_indices, F.fractional_max_pool3d, F.fractional_max_pool3d_with_indices,
    )
)  # fmt: skip

# With the position of the argument that says whether it trains: where it does not, nothing is drawn.
_DRAWS_IN_TRAINING: dict[Callable[..., Any], int] = {
    F.alpha_dropout: 2, F.feature_alpha_dropout: 2, F.rrelu: 3, torch.dropout: 2, torch.dropout_: 2,
    torch.feature_dropout: 2, torch.feature_dropout_: 2, torch.alpha_dropout: 2, torch.alpha_dropout_: 2,
    torch.feature_alpha_dropout: 2, torch.feature_alpha_dropout_: 2, torch.rrelu: 3, torch.rrelu_: 3,
}  # fmt: skip

_RECURRENT: frozenset[Callable[..., Any]] = frozenset((torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu))

_LOOKED_AT: frozenset[Callable[..., Any]] = frozenset(
    (
        *_GLOBAL_DRAWS, *_DRAWS_IN_TRAINING, *_RECURRENT, *_CHANNEL_DROPOUTS, F.dropout, F.batch_norm,
        F.scaled_dot_product_attention, F.multi_head_attention_forward,
    )
)  # fmt: skip
"""Functions that may draw, or that are refused in some cases; all others are as they are."""


def _draws_from_global_stream(func: Callable[..., Any], args: tuple[Any, ...], keywords: dict[str, Any]) -> bool:
    if func in _DRAWS_IN_TRAINING:
        place = _DRAWS_IN_TRAINING[func]
        named = keywords.get("training", keywords.get("train", False))
        return bool(args[place] if len(args) > place else named)
    if func in _RECURRENT:
        # After the list of weights: whether there are biases, the number of layers, the dropout between them, training.
        weights = next(place for place, argument in enumerate(args) if isinstance(argument, list))
        dropout, training = args[weights + 3 : weights + 5]
        return bool(dropout and training)
    return func in _GLOBAL_DRAWS


def _set_mode(model: nn.Module, training: bool) -> None:
    if model.training != training:
        model.train(training)
