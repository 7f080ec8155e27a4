"""Where to federate: how sensitive each layer is to being averaged, and the split that follows from it.

Ahmed Elhussein, Gamze Gürsoy: "PLayer-FL: A Principled Approach to Personalized Layer-wise Cross-Silo Federated
Learning", arXiv 2502.08829. The paper looks at the clients' own models, before they are averaged, after one epoch from
a common start and at the end of training. So do the diagnostics here: they take the models as local training left them.
With one local epoch in a round, the first round is the paper's first epoch. Of a finished run they take the models that
clients use in the end.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.diagnostics.contract import Diagnostic, Measured, Need, Quantity, Seen, diagnostics
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.functional import federation_sensitivity, split_point
from fedstrata.layers import Layer, LayerMap
from fedstrata.methods.contract.composition import Method
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.views import Probe
from fedstrata.spec import parameter
from fedstrata.stack import Stack, Tensors, per_client, take

ROUNDS_BETWEEN = "Measure every so many rounds too; 0: in the first round and in the last alone."
SAMPLES = "Samples in the batch of each client on which gradients are taken."


def cumulated_split(values: Tensor | Sequence[float], threshold: float) -> int:
    """Count the layers to federate by a measure of the single layers ``[L]``, in forward order.

    To federate a layer is to federate all before it, so the values are summed up from the first layer on, as in the
    federation sensitivity, and cut before the layer that lifts the sum by more than the factor ``threshold``
    (:func:`~fedstrata.functional.split_point`). A value below zero, such as a negative trace, counts as zero. The paper
    splits by the federation sensitivity alone and sees by eye that other measures rise at the same layer; this rule,
    which is ours, lets each of them say where.

    >>> cumulated_split([0.1, 0.2, 0.2, 3.0], 3.5)
    3
    >>> cumulated_split([-0.5, 0.0, 0.0, 0.0], 2.0)
    4
    """
    return split_point(torch.as_tensor(values, dtype=torch.float64).clamp(min=0).cumsum(0), threshold)


def gradient_variance(gradients: Sequence[Tensor | Sequence[Tensor]], *, batched: bool = False) -> Tensor:
    r"""Compute the variance of each layer's gradient over its entries (PLayer-FL, Eq. A.1): ``[L]``.

    :math:`\frac{1}{n} \sum_j (g_j - \bar g)^2` over the n entries of a layer, which is one tensor or a list of its
    tensors; of a layer without any it is 0. With ``batched=True`` every tensor has a leading client axis and the result
    is ``[K, L]``.

    >>> gradient_variance([torch.tensor([1.0, 3.0]), [torch.tensor([[2.0]]), torch.tensor([2.0, 5.0])]])
    tensor([1., 2.])
    """
    layers = [[layer] if isinstance(layer, Tensor) else list(layer) for layer in gradients]
    given = [tensor for tensors in layers for tensor in tensors]
    if not given:
        raise FedStrataError("There are no gradients to take the variance of; give at least one tensor.")
    found = torch.zeros(len(given[0]) if batched else 1, len(layers), dtype=torch.float64, device=given[0].device)
    for place, tensors in enumerate(layers):
        if tensors:
            rows = torch.cat([per_client(tensor if batched else tensor[None]).double() for tensor in tensors], 1)
            found[:, place] = rows.var(1, unbiased=False)
    found = found.to(given[0].dtype)
    return found if batched else found[0]


def first_last_or_every(round: int, rounds: int, every: int) -> bool:
    """Tell whether a round is the first, the last, or one of every so many."""
    return round in (1, rounds) or (every > 0 and round % every == 0)


def other_weights(method: Method) -> str | None:
    """Say that a model does not run with the weights that a method trains, where that is so; none: it does."""
    changing = next((part.name for part in method.parts if type(part).effective is not Part.effective), None)
    return None if changing is None else f"with '{changing}' the model does not run with the weights that are trained"


def mark(title: str) -> Quantity:
    """Describe which layers a measure would federate."""
    return Quantity(
        f"Federated by the {title}",
        f"1 for the layers before the point where the {title} jumps, which one would share; 0 for those that one would "
        "leave to each client.",
        low=0,
        high=1,
    )


def number(title: str) -> Quantity:
    """Describe how many layers a measure would federate."""
    return Quantity(
        f"Layers to federate by the {title}",
        f"How many layers with weights, from the first on, lie before the point where the {title} jumps: all of them "
        "where it never does.",
        unit="layers",
        low=1,
    )


@dataclass(frozen=True)
class WhereToFederate(Diagnostic):
    """A measure of each layer with weights in every participant's model, and the split that follows from it."""

    needs: ClassVar[frozenset[Need]] = frozenset({Need.MODELS, Need.DATA})
    afterwards: ClassVar[bool] = True
    curve: ClassVar[str] = ""
    """The quantity that splits the layers."""
    undefined: ClassVar[str] = "the model of a client has diverged, or the loss has no such derivative"
    """Why it may not be defined, in words."""

    threshold: float = parameter(
        2.0, "By how much the sum over the layers must grow from one to the next to split there.", above=0, finite=False
    )
    every: int = parameter(0, ROUNDS_BETWEEN, low=0)

    def unfit(self, method: Method, layers: LayerMap) -> str | None:
        """Refuse methods that compute the weights of the model from others."""
        return other_weights(method)

    def due(self, round: int, rounds: int) -> bool:
        """Measure in the first round and in the last, and if asked in between."""
        return first_last_or_every(round, rounds, self.every)

    def measure(self, seen: Seen, probe: Probe, layers: Sequence[Layer]) -> Mapping[str, Tensor]:
        """Measure every layer in every participant's model: ``[K, L]`` for each quantity, NaN where it diverged."""
        raise NotImplementedError

    def of_all(self, quantity: str, values: Tensor) -> Tensor:
        """Take together what was measured at the clients ``[K, L]``: by default the mean."""
        return values.mean(0)

    def split(self, values: Tensor) -> int:
        """Count the layers to federate, by what was measured of all clients ``[L]``."""
        return cumulated_split(values, self.threshold)

    def compute(self, seen: Seen, memory: Stack) -> Measured:
        """Measure, and split."""
        assert seen.probe is not None
        layers = seen.layers.weighted
        by_client = self.measure(seen, seen.probe, layers)
        together = {quantity: self.of_all(quantity, values) for quantity, values in by_client.items()}
        told = [(place, layer.name) for place, layer in enumerate(layers) if layer.weights]
        marks, count = self.marks(together[self.curve], layers)
        if math.isnan(count):
            warnings.warn(
                f"The diagnostic '{self.name}' is not defined for every layer in round {seen.round}, so it tells no "
                f"split: {self.undefined}.",
                FedStrataWarning,
                stacklevel=2,
            )
        return Measured(
            of_round={f"{self.name}.split": count},
            layers={
                **{quantity: {name: values[place] for place, name in told} for quantity, values in together.items()},
                f"{self.name}.federated": marks,
            },
            clients_in_layers={
                quantity: {name: values[:, place] for place, name in told} for quantity, values in by_client.items()
            },
        )

    def marks(self, values: Tensor, layers: Sequence[Layer]) -> tuple[dict[str, float], float]:
        """Mark the layers to federate, and count them; where the measure diverged, both are NaN."""
        known = bool(torch.isfinite(values).all())
        count = self.split(values) if known else math.nan
        return {layer.name: float(place < count) if known else math.nan for place, layer in enumerate(layers)}, count


