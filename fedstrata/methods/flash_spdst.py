"""FLASH (SPDST): clients find out how dense each layer should be, and then train one sparse network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.functional import prune, regrow, share_out
from fedstrata.methods.contract.declarations import Decision, Facts, Touches
from fedstrata.methods.contract.exchange import Exchange
from fedstrata.methods.contract.registry import methods
from fedstrata.methods.contract.views import Clients, Declared, Message, ModelAndMemory, Server
from fedstrata.methods.mechanisms.masking import (
    MaskExchange,
    SharedMask,
    common_random_masks,
    epoch_ends,
    keep,
    kept_by,
    mean_with_zeros,
)
from fedstrata.methods.mechanisms.shared import equal_weights
from fedstrata.rng import numpy_generator, uniform
from fedstrata.spec import parameter
from fedstrata.stack import Tensors, per_client, under


@methods.register("flash-spdst")
@dataclass(frozen=True)
class FlashSPDST(SharedMask):
    r"""A few clients find the layers' densities; then all train under one random mask that has them.

    Stage one, before the first round: everything starts under a random mask with the target density. A few clients
    train sparsely for some epochs; after each epoch but the last (in the middle of a single one) the mask moves. In
    each tensor the fraction :math:`r (1 - e / E)` of the weights left with the smallest magnitude goes, and as many as
    went in all come back at random places, divided over tensors in proportion to their mean magnitude. A tensor with
    more than the mean of these magnitudes and a sparsity s below 0.2 loses at most the fraction s. The clients send the
    density of each tensor and nothing else. The server averages the densities, scales them to the target and draws a
    new random mask with them (sensitivity-driven pre-defined sparse training).

    Stage two is FedAvg from the initial weights, inside that mask, with all participants counting alike.

    The authors leave fully connected layers dense; here the weights of all layers can be masked. Counts are exact where
    the released code draws each weight by itself; where a tensor is full, the others take over in proportion, where
    that divides the rest evenly and leaves a hundredth of the room; and stage two begins at the common initial model
    where that initialises anew.

    Defaults:
        sparsity: paper, SSFL's comparison (Section 4.1 there); the authors' main.py has 0.95.
        first_clients, first_epochs, rate: SaraBabakN/flash_fl, main.py.
    """

    facts: ClassVar[Facts] = Facts(
        "sparse",
        "Babakniya et al., Revisiting Sparsity Hunting in Federated Learning: Why does Sparsity Consensus Matter?, "
        "TMLR 2023",
        "https://arxiv.org/abs/2208.13092",
    )
    touches: ClassVar[Touches] = SharedMask.touches.also(decides=(Decision.GAPS,))

    sparsity: float = parameter(0.5, "The fraction of weights that are masked.", low=0, below=1)
    first_clients: float = parameter(0.1, "The fraction of clients that take part in stage one.", above=0, high=1)
    first_epochs: int = parameter(10, "Epochs of stage one.", low=1)
    rate: float = parameter(0.25, "The fraction of a tensor's weights that may move at first (r).", low=0, below=1)

    def first_masks(self, weights: Tensors, seed: int) -> Tensors:
        """Start under a random mask."""
        return common_random_masks(weights, self.sparsity, seed) if self.sparsity > 0 else {}

    def weigh(self, declared: Declared) -> Tensor:
        """Let all clients count alike."""
        return equal_weights(declared)

    def merge(self, server: Server, replies: Message, shares: Tensor) -> Tensors:
        """Average with zeros for what is masked."""
        return mean_with_zeros(server, replies, shares)

    def exchanges(self) -> tuple[Exchange, ...]:
        """Find the layers' densities before the first round."""
        return (StageOne(self),) if self.sparsity > 0 else ()

    def moved(self, clients: Clients, masks: Tensors, model: Tensors, done: float, purpose: str) -> Tensors:
        """Take the smallest weights out and as many others in, elsewhere; ``done`` says how far training is."""
        if not masks:
            return masks
        magnitudes = {name: model[name].abs() for name in masks}
        sizes = torch.tensor([mask[0].numel() for mask in masks.values()], device=clients.sizes.device)
        kept = torch.stack([kept_by(mask) for mask in masks.values()], dim=1)
        sums = [per_client(magnitudes[name] * mask).double().sum(1) for name, mask in masks.items()]
        means = torch.stack(sums, dim=1) / kept.clamp(min=1)
        gone = (prune_rates(self.rate * (1 - done), kept, sizes, means) * kept - 1e-9).ceil().long()
        thinned = {
            name: prune(mask, magnitudes[name], count, batched=True)
            for (name, mask), count in zip(masks.items(), gone.unbind(1), strict=True)
        }
        counts = share_out(gone.sum(1), means, sizes - kept + gone)
        return {
            name: regrow(mask, uniform(clients.keys(f"{purpose}/{name}"), mask.shape[1:]), count, batched=True)
            for (name, mask), count in zip(thinned.items(), counts.unbind(1), strict=True)
        }


