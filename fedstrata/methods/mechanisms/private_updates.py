"""Differential privacy of clients: clipped updates, Gaussian noise, and an account of what was spent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.functional import gaussian_epsilon, gaussian_noise
from fedstrata.methods.contract.declarations import Decision, Matter, Touches
from fedstrata.methods.contract.part import Metrics, Part
from fedstrata.methods.contract.views import Clients, Declared, Message, ModelAndMemory, Server, Training
from fedstrata.methods.mechanisms.masking import keep
from fedstrata.methods.mechanisms.shared import equal_weights, rows_of
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, align, squared_norm, subtract

_smallest_noise = cache(gaussian_noise)


@dataclass(frozen=True)
class PrivateUpdates(Part):
    r"""What central and local differential privacy have in common.

    A client sends what it received plus its update, all shared tensors together, scaled down to a norm of at most C:
    :math:`w + \Delta \min(1, C / \|\Delta\|)`. All participants count alike. Counters stay as they were received. The
    running statistics of norm layers, which move far, take most of the norm where they are shared: ``fedbn`` keeps them
    at the clients.

    The account is kept for every client: with a noise multiplier z, a client that took part in n rounds has spent the
    :math:`\varepsilon` of :func:`fedstrata.functional.gaussian_epsilon`, and the largest is the metric
    ``privacy.epsilon`` of the round. Selection of clients is no secret here, so nothing is gained by it.

    Defaults:
        clip, epsilon, delta, noise: ours; what is right depends on the task and the number of clients.
    """

    touches: ClassVar[Touches] = Touches(
        decides=(Decision.PRIVACY,), relies_on=(Matter.SHARING, Matter.ONLY_UPDATES, Matter.SAME_ENTRIES)
    )
    refines_merged: ClassVar[bool] = True

    clip: float = parameter(1.0, "The norm to which an update is scaled down.", above=0)
    epsilon: float = parameter(8.0, "What a client may spend that takes part in all rounds.", above=0)
    delta: float = parameter(1e-5, "The delta of the account, well below one over all clients.", above=0, below=1)
    noise: float | None = parameter(
        None, "The noise multiplier; none: the smallest with which all rounds spend epsilon.", above=0
    )

    @property
    def plans_ahead(self) -> str | None:
        """What depends on how many rounds there are in all."""
        return "its noise is chosen so that all rounds together spend epsilon" if self.noise is None else None

    def multiplier(self, rounds: int) -> float:
        """Return the noise multiplier z."""
        return _smallest_noise(self.epsilon, rounds, self.delta) if self.noise is None else self.noise

    def weigh(self, declared: Declared) -> Tensor:
        """Let all participants count alike."""
        return equal_weights(declared)

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send the update clipped."""
        more = [*(name for name in message.tensors if name not in training.received), *message.numbers]
        if more:
            raise FedStrataError(
                f"'{self.name}' covers the tensors of the model, and a part also sends '{more[0]}'; leave it out."
            )
        received = {name: training.received[name] for name in message.tensors}
        sent = {name: tensor for name, tensor in message.tensors.items() if tensor.is_floating_point()}
        updates = keep(subtract(sent, received), message.masks)
        if not updates:
            return message
        norms = squared_norm({name: update.to(torch.float64) for name, update in updates.items()}).sqrt()
        factors = self.clip / norms.clamp(min=self.clip)
        clipped = {
            name: received[name] + self.disturbed(clients, update * align(factors, update).to(update.dtype), place)
            for place, (name, update) in enumerate(updates.items())
        }
        return replace(message, tensors={**received, **keep(clipped, message.masks)})

    def disturbed(self, clients: Clients, update: Tensor, place: int) -> Tensor:
        """Put noise on a clipped update ``[K, ...]`` before it leaves its client."""
        return update

    # The account ------------------------------------------------------------------------------------------------------

    def server_memory(self, server: Server) -> Tensors:
        """Count in how many rounds each client took part."""
        return {"rounds": torch.zeros(server.clients, dtype=torch.int64, device=server.sizes.device)}

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Put the server's noise on the merged model, and count the participants; no variance becomes negative."""
        variances = server.layers.variance_names
        whole = {
            name: tensor.clamp(min=0) if name in variances else tensor
            for name, tensor in self.published(server, model).items()
        }
        counted = server.memory["rounds"].index_add(0, rows_of(server), torch.ones_like(server.sizes))
        return whole, {"rounds": counted}

    def published(self, server: Server, merged: Tensors) -> Tensors:
        """Put noise on the merged model before anybody sees it."""
        return merged

    def metrics(self, server: Server) -> Metrics:
        """Tell what the client that took part most often has spent."""
        rounds = int(server.memory["rounds"].max())
        return {"privacy.epsilon": gaussian_epsilon(self.multiplier(server.rounds), rounds, self.delta)}
