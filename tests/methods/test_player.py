from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import nn
from watching import (
    BOTH_ENGINES,
    Attending,
    GivenProbe,
    assert_same_bits,
    attending,
    clients_view,
    layer_values,
    outlined,
    probing,
    run,
    server_view,
    watched,
)

from fedstrata.engines.engine import pack
from fedstrata.engines.loop import LoopEngine
from fedstrata.errors import FedStrataError
from fedstrata.functional import split_point
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.preparing import Ingredients
from fedstrata.testing.world import EXPERIMENT, TinyNet, digits, prepare, unequal_split
from fedstrata.wire import decode, encode

ORDER = ["stem", "body", "shortcut.0", "hidden", "head"]


class Golden(nn.Module):
    """Layers with two, four and one weights."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(1, 2), nn.Linear(2, 2), nn.Linear(1, 1)

    def forward(self, x):
        return self.c(self.b(self.a(x)).sum(-1, keepdim=True))


LAYERS = LayerMap.read(Golden(), (1,))


def stacks(*clients):
    """Stack the layers' values of several clients."""
    return {f"{name}.weight": torch.tensor([client[name] for client in clients]) for name in "abc"}


THETA = {"a": [1.0, 2.0], "b": [0.5, -1.0, 2.0, 0.0], "c": [3.0]}
FIRST = {"a": [0.1, 0.1], "b": [0.2, 0.1, 0.05, 3.0], "c": [0.2]}
SECOND = {"a": [0.2, 0.0], "b": [0.4, 0.2, 0.1, 1.0], "c": [0.1]}


def surveyed():
    [exchange] = methods.make("player").exchanges()
    probe = GivenProbe(stacks(FIRST, SECOND), stacks(THETA, THETA))
    return exchange.survey(clients_view(LAYERS, 2, **probing(probe)), {})


def conclude(text, seed=0, layers=LAYERS, replies=None):
    part = methods.make(text)
    [exchange] = part.exchanges()
    server = server_view(layers, {}, seed=seed)
    model, memory = exchange.conclude(server, surveyed() if replies is None else replies)
    assert model == {}
    return part, memory


# By hand -------------------------------------------------------------------------------------------------------------


def test_the_survey_measures_after_one_epoch_and_cumulates():
    curves = surveyed().tensors["sensitivity"]
    assert curves[0].tolist() == pytest.approx([0.025, 0.0325, 0.3925])
    assert curves[1].tolist() == pytest.approx([0.02, 0.05, 0.14])


@pytest.mark.parametrize(
    ("threshold", "federated"), [(1e-9, 1), (1.8, 1), (1.9, 2), (2.0, 2), (6.4, 2), (6.5, 3), (1e300, 3)]
)
def test_the_sum_over_clients_decides(threshold, federated):
    part, memory = conclude(f"player(threshold={threshold})")
    assert int(memory["federated"]) == federated
    assert memory["curve"].tolist() == pytest.approx([0.045, 0.0825, 0.5325])
    [exchange] = part.exchanges()
    announcement = exchange.announce(server_view(LAYERS, {}, memory=memory))
    assert announcement.numbers["federated"].tolist() == [federated]
    assert exchange.adopt(clients_view(LAYERS, 4), announcement)["federated"].tolist() == [federated] * 4
    metrics = part.metrics(server_view(LAYERS, {}, memory=memory))
    assert metrics["federated"] == {"a": 1.0, "b": float(federated > 1), "c": float(federated > 2)}
    assert metrics["federation_sensitivity"] == pytest.approx({"a": 0.045, "b": 0.0825, "c": 0.5325})
    assert part.metrics(server_view(LAYERS, {}, memory=memory, round=2)) == {}


# At real clients ------------------------------------------------------------------------------------------------------


def plain_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 10))


def at_client(text, client, **changes):
    """Survey one real client: its samples, and its curve from the common initial model."""
    dataset = digits()
    ingredients = Ingredients(dataset, unequal_split(dataset), plain_net, Method.make(text))
    experiment = EXPERIMENT.with_changes({"optimiser": "sgd(learning_rate=0.5)", **changes})
    simulation = Driver.prepare(experiment, ingredients)
    side = simulation.engine.members[client].side
    initial = {name: tensor[None] for name, tensor in simulation.setting.initial.items()}
    clients = side.probe([client], 1).clients
    [exchange] = simulation.setting.method.parts[0].exchanges()
    samples = torch.from_numpy(simulation.split.train[client])
    inputs, labels = side.data.make(samples[None], None)
    curve = exchange.survey(clients, initial).tensors["sensitivity"][0]
    return simulation.setting.initial, inputs[0], labels[0], curve.tolist()


