"""FedLAMA: layers on which clients agree are aggregated less often."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.functional import lama_cut
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Decision, Facts, Needs, Touches
from fedstrata.methods.contract.part import Kept, Metrics, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, ModelAndMemory, Outline, Server, Training
from fedstrata.methods.mechanisms.layer_choice import weights_of
from fedstrata.methods.mechanisms.shared import shared_parameters
from fedstrata.spec import parameter
from fedstrata.stack import Tensors


@methods.register("fedlama")
@dataclass(frozen=True)
class FedLAMA(Part):
    r"""Aggregate layers on which clients agree only every few rounds; in between each trains its own.

    A round is the base interval. Every ``factor`` rounds all layers are aggregated, and the server measures each
    weight's discrepancy :math:`d_l = \frac{1}{K} \sum_k \lVert u_l - w_{k,l} \rVert^2 / (\tau_l \dim u_l)`, where
    :math:`u_l` is the aggregated layer and :math:`\tau_l` the interval since its last aggregation. Layers in ascending
    order of :math:`d_l` get the long interval until :math:`1 - \lambda_l < \delta_l`, with :math:`\delta_l` their part
    of the total discrepancy and :math:`\lambda_l` their part of all weights (:func:`fedstrata.functional.lama_cut`).
    A layer that is not due travels in neither direction and goes on from where each client left it.

    Biases, norms and statistics are aggregated in every round, as in the released code; there they also count in the
    total discrepancy, here they do not. Participants change only when all layers were aggregated, as there, so nobody
    begins with stale layers; the last round aggregates all. No layer waits before the end of the ``warmup``, which the
    released code has and the paper does not. Each message to a client carries a bit for each layer. The intervals are
    in the run's layer metrics as ``interval``.

    Defaults:
        factor: swblaster/FedLAMA, config.py.
        warmup: swblaster/FedLAMA, solvers/fedlama.py.
    """

    facts: ClassVar[Facts] = Facts(
        "layers",
        "Lee, Zhang and Avestimehr, Layer-wise Adaptive Model Aggregation for Scalable Federated Learning, AAAI 2023",
        "https://arxiv.org/abs/2110.10302",
    )
    touches: ClassVar[Touches] = Touches(decides=(Decision.TRAVEL,))

    factor: int = parameter(2, "The long interval, in rounds.", low=1)
    warmup: int = parameter(6, "Rounds before the first layer may wait.", low=0)

    @property
    def needs(self) -> Needs:
        """The server measures how far the clients are apart."""
        return Needs(replies=True)

    def notes(self, outline: Outline) -> Iterable[str]:
        """Say that no layer waits in so few rounds."""
        decided = self.factor * (self.warmup // self.factor + 1)
        if self.factor > 1 and outline.rounds <= decided + 1:
            yield (
                f"'fedlama' decides for the first time after round {decided} which layers wait (factor={self.factor}, "
                f"warmup={self.warmup}), and the last round aggregates all: in {outline.rounds} rounds none does, and "
                f"it is 'fedavg'. Give a smaller 'warmup', or at least {decided + 2} rounds."
            )

    def keeps(self, layers: LayerMap) -> Kept:
        """Clients keep the weights that may have to wait."""
        return Kept(resident=weights_of(layers, "all"))

    def select(self, server: Server, count: int) -> tuple[int, ...]:
        """Choose new participants only after all layers were aggregated."""
        first = server.round - (server.round - 1) % self.factor
        return super().select(replace(server, round=first), count)

    # Which layers wait ------------------------------------------------------------------------------------------------

    def server_memory(self, server: Server) -> Tensors:
        """Let no layer wait at first."""
        return {"waits": torch.zeros(len(_weights(server)), dtype=torch.bool, device=server.sizes.device)}

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Let no layer wait at first."""
        shape = len(clients.ids), len(_weights(clients))
        return {"waits": torch.zeros(shape, dtype=torch.bool, device=clients.sizes.device)}

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Decide again which layers wait, whenever all were aggregated."""
        names, waited = _weights(server), server.memory["waits"]
        if not names or server.round % self.factor != 0 or server.round <= self.warmup:
            return model, server.memory
        intervals = 1 + (self.factor - 1) * waited
        sizes = [server.model[name].numel() for name in names]
        distances = torch.stack([_squared_distance(replies, name, model[name]) for name in names])
        discrepancy = distances / (intervals * intervals.new_tensor(sizes))
        longest = discrepancy.argsort(stable=True)[: lama_cut(discrepancy, sizes)]
        return model, {"waits": torch.zeros_like(waited).index_fill(0, longest, True)}

    def metrics(self, server: Server) -> Metrics:
        """Tell how often each layer is aggregated from now on; of several weights, the one that waits longest."""
        intervals: dict[str, float] = {}
        for name, long in zip(_weights(server), server.memory["waits"].tolist(), strict=True):
            layer = server.layers.of(name).name
            intervals[layer] = max(intervals.get(layer, 1.0), float(self.factor if long else 1))
        return {"interval": intervals}

    # What travels -----------------------------------------------------------------------------------------------------

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send what was aggregated in the round before, and which layers wait."""
        due = message.without(self._waiting(server, server.round - 1, server.memory["waits"]))
        return due.plus({self._wire: server.memory["waits"][None]})

    def start(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Note which layers wait."""
        return model, {"waits": message.tensors[self._wire].expand_as(clients.memory["waits"]).contiguous()}

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send what is aggregated in this round."""
        return message.without(self._waiting(clients, clients.round, clients.memory["waits"][0]))

    @property
    def plans_ahead(self) -> str | None:
        """What depends on how many rounds there are in all."""
        return "it aggregates all layers in the last round"

    def _waiting(self, view: Clients | Server, round: int, waits: Tensor) -> set[str]:
        """Name the weights that are not aggregated at the end of a round."""
        if round % self.factor == 0 or round >= view.rounds:
            return set()
        return {name for name, long in zip(_weights(view), waits.tolist(), strict=True) if long}

    @property
    def _wire(self) -> str:
        return f"{self.name}/waits"


def _weights(view: Clients | Server) -> list[str]:
    """Name the weights whose interval is adapted."""
    shared = set(shared_parameters(view))
    return [name for name in weights_of(view.layers, "all") if name in shared]


def _squared_distance(replies: Message, name: str, merged: Tensor) -> Tensor:
    """Measure how far clients are from the aggregated tensor, together, as only proportions count; an entry that a
    client did not send does not.
    """
    distance = replies.tensors[name] - merged
    distance = distance * replies.masks[name] if name in replies.masks else distance
    return distance.to(torch.float64).square().sum()
