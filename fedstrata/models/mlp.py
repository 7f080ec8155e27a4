"""The multilayer perceptron."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

from torch import nn

from fedstrata.errors import FedStrataError
from fedstrata.models.base import ModelSpec, models
from fedstrata.models.blocks import chain
from fedstrata.spec import parameter


@models.register("mlp")
@dataclass(frozen=True)
class MlpSpec(ModelSpec):
    """A multilayer perceptron: linear layers with ReLU between them, on the flattened input.

    With the default sizes and 3x32x32 images it is the 3072-200-200-10 network of "FedLWS: Federated Learning with
    Adaptive Layer-wise Weight Shrinking" (Shi et al., ICLR 2025). PyTorch's default initialisation.
    """

    hidden: str | int | None = parameter(
        "200-200", "The sizes of the hidden layers, joined by '-'; none for a linear model.", low=1
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not all(size.isdecimal() and int(size) > 0 for size in self._hidden_sizes()):
            raise FedStrataError(
                f"'{self.hidden}' does not fit the parameter 'hidden' of the model 'mlp': "
                "it takes sizes of at least 1 joined by '-', such as 200-200, or none."
            )

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for inputs of this shape."""
        sizes = (math.prod(input_shape), *map(int, self._hidden_sizes()))
        hidden = (chain(linear=nn.Linear(*pair), relu=nn.ReLU()) for pair in itertools.pairwise(sizes))
        return chain(stem=nn.Flatten(), stages=nn.Sequential(*hidden), head=nn.Linear(sizes[-1], classes))

    def _hidden_sizes(self) -> list[str]:
        return [] if self.hidden is None else str(self.hidden).split("-")