def gradients_at(weights, inputs, labels):
    model = plain_net().double()
    model.load_state_dict(weights)
    loss = nn.functional.cross_entropy(model(inputs), labels)
    return dict(zip(weights, torch.autograd.grad(loss, list(model.parameters())), strict=True))


def curve_at(weights, inputs, labels):
    """Eq. 2 for two layers, in plain PyTorch."""
    slopes = gradients_at(weights, inputs, labels)
    first, second = (float((weights[name] * slopes[name]).square().mean()) for name in ("1.weight", "3.weight"))
    return [first, first + second]


def test_a_client_measures_where_one_epoch_of_training_has_taken_it():
    """With all samples in one batch, an epoch is one step down the gradient; other numbers at the initial model."""
    initial, inputs, labels, curve = at_client("player", 2, batch_size=99, epochs=5)
    slopes = gradients_at(initial, inputs, labels)
    trained = {name: weight - 0.5 * slopes[name] for name, weight in initial.items()}
    assert curve == pytest.approx(curve_at(trained, inputs, labels), rel=1e-9)
    mixed = [float((trained[name] * slopes[name]).square().mean()) for name in ("1.weight", "3.weight")]
    for other in (curve_at(initial, inputs, labels), [mixed[0], sum(mixed)]):
        assert curve != pytest.approx(other, rel=1e-3)


def test_a_client_measures_on_one_batch_of_the_size_that_the_method_says():
    """Of five samples a batch of two has ten sets; the curve is that of one of them, and not that of all samples."""
    initial, inputs, labels, curve = at_client("player(batch_size=2)", 3, batch_size=99)
    slopes = gradients_at(initial, inputs, labels)
    trained = {name: weight - 0.5 * slopes[name] for name, weight in initial.items()}
    sets = [list(chosen) for chosen in combinations(range(5), 2)]
    fitting = [chosen for chosen in sets if curve == pytest.approx(curve_at(trained, inputs[chosen], labels[chosen]))]
    assert len(fitting) == 1
    assert at_client("player", 3, batch_size=99)[3] == pytest.approx(curve_at(trained, inputs, labels))


def test_the_random_prefix_is_measured_on_the_same_batch():
    text = "player-random(batch_size=2, threshold=3.5)"
    assert at_client(text, 3, batch_size=99)[3] == at_client("player(batch_size=2)", 3, batch_size=99)[3]
    [part] = Method.make(text).parts
    assert (part.threshold, part.random) == (3.5, True)


# Layers with several weights, and with none of their own --------------------------------------------------------------


def sensitivity_of(layers, values):
    """Survey one client whose weights are all 1 and whose gradients are given, by layer."""
    after = {name: torch.ones(1, 2) for layer in layers.weighted for name in layer.weights}
    slopes = {
        name: torch.full((1, 2), value)
        for layer, given in zip(layers.weighted, values, strict=True)
        for name, value in zip(layer.weights, given, strict=True)
    }
    [exchange] = methods.make("player").exchanges()
    return exchange.survey(clients_view(layers, 1, **probing(GivenProbe(slopes, after))), {})


def test_an_attention_is_one_layer_of_the_curve_and_a_tied_one_adds_nothing():
    """Mean squares by layer: patches 1, attention (1 + 9) / 2, mixing 4, again none, head 36."""
    layers = LayerMap.read(Attending(), (1, 8, 8))
    reply = sensitivity_of(layers, [[1.0], [1.0, 3.0], [2.0], [], [6.0]])
    assert reply.tensors["sensitivity"].tolist() == [[1, 6, 10, 10, 46]]
    part, memory = conclude("player(threshold=4.5)", layers=layers, replies=reply)
    assert int(memory["federated"]) == 1  # 6 / 1
    part, memory = conclude("player(threshold=7)", layers=layers, replies=reply)
    assert int(memory["federated"]) == 5
    reply = sensitivity_of(layers, [[1.0], [1.0, 1.0], [1.0], [], [3.0]])
    part, memory = conclude("player(threshold=3.5)", layers=layers, replies=reply)
    assert memory["curve"].tolist() == [1, 2, 3, 3, 12]
    assert int(memory["federated"]) == 4  # before the head, not before the layer that only uses a weight again
    metrics = part.metrics(server_view(layers, {}, memory=memory))
    assert metrics["federated"] == {"patches": 1, "attention": 1, "mixing": 1, "again": 1, "head": 0}
    assert metrics["federation_sensitivity"] == {"patches": 1, "attention": 2, "mixing": 3, "again": 3, "head": 12}
    message = Message({name: torch.zeros(1) for name in layers.parameter_names})
    sent = part.broadcast(server_view(layers, {}, memory=memory), message).tensors
    assert message.tensors.keys() - sent.keys() == {"head.weight", "head.bias"}


