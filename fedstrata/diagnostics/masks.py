"""The masks of sparse methods as uploads show them: how dense, how alike between clients, how steady over rounds."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.diagnostics.contract import WHOLE_MODEL, Diagnostic, Measured, Need, Quantity, Seen, diagnostics
from fedstrata.diagnostics.drift import for_all_participants, mean_of_pairs
from fedstrata.diagnostics.updates import due_every
from fedstrata.errors import FedStrataWarning
from fedstrata.functional.masks import shared_entries
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.compatibility import defines
from fedstrata.methods.contract.composition import Method
from fedstrata.methods.contract.views import Message
from fedstrata.spec import parameter
from fedstrata.stack import Stack, Tensors, per_client, under


def upload_masks(layers: LayerMap, uploads: Message) -> Tensors:
    """Take the masks out of uploads, ``[K, ...]`` for each parameter that has one: True where an entry is kept.

    It is the mask under which a parameter was sent, or the parameter itself where bits were sent in its place (FedPM).
    """
    masks = {}
    for name in (name for name in layers.parameter_names if name in uploads.tensors):
        tensor = uploads.tensors[name]
        if name in uploads.masks:
            masks[name] = uploads.masks[name].expand_as(tensor).to(torch.bool)
        elif tensor.dtype is torch.bool:
            masks[name] = tensor
    return masks


@dataclass(frozen=True)
class Counts:
    """Entries of two groups of masks, counted in float64: those that each keeps, that both keep, and that there are.

    They add up over tensors and layers.
    """

    one: Tensor
    other: Tensor
    both: Tensor
    entries: int

    def __add__(self, more: Counts) -> Counts:
        """Count the entries of both."""
        return Counts(self.one + more.one, self.other + more.other, self.both + more.both, self.entries + more.entries)

    @property
    def jaccard(self) -> Tensor:
        r"""The kept entries that both share, of those that one of them keeps: :math:`|a \cap b| / |a \cup b|`; 1 for
        two empty masks."""
        either = self.one + self.other - self.both
        return torch.where(either > 0, self.both / either, 1)

    @property
    def hamming(self) -> Tensor:
        r"""The part of all entries on which they differ: :math:`\lVert a - b \rVert_1 / d`."""
        return (self.one + self.other - 2 * self.both) / max(1, self.entries)


def between_clients(masks: Iterable[Tensor]) -> Counts:
    """Compare every two of K clients' masks, each ``[K, ...]``: ``[K, K]``.

    >>> found = between_clients([torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0]])])
    >>> found.jaccard.tolist() == [[1, 1 / 3], [1 / 3, 1]], found.hamming.tolist()
    (True, [[0.0, 0.5], [0.5, 0.0]])
    """
    total = None
    for mask in masks:
        rows = per_client(mask.to(torch.bool))
        both = shared_entries(rows)
        sizes = both.diagonal()
        found = Counts(sizes[:, None], sizes, both, rows.shape[1])
        total = found if total is None else total + found
    assert total is not None, "there is at least one tensor"
    return total


def one_by_one(masks: Iterable[tuple[Tensor, Tensor]]) -> Counts:
    """Compare each of K masks with its counterpart, such as its own in an earlier round: ``[K]``.

    >>> one_by_one([(torch.tensor([[1, 1, 0, 0]]), torch.tensor([[1, 0, 1, 0]]))]).hamming
    tensor([0.5000], dtype=torch.float64)
    """
    total = None
    for mask, counterpart in masks:
        one, other = (per_client(each.to(torch.bool)) for each in (mask, counterpart))
        kept, kept_there, both = (rows.sum(1).to(torch.float64) for rows in (one, other, one & other))
        found = Counts(kept, kept_there, both, one.shape[1])
        total = found if total is None else total + found
    assert total is not None, "there is at least one tensor"
    return total


def masks_refused(method: Method) -> str | None:
    """Say that nothing can be masked in what clients send, because no part changes it; none where one does."""
    if any(defines(part, "upload") for part in method.parts):
        return None
    zeroes = any(defines(part, "start") for part in method.parts)
    hint = " ('zeros' tells which weights they put to zero before training)" if zeroes else ""
    return f"with '{method}' clients send nothing under a mask{hint}"


def in_layers(layers: LayerMap, names: Iterable[str]) -> dict[str, list[str]]:
    """Group the names of tensors by their layers, in the order of the forward pass."""
    known = set(names)
    grouped = {layer.name: [name for name in layer.parameters if name in known] for layer in layers.all}
    return {layer: own for layer, own in grouped.items() if own}


@diagnostics.register("masks")
@dataclass(frozen=True)
class Masks(Diagnostic):
    r"""Tell how dense the clients' masks are, what of each layer was sent, and how much masks share.

    A client's mask is the one under which it uploads, whatever method made it, or the bits that it sends in the place
    of weights (``fedpm``). Two masks are compared by :math:`|a \cap b| / |a \cup b|` (Jaccard) and by the part of
    entries on which they differ (Hamming), over the tensors that have masks: between every two clients, and of each
    client with itself as it was when it was last measured. ``sent`` counts all parameters of a layer, also those
    without a mask, which are sent whole or not at all.

    The matrix holds the first ``clients`` participants, with all layers together. Numbers of single clients in single
    layers, and the matrix, are stored in the first round, the last, and every ``details_every`` rounds. To compare
    rounds, the masks of the first ``remembered`` participants are kept, one
    byte for each entry; who was not among them in the round before is not compared.

    Transient zeros, which never travel, are the business of ``zeros``.

    Costs a product ``[K, n] [n, K]`` in single precision, and a few passes over the masks: 1 to 2 % of a round of 20
    clients on digits with the CNN.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.UPLOADS})
    quantities: ClassVar[Mapping[str, Quantity]] = {
        "masks.density": Quantity(
            "Density of the masks",
            "Which part of the masked weights the clients' masks keep, in the mean over clients: 1 is dense, 0 keeps "
            "nothing.",
            low=0,
            high=1,
        ),
        "masks.sent": Quantity(
            "Part of the layer that was sent",
            "Which part of all parameters of the layer a client uploaded, in the mean over clients: 1 is everything, "
            "0 a layer that stays at the clients.",
            low=0,
            high=1,
        ),
        "masks.jaccard": Quantity(
            "Masks that two clients share",
            "Of the weights that one of two clients keeps, the part that both keep, in the mean over pairs: 1 is the "
            "same mask, 0 masks that have nothing in common.",
            low=0,
            high=1,
            pairs=True,
        ),
        "masks.hamming": Quantity(
            "Masks in which two clients differ",
            "The part of all masked weights that one of two clients keeps and the other does not, in the mean over "
            "pairs: 0 is the same mask.",
            low=0,
            high=1,
        ),
        "masks.steady": Quantity(
            "Masks that stay from round to round",
            "Of the weights that a client's mask keeps now or kept when it was last measured, the part that it keeps "
            "in both, in the mean over clients: 1 is a mask that does not move.",
            low=0,
            high=1,
        ),
        "masks.moved": Quantity(
            "Masks that move from round to round",
            "The part of all masked weights that a client's mask took in or let go since it was last measured, in the "
            "mean over clients: 0 is a mask that does not move.",
            low=0,
            high=1,
        ),
    }

    clients: int = parameter(200, "How many participants, the first ones, are compared with each other.", low=2)
    details_every: int = parameter(
        10, "The number of rounds from one in which numbers of single clients are stored to the next.", low=1
    )
    remembered: int = parameter(20, "Of how many participants masks are kept, to compare them over rounds.", low=0)

    def unfit(self, method: Method, layers: LayerMap) -> str | None:
        """Say that nobody masks anything."""
        return masks_refused(method)

    def update(self, seen: Seen, memory: Stack) -> Stack:
        """Compare the masks with those that are remembered, and remember these."""
        if not self.due(seen.round, seen.rounds):
            return memory
        masks = upload_masks(seen.layers, seen.uploads)
        if not masks:
            if seen.last and not memory:
                warnings.warn(
                    "The diagnostic 'masks' found no mask in what clients sent, in any round; it has told only which "
                    "part of each layer was sent.",
                    FedStrataWarning,
                    stacklevel=2,
                )
            return memory
        device = seen.sizes.device
        first = {name: mask[: self.remembered] for name, mask in masks.items()}
        now = torch.tensor(seen.participants[: self.remembered], dtype=torch.int64, device=device)
        kept = Stack({"clients": now}) | under("mask", first)
        before, then = memory.group("mask"), memory.get("clients")
        common = [name for name in masks if name in before]
        if then is None or not common:
            return kept
        met = now[:, None] == then
        rows, places = met.nonzero(as_tuple=True)
        if not len(rows):
            return kept
        for layer, names in in_layers(seen.layers, common).items():
            found = one_by_one((first[name][rows], before[name][places]) for name in names)
            kept |= {f"steady/{layer}": found.jaccard.mean(), f"moved/{layer}": found.hamming.mean()}
        whole = one_by_one((first[name][rows], before[name][places]) for name in common)
        return kept | {f"steady/{WHOLE_MODEL}": whole.jaccard.mean(), f"moved/{WHOLE_MODEL}": whole.hamming.mean()}

    def compute(self, seen: Seen, memory: Stack) -> Measured:
        """Measure from the uploads of one round, and what was compared with the round before."""
        masks = upload_masks(seen.layers, seen.uploads)
        sent = sent_parts(seen.layers, seen.uploads, seen.before)
        of_round: dict[str, Tensor | float] = {}
        of_layers: dict[str, dict[str, Tensor | float]] = {"masks.sent": {}}
        of_layers["masks.sent"] = {layer: part.mean() for layer, (part, _) in sent.items()}
        of_clients: dict[str, Tensor] = {}
        inside: dict[str, dict[str, Tensor]] = {}
        if sent:
            entries = torch.stack([part * size for part, size in sent.values()]).sum(0)
            of_clients["masks.sent"] = entries / sum(size for _, size in sent.values())
            of_round["masks.sent"] = of_clients["masks.sent"].mean()
        if not masks:
            return Measured(of_round, of_layers, of_clients, inside)
        grouped = in_layers(seen.layers, masks)
        densities = {layer: _density(masks[name] for name in names) for layer, names in grouped.items()}
        of_clients["masks.density"] = _density(masks.values())
        of_round["masks.density"] = of_clients["masks.density"].mean()
        of_layers["masks.density"] = {layer: own.mean() for layer, own in densities.items()}
        pairs = {
            layer: between_clients(masks[name][: self.clients] for name in names) for layer, names in grouped.items()
        }
        whole = _total(pairs.values())
        for quantity in ("jaccard", "hamming"):
            of_layers[f"masks.{quantity}"] = {
                layer: mean_of_pairs(getattr(found, quantity)) for layer, found in pairs.items()
            }
            of_round[f"masks.{quantity}"] = mean_of_pairs(getattr(whole, quantity))
        if due_every(self.details_every, seen.round, seen.rounds):
            matrix = for_all_participants(whole.jaccard, len(seen.participants))
            inside = {"masks.density": densities, "masks.jaccard": {WHOLE_MODEL: matrix}}
        for quantity in ("steady", "moved"):
            found = memory.group(quantity)
            if WHOLE_MODEL in found:
                of_round[f"masks.{quantity}"] = found.pop(WHOLE_MODEL)
                of_layers[f"masks.{quantity}"] = dict(found)
        return Measured(of_round, of_layers, of_clients, inside)


