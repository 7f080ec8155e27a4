"""Which entries of a pretrained model to train: those chosen by sensitivity, by magnitude or at random.

Ferdinando Del Vecchio, Marco Donatucci, Giacomo Di Palma, Emanuele Romano: "Federated Learning Under the Lens of Task
Arithmetic: Mitigating Interference via Sparse Fine-Tuning", report, Politecnico di Torino.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import overload

import torch
from torch import Tensor

from fedstrata import rng
from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.functional._entries import (
    check_clients,
    check_fraction,
    client_pieces,
    dropped_of,
    lowest,
    mask_by,
    real,
)

RULES = ("least", "most", "lowest-magnitude", "highest-magnitude", "random")


def fisher(grads_per_sample: Tensor) -> Tensor:
    """Estimate the diagonal of the empirical Fisher information from one gradient per sample, ``[B, ...]``.

    ``F_j = (1 / B) * sum_b (d log p(y_b | x_b) / d theta_j)^2`` with the true labels. The gradients must be those of
    single samples: squaring the gradient of a batch lets samples cancel each other, and ranks entries differently.
    The sign of the loss does not matter. At least one sample is needed; with one, the result is its squared gradient.
    Further axes ride along: ``[B, K, ...]`` gives one estimate per client, ``[K, ...]``. Estimates of several clients
    or rounds are averaged with :func:`fedstrata.functional.aggregate_scores`.

    Citation: Del Vecchio et al., "Federated Learning Under the Lens of Task Arithmetic: Mitigating Interference via
    Sparse Fine-Tuning", Politecnico di Torino, Section 3.3.1 (no equation is printed).

    >>> import torch
    >>> fisher(torch.tensor([[1.0, 2.0], [-1.0, 2.0]]))
    tensor([1., 4.])
    """
    check_clients(grads_per_sample, "The tensor of gradients")
    grads = real(grads_per_sample)
    if len(grads) == 0:
        raise FedStrataError("There are no samples; the Fisher information needs the gradient of at least one.")
    total = torch.zeros_like(grads[0], dtype=torch.float64)
    for piece in client_pieces(grads):
        total += piece.double().square().sum(0)
    return (total / len(grads)).to(grads.dtype)


@overload
def select(scores: Tensor, sparsity: float, rule: str, *, seed: int = ...) -> Tensor: ...
@overload
def select(scores: Mapping[str, Tensor], sparsity: float, rule: str, *, seed: int = ...) -> dict[str, Tensor]: ...
def select(
    scores: Tensor | Mapping[str, Tensor], sparsity: float, rule: str, *, seed: int = 0
) -> Tensor | dict[str, Tensor]:
    """Mark the entries to train when a fraction ``sparsity`` of all is frozen: True = trained.

    Of ``n`` entries ``floor(sparsity * n)`` are frozen, ranked over a whole tensor or a whole dict at once. What is
    trained:

    - ``least`` / ``most``: the lowest / highest ``scores``, which are then the Fisher information;
    - ``lowest-magnitude`` / ``highest-magnitude``: the smallest / largest ``|scores|``, which are then the pretrained
      weights;
    - ``random``: entries drawn uniformly, the same for the same ``seed`` on every device; of the scores only the
      shapes count.

    The count is exact: among equal scores the lower index is frozen first. ``sparsity`` lies in [0, 1) and is read as
    the decimal number that was written; ``sparsity = 0`` trains all, and one entry is always trained. NaN and
    infinite scores are refused with the name of their tensor.

    Citation: Del Vecchio et al., "Federated Learning Under the Lens of Task Arithmetic: Mitigating Interference via
    Sparse Fine-Tuning", Politecnico di Torino, Section 3.4.

    >>> import torch
    >>> select(torch.tensor([0.5, 0.1, 0.4, 0.05, 0.9]), 0.4, "least")
    tensor([False,  True,  True,  True, False])
    >>> select(torch.tensor([0.3, -0.8, 0.05, 0.6, -0.1]), 0.4, "highest-magnitude")
    tensor([ True,  True, False,  True, False])
    """
    check_fraction(sparsity, "sparsity")
    worth: dict[str, Callable[[Tensor], Tensor]] = {
        "least": torch.neg,
        "most": lambda rows: rows,
        "lowest-magnitude": lambda rows: rows.abs().neg_(),
        "highest-magnitude": torch.abs,
        "random": lambda rows: _random_words(rows, seed),
    }
    if rule not in RULES:
        raise unknown_name("selection rule", rule, RULES)
    return mask_by(lambda rows: ~lowest(worth[rule](rows), dropped_of(sparsity, rows.shape[1])), scores)


def select_further(
    scores: Mapping[str, Tensor], masks: Mapping[str, Tensor], sparsity: float, rule: str
) -> dict[str, Tensor]:
    """Freeze more than masks froze already, up to a fraction ``sparsity`` of all: True = trained.

    What is frozen stays frozen, whatever its score is now; of the rest, :func:`select` chooses by ``rule``, which is
    ``least`` or ``most``: the scores must not be negative.

    Citation: Iurada et al., "Efficient Model Editing with Task-Localized Sparse Fine-tuning", ICLR 2025, in the form of
    their code.

    >>> import torch
    >>> select_further({"a": torch.tensor([0.0, 3.0, 2.0, 1.0])}, {"a": torch.tensor([False, True, True, True])}, 0.5,
    ...                "least")
    {'a': tensor([False, False,  True,  True])}
    """
    if rule not in ("least", "most"):
        raise unknown_name("rule that ranks by estimates called", rule, ("least", "most"))
    hidden = {
        name: real(score).where(masks[name], -1.0 if rule == "most" else torch.finfo(real(score).dtype).max)
        for name, score in scores.items()
    }
    return select(hidden, sparsity, rule)


def progressive_sparsity(sparsity: float, round: int, rounds: int) -> float:
    """Return the fraction that is frozen after some of all rounds: ``1 - (1 - sparsity)^(round / rounds)``.

    Each round freezes the same part of what the one before left.

    Citation: Iurada et al., "Efficient Model Editing with Task-Localized Sparse Fine-tuning", ICLR 2025, in the form of
    their code.

    >>> [round(progressive_sparsity(0.75, done, 2), 3) for done in (1, 2)]
    [0.5, 0.75]
    """
    return 1 - math.pow(1 - sparsity, round / rounds)


def soften(model: Mapping[str, Tensor], masks: Mapping[str, Tensor], factor: float = 0.1) -> dict[str, Tensor]:
    """Multiply what masks freeze by a factor, so that scores are those of a model that hardly uses it.

    Citation: Iurada et al., "Efficient Model Editing with Task-Localized Sparse Fine-tuning", ICLR 2025, in the form of
    their code.

    >>> import torch
    >>> soften({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([3.0])}, {"a": torch.tensor([True, False])})
    {'a': tensor([1.0000, 0.2000]), 'b': tensor([3.])}
    """
    return {
        name: torch.where(masks[name], tensor, factor * tensor) if name in masks else tensor
        for name, tensor in model.items()
    }


def _random_words(rows: Tensor, seed: int) -> Tensor:
    """Draw 32 random bits per entry."""
    keys = torch.tensor([rng.key(seed, "select")], dtype=torch.int64, device=rows.device)
    return rng.philox(keys, rows.shape[1])[:, : rows.shape[1]]


def scaled_rounds(steps: int, reference_steps: int = 4, reference_rounds: int = 200) -> int:
    """Return the rounds that keep the total of local steps constant: ``J0 * T0 / J``, at least one.

    With more local steps J per round there are fewer rounds, so that runs with different J cost the same.

    Citation: Del Vecchio et al., "Federated Learning Under the Lens of Task Arithmetic: Mitigating Interference via
    Sparse Fine-Tuning", Politecnico di Torino, Section 3.2.4.

    >>> [scaled_rounds(steps) for steps in (4, 8, 16)]
    [200, 100, 50]
    """
    for value, name in ((steps, "steps"), (reference_steps, "reference_steps"), (reference_rounds, "reference_rounds")):
        if value < 1:
            raise FedStrataError(f"{name} is {value}, but there must be at least one.")
    return max(1, reference_steps * reference_rounds // steps)
