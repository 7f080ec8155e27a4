"""The layer map on small models, with the expected layers written out by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional

from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap


def summary(layers: LayerMap) -> list[tuple[str, str, str]]:
    return [(layer.name, layer.kind, layer.role) for layer in layers.layers]


def blocks(layers: LayerMap) -> list[list[str]]:
    return [[layer.name for layer in block] for block in layers.blocks()]


class Residual(nn.Module):
    """Registered in another order than called, with a projection shortcut that no name gives away."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.side = nn.Sequential(nn.Conv2d(2, 4, 1), nn.BatchNorm2d(4))
        self.b = nn.BatchNorm2d(4)
        self.a = nn.Conv2d(2, 4, 3, padding=1, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        main, side = self.a(images), self.side[0](images)
        hidden = functional.relu(self.b(main)) + self.side[1](side)
        scores: Tensor = self.out(hidden.mean((-2, -1)))
        return scores


def test_order_is_that_of_the_forward_pass_and_norms_go_by_type() -> None:
    layers = LayerMap.read(Residual(), (2, 4, 4))
    assert summary(layers) == [
        ("a", "conv", "first"),
        ("side.0", "conv", "middle"),
        ("b", "norm", "norm"),
        ("side.1", "norm", "norm"),
        ("out", "linear", "last"),
    ]
    assert layers.norm_names == {
        f"{name}.{tensor}"
        for name in ("b", "side.1")
        for tensor in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    }
    assert layers.head_names == {"out.weight", "out.bias"}
    assert layers.head is layers.layer("out")


def test_each_norm_stands_with_the_layer_whose_output_it_normalises() -> None:
    assert blocks(LayerMap.read(Residual(), (2, 4, 4))) == [["a", "b"], ["side.0", "side.1"], ["out"]]


def test_what_a_layer_owns() -> None:
    layers = LayerMap.read(Residual(), (2, 4, 4))
    first, norm = layers.layer("a"), layers.layer("b")
    assert (first.parameters, first.buffers, first.weight, first.bias) == (("a.weight",), (), "a.weight", None)
    assert (first.size, first.module_type, first.follows) == (2 * 4 * 9, "Conv2d", None)
    assert norm.parameters == ("b.weight", "b.bias")
    assert norm.buffers == ("b.running_mean", "b.running_var", "b.num_batches_tracked")
    assert norm.names == norm.parameters + norm.buffers
    assert (norm.weight, norm.bias, norm.size, norm.follows) == ("b.weight", "b.bias", 8, "a")
    assert layers.of("side.1.running_var").name == "side.1"
    assert layers.of("out.bias").name == "out"


def test_names_by_kind_and_role() -> None:
    layers = LayerMap.read(Residual(), (2, 4, 4))
    assert layers.names(kind="conv") == {"a.weight", "side.0.weight", "side.0.bias"}
    assert layers.names(kind="conv", role="middle") == {"side.0.weight", "side.0.bias"}
    assert layers.names(role="norm") == layers.norm_names
    assert layers.names() == {*layers.parameter_names, *layers.buffer_names}
    assert layers.parameter_names[:3] == ("a.weight", "side.0.weight", "side.0.bias")
    assert [layer.name for layer in layers.weighted] == ["a", "side.0", "out"]


def test_names_that_do_not_exist_are_refused_with_the_nearest() -> None:
    layers = LayerMap.read(Residual(), (2, 4, 4))
    with pytest.raises(FedStrataError, match=r"no layer 'side\.2'\. Did you mean 'side\.[01]'"):
        layers.layer("side.2")
    with pytest.raises(FedStrataError, match=r"no parameter or buffer 'out\.weigth'\. Did you mean 'out\.weight'"):
        layers.of("out.weigth")
    with pytest.raises(FedStrataError, match=r"no layer kind 'norms'\. Did you mean 'norm'"):
        layers.names(kind="norms")  # type: ignore[arg-type]
    with pytest.raises(FedStrataError, match=r"no layer role 'firts'\. Did you mean 'first'"):
        layers.names(role="firts")  # type: ignore[arg-type]


def test_the_table_reads_well() -> None:
    model = nn.Sequential(nn.Conv1d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten(), nn.Linear(4, 3))
    layers = LayerMap.read(model, (1, 4))
    assert layers.table()[1] == {
        "layer": "1",
        "type": "GroupNorm",
        "kind": "norm",
        "role": "norm",
        "parameters": 4,
        "tensors": "weight, bias",
    }
    assert str(layers).splitlines() == [
        "layer  type       kind    role   parameters  tensors",
        "0      Conv1d     conv    first  8           weight, bias",
        "1      GroupNorm  norm    norm   4           weight, bias",
        "3      Linear     linear  last   15          weight, bias",
    ]


@pytest.mark.parametrize(
    ("norm", "shape"),
    [
        (nn.BatchNorm1d(4), (4,)),
        (nn.BatchNorm2d(4), (4, 3, 3)),
        (nn.BatchNorm3d(4), (4, 2, 2, 2)),
        (nn.SyncBatchNorm(4), (4, 3, 3)),
        (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), (4, 5)),
        (nn.InstanceNorm2d(4, affine=True), (4, 3, 3)),
        (nn.GroupNorm(2, 4), (4, 3, 3)),
        (nn.LayerNorm(4), (4,)),
        (nn.RMSNorm(4), (4,)),
    ],
)
def test_every_norm_of_torch_is_a_norm(norm: nn.Module, shape: tuple[int, ...]) -> None:
    layers = LayerMap.read(nn.Sequential(norm), shape)
    assert summary(layers) == [("0", "norm", "norm")]
    assert layers.norm_names == {f"0.{name}" for name in norm.state_dict()}


