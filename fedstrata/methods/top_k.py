"""Top-k: each client sends only its largest weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods.contract.declarations import Decision, Facts, Matter, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, Outline, Training
from fedstrata.methods.mechanisms.masking import largest_of, left_out, maskable, send_under
from fedstrata.methods.random_k import PAPER
from fedstrata.spec import parameter


@methods.register("top-k")
@dataclass(frozen=True)
class TopK(Part):
    r"""Each client trains the whole model and sends only its largest weights.

    Of the d weights of all layers, no biases and no norms, that are not zero, ranked by magnitude over the model, a
    client sends the :math:`\lfloor (1 - \sigma) d \rfloor` largest: beside a mask (``ssfl+top-k``) these are the
    largest of what the mask keeps. An entry of the global model is the mean over those who sent it, by their samples;
    where nobody did, it stays as it is (the paper leaves this open). The global model is dense, and so is what the
    server sends.

    Defaults:
        sparsity: paper, Section 4.1.
    """

    facts: ClassVar[Facts] = Facts("sparse", PAPER)
    touches: ClassVar[Touches] = Touches(
        decides=(Decision.GAPS,), relies_on=(Matter.SHARING,), takes_away=(Matter.SAME_ENTRIES,)
    )

    sparsity: float = parameter(
        0.5, "The fraction of weights, of those that are not zero, that are not sent.", low=0, below=1
    )

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send only the largest weights."""
        sizes = {name: message.tensors[name].abs() for name in maskable(clients.layers) if name in message.tensors}
        return send_under(message, largest_of(sizes, self.sparsity)) if self.sparsity > 0 and sizes else message

    def notes(self, outline: Outline) -> Iterable[str]:
        """Say that without such weights everything is sent, and which others always are."""
        weights = maskable(outline.layers)
        if not weights:
            yield f"The model has no convolution or linear weights, so '{self.name}' sends everything."
        elif whole := left_out(outline.layers, weights):
            yield f"'{self.name}' always sends {whole} whole, outside the model's layers with weights."
