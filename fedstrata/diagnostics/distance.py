"""Whether clients whose data differ also send different updates (FedLWS, Fig. 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedstrata.diagnostics.contract import WHOLE_MODEL, Diagnostic, Measured, Need, Quantity, Seen, diagnostics
from fedstrata.diagnostics.drift import disagreement_of_uploads, for_all_participants
from fedstrata.diagnostics.updates import due_every, no_updates
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.composition import Method
from fedstrata.spec import parameter
from fedstrata.stack import Stack

_CORRELATION = (
    "Whether clients whose data differ send updates that differ: 1 where the distances of data and of updates rise "
    "together, 0 where one says nothing about the other."
)


def label_distances(label_counts: Tensor) -> Tensor:
    r"""Measure the distance between every two clients' label histograms ``[K, classes]``: ``[K, K]`` in float64.

    It is the cost of the optimal transport of one into the other where every change of a label costs 1, which has a
    closed form, the total variation :math:`\frac{1}{2} \sum_c |p_c - q_c|`: 0 for the same mixture of classes, 1 for
    clients without a common class. Of a client without samples it is NaN.

    >>> label_distances(torch.tensor([[4, 0], [1, 3], [0, 9]])).tolist()
    [[0.0, 0.75, 1.0], [0.75, 0.0, 0.25], [1.0, 0.25, 0.0]]
    """
    counts = label_counts.to(torch.float64)
    shares = counts / counts.sum(1, keepdim=True)
    return torch.stack([(shares - own).abs().sum(1) / 2 for own in shares])


def transport_cost(masses: np.ndarray, others: np.ndarray, costs: np.ndarray) -> float:
    r"""Solve the optimal transport between two histograms exactly: :math:`\min_{P \ge 0} \sum_{ij} P_{ij} C_{ij}` with
    the row sums ``masses`` ``[a]`` and the column sums ``others`` ``[b]``, both divided by their totals.

    It is a linear program with ``a * b`` unknowns: meant for histograms of some hundred bins at most.

    >>> float(transport_cost(np.array([1, 1]), np.array([2, 0]), np.array([[0.0, 3.0], [4.0, 0.0]])))
    2.0
    """
    from scipy.optimize import linprog  # as long to import as all else here

    held, wanted = masses > 0, others > 0
    one, other = masses[held] / masses.sum(), others[wanted] / others.sum()
    rows = np.kron(np.eye(len(one)), np.ones((1, len(other))))
    columns = np.kron(np.ones((1, len(one))), np.eye(len(other)))
    # The last column's sum follows from the others: asked for too, it could contradict them by rounding.
    sums, wanted_sums = np.vstack([rows, columns])[:-1], np.concatenate([one, other])[:-1]
    solved = linprog(costs[np.ix_(held, wanted)].ravel(), A_eq=sums, b_eq=wanted_sums, method="highs")
    return float("nan") if solved.fun is None else max(0.0, float(solved.fun))


def feature_distances(label_counts: Tensor, features: Tensor) -> Tensor:
    r"""Measure the distance between every two clients' data by the mean features of their classes: ``[K, K]``.

    A client is a distribution over points, the means :math:`\mu_{kc}` of its classes (``features`` ``[K, classes,
    d]``) with its label frequencies as masses. Returned is the optimal transport's cost between two of them with
    :math:`\lVert \mu_{kc} - \mu_{k'c'} \rVert` for moving all of class c to class :math:`c'` (Wasserstein-1), each
    pair's solved exactly (:func:`transport_cost`). Of a client without samples, or with features that are not finite,
    it is NaN.

    >>> counts = torch.tensor([[1, 1], [0, 5]])
    >>> feature_distances(counts, torch.tensor([[[0.0], [2.0]], [[9.0], [3.0]]])).tolist()
    [[0.0, 2.0], [2.0, 0.0]]
    """
    masses = label_counts.to(torch.float64).cpu().numpy()
    points = features.detach().to(torch.float64).cpu()
    clients = len(masses)
    distances = np.full((clients, clients), np.nan)
    usable = [client for client in range(clients) if masses[client].any() and points[client].isfinite().all()]
    for place, client in enumerate(usable):
        distances[client, client] = 0
        for other in usable[place + 1 :]:
            costs = torch.cdist(points[client], points[other], compute_mode="donot_use_mm_for_euclid_dist").numpy()
            distances[client, other] = distances[other, client] = transport_cost(masses[client], masses[other], costs)
    return torch.from_numpy(distances)


def correlation(one: Tensor, other: Tensor) -> Tensor:
    """Compute Pearson's correlation of two symmetric matrices ``[K, K]`` over all pairs of different clients.

    It is NaN for fewer than three pairs for which both are defined, and where one of them is the same for all pairs.

    >>> distances = torch.tensor([[0.0, 1.0, 2.0], [1.0, 0.0, 3.0], [2.0, 3.0, 0.0]])
    >>> float(correlation(distances, 5 - distances))
    -1.0
    """
    first, second = torch.triu_indices(len(one), len(one), offset=1)
    left, right = one[first, second].to(torch.float64).cpu(), other[first, second].to(torch.float64).cpu()
    defined = left.isfinite() & right.isfinite()
    left, right = (values[defined] - values[defined].mean() for values in (left, right))
    spread = (left.square().sum() * right.square().sum()).sqrt()
    if len(left) < 3 or not spread > 1e-12:
        return torch.tensor(torch.nan, dtype=torch.float64)
    return ((left * right).sum() / spread).clamp(-1, 1)


@dataclass(frozen=True)
class _Against(Diagnostic):
    """The distances of updates, against those of data."""

    clients: int = parameter(50, "How many participants, the first ones, are compared with each other.", low=3)
    every: int = parameter(10, "The number of rounds from one comparison to the next.", low=1)

    def unfit(self, method: Method, layers: LayerMap) -> str | None:
        """Say that there are no updates."""
        return no_updates(method)

    def due(self, round: int, rounds: int) -> bool:
        """Compare in the first round, the last, and every so many."""
        return due_every(self.every, round, rounds)

    def _updates(self, seen: Seen) -> dict[str, Tensor]:
        """Measure the cosine distance between clients' updates: of each layer, and of the whole model."""
        whole, found = disagreement_of_uploads(seen, self.clients)
        return {layer: 1 - one.similarity for layer, one in {WHOLE_MODEL: whole, **found}.items()}

    def _measured(self, seen: Seen, data: Tensor, apart: Mapping[str, Tensor], **stored: Tensor) -> Measured:
        """Compare the data's distances with those of the updates, and keep some matrices."""
        told = {layer: correlation(data, matrix) for layer, matrix in apart.items()}
        return Measured(
            of_round={f"{self.name}.correlation": told.pop(WHOLE_MODEL)},
            layers={f"{self.name}.correlation": told},
            clients_in_layers={
                f"{self.name}.{quantity}": {WHOLE_MODEL: for_all_participants(matrix, len(seen.participants))}
                for quantity, matrix in stored.items()
            },
        )


