"""How far clients drift apart in a round: their updates against the mean, and against each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.diagnostics.contract import WHOLE_MODEL, Diagnostic, Measured, Need, Quantity, Seen, diagnostics
from fedstrata.diagnostics.updates import details_due, no_updates, sent_parameters, shares_of, update_pieces
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.composition import Method
from fedstrata.spec import parameter
from fedstrata.stack import Stack, per_client


@dataclass(frozen=True)
class Disagreement:
    r"""Sums over the entries of K clients' updates :math:`u_k` and of their weighted mean :math:`m = \sum_k p_k u_k`.

    They add up over pieces and layers. Cosines with an update of zero are not defined, and NaN.
    """

    squares: Tensor
    r""":math:`\lVert u_k \rVert^2`, ``[K]``."""
    along: Tensor
    r""":math:`\langle u_k, m \rangle`, ``[K]``."""
    apart: Tensor
    r""":math:`\lVert u_k - m \rVert^2`, ``[K]``."""
    mean_square: Tensor
    r""":math:`\lVert m \rVert^2`."""
    products: Tensor
    r""":math:`\langle u_j, u_k \rangle` of the first clients, ``[C, C]``."""

    def __add__(self, other: Disagreement) -> Disagreement:
        """Count the entries of both."""
        return Disagreement(
            self.squares + other.squares,
            self.along + other.along,
            self.apart + other.apart,
            self.mean_square + other.mean_square,
            self.products + other.products,
        )

    @property
    def norms(self) -> Tensor:
        """The length of each client's update: ``[K]``."""
        return self.squares.sqrt()

    @property
    def distances(self) -> Tensor:
        """The distance of each client's update from the mean: ``[K]``."""
        return self.apart.sqrt()

    @property
    def cosines(self) -> Tensor:
        """The cosine of each client's update with the mean: ``[K]``."""
        return _cosine(self.along, self.squares * self.mean_square)

    @property
    def similarity(self) -> Tensor:
        """The cosine between the updates of each two of the first clients: ``[C, C]``."""
        squares = self.products.diagonal()
        cosines = _cosine(self.products, squares[:, None] * squares)
        itself = torch.eye(len(squares), dtype=torch.bool, device=squares.device)
        return cosines.masked_fill(itself & (squares > 0), 1)


def disagreement(updates: Iterable[Tensor], shares: Tensor, compared: int | None = None) -> Disagreement:
    r"""Compare K clients' updates with their weighted mean, and with each other.

    ``updates`` are tensors ``[K, ...]``, the tensors of a layer or pieces of them, and ``shares`` the clients' weights
    :math:`p_k`, with the sum 1. Only the first ``compared`` clients are compared with each other. Sums are in float64.
    The cost is that of reading the updates a few times, and of one matrix product ``[C, n] [n, C]``.

    >>> found = disagreement([torch.tensor([[3.0, 4.0], [3.0, -4.0]])], torch.tensor([0.5, 0.5]))
    >>> found.norms.tolist(), found.distances.tolist(), found.cosines.tolist()
    ([5.0, 5.0], [4.0, 4.0], [0.6, 0.6])
    >>> found.similarity
    tensor([[ 1.0000, -0.2800],
            [-0.2800,  1.0000]], dtype=torch.float64)
    """
    weights = shares.to(torch.float64)
    of_each = weights.new_zeros(len(weights))
    first = len(weights) if compared is None else min(compared, len(weights))
    total = Disagreement(of_each, of_each, of_each, weights.new_zeros(()), weights.new_zeros(first, first))
    for update in updates:
        rows = per_client(update.detach()).to(torch.float64)
        mean = weights @ rows
        total += Disagreement(
            rows.square().sum(1), rows @ mean, (rows - mean).square().sum(1), mean @ mean, rows[:first] @ rows[:first].T
        )
    return total


def disagreement_of_uploads(seen: Seen, compared: int) -> tuple[Disagreement, dict[str, Disagreement]]:
    """Compare what clients uploaded in a round: of the whole model, and of each layer of which something was sent."""
    shares = shares_of(seen)
    found = {
        layer: disagreement(
            (piece for name in names for piece in update_pieces(seen.uploads, seen.before, name)), shares, compared
        )
        for layer, names in sent_parameters(seen.layers, seen.uploads, seen.before).items()
    }
    return sum(found.values(), start=disagreement([], shares, compared)), found


def _cosine(product: Tensor, squares: Tensor) -> Tensor:
    """Divide a product by two lengths, given the product of their squares; rounding does not lead out of [-1, 1]."""
    return torch.where(squares > 0, product / squares.sqrt(), torch.nan).clamp(-1, 1)


def mean_of_pairs(matrix: Tensor) -> Tensor:
    """Average a matrix ``[C, C]`` over pairs of different clients, where it is defined; NaN without such a pair."""
    pairs = ~torch.eye(len(matrix), dtype=torch.bool, device=matrix.device)
    return matrix[pairs].nanmean()


