"""The contract between a method and the engines.

A method is a composition of **parts**. A part is a frozen dataclass whose fields are its hyper-parameters and whose
methods are hooks: the points of a round that it touches, below in the order of a round. Hooks take values and return
values; they keep nothing. What they see is in :mod:`fedstrata.methods.contract.views`. The same part runs in
simulation, where a hook serves K clients at once (every tensor has a leading client axis ``[K, ...]``), and at a real
site, where K = 1.

A hook that a part does not define behaves as in FedAvg.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Facts, Needs, Touches
from fedstrata.methods.contract.exchange import Exchange
from fedstrata.methods.contract.views import (
    Clients,
    Declared,
    LocalStep,
    Message,
    ModelAndMemory,
    Outline,
    Phase,
    Server,
    Training,
)
from fedstrata.rng import numpy_generator
from fedstrata.spec import Spec
from fedstrata.stack import Tensors, weighted_means

Metrics = dict[str, float | dict[str, float]]
"""Numbers worth keeping: of a round, or of its layers, from their names to values."""


@dataclass(frozen=True)
class Kept:
    """What of the model a client keeps: ``personal`` tensors never leave it, ``resident`` ones do not travel in every
    round.
    """

    personal: Iterable[str] = ()
    resident: Iterable[str] = ()


@dataclass(frozen=True)
class Part(Spec):
    """One component of a method; the hooks below are FedAvg."""

    # What a part says of itself ---------------------------------------------------------------------------------------

    facts: ClassVar[Facts]
    """The paper, and what else people should know."""
    touches: ClassVar[Touches | None] = None
    """What it decides, relies on and takes away. A part that does not say is refused where something is taken away."""

    @property
    def needs(self) -> Needs:
        """Ask the engines for what the hooks need."""
        return Needs()

    def parts(self) -> tuple[Part, ...]:
        """The parts that this name stands for: itself, or several for a named composition."""
        return (self,)

    def notes(self, outline: Outline) -> Iterable[str]:
        """Say where the method degenerates in an experiment, in sentences; refuse a model that it cannot work on."""
        return ()

    @property
    def plans_ahead(self) -> str | None:
        """What depends on how many rounds there are in all, if anything does, so that a longer run begins otherwise.

        It goes on from "because", as in "because its stages divide the rounds".
        """
        return None

    # Before the first round -------------------------------------------------------------------------------------------

    def keeps(self, layers: LayerMap) -> Kept:
        """Name what of the model a client keeps: for ever, or between rounds."""
        return Kept()

    def initial(self, layers: LayerMap, model: Tensors, seed: int) -> Tensors:
        """Replace the common initial model, where a method trains something else than weights."""
        return model

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Prepare what each client remembers, as stacks; ``model`` is the common initial model as a stack."""
        return {}

    def server_memory(self, server: Server) -> Tensors:
        """Prepare what the server remembers."""
        return {}

    # A round ----------------------------------------------------------------------------------------------------------

    def exchanges(self) -> tuple[Exchange, ...]:
        """Ask clients something before some rounds, such as which weights are salient."""
        return ()

    def select(self, server: Server, count: int) -> tuple[int, ...]:
        """Server: choose this many participants (exclusive): uniformly, the same for every method under one seed."""
        if count == server.clients:
            return tuple(range(count))
        chosen = numpy_generator(server.seed, server.round, "select").choice(server.clients, size=count, replace=False)
        return tuple(sorted(int(client) for client in chosen))

    def broadcast(self, server: Server, message: Message) -> Message:
        """Server: change what is sent; the message already holds the shared tensors of the server's model."""
        return message

    def receive(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Client: put the model together from a message that holds more than the model (exclusive).

        This happens whenever a client gets a message: to train, to answer a survey, to be tested. ``model`` has what
        the message and the client's own tensors give under their names.
        """
        return model, clients.memory

    def start(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Client: begin to train: look at what was received, and change the weights with which training starts."""
        return model, clients.memory

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Client: divide local training into phases (exclusive)."""
        return (Phase(),)

    def effective(self, clients: Clients, parameters: Tensors, step: Tensor | None) -> Tensors:
        """Client: compute the weights with which the model runs from what is trained, open to autograd.

        ``step`` is the number of a local step, as in :class:`LocalStep`; ``None`` means that the model is tested, not
        trained.
        """
        return parameters

    def loss(self, clients: Clients, step: LocalStep, loss: Tensor) -> Tensor:
        """Client: change each client's loss ``[K]`` of the batch, at first that of the experiment: add a term to it.

        A part that computes another loss instead says so (:attr:`Decision.LOSS`) and comes first.
        """
        return loss

    def gradients(self, clients: Clients, step: LocalStep, gradients: Tensors) -> Tensors:
        """Client: change the gradients before the optimiser sees them."""
        return gradients

    def project(self, clients: Clients, step: LocalStep, parameters: Tensors) -> ModelAndMemory:
        """Client: change the parameters, and the memory, after the optimiser's step.

        The parameters are the training's own: a part may also change them where they are, and return them.
        """
        return parameters, clients.memory

    def finish(self, clients: Clients, training: Training) -> ModelAndMemory:
        """Client: change the trained model before it is kept and sent, and remember what is needed later."""
        return training.trained, clients.memory

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Client: change what leaves the client; the message already holds the shared tensors."""
        return message

    def admit(self, server: Server, replies: Message) -> Message:
        """Server: look at the replies before they are weighed and merged, and change them, such as cut them short."""
        return replies

    def weigh(self, declared: Declared) -> Tensor:
        r"""Server: give each participant its weight ``[K]`` in the merged model (exclusive): :math:`u_k = n_k`.

        The shares of the participants are :math:`p_k = u_k / \sum_j u_j`.
        """
        return declared.sizes.to(torch.float64)

    def merge(self, server: Server, replies: Message, shares: Tensor) -> Tensors:
        r"""Server: merge the replies (exclusive): :math:`\hat w = \sum_k p_k w_k` over those that sent an entry."""
        sent = {name: tensor for name, tensor in replies.tensors.items() if name in server.model}
        return weighted_means(sent, shares, replies.masks, server.model)

    refines_merged: ClassVar[bool] = False
    """Whether :meth:`refine` comes before the server's step, not after it."""

    def server_step(self, server: Server, merged: Tensors) -> ModelAndMemory:
        """Server: turn the merged model into the new one (exclusive)."""
        return merged, server.memory

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Server: change the new model last, for instance shrink layers on which clients disagree.

        ``replies`` are empty unless a part of the method needs them (:attr:`Needs.replies`).
        """
        return model, server.memory

    def metrics(self, server: Server) -> Metrics:
        """Server: tell numbers of the round, or of its layers, worth keeping."""
        return {}

    # Tests, the end, and the wire -------------------------------------------------------------------------------------

    def deployed(self, clients: Clients, model: Tensors) -> Tensors:
        """Client: choose the model that a client uses, and that is tested."""
        return model

    def adaptation(self) -> Phase | None:
        """Client: after the last round, train once more for oneself (exclusive)."""
        return None

    def remarks(self, server: Server) -> Iterable[str]:
        """Server: after the last round, say where the method turned out to do nothing, in sentences."""
        return ()

    def masks_known(self, view: Clients | Server, upload: bool) -> Tensors:
        """Tell which masks both sides of a link hold before a message travels down or up it, by the tensors' names.

        A message under such a mask names it instead of sending it. Clients answer for themselves, ``[K, ...]``, the
        server for the participants, with a leading axis of K or 1; the answers must agree.
        """
        return {}
