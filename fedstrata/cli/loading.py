"""Loading PyTorch, which takes longer than all that a small command does."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from fedstrata.cli.terminal import telling


@contextmanager
def loading_pytorch(quiet: bool = False) -> Iterator[None]:
    """Tell that PyTorch is loaded, and load it without looking for garbage.

    What is imported stays until the process ends: some hundred thousand objects, through which nobody has to look while
    they are made, whenever a step is recorded, and at the end. Where PyTorch is there already, the process is somebody
    else's, and is left as it is.
    """
    ours = "torch" not in sys.modules and gc.isenabled()
    if ours:
        gc.disable()
    try:
        with telling("loading PyTorch", quiet):
            yield
    finally:
        if ours:
            gc.enable()
            gc.freeze()
