"""Merging where some clients lie: what is taken of their replies, and how much of each.

Dong Yin, Yudong Chen, Kannan Ramchandran, Peter Bartlett: "Byzantine-Robust Distributed Learning: Towards Optimal
Statistical Rates", ICML 2018. Peva Blanchard, El Mahdi El Mhamdi, Rachid Guerraoui, Julien Stainer: "Machine Learning
with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017. Krishna Pillutla, Sham Kakade, Zaid Harchaoui:
"Robust Aggregation for Federated Learning", IEEE Transactions on Signal Processing 2022. Ziteng Sun, Peter Kairouz,
Ananda Theertha Suresh, H. Brendan McMahan: "Can You Really Backdoor Federated Learning?", 2019. Xiaoyu Cao, Minghong
Fang, Jia Liu, Neil Zhenqiang Gong: "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping", NDSS 2021.
Gilad Baruch, Moran Baruch, Yoav Goldberg: "A Little Is Enough: Circumventing Defenses For Distributed Learning",
NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Sequence

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
    count_of,
    real,
    weighted_sum,
)

Updates = Tensor | Sequence[Tensor]
"""What clients changed: one tensor ``[K, ...]``, or all tensors of a model, which then count together as one vector."""

# Entry by entry -------------------------------------------------------------------------------------------------------


def coordinate_median(clients: Tensor, *, mask: Tensor | None = None, otherwise: Tensor | None = None) -> Tensor:
    """Take the median of every entry over the clients ``[K, ...]``; of an even number, the mean of the middle two.

    Clients count equally. ``mask``, boolean and of a shape that broadcasts to ``clients``, says which entries a client
    sent: the median of an entry runs over those who sent it, and where nobody did it is that of ``otherwise``, or zero.
    As long as fewer than half of those are liars, it lies between values of honest clients.

    Citation: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018;
    masks are our addition.

    >>> import torch
    >>> coordinate_median(torch.tensor([[1.0, 5.0], [2.0, 7.0], [900.0, -900.0]]))
    tensor([2., 5.])
    """
    ordered, count = _ordered(clients, mask)
    middle = [ordered.gather(0, place[None])[0] / 2 for place in ((count - 1).clamp(min=0) // 2, count // 2)]
    return _where_sent(middle[0] + middle[1], count, otherwise)


def trimmed_mean(
    clients: Tensor, trim: float, *, mask: Tensor | None = None, otherwise: Tensor | None = None
) -> Tensor:
    """Take the mean of every entry over the clients ``[K, ...]`` without its largest and its smallest values.

    Of the m clients that sent an entry, ``floor(trim * m)`` are left out on either side; ``trim`` is less than a half.
    Clients count equally, ``mask`` and ``otherwise`` are those of :func:`coordinate_median`. As long as at most the
    fraction ``trim`` of those are liars, every value that is left lies between values of honest clients.

    Citation: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018;
    masks are our addition.

    >>> import torch
    >>> trimmed_mean(torch.tensor([[1.0], [2.0], [4.0], [900.0], [-900.0]]), 0.2)
    tensor([2.3333])
    """
    if not 0 <= trim < 0.5:
        raise FedStrataError(f"trim is {trim}; it is the fraction left out on either side: at least 0, less than 0.5.")
    ordered, count = _ordered(clients, mask)
    cuts = torch.tensor([count_of(trim, total) for total in range(len(ordered) + 1)], device=ordered.device)[count]
    places = torch.arange(len(ordered), device=ordered.device).reshape(-1, *[1] * (ordered.dim() - 1))
    left = (places >= cuts) & (places < count - cuts)
    total = torch.where(left, ordered, ordered.new_zeros(())).sum(0, dtype=torch.float64)
    return _where_sent((total / (count - 2 * cuts).clamp(min=1)).to(ordered.dtype), count, otherwise)


def _ordered(clients: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Order the values of every entry, those that were not sent last, and count those that were."""
    check_clients(clients, "The tensor of the clients")
    if len(clients) == 0:
        raise FedStrataError("There are no clients whose tensors could be merged; give [K, ...] of at least one.")
    stack = real(clients)
    check_finite(stack, "The tensor", batched=True)
    if mask is None:
        return stack.sort(0).values, torch.full(stack.shape[1:], len(stack), device=stack.device)
    sent = mask.expand_as(stack)
    ordered = stack.where(sent, torch.inf).sort(0).values
    return ordered.where(torch.isfinite(ordered), 0), sent.sum(0)


