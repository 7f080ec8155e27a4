"""Which layers a method works on, as its parameter ``layers`` says."""

from __future__ import annotations

from fnmatch import fnmatchcase

from fedstrata.errors import unknown_name
from fedstrata.layers import Layer, LayerMap


def choose_layers(layers: LayerMap, pattern: str) -> tuple[Layer, ...]:
    """Choose layers with weights.

    ``pattern`` is a role (``first``, ``middle``, ``last``), ``all``, or names with wildcards joined by '|'. The weights
    of norm layers are never chosen.
    """
    if pattern == "all":
        return layers.weighted
    if pattern in ("first", "middle", "last"):
        return tuple(layer for layer in layers.weighted if layer.role == pattern)
    patterns = pattern.split("|")
    for one in patterns:
        if not any(fnmatchcase(layer.name, one) for layer in layers.weighted):
            raise unknown_name("layer with weights that matches", one, [layer.name for layer in layers.weighted])
    return tuple(layer for layer in layers.weighted if any(fnmatchcase(layer.name, one) for one in patterns))


def weights_of(layers: LayerMap, pattern: str) -> list[str]:
    """Name all weight tensors of the chosen layers, without biases.

    A weight that several layers use is chosen with the first of them.
    """
    return [name for layer in choose_layers(layers, pattern) for name in layer.weights]


def weights_elsewhere(layers: LayerMap, pattern: str) -> list[str]:
    """Say of chosen layers that use a weight of a layer that is not chosen, so that it is not chosen either."""
    chosen = set(weights_of(layers, pattern))
    return [
        f"The layer '{layer.name}' uses '{name}' of '{layers.of(name).name}', which is not among the chosen layers"
        for layer in choose_layers(layers, pattern)
        for name in layer.tied
        if name in layers.of(name).weights and name not in chosen
    ]


def biases_of(layers: LayerMap) -> list[str]:
    """Name the biases of all layers with weights, by what modules call them: ``bias``, ``in_proj_bias`` and so on."""
    return [name for layer in layers.weighted for name in layer.parameters if "bias" in name.rpartition(".")[2]]
