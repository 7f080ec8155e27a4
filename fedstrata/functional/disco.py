"""Shares of clients that look at their labels too: who holds few classes counts for less.

Rui Ye, Mingkai Xu, Jianyu Wang, Chenxin Xu, Siheng Chen, Yanfeng Wang: "FedDisco: Federated Learning with
Discrepancy-Aware Collaboration", ICML 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.functional._entries import all_finite, client_weights

DISTANCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    "kl": lambda labels, uniform: torch.xlogy(labels, labels / uniform).sum(1),
    "l1": lambda labels, uniform: (labels - uniform).abs().sum(1),
    "l2": lambda labels, uniform: vector_norm(labels - uniform, dim=1),
    "cosine": lambda labels, uniform: 1 - labels.sum(1) / (vector_norm(labels, dim=1) * math.sqrt(labels.shape[1])),
}
"""Distances of label distributions ``[K, classes]`` from the uniform one, by name."""


def disco_shares(
    sizes: Sequence[float] | Tensor,
    label_counts: Sequence[Sequence[float]] | Tensor,
    a: float,
    b: float,
    distance: str = "kl",
    normalise: bool = False,
) -> Tensor:
    r"""Compute the clients' shares ``[K]`` from their sizes and how far their labels are from uniform.

    With :math:`n_k` the relative size of client k and :math:`d_k` the distance of its label distribution from the
    uniform one::

        p_k = relu(n_k - a * d_k + b) / sum_j relu(n_j - a * d_j + b)

    ``label_counts`` are the clients' label histograms ``[K, classes]``. ``distance`` is the Kullback-Leibler divergence
    ``kl`` from uniform in nats, ``l1``, ``l2``, or ``cosine`` (one minus the cosine). With ``normalise`` the distances
    are divided by their sum, as the released code does with those of ``kl``, against the formula. Where no client would
    get anything, which the formula leaves open, the shares are the relative sizes. They are in float64 and sum to one.

    Sizes and histograms that are negative or not finite, sizes that are all 0, and an empty histogram are refused.

    Citation: Ye et al., "FedDisco: Federated Learning with Discrepancy-Aware Collaboration", ICML 2023.

    >>> disco_shares([0.5, 0.3, 0.2], [[25, 25], [30, 0], [5, 15]], a=0.5, b=0.1)
    tensor([0.6757, 0.0602, 0.2642], dtype=torch.float64)
    """
    if distance not in DISTANCES:
        raise unknown_name("distance of label distributions", distance, DISTANCES)
    if not (math.isfinite(a) and math.isfinite(b)):
        raise FedStrataError(f"a is {a} and b is {b}; give finite numbers.")
    counts = torch.as_tensor(label_counts).detach().to(torch.float64)
    if counts.dim() != 2 or 0 in counts.shape:
        raise FedStrataError(
            f"The label counts have the shape {tuple(counts.shape)}; give one histogram per client: [K, classes]."
        )
    if not all_finite(counts) or bool((counts < 0).any()) or bool((counts.sum(1) == 0).any()):
        raise FedStrataError(
            "Each client's label counts must be finite, not negative and not all zero; "
            "leave clients without samples out."
        )
    weights = client_weights(sizes, "sizes", len(counts), counts.device)
    if not bool((weights > 0).any()):
        raise FedStrataError(f"The sizes are {weights.tolist()}; at least one client must hold samples.")
    relative = weights / weights.sum()
    distances = DISTANCES[distance](counts / counts.sum(1, keepdim=True), 1 / counts.shape[1])
    if normalise:
        distances = distances / distances.sum().where(distances.sum() > 0, 1)
    shares = (relative - a * distances + b).clamp(min=0)
    return torch.where(shares.sum() > 0, shares / shares.sum(), relative)