def _where_sent(merged: Tensor, count: Tensor, otherwise: Tensor | None) -> Tensor:
    return merged.where(count > 0, merged.new_zeros(()) if otherwise is None else real(otherwise).to(merged.dtype))


# All entries of a client together -------------------------------------------------------------------------------------


def krum_scores(updates: Updates, byzantine: int) -> Tensor:
    r"""Score each of K clients by its squared distances to the ``K - byzantine - 2`` nearest others: ``[K]``, float64.

    The client with the lowest score lies where most others are; Krum takes its update alone, Multi-Krum the mean of
    several. With f liars the paper needs :math:`K > 2 f + 2` clients, fewer are refused. Where nobody lies (0), at
    least one neighbour counts. Distances run over all tensors together.

    Citation: Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017.

    >>> import torch
    >>> krum_scores(torch.tensor([[0.0], [1.0], [2.0], [4.0], [900.0]]), 1).tolist()
    [5.0, 2.0, 5.0, 13.0, 1609220.0]
    """
    tensors, clients = _tensors(updates)
    if byzantine < 0 or (byzantine > 0 and clients <= 2 * byzantine + 2):
        raise FedStrataError(
            f"Krum cannot tell {byzantine} liars among {clients} clients: it needs more than 2 x {byzantine} + 2."
        )
    gram = torch.zeros(clients, clients, dtype=torch.float64, device=tensors[0].device)
    for tensor in tensors:
        rows = client_rows(tensor).double()
        gram += rows @ rows.T
    sizes = gram.diagonal()
    # One triangle, so that two clients are as far from each other as the other way round, to the bit.
    half = (sizes[:, None] + sizes - 2 * gram).clamp(min=0).triu(1)
    distances = (half + half.T).nan_to_num(nan=torch.inf, posinf=torch.inf).fill_diagonal_(torch.inf)
    neighbours = min(max(1, clients - byzantine - 2), clients - 1)
    return distances.sort(1).values[:, :neighbours].sum(1)


def geometric_median_shares(updates: Updates, iterations: int = 4, smoothing: float = 1e-5) -> Tensor:
    r"""Find the shares ``[K]`` with which the clients' mean is, nearly, their geometric median; they sum to one.

    The geometric median is the point v with the smallest sum of distances :math:`\sum_k \lVert v - u_k \rVert`, here
    over all tensors together. The smoothed Weiszfeld algorithm repeats, from v = 0, where nobody has moved::

        beta_k = 1 / max(smoothing, ||v - u_k||),    v = sum_k beta_k u_k / sum_k beta_k

    Clients count equally. The authors begin at the mean and weigh by samples; a single liar moves the mean, and with it
    what few iterations reach, as far as it likes, and may call itself as large as it likes.

    Citation: Pillutla et al., "Robust Aggregation for Federated Learning", IEEE Transactions on Signal Processing 2022;
    beginning and weights are our choice.

    >>> import torch
    >>> geometric_median_shares(torch.tensor([[1.0, 0.0], [0.0, 1.0], [30.0, 40.0]]), iterations=1).tolist()
    [0.49504950495049505, 0.49504950495049505, 0.009900990099009901]
    """
    if iterations < 1 or not smoothing > 0:
        raise FedStrataError(
            f"The geometric median takes at least one iteration and a smoothing above 0, not {iterations} and "
            f"{smoothing}."
        )
    tensors, clients = _tensors(updates)
    shares = torch.zeros(clients, dtype=torch.float64, device=tensors[0].device)
    for _ in range(iterations):
        middle = [weighted_sum(tensor, shares) for tensor in tensors]
        near = 1 / _lengths(tensors, middle).clamp(min=smoothing)
        shares = near / near.sum()
    return shares


def bounding_factors(updates: Updates, bound: float | None = None) -> Tensor:
    r"""Compute the factors ``[K]`` that bring every client's update to a length of at most ``bound``, in float64.

    The factor is :math:`\min(1, M / \lVert u_k \rVert)` with the bound M, and the length that of all tensors together.
    Without a bound it is the median of the clients' own lengths.

    Citation: Sun et al., "Can You Really Backdoor Federated Learning?", 2019 (norm thresholding); the median is our
    choice.

    >>> import torch
    >>> bounding_factors(torch.tensor([[3.0, 4.0], [0.6, 0.8], [30.0, 40.0]])).tolist()
    [1.0, 1.0, 0.1]
    """
    if bound is not None and not bound > 0:
        raise FedStrataError(f"The bound of an update's length is {bound}; give a number above 0.")
    tensors, _ = _tensors(updates)
    lengths = _lengths(tensors)
    most = coordinate_median(lengths) if bound is None else lengths.new_tensor(bound)
    return (most / lengths.where(lengths > 0, 1)).clamp(max=1).where(lengths > 0, 1)


