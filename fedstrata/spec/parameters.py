"""Parameters: how they are declared, and how their values are checked."""

from __future__ import annotations

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.spec.text import format_value

_LOCAL_NAMES = ("path", "folder", "directory", "file", "url", "run", "download")


def parameter(
    default: Any,
    doc: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[Any, ...] | None = None,
    finite: bool = True,
    local: bool | None = None,
) -> Any:
    """Declare a field of a :class:`Spec`: its default, what it means, and which values it admits.

    ``low`` and ``high`` are inclusive bounds, ``above`` and ``below`` exclusive ones. ``finite=False`` admits infinity,
    written ``inf``. ``local`` says that the value means something on one machine only, a file or a folder, or lets that
    machine fetch something: at a real site only the site itself may set it. Where nothing is said, names tell:
    a parameter called ``path``, ``folder``, ``directory``, ``file``, ``url``, ``run`` or ``download`` is local.
    """
    limits = {"low": low, "high": high, "above": above, "below": below, "choices": choices, "finite": finite}
    return dataclasses.field(default=default, metadata={"doc": doc, "local": local, **limits})


@dataclass(frozen=True)
class Spec:
    """A frozen dataclass whose fields are checked on construction, from text or from Python alike."""

    name: ClassVar[str] = ""
    stands_for: ClassVar[str] = ""
    """What it is, such as a method; a parameter may well be called kind."""

    def __post_init__(self) -> None:
        hints = type_hints(type(self))
        for field in dataclasses.fields(self):
            checked = _check(self, field, hints[field.name], getattr(self, field.name))
            object.__setattr__(self, field.name, checked)

    @classmethod
    def is_local(cls, field: dataclasses.Field[Any]) -> bool:
        """Tell whether a parameter names a place on a machine, or lets it fetch something; see :func:`parameter`."""
        local = field.metadata.get("local")
        return field.name in _LOCAL_NAMES if local is None else bool(local)

    def local_values(self) -> dict[str, Any]:
        """Tell the local parameters that are set, that is, to something else than nothing or their default."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if self.is_local(field)}
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value not in (None, False, defaults[name])}

    def __str__(self) -> str:
        """Write the spec as text: the name, and the parameters that differ from their defaults."""
        given = [
            f"{field.name}={format_value(value)}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{self.name}({', '.join(given)})" if given else self.name


def type_hints(cls: type) -> dict[str, Any]:
    """Tell which values each field admits."""
    try:
        return _resolved_hints(cls)
    except NameError:  # a class of the user's, made where its annotations cannot be resolved: its values go unchecked
        return {field.name: Any for field in dataclasses.fields(cls)}


@lru_cache(maxsize=512)
def _resolved_hints(cls: type) -> dict[str, Any]:
    """Resolve the annotations of a class once; an experiment alone has some thirty, and is made in many copies."""
    return typing.get_type_hints(cls)


def _check(owner: Spec, field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    named = "" if owner.name == owner.stands_for else f" '{owner.name or type(owner).__name__}'"
    where = f"the parameter '{field.name}' of the {owner.stands_for}{named}"
    allowed, value = _kinds(hint), _plain(value)
    if float in allowed and type(value) is int:
        value = _as_float(value)
    matches = any(
        value is None
        if kind in (None, type(None))
        else type(value) is kind
        if kind in (bool, int, float, str)
        else True
        for kind in allowed
    )
    if not matches:
        raise FedStrataError(f"'{value}' does not fit {where}: it takes {type_in_words(hint)}.")
    if value is None:
        return value
    choices = field.metadata.get("choices")
    if choices and value not in choices:
        raise unknown_name(f"value for {where} called", str(value), [str(choice) for choice in choices])
    if isinstance(value, float) and not math.isfinite(value):
        infinity_fits = not field.metadata.get("finite", True)
        if math.isnan(value) or not infinity_fits:
            raise FedStrataError(
                f"{value} does not fit {where}: it takes a {'number' if infinity_fits else 'finite number'}."
            )
    if isinstance(value, int | float) and not isinstance(value, bool):
        limits = {key: field.metadata.get(key) for key in ("low", "high", "above", "below")}
        outside = (
            (limits["low"] is not None and value < limits["low"])
            or (limits["high"] is not None and value > limits["high"])
            or (limits["above"] is not None and value <= limits["above"])
            or (limits["below"] is not None and value >= limits["below"])
        )
        if outside:
            raise FedStrataError(f"{value} is outside what {where} takes: {range_in_words(limits)}.")
    return value


def range_in_words(limits: Mapping[str, Any]) -> str:
    """Tell the limits of a number; nothing where there are none.

    >>> range_in_words({"above": 0, "high": 1})
    'more than 0 and at most 1'
    """
    words = {"low": "at least", "above": "more than", "high": "at most", "below": "less than"}
    stated = [f"{words[key]} {limits[key]:g}" for key in words if limits.get(key) is not None]
    return " and ".join(stated)


def type_in_words(hint: Any) -> str:
    """Tell which values an annotation admits.

    >>> type_in_words(int | None)
    'a whole number or none'
    """
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a word", type(None): "none"}
    return " or ".join(words.get(kind, str(getattr(kind, "__name__", kind))) for kind in _kinds(hint))


def _kinds(hint: Any) -> tuple[Any, ...]:
    """List the types that an annotation admits: those of a union, or the one that it is."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


def _plain(value: Any) -> Any:
    """Turn numbers of other kinds, such as NumPy's, into Python's."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return value
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def _as_float(value: int) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
