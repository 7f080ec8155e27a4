"""Layer-wise divergence-aware averaging: a client's layer counts by its angle to the global one.

Yasar Abbas Ur Rehman, Yan Gao, Pedro Porto Buarque de Gusmão, Mina Alibeigi, Jiajun Shen, Nicholas D. Lane: "L-DAWA:
Layer-wise Divergence Aware Weight Aggregation in Federated Self-Supervised Visual Representation Learning", ICCV 2023.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fedstrata.errors import FedStrataError
from fedstrata.functional._entries import (
    check_clients,
    check_finite,
    check_same_shape,
    client_pieces,
    client_rows,
    real,
    weighted_sum,
)


def ldawa(previous: Tensor, clients: Tensor, *, mask: Tensor | None = None) -> Tensor:
    r"""Average the clients' tensors ``[K, ...]``, each multiplied by its cosine to the previous global one.

    With :math:`w` the previous global tensor and :math:`w_k` that of client k::

        new = (1 / K) * sum_k cos(w_k, w) * w_k

    Clients count equally, and the sum is not divided by that of the cosines: where clients turn away from the global
    tensor the new one is shorter. Negative cosines stay negative. A previous tensor of zeros has no direction, so its
    cosine is taken as 1, as is that of a single number without axes: both give the plain mean. Sums are in float64.
    NaN and infinite numbers are refused.

    ``mask``, boolean and of a shape that broadcasts to ``clients``, says which entries a client sent: the cosine is
    taken over those, the mean of an entry runs over the clients that sent it, and an entry that nobody sent stays.

    Citation: Rehman et al., "L-DAWA: Layer-wise Divergence Aware Weight Aggregation in Federated Self-Supervised
    Visual Representation Learning", ICCV 2023; what holds where there is no cosine, and under masks, is our choice.

    >>> import torch
    >>> ldawa(torch.tensor([1.0, 0.0]), torch.tensor([[2.0, 0.0], [3.0, 4.0]]))
    tensor([1.9000, 1.2000])
    """
    check_clients(clients, "The tensor of the clients")
    if len(clients) == 0:
        raise FedStrataError("There are no clients whose tensors could be averaged; give [K, ...] of at least one.")
    check_same_shape(previous, "The previous tensor", clients[0], "that of each client")
    old, stack = real(previous), real(clients)
    check_finite(old, "The previous tensor")
    check_finite(stack, "The tensor", batched=True)
    if mask is None:
        return (weighted_sum(stack, cosines(old, stack)) / len(stack)).to(stack.dtype)
    sent = mask.expand_as(stack)
    total = weighted_sum(torch.where(sent, stack, stack.new_zeros(())), cosines(old, stack, sent))
    holders = sent.sum(0)
    return torch.where(holders > 0, total / holders, old).to(stack.dtype)


def cosines(previous: Tensor, clients: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute each client's cosine ``[K]`` to the previous tensor in float64, over the entries that it sent.

    It is 1 where there is no direction to compare: for a tensor of zeros, and for a single number without axes.
    """
    if clients.dim() == 1:
        return torch.ones(len(clients), dtype=torch.float64, device=clients.device)
    sent = torch.ones_like(clients[:1], dtype=torch.bool) if mask is None else mask
    found = []
    for piece, held in zip(client_pieces(clients), client_pieces(sent.expand_as(clients)), strict=True):
        left, right = (client_rows((tensor * held).double()) for tensor in (previous, piece))
        lengths = vector_norm(left, dim=1) * vector_norm(right, dim=1)
        cosine = ((left * right).sum(1) / lengths).clamp(-1, 1)
        found.append(cosine.where(lengths > 0, 1))
    return torch.cat(found)