def trust_weights(updates: Updates, own: Updates) -> Tensor:
    r"""Compute what each client's update is multiplied by ``[K]`` where the server has an update of its own, g.

    A client is trusted as far as it goes the server's way, and brought to the server's length::

        trust_k  = max(0, cos(u_k, g))
        weight_k = trust_k / sum_j trust_j * ||g|| / ||u_k||

    over all tensors together, so that the merged update is the sum of the weighted ones. Who did not move is not
    trusted; where nobody is, all weights are zero. ``own`` has no axis of clients.

    Citation: Cao et al., "FLTrust: Byzantine-robust Federated Learning via Trust Bootstrapping", NDSS 2021; the last
    cases are our choice.

    >>> import torch
    >>> trust_weights(torch.tensor([[6.0, 8.0], [-3.0, -4.0], [0.0, 2.0]]), torch.tensor([0.0, 5.0])).round(decimals=4)
    tensor([0.2222, 0.0000, 1.3889], dtype=torch.float64)
    """
    tensors, clients = _tensors(updates)
    guide = [real(tensor).double() for tensor in ([own] if isinstance(own, Tensor) else own)]
    for tensor, direction in zip(tensors, guide, strict=True):
        check_same_shape(tensor[0], "A client's update", direction, "the server's own")
        check_finite(direction, "The server's own update")
    inner = torch.zeros(clients, dtype=torch.float64, device=tensors[0].device)
    for tensor, direction in zip(tensors, guide, strict=True):
        inner += torch.cat([client_rows(piece.double()) @ direction.flatten() for piece in client_pieces(tensor)])
    length = vector_norm(torch.stack([vector_norm(direction) for direction in guide]))
    lengths = _lengths(tensors)
    moved = (lengths > 0) & (length > 0)
    trust = (inner / (lengths * length).where(moved, 1)).clamp(0, 1).where(moved, 0)
    total = trust.sum()
    weights: Tensor = trust / total.where(total > 0, 1) * length / lengths.where(moved, 1)
    return weights


def alie(updates: Tensor, deviations: float = 1.5) -> Tensor:
    """Make the update ("A Little Is Enough") that liars send who know each other's honest ones ``[K, ...]``.

    Every entry is the liars' mean minus ``deviations`` times their standard deviation (that of the K numbers, not an
    estimate): small enough to pass for an honest client, and the same for all liars, so that it looks agreed on.

    Citation: Baruch et al., "A Little Is Enough: Circumventing Defenses For Distributed Learning", NeurIPS 2019.

    >>> import torch
    >>> alie(torch.tensor([[1.0, 5.0], [3.0, 5.0]]), 1.5)
    tensor([0.5000, 5.0000])
    """
    [tensor], _ = _tensors(updates)
    return (tensor.double().mean(0) - deviations * tensor.double().std(0, correction=0)).to(tensor.dtype)


def _tensors(updates: Updates) -> tuple[list[Tensor], int]:
    """Check the tensors of all clients' updates, and count the clients."""
    tensors = [real(tensor) for tensor in ([updates] if isinstance(updates, Tensor) else updates)]
    if not tensors:
        raise FedStrataError("There are no updates to compare; give at least one tensor [K, ...].")
    for position, tensor in enumerate(tensors):
        check_clients(tensor, f"Tensor {position} of the updates")
        if len(tensor) == 0 or len(tensor) != len(tensors[0]):
            raise FedStrataError(
                f"Tensor {position} of the updates has {len(tensor)} clients where the first has {len(tensors[0])}; "
                "give the same number, at least one, in each."
            )
        check_finite(tensor, f"Tensor {position} of the updates", batched=True)
    return tensors, len(tensors[0])


def _lengths(updates: Sequence[Tensor], origin: Sequence[Tensor] | None = None) -> Tensor:
    """Compute each client's distance ``[K]`` from a point, or from zero, over all tensors together, in float64."""
    lengths = []
    for position, update in enumerate(updates):
        point = 0 if origin is None else origin[position]
        pieces = [vector_norm(client_rows(piece.double() - point), dim=1) for piece in client_pieces(update)]
        lengths.append(torch.cat(pieces))
    together: Tensor = vector_norm(torch.stack(lengths), dim=0)
    return together
