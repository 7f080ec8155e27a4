"""How steep the clients' local losses are in each layer, before and after local training, and how far training goes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.diagnostics.contract import WHOLE_MODEL, Diagnostic, Measured, Need, Quantity, Seen, diagnostics
from fedstrata.layers import LayerMap
from fedstrata.spec import parameter
from fedstrata.stack import Stack, Tensors, per_client, subtract

_BATCH = 256


@diagnostics.register("norms")
@dataclass(frozen=True)
class Norms(Diagnostic):
    r"""Norms of the clients' gradients and updates in each layer, before and after local training.

    :math:`\lVert \nabla_\ell F_k(w) \rVert_2` of client k's mean loss over all its training samples, at the model that
    it received and at the one that it ended with, and :math:`\lVert w_{k,\ell} - w_\ell \rVert_2` of what training did
    to the layer. The mean over the participants stands in the layers' table (LIPS, Figures 5 c-d and 9 c-d: after local
    training), each client's own in the table of diagnostics.

    The gradient is that of the model in training mode, with the experiment's loss, without data augmentation; a method
    that trains other weights than those of the model has it taken through them.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.MODELS, Need.DATA})
    quantities: ClassVar[Mapping[str, Quantity]] = {
        "norms.gradient_before": Quantity(
            "Gradient norm before local training",
            "How steep the clients' own losses are in a layer of the model that they receive: near 0, their data asks "
            "for no change of the layer; high, much is still to be learned there.",
            low=0,
            logarithmic=True,
        ),
        "norms.gradient_after": Quantity(
            "Gradient norm after local training",
            "How steep the clients' own losses still are in a layer after their training: near 0, each has fitted its "
            "data, and the layer would not move further; high, the layer is still being pulled.",
            low=0,
            logarithmic=True,
        ),
        "norms.update": Quantity(
            "Norm of the clients' updates",
            "How far local training moves a layer, in the mean over the clients: near 0, clients leave it as it came.",
            low=0,
            logarithmic=True,
        ),
    }

    every: int = parameter(1, "The rounds from one measurement to the next; the last round is always measured.", low=1)

    def due(self, round: int, rounds: int) -> bool:
        """Measure every so many rounds, and in the last one."""
        return round % self.every == 0 or round == rounds

    def compute(self, seen: Seen, memory: Stack) -> Measured:
        """Take the gradients over all samples of each participant, at both ends of its training."""
        assert seen.probe is not None
        draw = self.draw()
        moved = subtract({name: seen.trained[name] for name in seen.layers.parameter_names}, seen.received)
        norms = {
            "norms.gradient_before": client_norms(
                seen.layers, seen.probe.gradients(seen.received, _BATCH, all_samples=True, draw=draw)
            ),
            "norms.gradient_after": client_norms(
                seen.layers, seen.probe.gradients(seen.trained, _BATCH, all_samples=True, draw=draw)
            ),
            "norms.update": client_norms(seen.layers, moved),
        }
        means = {
            metric: {layer: values.mean() for layer, values in layers.items() if layer != WHOLE_MODEL}
            for metric, layers in norms.items()
        }
        return Measured(layers=means, clients_in_layers=norms)


def client_norms(layers: LayerMap, stack: Tensors) -> dict[str, Tensor]:
    """Compute each client's Euclidean norm over the parameters of each layer, and of all together: ``[K]``.

    >>> from torch import nn
    >>> layers = LayerMap.read(nn.Sequential(nn.Linear(2, 1)), (2,))
    >>> client_norms(layers, {"0.weight": torch.tensor([[[3.0, 0.0]]]), "0.bias": torch.tensor([[4.0]])})
    {'0': tensor([5.], dtype=torch.float64), '': tensor([5.], dtype=torch.float64)}
    """
    squares = {}
    for layer in layers.layers:
        own = [per_client(stack[name].to(torch.float64)).square().sum(1) for name in layer.parameters if name in stack]
        if own:
            squares[layer.name] = torch.stack(own).sum(0)
    if squares:
        squares[WHOLE_MODEL] = torch.stack(list(squares.values())).sum(0)
    return {name: total.sqrt() for name, total in squares.items()}