def test_a_norm_behind_activation_and_pooling_still_belongs_to_its_convolution() -> None:
    for activation in (nn.ReLU(), nn.ReLU(inplace=True), nn.Sequential(nn.MaxPool2d(2), nn.Dropout())):
        model = nn.Sequential(nn.Conv2d(1, 4, 3), activation, nn.BatchNorm2d(4), nn.Conv2d(4, 2, 1))
        assert blocks(LayerMap.read(model, (1, 6, 6))) == [["0", "2"], ["3"]]


class Sums(nn.Module):
    """Norms on sums with the model's own input and with a hidden state; the input is changed in place before."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        inputs.sub_(0.5)
        hidden = self.norms[0](self.linears[0](inputs) + inputs)
        hidden = self.norms[1](self.linears[1](hidden) + hidden)
        last: Tensor = self.norms[2](2 * self.linears[2](hidden))
        return last


def test_a_norm_on_a_sum_belongs_to_no_single_layer() -> None:
    assert blocks(LayerMap.read(Sums(), (4,))) == [
        ["linears.0"],
        ["norms.0"],
        ["linears.1"],
        ["norms.1"],
        ["linears.2", "norms.2"],
    ]


def test_frozen_layers_are_grouped_like_others() -> None:
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)).requires_grad_(False)
    assert blocks(LayerMap.read(model, (1, 6, 6))) == [["0", "1"]]


class Transformer(nn.Module):
    """A class token and positions held by the model itself, pre-norm attention, and layers that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(1, 1, 8))
        self.positions = nn.Parameter(torch.zeros(1, 5, 8))
        self.forgotten = nn.ModuleList([nn.Linear(2, 2), nn.BatchNorm1d(2)])
        self.patches = nn.Conv2d(3, 8, 2, 2)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        scores: Tensor = self.head(self.encoder(tokens)[:, 0])
        return scores


def test_attention_owns_its_parts_and_loose_parameters_are_extras() -> None:
    layers = LayerMap.read(Transformer(), (3, 4, 4))
    assert summary(layers) == [
        ("(model)", "other", "extra"),
        ("patches", "conv", "first"),
        ("encoder.norm1", "norm", "norm"),
        ("encoder.self_attn", "attention", "middle"),
        ("encoder.norm2", "norm", "norm"),
        ("encoder.linear1", "linear", "middle"),
        ("encoder.linear2", "linear", "middle"),
        ("head", "linear", "last"),
    ]
    assert layers.layer("(model)").parameters == ("token", "positions")
    assert layers.layer("encoder.self_attn").parameters == (
        "encoder.self_attn.in_proj_weight",
        "encoder.self_attn.in_proj_bias",
        "encoder.self_attn.out_proj.weight",
        "encoder.self_attn.out_proj.bias",
    )
    # Behind a residual sum a norm sees more than one layer's output, so it stands alone.
    assert all(len(block) == 1 for block in layers.blocks())


def test_the_weights_of_a_layer_are_all_its_matrices_and_no_biases() -> None:
    layers = LayerMap.read(Transformer(), (3, 4, 4))
    assert {layer.name: layer.weights for layer in layers.all} == {
        "(model)": ("token", "positions"),
        "patches": ("patches.weight",),
        "encoder.norm1": (),
        "encoder.self_attn": ("encoder.self_attn.in_proj_weight", "encoder.self_attn.out_proj.weight"),
        "encoder.norm2": (),
        "encoder.linear1": ("encoder.linear1.weight",),
        "encoder.linear2": ("encoder.linear2.weight",),
        "head": ("head.weight",),
        "forgotten.0": ("forgotten.0.weight",),
        "forgotten.1": (),
    }


