"""Registries: the components of one kind under their names, and where each of them comes from."""

from __future__ import annotations

import builtins
import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from fedstrata.errors import FedStrataError, FedStrataWarning, unknown_name
from fedstrata.spec.describing import describe_parameters, description, summary
from fedstrata.spec.parameters import Spec
from fedstrata.spec.text import Call, Value, parse

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


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
