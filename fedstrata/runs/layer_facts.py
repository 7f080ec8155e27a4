"""What a run folder tells of the layers of its model, for those who have no model at hand: ``layers.json``."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from fedstrata.layers import LayerMap
from fedstrata.methods import Method


@runtime_checkable
class _Masks(Protocol):
    """A part of a method that puts weights to zero, for a moment or for good."""

    def masked(self, layers: LayerMap) -> list[str]:
        """Name what is masked."""


def layer_facts(layers: LayerMap, method: Method) -> dict[str, Any]:
    """Describe the layers in the order of the forward pass, and name those in which the method masks weights."""
    rows = [
        {
            "layer": layer.name,
            "kind": layer.kind,
            "role": layer.role,
            "parameters": layer.size,
            **({} if layer.follows is None else {"follows": layer.follows}),
        }
        for layer in layers.all
    ]
    masked = {name for part in method.parts if isinstance(part, _Masks) for name in part.masked(layers)}
    return {
        "layers": rows,
        "masked": [layer.name for layer in layers.all if masked.intersection(layer.parameters)],
    }
