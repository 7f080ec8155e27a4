"""MOON: features near the global model's, far from the client's last ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstrata.methods.contract.declarations import Facts, Matter, Needs, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, LocalStep
from fedstrata.spec import parameter


@methods.register("moon")
@dataclass(frozen=True)
class Moon(Part):
    r"""FedAvg with a contrastive term: features near the global model's, far from the client's last ones.

    To the local loss comes :math:`\mu \, \ell`, the mean over samples of :math:`\ell = -\log \frac{e^{\cos(z, z_g) /
    \tau}}{e^{\cos(z, z_g) / \tau} + e^{\cos(z, z_p) / \tau}}` with the features :math:`z` of the model in training,
    :math:`z_g` of the global model as received and :math:`z_p` of the client's own model after the last round in which
    it took part; a client that has none yet has no such term (after the first round the released code takes its
    untrained model). What travels is as in FedAvg.

    Features are the input of the model's head. The authors' models have a projection of two layers in front of it,
    which softens the term; without one, a smaller ``mu`` than their default may be better (they tune it over 0.1, 1, 5
    and 10). The global and the previous model run in evaluation mode.

    Defaults:
        mu, temperature: QinbinLi/MOON, main.py.
    """

    facts: ClassVar[Facts] = Facts(
        "local objective",
        "Li et al., Model-Contrastive Federated Learning, CVPR 2021",
        "https://arxiv.org/abs/2103.16257",
    )
    touches: ClassVar[Touches] = Touches(relies_on=(Matter.SHARING,))

    mu: float = parameter(1.0, "The weight of the contrastive term.", low=0)
    temperature: float = parameter(0.5, "The temperature of the similarities (tau).", above=0)

    @property
    def needs(self) -> Needs:
        """Compare the features with those of the previous model."""
        return Needs(features=True, previous=True)

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        """Compare the features with those of the global and of the previous model, where there is one."""
        if clients.round == 1:
            return loss
        (_, of_global), (_, of_previous) = step.predict(step.received), step.predict(clients.previous)
        near, far = (_similarity(step.features, other) for other in (of_global, of_previous))
        contrast = self.mu * F.softplus((far - near) / self.temperature).mean(1)
        return loss + torch.where(clients.trained, contrast, 0.0)


def _similarity(features: Tensor, other: Tensor) -> Tensor:
    """Compute the cosine of each sample's features ``[K, B]``."""
    return F.cosine_similarity(features.flatten(2), other.flatten(2), dim=-1)