@diagnostics.register("distance")
@dataclass(frozen=True)
class Distance(_Against):
    r"""Compare how far clients' label histograms are apart with how far their updates are.

    The distance of labels is that of :func:`label_distances`, from what clients declared; the distance of updates
    :math:`1 - \cos(u_j, u_k)`, over the whole model, as in ``drift``. Their correlation over all pairs of clients is a
    number of the round, and of each layer with the updates of that layer alone.

    FedLWS shows the two matrices beside each other for twelve clients of CIFAR-10 and says that they look alike. It
    computes the data's distance "via optimal transport" and leaves open over what: this one is over labels, with the
    same cost for every two classes, and ``transport`` is over features. The correlation is not in the paper.

    Costs what ``drift`` costs, in the rounds in which it is computed.

    Citation: Shi et al., "FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking", ICLR 2025, Fig. 5 and
    Appendix B.3.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.UPLOADS})
    quantities: ClassVar[Mapping[str, Quantity]] = {
        "distance.labels": Quantity(
            "Distance between clients' labels",
            "How far the class mixtures of two clients are apart: 0 is the same mixture, 1 no common class.",
            low=0,
            high=1,
            pairs=True,
        ),
        "distance.updates": Quantity(
            "Cosine distance between clients' updates",
            "How differently two clients move the model: 0 is the same direction, 1 unrelated ones, 2 opposite ones.",
            low=0,
            high=2,
            pairs=True,
        ),
        "distance.correlation": Quantity(
            "Correlation of label and update distances", _CORRELATION, low=-1, high=1, centre=0
        ),
    }

    def compute(self, seen: Seen, memory: Stack) -> Measured:
        """Measure from the uploads of one round and the declared labels."""
        labels = label_distances(seen.label_counts[: self.clients])
        updates = self._updates(seen)
        return self._measured(seen, labels, updates, labels=labels, updates=updates[WHOLE_MODEL])


@diagnostics.register("transport")
@dataclass(frozen=True)
class Transport(_Against):
    r"""Compare how far clients' data are apart in the model's own features with how far their updates are.

    The distance of data is that of :func:`feature_distances`: optimal transport between the clients' class means of
    the features before the head, in each client's model as it came, over all training samples. Clients that keep
    layers below the head to themselves have feature spaces of their own, which need not be comparable.

    Geometric dataset distances (Alvarez-Melis and Fusi, NeurIPS 2020), which FedLWS cites, move single samples; here
    each class of a client is one point, so that every transport is solved exactly.

    Costs one pass over all training samples, and for every two of the first ``clients`` a linear program of 2 ms, in
    the rounds in which it is computed: half a second for 20 clients and 10 classes, two and a half for 50.

    Citation: Shi et al., "FedLWS: Federated Learning with Adaptive Layer-wise Weight Shrinking", ICLR 2025, Fig. 5 and
    Appendix B.3.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.UPLOADS, Need.MODELS, Need.DATA})
    quantities: ClassVar[Mapping[str, Quantity]] = {
        "transport.features": Quantity(
            "Distance between clients' data",
            "How far the classes of one client must be moved in feature space to become those of another: 0 is the "
            "same data, as the model sees it.",
            low=0,
            pairs=True,
        ),
        "transport.correlation": Quantity(
            "Correlation of feature and update distances", _CORRELATION, low=-1, high=1, centre=0
        ),
    }

    def unfit(self, method: Method, layers: LayerMap) -> str | None:
        """Say that there are no updates, or no features."""
        no_head = "the model does not end in a linear layer, whose inputs would be the features"
        return super().unfit(method, layers) or (no_head if layers.head is None else None)

    def compute(self, seen: Seen, memory: Stack) -> Measured:
        """Measure from the uploads and the samples of one round's participants."""
        assert seen.probe is not None
        features = seen.probe.features(seen.received)
        data = feature_distances(seen.label_counts[: self.clients], features[: self.clients])
        return self._measured(seen, data, self._updates(seen), features=data)
