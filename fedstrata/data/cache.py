"""Where data that was fetched on request is kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """Return the folder for fetched data: ``$XDG_CACHE_HOME/fedstrata``, or ``~/.cache/fedstrata``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedstrata"
