"""Clients that lie within the rules, in simulation: what robust methods are tested with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.functional import alie
from fedstrata.losses import cross_entropy
from fedstrata.methods.contract.declarations import Decision, Facts, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, LocalStep, Message, Outline, Server
from fedstrata.methods.mechanisms.masking import keep
from fedstrata.methods.mechanisms.robust_merging import updates_of
from fedstrata.rng import client_keys, normal
from fedstrata.spec import parameter
from fedstrata.transfer import numbers_on

_STRENGTHS = {"sign-flip": 1.0, "scale": 10.0, "alie": 1.5, "noise": 1.0}
"""How strong a lie is where the experiment does not say."""
LABEL_FLIP = "label-flip"


@methods.register("attack")
@dataclass(frozen=True)
class Attack(Part):
    r"""Let the first clients lie, to see what a method makes of it; in simulation only.

    All of them keep to the protocol: their messages have the names, shapes and sizes of honest ones. From the model
    :math:`w` that they received, their honest update :math:`\Delta_k` and the strength s, they send

    - ``sign-flip``: :math:`w - s \Delta_k`, the way back (strength 1);
    - ``scale``: :math:`w + s \Delta_k`, more than their share (10);
    - ``alie``, "A Little Is Enough": all the same, :math:`w + \mu - s \sigma` entry by entry, with mean and deviation
      of the liars' own honest updates: they know each other, and stay within the spread of honest clients (1.5);
    - ``noise``: :math:`w + s \, \mathcal{N}(0, 1)` (1);
    - ``label-flip``: what they honestly train, with class y of C taken for :math:`C - 1 - y`; it has no strength.

    Lies take the place of replies after all that clients do, so that a liar does not clip, mask out or add noise
    because a method asks it to, and before the server looks at any. No variance becomes negative, and counters are
    true. Which clients are the first is chance with most partitions; their test samples are as those of the others, and
    ``global.accuracy`` is on the global test set, so that no score is a lie. Training losses include the liars'.

    Defaults:
        kind, clients: ours.
        strength: ours; of alie moranant/attacking_distributed_learning, main.py.
    """

    facts: ClassVar[Facts] = Facts(
        "robust",
        "Baruch et al., A Little Is Enough: Circumventing Defenses For Distributed Learning, NeurIPS 2019 (alie)",
        "https://arxiv.org/abs/1902.06156",
        not_on_network="it lets clients lie on purpose, to try methods out in simulation",
    )

    kind: str = parameter("sign-flip", "What the liars do.", choices=(*_STRENGTHS, LABEL_FLIP))
    clients: int = parameter(2, "How many lie: the clients 0, 1, ...", low=1)
    strength: float | None = parameter(None, "How strong the lie is (s); none: as told for its kind.", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kind == LABEL_FLIP and self.strength is not None:
            raise FedStrataError(f"'{self.name}' of the kind {LABEL_FLIP} has no strength; leave strength= out.")

    @property
    def touches(self) -> Touches:  # type: ignore[override]
        """Training on false labels is another loss; all else is done to replies."""
        lies = Touches(decides=(Decision.LIES,))
        return lies.also(decides=(Decision.LOSS,)) if self.kind == LABEL_FLIP else lies

    def notes(self, outline: Outline) -> Iterator[str]:
        """Refuse more liars than clients; say where nobody is honest, or where a lie is none."""
        if self.clients > outline.clients:
            raise FedStrataError(
                f"'{self}' lets {self.clients} clients lie, and there are {outline.clients}; give fewer liars."
            )
        if self.clients == outline.clients:
            yield f"'{self}' lets all clients lie."
        if self.kind == "alie" and self.clients == 1:
            yield f"'{self}' is no lie: one client alone has no deviation to hide in; give more clients=..."

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        """Train on false labels."""
        if self.kind != LABEL_FLIP:
            return loss
        false = cross_entropy(step.outputs, step.outputs.shape[-1] - 1 - step.labels).mean(1)
        return torch.where(clients.numbers < self.clients, false, loss)

    def admit(self, server: Server, replies: Message) -> Message:
        """Put lies in the place of what some clients sent."""
        liars = self._liars(server.participants, server.sizes.device)
        updates = updates_of(server, replies)
        if self.kind == LABEL_FLIP or not bool(liars.any()):
            return replies
        lies = {}
        for place, (name, update) in enumerate(updates.items()):
            lie = server.model[name] + self._lie(server, update[liars], place)
            lie = lie.clamp(min=0) if name in server.layers.variance_names else lie
            lies[name] = replies.tensors[name].index_copy(0, liars.nonzero()[:, 0], lie)
        return replace(replies, tensors={**replies.tensors, **keep(lies, replies.masks)})

    def _lie(self, server: Server, updates: Tensor, place: int) -> Tensor:
        """Turn the liars' honest updates of one tensor ``[L, ...]`` into what they send."""
        strength = _STRENGTHS[self.kind] if self.strength is None else self.strength
        if self.kind == "sign-flip":
            return -strength * updates
        if self.kind == "scale":
            return strength * updates
        if self.kind == "alie":  # who has diverged has no lie to hide
            return alie(updates, strength).expand_as(updates) if bool(torch.isfinite(updates).all()) else updates
        liars = [client for client in server.participants if client < self.clients]
        keys = client_keys(server.seed, server.round, liars, self.name, updates.device)
        return strength * normal(keys, updates.shape[1:], place).to(updates.dtype)

    def _liars(self, ids: Sequence[int], device: torch.device) -> Tensor:
        """Tell which of some clients lie ``[K]``."""
        return numbers_on(ids, device) < self.clients
