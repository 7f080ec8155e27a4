"""Layer-wise weight shrinking: a merged layer is shrunk the more, the less the clients agree on it.

Changlong Shi, Jinmeng Li, He Zhao, Dandan Guo, Yi Chang: "FedLWS: Federated Learning with Adaptive Layer-wise Weight
Shrinking", ICLR 2025.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.functional._entries import (
    check_clients,
    check_finite,
    check_same_shape,
    client_pieces,
    client_rows,
    client_weights,
    real,
    weighted_sum,
)

SHARE_TOLERANCE = 1e-5
"""How far the shares' sum may be from one: the rounding of shares that were computed in float32."""

MODES = ("both", "reg", "opt")


class Shrinking(NamedTuple):
    """How one layer is shrunk: the factor ``gamma``, how much the clients disagree, ``tau`` (Eq. 4), and the balance
    ``r`` between the pull towards zero and the step that results (Eq. 5).
    """

    gamma: float
    tau: float
    r: float


def shrinking(
    weight: Tensor | Sequence[Tensor],
    updates: Tensor | Sequence[Tensor],
    shares: Sequence[float] | Tensor | None,
    beta: float = 0.0,
    *,
    step: Tensor | Sequence[Tensor] | None = None,
    clamp: tuple[float, float] | None = None,
    fixed: float | None = None,
) -> Shrinking:
    """Compute the factor by which one layer is multiplied after aggregation, and what it comes from.

    Everything is as in :func:`shrink_factor`; besides the factor ``gamma`` it returns ``tau`` and::

        r = (1 - gamma) * ||w|| / (gamma * ||sum_k lambda_k g_k||)

    which is ``beta * tau`` where the factor is the equation's. ``fixed`` is a factor that was found in another way: the
    paper compares its ``r`` with ``tau`` in Fig. 1a. ``r`` is 0 where nothing is pulled, and infinite where a pull
    meets no step.

    Citation: Shi et al., "FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking", ICLR 2025, Eq. 4 to 8.

    >>> import torch
    >>> layer, updates = torch.tensor([3.0, 4.0]), torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> [round(number, 8) for number in shrinking(layer, updates, [0.5, 0.5], fixed=0.8)]
    [0.8, 0.70710678, 1.76776695]
    """
    if not (math.isfinite(beta) and beta >= 0):
        raise FedStrataError(f"beta is {beta}; give a number of at least 0.")
    if clamp is not None and not 0 <= clamp[0] <= clamp[1]:
        raise FedStrataError(
            f"clamp is {clamp}; give a lower bound of at least 0 and an upper bound that is not below it."
        )
    old, moved = _layer(weight), _layer(updates)
    _check_updates(old, moved)
    if not old:
        return Shrinking(1.0 if fixed is None else fixed, 0.0, 0.0)
    if step is None:
        taken = _weighted_updates(moved, shares)
    else:
        taken = _layer(step)
        _check_tensors(old, taken, "step")
    numbers = torch.stack([_norm(old), _disagreement(moved), _norm(taken)])
    if not bool(torch.isfinite(numbers).all()):
        _refuse_not_finite(old, moved, taken)
    size, disagreement, length = numbers.tolist()
    gamma = _factor(size, beta * disagreement, length, clamp) if fixed is None else fixed
    pull = (1 - gamma) * size
    return Shrinking(gamma, disagreement, _ratio(pull, gamma * length))


def shrink_factor(
    weight: Tensor | Sequence[Tensor],
    updates: Tensor | Sequence[Tensor],
    shares: Sequence[float] | Tensor | None,
    beta: float,
    *,
    step: Tensor | Sequence[Tensor] | None = None,
    clamp: tuple[float, float] | None = None,
) -> float:
    """Compute the factor by which one layer is multiplied after aggregation.

    With ``w`` the layer's old global weight, ``g_k`` the update of client k (its weight after training minus ``w``) and
    ``lambda_k`` its share::

        gamma = ||w|| / (beta * tau * ||sum_k lambda_k g_k|| + ||w||)
        tau   = (1 / K) * sum_k ||g_k - g_mean||,   g_mean = (1 / K) * sum_k g_k

    ``g_mean`` is not weighted, whatever the shares are; norms are plain (not squared) and run over all tensors of the
    layer together. ``weight`` is the layer's tensor or a list of its tensors, ``updates`` the same with a leading
    client axis. All tensors of a model in one list give the paper's model-wise factor. Sums are in float64.

    ``step`` is what the server really added to ``w``, where that is not the weighted sum of the updates (server
    momentum, masks, weights that do not sum to one); shares may then be None. ``clamp = (low, high)`` bounds ``beta *
    tau``: the released code does so with (0.01, 0.2), against the paper.

    The factor is 1 for one client, for clients that agree, for ``beta = 0``, for a step of zero and for a layer
    without entries. It is also 1 for a layer of zeros, where the formula's 0 would hold the layer at zero for ever
    and is excluded by the paper's ``0 < gamma``. Shares that do not sum to one and NaN or infinite numbers are
    refused.

    Citation: Shi et al., "FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking", ICLR 2025, Eq. 4, 7
    and 8.

    >>> import torch
    >>> round(shrink_factor(torch.tensor([3.0, 4.0]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]), [0.5, 0.5], 0.1), 8)
    0.99009901
    """
    return shrinking(weight, updates, shares, beta, step=step, clamp=clamp).gamma


