"""FedDyn: a dynamic regulariser makes the clients' optima agree with the global one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.methods.contract.declarations import Facts, Matter, Needs, Touches
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, LocalStep, Message, ModelAndMemory, Server, Training
from fedstrata.methods.mechanisms.drift import DriftCorrection
from fedstrata.methods.mechanisms.peers import first_models, noted
from fedstrata.methods.mechanisms.proximal import proximal_term
from fedstrata.methods.mechanisms.shared import equal_shares
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, per_client, under, weighted_means


@methods.register("feddyn")
@dataclass(frozen=True)
class FedDyn(DriftCorrection):
    r"""Let each client's loss bend towards the global optimum, with a regulariser that follows its past.

    Client k remembers :math:`h_k`, zero at first, and minimises :math:`f_k(w) + \frac{1}{c_k} \bigl(\frac{\alpha}{2}
    \lVert w - w^t \rVert^2 - \langle h_k, w \rangle\bigr)` from the cloud model :math:`w^t`; then :math:`h_k
    \leftarrow h_k - \alpha (w_k - w^t)`. The server does the same with the mean over all m clients, :math:`h \leftarrow
    h - \frac{\alpha}{m} \sum_{k \in P} (w_k - w^t)`, and sends :math:`w^{t+1} = \frac{1}{|P|} \sum_{k \in P} w_k -
    \frac{1}{\alpha} h` (Algorithm 1).

    That cloud model is where training goes on. What is tested, and saved in the end, is the mean of the participants'
    models, as in the authors' code; they also look at the mean of the last models of all clients (``tested=all``),
    which is the same where everybody takes part, and for which the server keeps them all. ``tested=cloud`` is what
    FedLAW and FedLWS do: beside ``lws`` it is the cloud model that shrinks.

    :math:`c_k` is the client's size over the mean size of all clients: so the authors' code reaches the optimum of all
    samples, although all clients count equally in both sums; with ``scaled=false`` it is 1, as in the paper, and the
    optimum is that of the mean over clients. The penalty is the squared distance, not the distance itself as in
    FedLAW's code. Running statistics are averaged. Down travels one number more than in FedAvg, the mean size;
    :math:`h_k` stays at the client.

    Defaults:
        alpha: alpemreacar/FedDyn, example_cifar_10.py.
        tested, scaled: alpemreacar/FedDyn, utils_methods.py.
    """

    facts: ClassVar[Facts] = Facts(
        "local objective",
        "Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021",
        "https://arxiv.org/abs/2111.04263",
    )

    touches: ClassVar[Touches] = DriftCorrection.touches.also(takes_away=(Matter.FREE_STEPS,))

    alpha: float = parameter(0.01, "The strength of the regulariser (paper: 0.001 to 0.1).", above=0)
    tested: str = parameter(
        "participants",
        "Test the mean of the participants' models, that of the last models of all clients, or the cloud model.",
        choices=("participants", "all", "cloud"),
    )
    scaled: bool = parameter(True, "Divide the regulariser by the client's size over the mean size.")

    @property
    def needs(self) -> Needs:
        """Keep the last models of all clients, if their mean is tested."""
        return Needs(replies=self.tested == "all")

    # Clients ----------------------------------------------------------------------------------------------------------

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Start at zero, as a client of mean size."""
        relative = torch.ones(len(clients.ids), dtype=torch.float64, device=clients.sizes.device)
        return under("state", super().client_memory(clients, model)) | {"relative": relative}

    def start(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Find out how large the client is among all."""
        if not self.scaled:
            return model, clients.memory
        return model, clients.memory | {"relative": clients.sizes / message.numbers[self._size]}

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        """Add the proximal term, and subtract the product with the client's state."""
        states = clients.memory.group("state").items()
        products = [per_client(state * step.parameters[name]).sum(1) for name, state in states]
        proximal = proximal_term(clients, step.parameters, step.received, self.alpha)
        return loss + (proximal - torch.stack(products).sum(0)) / clients.memory["relative"].to(loss.dtype)

    def finish(self, clients: Clients, training: Training) -> ModelAndMemory:
        """Follow the client's gradient."""
        states = {
            name: state - self.alpha * (training.trained[name] - training.start[name])
            for name, state in clients.memory.group("state").items()
        }
        return training.trained, clients.memory | under("state", states)

    # The server -------------------------------------------------------------------------------------------------------

    def server_memory(self, server: Server) -> Tensors:
        """Start at zero, from the initial model."""
        memory = under("state", super().server_memory(server)) | under("tested", server.model)
        memory |= {"size": server.sizes.to(torch.float64).mean()}
        return memory | first_models(server) if self.tested == "all" else memory

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send the mean size too; for a test, the model that is tested."""
        if self.scaled:
            message = replace(message, numbers={**message.numbers, self._size: server.memory["size"][None]})
        if server.testing and self.tested != "cloud":
            message = message.plus({name: tensor[None] for name, tensor in server.memory.group("tested").items()})
        return message

    def server_step(self, server: Server, merged: Tensors) -> ModelAndMemory:
        """Follow the mean over all clients, and correct the mean of the participants by it."""
        part = len(server.participants) / server.clients
        states = {
            name: state - self.alpha * part * (merged[name] - server.model[name])
            for name, state in server.memory.group("state").items()
            if name in merged
        }
        corrected = {name: merged[name] - state / self.alpha for name, state in states.items()}
        return {**merged, **corrected}, server.memory | under("state", states) | under("tested", merged)

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Note the participants' models, and take the mean of those of all clients, if that is tested."""
        if self.tested != "all":
            return model, server.memory
        sent = {
            name: tensor.where(replies.masks[name], server.model[name]) if name in replies.masks else tensor
            for name, tensor in replies.tensors.items()
        }
        last = noted(server, "last", sent)
        equal = equal_shares(server.clients, server.sizes.device)
        mean = weighted_means(last.group("last"), equal)
        return model, server.memory | last | under("tested", mean)

    @property
    def _size(self) -> str:
        return f"{self.name}/size"
