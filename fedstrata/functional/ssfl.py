"""One sparse subnetwork for all clients, found before training.

Riyasat Ohib, Bishal Thapaliya, Gintare Karolina Dziugaite, Jingyu Liu, Vince D. Calhoun, Sergey Plis: "SSFL:
Discovering Sparse Unified Subnetworks at Initialization for Efficient Federated Learning",
https://openreview.net/forum?id=kUZ6LhUB26.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import overload

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.functional._entries import (
    check_clients,
    check_finite,
    check_fraction,
    check_same_shape,
    client_weights,
    count_of,
    lowest,
    mask_by,
    real,
    weighted_sum,
)


def saliency(grad: Tensor, weight: Tensor) -> Tensor:
    """Score each entry by what the loss would feel if it were removed, to first order: ``|grad * weight|``.

    ``grad`` is the gradient of a client's minibatch loss at ``weight``. The absolute value is taken here, per client
    and minibatch, before any average. Both may be stacks ``[K, ...]``.

    Citation: Ohib et al., "SSFL: Discovering Sparse Unified Subnetworks at Initialization for Efficient Federated
    Learning", OpenReview kUZ6LhUB26, Eq. 1; the criterion is that of SNIP (Lee et al., ICLR 2019).

    >>> import torch
    >>> saliency(torch.tensor([2.0, 0.5]), torch.tensor([1.0, -2.0]))
    tensor([2., 1.])
    """
    check_same_shape(grad, "The gradient", weight, "the weight")
    return (real(grad) * real(weight)).abs()


def mean_saliency(grads: Iterable[Mapping[str, Tensor]], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Score each entry on several minibatches: the mean over them of their own :func:`saliency`.

    ``grads`` are the gradients of one minibatch after the other, by the names of ``weights``. The absolute value is
    taken for each minibatch, as if it were a client of its own: gradients of two minibatches that cancel still count.

    Citation: Ohib et al., "SSFL: Discovering Sparse Unified Subnetworks at Initialization for Efficient Federated
    Learning", OpenReview kUZ6LhUB26, Section 4.2.3, "increasing the number of minibatches per client"; the authors'
    code averages so too (riohib/SSFL, api/client/client_strategies.py).

    >>> import torch
    >>> mean_saliency([{"w": torch.tensor([2.0, 1.0])}, {"w": torch.tensor([-2.0, 3.0])}], {"w": torch.ones(2)})
    {'w': tensor([2., 2.])}
    """
    total: dict[str, Tensor] = {}
    count = 0
    for minibatch in grads:
        scores = {name: saliency(minibatch[name], weight) for name, weight in weights.items()}
        total = {name: total[name] + score for name, score in scores.items()} if count else scores
        count += 1
    if count == 0:
        raise FedStrataError("There are no minibatches whose scores could be averaged; give gradients of at least one.")
    return {name: score / count for name, score in total.items()}


def mask_error(mask: Tensor | Mapping[str, Tensor], oracle: Tensor | Mapping[str, Tensor]) -> float:
    r"""Measure how wrong a mask is: the fraction of all entries on which it differs from the oracle's,
    :math:`\lVert m - m^* \rVert_1 / d`.

    A dict of masks is measured as one long mask; masks without entries have no error. The paper plots such an error
    over the number of minibatches without saying how it is normalised; this is the plain rate of wrong entries.

    Citation: Ohib et al., "SSFL: Discovering Sparse Unified Subnetworks at Initialization for Efficient Federated
    Learning", OpenReview kUZ6LhUB26, Section 4.2.3 and Fig. 4 (a, b).

    >>> import torch
    >>> mask_error(torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 1, 0]))
    0.5
    """
    masks, truth = (given if isinstance(given, Mapping) else {"": given} for given in (mask, oracle))
    if masks.keys() != truth.keys():
        raise FedStrataError(
            "The mask and the oracle's are dicts with different names; give masks of the same tensors."
        )
    wrong = total = 0
    for name, one in masks.items():
        check_same_shape(one, f"The mask {name}".strip(), truth[name], "the oracle's")
        wrong += int((one.to(torch.bool) != truth[name].to(torch.bool)).sum())
        total += one.numel()
    return wrong / total if total else 0.0


def aggregate_scores(scores: Tensor, sizes: Sequence[float] | Tensor) -> Tensor:
    """Average the clients' scores ``[K, ...]``, each weighted by its number of samples: ``sum_k n_k s_k / sum_k n_k``.

    Sums are taken in float64, so equal clients give back exactly their scores in float32. A client of size 0 counts
    for nothing; if all sizes are 0, one is negative, or their number is not K, they are refused, and so are NaN and
    infinite scores.

    Citation: Ohib et al., "SSFL: Discovering Sparse Unified Subnetworks at Initialization for Efficient Federated
    Learning", OpenReview kUZ6LhUB26, Eq. 3.

    >>> import torch
    >>> aggregate_scores(torch.tensor([[0.40, 0.10, 0.02, 0.32], [0.00, 0.60, 0.20, 0.10]]), [30, 10])
    tensor([0.3000, 0.2250, 0.0650, 0.2650])
    """
    check_clients(scores, "The tensor of scores")
    stack = real(scores)
    if len(stack) == 0:
        raise FedStrataError(
            "There are no clients whose scores could be averaged; give scores [K, ...] of at least one."
        )
    weights = client_weights(sizes, "sizes", len(stack), stack.device)
    if not bool((weights > 0).any()):
        raise FedStrataError(f"The sizes are {weights.tolist()}; at least one client must hold samples.")
    check_finite(stack, "The tensor of scores", batched=True)
    return (weighted_sum(stack, weights) / weights.sum()).to(stack.dtype)


@overload
def top_mask(scores: Tensor, sparsity: float, *, batched: bool = ...) -> Tensor: ...
@overload
def top_mask(scores: Mapping[str, Tensor], sparsity: float, *, batched: bool = ...) -> dict[str, Tensor]: ...
def top_mask(
    scores: Tensor | Mapping[str, Tensor], sparsity: float, *, batched: bool = False
) -> Tensor | dict[str, Tensor]:
    """Mark the ``k = floor((1 - sparsity) * d)`` highest of all ``d`` scores: ``m = TopK(s, k)``.

    A dict is ranked as one long vector, in its order, so that layers compete with each other and may end up with
    different densities, even empty. The count is exact: among equal scores the lower index is dropped first.
    ``sparsity`` lies in [0, 1) and is read as the decimal number that was written (0.9 of 10 entries leaves 1);
    ``sparsity = 0`` keeps all; where ``k`` is 0 nothing is kept. NaN and infinite scores are refused with the name of
    their tensor.

    With ``batched=True`` the first axis of every tensor is the clients, and each gets a mask of its own.

    Citation: Ohib et al., "SSFL: Discovering Sparse Unified Subnetworks at Initialization for Efficient Federated
    Learning", OpenReview kUZ6LhUB26, Section 3.2, "Global Mask Selection".

    >>> import torch
    >>> top_mask(torch.tensor([0.30, 0.225, 0.065, 0.265]), 0.5)
    tensor([ True, False, False,  True])
    >>> top_mask({"first": torch.tensor([[0.9, 0.8]]), "second": torch.tensor([0.1, 0.7])}, 0.5)
    {'first': tensor([[True, True]]), 'second': tensor([False, False])}
    """
    check_fraction(sparsity, "sparsity")

    def highest(rows: Tensor) -> Tensor:
        total = rows.shape[1]
        return ~lowest(rows, total - count_of(1 - sparsity, total))

    return mask_by(highest, scores, batched)
