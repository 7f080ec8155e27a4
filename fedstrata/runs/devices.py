"""The device that a run computes on, and the precision of its numbers."""

from __future__ import annotations

import os

import torch

from fedstrata._platform import threads_are_chosen
from fedstrata.errors import FedStrataError

DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}
"""The type of the weights under each precision; the narrower ones compute products only."""

THREADS_BESIDE_GPU = 4


def choose_device(given: str) -> torch.device:
    """Turn ``auto``, ``cpu`` or ``cuda`` into a device that exists."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if given == "auto" else given
    try:
        device = torch.device(name)
    except RuntimeError:
        raise FedStrataError(f"There is no device '{given}'; use auto, cpu, cuda or cuda:0.") from None
    if device.type not in ("cpu", "cuda"):
        raise FedStrataError(f"The device '{given}' is not supported; use auto, cpu, cuda or cuda:0.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise FedStrataError(
            f"The device '{given}' was asked for, but this machine has no usable CUDA GPU; use --device cpu."
        )
    return device


def set_precision(precision: str, deterministic: bool) -> None:
    """Set the process-wide switches for matrix products, and for repeatable operations."""
    allowed = precision in ("tf32", "bf16")
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
    torch.set_deterministic_debug_mode("error" if deterministic else "default")  # imports no compiler
    torch.backends.cudnn.deterministic = deterministic


def spare_host(device: torch.device) -> None:
    """Beside a GPU take few threads of the host, which has little to compute then, unless their number was chosen.

    Many would wait for each other wherever fewer cores are free than there seem to be, and a GPU for them: that a
    machine's cores are shared is not always told by a quota.
    """
    if device.type == "cuda" and not threads_are_chosen(os.environ):
        torch.set_num_threads(min(torch.get_num_threads(), THREADS_BESIDE_GPU))
