"""FedLWS: shrink each layer of the merged model by how much the clients disagree about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.functional import shrink, shrinking
from fedstrata.functional.lws import Shrinking
from fedstrata.layers import Layer
from fedstrata.methods.contract.declarations import Facts, Needs, Touches
from fedstrata.methods.contract.part import Metrics, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Message, ModelAndMemory, Server
from fedstrata.spec import parameter
from fedstrata.stack import Stack, Tensors

LOWEST, HIGHEST = 0.01, 0.2
"""The bounds of beta times tau in the released code."""


@methods.register("lws")
@dataclass(frozen=True)
class LayerWiseShrinking(Part):
    r"""After any aggregation, multiply each layer of the new global model by :math:`\gamma_l \le 1`.

    :math:`\gamma_l = \frac{\lVert w_l \rVert}{\beta \tau_l \lVert \hat w_l - w_l \rVert + \lVert w_l \rVert}` with
    :math:`\tau_l` the mean distance of the clients' updates of the layer from their mean (Eq. 7, 8): the more the
    clients disagree, the more a layer shrinks. A layer is a convolution or linear layer together with the norm that
    follows it; only parameters are shrunk.

    ``layers=model`` takes one factor for the whole model; ``fixed`` takes 1.00, 0.99, 0.98, ... by depth, and ``gamma``
    one fixed factor for all (the two of Fig. 1b); ``mode`` splits the effect into its two terms (Table 10). ``clamp``
    bounds :math:`\beta\tau` to [0.01, ``highest``] as the released code does, against the paper: then even a tiny beta
    shrinks.

    The run's layer metrics tell the factors as ``gamma``, the disagreement :math:`\tau_l` as ``tau``, and as ``r`` the
    balance :math:`r_l = \frac{(1 - \gamma_l) \lVert w_l \rVert}{\gamma_l \lVert \hat w_l - w_l \rVert}` (Eq. 5): of the
    equation's factors that is :math:`\beta\tau_l`, of fixed ones what Fig. 1a compares.

    ``layers=released`` takes the groups of the released code, which differ on models with batch norm: a group ends with
    a tensor that has "bias" in its name, so that running statistics and the counter of batches fall into the group of
    the layer after them. They count in the norms and are shrunk too; the counter is cut off to a whole number. In the
    first rounds that counter outweighs everything else and the factors are far smaller than the equation's (the
    published ones, 0.92 for ResNet-20, are reached only so); later it holds them near 1. What comes after the last bias
    is left alone. Tensors stand in the order of the forward pass. All of the released code is ``lws(beta=0.03,
    layers=released, clamp=true)``; on transformers it has fewer groups, a block each.

    ``layers=with-buffers`` takes each layer together with its own norm, buffers and all. The factors of ResNet-20 that
    the authors drew (Fig. 9a) are of such layers: 0.85, 0.89 and 0.92 in the three stages after the first round and
    0.9945 in all layers after the eleventh is what the counter alone makes of :math:`\beta\tau = 0.05` and 21 steps a
    round. That is ``lws(beta=0.01, layers=with-buffers, clamp=true, highest=0.05)``.

    Defaults:
        beta: paper, Appendix C.4 (CNN models).
        layers, mode, clamp, gamma: paper, Algorithm 1.
        highest: ChanglongShi/FedLWS, args.py.
        fixed_step: paper, Section 4.2.
    """

    facts: ClassVar[Facts] = Facts(
        "aggregation", "Shi et al., FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking, ICLR 2025"
    )
    touches: ClassVar[Touches] = Touches()

    beta: float = parameter(0.1, "How strongly disagreement shrinks (paper: 0.1 for CNNs, 0.01 for ResNets).", low=0)
    layers: str = parameter(
        "each",
        "One factor for each layer (also with its buffers), one for the whole model, fixed by depth, or for each group "
        "of the released code.",
        choices=("each", "with-buffers", "model", "fixed", "released"),
    )
    mode: str = parameter(
        "both", "Shrink the weights, only regularise, or only shorten the step.", choices=("both", "reg", "opt")
    )
    clamp: bool = parameter(False, "Bound beta times tau as the released code does.")
    highest: float = parameter(HIGHEST, "With clamp: the upper bound; the lower one is 0.01.", low=LOWEST)
    fixed_step: float = parameter(
        0.01, "With fixed factors: by how much each deeper layer's factor is smaller.", low=0, below=1
    )

    gamma: float | None = parameter(
        None, "One fixed factor for the whole model, instead of the equation's.", above=0, high=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma is not None and self.layers in ("fixed", "released"):
            raise FedStrataError(
                f"'{self.name}' has gamma={self.gamma}, one fixed factor for the whole model, and "
                f"layers={self.layers}, which divides it otherwise; give one of them."
            )
        if self.clamp and (self.gamma is not None or self.layers == "fixed"):
            raise FedStrataError(
                f"'{self.name}' has clamp=true, which bounds beta times tau, and fixed factors, which need neither; "
                "give one of them."
            )
        if self.highest != HIGHEST and not self.clamp:
            raise FedStrataError(
                f"'{self.name}' has highest={self.highest:g}, a bound of beta times tau, which only clamp=true sets; "
                "give both or neither."
            )

    @property
    def needs(self) -> Needs:
        """Look at the clients' updates."""
        return Needs(replies=True)

    def server_memory(self, server: Server) -> Tensors:
        """Remember the last factors, and what they come from."""
        first = Shrinking(gamma=1.0, tau=0.0, r=0.0)
        return _remembered({layer: first for layer, _ in self._groups(server)})

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Shrink the layers that clients sent."""
        shrunk, found = dict(model), {}
        for depth, (layer, names) in enumerate(self._groups(server)):
            sent = [name for name in names if name in replies.tensors]
            if sent:
                found[layer] = self._shrinking(depth, sent, server, replies, model)
                for name in sent:  # a counter becomes a whole number again
                    new = shrink(server.model[name], model[name], found[layer].gamma, self.mode)
                    shrunk[name] = new.to(model[name].dtype)
        return shrunk, server.memory | _remembered(found)

    def _shrinking(self, depth: int, names: list[str], server: Server, replies: Message, new: Tensors) -> Shrinking:
        fixed = max(0.0, 1 - self.fixed_step * depth) if self.layers == "fixed" else self.gamma
        old = [server.model[name] for name in names]
        updates = [_updates(replies, name, server.model[name]) for name in names]
        step = [new[name] - server.model[name] for name in names]
        clamp = (LOWEST, self.highest) if self.clamp else None
        return shrinking(old, updates, None, self.beta, step=step, clamp=clamp, fixed=fixed)

    def _groups(self, server: Server) -> Iterator[tuple[str, list[str]]]:
        """Divide what is shared into what is shrunk by one factor, in the order of the forward pass."""
        if self.layers == "released":
            yield from _released_groups(server)
            return
        blocks = [
            (block[0].name, [name for layer in block for name in self._names(layer) if name in server.model])
            for block in server.layers.blocks()
        ]
        if self.layers == "model" or self.gamma is not None:
            yield "(model)", [name for _, names in blocks for name in names]
        else:
            yield from ((layer, names) for layer, names in blocks if names)

    def _names(self, layer: Layer) -> tuple[str, ...]:
        """Which tensors of a layer count in its factor, and are shrunk by it."""
        return layer.names if self.layers == "with-buffers" else layer.parameters

    def metrics(self, server: Server) -> Metrics:
        """Tell the factors of the round, and what they come from."""
        return {
            number: {layer: float(value) for layer, value in server.memory.group(number).items()}
            for number in Shrinking._fields
        }


def _remembered(found: Mapping[str, Shrinking]) -> Stack:
    """Put what was found for each layer into groups: the factors, the disagreements, the balances."""
    numbers = {
        f"{number}/{layer}": torch.tensor(value, dtype=torch.float64)
        for layer, one in found.items()
        for number, value in one._asdict().items()
    }
    return Stack(numbers)


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
