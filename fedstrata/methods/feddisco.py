"""FedDisco: shares that look at the clients' labels too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedstrata.functional import disco_shares
from fedstrata.methods.contract.declarations import Facts, Matter, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Declared
from fedstrata.spec import parameter


@methods.register("feddisco")
@dataclass(frozen=True)
class FedDisco(Part):
    r"""Weigh clients by their size and by how evenly they hold the classes.

    :math:`p_k \propto \mathrm{ReLU}(n_k - a \, d_k + b)` with :math:`n_k` the relative size among the participants and
    :math:`d_k` the distance of the client's label distribution from the uniform one. Where nobody would get anything,
    sizes alone decide.

    The authors' values of a and b belong to Kullback-Leibler distances that are divided by their sum over the
    participants, as their code does though the formula does not say so; with plain ones (``normalise=false``) they
    leave nobody anything where labels are skewed, and FedLWS takes 0.1 for both. Of the other distances their code
    divides none (``normalise=true`` does). The server uses the clients' label histograms, which they declare with their
    sizes before the first round; nothing more travels than in FedAvg.

    Defaults:
        a, b, distance: MediaBrain-SJTU/FedDisco, args.py.
        normalise: MediaBrain-SJTU/FedDisco, disco.py.
    """

    facts: ClassVar[Facts] = Facts(
        "aggregation",
        "Ye et al., FedDisco: Federated Learning with Discrepancy-Aware Collaboration, ICML 2023",
        "https://arxiv.org/abs/2305.19229",
    )
    touches: ClassVar[Touches] = Touches(takes_away=(Matter.OWN_WEIGHT,))

    a: float = parameter(0.5, "How strongly the distance counts.", low=0)
    b: float = parameter(0.1, "What every client gets beforehand.", low=0)
    distance: str = parameter("kl", "The distance of label distributions.", choices=("kl", "l1", "l2", "cosine"))
    normalise: bool | None = parameter(
        None, "Divide the distances by their sum; none: those of 'kl' only, as the released code does."
    )

    def weigh(self, declared: Declared) -> Tensor:
        """Compute the shares from what the participants declared."""
        normalise = self.distance == "kl" if self.normalise is None else self.normalise
        return disco_shares(declared.sizes, declared.label_counts, self.a, self.b, self.distance, normalise)