def test_entries_and_not_tensors_count_alike():
    """In an attention of width 2 the packed projections have 12 entries, the output's has 4: (12 * 1 + 4 * 9) / 16."""

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(2, 1), nn.Linear(2, 2)

        def forward(self, x):
            return self.head(self.attention(x, x, x)[0])

    layers = LayerMap.read(Attention(), (2,))
    after = {name: torch.ones(1, *tensor.shape) for name, tensor in Attention().named_parameters()}
    slopes = after | {"attention.out_proj.weight": torch.full((1, 2, 2), 3.0)}
    [exchange] = methods.make("player").exchanges()
    reply = exchange.survey(clients_view(layers, 1, **probing(GivenProbe(slopes, after))), {})
    assert reply.tensors["sensitivity"].tolist() == [[3, 4]]


@BOTH_ENGINES
def test_a_run_on_attention_shares_what_its_curve_says(engine):
    simulation = attending("player", engine, rounds=1)
    simulation.step()
    curve = layer_values(simulation, "federation_sensitivity", 1)
    assert list(curve) == ["patches", "attention", "mixing", "again", "head"]
    assert 0 < curve["patches"] < curve["attention"] < curve["mixing"] == curve["again"] < curve["head"]
    shared = split_point(list(curve.values()), 2.0)
    assert sum(layer_values(simulation, "federated", 1).values()) == shared


# What it equals ------------------------------------------------------------------------------------------------------


@BOTH_ENGINES
def test_a_huge_threshold_shares_all_layers_as_fedavg_does(engine):
    left, right = run("player(threshold=1e300)", engine), run("fedavg", engine)
    assert_same_bits(left.engine.server.model, right.engine.server.model)
    assert set(layer_values(left, "federated", 1).values()) == {1.0}
    ups = [one.metrics.series("bytes.up")[1].tolist() for one in (left, right)]
    assert ups[0][1:] == ups[1][1:]


@BOTH_ENGINES
def test_a_tiny_threshold_shares_one_layer(engine):
    left, right = run("player(threshold=1e-9)", engine), run("player(up_to=stem)", engine)
    assert_same_bits(left.engine.server.model, right.engine.server.model)
    assert_same_bits(left.engine.clients().group("own"), right.engine.clients().group("own"))
    assert layer_values(left, "federated", 1) == {name: float(name == "stem") for name in ORDER}


@BOTH_ENGINES
def test_the_survey_changes_no_model(engine):
    simulation = prepare("player", engine, 2)
    simulation.engine.exchange(1)
    initial = simulation.setting.initial
    assert_same_bits(simulation.engine.server.model, initial)
    for name, stack in simulation.engine.clients().group("own").items():
        assert torch.equal(stack, initial[name].expand_as(stack))


# What travels --------------------------------------------------------------------------------------------------------


