"""The transformer of one block that PLayer-FL trains on texts.

"PLayer-FL: A Principled Approach to Personalized Layer-wise Cross-Silo Federated Learning" (Elhussein and Gürsoy,
2025).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedstrata import files
from fedstrata.errors import FedStrataError
from fedstrata.models.base import ModelSpec, models
from fedstrata.models.blocks import chain
from fedstrata.models.textcnn import WORDS, text_length
from fedstrata.models.vit import ClassToken
from fedstrata.spec import parameter

_PADDING = 0


class WordsAtPlaces(nn.Module):
    """Adds to the embedding of each token that of its place; their rows begin with the length 1."""

    def __init__(self, words: int, length: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(words, width)
        self.positions = nn.Embedding(length, width)
        with torch.no_grad():
            for table in (self.tokens, self.positions):
                table.weight.copy_(F.normalize(table.weight, dim=1))
            self.tokens.weight[_PADDING] = 0

    def forward(self, tokens: Tensor) -> Tensor:
        """Turn the numbers of tokens ``[n, length]`` into ``[n, length, width]``."""
        embedded: Tensor = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        return embedded


class MaskedAttention(nn.Module):
    r"""One head: :math:`\mathrm{softmax}(Q K^\top / \sqrt{d}) V`, where nothing is taken from padding."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, words: Tensor, padded: Tensor) -> Tensor:
        """Mix ``[n, length, width]`` where ``padded [n, length]`` is not."""
        weights = self.query(words) @ self.key(words).transpose(-2, -1) * words.shape[-1] ** -0.5
        mixed: Tensor = weights.masked_fill(padded.unsqueeze(-2), -torch.inf).softmax(-1) @ self.value(words)
        return mixed


class OneBlock(nn.Module):
    """Attention and then a perceptron, each of which adds to what is there; no norms."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.attention = MaskedAttention(width)
        self.projection = nn.Linear(width, width)
        self.hidden = chain(linear=nn.Linear(width, hidden), relu=nn.ReLU())
        self.output = nn.Linear(hidden, width)

    def forward(self, words: Tensor, padded: Tensor) -> Tensor:
        """Change ``[n, length, width]``."""
        words = words + self.projection(self.attention(words, padded))
        changed: Tensor = words + self.output(self.hidden(words))
        return changed


class TextTransformer(nn.Module):
    """Embedding, one block, and a head on what stands in the first place."""

    def __init__(self, words: int, length: int, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.stem = WordsAtPlaces(words, length, width)
        self.block = OneBlock(width, hidden)
        self.token = ClassToken()
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        """Turn the numbers of tokens ``[n, length]`` into scores ``[n, classes]``."""
        padded = tokens == _PADDING
        # The first place is never padding in a text that begins with a token of its own, and an empty one has a score.
        padded = torch.cat((torch.zeros_like(padded[:, :1]), padded[:, 1:]), dim=1)
        scores: Tensor = self.head(self.token(self.block(self.stem(tokens), padded)))
        return scores


@models.register("transformer")
@dataclass(frozen=True)
class TransformerSpec(ModelSpec):
    """A transformer of one block for texts, without norms, with a head on the first token.

    "PLayer-FL: A Principled Approach to Personalized Layer-wise Cross-Silo Federated Learning" (Elhussein and Gürsoy,
    2025): tokens and places are embedded, one head of attention without biases and its projection, then a perceptron of
    3072 add to them; 7,084,034 parameters beside the embeddings, for two classes. Linear layers are drawn from the
    Kaiming normal distribution, with biases of zero; embeddings are scaled to the length 1. There, tokens begin with
    the embeddings of BERT (``embeddings``), and only the tokens that occur have rows.

    Defaults:
        width, hidden: gaiters-aerials/player_fl, code/models.py.
        words: ours.
    """

    words: int = parameter(WORDS, "How many tokens there are: at least as many as in the data's vocabulary.", low=2)
    width: int = parameter(768, "The numbers per token.", low=1)
    hidden: int = parameter(3072, "The hidden layer of the perceptron.", low=1)
    embeddings: str | None = parameter(
        None,
        "A safetensors file with a row for each token, such as BERT's model.safetensors, in the order of its "
        "vocabulary; none: drawn at random.",
        local=True,
    )

    def build(self, input_shape: tuple[int, ...], classes: int) -> nn.Module:
        """Build the network for texts of this length."""
        length = text_length(self.name, input_shape, shortest=1)
        model = TextTransformer(self.words, length, self.width, self.hidden, classes)
        for module in model.modules():
            if isinstance(module, nn.Linear):
                nn.init.kaiming_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        if self.embeddings is not None:
            _embed(model.stem.tokens, Path(self.embeddings).expanduser())
        return model


def _embed(table: nn.Embedding, path: Path) -> None:
    """Begin with rows from a file, scaled to the length 1; padding stays zeros."""
    found = files.from_safetensors(files.read_bytes(path), path)
    names = [name for name in found if name.endswith("word_embeddings.weight")] or list(found)
    if len(names) != 1:
        raise FedStrataError(
            f"'{path}' holds {len(names)} tensors, and none ends in word_embeddings.weight; give a file with one."
        )
    rows = found[names[0]]
    if rows.shape != table.weight.shape:
        raise FedStrataError(
            f"The embeddings in '{path}' have the shape {list(rows.shape)}, those of the model "
            f"{list(table.weight.shape)}; set its 'words' and 'width' to these."
        )
    with torch.no_grad():
        table.weight.copy_(F.normalize(rows.to(table.weight), dim=1))
        table.weight[_PADDING] = 0
