"""FLASH (JMWST): as SPDST, but clients go on moving the mask, and the server chooses from theirs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from fedstrata.methods.contract.declarations import Facts, Matter, Needs, Touches
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, ModelAndMemory, Phase, Server
from fedstrata.methods.flash_spdst import FlashSPDST, with_densities
from fedstrata.methods.mechanisms.masking import MovingMask, divided_at, epoch_ends, keep
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, under


@methods.register("flash-jmwst")
@dataclass(frozen=True)
class FlashJMWST(MovingMask, FlashSPDST):
    """As ``flash-spdst``, but clients go on moving the mask, and the server chooses from theirs.

    In every ``every``-th round, from the first on, participants let the mask move after each local epoch but the last
    (in the middle of a single one), as in stage one. They send what their own masks keep. The server averages, with
    zeros for what a client masked, and keeps in each tensor the largest of the averaged weights: as many as the
    participants' mean density says, scaled to the target (joint mask-weight sparse training). The new mask travels with
    the next model.

    Defaults:
        every: SaraBabakN/flash_fl, main.py.
    """

    facts: ClassVar[Facts] = FlashSPDST.facts
    touches: ClassVar[Touches] = FlashSPDST.touches.also(
        relies_on=(Matter.ALL_SENT,), takes_away=(Matter.SAME_ENTRIES,)
    )

    every: int = parameter(1, "The number of rounds from one move of the mask to the next (r_int).", low=1)

    @property
    def needs(self) -> Needs:
        """The server looks at the clients' masks."""
        return Needs(replies=True)

    def _moves(self, round: int) -> bool:
        return self.sparsity > 0 and (round - 1) % self.every == 0

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Stop where the mask moves."""
        if not self._moves(clients.round):
            return (Phase(),)
        whole, *others = divided_at(epoch_ends(clients.epochs))
        moves = (replace(phase, before=partial(self._move, number)) for number, phase in enumerate(others))
        return whole, *moves

    def _move(self, number: int, clients: Clients, model: Tensors) -> ModelAndMemory:
        done = epoch_ends(clients.epochs)[number]
        masks = self.moved(clients, clients.memory.group("mask"), model, done, f"training/{number}")
        return keep(model, masks), under("mask", masks)

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Choose the next mask from the averaged weights, with the participants' mean densities."""
        if not self._moves(server.round):
            return super().refine(server, model, replies)
        known = server.memory.group("mask")
        densities = {name: replies.masks[name].double().mean() for name in known}
        masks = with_densities(densities, {name: model[name].abs() for name in known}, known)
        return keep(model, masks), under("mask", masks)
