"""FLASH: clients find out how dense each layer should be, and then train one sparse network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.functional import prune, regrow, share_out
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.part import Facts, Part
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Message, Phase, Probe, Server
from fedstrata.methods.mechanisms.layer_choice import EXPLAINS_GAPS
from fedstrata.methods.mechanisms.masking import (
    MovingMask,
    SharedMask,
    as_memory,
    common_random_masks,
    divided_at,
    epoch_ends,
    for_each,
    keep,
    maskable,
    masks_in,
    mean_with_zeros,
    objection_to_missing_layers,
)
from fedstrata.methods.mechanisms.shared import equal_weights
from fedstrata.rng import numpy_generator, uniform
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, per_client

_FACTS = Facts(
    "sparse",
    "Babakniya et al., Revisiting Sparsity Hunting in Federated Learning: Why does Sparsity Consensus Matter?, "
    "TMLR 2023",
    "https://arxiv.org/abs/2208.13092",
)


@methods.register("flash-spdst")
@dataclass(frozen=True)
class FlashSPDST(SharedMask):
    r"""A few clients find the layers' densities; then all train under one random mask that has them.

    Stage one, before the first round: everything starts under a random mask with the target density. A few clients
    train sparsely for some epochs; after each epoch but the last the mask moves. In each tensor the fraction
    :math:`r (1 - e / E)` of the weights left with the smallest magnitude goes, and as many as went in all come back at
    random places, divided over tensors in proportion to their mean magnitude. The clients send the density of each
    tensor and nothing else. The server averages the densities, scales them to the target and draws a new random mask
    with them (sensitivity-driven pre-defined sparse training).

    Stage two is FedAvg from the initial weights, inside that mask, with all participants counting alike.

    The authors leave fully connected layers dense; here all weights of convolutions and linear layers can be masked.
    Counts are exact where the released code draws each weight by itself, and stage two begins at the common initial
    model where that initialises anew.
    """

    facts: ClassVar[Facts] = _FACTS
    claims: ClassVar[tuple[str, ...]] = (*SharedMask.claims, EXPLAINS_GAPS)

    sparsity: float = parameter(0.5, "The fraction of weights that are masked.", low=0, below=1)
    first_clients: float = parameter(0.1, "The fraction of clients that take part in stage one.", above=0, high=1)
    first_epochs: int = parameter(10, "Epochs of stage one.", low=1)
    rate: float = parameter(0.25, "The fraction of a tensor's weights that may move at first (r).", low=0, below=1)

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Start under a random mask."""
        names = [name for name in maskable(clients.layers) if name in clients.shared]
        masks = self._first_masks({name: model[name][0] for name in names}, clients.seed)
        return as_memory(for_each({name: mask[None] for name, mask in masks.items()}, len(clients.ids)))

    def server_memory(self, server: Server) -> Tensors:
        """Start under the same random mask."""
        names = [name for name in maskable(server.layers) if name in server.model]
        return as_memory(self._first_masks({name: server.model[name] for name in names}, server.seed))

    def _first_masks(self, tensors: Tensors, seed: int) -> Tensors:
        return common_random_masks(tensors, self.sparsity, seed) if self.sparsity > 0 else {}

    def weigh(self, server: Server) -> Tensor:
        """Let all clients count alike."""
        return equal_weights(server)

    def merge(self, server: Server, replies: Message, shares: Tensor) -> Tensors:
        """Average with zeros for what is masked."""
        return mean_with_zeros(server, replies, shares)

    def notes(self, layers: LayerMap) -> Iterable[str]:
        """Say that without such weights nothing is masked."""
        if not maskable(layers):
            yield f"The model has no convolution or linear weights, so '{self.name}' masks nothing."

    # Stage one --------------------------------------------------------------------------------------------------------

    def exchanges_before(self, round: int, rounds: int) -> int:
        """Find the layers' densities before the first round."""
        return round == 1 and self.sparsity > 0

    def asks(self, server: Server) -> Sequence[int]:
        """Choose a few clients."""
        count = max(1, int(self.first_clients * server.clients))
        chance = numpy_generator(server.seed, "flash", "stage one")
        return [int(client) for client in chance.choice(server.clients, size=count, replace=False)]

    def survey(self, clients: Clients, model: Tensors, probe: Probe) -> Message:
        """Train with a mask that moves, and tell how dense each tensor ends up."""
        masks, epochs = masks_in(clients.memory), self.first_epochs
        for epoch in range(epochs):
            own = {f"{self.name}/{name}": mask for name, mask in as_memory(masks).items()}
            model = probe.train(model, epochs, (epoch / epochs, (epoch + 1) / epochs), own)
            if epoch + 1 < epochs:
                masks = self._moved(clients, masks, model, (epoch + 1) / epochs, f"stage one/{epoch}")
                model = keep(model, masks)
        return Message(numbers={name: _kept(mask).double() / mask[0].numel() for name, mask in masks.items()})

    def _moved(self, clients: Clients, masks: Tensors, model: Tensors, done: float, purpose: str) -> Tensors:
        """Take the smallest weights out and as many others in, elsewhere; ``done`` says how far training is."""
        if not masks:
            return masks
        rate = self.rate * (1 - done)
        magnitudes = {name: model[name].abs() for name in masks}
        means = [
            per_client(magnitudes[name] * mask).double().sum(1) / _kept(mask).clamp(min=1)
            for name, mask in masks.items()
        ]
        thinned = {
            name: prune(mask, magnitudes[name], (rate * _kept(mask).double() - 1e-9).ceil().long(), batched=True)
            for name, mask in masks.items()
        }
        gone = [_kept(mask) - _kept(thinned[name]) for name, mask in masks.items()]
        room = torch.stack([mask[0].numel() - _kept(mask) for mask in thinned.values()], dim=1)
        counts = share_out(torch.stack(gone).sum(0), torch.stack(means, dim=1), room)
        return {
            name: regrow(mask, uniform(clients.keys(f"{purpose}/{name}"), mask.shape[1:]), count, batched=True)
            for (name, mask), count in zip(thinned.items(), counts.unbind(1), strict=True)
        }

    def conclude(self, server: Server, replies: Message) -> tuple[Tensors, Tensors]:
        """Draw a mask with the mean densities, and cut the initial model down to it."""
        draws = {
            name: uniform(torch.tensor(server.key(f"flash/{name}"), device=server.sizes.device), mask.shape)
            for name, mask in masks_in(server.memory).items()
        }
        densities = {name: replies.numbers[name].mean() for name in draws}
        masks = _with_densities(densities, draws, _total(masks_in(server.memory)))
        return keep({name: server.model[name] for name in masks}, masks), as_memory(masks)


