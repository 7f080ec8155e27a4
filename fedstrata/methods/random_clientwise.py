"""Random masks of single clients as SSFL's code averages them: what a mask leaves out counts as zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from fedstrata.methods.contract.declarations import Decision, Facts, Touches
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, Server
from fedstrata.methods.mechanisms.masking import keep, mean_with_zeros
from fedstrata.methods.random_k import PAPER, RandomK
from fedstrata.stack import Tensors


@methods.register("random-clientwise")
@dataclass(frozen=True)
class RandomClientwise(RandomK):
    r"""Each client trains and sends under a random mask of its own, and the server averages as if masks were not there.

    An entry of the global model is :math:`w = \sum_k p_k m_k w_k`: a masked weight counts as zero, so that every
    average shrinks the weights, by half where half of them are masked. The server sends the whole model; a client
    trains what its mask keeps, and uses that of the global model, too. This is the mode ``random_clientwise`` of SSFL's
    code, where a mask, once applied for training, stays on the client's model when it is tested; ``random-k`` averages
    over those clients whose masks keep an entry.

    Defaults:
        sparsity: paper, Section 4.1.
        scope: riohib/SSFL, api/model/sparse_model.py.
    """

    facts: ClassVar[Facts] = Facts("sparse", PAPER, "https://github.com/riohib/SSFL")
    touches: ClassVar[Touches] = RandomK.touches.also(decides=(Decision.GAPS,))

    def masks_known(self, view: Clients | Server, upload: bool) -> Tensors:
        """Only what comes back stands under masks."""
        return super().masks_known(view, upload) if upload else {}

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send the whole model."""
        return message

    def deployed(self, clients: Clients, model: Tensors) -> Tensors:
        """Use what the mask keeps of the global model."""
        return keep(model, clients.memory.group("mask"))

    def merge(self, server: Server, replies: Message, shares: Tensor) -> Tensors:
        """Average with zeros for what is masked."""
        return mean_with_zeros(server, replies, shares)
