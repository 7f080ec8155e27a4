"""Models divided into a body and a head: the last layer with weights, or the last few, each with its norm."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods.contract.declarations import Decision, Matter, Touches
from fedstrata.methods.contract.part import Part
from fedstrata.methods.contract.views import Outline
from fedstrata.spec import parameter


@dataclass(frozen=True)
class BodyAndHead(Part):
    """A model divided into body and head, of which the body travels."""

    touches: ClassVar[Touches] = Touches(
        decides=(Decision.HEAD,), relies_on=(Matter.SHARING,), takes_away=(Matter.SHARED_HEAD,)
    )

    head_layers: int = parameter(1, "How many of the last layers with weights form the head.", low=1)

    def notes(self, outline: Outline) -> Iterable[str]:
        """Refuse a head that leaves no body."""
        weighted = len(outline.layers.weighted)
        if self.head_layers >= weighted:
            raise FedStrataError(
                f"'{self.name}' was given head_layers={self.head_layers}, but the model has {weighted} "
                "layers with weights, and at least one must form the body; give a smaller number or another model."
            )
        return ()

    def head(self, layers: LayerMap) -> frozenset[str]:
        """Name all tensors of the head."""
        last = layers.weighted[-self.head_layers :]
        return frozenset(
            name for block in layers.blocks() if block[0] in last for layer in block for name in layer.names
        )

    def body(self, layers: LayerMap) -> list[str]:
        """Name the parameters of the body."""
        head = self.head(layers)
        return [name for name in layers.parameter_names if name not in head]
