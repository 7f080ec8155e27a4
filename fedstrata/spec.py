"""Components with parameters: how they are declared, written as text, checked and listed.

A method, a partition, a model, an optimiser: each is a frozen dataclass derived from :class:`Spec` whose fields are its
parameters, declared with :func:`parameter`, and which stands under a name in a :class:`Registry`. On the command
line and in TOML files it is written as a call::

    fedprox(mu=0.01)     dirichlet:0.1     cnn     fedbn+lips(tau0=0.5)

``name:value`` is short for ``name(value)``, the first parameter. A value that is more than a word stands in quotes; a
quote inside it is doubled. :meth:`Registry.make` reads such a text, ``str(spec)`` writes it back in its shortest form.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar, Generic, TypeVar

from fedstrata.errors import FedStrataError, unknown_name

Value = str | int | float | bool | None


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
) -> Any:
    """Declare a field of a :class:`Spec`: its default, what it means, and which values it admits.

    ``low`` and ``high`` are inclusive bounds, ``above`` and ``below`` exclusive ones. ``finite=False`` admits infinity,
    written ``inf``.
    """
    limits = {"low": low, "high": high, "above": above, "below": below, "choices": choices, "finite": finite}
    return dataclasses.field(default=default, metadata={"doc": doc, **limits})


@dataclass(frozen=True)
class Spec:
    """A frozen dataclass whose fields are checked on construction, from text or from Python alike."""

    name: ClassVar[str] = ""
    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        hints = _hints(type(self))
        for field in dataclasses.fields(self):
            checked = _check(self, field, hints[field.name], getattr(self, field.name))
            object.__setattr__(self, field.name, checked)

    def __str__(self) -> str:
        """Write the spec as text: the name, and the parameters that differ from their defaults."""
        given = [
            f"{field.name}={format_value(value)}"
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        ]
        return f"{self.name}({', '.join(given)})" if given else self.name


@dataclass(frozen=True)
class Call:
    """One parsed ``name(positional..., keyword=value...)``."""

    name: str
    positional: tuple[Value, ...] = ()
    keywords: tuple[tuple[str, Value], ...] = ()


T = TypeVar("T", bound=Spec)


class Registry(Generic[T]):
    """The named components of one kind.

    >>> from fedstrata.methods import methods
    >>> "fedavg" in methods.names()
    True
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Put the decorated class under ``name``."""

        def decorate(cls: type[T]) -> type[T]:
            if name in self._classes:
                raise FedStrataError(f"There is already a {self.kind} '{name}'; choose another name.")
            cls.name = name
            cls.kind = self.kind
            self._classes[name] = cls
            return cls

        return decorate

    def order(self, rank: Callable[[type[T]], int]) -> None:
        """Put what is registered so far into an order; equals stay as they are."""
        self._classes = dict(sorted(self._classes.items(), key=lambda item: rank(item[1])))

    def names(self, pattern: str = "*") -> list[str]:
        """List the names that match a shell-style pattern, in the order of registration unless it was changed."""
        return [name for name in self._classes if fnmatchcase(name, pattern)]

    def get(self, name: str) -> type[T]:
        """Look a class up by its name; an unknown name is answered with the nearest one."""
        if name not in self._classes:
            raise unknown_name(self.kind, name, self._classes)
        return self._classes[name]

    def make(self, given: str | T) -> T:
        """Build a component from its text, such as ``dirichlet(alpha=0.1)``; a ready component passes through."""
        if isinstance(given, Spec):
            if given.kind not in ("", self.kind):
                raise FedStrataError(f"'{given}' is no {self.kind}, it is a {given.kind}.")
            return given
        calls = parse(given, self.kind)
        if len(calls) != 1:
            raise FedStrataError(f"'{given}' names {len(calls)} {self.kind}s; give exactly one.")
        return self.build(calls[0])

    def build(self, call: Call) -> T:
        """Build a component from a parsed call."""
        cls = self.get(call.name)
        fields = [field.name for field in dataclasses.fields(cls)]
        if len(call.positional) > len(fields):
            raise FedStrataError(
                f"The {self.kind} '{call.name}' takes {_count(len(fields), 'parameter')}, not {len(call.positional)}."
            )
        values: dict[str, Value] = dict(zip(fields, call.positional, strict=False))
        for key, value in call.keywords:
            if key not in fields:
                raise unknown_name(f"parameter of the {self.kind} '{call.name}' called", key, fields)
            if key in values:
                raise FedStrataError(f"The parameter '{key}' of the {self.kind} '{call.name}' is given twice.")
            values[key] = value
        return cls(**values)

    def describe(self, name: str) -> dict[str, Any]:
        """Tell all that is known of a component, as plain data for tables and JSON."""
        cls = self.get(name)
        hints = _hints(cls)
        return {
            "name": name,
            "kind": self.kind,
            "summary": summary(cls),
            "description": inspect.getdoc(cls) or "",
            "parameters": [
                {
                    "name": field.name,
                    "type": _type_name(hints[field.name]),
                    "default": field.default,
                    "meaning": field.metadata.get("doc", ""),
                    "choices": list(field.metadata["choices"]) if field.metadata.get("choices") else None,
                }
                for field in dataclasses.fields(cls)
            ],
        }


def summary(cls: type) -> str:
    """Take the first paragraph of a docstring as one line."""
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())


def format_value(value: Value) -> str:
    """Write one parameter value so that :func:`parse` reads it back."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, str):
        plain = _WORD.fullmatch(value) and _read_value(value) == value
        return value if plain else "'" + value.replace("'", "''") + "'"
    return repr(value)


