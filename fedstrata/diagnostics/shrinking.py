"""By how much FedLWS would shrink each layer in a round of any method, and by how much the round itself did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.linalg import vector_norm

from fedstrata.diagnostics.contract import Diagnostic, Measured, Need, Quantity, Seen, diagnostics
from fedstrata.diagnostics.updates import no_updates, sent_parameters, shares_of
from fedstrata.functional import shrinking
from fedstrata.functional.lws import Shrinking
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.composition import Method
from fedstrata.spec import parameter
from fedstrata.stack import Stack, weighted_mean


def applied_factor(merged: Sequence[Tensor], new: Sequence[Tensor]) -> float:
    r"""Find the factor between the mean of the uploads :math:`\hat w` and the new model: :math:`\langle w^{t+1},
    \hat w \rangle / \lVert \hat w \rVert^2`, over all tensors of a layer; 1 where the mean is zero.

    It is the factor of a method that multiplies the mean by one, and of others the nearest to such a factor.

    >>> applied_factor([torch.tensor([4.0, 2.0])], [torch.tensor([3.0, 1.5])])
    0.75
    """
    pairs = [(mean.to(torch.float64), tensor.to(torch.float64)) for mean, tensor in zip(merged, new, strict=True)]
    square = float(torch.stack([mean.square().sum() for mean, _ in pairs]).sum())
    product = float(torch.stack([(mean * tensor).sum() for mean, tensor in pairs]).sum())
    return product / square if square > 0 else 1.0


def regularisation_ratio(factor: float, old: Sequence[Tensor], merged: Sequence[Tensor]) -> float:
    r"""Compare the pull towards zero with the step that a shrinking factor leaves:
    :math:`\frac{(1 - \gamma) \lVert w \rVert}{\gamma \lVert \hat w - w \rVert}`.

    Citation: Shi et al., "FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking", ICLR 2025, Eq. 5,
    whose value for a factor that was learned is r in Fig. 1a and Fig. 7. NaN where there is no step.

    >>> regularisation_ratio(0.5, [torch.tensor([3.0, 4.0])], [torch.tensor([5.0, 4.0])])
    2.5
    """
    size = _norm([tensor.to(torch.float64) for tensor in old])
    step = factor * _norm(
        [mean.to(torch.float64) - tensor.to(torch.float64) for mean, tensor in zip(merged, old, strict=True)]
    )
    return (1 - factor) * size / step if step > 0 else math.nan


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(vector_norm(torch.stack([vector_norm(tensor) for tensor in tensors])))


@diagnostics.register("shrinking")
@dataclass(frozen=True)
class ShrinkingFactors(Diagnostic):
    r"""Tell by which factors FedLWS would shrink the layers, from the uploads of any method, and what the round did.

    With w the server's layer before the round, :math:`g_k` the clients' updates and :math:`\hat w` the mean of the
    uploads, weighted by samples (of each entry over those who sent it): :math:`\tau` is the mean distance of the
    updates from their plain mean (Eq. 4), :math:`\gamma = \lVert w \rVert / (\beta \tau \lVert \hat w - w \rVert +
    \lVert w \rVert)` (Eq. 7) and :math:`r = \beta \tau` (Eq. 5). These are what ``lws`` would apply with this
    ``beta``, and nothing is changed by it; the method ``lws`` tells what it does apply as ``gamma``, ``tau`` and ``r``.

    ``applied`` is the factor by which the round really multiplied the mean (:func:`applied_factor`), and ``ratio`` the
    balance that results (:func:`regularisation_ratio`): with ``fedlaw``, which learns a factor, it is what Fig. 1a and
    Fig. 7 compare with :math:`\tau`; it is below 0 where the model grew. A layer is a convolution or linear layer with
    the norm that follows it, as in ``lws``, and only parameters count. The numbers of the round are those of the whole
    model as one layer, the model-wise factor of Fig. 3a.

    Costs a few passes over the uploads, in pieces of 128 MiB in double precision: 1 to 2 % of a round of 20 clients on
    digits with the CNN.

    Citation: Shi et al., "FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking", ICLR 2025, Fig. 1a, 3
    and 7.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.UPLOADS})
    quantities: ClassVar[Mapping[str, Quantity]] = {
        "shrinking.gamma": Quantity(
            "Shrinking factor that FedLWS would apply",
            "What FedLWS would multiply the layer by, with the diagnostic's beta, whether or not the method does so: 1 "
            "leaves it alone, lower values shrink it because clients disagree.",
            low=0,
            high=1,
        ),
        "shrinking.tau": Quantity(
            "Disagreement of clients (tau)",
            "The mean distance of the clients' updates from their plain mean: high where clients disagree.",
            low=0,
            logarithmic=True,
        ),
        "shrinking.r": Quantity(
            "Regularisation to optimisation under FedLWS (r)",
            "How strong the pull towards zero would be against the step, with the diagnostic's beta: it is beta times "
            "tau, high where clients disagree.",
            low=0,
            logarithmic=True,
        ),
        "shrinking.applied": Quantity(
            "Shrinking factor of the round",
            "By what the round multiplied the mean of the uploads: 1 for plain averaging, below 1 where the method "
            "shrinks the layer, above 1 where it lets it grow.",
            centre=1,
        ),
        "shrinking.ratio": Quantity(
            "Regularisation to optimisation in the round",
            "How strong the round's pull towards zero was against its step: 0 for plain averaging, high where a method "
            "shrinks much and moves little, below 0 where the layer grew.",
            centre=0,
        ),
    }

    beta: float = parameter(0.1, "How strongly disagreement shrinks (paper: 0.1 for CNNs, 0.01 for ResNets).", low=0)

    def unfit(self, method: Method, layers: LayerMap) -> str | None:
        """Say that there are no updates."""
        return no_updates(method)

    def compute(self, seen: Seen, memory: Stack) -> Measured:
        """Measure from the uploads of one round, and from the model after it."""
        shares = shares_of(seen)
        blocks = dict(_blocks(seen.layers, sent_parameters(seen.layers, seen.uploads, seen.before)))
        if not blocks:
            return Measured()
        found = {layer: self._of_layer(seen, names, shares) for layer, names in blocks.items()}
        whole = self._of_layer(seen, [name for names in blocks.values() for name in names], shares)
        return Measured(
            of_round=dict(zip(self.quantities, whole, strict=True)),
            layers={
                quantity: {layer: numbers[place] for layer, numbers in found.items()}
                for place, quantity in enumerate(self.quantities)
            },
        )

    def _of_layer(self, seen: Seen, names: Sequence[str], shares: Tensor) -> tuple[float, ...]:
        sent, masks = seen.uploads.tensors, seen.uploads.masks
        old = [seen.before[name] for name in names]
        updates = [_masked(sent[name] - seen.before[name], masks.get(name)) for name in names]
        merged = [weighted_mean(sent[name], shares, masks.get(name), seen.before[name]) for name in names]
        step = [mean - tensor for mean, tensor in zip(merged, old, strict=True)]
        if not all(bool(torch.isfinite(tensor.sum(dtype=torch.float64))) for tensor in (*old, *updates)):
            return (math.nan,) * 5  # training diverged: the run goes on as it would unobserved
        would = shrinking(old, updates, None, self.beta, step=step)
        factor = applied_factor(merged, [seen.after[name] for name in names])
        return (*_finite(would), factor, regularisation_ratio(factor, old, merged))


def _blocks(layers: LayerMap, sent: Mapping[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    """Put each layer with weights together with the norm that follows it."""
    for block in layers.blocks():
        names = [name for layer in block for name in sent.get(layer.name, ())]
        if names:
            yield block[0].name, names


def _masked(updates: Tensor, mask: Tensor | None) -> Tensor:
    return updates if mask is None else updates * mask


def _finite(numbers: Shrinking) -> tuple[float, ...]:
    """Put NaN for a ratio without a step."""
    return tuple(number if math.isfinite(number) else math.nan for number in numbers)
