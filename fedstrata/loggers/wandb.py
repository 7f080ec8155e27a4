"""Weights & Biases: metrics by round, settings as the configuration; offline unless something else is asked for."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedstrata.loggers.logger import LoggedRun, Logger, Writer, loggers, missing
from fedstrata.spec import parameter

_QUIET: dict[str, Any] = {
    "console": "off",
    "silent": True,
    "disable_git": True,
    "disable_code": True,
    "x_disable_stats": True,
    "x_disable_meta": True,
}
"""Nothing but what it is given: neither the terminal nor the code nor the machine."""


@loggers.register("wandb")
@dataclass(frozen=True)
class WeightsAndBiases(Logger):
    """Write for Weights & Biases: into the run's folder, from where ``wandb sync`` sends it; online if asked."""

    package: ClassVar[str] = "wandb"

    project: str = parameter("fedstrata", "The project that the runs stand under.")
    mode: str = parameter(
        "offline", "Whether everything stays in the folder, or is sent to the service.", choices=("offline", "online")
    )
    entity: str | None = parameter(None, "Whose project it is, where it is sent; none: that of the account.")
    folder: str | None = parameter(
        None, "Where its files go, a folder for each run; none: into 'wandb' in the run's own folder."
    )

    def require(self) -> None:
        """Refuse with a sentence where it is not installed."""
        try:
            import wandb  # noqa: F401
        except ImportError:
            raise missing(self.package) from None

    def open(self, run: LoggedRun) -> Writer:
        """Begin a run of theirs, or go on with it under the same identity."""
        return _Run(self, self.place(self.folder, run), run)


class _Run:
    def __init__(self, logger: WeightsAndBiases, place: Path, run: LoggedRun) -> None:
        place.mkdir(parents=True, exist_ok=True)
        for kind in ("CACHE", "CONFIG", "DATA"):  # it would write these into the home of the user
            os.environ.setdefault(f"WANDB_{kind}_DIR", str((place / kind.lower()).resolve()))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        self._run: Any = wandb.init(
            project=logger.project,
            entity=logger.entity,
            mode=logger.mode,  # type: ignore[arg-type,unused-ignore]
            name=run.name,
            id=run.identity,
            resume="allow",
            dir=str(place.parent if place.name == "wandb" else place),  # it makes a folder of this name itself
            config=dict(run.settings),
            settings=wandb.Settings(**_QUIET),
        )

    def write(self, round: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=round)

    def end(self, summary: Mapping[str, Any]) -> None:
        """What it shows as the result of a run are the numbers of the last round."""

    def close(self) -> None:
        self._run.finish()
