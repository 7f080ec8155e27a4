"""SCAFFOLD: control variates take the drift out of local steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.methods.contract.part import Facts
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, Server, Step, Training
from fedstrata.methods.mechanisms.drift import DriftCorrection
from fedstrata.spec import parameter
from fedstrata.stack import Tensors


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
    """

    facts: ClassVar[Facts] = Facts(
        "local objective",
        "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020",
        "https://arxiv.org/abs/1910.06378",
    )

    learning_rate: float = parameter(1.0, "The server's learning rate.", above=0)

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Start with control variates of zero, and keep a difference beside each.

        While a client trains it is :math:`c - c_k`, afterwards :math:`c_k^+ - c_k`.
        """
        controls = super().client_memory(clients, model)
        return {**controls, **{f"difference/{name}": torch.zeros_like(tensor) for name, tensor in controls.items()}}

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send the server's control variate too."""
        return replace(
            message, tensors={**message.tensors, **self._travelling({n: c[None] for n, c in server.memory.items()})}
        )

    def begin(self, clients: Clients, received: Tensors, message: Message) -> Tensors:
        """Compute the correction of this round's gradients."""
        controls = _controls(clients.memory)
        return _memory(controls, {name: message.tensors[self._wire(name)] - own for name, own in controls.items()})

    def gradients(self, clients: Clients, step: Step, gradients: Tensors) -> Tensors:
        """Correct the gradients of the shared parameters."""
        corrected = {
            name: gradient + clients.memory[f"difference/{name}"]
            for name, gradient in gradients.items()
            if name in clients.memory
        }
        return {**gradients, **corrected}

    def wants_mean_gradients(self) -> bool:
        """The new control variate is the mean gradient."""
        return True

    def remember(self, clients: Clients, training: Training) -> Tensors:
        """Take the mean gradient as the new control variate; what was not trained keeps its own."""
        controls = _controls(clients.memory)
        new = {name: training.mean_gradients.get(name, own) for name, own in controls.items()}
        return _memory(new, {name: new[name] - own for name, own in controls.items()})

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send the change of the control variate too."""
        changes = {name: clients.memory[f"difference/{name}"] for name in _controls(clients.memory)}
        return replace(message, tensors={**message.tensors, **self._travelling(changes)})

    def step(self, server: Server, merged: Tensors) -> tuple[Tensors, Tensors]:
        """Go a part of the way to the merged model, or beyond it."""
        moved = {
            name: torch.lerp(server.model[name], merged[name], self.learning_rate)
            for name in server.memory
            if name in merged
        }
        return {**merged, **moved}, server.memory

    def examine(self, server: Server, replies: Message, shares: Tensor, new: Tensors) -> tuple[Tensors, Tensors]:
        """Follow the clients' control variates."""
        return new, {
            name: control + replies.tensors[self._wire(name)].sum(0) / server.clients
            for name, control in server.memory.items()
        }

    def _wire(self, name: str) -> str:
        """Name a control variate in messages."""
        return f"{self.name}/{name}"

    def _travelling(self, controls: Tensors) -> Tensors:
        return {self._wire(name): control for name, control in controls.items()}


def _controls(memory: Tensors) -> Tensors:
    return {name: tensor for name, tensor in memory.items() if not name.startswith("difference/")}


def _memory(controls: Tensors, differences: Tensors) -> Tensors:
    return {**controls, **{f"difference/{name}": tensor for name, tensor in differences.items()}}
