from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from stacks import CLIENTS, assert_same, buffers_of, keys_of, parameters_of, run_pass
from torch import nn

from fedstrata.engines import forward as forward_module
from fedstrata.engines.forward import KeyedRandomness, LoopForward, StackedForward
from fedstrata.engines.operations import stacked_operations
from fedstrata.errors import FedStrataError

ON_GPU = stacked_operations(torch.device("cuda"))
"""What replaces torch's functions on a GPU; the replacements themselves run anywhere."""


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU())
        self.shortcut = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4))

    def forward(self, x):
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


class Attention(nn.Module):
    def __init__(self, dropout, **options):
        super().__init__()
        self.options = options
        self.attention = nn.MultiheadAttention(8, 2, dropout=dropout, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, **self.options)[0]


class ScaledDotProduct(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.project = nn.Linear(8, 16)
        self.options = options

    def forward(self, x):
        query = self.project(x).unflatten(-1, (4, 4)).transpose(1, 2)
        few = query[:, :2]
        keys = few if self.options.get("enable_gqa") else query
        dropout = 0.3 if self.training else 0.0
        return F.scaled_dot_product_attention(query, keys, keys, dropout_p=dropout, **self.options).flatten(1)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.second(torch.tanh(self.first(x))) * self.scale


class RunningMean(nn.Module):
    """A module that does not change its buffers in place, but replaces them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("calls", torch.tensor(0))

    def forward(self, x):
        x = self.linear(x)
        if self.training:
            self.mean = 0.5 * self.mean + 0.5 * x.mean(0)
            self.calls = self.calls + 1
        return x - self.mean


def convolution(*layers):
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *layers)


IMAGES = {
    "plain": convolution(nn.ReLU(), nn.Flatten(), nn.Linear(256, 3)),
    "strided": nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1), nn.Conv2d(4, 3, (3, 2), padding=(2, 1))),
    "grouped": nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Conv2d(4, 4, 3, groups=4, bias=False)),
    "dilated": nn.Conv2d(2, 3, 3, dilation=2),
    "same": nn.Conv2d(2, 3, 3, padding="same", padding_mode="circular"),
    "transposed": nn.ConvTranspose2d(2, 3, 2, stride=2),
    "residual": convolution(Residual(), Residual()),
    "batch norm": convolution(nn.BatchNorm2d(4)),
    "batch norm, no weights": convolution(nn.BatchNorm2d(4, affine=False)),
    "batch norm, no statistics": convolution(nn.BatchNorm2d(4, track_running_stats=False)),
    "group norm": convolution(nn.GroupNorm(2, 4)),
    "layer norm": convolution(nn.LayerNorm((4, 8, 8))),
    "instance norm": convolution(nn.InstanceNorm2d(4)),
    "instance norm with statistics": convolution(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
    "local response norm": convolution(nn.LocalResponseNorm(2)),
    "dropout": convolution(nn.Dropout(0.3), nn.Conv2d(4, 2, 3)),
    "dropout of channels": convolution(nn.Dropout2d(0.5), nn.Conv2d(4, 2, 3)),
    "dropout in place": convolution(nn.Dropout(0.3, inplace=True), nn.Dropout2d(0.3, inplace=True)),
    "max pool": convolution(nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1)),
    "max pool, rounded up": convolution(nn.MaxPool2d(3, ceil_mode=True)),
    "mean pool": convolution(nn.AvgPool2d(2), nn.AvgPool2d(2, count_include_pad=False, padding=1)),
    "adaptive mean pool": convolution(nn.AdaptiveAvgPool2d(3), nn.AdaptiveAvgPool2d(1)),
    "adaptive max pool": convolution(nn.AdaptiveMaxPool2d(2)),
    "power pool": convolution(nn.LPPool2d(2, 2)),
    "upsampled": convolution(nn.Upsample(scale_factor=2, mode="bilinear"), nn.ReflectionPad2d(1)),
}
VECTORS = {
    "linear": nn.Linear(6, 4),
    "linear without bias": nn.Linear(6, 4, bias=False),
    "batch norm": nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3)),
    "layer norm": nn.Sequential(nn.Linear(6, 4), nn.LayerNorm(4), nn.Linear(4, 3)),
    "tied": Tied(),
    "replaced buffers": RunningMean(),
    "weight norm": nn.utils.parametrizations.weight_norm(nn.Linear(6, 4)),
    "reshaped": nn.Sequential(nn.Linear(6, 6), nn.Unflatten(1, (2, 3)), nn.Flatten(), nn.Dropout(0.1)),
    "gated": nn.Sequential(nn.Linear(6, 4), nn.GLU(), nn.Linear(2, 3)),
    **{
        str(activation): nn.Sequential(nn.Linear(6, 4), activation, nn.Linear(4, 3))
        for activation in (
            nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(), nn.ELU(), nn.SELU(), nn.CELU(), nn.GELU(), nn.SiLU(), nn.Mish(),
            nn.Tanh(), nn.Sigmoid(), nn.Softplus(), nn.Softsign(), nn.Hardtanh(), nn.Hardswish(), nn.Hardsigmoid(),
            nn.PReLU(), nn.PReLU(4), nn.Softmax(1), nn.LogSoftmax(1), nn.Threshold(0.1, 0.0),
        )
    },
}  # fmt: skip
SEQUENCES = {
    "attention": Attention(0.0),
    "attention with dropout": Attention(0.3),
    "attention with dropout, weights unused": Attention(0.3, need_weights=False),
    "masked attention": Attention(
        0.3, need_weights=False, is_causal=True, attn_mask=nn.Transformer.generate_square_subsequent_mask(5).double()
    ),
    "scaled dot product": ScaledDotProduct(),
    "causal": ScaledDotProduct(is_causal=True),
    "scaled by hand": ScaledDotProduct(scale=0.7, attn_mask=torch.ones(5, 5, dtype=torch.bool).tril()),
    "shared keys": ScaledDotProduct(enable_gqa=True),
    "transformer": nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True),
    "transformer, norm first": nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.2, batch_first=True, norm_first=True, activation="gelu"
    ),
    "one-dimensional": nn.Sequential(nn.Conv1d(5, 4, 3), nn.BatchNorm1d(4), nn.MaxPool1d(2), nn.Dropout1d(0.5)),
}
TOKENS = {
    "embedding": nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(20, 3)),
    "embedding with padding": nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(20, 3)),
    "bag of embeddings": nn.Sequential(nn.EmbeddingBag(7, 4), nn.Linear(4, 3)),
}


def inputs_for(kind, samples=4):
    generator = torch.Generator().manual_seed(0)
    if kind == "tokens":
        return torch.randint(0, 7, (CLIENTS, samples, 5), generator=generator)
    shape = {"images": (2, 8, 8), "vectors": (6,), "sequences": (5, 8)}[kind]
    return torch.randn(CLIENTS, samples, *shape, generator=generator, dtype=torch.float64)


MODELS = [
    pytest.param(kind, model.double(), id=f"{kind}: {name}")
    for kind, models in (("images", IMAGES), ("vectors", VECTORS), ("sequences", SEQUENCES), ("tokens", TOKENS))
    for name, model in models.items()
]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(("kind", "model"), MODELS)
def test_all_engines_agree(kind, model, training):
    inputs = inputs_for(kind)
    loop = run_pass(LoopForward(model), model, inputs, training)
    assert_same(loop, run_pass(StackedForward(model), model, inputs, training))
    assert loop.gradients


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.usefixtures("way_out_of_vmap")
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(("kind", "model"), [model for model in MODELS if model.values[0] in ("images", "vectors")])
def test_the_operations_of_a_gpu_agree(kind, model, training):
    inputs = inputs_for(kind)
    loop = run_pass(LoopForward(model), model, inputs, training)
    assert_same(loop, run_pass(StackedForward(model, ON_GPU), model, inputs, training))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("engine", [LoopForward, StackedForward])
def test_attention_that_cannot_be_opened_runs_without_dropout_only(engine, monkeypatch):
    """As with a PyTorch in which :func:`fedstrata.private_torch.opened` finds no way."""
    inputs, without, dropping = inputs_for("sequences"), Attention(0.0).double(), Attention(0.3).double()
    expected = run_pass(engine(without), without, inputs)
    evaluated = run_pass(engine(dropping), dropping, inputs, training=False)
    monkeypatch.setattr(forward_module, "_MULTI_HEAD_ATTENTION", None)
    assert_same(expected, run_pass(engine(without), without, inputs))
    assert_same(evaluated, run_pass(engine(dropping), dropping, inputs, training=False))
    with pytest.raises(FedStrataError, match=r"dropout of nn.MultiheadAttention cannot be drawn.*use dropout=0"):
        run_pass(engine(dropping), dropping, inputs)


@pytest.mark.parametrize(
    ("kind", "model"), [parameter.values for parameter in MODELS if "dropout" not in parameter.id][::6]
)
def test_the_loop_is_a_plain_call_of_the_model(kind, model):
    """In evaluation mode nothing is drawn, so each client's model is what the user would call."""
    inputs, parameters, buffers = inputs_for(kind), parameters_of(model), buffers_of(model)
    outputs, _ = LoopForward(model)(parameters, buffers, inputs, keys_of(), training=False)
    for client in range(CLIENTS):
        state = {name: tensor[client] for name, tensor in (parameters | buffers).items()}
        model.load_state_dict(state, strict=False)
        with torch.no_grad():
            torch.testing.assert_close(outputs[client], model.eval()(inputs[client]), rtol=1e-12, atol=1e-12)


# Buffers -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("way_out_of_vmap")
def test_running_statistics_by_hand():
    model = nn.BatchNorm1d(1, momentum=0.5).double()
    inputs = torch.tensor([[[1.0], [3.0]], [[5.0], [5.0]]], dtype=torch.float64)
    for forward in (LoopForward(model), StackedForward(model), StackedForward(model, ON_GPU)):
        buffers = {
            "running_mean": torch.tensor([[0.0], [1.0]], dtype=torch.float64),
            "running_var": torch.ones(2, 1, dtype=torch.float64),
            "num_batches_tracked": torch.tensor([0, 7]),
        }
        given = {name: tensor.clone() for name, tensor in buffers.items()}
        parameters = {"weight": torch.ones(2, 1).double(), "bias": torch.zeros(2, 1).double()}
        _, after = forward(parameters, buffers, inputs, keys_of(2), training=True)
        # Means 2 and 5, unbiased variances 2 and 0, each halved with what was there.
        assert after["running_mean"].tolist() == [[1.0], [3.0]]
        assert after["running_var"].tolist() == [[1.5], [0.5]]
        assert after["num_batches_tracked"].tolist() == [1, 8]
        assert all(torch.equal(buffers[name], given[name]) for name in buffers), "the stacks given are not touched"
        _, after = forward(parameters, buffers, inputs, keys_of(2), training=False)
        assert all(torch.equal(after[name], given[name]) for name in buffers)


@pytest.mark.parametrize("engine", [LoopForward, StackedForward])
def test_buffers_that_are_replaced_are_returned_without_their_history(engine):
    model = RunningMean().double()
    result = run_pass(engine(model), model, inputs_for("vectors"))
    before = buffers_of(model)
    assert torch.equal(result.buffers["calls"], before["calls"] + 1)
    assert not torch.equal(result.buffers["mean"], before["mean"])
    assert not result.buffers["mean"].requires_grad


@pytest.mark.usefixtures("way_out_of_vmap")
@pytest.mark.parametrize("operations", [None, ON_GPU], ids=["cpu", "gpu"])
def test_buffers_in_any_memory_layout(operations):
    """Running statistics are written in place into a copy, which has to be laid out client by client."""
    model = nn.BatchNorm2d(2).double()
    inputs, parameters, buffers = inputs_for("images"), parameters_of(model), buffers_of(model)
    expected = StackedForward(model)(parameters, buffers, inputs, keys_of(), training=True)[1]
    turned = {name: tensor.movedim(0, -1).contiguous().movedim(-1, 0) for name, tensor in buffers.items()}
    after = StackedForward(model, operations)(parameters, turned, inputs, keys_of(), training=True)[1]
    for name in buffers:
        torch.testing.assert_close(after[name], expected[name])


@pytest.mark.parametrize("engine", [LoopForward, StackedForward])
def test_a_module_left_in_evaluation_mode_trains_like_the_rest(engine):
    """Else the first round would differ from those after an evaluation, which switches the whole model."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
    model[1].eval()
    result = run_pass(engine(model), model, inputs_for("vectors"))
    assert torch.equal(result.buffers["1.num_batches_tracked"], buffers_of(model)["1.num_batches_tracked"] + 1)


# Keyed randomness ----------------------------------------------------------------------------------------------------


ENGINES = pytest.mark.parametrize("engine", [LoopForward, StackedForward])


class TwoDropouts(nn.Module):
    """Returns what two dropout layers keep."""

    def __init__(self, first=0.5, second=0.5):
        super().__init__()
        self.first, self.second = nn.Dropout(first), nn.Dropout(second)

    def forward(self, x):
        ones = torch.ones_like(x)
        return torch.stack((self.first(ones), self.second(ones)), 1)


def kept(engine, keys, model=None, training=True):
    model = model or TwoDropouts()
    outputs, _ = engine(model)({}, {}, torch.zeros(len(keys), 10, 20), keys, training=training)
    return outputs


@ENGINES
def test_dropout_repeats_for_the_same_key_and_differs_otherwise(engine):
    torch.manual_seed(0)
    first = kept(engine, keys_of())
    torch.manual_seed(1)
    assert torch.equal(first, kept(engine, keys_of()))
    assert not torch.equal(first, kept(engine, keys_of(seed=1))), "another step"
    assert not torch.equal(first[0], first[1]), "another client"
    assert not torch.equal(first[:, :, 0], first[:, :, 1]), "another layer"
    assert torch.equal(first[1:], kept(engine, keys_of()[1:])), "whoever else trains"


@ENGINES
def test_dropout_leaves_the_global_stream_alone(engine):
    model = Attention(0.3).double()
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    kept(engine, keys_of())
    run_pass(engine(model), model, inputs_for("sequences"))
    assert torch.equal(torch.rand(3), expected)


@ENGINES
def test_dropout_keeps_the_expected_share_and_scales_it_up(engine):
    outputs = kept(engine, keys_of(), TwoDropouts(0.2, 0.75))
    assert sorted(set(outputs[:, :, 0].flatten().tolist())) == [0.0, 1.25]
    assert sorted(set(outputs[:, :, 1].flatten().tolist())) == [0.0, 4.0]
    # 600 draws each: four standard deviations are 0.065 and 0.071.
    assert abs(float((outputs[:, :, 0] > 0).double().mean()) - 0.8) < 0.066
    assert abs(float((outputs[:, :, 1] > 0).double().mean()) - 0.25) < 0.071


@ENGINES
def test_dropout_of_nothing_and_of_everything_and_in_evaluation(engine):
    outputs = kept(engine, keys_of(), TwoDropouts(0.0, 1.0))
    assert outputs[:, :, 0].eq(1).all()
    assert outputs[:, :, 1].eq(0).all()
    assert kept(engine, keys_of(), training=False).eq(1).all()


@pytest.mark.parametrize(
    ("function", "shape", "drawn"),
    [
        (F.dropout1d, (6, 5, 3), 2),
        (F.dropout1d, (40, 3), 1),
        (F.dropout2d, (6, 5, 3, 3), 2),
        (F.dropout2d, (6, 5, 3), 2),
        (F.dropout3d, (6, 5, 2, 2, 2), 2),
        (F.dropout3d, (40, 2, 2, 2), 1),
    ],
)
def test_dropout_of_channels_drops_whole_ones(function, shape, drawn):
    inputs = torch.ones(shape)
    with KeyedRandomness(torch.tensor([1, 2])):
        outputs = function(inputs, 0.5)
    channels = outputs.flatten(drawn)
    assert torch.equal(channels, channels[..., :1].expand_as(channels))
    assert set(channels[..., 0].flatten().tolist()) == {0.0, 2.0}
    assert inputs.eq(1).all()


def test_dropout_in_place_changes_its_input():
    inputs = torch.ones(50)
    with KeyedRandomness(torch.tensor([1, 2])):
        outputs = F.dropout(inputs, 0.5, inplace=True)
    assert outputs is inputs
    assert set(inputs.tolist()) == {0.0, 2.0}


class Drawing(nn.Module):
    """Draws in training, and where asked also in evaluation."""

    def __init__(self, draw, always=True):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.draw = draw
        self.always = always

    def forward(self, x):
        x = self.linear(x)
        return self.draw(x) if self.training or self.always else x


def bernoulli_mask(x):
    """What layers of stochastic depth do."""
    return x * x.new_empty(len(x), 1).bernoulli_(0.5)


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda x: x + torch.rand(4), "rand"),
        (lambda x: x + torch.randn_like(x), "randn_like"),
        (lambda x: x + torch.randint(0, 5, (4,)), "randint"),
        (lambda x: x[torch.randperm(4)], "randperm"),
        (lambda x: x * torch.bernoulli(torch.full((4,), 0.5)), "bernoulli"),
        (bernoulli_mask, "bernoulli_"),
        (lambda x: torch.normal(x, 1.0), "normal"),
        (lambda x: x + torch.empty(4).uniform_(), "uniform_"),
        (lambda x: torch.distributions.Normal(x, 1.0, validate_args=False).rsample(), "normal_"),
        (lambda x: F.gumbel_softmax(x), "gumbel_softmax"),
        (lambda x: F.alpha_dropout(x, 0.5, True), "alpha_dropout"),
        (lambda x: F.rrelu(x, training=True), "rrelu"),
        (lambda x: torch.dropout(x, 0.5, train=True), "dropout"),
        (lambda x: F.fractional_max_pool2d(x[None, None], 2, (2, 2)), "fractional_max_pool2d"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@ENGINES
def test_a_model_that_draws_from_the_global_stream_is_refused(engine, draw, name):
    model = Drawing(draw).double()
    with pytest.raises(FedStrataError, match=f"draws random numbers with '{name}', which cannot be repeated"):
        run_pass(engine(model), model, inputs_for("vectors"))


@pytest.mark.parametrize(
    "layer",
    [nn.RReLU(), nn.RReLU(0.1, 0.2), nn.AlphaDropout(0.3), nn.FeatureAlphaDropout(0.3), Drawing(bernoulli_mask, False)],
    ids=lambda layer: type(layer).__name__,
)
def test_layers_that_draw_in_training_only_can_be_evaluated(layer):
    model = nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(4 if isinstance(layer, Drawing) else 6, 3)).double()
    inputs = inputs_for("vectors")
    loop = run_pass(LoopForward(model), model, inputs, training=False)
    assert_same(loop, run_pass(StackedForward(model), model, inputs, training=False))
    for engine in (LoopForward, StackedForward):
        with pytest.raises(FedStrataError, match="draws random numbers"):
            run_pass(engine(model), model, inputs)


class Recurrent(nn.Module):
    def __init__(self, kind, dropout):
        super().__init__()
        self.layers = kind(8, 3, num_layers=2, dropout=dropout, batch_first=True)

    def forward(self, x):
        return self.layers(x)[0]


class PackedRecurrent(Recurrent):
    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [4] * len(x), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.layers(packed)[0], batch_first=True)[0]


@pytest.mark.parametrize("network", [Recurrent, PackedRecurrent])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_dropout_inside_recurrent_layers_is_refused_in_training_only(network, kind):
    inputs = inputs_for("sequences")
    model = network(kind, 0.5).double()
    with pytest.raises(FedStrataError, match="draws random numbers"):
        run_pass(LoopForward(model), model, inputs)
    run_pass(LoopForward(model), model, inputs, training=False)
    model = network(kind, 0.0).double()
    run_pass(LoopForward(model), model, inputs)


# Batch norm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("operations", [None, ON_GPU], ids=["cpu", "gpu"])
@pytest.mark.parametrize(
    ("kind", "model"),
    [
        ("vectors", nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))),
        ("images", convolution(nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(4))),
    ],
)
def test_a_single_value_per_channel_is_refused_in_a_sentence(kind, model, operations):
    model = model.double()
    for forward in (LoopForward(model), StackedForward(model, operations)):
        with pytest.raises(FedStrataError, match=r"single value per channel.*larger batch_size, or last_batch=drop"):
            run_pass(forward, model, inputs_for(kind, samples=1))
        run_pass(forward, model, inputs_for(kind, samples=1), training=False)
        run_pass(forward, model, inputs_for(kind, samples=2))


def test_a_single_image_has_many_values_per_channel():
    model = convolution(nn.BatchNorm2d(4)).double()
    run_pass(StackedForward(model), model, inputs_for("images", samples=1))
