"""What of a step stands against a record of it, and in which other rounds a record would be right.

While a step is recorded, hooks see stand-ins for the round and the clients' numbers, which note what is made of them
(:class:`Conditions`). While one runs for the first time, functions that look at values on the host are noted, with the
hook that calls them (:class:`HostWatch`).
"""

from __future__ import annotations

import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType, FunctionType
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from fedstrata.data.transforms import Transform
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.views import Clients, Probe
from fedstrata.stack import constant

# What a record depends on ---------------------------------------------------------------------------------------------


@dataclass
class Conditions:
    """What a recorded step made of the round and of its clients' numbers: in what other rounds it would do the same."""

    comparisons: list[tuple[Callable[[Any, Any], Any], Any, bool]] = field(default_factory=list)
    ids: Sequence[int] | None = None
    refused: str | None = None
    """Why the step can be repeated in no other round, in words, if so."""

    def hold_for(self, clients: Clients, members: Sequence[int] | np.ndarray | None) -> bool:
        """Tell whether a step of these members of some clients, in their round, would do what was recorded."""
        if self.ids is not None and self.ids != clients.ids_of(members):
            return False
        return all(bool(compare(clients.round, other)) == outcome for compare, other, outcome in self.comparisons)

    def refuse(self, reason: str) -> None:
        """Note that the step cannot be repeated; a CUDA graph ends here, elsewhere the step runs to its end."""
        self.refused = self.refused or f"{whose_code()} {reason}"
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(self.refused)


class WatchedNumber:
    """Stands for a number, and notes what is made of it: outcomes of comparisons, or else that it is just this one."""

    def __init__(self, value: int, conditions: Conditions) -> None:
        self._value, self._conditions = value, conditions

    def _exactly(self) -> int:
        self._conditions.comparisons.append((operator.eq, self._value, True))
        return self._value

    def _compared(self, compare: Callable[[Any, Any], Any], other: Any) -> bool:
        other = other._exactly() if isinstance(other, WatchedNumber) else other
        outcome = bool(compare(self._value, other))
        self._conditions.comparisons.append((compare, other, outcome))
        return outcome

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let it be used in operations on tensors, as the number that it is."""
        plain = [_plain(argument) for argument in args]
        return func(*plain, **{name: _plain(value) for name, value in (kwargs or {}).items()})

    def __repr__(self) -> str:
        return repr(self._exactly())

    def __format__(self, spec: str) -> str:
        return format(self._exactly(), spec)

    def __hash__(self) -> int:
        return hash(self._exactly())


def _plain(value: Any) -> Any:
    return value._exactly() if isinstance(value, WatchedNumber) else value


def _comparing(compare: Callable[[Any, Any], Any]) -> Callable[[WatchedNumber, Any], bool]:
    return lambda self, other: self._compared(compare, other)


def _computing(compute: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: compute(self._exactly(), *map(_plain, others))


def _computing_reversed(compute: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: compute(other, self._exactly())


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(WatchedNumber, f"__{_name}__", _comparing(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "floordiv", "mod", "pow", "truediv", "and_", "or_", "xor", "lshift", "rshift"):
    setattr(WatchedNumber, f"__{_name.rstrip('_')}__", _computing(getattr(operator, _name)))
    setattr(WatchedNumber, f"__r{_name.rstrip('_')}__", _computing_reversed(getattr(operator, _name)))
for _function in (
    operator.index,
    int,
    float,
    bool,
    str,
    operator.neg,
    operator.pos,
    abs,
    operator.invert,
    round,
    divmod,
):
    setattr(WatchedNumber, f"__{_function.__name__}__", _computing(_function))


class WatchedIds(Sequence[int]):
    """Stands for the numbers of some clients; to count them is free, to look at them is noted."""

    def __init__(self, ids: Sequence[int], conditions: Conditions) -> None:
        self._ids, self.conditions = ids, conditions

    def narrowed(self, members: Sequence[int] | np.ndarray | None) -> WatchedIds:
        """Stand for those in some rows."""
        chosen = self._ids if members is None else tuple(self._ids[row] for row in members)
        return WatchedIds(chosen, self.conditions)

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, place: Any) -> Any:
        self.conditions.ids = self._ids
        return self._ids[place]

    def __eq__(self, other: object) -> bool:
        return tuple(self) == other

    def __hash__(self) -> int:
        return hash(tuple(self))


class WatchedClients(Clients):
    """What hooks see of clients while their step is recorded."""

    @classmethod
    def of(cls, clients: Clients, conditions: Conditions) -> Clients:
        """Watch what is looked at of some clients."""
        watched = object.__new__(cls)
        round, ids = WatchedNumber(clients.round, conditions), WatchedIds(clients.ids, conditions)
        watched.__dict__.update(clients.__dict__, round=round, ids=ids)
        return watched

    def ids_of(self, members: Sequence[int] | np.ndarray | None) -> Any:
        """Go on watching those of the clients that stand in some rows."""
        return cast(WatchedIds, self.ids).narrowed(members)

    @property
    def probe(self) -> Probe:
        """Note that a client's data is asked, which is more than a step."""
        cast(WatchedIds, self.ids).conditions.refuse("asks the client's own data")
        return super().probe

    def noise(self, purpose: str, shape: Sequence[int], stream: int = 0) -> Tensor:
        """Note that noise is drawn which must be another one at every step."""
        if self.secret:
            cast(WatchedIds, self.ids).conditions.refuse("draws noise that nobody can draw again")
        return super().noise(purpose, shape, stream)