@dataclass(frozen=True)
class StageOne(MaskExchange):
    """A few clients train with a mask that moves, and the server draws a mask with the densities that they found."""

    method: FlashSPDST

    def due(self, round: int, rounds: int, joining: bool) -> int:
        """Take place before the first round."""
        return round == 1

    def asks(self, server: Server) -> Sequence[int]:
        """Choose a few clients."""
        count = max(1, int(self.method.first_clients * server.clients))
        chance = numpy_generator(server.seed, "flash", "stage one")
        return [int(client) for client in chance.choice(server.clients, size=count, replace=False)]

    def survey(self, clients: Clients, model: Tensors) -> Message:
        """Train with a mask that moves, and tell how dense each tensor ends up."""
        epochs, masks = self.method.first_epochs, dict(clients.memory.group("mask"))
        for number, (begin, end) in enumerate(pairwise([0.0, *epoch_ends(epochs), 1.0])):
            own = under(f"{self.method.name}/mask", masks)
            model = clients.probe.train(model, epochs, (begin, end), own)
            masks = self.method.moved(clients, masks, model, end, f"stage one/{number}")  # in the end, by nothing
            model = keep(model, masks)
        return Message(numbers={name: kept_by(mask).double() / mask[0].numel() for name, mask in masks.items()})

    def conclude(self, server: Server, replies: Message) -> ModelAndMemory:
        """Draw a mask with the mean densities, and cut the initial model down to it."""
        known = server.memory.group("mask")
        draws = {
            name: uniform(torch.tensor(server.key(f"flash/{name}"), device=server.sizes.device), mask.shape)
            for name, mask in known.items()
        }
        densities = {name: replies.numbers[name].mean() for name in draws}
        masks = with_densities(densities, draws, known)
        return keep({name: server.model[name] for name in masks}, masks), under("mask", masks)


def prune_rates(rate: float, kept: Tensor, sizes: Tensor, importance: Tensor) -> Tensor:
    r"""Tell which part of each tensor's weights may go ``[K, L]``: less of important ones that are nearly dense.

    A tensor whose sparsity s is below 0.2 and whose importance is above the mean over tensors lets :math:`\min(r, s)`
    of its weights go, so that it stays nearly dense.

    >>> prune_rates(0.25, torch.tensor([[9, 9, 5]]), torch.tensor([10, 10, 10]), torch.tensor([[3.0, 1.0, 2.5]]))
    tensor([[0.1000, 0.2500, 0.2500]], dtype=torch.float64)
    """
    sparsity = (sizes - kept).double() / sizes
    capped = (sparsity < 0.2) & (importance > importance.mean(1, keepdim=True))
    return sparsity.clamp(max=rate).where(capped, torch.full_like(sparsity, rate))


def with_densities(densities: Mapping[str, Tensor], scores: Tensors, known: Tensors) -> Tensors:
    """Keep as many weights in all as known masks do, the highest-scored of each tensor, by densities and sizes."""
    if not scores:
        return scores
    kept = sum(int(mask.sum()) for mask in known.values())
    sizes = torch.tensor([tensor.numel() for tensor in scores.values()])
    wanted = torch.stack([densities[name].double() for name in scores]).to(sizes.device) * sizes
    counts = share_out(kept, wanted, sizes)
    return {
        name: regrow(torch.zeros_like(tensor, dtype=torch.bool), tensor, int(count))
        for (name, tensor), count in zip(scores.items(), counts.tolist(), strict=True)
    }
