"""FedNova: clients that make more steps do not count more for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from fedstrata.methods.contract.declarations import Facts, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, Server, Training
from fedstrata.methods.mechanisms.shared import shared_parameters
from fedstrata.stack import Tensors, align, weighted_mean


@methods.register("fednova")
@dataclass(frozen=True)
class FedNova(Part):
    r"""Divide each client's update by its number of local steps before averaging, and scale the mean back.

    :math:`w^{t+1} = w^t + \tau_{\mathrm{eff}} \sum_k p_k \frac{w_k - w^t}{\lVert a_k \rVert_1}` with
    :math:`\tau_{\mathrm{eff}} = \sum_k p_k \lVert a_k \rVert_1`. For plain gradient descent :math:`\lVert a_k
    \rVert_1` is the number of steps; with momentum m it is :math:`\sum_{q=1}^{\tau_k} (1 - m^q) / (1 - m)`, since a
    gradient counts again in later steps (Section 4 of the paper). An optimiser that normalises gradients, such as Adam,
    counts plain steps. Where all clients make as many steps, this is FedAvg. ``fednova+fedavgm`` adds the paper's
    server momentum.

    Running statistics are averaged. Each client sends one number more than in FedAvg.
    """

    facts: ClassVar[Facts] = Facts(
        "aggregation",
        "Wang et al., Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization, "
        "NeurIPS 2020",
        "https://arxiv.org/abs/2007.07481",
    )
    touches: ClassVar[Touches] = Touches()

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send the number of steps too."""
        return replace(message, numbers={**message.numbers, self._steps: training.effective_steps})

    def merge(self, server: Server, replies: Message, shares: Tensor) -> Tensors:
        """Average the normalised updates of the parameters, and everything else as it is."""
        steps = replies.numbers[self._steps]
        scale = (shares * steps).sum() / steps
        merged = super().merge(server, replies, shares)
        for name in shared_parameters(server):
            if name in replies.tensors:
                old = server.model[name]
                updates = (replies.tensors[name] - old) * align(scale, replies.tensors[name]).to(old.dtype)
                merged[name] = old + weighted_mean(updates, shares, replies.masks.get(name))
        return merged

    @property
    def _steps(self) -> str:
        return f"{self.name}/steps"
