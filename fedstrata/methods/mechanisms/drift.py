"""What methods share that correct the drift of clients: a state for every shared parameter, on both sides."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.views import Clients, Server
from fedstrata.methods.mechanisms.layer_choice import CHOOSES_WHAT_TRAVELS
from fedstrata.methods.mechanisms.shared import equal_weights, shared_parameters
from fedstrata.stack import Tensors


@dataclass(frozen=True)
class DriftCorrection(Part):
    """A state of the size of the shared parameters at every client and at the server, zero at first.

    The server's state is the mean of the clients' states, whoever took part. That holds only where all clients count
    equally and every parameter comes from every participant, so the shares are equal, as the authors of these methods
    define them, and parts that decide which layers travel are refused.
    """

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Start at zero."""
        return {name: torch.zeros_like(model[name]) for name in shared_parameters(clients)}

    def server_memory(self, server: Server) -> Tensors:
        """Start at zero."""
        return {name: torch.zeros_like(server.model[name]) for name in shared_parameters(server)}

    def weigh(self, server: Server) -> Tensor:
        """Let all participants count equally."""
        return equal_weights(server)

    def objects_to(self, other: Part) -> str | None:
        """Refuse layers that do not travel in every round."""
        if CHOOSES_WHAT_TRAVELS not in other.claims:
            return None
        return f"'{self.name}' needs all shared layers of all participants, and '{other.name}' {CHOOSES_WHAT_TRAVELS}"
