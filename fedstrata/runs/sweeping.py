"""Sweeps: the same runs with other values of a key of the experiment, or of a parameter inside one of its texts.

``partition.alpha=0.01,0.1,0.5`` changes ``alpha`` in the text of the partition, ``clients=10,20`` a key itself, and
``method.fedprox.mu=0.1,1`` a parameter of one part of a composition. Several sweeps make a grid.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from itertools import product
from typing import Any

from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.experiment import Experiment
from fedstrata.spec import Registry, Spec, Value, format_value, parse, read_value, split_outside

METHOD = "method"
_REGISTRIES = {
    METHOD: "fedstrata.methods:methods",
    "model": "fedstrata.models:models",
    "data": "fedstrata.data:datasets",
    "partition": "fedstrata.data:partitions",
    "transforms": "fedstrata.data:transforms",
    "optimiser": "fedstrata.optimisers:optimisers",
    "schedule": "fedstrata.schedules:schedules",
    "loss": "fedstrata.losses:losses",
    "test_loss": "fedstrata.losses:losses",
    "metrics": "fedstrata.scores:metrics",
}
"""The keys of an experiment that name components, and where these are registered."""
Given = str | Sequence[str] | Mapping[str, Sequence[Any]]
"""Sweeps as a call may give them: texts such as ``clients=10,20``, or a dict from each key to its values."""


@dataclass(frozen=True)
class Sweep:
    """A key, or a parameter inside the text of one (``path`` is then what stands behind the key), and its values."""

    key: str
    path: tuple[str, ...]
    values: tuple[Value, ...]

    @property
    def name(self) -> str:
        """The key and what stands behind it, such as ``partition.alpha``."""
        return ".".join((self.key, *self.path))

    @property
    def of_method(self) -> bool:
        """Whether the methods themselves differ, and not the setting that they share."""
        return self.key == METHOD

    def change(self, experiment: Experiment, value: Value) -> Experiment:
        """Set one value in an experiment."""
        if not self.path:
            return experiment.with_changes({self.key: value})
        text = getattr(experiment, self.key)
        changed = None if text is None else with_parameter(self.key, text, self.path, value)
        if text is None:
            raise FedStrataError(
                f"'{self.name}' is to be swept, but the experiment names no {self.key}; name it, beside the sweep."
            )
        if changed is None:
            raise unknown_name(f"parameter of the {self.key} '{text}' called", self.name, parameters_of(self.key, text))
        return experiment.with_changes({self.key: changed})

    def value_in(self, experiment: Experiment) -> Value:
        """Read the value off an experiment as it stands there, so that 1 and 1.0 are the same."""
        text: Value = getattr(experiment, self.key)
        if not self.path:
            return text
        *owner, name = self.path
        [value] = [
            getattr(part, name)
            for part in _components(self.key, str(text))
            if name in _names(part) and _is(part, owner)
        ]
        return value  # type: ignore[no-any-return]


def read_sweeps(given: Given | None) -> list[Sweep]:
    """Read sweeps; those that could not be swept are refused.

    >>> read_sweeps("partition.alpha=0.01, 0.1")
    [Sweep(key='partition', path=('alpha',), values=(0.01, 0.1))]
    """
    if isinstance(given, Mapping):
        listed = [(name, tuple(values)) for name, values in given.items()]
    else:
        listed = [_read(text) for text in ([given] if isinstance(given, str) else given or ())]
    sweeps = [_make(name, values) for name, values in listed]
    names = [sweep.name for sweep in sweeps]
    for name in names:
        if names.count(name) > 1:
            raise FedStrataError(f"'{name}' is swept twice; give all its values at once: {name}=1,2,3.")
    return sweeps


def _read(text: str) -> tuple[str, tuple[Value, ...]]:
    name, equals, values = text.partition("=")
    listed = [piece.strip() for piece in split_outside(values, ",")]
    if not equals or not name.strip() or not all(listed):
        raise FedStrataError(f"'{text}' is no sweep; write it like partition.alpha=0.01,0.1,0.5 or clients=10,20,50.")
    return name, tuple(read_value(piece) for piece in listed)


def _make(name: str, values: tuple[Value, ...]) -> Sweep:
    key, *path = name.strip().replace("-", "_").split(".")
    known = [field.name for field in dataclasses.fields(Experiment)]
    if key not in known:
        raise unknown_name("key of an experiment called", key, known)
    if key == "seed":
        raise FedStrataError("Seeds are not swept but counted: --seeds 5, or seeds=5.")
    if key == METHOD and not path:
        raise FedStrataError(
            "Methods are not swept but listed, as what is compared; sweep a parameter: method.mu=0.1,1."
        )
    if key == "imports" or (path and key not in _REGISTRIES):
        raise FedStrataError(
            f"'{name}' cannot be swept: '{key}' has no parameters; sweep a key, or one of "
            f"{', '.join(f'{one}.…' for one in _REGISTRIES)}."
        )
    unique = tuple(dict.fromkeys(values))
    if len(unique) < 2:
        raise FedStrataError(f"A sweep of '{name}' needs at least two values; write {name}=1,2,3.")
    return Sweep(key, tuple(path), unique)


def cells(experiment: Experiment, sweeps: Iterable[Sweep]) -> Iterator[tuple[str, Experiment]]:
    """Yield each setting of a grid, in words that fit into the name of a folder, with its experiment."""
    shared = [sweep for sweep in sweeps if not sweep.of_method]
    for chosen in product(*(sweep.values for sweep in shared)):
        changed = experiment
        for sweep, value in zip(shared, chosen, strict=True):
            changed = sweep.change(changed, value)
        words = [f"{(sweep.path or (sweep.key,))[-1]}={sweep.value_in(changed)}" for sweep in shared]
        yield ", ".join(words), changed


def swept_methods(methods: Sequence[str], sweeps: Iterable[Sweep]) -> list[str]:
    """Give each method every value of the swept parameters that it has; one that has none of them stays as it is."""
    for sweep in (sweep for sweep in sweeps if sweep.of_method):
        made: list[str] = []
        for text in methods:
            changed = [with_parameter(METHOD, text, sweep.path, value) for value in sweep.values]
            made += [text] if changed[0] is None else [one for one in changed if one is not None]
        if made == list(methods):
            known = {name for text in methods for name in parameters_of(METHOD, text)}
            raise unknown_name("parameter of these methods called", sweep.name, known)
        methods = made
    return list(dict.fromkeys(methods))


def with_parameter(key: str, text: str, path: tuple[str, ...], value: Value) -> str | None:
    """Set a parameter inside the text of a component, or of several joined by ``+``; none where it has no such one.

    >>> with_parameter("partition", "dirichlet:0.1", ("alpha",), 0.5)
    'dirichlet(alpha=0.5)'
    """
    *owner, name = path
    parts = _components(key, text)
    fitting = [place for place, part in enumerate(parts) if name in _names(part) and _is(part, owner)]
    if not fitting:
        return None
    if len(fitting) > 1:
        owners = " or ".join(f"{key}.{parts[place].name}.{name}" for place in fitting)
        raise FedStrataError(f"In '{text}', '{name}' is a parameter of several; say whose: {owners}.")
    written = [_written(part, name, value) if place in fitting else str(part) for place, part in enumerate(parts)]
    return "+".join(written)


def parameters_of(key: str, text: str) -> dict[str, Value]:
    """Tell all parameters in the text of components, defaults too, by the names by which they are swept.

    >>> parameters_of("partition", "dirichlet:0.5")["partition.alpha"]
    0.5
    """
    parts = _components(key, text)
    several = len(parts) > 1
    return {
        f"{key}.{part.name}.{name}" if several else f"{key}.{name}": getattr(part, name)
        for part in parts
        for name in _names(part)
    }


def canonical(key: str, text: str) -> str:
    """Write the components in the text of a key in one way, without parameters that are at their defaults.

    >>> canonical("partition", "dirichlet:0.5"), canonical("device", "cpu")
    ('dirichlet(alpha=0.5)', 'cpu')
    """
    return "+".join(str(part) for part in _components(key, text)) if key in _REGISTRIES else text


def _components(key: str, text: str) -> list[Spec]:
    if text.startswith("python:"):
        raise FedStrataError(
            f"The {key} was given as an object ({text.removeprefix('python:')}); name it to sweep its parameters."
        )
    registry = _registry(key)
    return [registry.build(call) for call in parse(text, registry.kind)]


@cache
def _registry(key: str) -> Registry[Any]:
    module, _, name = _REGISTRIES[key].partition(":")
    registry: Registry[Any] = getattr(import_module(module), name)
    return registry


def _is(part: Spec, owner: Sequence[str]) -> bool:
    """Tell whether a component is the one that was named, if one was."""
    return list(owner) in ([], [part.name.replace("-", "_")])


def _names(part: Spec) -> list[str]:
    return [field.name for field in dataclasses.fields(part)]


def _written(part: Spec, name: str, value: Value) -> str:
    """Write a component with a parameter, also where its value is the default, so that texts tell what was swept."""
    changed = dataclasses.replace(part, **{name: value})
    given = [
        f"{field.name}={format_value(getattr(changed, field.name))}"
        for field in dataclasses.fields(changed)
        if field.name == name or getattr(changed, field.name) != field.default
    ]
    return f"{part.name}({', '.join(given)})"
