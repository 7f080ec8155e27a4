"""What a logger is: a component that opens a writer for a run, and a writer that takes numbers."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

from fedstrata.errors import FedStrataError
from fedstrata.spec import Registry, Spec

Setting = str | int | float | bool


@dataclass(frozen=True)
class LoggedRun:
    """What a logger is told of a run: a short name, its settings, and its folder, if it has one.

    ``identity`` is the same whenever the run is resumed, and no other run has it.
    """

    name: str
    settings: Mapping[str, Setting]
    folder: Path | None = None
    identity: str = ""

    @classmethod
    def new_identity(cls) -> str:
        """Make an identity that no other run has."""
        return uuid.uuid4().hex[:16]


class Writer(Protocol):
    """Takes the numbers of one run to where they are kept."""

    def write(self, round: int, values: Mapping[str, float]) -> None:
        """Write the numbers of a round, by their names, so that they are safe when this returns."""

    def end(self, summary: Mapping[str, Any]) -> None:
        """Note that the run has come to its end, with what."""

    def close(self) -> None:
        """Let go of everything; the run may go on another time."""


class Logger(Spec):
    """A way to keep the numbers of runs."""

    package: ClassVar[str] = ""
    """What has to be installed for it; the extra has the same name."""

    def require(self) -> None:
        """Refuse with a sentence where its package is not installed."""

    def open(self, run: LoggedRun) -> Writer:
        """Begin to write, or go on where the run is resumed."""
        raise NotImplementedError

    def place(self, given: str | None, run: LoggedRun) -> Path:
        """Where the run's numbers lie: in a folder of the run's own, inside its own folder unless one is given."""
        if given is not None:
            return Path(given) / f"{run.name}-{run.identity}"
        if run.folder is None:
            raise FedStrataError(
                f"The logger '{self}' writes into the folder of the run, and this one has none; give the run a folder "
                f"(out=...), or the logger: {self.name}(folder=logs)."
            )
        return run.folder / self.name


loggers: Registry[Logger] = Registry("logger")


def logged_names(metrics: Mapping[str, float], layers: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Name the numbers of a round as all loggers do.

    >>> logged_names({"train.loss": 0.5}, {"cosine": {"stage1.0.conv1": 1.0}})
    {'train/loss': 0.5, 'layers/cosine/stage1.0.conv1': 1.0}
    """
    of_round = {name.replace(".", "/"): float(value) for name, value in metrics.items()}
    of_layers = {
        f"layers/{name.replace('.', '/')}/{layer}": float(value)
        for name, values in layers.items()
        for layer, value in values.items()
    }
    return of_round | of_layers


def missing(package: str) -> FedStrataError:
    """Say how to install what a logger needs."""
    return FedStrataError(
        f"The logger '{package}' needs a package that is not installed; install it with: pip install "
        f"'fedstrata[{package}]'"
    )
