"""What happens to the layers of the global model from round to round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.diagnostics.contract import Diagnostic, Measured, Quantity, Seen, diagnostics
from fedstrata.layers import LayerMap
from fedstrata.stack import Tensors


@diagnostics.register("inertia")
@dataclass(frozen=True)
class Inertia(Diagnostic):
    r"""How much the layers of the server's model still turn: the cosine of each to itself in the round before.

    :math:`\cos(w_\ell^{t}, w_\ell^{t-1})` over the weights of a layer that travel. The cosine to a reference round
    (LIPS, Eq. 2) is measured in every run, as ``cosine``; both together tell a layer that has arrived somewhere from
    one that never left.
    """

    quantities: ClassVar[Mapping[str, Quantity]] = {
        "inertia.step": Quantity(
            "Inertia: cosine to the round before",
            "The cosine between a layer's weights after this round and after the one before: near 1, the round has "
            "hardly turned the layer; the lower, the more it learned in this round.",
            low=-1,
            high=1,
        )
    }

    def compute(self, seen: Seen, memory: Tensors) -> Measured:
        """Compare the server's model after the round with that before it."""
        sent = {name: tensor for name, tensor in seen.after.items() if name in seen.travelled}
        return Measured(layers={"inertia.step": layer_cosines(seen.layers, seen.before, sent)})


def layer_updates(layers: LayerMap, before: Tensors, after: Tensors) -> dict[str, float]:
    r"""Measure how far each shared layer moved in a round, relative to its size.

    :math:`\lVert w^{t+1} - w^t \rVert / \lVert w^t \rVert` over the layer's parameters in ``after``.
    """
    return read_changes({"update": _updates(layers, before, after)})["update"]


def layer_cosines(layers: LayerMap, reference: Tensors, model: Tensors) -> dict[str, float]:
    r"""Measure inertia: the cosine between each layer's weights now and in the reference round (LIPS, Eq. 1).

    A layer that keeps a cosine near 1 has stopped to learn.
    """
    return read_changes({"cosine": _cosines(layers, reference, model)})["cosine"]


def layer_changes(layers: LayerMap, before: Tensors, after: Tensors, reference: Tensors) -> dict[str, dict[str, float]]:
    """Measure both, the ``update`` and, where there is a reference, the ``cosine``."""
    return read_changes(measure_changes(layers, before, after, reference))


def measure_changes(layers: LayerMap, before: Tensors, after: Tensors, reference: Tensors) -> dict[str, Tensors]:
    """Measure what :func:`layer_changes` tells, as numbers that stay where the models are: a GPU is not waited for."""
    measured = {"update": _updates(layers, before, after)}
    return {**measured, "cosine": _cosines(layers, reference, after)} if reference else measured


def _updates(layers: LayerMap, before: Tensors, after: Tensors) -> Tensors:
    updates = {}
    for layer in layers.layers:
        shared = [name for name in layer.parameters if name in after]
        if shared:
            moved = _norm(after[name] - before[name] for name in shared)
            updates[layer.name] = moved / _norm(before[name] for name in shared).clamp(min=1e-12)
    return updates


def _cosines(layers: LayerMap, reference: Tensors, model: Tensors) -> Tensors:
    cosines = {}
    for layer in layers.weighted:
        shared = [name for name in layer.weights if name in model and name in reference]
        if shared:
            now, then = (
                torch.cat([tensors[name].to(torch.float64).flatten() for name in shared])
                for tensors in (model, reference)
            )
            cosines[layer.name] = torch.nn.functional.cosine_similarity(now, then, dim=0)
    return cosines


def read_changes(measured: Mapping[str, Tensors]) -> dict[str, dict[str, float]]:
    """Bring what was measured of all layers from the device at once."""
    tensors = [tensor for of_layers in measured.values() for tensor in of_layers.values()]
    brought = iter(torch.stack(tensors).tolist() if tensors else [])
    return {metric: {layer: next(brought) for layer in of_layers} for metric, of_layers in measured.items()}


def _norm(tensors: Iterable[Tensor]) -> Tensor:
    return torch.stack([tensor.to(torch.float64).square().sum() for tensor in tensors]).sum().sqrt()
