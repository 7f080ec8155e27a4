"""How far the masks of a sparse method are from those that all samples would give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.diagnostics.contract import Diagnostic, Measured, Need, Quantity, Seen, diagnostics
from fedstrata.diagnostics.masks import in_layers, masks_refused, one_by_one, upload_masks
from fedstrata.diagnostics.updates import due_every
from fedstrata.functional import aggregate_scores, top_mask
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.composition import Method
from fedstrata.methods.contract.declarations import Matter
from fedstrata.spec import parameter
from fedstrata.stack import Stack, Tensors, per_client


def oracle_masks(gradients: Mapping[str, Tensor], weights: Mapping[str, Tensor], sizes: Tensor, kept: int) -> Tensors:
    r"""Keep the entries with the largest saliency :math:`|\partial L / \partial w \cdot w|` on all clients' samples.

    ``gradients`` are those of each client's mean loss over all its samples, ``weights`` the weights at which they were
    taken, both ``[K, ...]``; clients count by their ``sizes`` ``[K]``. As many entries are ``kept`` as said, over all
    tensors together.

    Citation: Ohib et al., "SSFL: Discovering Sparse Unified Subnetworks at Initialization for Efficient Federated
    Learning", OpenReview kUZ6LhUB26, Section 4.2.3; :func:`fedstrata.studies.mask_errors` takes the same oracle.

    >>> gradients, weights = {"w": torch.tensor([[1.0, -3.0, 1.0]])}, {"w": torch.tensor([[5.0, 2.0, 0.0]])}
    >>> oracle_masks(gradients, weights, torch.tensor([7]), 1)
    {'w': tensor([False,  True, False])}
    """
    scores = {name: aggregate_scores(gradients[name] * weights[name], sizes).abs() for name in gradients}
    entries = sum(score.numel() for score in scores.values())
    if kept == 0:
        return {name: torch.zeros_like(score, dtype=torch.bool) for name, score in scores.items()}
    return top_mask(scores, 1 - kept / entries)


@diagnostics.register("oracle")
@dataclass(frozen=True)
class Oracle(Diagnostic):
    r"""Tell on which part of its entries each client's mask differs from the oracle's.

    The oracle's mask keeps as many weights as the client's own, over all masked tensors together, those with the
    largest :math:`|\partial L / \partial w \cdot w|` on all training samples of the round's participants. Weights are
    those that clients received, and those outside of their masks count at their initial values, as where ``ssfl``
    looks for a new mask. In the first round that is the oracle of SSFL's study (Fig. 4); of a method that finds masks
    in another way it tells how far these are from salient ones, not that they are wrong. The error is
    :math:`\lVert m - m^* \rVert_1 / d` (:func:`fedstrata.functional.mask_error`), from 0 to twice the smaller of the
    parts that are kept and that are not: a random mask of half of the weights has 0.5.

    Costs a forward and a backward pass over all training samples in the rounds in which it is computed: a quarter of a
    round of 20 clients on digits with the CNN.

    Citation: Ohib et al., "SSFL: Discovering Sparse Unified Subnetworks at Initialization for Efficient Federated
    Learning", OpenReview kUZ6LhUB26, Section 4.2.3 and Fig. 4.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.UPLOADS, Need.MODELS, Need.DATA})
    quantities: ClassVar[Mapping[str, Quantity]] = {
        "oracle.error": Quantity(
            "Error of the masks against the oracle",
            "On which part of the masked weights a client's mask differs from the one that all samples would give, in "
            "the mean over clients: 0 is the same mask.",
            low=0,
            high=1,
        ),
    }

    every: int = parameter(10, "The number of rounds from one comparison to the next.", low=1)
    batch_size: int = parameter(64, "Samples in each batch of the passes over all samples.", low=1)

    def unfit(self, method: Method, layers: LayerMap) -> str | None:
        """Say that nobody masks weights."""
        if method.taking(Matter.WEIGHTS) is not None:
            return f"'{method}' trains no plain weights whose saliency an oracle could know"
        return masks_refused(method)

    def due(self, round: int, rounds: int) -> bool:
        """Compare in the first round, the last, and every so many."""
        return due_every(self.every, round, rounds)

    def compute(self, seen: Seen, memory: Stack) -> Measured:
        """Measure from the uploads and the samples of one round's participants."""
        assert seen.probe is not None
        masks = upload_masks(seen.layers, seen.uploads)
        if not masks:
            return Measured()
        outside = {name: seen.initial.get(name, seen.before[name]) for name in masks}
        whole = {**seen.received, **{name: seen.received[name].where(masks[name], outside[name]) for name in masks}}
        gradients = seen.probe.gradients(whole, self.batch_size, all_samples=True)
        scored = {name: gradients[name] for name in masks}
        if not all(bool(gradient.isfinite().all()) for gradient in scored.values()):
            return Measured()  # training diverged: the run goes on as it would unobserved
        kept = torch.stack([per_client(mask).sum(1) for mask in masks.values()]).sum(0).tolist()
        oracles = {count: oracle_masks(scored, whole, seen.sizes, count) for count in set(kept)}
        truth = {name: torch.stack([oracles[count][name] for count in kept]) for name in masks}
        errors = {
            layer: one_by_one((masks[name], truth[name]) for name in names).hamming
            for layer, names in in_layers(seen.layers, masks).items()
        }
        everywhere = one_by_one((masks[name], truth[name]) for name in masks).hamming
        return Measured(
            of_round={"oracle.error": everywhere.mean()},
            layers={"oracle.error": {layer: error.mean() for layer, error in errors.items()}},
            clients={"oracle.error": everywhere},
        )
