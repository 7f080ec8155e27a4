"""Trying a model on a few samples without leaving a trace in it or in the random numbers of others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fedstrata.errors import FedStrataError


def zero_samples(model: nn.Module, input_shape: tuple[int, ...], count: int = 2) -> Tensor:
    """Make samples of zeros with the number type and on the device of the model."""
    tensors = chain(model.parameters(), model.buffers())
    like = next((tensor for tensor in tensors if tensor.is_floating_point()), torch.empty(0))
    return torch.zeros((count, *input_shape), dtype=like.dtype, device=like.device)


@contextmanager
def undisturbed(model: nn.Module, name: str) -> Iterator[nn.Module]:
    """Lend a copy of the model in evaluation mode; whatever it draws and stores is forgotten afterwards."""
    copy = copied(model, name)
    devices = {tensor.device for tensor in chain(copy.parameters(), copy.buffers()) if tensor.device.type == "cuda"}
    with torch.random.fork_rng(devices=list(devices)), _without_cudnn() if devices else nullcontext():
        yield copy.eval()


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Compute without cuDNN, which takes longer to load than a trial takes, and which nothing else may need.

    Recurrent layers are products then, which can be counted.
    """
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def copied(model: nn.Module, name: str) -> nn.Module:
    """Copy a model, or say why that cannot be done."""
    try:
        with torch.no_grad():
            return deepcopy(model)
    except Exception as error:
        raise FedStrataError(
            f"The model '{name}' cannot be copied, which every client needs: {first_line(error)} "
            "Give a function that builds it from plain modules."
        ) from error


def forward(model: nn.Module, samples: Tensor, name: str) -> Any:
    """Run the model once; an exception becomes a sentence that names the model and the shape of one sample."""
    try:
        return model(samples)
    except Exception as error:
        hint = ""
        if isinstance(error, IndexError) and not samples.is_floating_point():
            rows = int(samples.max()) + 1
            hint = f" The largest number of a token is {rows - 1}: the model needs at least words={rows}."
        elif not samples.is_floating_point():
            hint = " Whole numbers stay whole numbers, as tokens must; give inputs that are quantities as float32."
        raise FedStrataError(
            f"The model '{name}' cannot take inputs of shape {tuple(samples.shape[1:])} and type {samples.dtype}: "
            f"{first_line(error)}{hint}"
        ) from error


def first_line(error: Exception) -> str:
    """Return the first line of an exception's message, ended like a sentence."""
    line = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return line if line.endswith((".", "!", "?")) else f"{line}."
