"""FedVC: clients of any size train as virtual clients of one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedstrata.methods.contract.declarations import Facts, Needs, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Declared, Server
from fedstrata.methods.fedir import FedIR
from fedstrata.methods.mechanisms.shared import equal_weights
from fedstrata.rng import numpy_generator
from fedstrata.spec import parameter


@methods.register("fedvc")
@dataclass(frozen=True)
class FedVC(Part):
    r"""Clients of any size train as virtual clients of one size, and all count alike.

    A local epoch has ``samples`` samples (:math:`N_{VC}`): a larger client takes a part of its data, another one each
    time, and a smaller one repeats some of its own. So all make the same number of steps. Participants are drawn with
    chances proportional to their data, and merged with equal shares. What travels is as in FedAvg.

    A client is drawn at most once in a round, although two virtual clients may be parts of one; where everybody takes
    part, nothing is drawn.

    Defaults:
        samples: ours.
    """

    facts: ClassVar[Facts] = FedIR.facts
    touches: ClassVar[Touches] = Touches()

    samples: int = parameter(256, "The samples of a virtual client.", low=1)

    @property
    def needs(self) -> Needs:
        """Give every client an epoch of the same size."""
        return Needs(samples_per_epoch=self.samples)

    def select(self, server: Server, count: int) -> tuple[int, ...]:
        """Draw participants by their sizes."""
        if count == server.clients:
            return tuple(range(count))
        sizes = server.sizes.cpu().numpy()
        generator = numpy_generator(server.seed, server.round, "select")
        chosen = generator.choice(server.clients, size=count, replace=False, p=sizes / sizes.sum())
        return tuple(sorted(int(client) for client in chosen))

    def weigh(self, declared: Declared) -> Tensor:
        """Count all participants alike."""
        return equal_weights(declared)
