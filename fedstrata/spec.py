"""Components with parameters: how they are declared, written as text, checked and listed.

A method, a partition, a model, an optimiser: each is a frozen dataclass derived from :class:`Spec` whose fields are its
parameters, declared with :func:`parameter`, and which stands under a name in a :class:`Registry`. On the command
line and in TOML files it is written as a call::

    fedprox(mu=0.01)     dirichlet:0.1     cnn     fedbn+lips(tau0=0.5)

``name:value`` is short for ``name(value)``, the first parameter. A value that is more than a word stands in quotes; a
quote inside it is doubled. :meth:`Registry.make` reads such a text, ``str(spec)`` writes it back in its shortest form.
"""

from __future__ import annotations

import builtins
import dataclasses
import inspect
import math
import numbers
import re
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from fedstrata.errors import FedStrataError, FedStrataWarning, unknown_name

Value = str | int | float | bool | None
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
        hints = _hints(type(self))
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


@dataclass(frozen=True)
class Call:
    """One parsed ``name(positional..., keyword=value...)``."""

    name: str
    positional: tuple[Value, ...] = ()
    keywords: tuple[tuple[str, Value], ...] = ()


T = TypeVar("T", bound=Spec)


@dataclass(frozen=True)
class Origin:
    """Where a component comes from that is not FedStrata's own: in words, and the file that defines it, if any."""

    words: str
    file: Path | None = None

    @classmethod
    def of(cls, component: type) -> Origin | None:
        """Tell where a class comes from that is being registered; none where it is FedStrata's own."""
        if component.__module__.partition(".")[0] == __name__.partition(".")[0]:
            return None
        source = getattr(sys.modules.get(component.__module__), "__file__", None)
        file = None if source is None else Path(source)
        registrations = _open_registrations.get()
        if registrations is not None:
            return cls(registrations.words, file)
        return cls(component.__module__ if file is None else file.name, file)


Entry = tuple[type[Any], Origin | None]
"""A class in a registry, and where it comes from."""


@dataclass
class Registrations:
    """What is registered while a file or a package is imported, and how to take all of it back."""

    words: str
    changes: list[tuple[Registry[Any], str, Entry | None]] = dataclasses.field(default_factory=list)
    """Registry and name, with what stood there before."""

    @property
    def made(self) -> dict[tuple[Registry[Any], str], type[Spec]]:
        """What stands in the registries because of it."""
        made = {(registry, name): registry.registered(name) for registry, name, _ in self.changes}
        return {place: cls for place, cls in made.items() if cls is not None}

    def undo(self) -> None:
        """Leave the registries as they were."""
        for registry, name, before in reversed(self.changes):
            registry.put(name, before)


_open_registrations: ContextVar[Registrations | None] = ContextVar("registrations", default=None)


def is_registering() -> bool:
    """Tell whether a file or a package is being imported for what it registers."""
    return _open_registrations.get() is not None


@contextmanager
def registering(words: str) -> Iterator[Registrations]:
    """Note what is registered meanwhile, and that it comes from there; where anything fails, nothing of it stays."""
    registrations = Registrations(words)
    token = _open_registrations.set(registrations)
    try:
        yield registrations
    except BaseException:
        _open_registrations.set(None)
        registrations.undo()
        raise
    finally:
        _open_registrations.reset(token)


