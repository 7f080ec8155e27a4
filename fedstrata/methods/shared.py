"""What methods need that work on the parameters which clients share."""

from __future__ import annotations

import torch
from torch import Tensor

from fedstrata.methods.views import Clients, Server


def shared_parameters(view: Clients | Server) -> list[str]:
    """Name the parameters that clients share with the server."""
    shared = view.model if isinstance(view, Server) else view.shared
    return [name for name in view.layers.parameter_names if name in shared]


def equal_shares(server: Server) -> Tensor:
    """Give every participant the same share: ``[K]``."""
    return torch.full_like(server.sizes, 1 / len(server.participants), dtype=torch.float64)
