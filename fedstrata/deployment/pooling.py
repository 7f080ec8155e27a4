"""The mean and deviation of all sites' training samples: the server has their sums added up, and sees no sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedstrata.data.channels import ChannelSums, Statistics
from fedstrata.data.transforms import OTHER_WAYS
from fedstrata.deployment.federation import Federation, TooFewAnswers
from fedstrata.deployment.protocol import BEGINNING, Reply, Request
from fedstrata.deployment.rules import FEWEST_SITES
from fedstrata.deployment.statistics import PIECES, count_pieces, from_pieces, sums_from_facts
from fedstrata.errors import FedStrataError

if TYPE_CHECKING:
    from fedstrata.deployment.secure.server import SecureAggregation


def agree(federation: Federation, channels: int, secure: SecureAggregation | None) -> Statistics:
    """Have the sites' sums added up, and tell what mean and deviation come out."""
    asked = {site: Request("statistics", federation.run) for site in federation.declarations}
    sizes: list[int] = []

    def read(site: int, reply: Reply) -> ChannelSums | None:
        sizes.append(len(reply.header()))
        return None if secure is not None else sums_from_facts(reply.facts, channels)

    try:
        parts = federation.ask(asked, read, majority=False)
        if secure is None:
            total = ChannelSums.total(part for part in parts.values() if part is not None)
        else:
            total = _opened(federation, list(parts), channels, secure)
    except TooFewAnswers as short:
        raise FedStrataError(
            f"Too few sites give the sums by which 'normalise' finds the mean and deviation of all training samples "
            f"({str(short).partition(',')[0]}). Their logs say why. {OTHER_WAYS}."
        ) from None
    up = sum(sizes) if secure is None else secure.bytes_up
    federation.log(
        f"normalise: mean and deviation of the training samples of {len(parts)} of {len(federation.names)} sites, "
        f"{'added up under masks' if secure else 'from their sums'}, {up} bytes"
    )
    return total.statistics()


def _opened(federation: Federation, sites: list[int], channels: int, secure: SecureAggregation) -> ChannelSums:
    from fedstrata.deployment.secure.server import Asked

    if len(sites) < FEWEST_SITES:
        raise TooFewAnswers(f"A sum of {len(sites)} sites hides too little, {FEWEST_SITES} are needed.")
    rules, everybody = federation.rules, len(federation.names)
    asked = Asked(
        BEGINNING.round,
        {},
        dict.fromkeys(sites, 1.0),
        {PIECES: float(rules.largest_number(len(sites)))},  # so that a step is 1, and pieces are whole numbers already
        (2 * channels + 1) * count_pieces(rules, everybody) + 1,
    )
    return from_pieces(secure.open(secure.gather(asked)).total, rules, everybody, channels)
