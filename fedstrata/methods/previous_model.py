"""Methods in which a client compares its model with the one that it had before: pFedSD and MOON."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.losses import distillation
from fedstrata.methods.contract.part import Facts, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Step, Training
from fedstrata.methods.mechanisms.layer_choice import DECIDES_WHAT_IS_USED
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, align


@dataclass(frozen=True)
class PreviousModel(Part, ABC):
    """What both share: each client keeps its whole model as its last local training left it.

    A client that has not trained yet has none, and trains as in FedAvg.
    """

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Make room for the model, and note that there is none."""
        return {**_under_previous(model), "trained": torch.zeros_like(clients.sizes, dtype=torch.bool)}

    def remember(self, clients: Clients, training: Training) -> Tensors:
        """Keep the model that was just trained."""
        return {**_under_previous(training.trained), "trained": torch.ones_like(clients.memory["trained"])}

    def loss(self, clients: Clients, step: Step) -> Tensor | None:
        """Add the comparison, where there is something to compare with."""
        if clients.round == 1:
            return None
        return torch.where(clients.memory["trained"], self.comparison(step, previous_model(clients)), 0.0)

    @abstractmethod
    def comparison(self, step: Step, previous: Tensors) -> Tensor:
        """Compare the model in training with the previous one: ``[K]``."""


def previous_model(clients: Clients) -> Tensors:
    """Find each client's previous model in its memory."""
    prefix = "previous/"
    return {name.removeprefix(prefix): own for name, own in clients.memory.items() if name.startswith(prefix)}


def _under_previous(model: Tensors) -> Tensors:
    return {f"previous/{name}": tensor for name, tensor in model.items()}


@methods.register("pfedsd")
@dataclass(frozen=True)
class PFedSD(PreviousModel):
    r"""FedAvg in which each client's previous model teaches its new one, so that it stays personal.

    The local loss is :math:`\mathrm{CE}(f_w) + \lambda T^2 \, \mathrm{KL}(\mathrm{softmax}(v_k / T) \,\|\,
    \mathrm{softmax}(w / T))`, where the teacher :math:`v_k` is the client's own model after the last round in which it
    took part, in evaluation mode. Before the first one there is no teacher. The model is sent as in FedAvg; the client
    uses the one that it has just trained, not the average, until it trains again.

    The defaults are those of the authors' code; Fling's, which LIPS builds on, are ``strength=0.5, temperature=3``.
    """

    facts: ClassVar[Facts] = Facts(
        "personal layers and models",
        "Jin et al., Personalized Edge Intelligence via Federated Self-Knowledge Distillation, TPDS 2023",
    )
    claims: ClassVar[tuple[str, ...]] = (DECIDES_WHAT_IS_USED,)

    strength: float = parameter(1.0, "The weight of the teacher (lambda).", low=0)
    temperature: float = parameter(1.0, "The temperature of the softened predictions.", above=0)

    def comparison(self, step: Step, previous: Tensors) -> Tensor:
        """Distil the previous model's predictions into the new one."""
        teacher, _ = step.predict(previous)
        return self.strength * distillation(step.outputs, teacher, self.temperature)

    def deployed(self, clients: Clients, model: Tensors) -> Tensors:
        """Use the client's own last model; before its first round, what the server sent."""
        trained, previous = clients.memory["trained"], previous_model(clients)
        return {name: previous[name].where(align(trained, tensor), tensor) for name, tensor in model.items()}


@methods.register("moon")
@dataclass(frozen=True)
class Moon(PreviousModel):
    r"""FedAvg with a contrastive term: features near the global model's, far from the client's last ones.

    To the local loss comes :math:`\mu \, \ell`, the mean over samples of :math:`\ell = -\log \frac{e^{\cos(z, z_g) /
    \tau}}{e^{\cos(z, z_g) / \tau} + e^{\cos(z, z_p) / \tau}}` with the features :math:`z` of the model in training,
    :math:`z_g` of the global model as received and :math:`z_p` of the client's own model after the last round in which
    it took part; a client that has none yet has no such term. What travels is as in FedAvg.

    Features are the input of the model's head. The authors' models have a projection of two layers in front of it,
    which softens the term; without one, a smaller ``mu`` than their default may be better (they tune it over 0.1, 1, 5
    and 10). The global and the previous model run in evaluation mode.
    """

    facts: ClassVar[Facts] = Facts(
        "local objective",
        "Li et al., Model-Contrastive Federated Learning, CVPR 2021",
        "https://arxiv.org/abs/2103.16257",
    )
    only_on_shared: ClassVar[bool] = True

    mu: float = parameter(1.0, "The weight of the contrastive term.", low=0)
    temperature: float = parameter(0.5, "The temperature of the similarities (tau).", above=0)

    def notes(self, layers: LayerMap) -> Iterable[str]:
        """Refuse a model without a linear head, whose input the features are."""
        if layers.head is None:
            raise FedStrataError(
                f"'{self.name}' compares the inputs of a linear head, and the model does not end in a linear layer; "
                "choose another model or method."
            )
        return ()

    def wants_features(self) -> bool:
        """Features are what is compared."""
        return True

    def comparison(self, step: Step, previous: Tensors) -> Tensor:
        """Compare the features with those of the global and of the previous model."""
        assert step.features is not None
        (_, of_global), (_, of_previous) = step.predict(step.received), step.predict(previous)
        near, far = (_similarity(step.features, other) for other in (of_global, of_previous))
        return self.mu * F.softplus((far - near) / self.temperature).mean(1)


def _similarity(features: Tensor, other: Tensor) -> Tensor:
    """Compute the cosine of each sample's features ``[K, B]``."""
    return F.cosine_similarity(features.flatten(2), other.flatten(2), dim=-1)
