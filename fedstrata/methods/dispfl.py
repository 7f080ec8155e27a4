"""DisPFL: decentralised training of sparse models, each client with a mask of its own that moves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from fedstrata.functional import erk_densities, layer_masks, readjust, readjusted_at
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Decision, Facts, Matter, Touches
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, ModelAndMemory, Server, Training
from fedstrata.methods.mechanisms.masking import Masked, keep, send_under
from fedstrata.methods.mechanisms.peers import NO_SERVER, Peers, first_models, mean_with, noted
from fedstrata.rng import client_keys, uniform
from fedstrata.spec import parameter
from fedstrata.stack import Stack, Tensors, under


@methods.register("dispfl")
@dataclass(frozen=True)
class DisPFL(Peers, Masked):
    r"""Decentralised and sparse: each client trains under a mask of its own, and moves it after each round.

    Client k begins a round from the average over itself and random neighbours, of each entry over those that hold it,
    cut to its own mask: :math:`w_k = m_k \odot \sum_j w_j / \sum_j m_j`, zero where nobody holds an entry. It trains
    inside the mask. Then it drops, in each tensor, the smallest :math:`\lceil r_t n \rceil` of its :math:`n` weights,
    :math:`r_t = \frac{\alpha}{2} (1 + \cos(\pi t / T))` with t from 0, and adds as many others to the mask for the
    next round: those with the largest gradients on one minibatch, or random ones, as the authors' scripts, and so
    SSFL's comparison, have it (``regrow=random``). What it sends to its neighbours is what it trained, under the mask
    with which it trained.

    Masks start at random, another one for each client, with Erdos-Renyi-Kernel densities over all parameters, biases
    and norms included (those become dense): RigL's, in the authors' code as well
    (:func:`fedstrata.functional.erk_densities`). What is personal to a client is not masked. Each client downloads the
    kept weights and the masks of its neighbours, and uploads its own.

    Defaults:
        density, alpha, regrow, batch_size: rong-dai/DisPFL, fedml_experiments/standalone/DisPFL/main_dispfl.py.
    """

    facts: ClassVar[Facts] = Facts(
        "decentralised",
        "Dai et al., DisPFL: Towards Communication-Efficient Personalized Federated Learning via Decentralized Sparse "
        "Training, ICML 2022",
        "https://arxiv.org/abs/2206.00187",
        not_on_network=NO_SERVER,
    )
    touches: ClassVar[Touches] = Peers.touches.also(
        decides=(Decision.WEIGHTS,), takes_away=(Matter.SAME_ENTRIES, Matter.UNMASKED_HEAD)
    )

    density: float = parameter(0.5, "The fraction of weights that a mask keeps.", above=0, high=1)
    alpha: float = parameter(0.5, "The fraction of kept weights that the first round exchanges.", low=0, below=1)
    regrow: str = parameter(
        "gradient", "What comes back: the largest gradients, or any.", choices=("gradient", "random")
    )
    batch_size: int = parameter(128, "Samples in the minibatch on which gradients are taken.", low=1)

    def masked(self, layers: LayerMap) -> list[str]:
        """Mask all parameters."""
        return list(layers.parameter_names)

    # At the client ----------------------------------------------------------------------------------------------------

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Draw the first mask; keep the mask of the last training, under which the model was sent, beside it."""
        shapes = {name: model[name].shape[1:] for name in self.masked(clients.layers) if name in clients.shared}
        masks = self._first_masks(shapes, clients.seed, clients.ids, clients.sizes.device)
        return under("mask", masks) | under("sent", masks)

    def _first_masks(
        self, shapes: Mapping[str, torch.Size], seed: int, clients: Iterable[int], device: torch.device
    ) -> Tensors:
        """Draw a mask for each client, which depends on the seed and its number only."""
        ids = tuple(clients)
        scores = {
            name: uniform(client_keys(seed, 0, ids, f"{self.name}/{name}", device), shape)
            for name, shape in shapes.items()
        }
        return layer_masks(scores, erk_densities(list(shapes.values()), self.density), batched=True)

    def receive(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Average each entry over those that hold it, and cut to the own mask."""
        masks, held = clients.memory.group("sent"), Stack(message.masks).group("peers")
        own = keep(model, masks)
        mixed = {}
        for name, peers in message.group("peers").items():
            holders = torch.cat((masks[name].unsqueeze(1), held[name]), dim=1) if name in held else None
            mixed[name] = mean_with(own[name], peers, holders)
        return keep({**own, **mixed}, clients.memory.group("mask")), clients.memory

    @property
    def plans_ahead(self) -> str | None:
        """What depends on how many rounds there are in all."""
        return "its masks move less and less until the last round"

    def finish(self, clients: Clients, training: Training) -> ModelAndMemory:
        """Move the mask for the next round."""
        masks = clients.memory.group("mask")
        fraction = readjusted_at(clients.round - 1, clients.rounds, self.alpha)
        growth = self._growth(clients, training, masks)
        moved = {
            name: readjust(mask, training.trained[name], growth[name], fraction, batched=True)
            for name, mask in masks.items()
        }
        return training.trained, under("mask", moved) | under("sent", masks)

    def _growth(self, clients: Clients, training: Training, masks: Tensors) -> Tensors:
        """Score what may come back."""
        if self.regrow == "random":
            return {name: uniform(clients.keys(f"{self.name}/{name}"), mask.shape[1:]) for name, mask in masks.items()}
        gradients = clients.probe.gradients(training.trained, self.batch_size)
        return {name: gradients[name].abs() for name in masks}

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send what was trained, under the mask with which it was."""
        return send_under(message, clients.memory.group("sent"))

    # The relay --------------------------------------------------------------------------------------------------------

    def server_memory(self, server: Server) -> Tensors:
        """Know every client by the initial model under its first mask."""
        shapes = {name: server.model[name].shape for name in self.masked(server.layers) if name in server.model}
        masks = self._first_masks(shapes, server.seed, range(server.clients), server.sizes.device)
        return under("last", keep(first_models(server).group("last"), masks)) | under("mask", masks)

    def broadcast(self, server: Server, message: Message) -> Message:
        """Relay the neighbours' last models, under their masks."""
        message, peers = super().broadcast(server, message), self.choose_peers(server)
        masks = {name: masks[peers] for name, masks in server.memory.group("mask").items()}
        return replace(message, masks={**message.masks, **under("peers", masks)})

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Note what the participants sent, and under which masks."""
        _, memory = super().refine(server, model, replies)
        return model, {**memory, **noted(server, "mask", replies.masks)}
