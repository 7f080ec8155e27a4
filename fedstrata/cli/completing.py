"""What a shell offers when Tab is pressed: the names of components.

They are read from the sources, where each stands in a line such as ``@methods.register("fedavg")``: importing all of
them needs PyTorch, which takes longer than anybody waits for a Tab. Components of other people are not offered.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]
_PLACES = ("methods", "models", "data", "data/*", "diagnostics", ".")
REGISTRY_OF_KEY = {
    "method": "methods",
    "model": "models",
    "data": "datasets",
    "partition": "partitions",
    "optimiser": "optimisers",
    "schedule": "schedules",
    "transforms": "transforms",
    "loss": "losses",
    "test_loss": "losses",
    "metrics": "metrics",
    "diagnose": "diagnostics",
}
"""The keys of an experiment that name components, and the registries of these."""


@cache
def names_in_sources(registry: str) -> tuple[str, ...]:
    """List the names in a registry, in alphabetical order.

    >>> names_in_sources("optimisers")
    ('adam', 'adamw', 'sgd')
    """
    line = re.compile(rf'^@{registry}\.register\("([^"]+)"\)', re.MULTILINE)
    files = {file for place in _PLACES for file in _PACKAGE.glob(f"{place}/*.py")}
    return tuple(sorted({name for file in files for name in line.findall(file.read_text(encoding="utf-8"))}))


def completing(registry: str) -> Callable[[str], list[str]]:
    """Make a function that completes the name which a text ends with, also after ``+`` or a comma.

    >>> completing("methods")("fedbn+li")
    ['fedbn+lips']
    """

    def complete(incomplete: str) -> list[str]:
        before, begun = re.fullmatch(r"(.*[+,]\s*)?(.*)", incomplete, re.DOTALL).groups()  # type: ignore[union-attr]
        return [f"{before or ''}{name}" for name in names_in_sources(registry) if name.startswith(begun)]

    return complete
