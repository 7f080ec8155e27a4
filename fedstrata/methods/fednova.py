"""FedNova: clients that make more steps do not count more for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.methods.contract.declarations import Facts, Matter, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, LocalStep, Message, Server, Training
from fedstrata.methods.mechanisms.proximal import proximal_term
from fedstrata.methods.mechanisms.shared import shared_parameters
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, align, weighted_mean


@methods.register("fednova")
@dataclass(frozen=True)
class FedNova(Part):
    r"""Divide each client's update by its number of local steps before averaging, and scale the mean back.

    :math:`w^{t+1} = w^t + \tau_{\mathrm{eff}} \sum_k p_k \frac{w_k - w^t}{\lVert a_k \rVert_1}` with
    :math:`\tau_{\mathrm{eff}} = \sum_k p_k \lVert a_k \rVert_1`, where a client's steps moved the weights by
    :math:`-\eta \sum_i a_{k,i} g_{k,i}` (Section 4 of the paper). For plain gradient descent :math:`\lVert a_k
    \rVert_1` is the number of steps :math:`\tau_k`; with momentum m it is :math:`\sum_{q=1}^{\tau_k} (1 - m^q) / (1 -
    m)`, since a gradient counts again in later steps. An optimiser that normalises gradients, such as Adam, counts
    plain steps. Where all clients make as many steps, this is FedAvg. ``fednova+fedavgm`` adds the paper's server
    momentum.

    ``mu`` adds the proximal term of FedProx to the local loss, as the authors' optimiser does. It takes back a part of
    the way in every step, so :math:`\lVert a_k \rVert_1 = \sum_{q=0}^{\tau_k - 1} (1 - \eta\mu)^q`, and
    :math:`\tau_{\mathrm{eff}} = \sum_k p_k \tau_k` there. With momentum too, their code adds the two counts up; here it
    is how far gradients of 1 would go, which either of them alone is as well.

    The authors' momentum starts afresh in every round. Where an optimiser keeps it (``keep=true``), :math:`\lVert a_k
    \rVert_1` is again how far gradients of 1 would go, from the velocity that all the client's earlier steps left. Of
    several phases, those count that move what is shared.

    Running statistics are averaged. Each client sends one number more than in FedAvg, two with ``mu``.

    Defaults:
        mu: JYWa/FedNova, train_LocalSGD.py.
    """

    facts: ClassVar[Facts] = Facts(
        "aggregation",
        "Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, "
        "NeurIPS 2020",
        "https://arxiv.org/abs/2007.07481",
    )
    touches: ClassVar[Touches] = Touches(relies_on=(Matter.FREE_STEPS,))

    mu: float = parameter(0.0, "The strength of a proximal term in the local loss.", low=0)

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        """Add the proximal term, if there is one."""
        return loss + proximal_term(clients, step.parameters, step.received, self.mu) if self.mu else loss

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send the number of steps too."""
        counts = {self._effective: training.effective_steps(self.mu)}
        if self.mu:
            counts |= {self._steps: training.steps.to(torch.float64)}
        return replace(message, numbers={**message.numbers, **counts})

    def merge(self, server: Server, replies: Message, shares: Tensor) -> Tensors:
        """Average the normalised updates of the parameters, and everything else as it is."""
        effective = replies.numbers[self._effective]
        scale = (shares * replies.numbers.get(self._steps, effective)).sum() / effective
        merged = super().merge(server, replies, shares)
        for name in shared_parameters(server):
            if name in replies.tensors:
                old = server.model[name]
                updates = (replies.tensors[name] - old) * align(scale, replies.tensors[name]).to(old.dtype)
                merged[name] = old + weighted_mean(updates, shares, replies.masks.get(name))
        return merged

    @property
    def _effective(self) -> str:
        return f"{self.name}/effective steps"

    @property
    def _steps(self) -> str:
        return f"{self.name}/steps"