def shrink(old: Tensor, merged: Tensor, factor: float, mode: str = "both") -> Tensor:
    """Apply a shrinking factor ``gamma`` to a merged tensor, in one of three ways.

    With ``w`` the old global tensor and ``w_hat`` the merged one, ``gamma * w_hat`` equals
    ``w + gamma * (w_hat - w) - (1 - gamma) * w``: a smaller step and a pull towards zero.

    - ``both``, the method: ``gamma * w_hat``;
    - ``reg``, only the pull: ``w_hat - (1 - gamma) * w``;
    - ``opt``, only the smaller step: ``w + gamma * (w_hat - w)``.

    A factor of 1 gives the merged tensor back bit for bit in every mode. Other factors lie in [0, 1).

    Citation: Shi et al., "FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking", ICLR 2025, Eq. 3 and
    9; the single terms are Appendix B.4 (only-reg, only-opt), read through Eq. 3.

    >>> import torch
    >>> old, merged = torch.tensor([3.0, 4.0]), torch.tensor([4.0, 4.0])
    >>> shrink(old, merged, 0.75), shrink(old, merged, 0.75, "reg"), shrink(old, merged, 0.75, "opt")
    (tensor([3., 3.]), tensor([3.2500, 3.0000]), tensor([3.7500, 4.0000]))
    """
    if mode not in MODES:
        raise unknown_name("shrinking mode", mode, MODES)
    if not 0 <= factor <= 1:
        raise FedStrataError(f"The shrinking factor is {factor}; it must lie between 0 and 1.")
    check_same_shape(old, "The old tensor", merged, "the merged one")
    before, after = old.detach(), merged.detach()
    if factor == 1:
        return after.clone()
    if mode == "both":
        return factor * after
    return after - (1 - factor) * (before if mode == "reg" else after - before)


def _factor(size: float, strength: float, length: float, clamp: tuple[float, float] | None) -> float:
    """Compute ``gamma``, with the strength ``beta * tau`` inside of its bounds."""
    if clamp is not None:
        strength = min(max(strength, clamp[0]), clamp[1])
    return float(size / (strength * length + size)) if size > 0 else 1.0


def _ratio(pull: float, step: float) -> float:
    if pull == 0:
        return 0.0
    return pull / step if step > 0 else math.inf


def _layer(tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [real(tensor) for tensor in ([tensors] if isinstance(tensors, Tensor) else tensors)]


def _check_tensors(old: Sequence[Tensor], other: Sequence[Tensor], name: str) -> None:
    if len(old) != len(other):
        raise FedStrataError(f"The layer has {len(old)} tensors but {name} has {len(other)}; give one for each.")
    for position, (weight, tensor) in enumerate(zip(old, other, strict=True)):
        check_same_shape(weight, f"Tensor {position} of the layer", tensor, f"that of {name}")


def _check_updates(old: Sequence[Tensor], updates: Sequence[Tensor]) -> None:
    for position, update in enumerate(updates):
        check_clients(update, f"Tensor {position} of the updates")
        if len(update) == 0 or len(update) != len(updates[0]):
            raise FedStrataError(
                f"Tensor {position} of the updates has {len(update)} clients where the first has {len(updates[0])}; "
                "give the same number, at least one, in each."
            )
    _check_tensors(old, [update[0] for update in updates], "each client's update")


def _weighted_updates(updates: Sequence[Tensor], shares: Sequence[float] | Tensor | None) -> list[Tensor]:
    if shares is None:
        raise FedStrataError("There are no shares; give one per client, or the server's step instead.")
    weights = client_weights(shares, "shares", len(updates[0]), updates[0].device)
    if abs(float(weights.sum()) - 1) > SHARE_TOLERANCE:
        raise FedStrataError(
            f"The shares sum to {float(weights.sum()):.6g}, not to one; divide them by their sum, "
            "or give the server's step instead."
        )
    return [weighted_sum(update, weights) for update in updates]


def _norm(tensors: Sequence[Tensor]) -> Tensor:
    norm: Tensor = vector_norm(torch.stack([vector_norm(tensor.double()) for tensor in tensors]))
    return norm


def _disagreement(updates: Sequence[Tensor]) -> Tensor:
    """Compute ``tau``: the clients' mean distance from their unweighted mean."""
    distances = []
    for update in updates:
        mean = weighted_sum(update, torch.ones(len(update), dtype=torch.float64, device=update.device)) / len(update)
        pieces = [vector_norm(client_rows(piece - mean), dim=1) for piece in client_pieces(update)]
        distances.append(torch.cat(pieces))
    mean_distance: Tensor = vector_norm(torch.stack(distances), dim=0).mean()
    return mean_distance


def _refuse_not_finite(old: Sequence[Tensor], updates: Sequence[Tensor], step: Sequence[Tensor]) -> None:
    for position, (weight, update, taken) in enumerate(zip(old, updates, step, strict=True)):
        check_finite(weight, f"Tensor {position} of the layer")
        check_finite(update, f"Tensor {position} of the updates", batched=True)
        check_finite(taken, f"Tensor {position} of the step")
    raise FedStrataError(
        "The layer or its updates are too large for a norm in float64; look for training that diverged."
    )