@methods.register("flash-jmwst")
@dataclass(frozen=True)
class FlashJMWST(MovingMask, FlashSPDST):
    """As ``flash-spdst``, but clients go on moving the mask, and the server chooses from theirs.

    In every ``every``-th round, from the first on, participants let the mask move after each local epoch but the last
    (in the middle of a single one), as in stage one. They send what their own masks keep. The server averages, with
    zeros for what a client masked, and keeps in each tensor the largest of the averaged weights: as many as the
    participants' mean density says, scaled to the target (joint mask-weight sparse training). The new mask travels with
    the next model.
    """

    facts: ClassVar[Facts] = _FACTS
    claims: ClassVar[tuple[str, ...]] = FlashSPDST.claims
    one_support: ClassVar[bool] = False

    every: int = parameter(1, "The mask moves in every so many rounds (r_int).", low=1)

    def objects_to(self, other: Part) -> str | None:
        """Refuse what does not send every layer."""
        return objection_to_missing_layers(self, other)

    def _moves(self, round: int) -> bool:
        return self.sparsity > 0 and (round - 1) % self.every == 0

    def phases(self, clients: Clients) -> tuple[Phase, ...]:
        """Stop where the mask moves."""
        return divided_at(epoch_ends(clients.epochs)) if self._moves(clients.round) else (Phase(),)

    def between_phases(self, clients: Clients, number: int, model: Tensors, probe: Probe) -> tuple[Tensors, Tensors]:
        """Let the mask move."""
        done = epoch_ends(clients.epochs)[number]
        masks = self._moved(clients, masks_in(clients.memory), model, done, f"training/{number}")
        return keep(model, masks), as_memory(masks)

    def examine(self, server: Server, replies: Message, shares: Tensor, new: Tensors) -> tuple[Tensors, Tensors]:
        """Choose the next mask from the averaged weights, with the participants' mean densities."""
        if not self._moves(server.round):
            return new, server.memory
        known = masks_in(server.memory)
        densities = {name: replies.masks[name].double().mean() for name in known}
        masks = _with_densities(densities, {name: new[name].abs() for name in known}, _total(known))
        return new, as_memory(masks)


def _kept(mask: Tensor) -> Tensor:
    """Count what each client's mask keeps: ``[K]``."""
    return per_client(mask).sum(1)


def _total(masks: Tensors) -> int:
    """Count what masks without an axis of clients keep in all."""
    return sum(int(mask.sum()) for mask in masks.values())


def _with_densities(densities: Mapping[str, Tensor], scores: Tensors, kept: int) -> Tensors:
    """Keep this many weights in all, the highest-scored of each tensor, in proportion to densities and sizes."""
    if not scores:
        return scores
    sizes = torch.tensor([tensor.numel() for tensor in scores.values()])
    wanted = torch.stack([densities[name].double() for name in scores]).to(sizes.device) * sizes
    counts = share_out(kept, wanted, sizes)
    return {
        name: regrow(torch.zeros_like(tensor, dtype=torch.bool), tensor, int(count))
        for (name, tensor), count in zip(scores.items(), counts.tolist(), strict=True)
    }
