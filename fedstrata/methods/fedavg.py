"""FedAvg: average what the clients learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods.contract.declarations import Facts, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods


@methods.register("fedavg")
@dataclass(frozen=True)
class FedAvg(Part):
    r"""Average what the clients learned, by their number of samples.

    :math:`w^{t+1} = \sum_k \frac{n_k}{n} w_k^t` over everything in the model, running statistics of norm layers
    included. This is what a round does when no part says otherwise, so the class is empty and can be combined with
    anything.
    """

    facts: ClassVar[Facts] = Facts(
        "averaging",
        "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017",
        "https://arxiv.org/abs/1602.05629",
    )
    touches: ClassVar[Touches] = Touches()
