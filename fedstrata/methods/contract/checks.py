"""What hooks return is looked at the first time that they are called: a wrong shape would train something else.

Names and shapes must be those of what a hook was given; the sentence tells the part, the hook, and what it returned.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.views import Message

HOOKS = {name: value for name, value in vars(Part).items() if inspect.isfunction(value) and not name.startswith("_")}
"""The hooks, by their names."""


@cache
def refuse_misspelt(part: type[Part]) -> None:
    """Refuse a class with a method that is almost, but not quite, a hook, or a hook with other arguments."""
    for name, value in inspect.getmembers(part, inspect.isfunction):
        if name in HOOKS:
            expected, found = (list(inspect.signature(one).parameters) for one in (HOOKS[name], value))
            if len(expected) != len(found):
                raise FedStrataError(
                    f"The hook '{name}' of {part.__name__} takes ({', '.join(found)}); it is called with "
                    f"({', '.join(expected)})."
                )
            continue
        close = difflib.get_close_matches(name, HOOKS, cutoff=0.85)
        if close and not name.startswith("_"):
            raise FedStrataError(
                f"{part.__name__} defines '{name}', which is no hook, so that nobody would call it; did you mean "
                f"'{close[0]}'? If it is meant for itself, begin its name with an underscore."
            )


class Checks:
    """What the hooks of a method return, looked at once for each part and hook."""

    def __init__(self) -> None:
        self._seen: set[tuple[str, str]] = set()

    def _first(self, part: Part, hook: str) -> bool:
        key = part.name, hook
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def numbers(self, part: Part, hook: str, returned: Any, count: int) -> None:
        """Refuse anything but one number for each client."""
        if self._first(part, hook) and (not isinstance(returned, Tensor) or tuple(returned.shape) != (count,)):
            raise _wrong(part, hook, "one number for each client", f"[{count}]", _shown(returned))

    def tensors(self, part: Part, hook: str, returned: Any, like: Mapping[str, Tensor], whole: bool) -> None:
        """Refuse tensors under other names or of other shapes than those of a model; ``whole``: all must be there."""
        if self._first(part, hook):
            _compare(part, hook, returned, like, whole)

    def model_and_memory(self, part: Part, hook: str, returned: Any, like: Mapping[str, Tensor], whole: bool) -> None:
        """Refuse anything but a model as before, and a memory."""
        if not self._first(part, hook):
            return
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise _wrong(part, hook, "a pair", "a model and the part's memory", _shown(returned))
        _compare(part, hook, returned[0], like, whole)
        _compare(part, hook, returned[1], {}, what="the part's memory")

    def message(self, part: Part, hook: str, returned: Any, counts: tuple[int, ...]) -> None:
        """Refuse anything but a message whose tensors have a leading axis of clients."""
        if not self._first(part, hook):
            return
        if not isinstance(returned, Message):
            raise _wrong(part, hook, "a message", "Message(tensors, masks, numbers)", _shown(returned))
        for tensors in (returned.tensors, returned.masks, returned.numbers):
            for name, tensor in tensors.items():
                if tensor.dim() == 0 or tensor.shape[0] not in counts:
                    raise _wrong(part, hook, f"'{name}' with a leading axis", _either(counts), _shown(tensor))


def _compare(
    part: Part, hook: str, returned: Any, like: Mapping[str, Tensor], whole: bool = False, what: str = "a model"
) -> None:
    if not isinstance(returned, Mapping):
        raise _wrong(part, hook, what, "a dict of tensors", _shown(returned))
    for name, tensor in returned.items():
        if not isinstance(tensor, Tensor):
            raise _wrong(part, hook, f"'{name}'", "a tensor", _shown(tensor))
        if like and name not in like:
            raise _wrong(part, hook, "the model's own names", ", ".join(list(like)[:3]) + ", ...", f"'{name}' too")
        if like and tensor.shape != like[name].shape:
            raise _wrong(part, hook, f"'{name}'", str(list(like[name].shape)), _shown(tensor))
    missing = [name for name in like if name not in returned] if whole else []
    if missing:
        raise _wrong(part, hook, "the whole model", f"with '{missing[0]}'", "a part of it")


def _wrong(part: Part, hook: str, what: str, expected: str, found: str) -> FedStrataError:
    return FedStrataError(
        f"The hook '{hook}' of '{part.name}' must return {what} ({expected}), and it returned {found}. "
        "docs/write-a-method.md tells what each hook returns."
    )


def _either(counts: tuple[int, ...]) -> str:
    return " or ".join(map(str, sorted(set(counts))))


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    return "nothing" if value is None else f"a {type(value).__name__}"
