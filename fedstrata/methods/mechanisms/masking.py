"""What methods with masked weights share: masks in memory, enforced wherever weights change or travel.

A mask is boolean, True where a weight is kept, and lies in the memory of its part, in the group ``mask``. Masked
weights are zero at every local step, have no gradient (so that momentum stays inside the mask too) and do not travel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.functional import prune, top_mask
from fedstrata.kernels.finding import find_kernels
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Decision, Matter, Touches
from fedstrata.methods.contract.exchange import Exchange
from fedstrata.methods.contract.part import Metrics, Part
from fedstrata.methods.contract.views import (
    Clients,
    LocalStep,
    Message,
    ModelAndMemory,
    Outline,
    Phase,
    Server,
    Training,
)
from fedstrata.methods.mechanisms.layer_choice import weights_of
from fedstrata.methods.mechanisms.shared import rows_of
from fedstrata.private_torch import differs_between_clients
from fedstrata.rng import client_keys, key, uniform
from fedstrata.stack import Stack, Tensors, per_client, under, weighted_means

SCOPES = ("weights", "all")
"""What a method may mask: the weights of all layers (convolutions, linear layers, attention, embeddings, ...), or every
parameter."""


@dataclass(frozen=True)
class Masked(Part):
    """The clients' side of masked weights: each client trains and sends only what the mask in its memory keeps.

    A subclass prepares the masks in :meth:`client_memory` and may change them wherever a hook returns the client's
    memory. What the server knows of them stands in its memory under the same names.
    """

    touches: ClassVar[Touches] = Touches(
        decides=(Decision.WEIGHTS,), relies_on=(Matter.SHARING,), takes_away=(Matter.UNMASKED_HEAD,)
    )

    def masked(self, layers: LayerMap) -> list[str]:
        """Name what is masked."""
        return maskable(layers)

    def notes(self, outline: Outline) -> Iterable[str]:
        """Say that without such weights nothing is masked, and which others stay dense."""
        masked = self.masked(outline.layers)
        if not masked:
            yield f"The model has no convolution or linear weights, so '{self.name}' masks nothing."
        elif dense := left_out(outline.layers, masked):
            yield f"'{self.name}' leaves {dense} dense, outside the model's layers with weights."

    def start(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Start inside the mask, also with weights that are personal."""
        return keep(model, clients.memory.group("mask")), clients.memory

    def gradients(self, clients: Clients, step: LocalStep, gradients: Tensors) -> Tensors:
        """Train only what the mask keeps."""
        return keep(gradients, clients.memory.group("mask"))

    def project(self, clients: Clients, step: LocalStep, parameters: Tensors) -> ModelAndMemory:
        """Keep masked weights at zero, whatever the optimiser does."""
        keep_(parameters, clients.memory.group("mask"))
        return parameters, clients.memory

    def upload(self, clients: Clients, training: Training, message: Message) -> Message:
        """Send only what the mask keeps."""
        return send_under(message, clients.memory.group("mask"))

    def metrics(self, server: Server) -> Metrics:
        """Tell which part of each layer the masks keep that the server knows of, in the mean over all clients."""
        return {"density": layer_densities(server.layers, server.memory.group("mask"))}


@dataclass(frozen=True)
class SharedMask(Masked):
    """One mask for all clients, which the server knows too.

    The server holds it in its memory under the same names, without an axis of clients. It is announced in a
    :class:`MaskExchange`; one that changes without an exchange is a :class:`MovingMask`.
    """

    def first_masks(self, weights: Tensors, seed: int) -> Tensors:
        """Make the mask to begin with from the initial weights that clients share: everything."""
        return everything(weights)

    def client_memory(self, clients: Clients, model: Tensors) -> Tensors:
        """Start with the first mask."""
        shared = {name: model[name][0] for name in self.masked(clients.layers) if name in clients.shared}
        masks = {name: mask[None] for name, mask in self.first_masks(shared, clients.seed).items()}
        return under("mask", for_each(masks, len(clients.ids)))

    def server_memory(self, server: Server) -> Tensors:
        """Start with the first mask."""
        shared = {name: server.model[name] for name in self.masked(server.layers) if name in server.model}
        return under("mask", self.first_masks(shared, server.seed))

    def masks_known(self, view: Clients | Server, upload: bool) -> Tensors:
        """Both sides hold the mask, which was announced to everybody."""
        return one_for_all(view.memory) if isinstance(view, Server) else view.memory.group("mask")

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send only what the mask keeps."""
        return send_under(message, one_for_all(server.memory))

    def refine(self, server: Server, model: Tensors, replies: Message) -> ModelAndMemory:
        """Keep masked weights at zero at the server too, where momentum from before the mask would move them."""
        return keep(model, server.memory.group("mask")), server.memory


class MaskExchange(Exchange):
    """An exchange from which the server concludes a mask for everybody."""

    def announce(self, server: Server) -> Message:
        """Send the mask, one bit per weight."""
        return Message(one_for_all(server.memory))

    def adopt(self, clients: Clients, announcement: Message) -> Tensors:
        """Take the mask over."""
        return clients.memory | under("mask", for_each(announcement.tensors, len(clients.ids)))


@dataclass(frozen=True)
class OwnMasks(Masked):
    """A mask of its own for each client, which the server knows too: it holds those of all N clients, ``[N, ...]``.

    Each participant gets and sends only what its own mask keeps; an entry of the global model is the mean over those
    participants whose masks keep it, and stays as it is where none does. What a client gets is what it is tested with.
    """

    touches: ClassVar[Touches] = Masked.touches.also(takes_away=(Matter.SAME_ENTRIES,))

    def masks_known(self, view: Clients | Server, upload: bool) -> Tensors:
        """The server holds every client's own mask as of its last message."""
        return _of_participants(view) if isinstance(view, Server) else view.memory.group("mask")

    def broadcast(self, server: Server, message: Message) -> Message:
        """Send each participant what its mask keeps."""
        return send_under(message, _of_participants(server))


