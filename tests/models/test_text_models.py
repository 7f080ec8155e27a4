"""The models of texts: their sizes, their layers, what they compute, and that all clients can be run as one batch."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.nn.functional import normalize

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.models import build_model, models
from fedstrata.models.transformer import TextTransformer
from fedstrata.testing import check_model

SMALL = {"textcnn": "textcnn(words=20, width=6, channels=4)", "transformer": "transformer(words=20, width=6, hidden=8)"}
TOKENS = torch.tensor([[3, 7, 19, 4, 4, 0, 0], [5, 1, 2, 8, 9, 6, 11]])


@pytest.mark.parametrize(
    ("text", "length", "classes", "size"),
    [
        # 300 per word; 3, 4 and 5 words of 300 numbers for each of 100 channels, with biases; 300 for each class
        ("textcnn", 128, 4, 20_000 * 300 + 100 * 12 * 300 + 300 + 300 * 4 + 4),
        ("textcnn(words=50, width=8, channels=2, kernels=3)", 9, 2, 50 * 8 + 2 * 3 * 8 + 2 + 2 * 2 + 2),
        ("transformer(words=30522)", 119, 2, 30_522 * 768 + 119 * 768 + 7_084_034),
        ("transformer(words=28996)", 512, 2, 28_996 * 768 + 512 * 768 + 7_084_034),
    ],
)
def test_number_of_parameters(text: str, length: int, classes: int, size: int) -> None:
    with torch.device("meta"):
        model = models.make(text).build((length,), classes)
    assert sum(parameter.numel() for parameter in model.parameters()) == size


@pytest.mark.parametrize("name", SMALL)
def test_both_engines_train_them_alike_and_stacked(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_model(SMALL[name], (7,), 3, tokens=20)


def test_layers_and_their_roles() -> None:
    textcnn, transformer = (
        LayerMap.read(build_model(text, (7,), 3, 0, TOKENS), (7,), TOKENS) for text in SMALL.values()
    )
    assert [(layer.name, layer.kind, layer.role) for layer in textcnn.all] == [
        ("embedding", "embedding", "first"),
        *((f"windows.convolutions.{place}", "conv", "middle") for place in range(3)),
        ("head", "linear", "last"),
    ]
    assert [(layer.name, layer.kind, layer.role) for layer in transformer.all] == [
        ("stem.tokens", "embedding", "first"),
        ("stem.positions", "embedding", "middle"),
        *((f"block.attention.{part}", "linear", "middle") for part in ("query", "key", "value")),
        ("block.projection", "linear", "middle"),
        ("block.hidden.linear", "linear", "middle"),
        ("block.output", "linear", "middle"),
        ("head", "linear", "last"),
    ]


def test_textcnn_by_hand() -> None:
    """One number per word, one channel that adds two neighbours: the largest sum of neighbours is what is left."""
    model = build_model("textcnn(words=20, width=1, channels=1, kernels=2)", (7,), 2, 0, TOKENS).eval()
    state = model.state_dict()
    assert not state["embedding.weight"][0].any()
    assert float(state["embedding.weight"].abs().max()) <= 0.25
    state["embedding.weight"].copy_(torch.arange(20.0)[:, None])
    state["windows.convolutions.0.weight"].fill_(1)
    state["windows.convolutions.0.bias"].fill_(-1)
    state["head.weight"].copy_(torch.tensor([[1.0], [-2.0]]))
    state["head.bias"].zero_()
    assert model(TOKENS).tolist() == [[25, -50], [17 - 1, -32]]  # 7 + 19 - 1, 6 + 11 - 1


def test_padding_of_textcnn_learns_nothing_and_stays_zero() -> None:
    model = build_model(SMALL["textcnn"], (7,), 2, 0, TOKENS)
    model.get_parameter("windows.convolutions.0.bias").data.fill_(1)  # so that padding alone wakes channels up
    tokens = torch.cat([TOKENS, torch.zeros(1, 7, dtype=TOKENS.dtype)])
    model(tokens)[:, 0].sum().backward()
    words = model.get_parameter("embedding.weight")
    assert words.grad is not None
    assert words.grad[TOKENS[0, 0]].any()
    assert not words.grad[0].any()


def test_the_transformer_against_a_slow_computation() -> None:
    model = build_model(SMALL["transformer"], (7,), 3, 0, TOKENS).double().eval()
    state = model.state_dict()
    scores = []
    for text in TOKENS:
        words = state["stem.tokens.weight"][text] + state["stem.positions.weight"]
        there = [place for place, token in enumerate(text.tolist()) if token != 0]
        query, keys, values = (state[f"block.attention.{part}.weight"] for part in ("query", "key", "value"))
        weights = torch.tensor([float(query @ words[0] @ (keys @ words[place])) / 6**0.5 for place in there])
        shares = torch.softmax(weights.double(), 0)
        mixed = sum(share * (values @ words[place]) for share, place in zip(shares, there, strict=True))
        first = words[0] + state["block.projection.weight"] @ mixed + state["block.projection.bias"]
        hidden = (state["block.hidden.linear.weight"] @ first + state["block.hidden.linear.bias"]).relu()
        first = first + state["block.output.weight"] @ hidden + state["block.output.bias"]
        scores.append(state["head.weight"] @ first + state["head.bias"])
    torch.testing.assert_close(model(TOKENS), torch.stack(scores), rtol=1e-5, atol=1e-6)
    assert bool(model(torch.zeros_like(TOKENS)).isfinite().all())  # a text without a token


def test_how_the_transformer_begins(tmp_path: Path) -> None:
    model = build_model(SMALL["transformer"], (7,), 3, 0, TOKENS)
    state = model.state_dict()
    assert not state["stem.tokens.weight"][0].any()
    for rows in (state["stem.tokens.weight"][1:], state["stem.positions.weight"]):
        torch.testing.assert_close(rows.norm(dim=1), torch.ones(len(rows)))
    assert all(not tensor.any() for name, tensor in state.items() if name.endswith("bias"))
    rows = torch.randn(20, 6)
    file = tmp_path / "bert.safetensors"
    name = "bert.embeddings.word_embeddings.weight"
    safetensors.torch.save_file({name: rows, "bert.other": torch.ones(2)}, file)
    given = build_model(f"transformer(words=20, width=6, hidden=8, embeddings='{file}')", (7,), 3, 0, TOKENS)
    assert isinstance(given, TextTransformer)
    torch.testing.assert_close(given.stem.tokens.weight[1:], normalize(rows[1:], dim=1))
    assert not given.stem.tokens.weight[0].any()
    with pytest.raises(FedStrataError, match=r"have the shape \[20, 6\], those of the model \[21, 6\]"):
        build_model(f"transformer(words=21, width=6, embeddings='{file}')", (7,), 3, 0, TOKENS)
    safetensors.torch.save_file({"a": rows, "b": torch.ones(2)}, file)
    with pytest.raises(FedStrataError, match=r"holds 2 tensors, and none ends in word_embeddings\.weight"):
        build_model(f"transformer(words=20, width=6, embeddings='{file}')", (7,), 3, 0, TOKENS)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(FedStrataError, match=r"largest number of a token is 19: the model needs at least words=20"):
        build_model("textcnn(words=19)", (7,), 3, 0, TOKENS)
    with pytest.raises(FedStrataError, match=r"texts of at least 5 tokens, but the inputs have the shape \(4,\)"):
        build_model("textcnn", (4,), 3, 0, TOKENS[:, :4])
    for name in SMALL:
        with pytest.raises(FedStrataError, match="use a dataset of texts"):
            build_model(name, (1, 8, 8), 3, 0)
    for kernels in ("3-x", "", "0", "-3"):
        with pytest.raises(FedStrataError, match="kernels"):
            models.make(f"textcnn(kernels='{kernels}')")
