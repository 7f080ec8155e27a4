"""TensorBoard's event files: scalars by round, and the settings as text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from fedstrata.loggers.logger import LoggedRun, Logger, Writer, loggers, missing
from fedstrata.spec import parameter


@loggers.register("tensorboard")
@dataclass(frozen=True)
class TensorBoard(Logger):
    """Write event files for TensorBoard: ``tensorboard --logdir runs`` shows all runs beneath a folder."""

    package: ClassVar[str] = "tensorboard"

    folder: str | None = parameter(
        None, "Where the event files go, a folder for each run; none: into 'tensorboard' in the run's own folder."
    )

    def require(self) -> None:
        """Refuse with a sentence where TensorBoard is not installed."""
        try:
            import tensorboard  # noqa: F401
        except ImportError:
            raise missing(self.package) from None

    def open(self, run: LoggedRun) -> Writer:
        """Begin an event file; one that is there already stays, and the new one goes on after it."""
        return _EventFile(self.place(self.folder, run), run.settings)


class _EventFile:
    def __init__(self, place: Path, settings: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        begun = any(place.glob("events.out.tfevents.*"))
        self._events: Any = SummaryWriter(str(place))
        if not begun:
            lines = ["| setting | value |", "|---|---|", *(f"| {key} | `{value}` |" for key, value in settings.items())]
            self._events.add_text("settings", "\n".join(lines))

    def write(self, round: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, round)
        self._events.flush()

    def end(self, summary: Mapping[str, Any]) -> None:
        """Nothing is left to say: the numbers of the last round are the result."""

    def close(self) -> None:
        self._events.close()