# What cannot be recorded ----------------------------------------------------------------------------------------------


class HostWatch(TorchFunctionMode):
    """Notes, while a step runs, what of it looks at values on the host or brings values from there."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None

    def note(self, what: str) -> None:
        """Note the first of what is found, and in whose code; what is brought once and kept does not count."""
        if self.found is None and not any(frame.f_code in _BRINGING_ONCE for frame in _frames()):
            self.found = f"{whose_code()} {what}"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one call of a torch function."""
        if func in _LOOKS_AT_VALUES or _chooses_by_values(func, args):
            self.note(f"uses {getattr(func, '__name__', func)}, which looks at values or brings them from the host")
        return func(*args, **(kwargs or {}))


_LOOKS_AT_VALUES: frozenset[Any] = frozenset(
    (
        Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.__bool__, Tensor.__float__, Tensor.__int__, Tensor.__index__,
        Tensor.__array__, Tensor.__contains__, Tensor.nonzero, torch.nonzero, Tensor.masked_select, torch.masked_select,
        torch.unique, Tensor.unique, torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy, torch.frombuffer,
        torch.equal, Tensor.equal, torch.allclose, Tensor.allclose, torch.bincount, Tensor.bincount,
    )
)  # fmt: skip


def _chooses_by_values(func: Any, args: tuple[Any, ...]) -> bool:
    """Tell whether an index is a mask: how much it takes depends on values."""
    if func not in (Tensor.__getitem__, Tensor.__setitem__):
        return False
    index = args[1] if isinstance(args[1], tuple) else (args[1],)
    return any(isinstance(one, Tensor) and one.dtype in (torch.bool, torch.uint8) for one in index)


def whose_code() -> str:
    """Find out who is running: the hook of a part, a transform, or something of the model or the loss."""
    for frame in _frames():
        owner = frame.f_locals.get("self")
        if isinstance(owner, Part) and hasattr(Part, frame.f_code.co_name):
            return f"the hook '{frame.f_code.co_name}' of '{owner.name}'"
        if isinstance(owner, Transform):
            return f"the transform '{owner.name}'"
    return "the model or the loss"


def _frames() -> Iterator[FrameType]:
    """Go up from the function that runs to those that called it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


_BRINGING_ONCE: set[CodeType] = {constant.__wrapped__.__code__}


def bringing_once(function: FunctionType) -> None:
    """Let a function of the engine look at values or bring them from the host, which it will not do when a step is
    recorded. It must not be decorated: all functions that a decorator wraps have one code.
    """
    _BRINGING_ONCE.add(function.__code__)


@contextmanager
def noticing_waits(watch: HostWatch) -> Iterator[None]:
    """Note on a GPU also what makes the host wait without being a function of PyTorch."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")

        def show(message: Warning | str, *where: Any, **more: Any) -> None:
            if "called a synchronizing" in str(message):
                watch.note("makes the host wait for the GPU")

        warnings.showwarning = show
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(mode)