_NAME = re.compile(r"[A-Za-z][\w.-]*")
_WORD = re.compile(r"[\w./*|%@-]+")


def parse(text: str, kind: str = "name") -> tuple[Call, ...]:
    """Read ``a(x=1)+b:0.1`` into its calls.

    >>> parse("fedprox(mu=0.01)+lws")
    (Call(name='fedprox', positional=(), keywords=(('mu', 0.01),)), Call(name='lws', positional=(), keywords=()))
    """
    pieces = split_outside(text, "+")
    if not all(piece.strip() for piece in pieces):
        raise FedStrataError(
            f"'{text}' is not a {kind}: a name is missing. Write it like 'name' or 'name(parameter=1)'."
        )
    return tuple(_parse_call(piece.strip(), kind) for piece in pieces)


def split_outside(text: str, separator: str) -> list[str]:
    """Split at a separator that stands outside parentheses and quotes.

    >>> split_outside("fedavg, fedprox(mu=1, x='a,b')", ",")
    ['fedavg', " fedprox(mu=1, x='a,b')"]
    """
    pieces, depth, quote, start = [], 0, "", 0
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == separator and depth == 0:
            pieces.append(text[start:position])
            start = position + 1
        if depth < 0:
            break
    if depth or quote:
        raise FedStrataError(f"'{text}' has an unmatched {'quote' if quote else 'parenthesis'}.")
    return [*pieces, text[start:]]


def _parse_call(text: str, kind: str) -> Call:
    matched = _NAME.match(text)
    if matched is None:
        raise FedStrataError(
            f"'{text}' is not a {kind}: it must begin with a letter, like 'name' or 'name(parameter=1)'."
        )
    name, rest = matched.group(), text[matched.end() :].strip()
    if not rest:
        return Call(name)
    if rest.startswith(":"):
        return Call(name, tuple(_read_value(item.strip()) for item in split_outside(rest[1:], ",")))
    if not (rest.startswith("(") and rest.endswith(")")):
        raise FedStrataError(
            f"'{text}' is not a {kind}: after '{name}' comes ':value', '(parameter=value)' or nothing."
        )
    positional: list[Value] = []
    keywords: list[tuple[str, Value]] = []
    items = split_outside(rest[1:-1], ",") if rest[1:-1].strip() else []
    for item in items:
        if not item.strip():
            raise FedStrataError(f"In '{text}', a value is missing beside a comma.")
        key = split_outside(item, "=")[0]
        if key != item:
            keywords.append((key.strip().replace("-", "_"), _read_value(item[len(key) + 1 :].strip())))
        elif keywords:
            raise FedStrataError(f"In '{text}', '{item.strip()}' has no name but follows a named parameter.")
        else:
            positional.append(_read_value(item.strip()))
    return Call(name, tuple(positional), tuple(keywords))


def _read_value(text: str) -> Value:
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].replace(text[0] * 2, text[0])
    constants: Mapping[str, Value] = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _hints(cls: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(cls)
    except NameError:  # a class of the user's, made where its annotations cannot be resolved: its values go unchecked
        return {field.name: Any for field in dataclasses.fields(cls)}


def _check(owner: Spec, field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    named = "" if owner.name == owner.kind else f" '{owner.name or type(owner).__name__}'"
    where = f"the parameter '{field.name}' of the {owner.kind}{named}"
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
        raise FedStrataError(f"'{value}' does not fit {where}: it takes {_type_name(hint)}.")
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
            raise FedStrataError(f"{value} is outside what {where} takes: {_range(limits)}.")
    return value


def _range(limits: Mapping[str, float | None]) -> str:
    words = {"low": "at least", "above": "more than", "high": "at most", "below": "less than"}
    stated = [f"{words[key]} {limits[key]:g}" for key in words if limits[key] is not None]
    return " and ".join(stated)


def _type_name(hint: Any) -> str:
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


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
