"""Which layers can be aggregated less often: those on which the clients disagree little for their size.

Sunwoo Lee, Tuo Zhang, Salman Avestimehr: "Layer-wise Adaptive Model Aggregation for Scalable Federated Learning", AAAI
2023.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedstrata.errors import FedStrataError
from fedstrata.functional._entries import FRACTION_TOLERANCE, all_finite


def lama_cut(discrepancy: Sequence[float] | Tensor, sizes: Sequence[int] | Tensor) -> int:
    r"""Count the layers that get the long interval, taken from the one with the least discrepancy per parameter up.

    ``discrepancy`` holds for each layer the clients' mean squared distance from the aggregated layer, divided by its
    number of parameters and by the length of its interval; ``sizes`` holds the numbers of parameters. Over the layers
    in ascending order of discrepancy, with :math:`\delta_l` the part of the total discrepancy and :math:`\lambda_l` the
    part of the total size in the first l of them::

        delta_l  = sum_{i <= l} d_i * n_i / sum_i d_i * n_i
        lambda_l = sum_{i <= l} n_i / sum_i n_i

    layers are taken until :math:`1 - \lambda_l < \delta_l`, where the discrepancy that is left to grow outweighs the
    traffic that is still to be saved. The layer at the crossing is taken too, as the authors' code does. Without any
    discrepancy all layers are taken. Negative, NaN and infinite discrepancies and sizes that are not positive are
    refused.

    Citation: Lee et al., "Layer-wise Adaptive Model Aggregation for Scalable Federated Learning", AAAI 2023:
    the choice of aggregation intervals.

    >>> lama_cut([0.1, 0.2, 5.0], [100, 100, 10])
    2
    """
    counts, per_parameter = (
        torch.as_tensor(values, dtype=torch.float64).detach().cpu() for values in (sizes, discrepancy)
    )
    if counts.dim() != 1 or counts.shape != per_parameter.shape:
        raise FedStrataError(
            f"The discrepancies have the shape {tuple(per_parameter.shape)} and the sizes {tuple(counts.shape)}; "
            "give one number per layer in each."
        )
    if not all_finite(per_parameter) or bool((per_parameter < 0).any()):
        raise FedStrataError(
            f"The discrepancies are {per_parameter.tolist()}; each must be a finite number that is not negative."
        )
    if not bool((counts > 0).all()):
        raise FedStrataError(f"The sizes of the layers are {counts.tolist()}; each must be positive.")
    order = per_parameter.argsort(stable=True)
    size = counts[order].cumsum(0)
    disagreement = (per_parameter * counts)[order].cumsum(0)
    if len(counts) == 0 or disagreement[-1] == 0:
        return len(counts)
    saved, lost = size / size[-1], disagreement / disagreement[-1]
    return 1 + int((1 - saved >= lost - FRACTION_TOLERANCE).sum())