class Registry(Generic[T]):
    """The named components of one kind.

    Installed packages can offer components too, under the entry points of the ``group``; they are loaded when the
    registry is first asked for a name that it does not know, or for all names.

    >>> from fedstrata.methods import methods
    >>> "fedavg" in methods.names()
    True
    """

    finders: ClassVar[list[Callable[[Registry[Any]], None]]] = []
    """What fills a registry with components of elsewhere, once, when it is listed or lacks a name."""

    def __init__(self, kind: str, plural: str | None = None) -> None:
        self.kind = kind
        self.plural = plural or f"{kind}s"
        self.group = f"fedstrata.{self.plural}"
        self._entries: dict[str, Entry] = {}
        self._packages_loaded = False

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Put the decorated class under ``name``.

        A name that is taken is refused, unless the same class comes again: from the same file or from a copy of it. In
        a notebook or another session where code is typed in, what comes later takes the place of what was typed in
        before, with a word.
        """

        def decorate(cls: type[T]) -> type[T]:
            origin, there = Origin.of(cls), self._entries.get(name)
            if there is not None and _is_typed_in(cls) and _is_typed_in(there[0]):
                warnings.warn(
                    f"The {self.kind} '{name}' is the one that was just defined; it replaces the one before.",
                    FedStrataWarning,
                    stacklevel=2,
                )
            elif there is not None and not _is_same(there, (cls, origin)):
                whose = "" if there[1] is None else f", from {there[1].words}"
                where = "" if origin is None else f" in {origin.words}"
                raise FedStrataError(f"There is already a {self.kind} '{name}'{whose}; choose another name{where}.")
            cls.name = name
            cls.stands_for = self.kind
            self.put(name, (cls, origin))
            return cls

        return decorate

    def put(self, name: str, entry: Entry | None) -> None:
        """Let a name stand for a class and its origin, or for nothing; what stood there before is noted."""
        registrations = _open_registrations.get()
        own = entry is not None and entry[1] is None  # FedStrata's own modules may be imported on the way
        if registrations is not None and not own:
            registrations.changes.append((self, name, self._entries.get(name)))
        if entry is None:
            self._entries.pop(name, None)
        else:
            self._entries[name] = entry

    def registered(self, name: str) -> type[T] | None:
        """Look a class up by its name, without looking further for one that is not there."""
        return self._entries[name][0] if name in self._entries else None

    def holds(self, cls: object) -> bool:
        """Tell whether a class is registered, under whatever name."""
        return any(cls is entry[0] for entry in self._entries.values())

    def origin(self, name: str) -> Origin | None:
        """Tell where a component comes from; none where it is FedStrata's own."""
        self.get(name)
        return self._entries[name][1]

    def order(self, rank: Callable[[type[T]], int]) -> None:
        """Put what is registered so far into an order; equals stay as they are."""
        self._entries = dict(sorted(self._entries.items(), key=lambda item: rank(item[1][0])))

    def names(self, pattern: str = "*") -> list[str]:
        """List the names that match a shell-style pattern, in the order of registration unless it was changed."""
        self._load_packages()
        return [name for name in self._entries if fnmatchcase(name, pattern)]

    def get(self, name: str) -> type[T]:
        """Look a class up by its name; an unknown name is answered with the nearest one."""
        if name not in self._entries:
            self._load_packages()
        if name not in self._entries:
            raise unknown_name(self.kind, name, self._entries)
        return self._entries[name][0]

    def _load_packages(self) -> None:
        if not self._packages_loaded:
            self._packages_loaded = True
            for find in Registry.finders:
                find(self)

    def make(self, given: str | T) -> T:
        """Build a component from its text, such as ``dirichlet(alpha=0.1)``; a ready component passes through."""
        if isinstance(given, Spec):
            if given.stands_for not in ("", self.kind):
                raise FedStrataError(f"'{given}' is no {self.kind}, it is a {given.stands_for}.")
            return given
        calls = parse(given, self.kind)
        if len(calls) != 1:
            raise FedStrataError(f"'{given}' names {len(calls)} {self.plural}; give exactly one.")
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
        cls, origin = self.get(name), self.origin(name)
        return {
            "name": name,
            "kind": self.kind,
            "origin": None if origin is None else origin.words,
            "summary": summary(cls),
            "description": description(cls),
            "parameters": describe_parameters(cls),
        }


