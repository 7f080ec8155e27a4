"""Weight decay at the server, as FedLWS compares with it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from fedstrata.methods.contract.declarations import Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.views import Message, ModelAndMemory, Server
from fedstrata.methods.mechanisms.shared import shared_parameters
from fedstrata.stack import Tensors, subtract


@dataclass(frozen=True)
class ServerDecay(Part):
    r"""Decay the global weights as an optimiser would for which the round's update is a step along a gradient.

    With :math:`g = w^t - \hat w` and a learning rate of 1, a step :math:`w - (g + \lambda w)` leads to :math:`\hat w -
    \lambda w^t`. Only the shared parameters decay that came in the round.
    """

    touches: ClassVar[Touches] = Touches()

    @abstractmethod
    def rates(self, server: Server, old: Tensors, updates: Tensors) -> ModelAndMemory:
        """Compute how strongly each entry, or each tensor, decays, and the server's new memory."""

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Decay what came."""
        old = {name: server.model[name] for name in shared_parameters(server) if name in model}
        if not old:
            return model, server.memory
        rates, memory = self.rates(server, old, subtract(old, model))
        return {**model, **{name: model[name] - rates[name] * tensor for name, tensor in old.items()}}, memory