def test_local_layers_never_leave():
    simulation = prepare("player(up_to=body)", rounds=3, epochs=1)
    simulation.step()
    assert isinstance(simulation.engine, LoopEngine)
    [message] = set(simulation.engine.central.messages(range(5), 2))
    reply, _ = simulation.engine.members[0].answer(message, 2)
    norm = {f"scale.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    for data in (message, reply):
        assert decode(data).tensors.keys() == {"stem.weight", "stem.bias", "body.weight", *norm}
    model, initial = simulation.engine.server.model, simulation.setting.initial
    for name in ("shortcut.0.weight", "shortcut.1.running_mean", "hidden.weight", "head.bias"):
        own = simulation.engine.clients().group("own")[name]
        assert torch.equal(model[name], initial[name])
        assert len({tuple(row.flatten().tolist()) for row in own}) == 5


@BOTH_ENGINES
def test_the_survey_sends_only_the_curve_and_later_rounds_only_the_shared_part(engine):
    method, seen = watched("player(threshold=1e-9)")
    simulation = run(method, engine, 2)
    number = len(encode(Message({"sensitivity": torch.zeros(1, 5, dtype=torch.float64)})))
    shared = run("player(up_to=stem)", engine, 2)
    first, second = (simulation.metrics.series("bytes.up")[1] - shared.metrics.series("bytes.up")[1]).tolist()
    assert (first, second) == (5 * number, 0)
    assert run("fedavg", engine, 1).metrics.series("bytes.up")[1][0] > 2 * shared.metrics.series("bytes.up")[1][0]
    for client in range(5):
        assert torch.equal(seen.received[2, client]["head.weight"], seen.trained[1, client]["head.weight"])


def test_metrics_speak_of_shared_layers_only():
    simulation = run("player(up_to=body)", rounds=3)
    assert set(layer_values(simulation, "cosine", 3)) == {"stem", "body"}
    assert set(layer_values(simulation, "update", 3)) == {"stem", "scale", "body"}


# A random prefix -----------------------------------------------------------------------------------------------------


def test_a_random_prefix_is_neither_all_nor_the_measured_one_and_repeats():
    layers = LayerMap.read(TinyNet(), (1, 8, 8))
    curve = Message({"sensitivity": torch.tensor([[1.0, 1.1, 5.0, 5.1, 5.2]])})

    def draw(seed):
        return int(conclude("player(random=true)", seed, layers, curve)[1]["federated"])

    assert int(conclude("player", 0, layers, curve)[1]["federated"]) == 2
    drawn = [draw(seed) for seed in range(30)]
    assert set(drawn) == {1, 3, 4}
    assert drawn == [draw(seed) for seed in range(30)]


def test_a_random_prefix_falls_back_where_there_is_no_other():
    layers = LayerMap.read(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (2,))
    curve = Message({"sensitivity": torch.tensor([[1.0, 9.0]])})
    assert int(conclude("player(random=true)", 0, layers, curve)[1]["federated"]) == 1


def test_the_random_choice_is_in_the_metrics():
    simulation = run("player(random=true)", rounds=2)
    chosen = layer_values(simulation, "federated", 1)
    count = int(simulation.engine.server.memory["player/federated"])
    assert chosen == {name: float(place < count) for place, name in enumerate(ORDER)}
    assert set(layer_values(simulation, "federation_sensitivity", 1)) == set(ORDER)
    assert layer_values(simulation, "federated", 2) == {}


# Resuming, sentences -------------------------------------------------------------------------------------------------


def test_a_resumed_run_keeps_the_choice(tmp_path):
    text = "player(threshold=1.5)"
    unbroken = run(text)
    broken = prepare(text, rounds=3, epochs=1, evaluate_every=99)
    broken.step()
    with RunFolder.create(tmp_path / "run", broken.experiment, broken.dataset, broken.split, {}) as folder:
        broken.save(folder)
        dataset = digits()
        ingredients = Ingredients(dataset, unequal_split(dataset), TinyNet, Method.make(text))
        resumed = Driver.prepare(broken.experiment, ingredients, broken.plan)
        resumed.restore(folder)
    assert resumed.round == 1
    resumed.step()
    resumed.step()
    assert_same_bits(*(pack(one.engine.server, one.engine.clients()) for one in (unbroken, resumed)))
    assert resumed.metrics.to_tables() == unbroken.metrics.to_tables()
    assert 1 <= int(resumed.engine.server.memory["player/federated"]) <= 5


def test_a_layer_that_does_not_exist_is_refused_before_anything_runs():
    with pytest.raises(FedStrataError, match=r"no layer with weights called 'hiden'. Did you mean 'hidden'"):
        prepare("player(up_to=hiden)")
    with pytest.raises(FedStrataError, match="no layer with weights called 'scale'"):
        prepare("player(up_to=scale)")


@pytest.mark.parametrize(
    ("text", "ways"),
    [
        ("player(random=true, up_to=body)", "random=true and up_to='body'"),
        ("player(up_to='', preset=cifar)", "up_to='' and preset=cifar"),
    ],
)
def test_two_ways_to_choose_are_refused(text, ways):
    with pytest.raises(FedStrataError, match=f"was given {ways}, which are ways to choose; keep one"):
        Method.make(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("player(up_to=b, threshold=3)", "'player' measures nothing where up_to is given: its threshold will not be"),
        ("player(preset=heart, batch_size=8, threshold=3)", "where preset is given: its threshold and batch_size"),
        ("player-random(preset=heart, batch_size=8)", "where preset is given: its batch_size"),
        ("player(threshold=3, batch_size=8)", None),
        ("player-random(threshold=3)", None),
        ("player(preset=heart)", None),
    ],
)
def test_what_has_no_effect_is_said(text, words):
    layers = LayerMap.read(Chain(4), (2,)) if "preset" in text else LAYERS
    notes = [note for part in Method.make(text).parts for note in part.notes(outlined(layers))]
    assert len(notes) == (words is not None)
    assert all(words in note for note in notes)


