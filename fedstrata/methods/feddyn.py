"""FedDyn: a dynamic regulariser makes the clients' optima agree with the global one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.methods.contract.declarations import Facts
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, LocalStep, ModelAndMemory, Server, Training
from fedstrata.methods.mechanisms.drift import DriftCorrection
from fedstrata.methods.mechanisms.proximal import proximal_term
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, per_client


@methods.register("feddyn")
@dataclass(frozen=True)
class FedDyn(DriftCorrection):
    r"""Let each client's loss bend towards the global optimum, with a regulariser that follows its past.

    Client k remembers :math:`h_k`, zero at first, and minimises :math:`f_k(w) - \langle h_k, w \rangle +
    \frac{\alpha}{2} \lVert w - w^t \rVert^2` from the global model :math:`w^t`; then :math:`h_k \leftarrow h_k - \alpha
    (w_k - w^t)`, which at the minimum is the gradient of :math:`f_k`. The server does the same with the mean over all m
    clients, :math:`h \leftarrow h - \frac{\alpha}{m} \sum_{k \in P} (w_k - w^t)`, and sends :math:`w^{t+1} =
    \frac{1}{|P|} \sum_{k \in P} w_k - \frac{1}{\alpha} h` (Algorithm 1). That corrected model is also the one that is
    tested.

    Clients count equally, as in the paper, whatever their size. The penalty is the squared distance, not the distance
    itself as in FedLAW's code. Running statistics are averaged. Nothing more travels than in FedAvg: :math:`h_k` stays
    at the client.
    """

    facts: ClassVar[Facts] = Facts(
        "local objective",
        "Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021",
        "https://arxiv.org/abs/2111.04263",
    )

    alpha: float = parameter(0.01, "The strength of the regulariser (paper: 0.001 to 0.1).", above=0)

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        """Add the proximal term, and subtract the product with the client's state."""
        products = [per_client(state * step.parameters[name]).sum(1) for name, state in clients.memory.items()]
        proximal = proximal_term(clients, step.parameters, step.received, self.alpha)
        return loss + (proximal - torch.stack(products).sum(0))

    def finish(self, clients: Clients, training: Training) -> ModelAndMemory:
        """Follow the client's gradient."""
        return training.trained, {
            name: state - self.alpha * (training.trained[name] - training.start[name])
            for name, state in clients.memory.items()
        }

    def server_step(self, server: Server, merged: Tensors) -> ModelAndMemory:
        """Follow the mean over all clients, and correct the mean of the participants by it."""
        part = len(server.participants) / server.clients
        states = {
            name: state - self.alpha * part * (merged[name] - server.model[name])
            for name, state in server.memory.items()
            if name in merged
        }
        corrected = {name: merged[name] - state / self.alpha for name, state in states.items()}
        return {**merged, **corrected}, {**server.memory, **states}
