"""All that is used of PyTorch beyond what it documents, each with a documented way to the same result.

PyTorch may change such names without notice. Which way is taken is decided once, when this module is imported: where a
private name is gone, or does something else, the documented way takes its place. So a new PyTorch can make runs
slower, but not wrong, and this is the one module to look at when it does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._python_dispatch import TorchDispatchMode

Rule = Callable[..., Tensor]
"""Computes for all clients at once: takes stacks ``[K, ...]``, then options, and returns a stack."""


# Stepping out of vmap ------------------------------------------------------------------------------------------------


class _SteppingOut(torch.autograd.Function):
    """An operation whose rule for ``vmap`` is given with the call; autograd sees the operations of the rule itself."""

    @staticmethod
    def forward(rule: Rule, options: tuple[Any, ...], *tensors: Tensor | None) -> Tensor:
        """Compute for one client, where nothing differs between clients and nothing is learned."""
        return rule(*(None if tensor is None else tensor[None] for tensor in tensors), *options)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep nothing: there is no way back through :meth:`forward`."""

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple[Any, ...], rule: Rule, options: tuple[Any, ...], *tensors: Tensor | None
    ) -> tuple[Tensor, int]:
        """Compute for all clients."""
        stacks = (
            None if tensor is None else _clients_first(tensor, dim, info.batch_size)
            for tensor, dim in zip(tensors, in_dims[2:], strict=True)
        )
        return rule(*stacks, *options), 0


def step_out_documented(rule: Rule, tensors: Sequence[Tensor | None], *options: Any) -> Tensor:
    """Do what :data:`for_all_clients` says by an ``autograd.Function``.

    PyTorch looks through its arguments so thoroughly that a small model spends a third of its step there.
    """
    result: Tensor = _SteppingOut.apply(rule, options, *tensors)
    return result


def step_out_privately(rule: Rule, tensors: Sequence[Tensor | None], *options: Any) -> Tensor:
    """Do what :data:`for_all_clients` says by the calls that ``vmap`` itself is made of."""
    interpreter = retrieve_current_functorch_interpreter()
    assert isinstance(interpreter, VmapInterpreter)
    level, clients = interpreter.level(), interpreter.batch_size()
    with interpreter.lower():
        stacks = (
            None if tensor is None else _clients_first(*_unwrap_batched(tensor, level), clients) for tensor in tensors
        )
        result = rule(*stacks, *options)
    return _add_batch_dim(result, 0, level)


def _clients_first(tensor: Tensor, dim: int | None, clients: int) -> Tensor:
    if dim is None:
        return tensor.expand(clients, *tensor.shape)
    return tensor if dim == 0 else tensor.movedim(dim, 0)


def differs_documented(tensor: Tensor) -> bool:
    """Do what :data:`differs_between_clients` says: a tensor that ``vmap`` made has no memory of its own."""
    return not has_memory(tensor)


def has_memory(tensor: Tensor) -> bool:
    """Tell whether a tensor holds numbers, and does not stand for others inside of a transform such as ``grad``."""
    try:
        tensor.data_ptr()
    except RuntimeError:
        return False
    return True


def _steps_out_right(way: Callable[..., Tensor]) -> bool:
    """Try a way on two clients, with what differs between them, what does not, and what is not there."""

    def rule(own: Tensor, shared: Tensor, absent: None, power: int) -> Tensor:
        return own.flip(0) * shared**power

    own, shared = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device="cpu"), torch.tensor([2.0, 3.0], device="cpu")
    result = vmap(lambda column: way(rule, (column, shared, None), 2), in_dims=1)(own)
    return result.tolist() == [[8.0, 36.0], [4.0, 27.0]]


def _tells_right(way: Callable[[Tensor], bool]) -> bool:
    told: list[bool] = []

    def note(own: Tensor) -> Tensor:
        told.extend((way(own), way(alone)))
        return own

    alone = torch.zeros(2, device="cpu")
    vmap(note)(alone)
    return told == [True, False]