# Presets -------------------------------------------------------------------------------------------------------------


class Chain(nn.Module):
    """So many layers, each with a norm behind it."""

    def __init__(self, count):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)) for _ in range(count))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("preset", "layers", "shared"),
    [
        ("fmnist", 5, 3), ("emnist", 5, 3), ("emnist-released", 5, 4), ("cifar", 7, 5), ("isic", 7, 5),
        ("isic-released", 7, 6), ("heart", 4, 2), ("heart-released", 4, 1), ("sent140", 9, 8), ("mimic", 9, 8),
        ("mimic-released", 9, 6), ("sent140", 6, 5), ("mimic-released", 4, 1),
    ],
)  # fmt: skip
def test_presets_share_as_many_layers_as_the_papers_table(preset, layers, shared):
    part, chain = methods.make(f"player(preset={preset})"), LayerMap.read(Chain(layers), (2,))
    assert not list(part.notes(outlined(chain)))
    assert part.exchanges() == ()
    memory = part.client_memory(clients_view(chain, 2), {})
    assert memory["federated"].tolist() == [shared] * 2
    names = [*chain.parameter_names, *chain.buffer_names]
    message = part.broadcast(
        server_view(chain, {}, memory={"federated": torch.tensor(shared)}),
        Message({name: torch.zeros(1) for name in names}),
    )
    assert {int(name.split(".")[1]) for name in message.tensors} == set(range(shared))
    assert f"layers.{shared - 1}.1.weight" in message.tensors


@pytest.mark.parametrize(
    ("preset", "layers", "wanted"),
    [("fmnist", 7, "5"), ("cifar", 5, "7"), ("sent140", 1, "more than 1"), ("mimic-released", 3, "more than 3")],
)
def test_a_preset_for_another_model_is_refused(preset, layers, wanted):
    with pytest.raises(FedStrataError) as caught:
        list(methods.make(f"player(preset={preset})").notes(outlined(LayerMap.read(Chain(layers), (2,)))))
    assert str(caught.value) == (
        f"The preset '{preset}' of 'player' is for models with {wanted} layers with weights, and this one has "
        f"{layers}; name the last layer to share with up_to instead."
    )


def test_a_preset_runs_without_a_survey():
    left, right = run("player(preset=fmnist)", rounds=2), run("player(up_to=shortcut.0)", rounds=2)
    assert_same_bits(left.engine.server.model, right.engine.server.model)
    assert left.metrics.series("bytes.up")[1].tolist() == right.metrics.series("bytes.up")[1].tolist()


@BOTH_ENGINES
def test_an_infinite_threshold_shares_everything(engine):
    assert str(Method.make("player(threshold=inf)")) == "player(threshold=inf)"
    left, right = run("player(threshold=inf)", engine, 2), run("fedavg", engine, 2)
    assert_same_bits(left.engine.server.model, right.engine.server.model)
    with pytest.raises(FedStrataError, match=r"nan does not fit the parameter 'threshold'.*: it takes a number"):
        Method.make("player(threshold=nan)")


# Beside others -------------------------------------------------------------------------------------------------------


def test_any_layer_but_the_first_may_stay_at_a_client():
    kept = methods.make("player").keeps(LAYERS)
    assert sorted(kept.resident) == ["b.bias", "b.weight", "c.bias", "c.weight"]
    assert not list(kept.personal)


def test_a_part_that_needs_a_shared_head_is_refused():
    with pytest.raises(FedStrataError, match="works on a head that clients share"):
        Method.make("player+fedala")
