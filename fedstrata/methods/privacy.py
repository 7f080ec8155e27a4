"""Differential privacy of clients: clipped updates, Gaussian noise, and an account of what was spent."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.functional import gaussian_epsilon, gaussian_noise
from fedstrata.methods.contract.compatibility import defines
from fedstrata.methods.contract.part import Facts, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, Server, Training
from fedstrata.methods.mechanisms.masking import keep
from fedstrata.methods.mechanisms.shared import equal_weights
from fedstrata.rng import normal
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, align, squared_norm, subtract

_NEVER_NEGATIVE = "running_var"
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
    """

    claims: ClassVar[tuple[str, ...]] = ("keeps an account of privacy",)
    only_on_shared: ClassVar[bool] = True

    clip: float = parameter(1.0, "The norm to which an update is scaled down.", above=0)
    epsilon: float = parameter(8.0, "What a client may spend that takes part in all rounds.", above=0)
    delta: float = parameter(1e-5, "The delta of the account, well below one over all clients.", above=0, below=1)
    noise: float | None = parameter(
        None, "The noise multiplier; none: the smallest with which all rounds spend epsilon.", above=0
    )

    def objects_to(self, other: Part) -> str | None:
        """Refuse whatever lets more leave a client than its clipped update."""
        if defines(other, "survey"):
            return f"'{other.name}' asks clients about their data before a round, and '{self.name}' does not cover that"
        if defines(other, "merge") or defines(other, "examine"):
            return f"'{other.name}' looks at the replies of single clients, which '{self.name}' does not cover"
        if not other.one_support:
            return (
                f"under '{other.name}' each client sends entries of its own, "
                f"and '{self.name}' bounds what it can change only where all send the same"
            )
        return None

    def multiplier(self, rounds: int) -> float:
        """Return the noise multiplier z."""
        return _smallest_noise(self.epsilon, rounds, self.delta) if self.noise is None else self.noise

    def weigh(self, server: Server) -> Tensor:
        """Let all participants count alike."""
        return equal_weights(server)

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

    def refine(self, server: Server, new: Tensors) -> tuple[Tensors, Tensors]:
        """Keep variances from becoming negative, and count the participants."""
        whole = {
            name: tensor.clamp(min=0) if name.endswith(_NEVER_NEGATIVE) else tensor for name, tensor in new.items()
        }
        counted = server.memory["rounds"].index_add(
            0,
            torch.tensor(server.participants, device=server.sizes.device),
            torch.ones_like(server.sizes, dtype=torch.int64),
        )
        return whole, {"rounds": counted}

    def round_metrics(self, server: Server) -> dict[str, float]:
        """Tell what the client that took part most often has spent."""
        rounds = int(server.memory["rounds"].max())
        return {"privacy.epsilon": gaussian_epsilon(self.multiplier(server.rounds), rounds, self.delta)}


@methods.register("central-dp")
@dataclass(frozen=True)
class CentralDP(PrivateUpdates):
    r"""Clients clip their updates; the server puts noise on the mean (DP-FedAvg with fixed clipping).

    :math:`\hat w = w + \frac{1}{m} \sum_k \Delta_k \min(1, C / \|\Delta_k\|) + \mathcal{N}(0, (z C / m)^2)` over m
    participants. The guarantee is for whole clients: whoever sees all global models can hardly tell whether a client's
    update was there or was nothing. The server itself sees the updates and is trusted, unless secure aggregation hides
    them from it. The noise of a run with few clients drowns the model; the paper has thousands of clients.

    Training losses, test scores, sample sizes and label counts that clients report are not covered. Noise is drawn in
    floating point by a generator that is not cryptographic, in a deployment from a secret of the server.
    """

    facts: ClassVar[Facts] = Facts(
        "privacy",
        "McMahan et al., Learning Differentially Private Recurrent Language Models, ICLR 2018",
        "https://arxiv.org/abs/1710.06963",
    )
    needs_exact_uploads: ClassVar[bool] = True

    def adjust(self, server: Server, merged: Tensors) -> Tensors:
        """Put noise on the merged model."""
        scale = self.multiplier(server.rounds) * self.clip / len(server.participants)
        key = torch.tensor(server.secret_key(self.name), device=server.sizes.device)
        return {
            name: tensor + scale * normal(key, tensor.shape, place).to(tensor.dtype)
            if tensor.is_floating_point()
            else tensor
            for place, (name, tensor) in enumerate(merged.items())
        }


@methods.register("local-dp")
@dataclass(frozen=True)
class LocalDP(PrivateUpdates):
    r"""Clients clip their updates and put noise on them before they leave, so that nobody need be trusted.

    A client sends :math:`w + \Delta \min(1, C / \|\Delta\|) + \mathcal{N}(0, (2 z C)^2)`. The guarantee is for whole
    clients, against everybody: whoever sees all that a client sent can hardly tell its data from any other data, for
    two clipped updates are at most 2 C apart. The noise is much larger than in ``central-dp``. What a site sent too
    late for its round is not in the account.

    Training losses, test scores, sample sizes and label counts that clients report are not covered. Noise is drawn in
    floating point by a generator that is not cryptographic, in a deployment from a secret of the site.
    """

    facts: ClassVar[Facts] = Facts(
        "privacy",
        "Duchi, Jordan and Wainwright, Local Privacy and Statistical Minimax Rates, FOCS 2013; Gaussian noise after "
        "Balle and Wang, ICML 2018",
        "https://arxiv.org/abs/1302.3203",
    )

    def disturbed(self, clients: Clients, update: Tensor, place: int) -> Tensor:
        """Put the client's own noise on its update."""
        scale = 2 * self.multiplier(clients.rounds) * self.clip
        return update + scale * normal(clients.secret_keys(self.name), update.shape[1:], place).to(update.dtype)
