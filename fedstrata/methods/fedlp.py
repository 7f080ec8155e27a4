"""FedLP: every client sends each of its layers with some probability."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods.contract.declarations import Decision, Facts, Matter, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, Training
from fedstrata.methods.mechanisms.masking import send_under
from fedstrata.rng import uniform
from fedstrata.spec import parameter
from fedstrata.stack import align


@methods.register("fedlp")
@dataclass(frozen=True)
class FedLP(Part):
    r"""Let clients send each layer only with some probability; it is averaged over those who sent it.

    In every round client k draws :math:`m_{k,l} \sim \mathrm{Bernoulli}(p)` for each layer l and sends the layers with
    :math:`m_{k,l} = 1`; the new layer is :math:`\sum_k m_{k,l} p_k w_{k,l} / \sum_k m_{k,l} p_k`, the old one where
    nobody sent it. The server sends the whole model, as the scheme for homogeneous models in the paper and PLayer-FL's
    comparison do.

    A layer is a convolution or linear layer with the norm that follows it, so that a norm's statistics belong to the
    weights that they were measured with; the released code draws for every tensor of the state by itself. Clients count
    by their size, which for equal clients is the released mean. Of the upload a part p travels on average, and a bit
    for each tensor.

    Defaults:
        probability: Zhuzzq/FedLP, README.md (the best of 0.1, 0.3, 0.5 and 0.7), and PLayer-FL's comparison.
    """

    facts: ClassVar[Facts] = Facts(
        "layers",
        "Zhu et al., FedLP: Layer-wise Pruning Mechanism for Communication-Computation Efficient Federated Learning, "
        "ICC 2023",
        "https://arxiv.org/abs/2303.06360",
    )
    touches: ClassVar[Touches] = Touches(
        decides=(Decision.TRAVEL, Decision.GAPS), relies_on=(Matter.SHARING,), takes_away=(Matter.SAME_ENTRIES,)
    )

    probability: float = parameter(0.7, "With what probability a layer is sent.", above=0, high=1)

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send the layers that are drawn."""
        if self.probability == 1:
            return message
        blocks = clients.layers.blocks()
        drawn = uniform(clients.keys(self.name), (len(blocks),)) < self.probability
        masks = {
            name: align(sent, message.tensors[name])
            for block, sent in zip(blocks, drawn.unbind(1), strict=True)
            for layer in block
            for name in layer.names
            if name in message.tensors
        }
        return send_under(message, masks)
