"""Holding a model near another one."""

from __future__ import annotations

import torch
from torch import Tensor

from fedstrata.methods.contract.views import Clients
from fedstrata.stack import Tensors, squared_norm


def proximal_term(clients: Clients, parameters: Tensors, centre: Tensors, strength: float) -> Tensor:
    r"""Compute each client's :math:`\frac{\mu}{2} \lVert w - c \rVert^2` over the shared parameters, ``[K]``: none, if
    nothing is shared.
    """
    distance = {name: tensor - centre[name] for name, tensor in parameters.items() if name in clients.shared}
    if not distance:
        return torch.zeros(len(clients.ids), device=clients.sizes.device)
    return strength / 2 * squared_norm(distance)
