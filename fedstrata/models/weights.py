"""Pretrained weights, read from a file into a model that has just been built."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from fedstrata import files
from fedstrata.errors import FedStrataError, NotHereError

WEIGHTS = "A safetensors file with pretrained weights, such as the model.safetensors of a run; none: drawn at random."
"""What a model's parameter ``weights`` means."""


def find_weights(path: str | None, model: str, otherwise: str = "") -> Path | None:
    """Find the file with pretrained weights of a model, if it has one; where it is missing, say how it is made."""
    if path is None:
        return None
    found = Path(path).expanduser()
    if not found.is_file():
        brief = (
            f"the weights '{path}' of the model {model}: put the model.safetensors of a run there, such as that of "
            f"'fedstrata run --model {model} --clients 1 --out DIR'{otherwise}"
        )
        raise NotHereError(f"'{path}' cannot be read: no such file. Missing are {brief}.", f"{brief}.")
    return found


def load_backbone(model: nn.Module, path: str | Path, heads: Sequence[str] = ("head",)) -> nn.Module:
    """Copy pretrained weights into a model, and return the same model; ``heads`` are the modules that classify.

    A head for another number of classes stays as it was initialised, and the file may have none. All other tensors must
    be the same on both sides, by name and shape; the first that is not is named.
    """
    path = Path(path).expanduser()
    found, wanted = files.from_safetensors(files.read_bytes(path), path), model.state_dict()
    if _shapes(_of_heads(found, heads)) != _shapes(_of_heads(wanted, heads)):
        found, wanted = _without(found, heads), _without(wanted, heads)
    for name in (*wanted, *found):
        if name not in found:
            raise FedStrataError(
                f"'{path}' does not hold the tensor '{name}' of the model; give weights of this model."
            )
        if name not in wanted:
            raise FedStrataError(f"'{path}' holds the tensor '{name}', which the model has not; build the same model.")
        if found[name].shape != wanted[name].shape:
            raise FedStrataError(
                f"The tensor '{name}' in '{path}' has the shape {list(found[name].shape)}, but that of the model has "
                f"{list(wanted[name].shape)}; build the model with the sizes, and for images, that the weights are of."
            )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(found[name])
    return model


def _of_heads(tensors: dict[str, Tensor], heads: Sequence[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(tuple(f"{head}." for head in heads))}


def _without(tensors: dict[str, Tensor], heads: Sequence[str]) -> dict[str, Tensor]:
    of_heads = _of_heads(tensors, heads)
    return {name: tensor for name, tensor in tensors.items() if name not in of_heads}


def _shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
