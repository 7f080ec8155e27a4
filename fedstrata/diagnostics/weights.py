"""How the weights of each layer are distributed, before aggregation at the clients and after it at the server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.diagnostics.contract import Diagnostic, Measured, Need, Quantity, Seen, diagnostics
from fedstrata.diagnostics.updates import ENTRIES_AT_ONCE, due_every, no_updates, sent_parameters
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.composition import Method
from fedstrata.spec import parameter
from fedstrata.stack import Stack

WIDTH = 4
"""To how many standard deviations of a layer's first weights a histogram reaches on either side."""


@dataclass(frozen=True)
class Moments:
    """The standard deviation of some numbers, and their excess kurtosis: 0 for a normal distribution, above it for
    heavy tails. Not defined, and NaN, where all numbers are equal or one is not finite.
    """

    std: Tensor
    kurtosis: Tensor


def moments(pieces: Iterable[Tensor]) -> Moments:
    r"""Compute :math:`\sigma` and :math:`\mathrm{E}[(w - \mu)^4] / \sigma^4 - 3` over all entries of some tensors.

    >>> found = moments([torch.tensor([1.0, -1.0]), torch.tensor([1.0, -1.0])])
    >>> float(found.std), float(found.kurtosis)
    (1.0, -2.0)
    """
    shift, count, sums, nothing = None, 0, None, torch.tensor(torch.nan, dtype=torch.float64)
    for values in _in_double(pieces):
        if not values.numel():
            nothing = nothing.to(values.device)
            continue
        shift = values.mean() if shift is None else shift  # sums of powers lose nothing where it is near the mean
        apart = values - shift
        square = apart.square()
        powers = torch.stack([apart.sum(), square.sum(), (square * apart).sum(), square.square().sum()])
        count, sums = count + values.numel(), powers if sums is None else sums + powers
    if sums is None:
        return Moments(nothing, nothing)
    first, second, third, fourth = (sums / count).unbind()
    variance = (second - first.square()).clamp(min=0)
    central = fourth - 4 * third * first + 6 * second * first.square() - 3 * first**4
    return Moments(variance.sqrt(), torch.where(variance > 0, central / variance.square() - 3, torch.nan))


def histogram(pieces: Iterable[Tensor], reach: float, bins: int) -> Tensor:
    """Count which part of all entries falls into each of some equal bins from ``-reach`` to ``reach``: ``[bins]``.

    A value on an edge belongs to the bin above it. What lies outside belongs to the first or the last bin; what is not
    finite belongs to none.

    >>> histogram([torch.tensor([-9.0, -0.5, 0.0, 0.5, 0.9])], 1.0, 4)
    tensor([0.2000, 0.2000, 0.2000, 0.4000], dtype=torch.float64)
    """
    counts, entries = None, 0
    for values in _in_double(pieces):
        places = ((values + reach) * (bins / (2 * reach))).floor().clamp(0, bins - 1)
        found = torch.bincount(places[values.isfinite()].to(torch.int64), minlength=bins)
        counts, entries = found if counts is None else counts + found, entries + values.numel()
    assert counts is not None, "there is at least one tensor"
    return counts.to(torch.float64) / max(1, entries)