def sent_parts(layers: LayerMap, uploads: Message, before: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    """Tell which part of each layer's parameters each client sent, ``[K]``, and how many there are.

    Parameters whose size is not known, because they neither were sent nor are the server's, are not counted.
    """
    parts = {}
    for layer in layers.all:
        sizes = {name: before[name].numel() for name in layer.parameters if name in before}
        sizes |= {name: uploads.tensors[name][0].numel() for name in layer.parameters if name in uploads.tensors}
        counts = [_sent(uploads, name) for name in sizes if name in uploads.tensors]
        if sum(sizes.values()) and uploads.tensors:
            clients = next(iter(uploads.tensors.values()))
            none = torch.zeros(len(clients), dtype=torch.float64, device=clients.device)
            total = sum(sizes.values())
            parts[layer.name] = (sum(counts, start=none) / total, total)
    return parts


def _sent(uploads: Message, name: str) -> Tensor:
    """Count what each client sent of a tensor: ``[K]``."""
    tensor = uploads.tensors[name]
    if name not in uploads.masks:
        whole = tensor[0].numel()
        return torch.full((len(tensor),), whole, dtype=torch.float64, device=tensor.device)
    return per_client(uploads.masks[name].expand_as(tensor)).sum(1).to(torch.float64)


def _density(masks: Iterable[Tensor]) -> Tensor:
    """Tell which part of some tensors each client's mask keeps: ``[K]``."""
    rows = [per_client(mask) for mask in masks]
    kept = torch.stack([row.sum(1) for row in rows]).sum(0).to(torch.float64)
    return kept / sum(row.shape[1] for row in rows)


def _total(counts: Iterable[Counts]) -> Counts:
    first, *others = counts
    return sum(others, start=first)
