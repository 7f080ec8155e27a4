"""How much clients' data says about the weights of each layer: the mean of the diagonal Fisher information."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from fedstrata.diagnostics.contract import Diagnostic, Measured, Need, Quantity, Seen, diagnostics
from fedstrata.diagnostics.where_to_federate import ROUNDS_BETWEEN, first_last_or_every, other_weights
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.composition import Method
from fedstrata.spec import parameter
from fedstrata.stack import Stack, per_client


@diagnostics.register("fisher")
@dataclass(frozen=True)
class Fisher(Diagnostic):
    r"""The diagonal Fisher information of each layer, in the mean over its parameters.

    :math:`\frac{1}{n} \sum_p E[(\partial \log p(y \mid x) / \partial \theta_p)^2]` over the n parameters of a layer,
    norm layers and biases too, in every participant's model as local training left it and in evaluation mode. ``kind``
    says whose labels are meant: those of the data (``sample``: the empirical Fisher information), or labels drawn from
    the model's own predictions (``sampled-label``).

    Cost: one forward and one backward pass of ``batches`` batches in each client, sample by sample, and memory for as
    many gradients as fit into 1 GiB.
    """

    needs: ClassVar[frozenset[Need]] = frozenset({Need.MODELS, Need.DATA})
    afterwards: ClassVar[bool] = True
    quantities: ClassVar[Mapping[str, Quantity]] = {
        "fisher.mean": Quantity(
            "Fisher information per parameter",
            "How much a client's data says about the parameters of a layer: high where its predictions hang on them, "
            "near 0 where they could as well be otherwise.",
            low=0,
            logarithmic=True,
        ),
    }

    kind: str = parameter("sample", "Whose labels are meant.", choices=("sample", "sampled-label"))
    batch_size: int = parameter(32, "Samples in each batch.", low=1)
    batches: int = parameter(1, "Batches of each client.", low=1)
    every: int = parameter(0, ROUNDS_BETWEEN, low=0)

    def unfit(self, method: Method, layers: LayerMap) -> str | None:
        """Refuse methods that compute the weights of the model from others."""
        return other_weights(method)

    def due(self, round: int, rounds: int) -> bool:
        """Measure in the first round and in the last, and if asked in between."""
        return first_last_or_every(round, rounds, self.every)

    def compute(self, seen: Seen, memory: Stack) -> Measured:
        """Take the mean over each layer's parameters."""
        assert seen.probe is not None
        layers = {layer.name: layer.parameters for layer in seen.layers.layers if layer.parameters}
        names = [name for parameters in layers.values() for name in parameters]
        found = seen.probe.fisher(seen.trained, names, self.batch_size, self.batches, self.kind)
        by_client = {
            layer: torch.cat([per_client(found[name]) for name in parameters], 1).to(torch.float64).mean(1)
            for layer, parameters in layers.items()
        }
        return Measured(
            layers={"fisher.mean": {layer: values.mean() for layer, values in by_client.items()}},
            clients_in_layers={"fisher.mean": by_client},
        )
