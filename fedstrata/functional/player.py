"""Which layers to federate: those before the point where federation sensitivity jumps.

Ahmed Elhussein, Gamze Gürsoy: "PLayer-FL: A Principled Approach to Personalized Layer-wise Cross-Silo Federated
Learning", arXiv 2502.08829.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.functional._entries import (
    all_finite,
    check_clients,
    check_finite,
    check_same_shape,
    client_pieces,
    client_rows,
    real,
)


def federation_sensitivity(
    weights: Sequence[Tensor | Sequence[Tensor]],
    grads: Sequence[Tensor | Sequence[Tensor]],
    *,
    batched: bool = False,
) -> Tensor:
    """Compute one client's federation sensitivity of every layer, cumulated from the first: a tensor ``[L]``.

    For layer l, with ``n_k`` entries in layer k::

        F_l = sum_{k <= l} (1 / n_k) * sum_p (theta_p * grad_p)^2

    ``weights`` and ``grads`` are lists over the layers in forward order; a layer is one tensor or a list of its
    tensors, over whose entries the mean runs together. A layer without entries adds nothing. NaN and infinite numbers
    are refused with the layer's position.

    With ``batched=True`` every tensor has a leading client axis and the result is ``[K, L]``. The server sums the
    clients' values and gives them to :func:`split_point`.

    Citation: Elhussein and Gürsoy, "PLayer-FL: A Principled Approach to Personalized Layer-wise Cross-Silo Federated
    Learning", arXiv 2502.08829, Eq. 2 and Algorithm 2.

    >>> import torch
    >>> weights = [torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0, 2.0, 0.0]), torch.tensor([3.0])]
    >>> grads = [torch.tensor([0.1, 0.1]), torch.tensor([0.2, 0.1, 0.05, 3.0]), torch.tensor([0.2])]
    >>> federation_sensitivity(weights, grads)
    tensor([0.0250, 0.0325, 0.3925])
    """
    layers, slopes = [_tensors(layer) for layer in weights], [_tensors(layer) for layer in grads]
    if not layers or len(layers) != len(slopes):
        raise FedStrataError(
            f"There are {len(layers)} layers of weights and {len(slopes)} of gradients; give as many of both, "
            "at least one."
        )
    for position, (layer, slope) in enumerate(zip(layers, slopes, strict=True)):
        _check_layer(layer, slope, position)
    if not batched:
        layers = [[tensor.unsqueeze(0) for tensor in layer] for layer in layers]
        slopes = [[tensor.unsqueeze(0) for tensor in layer] for layer in slopes]
    tensors = [tensor for layer in layers for tensor in layer]
    means = torch.zeros(_count_clients(tensors), len(layers), dtype=torch.float64, device=tensors[0].device)
    for position, (layer, slope) in enumerate(zip(layers, slopes, strict=True)):
        _add_mean_importance(means[:, position], layer, slope)
    if not all_finite(means):
        client, position = (~torch.isfinite(means)).nonzero()[0].tolist()
        whose = f" of client {client}" if batched else ""
        raise FedStrataError(
            f"The weights or gradients of layer {position}{whose} hold NaN or infinite numbers; "
            "look for training that diverged, or lower the learning rate."
        )
    dtype = reduce(torch.promote_types, [tensor.dtype for tensor in tensors])
    cumulated = means.cumsum(1).to(dtype)
    return cumulated if batched else cumulated[0]


def split_point(sensitivity: Tensor | Sequence[float], threshold: float) -> int:
    """Count the layers to federate: up to the first after which the sensitivity grows by more than ``threshold``.

    ``p = min{p : F_{p+1} / F_p > threshold}``; layers 1 to p are federated, the rest stays local; without such a p
    all are federated. ``sensitivity`` is the cumulated ``F`` of :func:`federation_sensitivity`, summed over the
    clients: ``[L]``.

    Cumulated values never fall, so a threshold below 1 federates one layer and an infinite one federates all. From 0
    to 0 the growth is 1; from 0 to more it is infinite, above every finite threshold. The paper gives no value for
    the threshold.

    Citation: Elhussein and Gürsoy, "PLayer-FL: A Principled Approach to Personalized Layer-wise Cross-Silo Federated
    Learning", arXiv 2502.08829, Eq. 3 and Algorithm 3. The printed Eq. 3 has lost its division sign, and the printed
    sets leave out layer p; it is federated here, as the paper's Table A.2 implies.

    >>> import torch
    >>> split_point(torch.tensor([0.045, 0.0825, 0.5325]), 2.0)
    2
    >>> split_point(torch.tensor([0.045, 0.0825, 0.5325]), float("inf"))
    3
    """
    if math.isnan(threshold) or threshold < 0:
        raise FedStrataError(
            f"The threshold is {threshold}; give a number of at least 0, or infinity to federate all layers."
        )
    values = torch.as_tensor(sensitivity, dtype=torch.float64).detach()
    if values.dim() != 1 or len(values) == 0:
        raise FedStrataError(
            f"The sensitivity has the shape {tuple(values.shape)}; give one number per layer, summed over the clients."
        )
    check_finite(values, "The sensitivity")
    if bool((values < 0).any()):
        raise FedStrataError(f"The sensitivity is {values.tolist()}; a mean of squares is never negative.")
    before, following = values[:-1], values[1:]
    growth = torch.where(following == before, 1.0, following / before)
    crossings = (growth > threshold).nonzero()
    return int(crossings[0]) + 1 if len(crossings) else len(values)


def _tensors(layer: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [real(tensor) for tensor in ([layer] if isinstance(layer, Tensor) else layer)]


def _check_layer(layer: Sequence[Tensor], slope: Sequence[Tensor], position: int) -> None:
    if len(layer) != len(slope):
        raise FedStrataError(
            f"Layer {position} has {len(layer)} weight tensors but {len(slope)} gradients; give one for each."
        )
    for weight, grad in zip(layer, slope, strict=True):
        check_same_shape(weight, f"A weight of layer {position}", grad, "its gradient")


def _count_clients(tensors: Sequence[Tensor]) -> int:
    for tensor in tensors:
        check_clients(tensor, "A layer's tensor")
    counts = {len(tensor) for tensor in tensors}
    if len(counts) != 1:
        raise FedStrataError(
            f"The layers have {sorted(counts)} clients; give at least one tensor, and as many clients in each."
        )
    return counts.pop()


def _add_mean_importance(means: Tensor, layer: Sequence[Tensor], slope: Sequence[Tensor]) -> None:
    """Add the mean of ``(theta * grad)^2`` over all entries of one layer to the clients' ``means``, ``[K]``."""
    entries = sum(math.prod(weight.shape[1:]) for weight in layer)
    for weight, grad in zip(layer, slope, strict=True):
        pairs = zip(client_pieces(weight), client_pieces(grad), strict=True)
        squares = torch.cat([client_rows(piece.double() * other).square().sum(1) for piece, other in pairs])
        means += squares / max(entries, 1)
