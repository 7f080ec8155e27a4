"""Transient sparsity: which entries of a layer restart at zero, and how many.

"When Aggregation Stops Collaborating: Layer-wise Inertia in Low-Data Federated Learning" (LIPS), anonymous authors,
under double-blind review.
"""

from __future__ import annotations

from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.functional._entries import check_fraction, check_same_shape, dropped_of, lowest, mask_by, real


def sparsity_at(round: int, total: int, tau0: float) -> float:
    """Compute the fraction of entries to drop in a round: ``tau0 * (1 - round / total)``.

    It falls along a line from ``tau0`` at round 0 to 0 at the last round, ``total``. The paper counts rounds from 1;
    the released code puts a count from 0 into the same formula.

    Citation: "When Aggregation Stops Collaborating: Layer-wise Inertia in Low-Data Federated Learning" (LIPS),
    anonymous, under review, Eq. 6.

    >>> round(sparsity_at(5, 300, 0.7), 8)
    0.68833333
    >>> sparsity_at(300, 300, 0.7)
    0.0
    """
    check_fraction(tau0, "tau0")
    if total < 1 or not 0 <= round <= total:
        raise FedStrataError(
            f"Round {round} of {total} does not exist; give a round from 0 to the total, and a total of at least 1."
        )
    return tau0 * ((total - round) / total)


def sensitivity(before: Tensor, after: Tensor) -> Tensor:
    """Score each entry by how much it moved in local training, times what it became: ``|(after - before) * after|``.

    An entry scores low if it hardly moved or ended near zero: it takes little part in learning. ``before`` and
    ``after`` are one client's weights around its local training, or both a stack ``[K, ...]`` of them.

    Citation: "When Aggregation Stops Collaborating: Layer-wise Inertia in Low-Data Federated Learning" (LIPS),
    anonymous, under review, Eq. 3 and 10 to 12.

    >>> import torch
    >>> sensitivity(torch.tensor([0.5, -0.2, 0.1, 0.4]), torch.tensor([0.6, -0.1, 0.1, -0.3]))
    tensor([0.0600, 0.0100, 0.0000, 0.2100])
    """
    check_same_shape(before, "The tensor before training", after, "the tensor after it")
    ended = real(after)
    return ((ended - real(before)) * ended).abs()


def keep_mask(scores: Tensor, drop: float, *, batched: bool = False) -> Tensor:
    """Mark what stays when the lowest ``floor(drop * n)`` of a layer's ``n`` entries are dropped.

    The mask ``m`` is 0 where a score is among the lowest fraction ``drop`` of its layer, else 1. The count is exact:
    among equal scores the lower index is dropped first, so of an all-zero tensor the beginning goes. ``drop`` lies in
    [0, 1) and is read as the decimal number that was written (0.29 of 100 entries is 29); ``drop = 0`` keeps all, and
    one entry always stays. A tensor without entries has a mask without entries. NaN and infinite scores are refused.

    With ``batched=True`` the first axis of ``scores`` is the clients, and each gets a mask of its own.

    Citation: "When Aggregation Stops Collaborating: Layer-wise Inertia in Low-Data Federated Learning" (LIPS),
    anonymous, under review, Eq. 4; the mask multiplies the weights once (Eq. 5).

    >>> import torch
    >>> keep_mask(torch.tensor([0.06, 0.01, 0.0, 0.21]), 0.5)
    tensor([ True, False, False,  True])
    >>> keep_mask(torch.tensor([[1.0, 1.0, 2.0], [3.0, 2.0, 1.0]]), 0.4, batched=True)
    tensor([[False,  True,  True],
            [ True,  True, False]])
    """
    check_fraction(drop, "drop")
    return mask_by(lambda rows: ~lowest(rows, dropped_of(drop, rows.shape[1])), scores, batched)
