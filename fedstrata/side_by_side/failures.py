"""Why a run has failed, as text: an error itself would hold the memory of its run, and cannot leave a process."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Mapping
from typing import Any

from fedstrata.errors import FedStrataError, FedStrataWarning, mistake_of_others


class RunFailedError(Exception):
    """A run has met an error that no sentence explains."""


def describe(error: Exception) -> dict[str, Any]:
    """Write an error down: of what kind it is, its message, and where it came from.

    What somebody's own code has not caught, such as that of a method which was imported, is a mistake and no bug.
    """
    kinds = {"mistake": FedStrataError, "memory": MemoryError, "system": OSError}
    kind = next((name for name, cls in kinds.items() if isinstance(error, cls)), "bug")
    if type(error).__name__ == "OutOfMemoryError":
        kind = "memory"
    text = str(error) if kind == "mistake" else f"{type(error).__name__}: {error}"
    if kind == "bug" and (mistake := mistake_of_others(error)) is not None:
        kind, text = "mistake", mistake
    system = [error.errno, error.strerror, error.filename] if isinstance(error, OSError) else None
    return {"kind": kind, "text": text, "trace": "".join(traceback.format_exception(error)), "system": system}


def as_error(name: str, told: Mapping[str, Any], beside_others: bool = True) -> Exception:
    """Make an error of what was written down of one, under the name of its run; its traceback is a note."""
    error = _error(name, told, "do fewer runs at a time with --jobs, " if beside_others else "")
    error.add_note(told["trace"])
    return error


def _error(name: str, told: Mapping[str, Any], fewer_runs: str) -> Exception:
    match told["kind"]:
        case "mistake":
            return FedStrataError(f"{name}: {told['text']}")
        case "memory":
            return FedStrataError(
                f"{name}: there is not enough memory; {fewer_runs}train fewer clients at once with --chunk, or use a "
                "smaller --batch-size."
            )
        case "system" if told["system"][0] is not None:
            number, reason, path = told["system"]
            return OSError(number, f"{name}: {reason}", path)
    return RunFailedError(f"{name}: {told['text']}")


def warn_of_failure(error: Exception) -> None:
    """Say at once that a run has failed beside which there are others; its error names it."""
    warnings.warn(f"A run has failed, and the others go on. {error}", FedStrataWarning, stacklevel=3)
