"""Pretrained weights, read from a file into a model that has just been built."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from fedstrata import files
from fedstrata.errors import FedStrataError

WEIGHTS = "A safetensors file with pretrained weights, such as the model.safetensors of a run; none: drawn at random."
"""What a model's parameter ``weights`` means."""

_HEAD = "head."


def load_backbone(model: nn.Module, path: str | Path) -> nn.Module:
    """Copy pretrained weights into a model whose classifier is called ``head``, and return the same model.

    A head for another number of classes stays as it was initialised, and the file may have none. All other tensors must
    be the same on both sides, by name and shape; the first that is not is named.
    """
    path = Path(path).expanduser()
    found, wanted = files.from_safetensors(files.read_bytes(path), path), model.state_dict()
    if _head_shapes(found) != _head_shapes(wanted):
        found, wanted = _without_head(found), _without_head(wanted)
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


def _head_shapes(tensors: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items() if name.startswith(_HEAD)}


def _without_head(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(_HEAD)}
