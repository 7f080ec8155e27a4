"""What happens to the layers of the global model from round to round."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.diagnostics.contract import Diagnostic, Measured, Quantity, Seen, diagnostics
from fedstrata.layers import LayerMap
from fedstrata.private_torch import for_each
from fedstrata.stack import Tensors, constant


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


@dataclass(frozen=True)
class LayerNumbers:
    """A number of each of some layers ``[L]``, which stays where the models are until it is read."""

    layers: tuple[str, ...]
    numbers: Tensor


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


def measure_changes(layers: LayerMap, before: Tensors, after: Tensors, reference: Tensors) -> dict[str, LayerNumbers]:
    """Measure what :func:`layer_changes` tells, as numbers that stay where the models are: a GPU is not waited for."""
    measured = {"update": _updates(layers, before, after)}
    return {**measured, "cosine": _cosines(layers, reference, after)} if reference else measured


def read_changes(measured: Mapping[str, LayerNumbers]) -> dict[str, dict[str, float]]:
    """Bring what was measured of all layers from the device at once."""
    numbers = [of_layers.numbers for of_layers in measured.values() if of_layers.layers]
    brought = iter(torch.cat(numbers).tolist() if numbers else [])
    return {metric: {layer: next(brought) for layer in of_layers.layers} for metric, of_layers in measured.items()}


def _updates(layers: LayerMap, before: Tensors, after: Tensors) -> LayerNumbers:
    shared = _present({layer.name: layer.parameters for layer in layers.layers}, after)
    then, now = _chosen(before, shared), _chosen(after, shared)
    moved = _lengths(shared, _differences(now, then)) / _lengths(shared, then).clamp(min=1e-12)
    return LayerNumbers(tuple(shared), moved)


def _cosines(layers: LayerMap, reference: Tensors, model: Tensors) -> LayerNumbers:
    r"""Compute cosines from lengths, all layers at once: :math:`2 a \cdot b = |a|^2 + |b|^2 - |a - b|^2`."""
    shared = _present({layer.name: layer.weights for layer in layers.weighted}, model.keys() & reference.keys())
    now, then = _chosen(model, shared), _chosen(reference, shared)
    here, there, between = (_lengths(shared, tensors) for tensors in (now, then, _differences(now, then)))
    twice = here.square() + there.square() - between.square()
    return LayerNumbers(tuple(shared), twice / (2 * here.clamp(min=1e-8) * there.clamp(min=1e-8)))


def _present(layers: Mapping[str, Iterable[str]], names: Container[str]) -> dict[str, list[str]]:
    """Keep of the tensors of each layer those that are there, and the layers of which any is."""
    present = {layer: [name for name in tensors if name in names] for layer, tensors in layers.items()}
    return {layer: tensors for layer, tensors in present.items() if tensors}


def _chosen(model: Tensors, layers: Mapping[str, Sequence[str]]) -> list[Tensor]:
    return [model[name] for names in layers.values() for name in names]


def _differences(left: list[Tensor], right: list[Tensor]) -> Sequence[Tensor]:
    return for_each.sub(left, right) if left else ()


def _lengths(layers: Mapping[str, Sequence[str]], tensors: Sequence[Tensor]) -> Tensor:
    """Compute the length of each layer ``[L]``, whose tensors come in the order of the layers; in float64.

    A model has many small tensors, for each of which a GPU would wait longer than it computes.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    squares = torch.stack([*for_each.norm(tensors, 2, dtype=torch.float64)]).square()
    most, places, nothing = max(map(len, layers.values())), iter(range(len(tensors))), len(tensors)
    rows = [[next(places) for _ in names] + [nothing] * (most - len(names)) for names in layers.values()]
    of_layers = constant(tuple(place for row in rows for place in row), torch.int64, squares.device)
    return torch.cat((squares, squares.new_zeros(1)))[of_layers].view(len(rows), most).sum(1).sqrt()