class Asking(nn.Module):
    """Attention whose keys and values have another width, with biases that are rows, behind a norm over two axes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm((3, 4))
        self.attention = nn.MultiheadAttention(4, 2, kdim=3, vdim=2, add_bias_kv=True, batch_first=True)

    def forward(self, inputs: Tensor) -> Tensor:
        answers, _ = self.attention(self.norm(inputs), inputs[..., :3], inputs[..., :2])
        return answers[:, 0]


def test_separate_projections_are_weights_and_the_rows_that_attention_adds_are_biases() -> None:
    norm, attention = LayerMap.read(Asking(), (3, 4)).layers
    assert norm.weights == ()
    assert "attention.bias_k" in attention.parameters
    projections = ("q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight")
    assert attention.weights == tuple(f"attention.{name}" for name in projections)


def test_layers_that_the_forward_pass_never_meets_are_listed() -> None:
    layers = LayerMap.read(Transformer(), (3, 4, 4))
    assert [(layer.name, layer.kind, layer.role) for layer in layers.unused] == [
        ("forgotten.0", "linear", "unused"),
        ("forgotten.1", "norm", "norm"),
    ]
    assert layers.of("forgotten.0.weight") is layers.unused[0]
    assert "forgotten.1.running_mean" in layers.norm_names
    assert sorted(layers.parameter_names) == sorted(name for name, _ in Transformer().named_parameters())


class Language(nn.Module):
    """Tokens, a recurrent layer, and an output tied to the embedding; the tied weight is registered late."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(6, 9)
        self.embedding = nn.Embedding(9, 6)
        self.decoder.weight = self.embedding.weight
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.slope = nn.PReLU()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, _ = self.recurrent(self.embedding(tokens))
        scores: Tensor = self.decoder(self.slope(hidden[:, -1]))
        return scores


def test_tokens_recurrence_and_tied_weights() -> None:
    layers = LayerMap.read(Language(), (4,), sample=torch.zeros(2, 4, dtype=torch.int64))
    assert summary(layers) == [
        ("embedding", "embedding", "first"),
        ("recurrent", "other", "middle"),
        ("slope", "other", "extra"),
        ("decoder", "linear", "last"),
    ]
    embedding, decoder = layers.layer("embedding"), layers.layer("decoder")
    # named_parameters() knows the shared tensor by the name that was registered first.
    assert (embedding.parameters, embedding.weight, embedding.tied) == (("decoder.weight",), "decoder.weight", ())
    assert (decoder.parameters, decoder.weight, decoder.bias) == (("decoder.bias",), None, "decoder.bias")
    assert decoder.tied == ("decoder.weight",)
    assert (embedding.weights, decoder.weights) == (("decoder.weight",), ())
    assert layers.layer("recurrent").weights == ("recurrent.weight_ih_l0", "recurrent.weight_hh_l0")
    assert layers.layer("recurrent").parameters == tuple(
        f"recurrent.{name}_l0" for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
    )
    assert layers.head_names == {"decoder.bias"}


def test_a_shared_module_is_one_layer() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.ReLU(), nn.LayerNorm(4), shared, nn.Linear(4, 2))
    layers = LayerMap.read(model, (4,))
    assert [layer.name for layer in layers.layers] == ["0", "2", "4"]
    assert blocks(layers) == [["0", "2"], ["4"]]


