"""Finding kernels: where Triton is missing, or a kernel does not compile, there are none, and this says why, once."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

from fedstrata.errors import FedStrataWarning

_FOUND: dict[str, ModuleType | None] = {}


def find_kernels(file: str, purpose: str, trial: Callable[[ModuleType], object]) -> ModuleType | None:
    """Import a file of kernels and try it, at the first time; return None where it cannot be used."""
    if file not in _FOUND:
        _FOUND[file] = None
        if find_spec("triton") is not None:
            try:
                kernels = import_module(f"fedstrata.kernels.{file}")
                trial(kernels)
            except Exception as error:
                reason = (str(error).strip() or type(error).__name__).splitlines()[-1][:120]
                warnings.warn(f"The GPU kernels for {purpose} are not used ({reason}).", FedStrataWarning, stacklevel=2)
            else:
                _FOUND[file] = kernels
    return _FOUND[file]