def of_layers(by_parameter: Mapping[str, Tensor], layers: Sequence[Layer]) -> Tensor:
    """Sum what was measured of parameters ``[K, ...]`` up over the weights of each layer: ``[K, L, ...]``."""
    like = next(iter(by_parameter.values()))
    sums = [sum((by_parameter[name] for name in layer.weights), torch.zeros_like(like)) for layer in layers]
    return torch.stack(sums, 1)


def entries(model: Tensors, layers: Sequence[Layer]) -> Tensor:
    """Count the entries of the weights of each layer ``[L]``, at least 1."""
    counts = [max(1, sum(model[name][0].numel() for name in layer.weights)) for layer in layers]
    return torch.tensor(counts, dtype=torch.float64, device=next(iter(model.values())).device)


def weight_names(layers: Sequence[Layer]) -> list[str]:
    """Name the weights of all layers, in their order."""
    return [name for layer in layers for name in layer.weights]


@diagnostics.register("sensitivity")
@dataclass(frozen=True)
class Sensitivity(WhereToFederate):
    r"""PLayer-FL's federation sensitivity, and the split that ``player`` would choose by it.

    :math:`F_l = \sum_{k \le l} \mathrm{mean}_p (\theta_p \, g_p)^2` (Eq. 2) of every participant's model as local
    training left it, with the gradient of one batch in training mode, over the weights of each layer without biases;
    the split is before the first layer by which the sum over clients grows by more than the factor ``threshold``
    (Eq. 3). In the first round of one local epoch that is what ``player`` measures before its first round. The paper
    gives no threshold; the default is that of ``player``. Figures 4, A.9 and A.10 draw it, as a percentage of the first
    layer.

    Cost: one forward and one backward pass of a batch in each client.
    """

    curve: ClassVar[str] = "sensitivity.cumulated"
    quantities: ClassVar[Mapping[str, Quantity]] = {
        "sensitivity.cumulated": Quantity(
            "Federation sensitivity",
            "How much the loss of a client's model would feel it if the weights up to this layer were changed, as "
            "averaging does: low where layers can be shared, and high from the layer on where they had better stay "
            "with each client.",
            low=0,
            logarithmic=True,
        ),
        "sensitivity.federated": mark("federation sensitivity"),
        "sensitivity.split": number("federation sensitivity"),
    }

    batch_size: int = parameter(128, SAMPLES, low=1)

    def measure(self, seen: Seen, probe: Probe, layers: Sequence[Layer]) -> Mapping[str, Tensor]:
        """Multiply weights by their gradients."""
        gradients = probe.gradients(seen.trained, self.batch_size)
        names = weight_names(layers)
        finite = torch.stack(
            [torch.isfinite(per_client(of[name])).all(1) for of in (seen.trained, gradients) for name in names]
        ).all(0)
        found = torch.full((len(finite), len(layers)), math.nan, dtype=torch.float64, device=finite.device)
        rows = finite.nonzero()[:, 0]
        if len(rows):
            weights, slopes = (
                [[own[name] for name in layer.weights] for layer in layers]
                for own in (take(of, rows) for of in (seen.trained, gradients))
            )
            found[rows] = federation_sensitivity(weights, slopes, batched=True).to(torch.float64)
        return {self.curve: found}

    def split(self, values: Tensor) -> int:
        """Split as ``player`` does: the sensitivity is summed up over the layers already."""
        return split_point(values, self.threshold)


