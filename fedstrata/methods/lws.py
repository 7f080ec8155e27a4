"""FedLWS: shrink each layer of the merged model by how much the clients disagree about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.functional import shrink, shrink_factor
from fedstrata.methods.contract.declarations import Facts, Needs, Touches
from fedstrata.methods.contract.part import Metrics, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Message, ModelAndMemory, Server
from fedstrata.spec import parameter
from fedstrata.stack import Tensors

RELEASED_CLAMP = (0.01, 0.2)


@methods.register("lws")
@dataclass(frozen=True)
class LayerWiseShrinking(Part):
    r"""After any aggregation, multiply each layer of the new global model by :math:`\gamma_l \le 1`.

    :math:`\gamma_l = \frac{\lVert w_l \rVert}{\beta \tau_l \lVert \hat w_l - w_l \rVert + \lVert w_l \rVert}` with
    :math:`\tau_l` the mean distance of the clients' updates of the layer from their mean (Eq. 7, 8): the more the
    clients disagree, the more a layer shrinks. A layer is a convolution or linear layer together with the norm that
    follows it; only parameters are shrunk.

    ``layers=model`` takes one factor for the whole model; ``fixed`` takes 1.00, 0.99, 0.98, ... by depth (the study in
    Fig. 1b); ``mode`` splits the effect into its two terms (Table 10). ``clamp`` bounds :math:`\beta\tau` to [0.01,
    0.2] as the released code does, against the paper: then even a tiny beta shrinks. The factors are in the run's layer
    metrics as ``gamma``.

    ``layers=released`` takes the groups of the released code, which differ on models with batch norm: a group ends with
    a tensor that has "bias" in its name, so that running statistics and the counter of batches fall into the group of
    the layer after them. They count in the norms and are shrunk too; the counter is cut off to a whole number. In the
    first rounds that counter outweighs everything else and the factors are far smaller than the equation's (the
    published ones, 0.92 for ResNet-20, are reached only so); later it holds them near 1. What comes after the last bias
    is left alone. Tensors stand in the order of the forward pass. All of the released code is ``lws(beta=0.03,
    layers=released, clamp=true)``.
    """

    facts: ClassVar[Facts] = Facts(
        "aggregation", "Shi et al., FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking, ICLR 2025"
    )
    touches: ClassVar[Touches] = Touches()

    beta: float = parameter(0.1, "How strongly disagreement shrinks (paper: 0.1 for CNNs, 0.01 for ResNets).", low=0)
    layers: str = parameter(
        "each",
        "One factor for each layer, one for the whole model, fixed by depth, or for each group of the released code.",
        choices=("each", "model", "fixed", "released"),
    )
    mode: str = parameter(
        "both", "Shrink the weights, only regularise, or only shorten the step.", choices=("both", "reg", "opt")
    )
    clamp: bool = parameter(False, "Bound beta times tau as the released code does.")
    fixed_step: float = parameter(
        0.01, "With fixed factors: by how much each deeper layer's factor is smaller.", low=0, below=1
    )

    @property
    def needs(self) -> Needs:
        """Look at the clients' updates."""
        return Needs(replies=True)

    def server_memory(self, server: Server) -> Tensors:
        """Remember the last factors."""
        return {name: torch.ones((), dtype=torch.float64) for name, _ in self._groups(server)}

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Shrink the layers that clients sent."""
        shrunk, factors = dict(model), dict(server.memory)
        for depth, (layer, names) in enumerate(self._groups(server)):
            sent = [name for name in names if name in replies.tensors and name in model]
            if sent:
                factor = self._factor(depth, sent, server, replies, model)
                for name in sent:  # a counter becomes a whole number again
                    shrunk[name] = shrink(server.model[name], model[name], factor, self.mode).to(model[name].dtype)
                factors[layer] = torch.tensor(factor, dtype=torch.float64)
        return shrunk, factors

    def _factor(self, depth: int, names: list[str], server: Server, replies: Message, new: Tensors) -> float:
        if self.layers == "fixed":
            return max(0.0, 1 - self.fixed_step * depth)
        old = [server.model[name] for name in names]
        updates = [_updates(replies, name, server.model[name]) for name in names]
        step = [new[name] - server.model[name] for name in names]
        clamp = RELEASED_CLAMP if self.clamp else None
        return shrink_factor(old, updates, None, self.beta, step=step, clamp=clamp)

    def _groups(self, server: Server) -> Iterator[tuple[str, list[str]]]:
        """Divide what is shared into what is shrunk by one factor, in the order of the forward pass."""
        if self.layers == "released":
            yield from _released_groups(server)
            return
        blocks = [
            (block[0].name, [name for layer in block for name in layer.parameters if name in server.model])
            for block in server.layers.blocks()
        ]
        if self.layers == "model":
            yield "(model)", [name for _, names in blocks for name in names]
        else:
            yield from ((layer, names) for layer, names in blocks if names)

    def metrics(self, server: Server) -> Metrics:
        """Tell the factors of the round."""
        return {"gamma": {layer: float(factor) for layer, factor in server.memory.items()}}


def _released_groups(server: Server) -> Iterator[tuple[str, list[str]]]:
    """Divide all shared tensors, buffers too, after those with "bias" in their names; what is left has no group."""
    group: list[str] = []
    named: set[str] = set()
    for name in (name for layer in server.layers.all for name in layer.names if name in server.model):
        group.append(name)
        if "bias" in name:
            layer = server.layers.of(name).name
            label = name if layer in named else layer
            named.add(label)
            yield label, group
            group = []


def _updates(replies: Message, name: str, old: Tensor) -> Tensor:
    """Return what each client changed; an entry that a client did not send counts as unchanged."""
    update = replies.tensors[name] - old
    return update if name not in replies.masks else update * replies.masks[name]