@dataclass(frozen=True)
class MovingMask(SharedMask):
    """One mask for all clients that moves with the broadcast: clients that sat out hold an older one."""

    def masks_known(self, view: Clients | Server, upload: bool) -> Tensors:
        """Participants hold the mask only once the broadcast has brought it."""
        return super().masks_known(view, upload) if upload else {}

    def start(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
        """Start inside the mask under which the model came, and keep it."""
        known = clients.memory.group("mask")
        masks = for_each({name: mask for name, mask in message.masks.items() if name in known}, len(clients.ids))
        memory = clients.memory | under("mask", masks)
        return keep(model, memory.group("mask")), memory


def one_for_all(memory: Stack) -> Stack:
    """Take the masks in the server's memory as they stand in a message: the same for everybody."""
    return Stack({name: mask[None] for name, mask in memory.group("mask").items()})


def _of_participants(server: Server) -> Tensors:
    rows = rows_of(server)
    return {name: masks[rows] for name, masks in server.memory.group("mask").items()}


# Masks in memory ------------------------------------------------------------------------------------------------------


def maskable(layers: LayerMap, scope: str = "weights") -> list[str]:
    """Name what can be masked (see :data:`SCOPES`), in the order of the forward pass."""
    return weights_of(layers, "all") if scope == "weights" else list(layers.parameter_names)


def left_out(layers: LayerMap, masked: Collection[str]) -> str:
    """Name what has several axes and is not masked, such as class tokens and positions, in words."""
    names = [name for layer in layers.layers for name in layer.weights if name not in masked]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(f"'{name}'" for name in names[:3]) + more


def for_each(masks: Mapping[str, Tensor], clients: int) -> Tensors:
    """Give masks of a message, with an axis of 1 or K, to K clients, as copies that can be kept."""
    return {name: mask.expand(clients, *mask.shape[1:]).contiguous() for name, mask in masks.items()}


def everything(tensors: Mapping[str, Tensor]) -> Tensors:
    """Make masks that keep everything."""
    return {name: torch.ones_like(tensor, dtype=torch.bool) for name, tensor in tensors.items()}


# Enforcing them -------------------------------------------------------------------------------------------------------


def keep(tensors: Tensors, masks: Mapping[str, Tensor]) -> Tensors:
    """Put what the masks do not keep to zero; tensors without a mask stay as they are.

    >>> keep({"a": torch.tensor([1.0, 2.0])}, {"a": torch.tensor([True, False])})
    {'a': tensor([1., 0.])}
    """
    return {name: _kept(tensor, masks[name]) if name in masks else tensor for name, tensor in tensors.items()}


def _kept(tensor: Tensor, mask: Tensor) -> Tensor:
    kernels = _kernels_for(tensor, mask)
    if kernels is not None:
        kept: Tensor = kernels.keep(tensor, mask)
        return kept
    return torch.where(mask, tensor, tensor.new_zeros(()))


def keep_(tensors: Tensors, masks: Mapping[str, Tensor]) -> None:
    """Do the same where the tensors are: for those that the caller owns, such as parameters in training."""
    for name, tensor in tensors.items():
        if name not in masks:
            continue
        kernels = _kernels_for(tensor, masks[name])
        if kernels is not None:
            kernels.keep_(tensor, masks[name])
        else:
            tensor.masked_fill_(masks[name].logical_not(), 0)


def _kernels_for(tensor: Tensor, mask: Tensor) -> ModuleType | None:
    """Find the kernels on a GPU, for numbers that nobody differentiates."""
    if not tensor.is_cuda or tensor.requires_grad or differs_between_clients(tensor):
        return None

    def trial(kernels: ModuleType) -> None:
        ones = torch.ones(2, device="cuda")
        kernels.keep(ones, ones > 0)
        kernels.keep_(ones, ones > 0)

    kernels = find_kernels("masks", "masks", trial)
    return kernels if kernels is not None and kernels.takes(tensor, mask) else None


def send_under(message: Message, masks: Mapping[str, Tensor]) -> Message:
    """Let only what the masks keep travel, and of that what masks before them kept."""
    sent = {
        name: mask & message.masks[name] if name in message.masks else mask
        for name, mask in masks.items()
        if name in message.tensors
    }
    return replace(message, tensors=keep(message.tensors, sent), masks={**message.masks, **sent})


# Changing them during local training ----------------------------------------------------------------------------------


def epoch_ends(epochs: int) -> list[float]:
    """Tell where local training may change its mask: after each epoch but the last, or in the middle of a single one.

    >>> epoch_ends(1), epoch_ends(4)
    ([0.5], [0.25, 0.5, 0.75])
    """
    return [epoch / epochs for epoch in range(1, epochs)] or [0.5]


def divided_at(cuts: Sequence[float]) -> tuple[Phase, ...]:
    """Divide local training into phases without changing it, so that a mask can be looked at or changed in between."""
    edges = [0.0, *cuts, 1.0]
    return tuple(Phase(span=span, continues=span[0] > 0) for span in pairwise(edges))


# Making and measuring them --------------------------------------------------------------------------------------------


def kept_by(mask: Tensor) -> Tensor:
    """Count what each client's mask keeps: ``[K]``."""
    return per_client(mask).sum(1)


def random_masks(
    shapes: Mapping[str, torch.Size], sparsity: float, seed: int, clients: tuple[int, ...], device: torch.device
) -> Tensors:
    """Draw each client's own mask ``[K, ...]``: exactly ``floor((1 - sparsity) * d)`` of all entries are kept.

    A client's mask depends on the seed and its number only, so that the server knows it too.
    """
    scores = {
        name: uniform(client_keys(seed, 0, clients, f"mask/{name}", device), shape) for name, shape in shapes.items()
    }
    return top_mask(scores, sparsity, batched=True)


def common_random_masks(tensors: Mapping[str, Tensor], sparsity: float, seed: int) -> Tensors:
    """Draw one mask for everybody, for tensors without an axis of clients; it depends on the seed only."""
    scores = {
        name: uniform(torch.tensor(key(seed, "mask", name), device=tensor.device), tensor.shape)
        for name, tensor in tensors.items()
    }
    return top_mask(scores, sparsity)


def largest_of(sizes: Mapping[str, Tensor], sparsity: float) -> Tensors:
    """Keep the largest of each client's entries ``[K, ...]`` that are not zero, ranked over all tensors.

    Of d such entries it is ``floor((1 - sparsity) * d)``: where most are zero, under a mask, still fewer are kept.

    >>> largest_of({"a": torch.tensor([[3.0, 1.0, 0.0]]), "b": torch.tensor([[2.0, 4.0, 0.0]])}, 0.5)
    {'a': tensor([[ True, False, False]]), 'b': tensor([[False,  True, False]])}
    """
    rows = torch.cat([per_client(size) for size in sizes.values()], dim=1)
    filled = rows != 0
    dropped = filled.sum(1) - ((1 - sparsity + 1e-12) * filled.sum(1).double()).floor().long()
    masks = torch.split(prune(filled, rows, dropped, batched=True), [size[0].numel() for size in sizes.values()], dim=1)
    return {name: mask.reshape(size.shape) for (name, size), mask in zip(sizes.items(), masks, strict=True)}


def mean_with_zeros(server: Server, replies: Message, shares: Tensor) -> Tensors:
    r"""Merge replies so that a masked weight counts as zero: :math:`\sum_k p_k m_k w_k`, not divided by who kept it."""
    return weighted_means({name: sent for name, sent in replies.tensors.items() if name in server.model}, shares)


def layer_densities(layers: LayerMap, masks: Mapping[str, Tensor]) -> dict[str, float]:
    """Tell which part of each layer's masked tensors is kept, with or without an axis of clients."""
    if not masks:
        return {}
    kept = torch.stack([mask.sum() for mask in masks.values()]).tolist()
    counts: dict[str, tuple[int, int]] = {}
    for (name, mask), count in zip(masks.items(), kept, strict=True):
        layer = layers.of(name).name
        before = counts.get(layer, (0, 0))
        counts[layer] = before[0] + count, before[1] + mask.numel()
    return {layer: count / total for layer, (count, total) in counts.items()}
