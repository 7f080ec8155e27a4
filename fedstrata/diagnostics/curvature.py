"""How the loss bends at each layer: the trace of its Hessian, estimated from random signs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.diagnostics.contract import Quantity, Seen, diagnostics
from fedstrata.diagnostics.where_to_federate import SAMPLES, WhereToFederate, entries, mark, number
from fedstrata.errors import FedStrataError
from fedstrata.layers import Layer
from fedstrata.methods.contract.views import Probe
from fedstrata.spec import parameter


def hutchinson(products: Tensor) -> tuple[Tensor, Tensor]:
    r"""Estimate a trace from products :math:`z^\top H z`, ``[..., m]``: the mean over the m probes, and its error.

    With independent random signs :math:`z_p = \pm 1` the expectation of a product is :math:`\mathrm{Tr}(H)`, and its
    variance :math:`2 \sum_{p \ne q} H_{pq}^2`: of a diagonal matrix every single product is the trace. The standard
    error is the sample standard deviation of the products divided by :math:`\sqrt m`.

    Citation: Hutchinson, "A stochastic estimator of the trace of the influence matrix for Laplacian smoothing splines",
    Communications in Statistics 19, 1990.

    >>> hutchinson(torch.tensor([3.0, 5.0, 3.0, 5.0]))
    (tensor(4.), tensor(0.5774))
    """
    probes = products.shape[-1]
    if probes < 2:
        raise FedStrataError(f"A trace from {probes} probe has no standard error; use at least 2.")
    return products.mean(-1), products.std(-1) / probes**0.5


@diagnostics.register("hessian")
@dataclass(frozen=True)
class Hessian(WhereToFederate):
    r"""The sum of the Hessian's eigenvalues of each layer (PLayer-FL, Eq. A.2), and the split that it would choose.

    The trace of the second derivatives of the loss by the weights of a layer, divided by their number (Section 5.1), in
    every participant's model as local training left it, on one batch in training mode. It is estimated after Hutchinson
    with random signs, layer by layer (for all layers at once would be cheaper, and less certain: on a small transformer
    the errors were up to twenty times as large). Signs are drawn from each client's key, so every engine draws the
    same. ``hessian.error`` is the standard error of the estimate, to be read beside it, and falls with the square root
    of ``probes``. What is told of all clients together is the mean of the traces, and the error of that mean. Figures 2
    and A.4 to A.6 draw it. The paper's released code takes the singular values of a single product instead, which are
    not the trace.

    Cost: in each client one forward and one backward pass of a batch, and then for each probe and each layer with
    weights another backward pass, through both: the dearest of the diagnostics.
    """

    curve: ClassVar[str] = "hessian.trace"
    quantities: ClassVar[Mapping[str, Quantity]] = {
        "hessian.trace": Quantity(
            "Hessian trace per weight",
            "How sharply the loss bends when the weights of a layer change: near 0 where it is flat and a layer can be "
            "averaged, high where small changes hurt, below 0 where it bends downwards.",
            centre=0,
        ),
        "hessian.error": Quantity(
            "Standard error of the Hessian trace",
            "How far the estimated trace may lie from the true one by chance: a trace of less than two errors is not "
            "distinguishable from 0. More probes make it smaller.",
            low=0,
        ),
        "hessian.federated": mark("Hessian trace"),
        "hessian.split": number("Hessian trace"),
    }

    probes: int = parameter(10, "Random vectors from which the trace is estimated.", low=2)
    batch_size: int = parameter(128, SAMPLES, low=1)

    def measure(self, seen: Seen, probe: Probe, layers: Sequence[Layer]) -> Mapping[str, Tensor]:
        """Multiply the Hessian by random signs."""
        blocks = {layer.name: layer.weights for layer in layers}
        products = probe.curvature(seen.trained, blocks, self.batch_size, self.probes)
        trace, error = hutchinson(torch.stack([products[layer.name] for layer in layers], 1))
        counts = entries(seen.trained, layers)
        return {"hessian.trace": trace / counts, "hessian.error": error / counts}

    def of_all(self, quantity: str, values: Tensor) -> Tensor:
        """Take the mean of traces; the error of a mean of independent estimates is smaller than theirs."""
        if quantity == "hessian.error":
            return values.square().sum(0).sqrt() / len(values)
        return super().of_all(quantity, values)