for_all_clients: Callable[..., Tensor] = step_out_documented
"""Step out of ``vmap``, apply a rule to the tensors of all clients, ``[K, ...]``, and step back in with its result.

It takes the rule, the tensors (some may be None) and the rule's options. What is the same for everybody is expanded,
without a copy.
"""

differs_between_clients: Callable[[Tensor], bool] = differs_documented
"""Tell whether ``vmap`` is running and a tensor stands for one of each client."""

try:
    from torch._C._functorch import _add_batch_dim, _unwrap_batched, is_batchedtensor
    from torch._functorch.pyfunctorch import VmapInterpreter, retrieve_current_functorch_interpreter

    if _steps_out_right(step_out_privately):
        for_all_clients = step_out_privately
    if _tells_right(is_batchedtensor):
        differs_between_clients = is_batchedtensor
except Exception:  # whatever is wrong with the private way, the documented one is there
    pass


# The same operation on many tensors ----------------------------------------------------------------------------------


def one_by_one(name: str) -> Callable[..., Sequence[Tensor]]:
    """Apply a method of tensors, such as ``add_``, to each of a list; an argument may be a list as well."""
    method = getattr(Tensor, name)

    def apply(tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> list[Tensor]:
        return [
            method(
                tensor,
                *(argument[place] if isinstance(argument, list | tuple) else argument for argument in arguments),
                **options,
            )
            for place, tensor in enumerate(tensors)
        ]

    return apply


def at_once(name: str) -> Callable[..., Sequence[Tensor]]:
    """Find the operation that does the same in one call."""
    return getattr(torch, f"_foreach_{name}", None) or one_by_one(name)


class ForEach:
    """Methods of tensors for lists of tensors: ``for_each.add_(these, those)`` adds to each of these one of those."""

    def __init__(self, find: Callable[[str], Callable[..., Sequence[Tensor]]]) -> None:
        self.add, self.add_, self.sub, self.sub_ = find("add"), find("add_"), find("sub"), find("sub_")
        self.mul, self.mul_, self.div_ = find("mul"), find("mul_"), find("div_")
        self.lerp_, self.addcmul_, self.sqrt = find("lerp_"), find("addcmul_"), find("sqrt")
        self.copy_, self.zero_, self.norm = find("copy_"), find("zero_"), find("norm")


for_each = ForEach(at_once)


# Calling a model with other tensors ----------------------------------------------------------------------------------

State = dict[str, Tensor]
"""Tensors that take the place of a model's own, by their names in it."""


def calling_documented(model: nn.Module) -> Callable[[State, Tensor], Any]:
    """Do what :data:`calling` says by PyTorch's own function.

    That looks through the whole model at every call, which for a small one takes longer than the model itself.
    """
    return lambda state, inputs: functional_call(model, state, (inputs,))


class CallingPrivately:
    """Do what :data:`calling` says by the dicts in which modules keep their tensors, looked up once."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        tied: dict[Tensor, list[tuple[dict[str, Any], str]]] = {}
        for prefix, module in model.named_modules():
            for kept in (module._parameters, module._buffers):
                for leaf, tensor in kept.items():
                    if tensor is not None:
                        name = f"{prefix}.{leaf}" if prefix else leaf
                        self._places[name] = tied.setdefault(tensor, [])
                        self._places[name].append((kept, leaf))

    def __call__(self, state: State, inputs: Tensor) -> Any:
        """Call the model, whatever happens with its own tensors at their places again in the end."""
        places = [(name, kept, leaf, kept[leaf]) for name in state for kept, leaf in self._places[name]]
        try:
            for name, kept, leaf, _ in places:
                kept[leaf] = state[name]
            return self.model(inputs)
        finally:
            for name, kept, leaf, own in places:
                state[name], kept[leaf] = kept[leaf], own


def _calls_right(way: Callable[[nn.Module], Callable[[State, Tensor], Any]]) -> bool:
    """Try a way on a model with a tied parameter and a buffer that it replaces."""

    class Counting(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(1, 1, bias=False, device="cpu")
            self.second = nn.Linear(1, 1, bias=False, device="cpu")
            self.second.weight = self.first.weight
            self.register_buffer("count", torch.zeros(1, device="cpu"))

        def forward(self, inputs: Tensor) -> Tensor:
            self.count = self.count + 1
            result: Tensor = self.second(self.first(inputs))
            return result

    model = Counting()
    own = model.first.weight
    state = {name: torch.full(shape, 3.0, device="cpu") for name, shape in (("first.weight", (1, 1)), ("count", (1,)))}
    result = way(model)(state, torch.ones(1, 1, device="cpu"))
    kept = model.first.weight is own and model.second.weight is own and model.count.item() == 0
    return kept and result.item() == 9 and state["count"].item() == 4


calling: Callable[[nn.Module], Callable[[State, Tensor], Any]] = calling_documented
"""Make a model callable with tensors in the place of its own: ``calling(model)(state, inputs)``.

A tensor that is tied to others takes the place of all of them. Where the model replaces a tensor, its new one stands in
the state afterwards.
"""

try:
    if _calls_right(CallingPrivately):
        calling = CallingPrivately
except Exception:  # whatever is wrong with the private way, the documented one is there
    pass


# Compiled modules ----------------------------------------------------------------------------------------------------

_WITHIN = "_orig_mod"
"""Where a module from ``torch.compile`` keeps the one that it was given; there is no documented way to that."""


def within(model: nn.Module) -> nn.Module:
    """Return the module that ``torch.compile`` was given, or the module itself where it went through nothing."""
    while type(model).__name__ == "OptimizedModule" and hasattr(model, _WITHIN):
        model = getattr(model, _WITHIN)
    return model


def uncompiled(model: nn.Module) -> nn.Module:
    """Take a model, and all modules in it, out of what ``torch.compile`` put around them; the model is changed."""
    model = within(model)
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child is not None and within(child) is not child:
                setattr(module, name, uncompiled(child))
    return model


# Hooks ---------------------------------------------------------------------------------------------------------------


def is_watched(module: nn.Module) -> bool:
    """Tell whether a forward hook looks at what a module returns; where that cannot be told, assume that one does."""
    return bool(getattr(module, "_forward_hooks", True))


# Functions that a mode cannot look into ------------------------------------------------------------------------------


def opened(function: Any) -> Callable[..., Any] | None:
    """Copy a function of ``torch.nn.functional`` so that not it itself, but what it calls, goes to the active mode.

    Return None where it no longer asks for a mode in the way that is known here; there is no documented way.
    """
    question = "has_torch_function"
    if not isinstance(function, FunctionType) or question not in function.__code__.co_names:
        return None
    namespace = {**function.__globals__, question: lambda arguments: False}
    return FunctionType(function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__)


# Seeing every operation ----------------------------------------------------------------------------------------------


class OperationMode(TorchDispatchMode):
    """Sees every operation that PyTorch carries out, below autograd and ``vmap``; :meth:`operation` carries it out.

    PyTorch puts a wrapper around the method that it calls, which imports its compiler, for seconds, at the first
    operation; nothing is compiled here, so the method is set where the wrapper no longer comes.
    """

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry one operation out."""
        raise NotImplementedError


def _dispatch(
    self: OperationMode, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    return self.operation(func, args, kwargs or {})


OperationMode.__torch_dispatch__ = _dispatch  # type: ignore[assignment,method-assign]


def called(operation: Any) -> Callable[..., Any]:
    """Return what is called when an operation is: the same without a detour through Python, where it is known."""
    inner: Callable[..., Any] = getattr(operation, "_op", operation)
    return inner
