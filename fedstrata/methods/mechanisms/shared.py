"""What many methods need: the parameters that clients share, the participants' rows, and clients that count alike."""

from __future__ import annotations

import torch
from torch import Tensor

from fedstrata.experiment import Experiment
from fedstrata.methods.contract.views import Clients, Declared, Server
from fedstrata.optimisers import Optimiser, optimisers
from fedstrata.transfer import numbers_on


def shared_parameters(view: Clients | Server) -> list[str]:
    """Name the parameters that clients share with the server."""
    shared = view.model if isinstance(view, Server) else view.shared
    return [name for name in view.layers.parameter_names if name in shared]


def usual_optimiser() -> Optimiser:
    """Make the optimiser of an experiment that names none; methods that bring their own say where another is vain."""
    return optimisers.make(Experiment.optimiser)


def rows_of(server: Server) -> Tensor:
    """Return the participants' rows in stacks of all clients: ``[K]``."""
    return numbers_on(server.participants, server.sizes.device)


def equal_shares(clients: int, device: torch.device) -> Tensor:
    """Share out alike among some clients ``[K]``."""
    return torch.full((clients,), 1 / clients, dtype=torch.float64, device=device)


def equal_weights(declared: Declared) -> Tensor:
    """Let all participants count alike ``[K]``, for methods whose authors count clients, not samples."""
    return torch.ones_like(declared.sizes, dtype=torch.float64)
