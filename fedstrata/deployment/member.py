"""A site's part in one run: its client, what it declares of its samples, and how its models are tested."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from fedstrata._version import __version__
from fedstrata.data.channels import ChannelSums, Statistics, client_sums
from fedstrata.data.transforms import normalisation_in
from fedstrata.deployment.declarations import NOTHING, SUMS, Declaration, Schema
from fedstrata.deployment.facts import scores_to_facts
from fedstrata.deployment.protocol import Place, ProtocolError
from fedstrata.deployment.rules import SiteRules, refuse_matrices, tells_of_classes
from fedstrata.engines.client import ClientSide
from fedstrata.engines.evaluation import Evaluator
from fedstrata.engines.forward import LoopForward
from fedstrata.engines.loop import LoopClient
from fedstrata.errors import FedStrataError
from fedstrata.methods.contract.composition import PartExchange
from fedstrata.methods.contract.views import Message
from fedstrata.runs.preparing import Prepared
from fedstrata.stack import Tensors


class Member:
    """The site's part in one run: its client, and how its models are tested.

    Where it normalises by the ``statistics`` of all sites, it can do nothing before these are known.
    """

    def __init__(self, ready: Prepared, number: int, statistics: Statistics | None) -> None:
        refuse_matrices(ready.setting.metrics)
        objection = ready.setting.method.objection_to_real_sites
        if objection is not None:
            raise FedStrataError(f"{objection}.")
        self.normalises_by = _normalises_by(ready)
        self.knows_statistics = self.normalises_by != SUMS or statistics is not None
        if self.normalises_by == SUMS and statistics is not None:
            if len(statistics.mean) != ready.dataset.input_shape[0]:
                raise ProtocolError(f"Statistics came for {len(statistics.mean)} channels.")
            ready = ready.with_statistics(statistics)
        self.ready = ready
        self.number = number
        self.forward = LoopForward(ready.model, ready.setting.head)
        self.client = LoopClient(ClientSide(ready.setting, self.forward, ready.data), number)
        self.first_state = self.client.state
        self.evaluator = Evaluator(ready.setting, ready.data)

    def declaration(self) -> dict[str, Any]:
        """Tell what the server must know of the data, and nothing more."""
        dataset, split = self.ready.dataset, self.ready.data.split
        declaration = Declaration(
            Schema.of(dataset),
            len(split.train[self.number]),
            len(split.test[self.number]),
            tuple(self.ready.declared.label_counts[self.number].tolist()),
            self.normalises_by,
        )
        return {"version": __version__, **declaration.to_facts()}

    def sums(self, rules: SiteRules) -> ChannelSums:
        """Add up the channels of the site's training samples, unless its rules forbid that."""
        if self.normalises_by != SUMS:
            raise ProtocolError("Nothing in this run needs the sums of this site's samples.")
        samples = len(self.ready.split.train[self.number])
        if not rules.statistics:
            raise FedStrataError("This site gives no sums of its samples away (--no-statistics).")
        if samples < rules.min_samples:
            raise FedStrataError(
                f"This site has {samples} training samples, and gives no sums of fewer than {rules.min_samples} away "
                "(--min-samples)."
            )
        return client_sums(self.ready.dataset, self.ready.split, self.number)

    def scores(self, model: Tensors) -> dict[str, Any]:
        """Test a model on the site's own test samples."""
        scores, metrics = self.evaluator.own_models(self.forward, model, [self.number]), self.ready.setting.metrics
        return scores_to_facts(scores, metrics, self.tells_of_classes)

    @cached_property
    def tells_of_classes(self) -> bool:
        """Whether there are test samples enough to tell something of single classes."""
        own = self.ready.data.split.test[self.number]
        labels = self.ready.dataset.labels.numpy()[own]
        return tells_of_classes(np.bincount(labels, minlength=self.ready.dataset.classes).tolist())

    def summed(self, reply: Message) -> Message:
        """Take out of a reply what a server adds up that sees only sums: the shared tensors."""
        shared = self.ready.setting.shared
        tensors = {name: tensor for name, tensor in reply.tensors.items() if name in shared}
        return Message(tensors, {name: mask for name, mask in reply.masks.items() if name in tensors})

    def exchange(self, place: Place) -> PartExchange:
        """Find the exchange that a survey or an announcement belongs to."""
        exchanges = self.ready.setting.exchanges_before(place.round)
        if place.exchange >= len(exchanges):
            raise ProtocolError(f"The method has no exchange number {place.exchange} before round {place.round}.")
        return exchanges[place.exchange]


def _normalises_by(ready: Prepared) -> str | Statistics:
    """Tell whether samples are normalised by what all sites' sums tell, by published constants, or by neither."""
    normalisation, dataset = normalisation_in(ready.data.transforms), ready.dataset
    if normalisation is None or not normalisation.of_everybody or dataset.mean is None or dataset.deviation is None:
        return NOTHING
    return SUMS if dataset.estimated else Statistics(dataset.mean, dataset.deviation)
