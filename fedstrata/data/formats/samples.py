"""What a file of a dataset holds, and what is said when it does not."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedstrata.errors import FedStrataError


@dataclass(frozen=True)
class Samples:
    """Inputs ``[n, ...]`` with labels ``[n]``, and the names of the classes where the files tell them."""

    inputs: np.ndarray
    labels: np.ndarray
    class_names: tuple[str, ...] | None = None


def join(parts: list[Samples]) -> Samples:
    """Put the samples of several files one after another; the class names are those of the first."""
    if len(parts) == 1:
        return parts[0]
    return Samples(
        np.concatenate([part.inputs for part in parts]),
        np.concatenate([part.labels for part in parts]),
        parts[0].class_names,
    )


def damaged(path: Path, reason: str) -> FedStrataError:
    """Build the error for a file whose content is not what its name promises."""
    return FedStrataError(f"The file '{path}' is damaged or of another kind: {reason}. Fetch it again.")
