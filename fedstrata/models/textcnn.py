"""Convolutions over the words of a text.

"Convolutional Neural Networks for Sentence Classification" (Kim, EMNLP 2014), in the sizes of "A Sensitivity Analysis
of (and Practitioners' Guide to) Convolutional Neural Networks for Sentence Classification" (Zhang and Wallace, 2015).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedstrata.errors import FedStrataError
from fedstrata.models.base import ModelSpec, models
from fedstrata.models.blocks import chain
from fedstrata.spec import parameter

WORDS = 20_000
"""As many as the vocabulary of a dataset of texts has that is built."""
_LARGEST_DRAW = 0.25


class Windows(nn.Module):
    """For each kernel size: a convolution along the words, ReLU, and the largest value of each channel."""

    def __init__(self, width: int, channels: int, kernels: tuple[int, ...]) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv1d(width, channels, size) for size in kernels)
        self.relu = nn.ReLU()

    def forward(self, words: Tensor) -> Tensor:
        """Turn ``[n, length, width]`` into ``[n, channels of all kernel sizes]``."""
        along = words.transpose(1, 2)
        return torch.cat([self.relu(convolution(along)).amax(-1) for convolution in self.convolutions], dim=1)


@models.register("textcnn")
@dataclass(frozen=True)
class TextCnnSpec(ModelSpec):
    """TextCNN: an embedding of the words, convolutions of several sizes side by side, their largest values, a head.

    "A Sensitivity Analysis of (and Practitioners' Guide to) Convolutional Neural Networks for Sentence Classification"
    (Zhang and Wallace, 2015), which FedLWS (Shi et al., ICLR 2025) names for its texts, without sizes and without code.
    The embedding is drawn from U(-0.25, 0.25), as there for words without a pretrained one; padding is zeros, and stays
    so. Convolutions and head have PyTorch's default initialisation.

    Defaults:
        width, channels, kernels, dropout: Zhang and Wallace, baseline configuration.
        words: ours.
    """

    words: int = parameter(WORDS, "How many tokens there are: at least as many as in the data's vocabulary.", low=2)
    width: int = parameter(300, "The numbers per word.", low=1)
    channels: int = parameter(100, "The channels of each convolution.", low=1)
    kernels: str | int = parameter("3-4-5", "How many words each convolution sees at a time, joined by '-'.", low=1)
    dropout: float = parameter(0.5, "Dropout before the head.", low=0, below=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        sizes = str(self.kernels).split("-")
        if not all(size.isdecimal() and int(size) > 0 for size in sizes):
            raise FedStrataError(
                f"'{self.kernels}' does not fit the parameter 'kernels' of the model 'textcnn': it takes sizes of at "
                "least 1 joined by '-', such as 3-4-5."
            )

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for texts of this length."""
        kernels = tuple(map(int, str(self.kernels).split("-")))
        text_length(self.name, input_shape, shortest=max(kernels))
        embedding = nn.Embedding(self.words, self.width, padding_idx=0)
        nn.init.uniform_(embedding.weight, -_LARGEST_DRAW, _LARGEST_DRAW)
        with torch.no_grad():
            embedding.weight[0] = 0
        return chain(
            embedding=embedding,
            windows=Windows(self.width, self.channels, kernels),
            dropout=nn.Dropout(self.dropout),
            head=nn.Linear(self.channels * len(kernels), classes),
        )


def text_length(model: str, input_shape: tuple[int, ...], shortest: int) -> int:
    """Return the number of tokens of a text; refuse what is no text, or has fewer than ``shortest``."""
    if len(input_shape) != 1 or input_shape[0] < shortest:
        raise FedStrataError(
            f"The model '{model}' takes texts of at least {shortest} tokens, but the inputs have the shape "
            f"{input_shape}; use a dataset of texts, such as 'ag_news', or another length of them."
        )
    return input_shape[0]