def describe_parameters(cls: type[Spec]) -> list[dict[str, Any]]:
    """Tell all that is known of the parameters of a component, as plain data."""
    hints, origins = _hints(cls), sources(cls)
    return [
        {
            "name": field.name,
            "type": _type_name(hints[field.name]),
            "default": field.default,
            "source": origins.get(field.name),
            "meaning": field.metadata.get("doc", ""),
            "choices": list(field.metadata["choices"]) if field.metadata.get("choices") else None,
            "limits": _range(field.metadata) or None,
        }
        for field in dataclasses.fields(cls)
    ]


def _is_typed_in(cls: type) -> bool:
    """Tell whether a class comes from a notebook, or another session where code is typed in and changed."""
    if cls.__module__ == "__main__" and hasattr(builtins, "__IPYTHON__"):
        return True
    return getattr(sys.modules.get(cls.__module__), "__file__", None) is None


def _is_same(there: Entry, new: Entry) -> bool:
    """Tell whether a class is another one anew, as where its file is imported twice."""
    (one, from_one), (other, from_other) = there, new
    if one.__qualname__ != other.__qualname__ or from_one is None or from_other is None:
        return False
    first, second = from_one.file, from_other.file
    if first is None or second is None:
        return False
    try:
        return first.samefile(second) or first.read_bytes() == second.read_bytes()
    except OSError:
        return False


_DEFAULTS = re.compile(r"\n+Defaults:\n((?:[ ]{4}.*(?:\n|$))+)\s*$")
"""The last section of a docstring, which tells where the defaults of parameters come from."""


def description(cls: type) -> str:
    """Take the docstring of a component without the section about its defaults."""
    return _DEFAULTS.sub("", inspect.getdoc(cls) or "")


def sources(cls: type[Spec]) -> dict[str, str]:
    """Tell where the defaults of the parameters come from, by the last section of the docstring, ``Defaults:``.

    Each of its lines names one or more parameters and a source: a repository and a file, a section of the paper, or
    ``ours``. What it does not name, the docstrings of the classes that it derives from may.

    >>> class Example(Spec):
    ...     '''Do something.
    ...
    ...     Defaults:
    ...         rate, decay: someone/something, a.py.
    ...         size: paper, Table 2,
    ...             second row.
    ...     '''
    >>> sources(Example)
    {'rate': 'someone/something, a.py', 'decay': 'someone/something, a.py', 'size': 'paper, Table 2, second row'}
    """
    told: dict[str, str] = {}
    for ancestor in reversed(cls.__mro__):
        section = _DEFAULTS.search(inspect.cleandoc(ancestor.__doc__ or ""))
        for line in re.split(r"\n(?! {8})", section.group(1).rstrip()) if section else ():
            names, _, source = " ".join(line.split()).partition(": ")
            told |= dict.fromkeys(names.split(", "), source.removesuffix("."))
    return told


def summary(cls: type) -> str:
    """Take the first paragraph of a docstring as one line."""
    return " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split())


def format_value(value: Value) -> str:
    """Write one parameter value so that :func:`parse` reads it back."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, str):
        plain = _WORD.fullmatch(value) and read_value(value) == value
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
        return Call(name, tuple(read_value(item.strip()) for item in split_outside(rest[1:], ",")))
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
            keywords.append((key.strip().replace("-", "_"), read_value(item[len(key) + 1 :].strip())))
        elif keywords:
            raise FedStrataError(f"In '{text}', '{item.strip()}' has no name but follows a named parameter.")
        else:
            positional.append(read_value(item.strip()))
    return Call(name, tuple(positional), tuple(keywords))


def read_value(text: str) -> Value:
    """Read the value of a parameter: a number, true, false, none, a text in quotes, or a word.

    >>> read_value("0.1"), read_value("none"), read_value("'a b'")
    (0.1, None, 'a b')
    """
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


def _range(limits: Mapping[str, Any]) -> str:
    words = {"low": "at least", "above": "more than", "high": "at most", "below": "less than"}
    stated = [f"{words[key]} {limits[key]:g}" for key in words if limits.get(key) is not None]
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
