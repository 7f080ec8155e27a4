"""Sharing weights out between layers, for sparse training that moves density to where it is needed.

Sara Babakniya, Souvik Kundu, Saurav Prakash, Yue Niu, Salman Avestimehr: "Revisiting Sparsity Hunting in Federated
Learning: Why does Sparsity Consensus Matter?" (FLASH), TMLR 2023, https://arxiv.org/abs/2208.13092.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.functional._entries import check_finite, check_same_shape


def share_out(total: int | Tensor, importance: Tensor, room: Tensor) -> Tensor:
    r"""Divide a number of weights over layers in proportion to their importance, as far as each has room.

    ``importance`` and ``room`` are ``[L]``, or ``[K, L]`` with ``total`` a tensor ``[K]``, for K clients. A layer
    :math:`l` gets :math:`\min(r_l, \lambda i_l)` with :math:`\lambda` such that the sum is ``total``: where a layer is
    full, the others take what is left over, in the same proportions. What is left after rounding down goes, one each,
    to the layers with the largest remainders, the first among equal ones. So the sum is exact, unless all is full.
    Where no layer with room has any importance, they count alike.

    Citation: the redistribution step of Dettmers and Zettlemoyer, "Sparse Networks from Scratch: Faster Training
    without Losing Performance", 2019, as FLASH uses it for its layer densities.

    >>> import torch
    >>> share_out(10, torch.tensor([3.0, 1.0, 1.0]), torch.tensor([4, 9, 9]))
    tensor([4, 3, 3])
    """
    check_same_shape(importance, "The importance", room, "the room")
    check_finite(importance, "The importance")
    if bool((importance < 0).any()):
        raise FedStrataError(f"The importance is {importance.tolist()}; none of it can be negative.")
    single = importance.dim() == 1
    shares, limits = (tensor.to(torch.float64).reshape(-1, tensor.shape[-1]) for tensor in (importance, room))
    wanted = torch.as_tensor(total, device=shares.device).reshape(-1, 1)
    wanted = wanted.clamp(min=0).minimum(limits.sum(1, keepdim=True))
    given = _whole(_filled(wanted, shares, limits), wanted)
    return given[0] if single else given


def _filled(wanted: Tensor, shares: Tensor, limits: Tensor) -> Tensor:
    """Pour ``wanted`` into layers in proportion to their shares; each pass fills at least one layer, or is the last."""
    full = limits <= 0
    for _ in range(shares.shape[1]):
        open_shares = shares.masked_fill(full, 0)
        open_shares = torch.where(open_shares.any(1, keepdim=True), open_shares, ~full)
        left = wanted - limits.masked_fill(~full, 0).sum(1, keepdim=True)
        given = left * open_shares / open_shares.sum(1, keepdim=True)
        full = full | (given > limits)
    return torch.where(full, limits, given)


def _whole(given: Tensor, wanted: Tensor) -> Tensor:
    """Round down, and give what is left to the largest remainders: fewer than there are layers that were rounded."""
    down = given.floor()
    rank = (given - down).argsort(descending=True, stable=True).argsort()
    return (down + (rank < wanted - down.sum(1, keepdim=True))).long()