@diagnostics.register("gradient-variance")
@dataclass(frozen=True)
class GradientVariance(WhereToFederate):
    r"""The variance of each layer's gradient (PLayer-FL, Eq. A.1), and the split that it would choose.

    ``over=parameters`` is the equation as the paper explains it and as its code computes it:
    :math:`\frac{1}{n} \sum_j (g_j - \bar g)^2` over the n weights of a layer, with the gradient of one batch in
    training mode, in every participant's model as local training left it. ``over=samples`` is the measure that the
    paper cites (Jiang et al., "Fantastic generalization measures and where to find them", ICLR 2020): how the gradients
    of single samples differ from their mean, in evaluation mode (a single sample has no batch statistics), divided by
    the number of weights, as in Section 5.1. Figures 1 and A.1 to A.3 draw it on a logarithmic scale.

    Cost: one forward and one backward pass of a batch in each client; over samples these passes take the samples one by
    one, and memory for as many gradients as fit into 1 GiB.
    """

    curve: ClassVar[str] = "gradient-variance.variance"
    quantities: ClassVar[Mapping[str, Quantity]] = {
        "gradient-variance.variance": Quantity(
            "Gradient variance",
            "How much the gradients of a layer differ, by weight or by sample: low where a layer is general and may be "
            "shared, high where it is specific to a client's data.",
            low=0,
            logarithmic=True,
        ),
        "gradient-variance.federated": mark("gradient variance"),
        "gradient-variance.split": number("gradient variance"),
    }

    over: str = parameter(
        "parameters", "Over the weights of a layer, or over the samples of a batch.", choices=("parameters", "samples")
    )
    batch_size: int = parameter(128, SAMPLES, low=1)

    def measure(self, seen: Seen, probe: Probe, layers: Sequence[Layer]) -> Mapping[str, Tensor]:
        """Take gradients, and their variance."""
        if self.over == "samples":
            spread = probe.gradient_spread(seen.trained, weight_names(layers), self.batch_size)
            return {self.curve: of_layers(spread, layers) / entries(seen.trained, layers)}
        gradients = probe.gradients(seen.trained, self.batch_size)
        of_each = [[gradients[name].to(torch.float64) for name in layer.weights] for layer in layers]
        return {self.curve: gradient_variance(of_each, batched=True)}
