"""Masks of sparse methods: how dense each layer is, which entries go and which come back, how much two masks share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.functional._entries import (
    FRACTION_TOLERANCE,
    check_clients,
    check_finite,
    check_fraction,
    check_same_shape,
    client_pieces,
    client_rows,
    lowest,
    real,
)
from fedstrata.functional.ssfl import top_mask


def erk_densities(shapes: Sequence[Sequence[int]], density: float) -> list[float]:
    r"""Divide a global density over tensors in proportion to :math:`\sum_i n_i / \prod_i n_i` (Erdos-Renyi-Kernel).

    With :math:`n_i` the sizes of a tensor's axes, its density is :math:`\min(1, \epsilon \sum_i n_i / \prod_i n_i)`,
    where :math:`\epsilon` is such that the mean over all entries is ``density``: large tensors become sparser than
    small ones. Where a density would exceed 1 the tensor is dense, and the others make up for it. A tensor of one axis
    (a bias, a norm) is the first to become dense; one without entries counts as dense.

    Citation: Evci et al., "Rigging the Lottery: Making All Tickets Winners", ICML 2020, Section 3, with the kernel's
    axes; also the densities of Dai et al., "DisPFL", ICML 2022 (rong-dai/DisPFL, DisPFL/my_model_trainer.py). Those of
    FedDST, under the same name, are :func:`feddst_densities`.

    >>> [round(value, 4) for value in erk_densities([(10, 10), (10,), (2, 5)], 0.5)]
    [0.4, 1.0, 1.0]
    >>> [round(value, 4) for value in erk_densities([(4, 4), (8, 8)], 0.5)]
    [0.8333, 0.4167]
    """
    _check_density(density)
    return _in_proportion([_axes_to_entries(shape) for shape in shapes], _sizes(shapes), density, of_none=1.0)


def feddst_densities(shapes: Sequence[Sequence[int]], density: float) -> list[float]:
    r"""Divide a global sparsity over tensors in proportion to :math:`1 - \sum_i n_i / \prod_i n_i`; return densities.

    With :math:`n_i` the sizes of a tensor's axes, its density is :math:`1 - \min(1, c \, (1 - \sum_i n_i / \prod_i
    n_i))`, where c is such that the mean over all entries is ``density``. So the sparsities are scaled, where
    :func:`erk_densities` scales the densities, and most tensors end up close to the mean: a LeNet at 0.2 gets 0.23,
    0.20, 0.20, 0.21 and 0.28, where RigL's densities are 0.97, 0.31, 0.19, 0.46 and 1. A tensor with fewer entries than
    its axes add up to, such as a bias, stays dense as long as the others can be sparse enough; where none can, they are
    sparse alike.

    Citation: Bibikar et al., "Federated Dynamic Sparse Training", AAAI 2022, in the released code, where it is called
    ``erk`` (bibikar/feddst, models.py). There biases are counted too, and a tensor in which nothing would be left is
    not pruned.

    >>> [round(value, 4) for value in feddst_densities([(4, 4), (8, 8)], 0.5)]
    [0.6429, 0.4643]
    """
    _check_density(density)
    raw = [max(0.0, 1 - _axes_to_entries(shape)) for shape in shapes]
    return [1 - own for own in _in_proportion(raw, _sizes(shapes), 1 - density, of_none=0.0)]


def _check_density(density: float) -> None:
    if not 0 <= density <= 1:
        raise FedStrataError(f"density is {density}, but it is the fraction of entries to keep: from 0 to 1.")


def _sizes(shapes: Sequence[Sequence[int]]) -> list[int]:
    return [math.prod(shape) for shape in shapes]


def _axes_to_entries(shape: Sequence[int]) -> float:
    """Compare the sum of the axes with their product; 1 for a single number, and where there are no entries."""
    return sum(shape) / math.prod(shape) if shape and math.prod(shape) else 1.0


def _in_proportion(raw: Sequence[float], sizes: Sequence[int], mean: float, of_none: float) -> list[float]:
    """Scale fractions of tensors so that the mean over all entries is as given; none exceeds 1.

    Where one would, it is 1, and the others make up for it, alike if nothing tells them apart. A tensor without entries
    gets ``of_none``.
    """
    full: set[int] = set()
    while True:
        partial = {place: raw[place] for place, size in enumerate(sizes) if size and place not in full}
        if not any(partial.values()):
            partial = dict.fromkeys(partial, 1.0)
        budget = mean * sum(sizes) - sum(sizes[place] for place in full)
        share = sum(own * sizes[place] for place, own in partial.items())
        scaled = {place: own * budget / share for place, own in partial.items()}
        above = {place for place, own in scaled.items() if own > 1}
        if not above:
            scaled |= dict.fromkeys(full, 1.0)
            return [scaled.get(place, of_none) for place in range(len(sizes))]
        full |= above


def layer_masks(
    scores: Mapping[str, Tensor], densities: Sequence[float], *, batched: bool = False
) -> dict[str, Tensor]:
    """Keep the highest-scored entries of each tensor, as many as its density says.

    Of a tensor with ``n`` entries ``floor(density * n)`` are kept; ``densities`` are in the order of the dict, as
    :func:`erk_densities` or :func:`feddst_densities` give them. With random scores it is how RigL and DisPFL begin,
    with ``|w|`` how FedDST prunes. Among equal scores the lower index is dropped first.

    With ``batched=True`` the first axis is the clients, and each gets masks of its own.

    Citation: Evci et al., "Rigging the Lottery: Making All Tickets Winners", ICML 2020; Dai et al., "DisPFL", ICML
    2022; Bibikar et al., "FedDST", AAAI 2022.

    >>> import torch
    >>> layer_masks({"a": torch.tensor([3.0, 1.0, 2.0]), "b": torch.tensor([5.0, 9.0])}, [0.4, 1.0])
    {'a': tensor([ True, False, False]), 'b': tensor([True, True])}
    """
    return {
        name: top_mask(tensor, 1 - own, batched=batched) if own > 0 else torch.zeros_like(tensor, dtype=torch.bool)
        for (name, tensor), own in zip(scores.items(), densities, strict=True)
    }


def prune(mask: Tensor, scores: Tensor, count: int | Tensor, *, batched: bool = False) -> Tensor:
    """Drop the ``count`` lowest-scored of the entries that a mask keeps; return the new mask.

    With scores ``|w|`` this is magnitude pruning. Scores outside the mask do not matter. Where fewer than ``count``
    entries are kept, none stays. Among equal scores the lower index is dropped first.

    With ``batched=True`` the first axis is the clients, and ``count`` may be a tensor ``[K]``, a number for each.

    Citation: the drop step of Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse
    connectivity inspired by network science", Nature Communications 2018 (SET), and of RigL, DisPFL and FedDST.

    >>> import torch
    >>> mask = torch.tensor([True, True, False, True])
    >>> prune(mask, torch.tensor([0.5, 0.1, 0.0, 0.3]), 2)
    tensor([ True, False, False, False])
    """
    kept, rows = _prepared(mask, scores, batched)
    return (kept & ~lowest(rows.masked_fill(~kept, math.inf), _at_most(kept, count))).reshape(mask.shape)


def regrow(mask: Tensor, scores: Tensor, count: int | Tensor, *, batched: bool = False) -> Tensor:
    """Add the ``count`` highest-scored of the entries that a mask does not keep; return the new mask.

    With scores ``|gradient|`` this is RigL's growth, with random scores that of SET; grown from an empty mask, random
    scores give a random mask with an exact count. Scores inside the mask do not matter. Where fewer than ``count``
    entries are left, all of them are added. Among equal scores the higher index comes back first.

    With ``batched=True`` the first axis is the clients, and ``count`` may be a tensor ``[K]``, a number for each.

    Citation: the grow step of Evci et al., "Rigging the Lottery: Making All Tickets Winners", ICML 2020, and of SET,
    DisPFL and FedDST.

    >>> import torch
    >>> mask = torch.tensor([True, False, False, False])
    >>> regrow(mask, torch.tensor([9.0, 0.2, 0.7, 0.5]), 2)
    tensor([ True, False,  True,  True])
    """
    kept, rows = _prepared(mask, scores, batched)
    others = kept.shape[1] - _at_most(~kept, count)
    return (kept | ~lowest(rows.masked_fill(kept, -math.inf), others)).reshape(mask.shape)


def readjusted_at(round: int, total: int, alpha: float) -> float:
    r"""Compute the fraction of kept entries to exchange in a round: :math:`\frac{\alpha}{2} (1 + \cos(\pi t / T))`.

    It falls along a cosine from ``alpha`` at round 0 to 0 at round ``total``, and stays there.

    Citation: Evci et al., "Rigging the Lottery: Making All Tickets Winners", ICML 2020, Section 3; with rounds for
    steps Dai et al., "DisPFL", ICML 2022, and Bibikar et al., "FedDST", AAAI 2022.

    >>> [round(readjusted_at(round_, 4, 0.5), 4) for round_ in (0, 2, 4, 9)]
    [0.5, 0.25, 0.0, 0.0]
    """
    check_fraction(alpha, "alpha")
    if total < 1 or round < 0:
        raise FedStrataError(
            f"Round {round} of {total} does not exist; give a round from 0, and at least one in total."
        )
    return alpha / 2 * (1 + math.cos(math.pi * min(round / total, 1)))


def readjust(mask: Tensor, weight: Tensor, growth: Tensor, fraction: float, *, batched: bool = False) -> Tensor:
    """Exchange a fraction of a mask: drop the smallest weights that it keeps and add as many others; return the new
    mask.

    ``ceil(fraction * n)`` of the ``n`` kept entries go, those with the smallest ``|weight|``, and as many come back by
    the highest ``growth``, so that the mask keeps its count. What has just gone may come back.

    With ``batched=True`` the first axis is the clients, and each mask is exchanged for itself.

    Citation: one step of Mocanu et al., SET, Nature Communications 2018 (random ``growth``), and of Evci et al.,
    "Rigging the Lottery: Making All Tickets Winners", ICML 2020 (``|gradient|``).

    >>> import torch
    >>> mask, weight = torch.tensor([True, True, False, False]), torch.tensor([0.5, -0.1, 0.0, 0.0])
    >>> readjust(mask, weight, torch.tensor([0.0, 0.1, 0.2, 0.3]), 0.5)
    tensor([ True, False, False,  True])
    """
    check_fraction(fraction, "fraction")
    kept = client_rows(mask).sum(1) if batched else mask.sum()
    count = ((fraction - FRACTION_TOLERANCE) * kept.to(torch.float64)).ceil().to(torch.int64).clamp(min=0)
    return regrow(prune(mask, weight.abs(), count, batched=batched), growth, count, batched=batched)


def _prepared(mask: Tensor, scores: Tensor, batched: bool) -> tuple[Tensor, Tensor]:
    """Bring a mask and finite scores into rows ``[K, n]``."""
    check_same_shape(mask, "The mask", scores, "the tensor of scores")
    if batched:
        check_clients(mask, "The mask")
    check_finite(scores, "The tensor of scores", batched)
    kept, values = (tensor if batched else tensor[None] for tensor in (mask, real(scores)))
    return client_rows(kept.to(torch.bool)), client_rows(values)


def _at_most(available: Tensor, count: int | Tensor) -> Tensor:
    """Bound the counts by what each row has: ``[K]``."""
    return torch.as_tensor(count, device=available.device).clamp(min=0).minimum(available.sum(1))


def overlap(mask_a: Tensor | Mapping[str, Tensor], mask_b: Tensor | Mapping[str, Tensor]) -> float:
    r"""Measure how much of the first mask the second one shares: :math:`1 - \lVert a - b \rVert_1 / (2 \lVert a
    \rVert_1)`.

    For masks that keep equally many entries it is the part of them that both keep, from 0 to 1. A dict of masks is
    measured as one long mask. If the first mask is empty it is 1 for another empty one and else 0.

    Citation: Wu et al., "Bold but Cautious: Unlocking the Potential of Personalized Federated Learning through
    Cautiously Aggressive Collaboration" (FedCAC), ICCV 2023: the overlap of two clients' critical parameters.

    >>> import torch
    >>> overlap(torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 1, 0]))
    0.5
    """
    first, second = (mask if isinstance(mask, Mapping) else {"": mask} for mask in (mask_a, mask_b))
    if first.keys() != second.keys():
        raise FedStrataError("The two masks are dicts with different names; give masks of the same tensors.")
    for name, mask in first.items():
        check_same_shape(mask, f"The first mask {name}".strip(), second[name], "the second one")
    return float(overlaps({name: torch.stack((mask, second[name])) for name, mask in first.items()})[0, 1])


def overlaps(masks: Mapping[str, Tensor]) -> Tensor:
    """Measure the overlap of every pair of K clients' masks, each ``[K, ...]``: a matrix ``[K, K]`` in float64.

    The entry in row i and column j is :func:`overlap` of client i's masks with those of client j.

    Citation: Wu et al., "Bold but Cautious: Unlocking the Potential of Personalized Federated Learning through
    Cautiously Aggressive Collaboration" (FedCAC), ICCV 2023.

    >>> import torch
    >>> overlaps({"weight": torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [0, 0, 1, 1]])})
    tensor([[1.0000, 0.5000, 0.0000],
            [0.5000, 1.0000, 0.5000],
            [0.0000, 0.5000, 1.0000]], dtype=torch.float64)
    """
    rows = [client_rows(mask.to(torch.bool)) for mask in masks.values()]
    shared = sum((shared_entries(piece) for piece in rows), start=torch.zeros((), dtype=torch.float64))
    size = shared.diagonal()
    distance = size[:, None] + size - 2 * shared
    ratio = distance / (2 * size[:, None])
    return 1 - torch.where(size[:, None] > 0, ratio, (distance > 0).to(torch.float64))


def shared_entries(masks: Tensor) -> Tensor:
    """Count the entries that each pair of rows ``[K, n]`` both keep, exactly: ``[K, K]`` in float64."""
    columns = [piece.T.to(torch.float32) for piece in client_pieces(masks.T)]
    return torch.stack([(piece @ piece.T).to(torch.float64) for piece in columns]).sum(0)
