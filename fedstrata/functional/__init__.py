"""The papers' mathematics as pure functions on tensors, for any training loop.

===========================================  ======================================================================
LIPS, transient sparsity                     :func:`sparsity_at`, :func:`sensitivity`, :func:`keep_mask`
SSFL, one shared mask from saliency          :func:`saliency`, :func:`mean_saliency`, :func:`aggregate_scores`,
                                             :func:`top_mask`, :func:`mask_error`
FedLWS, layer-wise shrinking                 :func:`shrink_factor`, :func:`shrinking`, :func:`shrink`
PLayer-FL, which layers to federate          :func:`federation_sensitivity`, :func:`split_point`
Sparse fine-tuning, which entries to train   :func:`fisher`, :func:`select`, :func:`scaled_rounds`
Sparse masks that change                     :func:`erk_densities`, :func:`feddst_densities`, :func:`layer_masks`,
                                             :func:`prune`, :func:`regrow`, :func:`readjust`,
                                             :func:`readjusted_at`, :func:`share_out`
FedCAC, whose critical weights agree         :func:`overlap`, :func:`overlaps`
L-DAWA, a layer counts by its angle          :func:`ldawa`
FedDisco, shares that look at labels         :func:`disco_shares`
FedLAMA, which layers can wait               :func:`lama_cut`
What noise costs in privacy                  :func:`gaussian_epsilon`, :func:`gaussian_delta`, :func:`gaussian_noise`
Merging where some clients lie               :func:`coordinate_median`, :func:`trimmed_mean`, :func:`krum_scores`,
                                             :func:`geometric_median_shares`, :func:`bounding_factors`,
                                             :func:`trust_weights`; a lie that passes: :func:`alie`
===========================================  ======================================================================

Nothing here has state, draws from a hidden stream or changes its arguments; results lie on the device of the
arguments and carry no gradient. Numbers of half precision are computed, and scores of them returned, in float32, so
that products neither underflow nor tie by rounding.

**Masks** are boolean, True where an entry is kept or trained, and hold exact counts, also with ties: among equal
scores the lower index is dropped first (indices run through a tensor in row-major order, through a dict in its
order).

**Counts** such as ``floor(drop * n)`` are those of the decimal number that was written: 0.29 of 100 is 29 although
``0.29 * 100`` is 28.999999999999996 in floating point. To that end a fraction is taken as known up to 1e-12. A
fraction to drop or to freeze lies in [0, 1) and never takes the last entry.

**Clients** as a leading axis ``[K, ...]``: element-wise functions take such stacks as they are; functions
that decide or sum per client have ``batched=True``, whose masks equal those of one call per client bit for bit.

**NaN and infinity** pass through element-wise functions and are refused, by name, where a decision depends on them.
"""

from __future__ import annotations

from fedstrata.functional.disco import disco_shares
from fedstrata.functional.flash import share_out
from fedstrata.functional.l_dawa import ldawa
from fedstrata.functional.lama import lama_cut
from fedstrata.functional.lips import keep_mask, sensitivity, sparsity_at
from fedstrata.functional.lws import shrink, shrink_factor, shrinking
from fedstrata.functional.masks import (
    erk_densities,
    feddst_densities,
    layer_masks,
    overlap,
    overlaps,
    prune,
    readjust,
    readjusted_at,
    regrow,
)
from fedstrata.functional.player import federation_sensitivity, split_point
from fedstrata.functional.privacy import gaussian_delta, gaussian_epsilon, gaussian_noise
from fedstrata.functional.robust import (
    alie,
    bounding_factors,
    coordinate_median,
    geometric_median_shares,
    krum_scores,
    trimmed_mean,
    trust_weights,
)
from fedstrata.functional.sparse_finetuning import fisher, scaled_rounds, select
from fedstrata.functional.ssfl import aggregate_scores, mask_error, mean_saliency, saliency, top_mask

__all__ = [
    "aggregate_scores",
    "alie",
    "bounding_factors",
    "coordinate_median",
    "disco_shares",
    "erk_densities",
    "feddst_densities",
    "federation_sensitivity",
    "fisher",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_noise",
    "geometric_median_shares",
    "keep_mask",
    "krum_scores",
    "lama_cut",
    "layer_masks",
    "ldawa",
    "mask_error",
    "mean_saliency",
    "overlap",
    "overlaps",
    "prune",
    "readjust",
    "readjusted_at",
    "regrow",
    "saliency",
    "scaled_rounds",
    "select",
    "sensitivity",
    "share_out",
    "shrink",
    "shrink_factor",
    "shrinking",
    "sparsity_at",
    "split_point",
    "top_mask",
    "trimmed_mean",
    "trust_weights",
]
