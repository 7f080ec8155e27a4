"""What a number in a run's tables is, by the name of its metric."""

from __future__ import annotations

from collections.abc import Mapping

from fedstrata.diagnostics.contract import Quantity, diagnostics

IN_EVERY_RUN: Mapping[str, Quantity] = {
    "cosine": Quantity(
        "Inertia: cosine to the reference round",
        "The cosine between a layer's weights now and in the reference round: near 1, the layer has hardly turned "
        "since and learns little; the lower, the more it has learned.",
        low=-1,
        high=1,
    ),
    "update": Quantity(
        "Size of the update",
        "How far a layer of the server's model moved in a round, relative to its own size: 0 where it stood still, 0.1 "
        "where it moved by a tenth of its norm.",
        low=0,
    ),
}
"""What is measured of the layers without being asked for."""


def quantity_of(metric: str) -> Quantity | None:
    """Find out what a metric is; none where no diagnostic has told.

    >>> quantity_of("cosine").title
    'Inertia: cosine to the reference round'
    """
    if metric in IN_EVERY_RUN:
        return IN_EVERY_RUN[metric]
    name = metric.partition(".")[0]
    owner = diagnostics.registered(name)
    if owner is not None and metric in owner.quantities:
        return owner.quantities[metric]
    others = (diagnostics.registered(other) for other in diagnostics.names())
    return next((cls.quantities[metric] for cls in others if cls is not None and metric in cls.quantities), None)