def for_all_participants(matrix: Tensor, clients: int) -> Tensor:
    """Extend a matrix of the first clients to all K, with NaN where nothing was measured."""
    whole = matrix.new_full((clients, clients), torch.nan)
    whole[: len(matrix), : len(matrix)] = matrix
    return whole


@diagnostics.register("drift")
@dataclass(frozen=True)
class Drift(Diagnostic):
    r"""Compare each client's update with the clients' weighted mean, and the clients with each other.

    Client k's update :math:`u_k` of a layer is what it uploaded minus the server's model before the round, over the
    layer's parameters; an entry that it did not send counts as unchanged. The mean :math:`m = \sum_k p_k u_k` weighs
    clients by their samples, as FedAvg does, whatever the method itself does with the uploads. Measured are
    :math:`\lVert u_k \rVert`, :math:`\lVert u_k - m \rVert` and the cosines between :math:`u_k` and m, and between
    clients. Of layers that are not sent, and of methods that send bits instead of weights (``fedpm``), there is nothing
    to measure. Where clients train models of their own (``fedcac``, ``fedala``), an update tells how far such a model
    is from the server's, not what one round of training did.

    The matrix of cosines holds the first ``clients`` participants, with all layers together; ``by_layer`` adds one for
    each layer. Means over pairs are of the same clients. Numbers of single clients in single layers, and matrices, are
    stored in the first round, the last, and every ``details_every`` rounds, by default in all rounds as long as a run
    has no more than about a million of them; means are stored in every round.

    Costs a few passes over the uploads in double precision, in pieces of 8 MiB, and a product ``[K, n] [n, K]``: 1 to
    2 % of a round of 20 clients on digits with the CNN.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.UPLOADS})
    quantities: ClassVar[Mapping[str, Quantity]] = {
        "drift.norm": Quantity(
            "Size of client updates",
            "How far a client's training moved the layer in a round, in the mean over clients: high where training is "
            "busy, near zero where nothing is learned.",
            low=0,
            logarithmic=True,
        ),
        "drift.distance": Quantity(
            "Distance of client updates from their mean",
            "How far a client's update is from the weighted mean of all, in the mean over clients: high where clients "
            "pull apart, zero where all do the same.",
            low=0,
            logarithmic=True,
        ),
        "drift.cosine": Quantity(
            "Cosine of client updates to their mean",
            "Whether a client's update points where the weighted mean of all points, in the mean over clients: 1 is "
            "agreement, 0 means that averaging cancels most of what the client did, below 0 it works against it.",
            low=-1,
            high=1,
            centre=0,
        ),
        "drift.similarity": Quantity(
            "Cosine between the updates of two clients",
            "Whether two clients move the layer in the same direction, in the mean over pairs: 1 is the same "
            "direction, 0 unrelated ones, -1 opposite ones.",
            low=-1,
            high=1,
            centre=0,
            pairs=True,
        ),
    }

    clients: int = parameter(200, "How many participants, the first ones, are compared with each other.", low=2)
    details_every: int | None = parameter(
        None,
        "The number of rounds from one in which numbers of single clients are stored to the next; none: as often as "
        "keeps a run at about a million of them.",
        low=1,
    )
    by_layer: bool = parameter(False, "Store a matrix of cosines for each layer, too.")

    def unfit(self, method: Method, layers: LayerMap) -> str | None:
        """Say that there are no updates."""
        return no_updates(method)

    def compute(self, seen: Seen, memory: Stack) -> Measured:
        """Measure from the uploads of one round."""
        whole, found = disagreement_of_uploads(seen, self.clients)
        if not found:
            return Measured()
        count = len(seen.participants)
        in_layers = {layer: _of_clients(one) for layer, one in found.items()}
        of_clients = _of_clients(whole)
        by_quantity = {name: {layer: own[name] for layer, own in in_layers.items()} for name in of_clients}
        compared = {WHOLE_MODEL: whole} | (found if self.by_layer else {})
        rows = len(by_quantity) * len(found) * count + len(compared) * whole.products.numel()
        details: dict[str, dict[str, Tensor]] = {}
        if details_due(self.details_every, rows, seen.round, seen.rounds):
            matrices = {layer: for_all_participants(one.similarity, count) for layer, one in compared.items()}
            details = {**by_quantity, "drift.similarity": matrices}
        return Measured(
            of_round={name: values.nanmean() for name, values in of_clients.items()}
            | {"drift.similarity": mean_of_pairs(whole.similarity)},
            layers={
                name: {layer: values.nanmean() for layer, values in own.items()} for name, own in by_quantity.items()
            }
            | {"drift.similarity": {layer: mean_of_pairs(one.similarity) for layer, one in found.items()}},
            clients=of_clients,
            clients_in_layers=details,
        )


def _of_clients(found: Disagreement) -> dict[str, Tensor]:
    """Name the numbers that each client has, ``[K]``."""
    return {"drift.norm": found.norms, "drift.distance": found.distances, "drift.cosine": found.cosines}
