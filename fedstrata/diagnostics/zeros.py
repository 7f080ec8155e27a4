"""Where weights were put to zero before local training, and how many of them came back in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedstrata.diagnostics.contract import Diagnostic, Measured, Need, Quantity, Seen, diagnostics
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.compatibility import defines
from fedstrata.methods.contract.composition import Method
from fedstrata.stack import Stack, per_client


@dataclass(frozen=True)
class Zeroed:
    """Sums over the entries of some tensors, for each of K clients, in float64: what was put to zero, what of that came
    back, its squares before and after, and how many entries there are.
    """

    fell: Tensor
    came_back: Tensor
    before: Tensor
    after: Tensor
    entries: int

    def __add__(self, more: Zeroed) -> Zeroed:
        """Count the entries of both."""
        return Zeroed(
            self.fell + more.fell,
            self.came_back + more.came_back,
            self.before + more.before,
            self.after + more.after,
            self.entries + more.entries,
        )


def zeroed(received: Tensor, started: Tensor, trained: Tensor) -> Zeroed:
    """Compare K clients' weights as they came, as training began and as it ended, each ``[K, ...]``.

    >>> received, started, trained = torch.tensor([[[3.0, 4.0, 5.0]], [[0.0, 0.0, 5.0]], [[2.0, 0.0, 6.0]]])
    >>> found = zeroed(received, started, trained)
    >>> found.fell.tolist(), found.came_back.tolist(), found.before.tolist(), found.after.tolist(), found.entries
    ([2.0], [1.0], [25.0], [4.0], 3)
    """
    came, began, ended = (per_client(tensor.detach()) for tensor in (received, started, trained))
    fell = (came != 0) & (began == 0)

    def total(rows: Tensor) -> Tensor:
        return rows.sum(1, dtype=torch.float64)

    return Zeroed(
        total(fell),
        total(fell & (ended != 0)),
        total(came.square() * fell),
        total(torch.where(fell, ended, 0).square()),
        came.shape[1],
    )


@diagnostics.register("zeros")
@dataclass(frozen=True)
class Zeros(Diagnostic):
    """Tell which part of each layer was put to zero before local training, and what of it came back.

    That is transient sparsity as LIPS has it (``lips``, ``transient``): weights are zeroed once, after aggregation, and
    training is dense, so that they grow back. A weight fell if it came to the client with a value and training began
    with zero; it came back if it is not zero when training ends. With masks that hold in training nothing comes back,
    and a weight that the server has masked already does not fall again. Weights that restart from their initial values
    (``refill=init`` or ``own-init``) are not zeroed, and not counted.

    Costs a few passes over the clients' models: 1 % of a round of 20 clients on digits with the CNN.

    Citation: "When Aggregation Stops Collaborating: Layer-wise Inertia in Low-Data Federated Learning" (LIPS), Eq. 5.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.MODELS})
    quantities: ClassVar[Mapping[str, Quantity]] = {
        "zeros.fell": Quantity(
            "Weights put to zero before training",
            "Which part of the layer's weights a client put to zero before it trained, in the mean over clients: 0 in "
            "rounds and layers that are left alone.",
            low=0,
            high=1,
        ),
        "zeros.returned": Quantity(
            "Zeroed weights that came back",
            "Of the weights that were put to zero before training, the part that is not zero after it: 1 where all "
            "have grown again, 0 where a mask holds them.",
            low=0,
            high=1,
        ),
        "zeros.regrown": Quantity(
            "Size of what came back",
            "How large the zeroed weights are after training, compared with before they were zeroed: 1 is as large as "
            "before, 0 is nothing.",
            low=0,
        ),
    }

    def unfit(self, method: Method, layers: LayerMap) -> str | None:
        """Say that clients train from what they received."""
        if any(defines(part, "start") for part in method.parts):
            return None
        return f"with '{method}' clients train what they received, and put no weights to zero before"

    def compute(self, seen: Seen, memory: Stack) -> Measured:
        """Measure from the models of one round."""
        found = {
            layer.name: _total(zeroed(seen.received[name], seen.started[name], seen.trained[name]) for name in own)
            for layer in seen.layers.layers
            if (own := [name for name in layer.weights if name in seen.started])
        }
        if not found:
            return Measured()
        whole = _told(_total(found.values()))
        told = {layer: _told(own) for layer, own in found.items()}
        return Measured(
            of_round={quantity: values.nanmean() for quantity, values in whole.items()},
            layers={quantity: {layer: own[quantity].nanmean() for layer, own in told.items()} for quantity in whole},
            clients=whole,
        )


def _told(found: Zeroed) -> dict[str, Tensor]:
    """Name what each client has, ``[K]``; what came back is not defined where nothing fell."""
    none = found.fell == 0
    return {
        "zeros.fell": found.fell / max(1, found.entries),
        "zeros.returned": (found.came_back / found.fell).masked_fill(none, torch.nan),
        "zeros.regrown": (found.after / found.before).sqrt().masked_fill(none, torch.nan),
    }


def _total(found: Iterable[Zeroed]) -> Zeroed:
    first, *others = found
    return sum(others, start=first)