def _in_double(pieces: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield all entries in double precision, some at a time."""
    for piece in pieces:
        yield from (some.to(torch.float64) for some in torch.split(piece.detach().flatten(), ENTRIES_AT_ONCE))


@diagnostics.register("weights")
@dataclass(frozen=True)
class Weights(Diagnostic):
    r"""Tell how the weights of each layer are distributed: those of all clients pooled, and those after aggregation.

    Averaging cancels what clients disagree about, so that merged weights are narrower than those of the clients;
    FedLWS narrows them further (Fig. 3b, of the final model). The clients' weights are their uploads, without the
    entries that they did not send; the merged ones are the server's after the round, in all entries. Biases and norms
    do not count.

    Histograms come in the first round, the last, and every ``every`` rounds, with ``bins`` equal bins that stay the
    same in all rounds: from -4 to 4 standard deviations of the layer's weights in the server's model before the first
    round, the outer bins with all that lies further out. ``weights.edges`` are their ``bins + 1`` edges. These numbers
    are of no single client: they stand under the client -1, one for each bin.

    Costs one pass over the uploads in double precision for the moments, and another in rounds with histograms: 0.5 to 2
    % of a round of 20 clients on digits with the CNN.

    Citation: Shi et al., "FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking", ICLR 2025, Fig. 3b
    and 8.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.UPLOADS})
    quantities: ClassVar[Mapping[str, Quantity]] = {
        "weights.std": Quantity(
            "Spread of the merged weights",
            "The standard deviation of the layer's weights after aggregation: low where weights are close to their "
            "mean, as after shrinking.",
            low=0,
            logarithmic=True,
        ),
        "weights.kurtosis": Quantity(
            "Tails of the merged weights",
            "The excess kurtosis of the layer's weights after aggregation: 0 as for a normal distribution, above it "
            "where a few weights are far larger than the rest.",
            low=-2,
            centre=0,
        ),
        "weights.clients_std": Quantity(
            "Spread of the clients' weights",
            "The standard deviation of all clients' weights of the layer before aggregation: the more it exceeds that "
            "of the merged weights, the more averaging cancels.",
            low=0,
            logarithmic=True,
        ),
        "weights.clients_kurtosis": Quantity(
            "Tails of the clients' weights",
            "The excess kurtosis of all clients' weights of the layer before aggregation: 0 as for a normal "
            "distribution, above it where a few weights are far larger than the rest.",
            low=-2,
            centre=0,
        ),
        "weights.merged": Quantity(
            "Histogram of the merged weights",
            "Which part of the layer's weights after aggregation lies in each bin.",
            low=0,
            high=1,
        ),
        "weights.clients": Quantity(
            "Histogram of the clients' weights",
            "Which part of all clients' weights of the layer before aggregation lies in each bin.",
            low=0,
            high=1,
        ),
        "weights.edges": Quantity(
            "Edges of the bins",
            "Where the bins of the layer's histograms begin, and after the last one where it ends.",
        ),
    }

    bins: int = parameter(64, "Into how many bins a histogram divides the weights.", low=2)
    every: int = parameter(10, "The number of rounds from one histogram to the next.", low=1)

    def unfit(self, method: Method, layers: LayerMap) -> str | None:
        """Say that there are no updates."""
        return no_updates(method)

    def update(self, seen: Seen, memory: Stack) -> Stack:
        """Keep the reach of each layer's bins, from the first round in which it is seen."""
        new = {
            f"reach/{layer}": WIDTH * moments(seen.before[name] for name in names).std
            for layer, names in _weights(seen).items()
            if f"reach/{layer}" not in memory
        }
        return memory | new

    def compute(self, seen: Seen, memory: Stack) -> Measured:
        """Measure the uploads of one round, and the model after it."""
        names = _weights(seen)
        merged = {layer: moments(seen.after[name] for name in own) for layer, own in names.items()}
        clients = {layer: moments(_sent(seen, own)) for layer, own in names.items()}
        bins: dict[str, dict[str, Tensor]] = {}
        if due_every(self.every, seen.round, seen.rounds):
            reaches = {layer: float(reach) for layer, reach in memory.group("reach").items() if layer in names}
            reaches = {layer: reach if reach > 0 else 1.0 for layer, reach in reaches.items()}
            bins = {
                "weights.edges": {
                    layer: torch.linspace(-reach, reach, self.bins + 1, dtype=torch.float64)
                    for layer, reach in reaches.items()
                },
                "weights.merged": {
                    layer: histogram((seen.after[name] for name in names[layer]), reach, self.bins)
                    for layer, reach in reaches.items()
                },
                "weights.clients": {
                    layer: histogram(_sent(seen, names[layer]), reach, self.bins) for layer, reach in reaches.items()
                },
            }
        return Measured(
            layers={
                "weights.std": {layer: found.std for layer, found in merged.items()},
                "weights.kurtosis": {layer: found.kurtosis for layer, found in merged.items()},
                "weights.clients_std": {layer: found.std for layer, found in clients.items()},
                "weights.clients_kurtosis": {layer: found.kurtosis for layer, found in clients.items()},
            },
            in_layers=bins,
        )


def _weights(seen: Seen) -> dict[str, list[str]]:
    """Name the weights of each layer that clients sent as numbers."""
    sent = sent_parameters(seen.layers, seen.uploads, seen.before)
    named = {
        layer.name: [name for name in sent.get(layer.name, ()) if name in layer.weights] for layer in seen.layers.all
    }
    return {layer: names for layer, names in named.items() if names}


def _sent(seen: Seen, names: Iterable[str]) -> Iterator[Tensor]:
    """Yield the numbers that clients sent of some tensors."""
    for name in names:
        tensor, mask = seen.uploads.tensors[name], seen.uploads.masks.get(name)
        yield tensor if mask is None else tensor[mask.expand_as(tensor)]
