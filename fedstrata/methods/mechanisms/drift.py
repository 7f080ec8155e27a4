"""What methods share that correct the drift of clients: a state for every shared parameter, on both sides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.methods.contract.declarations import Matter, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.views import Clients, Declared, Server
from fedstrata.methods.mechanisms.shared import equal_weights, shared_parameters
from fedstrata.stack import Tensors


@dataclass(frozen=True)
class DriftCorrection(Part):
    """A state of the size of the shared parameters at every client and at the server, zero at first.

    The server's state is the mean of the clients' states, whoever took part. That holds only where all clients count
    equally and every parameter comes from every participant, so the shares are equal, as the authors of these methods
    define them, and parts that decide which layers travel are refused.
    """

    touches: ClassVar[Touches] = Touches(relies_on=(Matter.ALL_LAYERS, Matter.TRAINED_IS_SENT))

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Start at zero."""
        return {name: torch.zeros_like(model[name]) for name in shared_parameters(clients)}

    def server_memory(self, server: Server) -> Tensors:
        """Start at zero."""
        return {name: torch.zeros_like(server.model[name]) for name in shared_parameters(server)}

    def weigh(self, declared: Declared) -> Tensor:
        """Let all participants count equally."""
        return equal_weights(declared)
