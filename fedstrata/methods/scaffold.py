"""SCAFFOLD: control variates take the drift out of local steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstrata.methods.contract.declarations import Facts, Needs
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, LocalStep, Message, ModelAndMemory, Server, Training
from fedstrata.methods.mechanisms.drift import DriftCorrection
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, subtract, under


@methods.register("scaffold")
@dataclass(frozen=True)
class Scaffold(DriftCorrection):
    r"""Correct each local gradient by how the client's usual gradient differs from everybody's.

    With control variates :math:`c_k` at the clients and :math:`c` at the server, zero at first, a local step uses
    :math:`g - c_k + c`. After K local steps :math:`c_k^+ = c_k - c + \frac{1}{K \eta} (w - w_k)` (option II of the
    paper), the server goes to :math:`w + \eta_g \frac{1}{|S|} \sum_{k \in S} (w_k - w)` and :math:`c \leftarrow c +
    \frac{1}{N} \sum_{k \in S} (c_k^+ - c_k)`. Clients count equally, as in the paper, whatever their size.

    For plain gradient descent :math:`c_k^+` is the mean of the K gradients before their correction. It is computed as
    that mean, which is also right with momentum or Adam, where :math:`w - w_k` is no sum of gradients.

    Both directions carry a control variate beside every shared parameter, so traffic doubles. Running statistics have
    none and are averaged.

    Defaults:
        learning_rate: alpemreacar/FedDyn, utils_methods.py (its SCAFFOLD).
    """

    facts: ClassVar[Facts] = Facts(
        "local objective",
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020",
        "https://arxiv.org/abs/1910.06378",
    )

    learning_rate: float = parameter(1.0, "The server's learning rate.", above=0)

    @property
    def needs(self) -> Needs:
        """The new control variate is the mean gradient; the server follows the clients' control variates."""
        return Needs(mean_gradients=True, replies=True)

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Start with control variates of zero, and keep a difference beside each.

        While a client trains it is :math:`c - c_k`, afterwards :math:`c_k^+ - c_k`.
        """
        zeros = super().client_memory(clients, model)
        return under("control", zeros) | under("difference", zeros)

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send the server's control variate too."""
        return message.plus(under(self.name, {name: control[None] for name, control in server.memory.items()}))

    def start(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Compute the correction of this round's gradients."""
        everybody, controls = message.group(self.name), clients.memory.group("control")
        corrections = {name: everybody[name] - own for name, own in controls.items()}
        return model, clients.memory | under("difference", corrections)

    def gradients(self, clients: Clients, step: LocalStep, gradients: Tensors) -> Tensors:
        """Correct the gradients of the shared parameters."""
        corrections = clients.memory.group("difference")
        return {**gradients, **{name: gradients[name] + corrections[name] for name in corrections if name in gradients}}

    def finish(self, clients: Clients, training: Training) -> ModelAndMemory:
        """Take the mean gradient as the new control variate; what was not trained keeps its own."""
        controls = clients.memory.group("control")
        new = {name: training.mean_gradients.get(name, own) for name, own in controls.items()}
        return training.trained, under("control", new) | under("difference", subtract(new, controls))

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send the change of the control variate too."""
        return message.plus(under(self.name, clients.memory.group("difference")))

    def server_step(self, server: Server, merged: Tensors) -> ModelAndMemory:
        """Go a part of the way to the merged model, or beyond it."""
        moved = {
            name: torch.lerp(server.model[name], merged[name], self.learning_rate)
            for name in server.memory
            if name in merged
        }
        return {**merged, **moved}, server.memory

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Follow the clients' control variates."""
        changes = replies.group(self.name)
        controls = server.memory.items()
        return model, {name: control + changes[name].sum(0) / server.clients for name, control in controls}