class Scaled(nn.Module):
    """A user's own layer with a part inside that holds no parameters."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.eye(4))
        self.register_buffer("offset", torch.ones(4))
        self.activation = nn.ReLU()

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = self.activation(inputs @ self.matrix + self.offset)
        return hidden


def test_own_layers_count_as_layers_with_weights() -> None:
    layers = LayerMap.read(nn.Sequential(Scaled(), nn.LayerNorm(4), nn.Linear(4, 2)), (4,))
    assert summary(layers) == [("0", "other", "first"), ("1", "norm", "norm"), ("2", "linear", "last")]
    assert layers.layer("0").names == ("0.matrix", "0.offset")
    assert layers.layer("0").weight is None
    assert layers.layer("0").weights == ("0.matrix",)
    assert blocks(layers) == [["0", "1"], ["2"]]


def test_a_model_that_is_one_layer() -> None:
    layers = LayerMap.read(nn.Linear(4, 2), (4,))
    assert summary(layers) == [("(model)", "linear", "last")]
    assert layers.head_names == {"weight", "bias"}


class Functional(nn.Module):
    """Uses the weights of a layer without calling it, after asking another for its device and shape."""

    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(4, 2)
        self.second = nn.Linear(4, 4)
        self.first = nn.Linear(4, 4)
        self.prompts = nn.ParameterList([torch.ones(1, 4)])

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.to(self.third.weight.device)[:, : self.third.weight.shape[1]])
        hidden = functional.linear(hidden + self.prompts[0], self.second.weight, bias=self.second.bias)
        return functional.linear(hidden, self.third.weight, self.third.bias)


def test_weights_used_without_a_call_are_placed_by_their_first_use() -> None:
    layers = LayerMap.read(Functional(), (4,))
    assert summary(layers) == [
        ("first", "linear", "first"),
        ("prompts", "other", "extra"),
        ("second", "linear", "middle"),
        ("third", "linear", "last"),
    ]
    assert not layers.unused


def test_a_reparametrised_layer_owns_its_parts() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2))
    layer = LayerMap.read(model, (4,)).layers[0]
    assert (layer.kind, layer.role, layer.weight, layer.bias) == ("linear", "first", None, "0.bias")
    assert layer.parameters == ("0.bias", *(f"0.parametrizations.weight.original{part}" for part in (0, 1)))


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_module_that_cannot_be_watched_is_named() -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(4, 4)), nn.Linear(4, 2))
    with pytest.raises(
        FedStrataError, match="The module '0' of the model 'Sequential' is used where it cannot be seen"
    ):
        LayerMap.read(model, (4,))


def test_a_model_that_cannot_take_the_input_is_named() -> None:
    with pytest.raises(FedStrataError, match=r"'Residual' cannot take inputs of shape \(3, 4, 4\)"):
        LayerMap.read(Residual(), (3, 4, 4))


class Careless(nn.Module):
    """Counts its calls in a buffer and in an attribute, and draws random numbers, in evaluation too."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4).eval()
        self.head = nn.Linear(4, 2)
        self.head.bias.requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))
        self.count = 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        self.count += 1
        scores: Tensor = self.head(self.norm(inputs + torch.rand(4)))
        return scores


def test_reading_leaves_no_trace() -> None:
    model = Careless()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.get_rng_state()
    LayerMap.read(model, (4,))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert [module.training for module in model.modules()] == [True, False, True]
    assert [parameter.requires_grad for parameter in model.parameters()] == [True, True, True, False]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.count == 0
    assert torch.equal(torch.get_rng_state(), generator)


PIECES = st.lists(
    st.sampled_from(["linear", "layer norm", "batch norm", "relu", "prelu", "own"]), min_size=1, max_size=7
)


@settings(max_examples=40, deadline=None)
@given(kinds=PIECES, again=st.lists(st.integers(0, 6), max_size=4))
def test_every_tensor_belongs_to_one_layer_and_every_layer_to_one_block(kinds: list[str], again: list[int]) -> None:
    """Random chains in which some modules are called a second time, registered in reverse order."""
    make = {
        "linear": lambda: nn.Linear(4, 4),
        "layer norm": lambda: nn.LayerNorm(4),
        "batch norm": lambda: nn.BatchNorm1d(4),
        "relu": nn.ReLU,
        "prelu": nn.PReLU,
        "own": Scaled,
    }
    pieces = [make[kind]() for kind in kinds]

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for position in reversed(range(len(pieces))):
                self.add_module(f"piece{position}", pieces[position])

        def forward(self, inputs: Tensor) -> Tensor:
            for piece in (*pieces_of(self), *(pieces_of(self)[position % len(kinds)] for position in again)):
                inputs = piece(inputs)
            return inputs

    def pieces_of(model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule(f"piece{position}") for position in range(len(kinds))]

    model = Chain()
    layers = LayerMap.read(model, (4,))
    assert sorted(layers.parameter_names) == sorted(name for name, _ in model.named_parameters())
    assert sorted(layers.buffer_names) == sorted(name for name, _ in model.named_buffers())
    assert [layer.name for layer in layers.layers] == [
        f"piece{position}" for position, kind in enumerate(kinds) if kind != "relu"
    ]
    assert sorted(name for block in blocks(layers) for name in block) == sorted(layer.name for layer in layers.all)
    assert layers.norm_names == {
        f"piece{position}.{name}"
        for position, kind in enumerate(kinds)
        if kind.endswith("norm")
        for name in pieces[position].state_dict()
    }
