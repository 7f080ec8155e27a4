"""Where is kept what can be made or fetched again: the cache of FedStrata on this machine."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "FEDSTRATA_CACHE"
OFF = "off"
"""What the variable says where nothing that was made is to be kept."""


def cache_directory() -> Path:
    """Return the folder: ``$FEDSTRATA_CACHE``, else ``$XDG_CACHE_HOME/fedstrata``, or ``~/.cache/fedstrata``."""
    named = os.environ.get(CACHE_VARIABLE)
    if named and named != OFF:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fedstrata"


def kept_directory(what: str) -> Path | None:
    """Return the folder for one kind of things that were made here; none where they are not to be kept."""
    return None if os.environ.get(CACHE_VARIABLE) == OFF else cache_directory() / what
