"""Local differential privacy: clients put noise on their clipped updates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients
from fedstrata.methods.mechanisms.private_updates import PrivateUpdates


@methods.register("local-dp")
@dataclass(frozen=True)
class LocalDP(PrivateUpdates):
    r"""Clients clip their updates and put noise on them before they leave, so that nobody need be trusted.

    A client sends :math:`w + \Delta \min(1, C / \|\Delta\|) + \mathcal{N}(0, (2 z C)^2)`. The guarantee is for whole
    clients, against everybody: whoever sees all that a client sent can hardly tell its data from any other data, for
    two clipped updates are at most 2 C apart. The noise is much larger than in ``central-dp``.

    A real site draws its noise from the operating system, keeps its own account of all that it ever sent, also of what
    came too late for its round, answers a round for one model only, and refuses what would spend more than was said.
    In a simulation noise comes from the seed, so that it can be repeated, and anybody who knows the seed can take it
    off.

    Not covered are the training losses, test scores, sample sizes and label counts that clients report, and the mean
    and deviation of ``normalise``. Noise is drawn in floating point, whose last digits are no real numbers.
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
        return update + scale * clients.noise(self.name, update.shape[1:], place).to(update.dtype)
