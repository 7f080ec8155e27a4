"""What PyTorch carried out, operation by operation, as a function that carries it out again.

Recorded is what is left when autograd and ``vmap`` have had their say: plain operations on plain tensors, forward and
backward. A tensor that no operation of the record made is one of the outside, and stays the one that it was: the places
that a step reads and writes, and constants. Everything else is made anew each time, and let go after its last use.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedstrata.private_torch import OperationMode, called

_ATEN = torch.ops.aten
_LOOKS = frozenset(
    (_ATEN._local_scalar_dense, _ATEN.nonzero, _ATEN.masked_select, _ATEN.equal, _ATEN.item, _ATEN._unique2)
)
_RESHAPES_IN_PLACE = frozenset(
    (_ATEN.set_, _ATEN.resize_, _ATEN.unsqueeze_, _ATEN.squeeze_, _ATEN.transpose_, _ATEN.t_, _ATEN.as_strided_)
)
_SAME = frozenset((_ATEN.detach, _ATEN.alias))
"""Operations that only give a tensor another name, where nothing is differentiated."""


_OUTSIDE = re.compile(r"\bc\d+\b")


class Recording:
    """The record of one run of a function without arguments: its ``operations``, one a line, with what is let go after
    each, and the values of the ``outside`` that they name. ``spoilt`` tells why it must not be replayed.
    """

    def __init__(self, run: Callable[[], None]) -> None:
        noted = _Noted()
        with noted:
            run()
        self.spoilt = noted.spoilt
        self.operations = noted.needed()
        named = {name for line, _ in self.operations for name in _OUTSIDE.findall(line)}
        self.outside = {name: value for name, value in noted.outside.items() if name in named}
        self._functions = noted.functions

    def replay(self) -> None:
        """Do it again."""
        with torch.no_grad():
            self._function()

    def is_like(self, other: Recording) -> bool:
        """Tell whether another run did the same, with the same numbers, on tensors that lie in the same places."""
        return (
            self.operations == other.operations
            and list(self._functions) == list(other._functions)
            and self.outside.keys() == other.outside.keys()
            and all(_alike(value, other.outside[name]) for name, value in self.outside.items())
        )

    @cached_property
    def _function(self) -> Callable[[], None]:
        """Make a function of what was written down."""
        body: list[str] = []
        for line, unused in self.operations:
            body.append(f"    {line}")
            if unused:
                body.append(f"    del {', '.join(unused)}")
        source = "\n".join(("def replay():", *body, "    return None"))
        namespace = {**self.outside, **{name: called(func) for func, name in self._functions.items()}}
        exec(compile(source, "<recorded step>", "exec"), namespace)
        made: Callable[[], None] = namespace["replay"]
        return made


def _alike(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other or one != one)
    if not isinstance(other, Tensor):
        return False
    return (one.data_ptr(), one.shape, one.stride(), one.dtype) == (
        other.data_ptr(), other.shape, other.stride(), other.dtype,
    )  # fmt: skip


class _Noted(OperationMode):  # type: ignore[no-untyped-call]
    """Writes every operation down as a line of Python while it runs."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.spoilt: str | None = None
        self._lines: list[_Line] = []
        self._names: dict[int, tuple[Callable[[], Tensor | None], str]] = {}
        self.outside: dict[str, Any] = {}
        self.functions: dict[Any, str] = {}
        self._count = 0

    def operation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Carry one operation out, and write it down."""
        result = func(*args, **kwargs)
        packet = func.overloadpacket
        if packet in _LOOKS or packet in _RESHAPES_IN_PLACE or _takes_by_mask(packet, args):
            self.spoilt = self.spoilt or f"it uses {packet.__name__}"
        if packet in _SAME:
            self._give(result, self._name(args[0]))
        elif _only_views(func) and all(self._is_outside(tensor) for tensor in _tensors(args)):
            self._keep(result)
        else:
            self._write(func, args, kwargs, result)
        return result

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        used: set[str] = set()
        written = [self._text(argument, used) for argument in args]
        written += [f"{name}={self._text(value, used)}" for name, value in kwargs.items()]
        function = self.functions.setdefault(func, f"f{len(self.functions)}")
        made: set[str] = set()
        target = self._target(result, made)
        call = f"{function}({', '.join(written)})"
        self._lines.append(_Line(f"{target} = {call}" if target else call, used, made, func._schema.is_mutable))

    def _target(self, result: Any, made: set[str]) -> str:
        """Name what an operation returns; one that changes what it was given has no new name for it."""
        if isinstance(result, Tensor):
            known = self._known(result)
            if known is not None:
                return ""
            name = self._new(result)
            made.add(name)
            return name
        if isinstance(result, tuple | list):
            names = [self._target(one, made) or "_" for one in result]
            return "" if all(name == "_" for name in names) else f"({', '.join(names)},)"
        return ""

    def _text(self, value: Any, used: set[str]) -> str:
        """Write an argument down."""
        if isinstance(value, Tensor):
            name = self._name(value)
            used.add(name)
            return name
        if isinstance(value, list | tuple):
            inside = "".join(f"{self._text(one, used)}, " for one in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        if value is None or isinstance(value, bool | int):
            return repr(value)
        return self._constant(value)

    def _name(self, tensor: Tensor) -> str:
        return self._known(tensor) or self._keep(tensor)

    def _known(self, tensor: Tensor) -> str | None:
        reference, name = self._names.get(id(tensor), (None, ""))
        return name if reference is not None and reference() is tensor else None

    def _new(self, tensor: Tensor) -> str:
        self._count += 1
        name = f"t{self._count}"
        self._give(tensor, name)
        return name

    def _give(self, tensor: Tensor, name: str) -> None:
        self._names[id(tensor)] = weakref.ref(tensor), name

    def _keep(self, tensor: Any) -> str:
        """Hold a tensor of the outside, or a view of one."""
        if isinstance(tensor, tuple | list):
            for one in tensor:
                self._keep(one)
            return ""
        name = self._constant(tensor)
        self._give(tensor, name)
        return name

    def _constant(self, value: Any) -> str:
        name = f"c{len(self.outside)}"
        self.outside[name] = value
        return name

    def _is_outside(self, tensor: Tensor) -> bool:
        name = self._known(tensor)
        return name is None or name.startswith("c")

    def needed(self) -> list[tuple[str, list[str]]]:
        """Go back from the last line, and keep those that change something or make what a later one uses.

        Each comes with the names that nobody uses any more once it is done.
        """
        wanted: set[str] = set()
        kept = []
        for line in reversed(self._lines):
            if not line.changes and not line.made & wanted:
                continue
            touched = {name for name in line.used | line.made if name.startswith("t")}
            kept.append((line.text, sorted(touched - wanted)))
            wanted |= touched
        return kept[::-1]


@dataclass(frozen=True)
class _Line:
    """One operation: the line, the names that it uses and makes, and whether it changes a tensor in place."""

    text: str
    used: set[str]
    made: set[str]
    changes: bool


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in _tensors(value)]
    return []


def _only_views(func: Any) -> bool:
    """Tell whether an operation returns nothing but views of what it was given."""
    returned = func._schema.returns
    return bool(returned) and all(one.alias_info is not None and not one.alias_info.is_write for one in returned)


def _takes_by_mask(packet: Any, args: tuple[Any, ...]) -> bool:
    if packet not in (_ATEN.index, _ATEN.index_put_, _ATEN.index_put, _ATEN._index_put_impl_):
        return False
    return any(one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1])
