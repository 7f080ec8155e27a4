"""Sparse fine-tuning: two stages, the Fisher information by hand, and frozen entries that stay bit for bit."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call
from watching import (
    BOTH_ENGINES,
    assert_same_bits,
    clients_view,
    layer_values,
    memory_of,
    outlined,
    run,
    server_view,
    step_view,
    watched,
)

from fedstrata.engines.client import ClientSide
from fedstrata.engines.probe import DataProbe
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.functional import scaled_rounds, select
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Phase, methods
from fedstrata.stack import Stack, repeat, under
from fedstrata.testing.world import SIZES, TinyNet, digits, prepare, unequal_split

LAYERS = LayerMap.read(TinyNet(), (1, 8, 8))
HEAD = sorted(LAYERS.head_names)
BACKBONE = [name for name in LAYERS.parameter_names if name not in LAYERS.head_names]
QUICK = "sparse-ft(head_rounds=1, sparsity=0.3, calibration_rounds=2, calibration_clients=0.4, batch_size=4)"
WHOLE = "sparse-ft(head_rounds=1, sparsity=0.3, calibration_rounds=1, calibration_clients=1, batch_size=99)"


def probe_of(simulation, ids):
    engine = simulation.engine
    side = engine.members[0].side if hasattr(engine, "members") else engine.client_side
    assert isinstance(side, ClientSide)
    return side.probe(ids, 2)


@BOTH_ENGINES
@pytest.mark.parametrize("kind", ["sample", "batch"])
def test_the_fisher_information_is_that_of_plain_autograd(engine, kind):
    simulation = prepare("sparse-ft", engine)
    setting, data = simulation.setting, digits()
    probe = probe_of(simulation, [0, 3])
    estimates = probe.fisher(repeat(setting.initial, 2), BACKBONE, batch_size=4, batches=2, kind=kind)
    model = TinyNet().double().eval()
    for row, client in enumerate([0, 3]):
        batches = [batch.positions[0] for batch in data_batches(probe, client)]
        expected = {name: torch.zeros_like(setting.initial[name]) for name in BACKBONE}
        for positions in batches:
            groups = [positions] if kind == "batch" else list(positions[:, None])
            for group in groups:
                leaves = {name: setting.initial[name].clone().requires_grad_() for name in BACKBONE}
                inputs = probe.trainer.data.make(group[None], None)[0][0]
                outputs = functional_call(model, {**setting.initial, **leaves}, (inputs,))
                loss = torch.nn.functional.cross_entropy(outputs, data.labels[group])
                for name, gradient in zip(BACKBONE, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                    expected[name] += gradient.square() / len(groups) / len(batches)
        for name in BACKBONE:
            assert torch.allclose(estimates[name][row], expected[name], rtol=1e-9, atol=1e-15), name


def data_batches(probe, client):
    alone = DataProbe(probe.trainer, type(probe.clients)(**{**vars(probe.clients), **one(probe.clients, client)}))
    return list(alone._plain(4, 2))


def one(clients, client):
    row = clients.ids.index(client)
    return {
        "ids": (client,), "sizes": clients.sizes[row : row + 1], "label_counts": clients.label_counts[row : row + 1],
    }  # fmt: skip


def drawn_shares(probe, model, kind, **drawing):
    """Tell how often each class was drawn, read off the Fisher information of the head's bias.

    The gradient of the loss is p_c - 1 for the class drawn and p_c for others, that of the logit 1 and 0.
    """
    chances = model["head.bias"].softmax(-1)
    found = probe.fisher(repeat(model, 1), ["head.bias"], batch_size=16, batches=50, kind=kind, **drawing)
    values = found["head.bias"][0]
    return values if kind == "sampled-logit" else (values - chances**2) / ((chances - 1) ** 2 - chances**2)


@pytest.mark.parametrize("kind", ["sampled-label", "sampled-logit"])
def test_labels_are_drawn_from_the_models_predictions(kind):
    """Class 4 has 3 chances in 10 and class 5 the others, whatever the true labels are."""
    simulation = prepare("sparse-ft", "stacked")
    model = {name: torch.zeros_like(tensor) for name, tensor in simulation.setting.initial.items()}
    model["head.bias"][:] = -50.0
    model["head.bias"][4], model["head.bias"][5] = torch.tensor([0.3, 0.7]).log()
    probe = probe_of(simulation, [1])
    shares = drawn_shares(probe, model, kind)
    assert shares[4].item() == pytest.approx(0.3, abs=0.06)  # 800 draws: a deviation of 0.016
    assert shares[5].item() == pytest.approx(0.7, abs=0.06)
    assert shares.sum().item() == pytest.approx(1, abs=1e-9)
    assert (shares * 800).round().sum() == 800
    assert not torch.equal(shares, drawn_shares(probe, model, kind, draw=1))
    assert torch.equal(shares, drawn_shares(probe, model, kind, draw=0))


def test_the_score_of_a_sampled_logit_is_its_own_squared_gradient():
    """The logit of class 4 is the product of its row and the features, so its slope is their size, not p - 1."""
    simulation = prepare("sparse-ft", "stacked")
    model = {**simulation.setting.initial, "head.weight": torch.zeros(10, 8, dtype=torch.float64)}
    model["head.bias"] = torch.full((10,), -50.0, dtype=torch.float64)
    model["head.bias"][4] = 0.0
    probe = probe_of(simulation, [1])
    found = probe.fisher(repeat(model, 1), ["head.weight"], batch_size=99, batches=1, kind="sampled-logit")
    features = []
    network = TinyNet().double().eval()
    network.head.register_forward_pre_hook(lambda module, given: features.append(given[0]))
    positions = torch.from_numpy(simulation.split.train[1])
    functional_call(network, model, (probe.trainer.data.make(positions[None], None)[0][0],))
    assert torch.allclose(found["head.weight"][0, 4], features[0].square().mean(0), rtol=1e-9)
    assert found["head.weight"][0].abs().sum(1).count_nonzero() == 1


def tiny(**changes):
    """A model of two weights and a head, at the server."""
    layers = LayerMap.read(torch.nn.Sequential(torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(1, 2)), (2,))
    model = {"0.weight": torch.tensor([[1.0, 2.0]]), "1.weight": torch.zeros(2, 1), "1.bias": torch.zeros(2)}
    return server_view(layers, model, **changes)


def concluded(exchange, server, estimates):
    new, memory = exchange.conclude(server, Message({"0.weight": torch.tensor(estimates)}))
    assert new == {}
    return tiny(memory=memory, sizes=server.sizes)


def test_estimates_are_averaged_over_clients_and_summed_over_rounds():
    """Clients count the same whatever they hold: by size the first estimate would be (1.5, 0)."""
    part = methods.make("sparse-ft(head_rounds=0, sparsity=0.5, calibration_rounds=2)")
    [exchange] = part.exchanges()
    server = tiny(memory=part.server_memory(tiny()), sizes=torch.tensor([30, 10]))
    server = concluded(exchange, server, [[[1.0, 0.0]], [[3.0, 0.0]]])
    assert server.memory["fisher/0.weight"].tolist() == [[2.0, 0.0]]
    assert server.memory["mask/0.weight"].tolist() == [[True, True]]
    assert not part.calibrated(server.memory)
    assert_same_bits(exchange.announce(server).tensors, {"calibrated": torch.tensor([1])})
    server = concluded(exchange, server, [[[0.0, 5.0]], [[0.0, 7.0]]])
    assert part.calibrated(server.memory)
    assert server.memory["mask/0.weight"].tolist() == [[True, False]]  # the least sensitive: 2 against 6
    assert not any(name.startswith("fisher/") for name in server.memory)
    announced = {
        "calibrated": torch.tensor([2]), "mask/0.weight": torch.tensor([[[True, False]]]),
        "head/1.bias": torch.zeros(1, 2), "head/1.weight": torch.zeros(1, 2, 1),
    }  # fmt: skip
    assert_same_bits(exchange.announce(server).tensors, announced)


def test_rounds_add_up():
    """Once 1 and once 4 against twice 2: the sum of the first is larger, its last value too, its first is smaller."""
    for first, second, trained in (((1.0, 2.0), (4.0, 2.0), [False, True]), ((4.0, 2.0), (1.0, 2.0), [False, True])):
        part = methods.make("sparse-ft(head_rounds=0, sparsity=0.5, calibration_rounds=2)")
        [exchange] = part.exchanges()
        server = concluded(exchange, tiny(memory=part.server_memory(tiny())), [[list(first)]] * 2)
        server = concluded(exchange, server, [[list(second)]] * 2)
        assert server.memory["mask/0.weight"].tolist() == [trained]


def test_a_soft_mask_grows_by_the_scores_of_each_round():
    """Half of what is left goes in each of two rounds; what is frozen stays so, though its score is the lowest now."""
    part = methods.make("sparse-ft(head_rounds=0, sparsity=0.75, calibration_rounds=2, calibration=soft-mask)")
    [exchange] = part.exchanges()
    layers = LayerMap.read(torch.nn.Sequential(torch.nn.Linear(4, 1, bias=False), torch.nn.Linear(1, 2)), (4,))
    model = {"0.weight": torch.ones(1, 4), "1.weight": torch.zeros(2, 1), "1.bias": torch.zeros(2)}
    server = server_view(layers, model, memory=part.server_memory(server_view(layers, model)))
    for scores, expected in (
        ([4.0, 3.0, 2.0, 1.0], [False, False, True, True]),
        ([0.0, 0.0, 1.0, 2.0], [False, False, True, False]),
    ):
        _, memory = exchange.conclude(server, Message({"0.weight": torch.tensor([[scores]] * 2)}))
        server = server_view(layers, model, memory=memory)
        assert server.memory["mask/0.weight"].tolist() == [expected]
        assert exchange.announce(server).tensors["mask/0.weight"].tolist() == [[expected]]
        assert torch.equal(exchange.announce(server).tensors["calibrated"], server.memory["calibrated"][None])
    assert part.calibrated(server.memory)
    assert sorted(exchange.announce(server).group("head")) == ["1.bias", "1.weight"]


def test_scores_are_those_of_the_softened_model():
    """What is frozen counts a tenth in the forward pass; only with a soft mask."""
    seen = []

    class Watching:
        def fisher(self, model, *asked):
            seen.append((model, asked))
            return {}

    memory = {"mask/stem.bias": torch.tensor([[True, False, True, True]]), "calibrated": torch.tensor([2])}
    model = {"stem.bias": torch.tensor([[1.0, 2.0, 3.0, 4.0]]), "head.bias": torch.ones(1, 10)}
    asking = "sparse-ft(batch_size=5, batches=3, fisher=sampled-logit{})"
    for more, expected in ((", calibration=soft-mask", [1.0, 0.2, 3.0, 4.0]), ("", [1.0, 2.0, 3.0, 4.0])):
        [exchange] = methods.make(asking.format(more)).exchanges()
        exchange.survey(clients_view(LAYERS, 1, memory=memory, probing=lambda clients: Watching()), model)
        given, (names, *rest) = seen[-1]
        assert given["stem.bias"][0].tolist() == pytest.approx(expected)
        assert torch.equal(given["head.bias"], model["head.bias"])
        assert names == BACKBONE
        assert rest == [5, 3, "sampled-logit", 2]


def test_what_clients_keep_to_themselves_is_not_estimated_and_not_announced():
    [exchange] = methods.make("sparse-ft").exchanges()
    asked = []

    class Watching:
        def fisher(self, model, names, *rest):
            asked.extend(names)
            return {}

    shared = frozenset((*BACKBONE[1:], *HEAD))
    memory = {"calibrated": torch.tensor([0])}
    exchange.survey(clients_view(LAYERS, 1, shared=shared, memory=memory, probing=lambda clients: Watching()), {})
    assert asked == BACKBONE[1:]
    done = {"calibrated": torch.tensor(3), "mask/stem.bias": torch.tensor([True]), "found": torch.tensor(True)}
    announced = exchange.announce(server_view(LAYERS, {"head.bias": torch.ones(10)}, memory=done))
    assert sorted(announced.tensors) == ["calibrated", "head/head.bias", "mask/stem.bias"]


def test_an_announcement_replaces_what_it_brings():
    [exchange] = methods.make("sparse-ft").exchanges()
    memory = {"calibrated": torch.zeros(2), "mask/stem.bias": torch.ones(2, 1), "head/head.bias": torch.ones(2, 1)}
    came = Message({"calibrated": torch.tensor([1]), "head/head.bias": torch.full((1, 1), 7.0)})
    expected = {**memory, "calibrated": torch.tensor([1, 1]), "head/head.bias": torch.full((2, 1), 7.0)}
    assert_same_bits(exchange.adopt(clients_view(LAYERS, 2, memory=memory), came), expected)


@BOTH_ENGINES
def test_the_mask_is_that_of_the_pretrained_backbone_under_the_trained_head(engine):
    """By hand, from all samples of all clients: the Fisher information where stage one ended, each client alike."""
    simulation = prepare(WHOLE, engine, rounds=3, epochs=1, evaluate_every=99)
    simulation.step()
    before = simulation.engine.server.model
    simulation.step()
    found = simulation.engine.server.memory.group("sparse-ft/mask")

    def mask(model, weights):
        total = {name: torch.zeros_like(model[name]) for name in BACKBONE}
        network, data = TinyNet().double().eval(), digits()
        make = probe_of(simulation, [0]).trainer.data.make
        for positions, weight in zip(map(torch.from_numpy, unequal_split(data).train), weights, strict=True):
            for position in positions:
                leaves = {name: model[name].clone().requires_grad_() for name in BACKBONE}
                outputs = functional_call(network, {**model, **leaves}, (make(position[None, None], None)[0][0],))
                loss = torch.nn.functional.cross_entropy(outputs, data.labels[position][None])
                for name, gradient in zip(BACKBONE, torch.autograd.grad(loss, list(leaves.values())), strict=True):
                    total[name] += weight * gradient.square() / len(positions)
        return select(total, 0.3, "least")

    assert_same_bits(dict(found), mask(before, [1] * 5))
    for other in (mask(before, SIZES), mask({**before, **{n: simulation.setting.initial[n] for n in HEAD}}, [1] * 5)):
        assert any(not torch.equal(found[name], other[name]) for name in BACKBONE)


@BOTH_ENGINES
def test_every_calibration_asks_clients_anew_and_takes_other_minibatches(engine, monkeypatch):
    asked = []
    plain = DataProbe._plain

    def noting(self, *given):
        batches = list(plain(self, *given))
        asked.append((self.clients.ids, [batch.positions.tolist() for batch in batches]))
        return batches

    monkeypatch.setattr(DataProbe, "_plain", noting)
    run("sparse-ft(head_rounds=1, calibration_rounds=4, calibration_clients=0.4, batch_size=2)", engine, rounds=2)
    ids = [client for clients, _ in asked for client in clients]
    assert len(ids) == 8
    exchanges = [frozenset(ids[2 * number : 2 * number + 2]) for number in range(4)]
    assert all(len(clients) == 2 for clients in exchanges)
    assert len(set(exchanges)) > 1
    asked.clear()
    run("sparse-ft(head_rounds=1, calibration_rounds=2, calibration_clients=1, batch_size=2)", engine, rounds=2)
    first, second = asked[: len(asked) // 2], asked[len(asked) // 2 :]
    assert [clients for clients, _ in first] == [clients for clients, _ in second]
    assert all(once != again for (_, once), (_, again) in zip(first, second, strict=True))


def test_who_is_asked_depends_on_seed_and_number_and_is_a_fraction():
    [exchange] = methods.make("sparse-ft(calibration_clients=0.1)").exchanges()

    def asked(number, clients, seed=0):
        view = server_view(LAYERS, {}, memory={"calibrated": torch.tensor(number)}, clients=clients, seed=seed)
        chosen = list(exchange.asks(view))
        assert len(set(chosen)) == len(chosen)
        assert set(chosen) <= set(range(clients))
        return chosen

    assert [len(asked(0, clients)) for clients in (1, 4, 17, 100)] == [1, 1, 2, 10]
    assert asked(0, 100) == asked(0, 100)
    assert len({tuple(asked(number, 100)) for number in range(4)}) == 4
    assert asked(0, 100) != asked(0, 100, seed=1)


@pytest.mark.parametrize("rule", ["lowest-magnitude", "highest-magnitude", "random"])
def test_other_rules_need_no_estimates(rule):
    part = methods.make(f"sparse-ft(head_rounds=0, sparsity=0.3, rule={rule})")
    [exchange] = part.exchanges()
    assert [exchange.due(round, 10, joining=False) for round in (1, 2)] == [1, 0]
    assert list(exchange.asks(server_view(LAYERS, {}, clients=9))) == [0]
    assert exchange.survey(clients_view(LAYERS, 1), {}) == Message()
    simulation = run(f"sparse-ft(head_rounds=1, sparsity=0.3, rule={rule})", rounds=2)
    initial = {name: simulation.setting.initial[name] for name in BACKBONE}
    expected = select(initial, 0.3, rule, seed=7)
    for name in BACKBONE:
        assert torch.equal(simulation.engine.server.memory[f"sparse-ft/mask/{name}"], expected[name])


@pytest.mark.parametrize("rule", ["least", "most"])
def test_calibrations_come_between_the_stages(rule):
    [exchange] = methods.make(f"sparse-ft(rule={rule}, calibration_rounds=4)").exchanges()
    assert [exchange.due(round, 9, joining=False) for round in range(1, 10)] == [0, 0, 0, 4, 0, 0, 0, 0, 0]
    [exchange] = methods.make(f"sparse-ft(rule={rule}, sparsity=0)").exchanges()  # nothing to choose
    assert [exchange.due(round, 3, joining=False) for round in range(1, 4)] == [0, 1, 0]
    assert exchange.survey(clients_view(LAYERS, 1), {}) == Message()


@BOTH_ENGINES
def test_frozen_entries_stay_bit_for_bit_and_the_rest_moves(engine):
    simulation = run(QUICK, engine, rounds=3, precision="fp32")  # weight decay and momentum are on
    server, initial = simulation.engine.server, simulation.setting.initial
    trained = total = 0
    for name in BACKBONE:
        mask = server.memory[f"sparse-ft/mask/{name}"]
        assert torch.equal(server.model[name][~mask], initial[name][~mask])
        trained, total = trained + int(mask.sum()), total + mask.numel()
    assert trained == total - int(0.3 * total)
    moved = torch.cat(
        [(server.model[name] != initial[name])[server.memory[f"sparse-ft/mask/{name}"]] for name in BACKBONE]
    )
    assert moved.double().mean() > 0.9
    assert sum(layer_values(simulation, "density", 3).values()) > 0


def test_the_head_moves_in_stage_one_only_and_the_backbone_in_stage_two_only():
    simulation = prepare(QUICK, rounds=3)
    models = [simulation.engine.server.model]
    for _ in range(3):
        simulation.step()
        models.append(simulation.engine.server.model)
    for before, after, moving in ((0, 1, HEAD), (1, 2, BACKBONE), (2, 3, BACKBONE)):
        for name in LAYERS.parameter_names:
            assert torch.equal(models[before][name], models[after][name]) == (name not in moving), name


@BOTH_ENGINES
@pytest.mark.parametrize("optimiser", ["sgd(learning_rate=0.05, momentum=0.9, weight_decay=0.01)", "adamw:0.01"])
def test_clients_train_the_head_alone_and_then_only_what_the_mask_marks(engine, optimiser):
    """At every local step, whatever the optimiser does to entries without a gradient."""
    method, seen = watched(QUICK.replace("head_rounds=1", "head_rounds=2"))
    simulation = run(method, engine, rounds=4, participation=0.8, optimiser=optimiser)
    masks, initial = simulation.engine.server.memory.group("sparse-ft/mask"), simulation.setting.initial
    assert {round for round, _ in seen.steps} == {1, 2, 3, 4}
    for (round, client), steps in seen.steps.items():
        received, trained = seen.received[round, client], seen.trained[round, client]
        free = HEAD if round <= 2 else BACKBONE
        moved = {name: torch.ones_like(initial[name], dtype=torch.bool) for name in HEAD} if round <= 2 else masks
        for step in (*steps, trained):
            for name in LAYERS.parameter_names:
                still = ~moved[name] if name in free else torch.ones_like(initial[name], dtype=torch.bool)
                assert torch.equal(step[name][still], received[name][still]), (round, client, name)
        for name in BACKBONE:
            frozen = ~masks[name] if round > 2 else torch.ones_like(masks[name])
            assert torch.equal(received[name][frozen], initial[name][frozen]), (round, client, name)
        changed = torch.cat([(trained[name] != received[name])[moved[name]] for name in free])
        assert changed.double().mean() > 0.8, (round, client)


@BOTH_ENGINES
def test_clients_begin_with_the_servers_model(engine):
    method, seen = watched(QUICK.replace("head_rounds=1", "head_rounds=2"))
    simulation = prepare(method, engine, rounds=4, epochs=1, evaluate_every=99, participation=0.6)
    for round in range(1, 5):
        before = simulation.engine.server.model
        simulation.step()
        for (then, client), received in seen.received.items():
            for name in LAYERS.parameter_names if then == round else ():
                assert torch.equal(received[name], before[name]), (round, client, name)


@BOTH_ENGINES
def test_a_step_of_stage_two_is_the_masked_one_at_the_backbones_rate(engine):
    """By hand: w - 0.05 * 0.3 * (gradient + 0.001 w) where the mask marks; in stage one at the full rate."""
    method, seen = watched(QUICK.replace("sparsity", "backbone_rate=0.3, sparsity"))
    simulation = run(method, engine, rounds=2, steps=1)
    masks = simulation.engine.server.memory.group("sparse-ft/mask")
    assert {round for round, _ in seen.gradients} == {1, 2}
    for (round, client), gradients in seen.gradients.items():
        received, trained = seen.received[round, client], seen.trained[round, client]
        rate = 0.05 if round == 1 else 0.05 * 0.3
        assert sorted(gradients) == sorted(HEAD if round == 1 else BACKBONE)
        for name, gradient in gradients.items():
            full = received[name] - rate * (gradient + 0.001 * received[name])
            expected = full if round == 1 else torch.where(masks[name], full, received[name])
            assert torch.allclose(trained[name], expected, rtol=1e-12, atol=1e-15), name


def test_the_gradients_norm_is_that_of_what_is_trained():
    part = methods.make("sparse-ft")
    clients = clients_view(LAYERS, 1, memory={"mask/stem.bias": torch.tensor([[True, False, True, True]])})
    gradients = {"stem.bias": torch.tensor([[1.0, 2.0, 3.0, 4.0]]), "head.bias": torch.ones(1, 10)}
    masked = part.gradients(clients, step_view(gradients), gradients)
    assert masked["stem.bias"].tolist() == [[1, 0, 3, 4]]
    assert torch.equal(masked["head.bias"], gradients["head.bias"])
    in_stage_one = part.gradients(clients, step_view(gradients), {"head.bias": gradients["head.bias"]})
    assert list(in_stage_one) == ["head.bias"]


def test_the_defaults():
    part = methods.make("sparse-ft")
    assert (part.head_rounds, part.sparsity, part.rule, part.restart) == (None, 0.2, "least", True)
    assert (part.calibration_rounds, part.calibration_clients, part.batch_size, part.batches) == (3, 0.1, 64, 1)
    assert (part.fisher, part.calibration, part.backbone_rate) == ("sample", "accumulate", 0.1)


def test_stage_one_has_a_third_of_the_rounds_but_one_at_least():
    part = methods.make("sparse-ft")
    assert [part.stage_one(rounds) for rounds in (1, 2, 3, 5, 6, 30, 200)] == [1, 1, 1, 1, 2, 10, 66]
    assert methods.make("sparse-ft(head_rounds=0)").stage_one(30) == 0
    assert methods.make("sparse-ft(head_rounds=7)").stage_one(30) == 7


def test_phases_name_what_trains_at_which_rate_and_over_which_rounds():
    part = methods.make("sparse-ft(head_rounds=2, backbone_rate=0.25)")
    told = [part.phases(clients_view(LAYERS, 1, round=round, rounds=5)) for round in range(1, 6)]
    assert [len(phases) for phases in told] == [1] * 5
    assert [phases[0].name for phases in told] == ["head"] * 2 + ["backbone"] * 3
    assert [sorted(phases[0].trains(LAYERS)) for phases in told] == [HEAD] * 2 + [sorted(BACKBONE)] * 3
    assert [phases[0].rate for phases in told] == [1.0] * 2 + [0.25] * 3
    assert [phases[0].stage for phases in told] == [(1, 2)] * 2 + [(3, 5)] * 3
    [longer] = methods.make("sparse-ft(head_rounds=9)").phases(clients_view(LAYERS, 1, round=1, rounds=5))
    assert longer.stage == (1, 5)
    one = methods.make("sparse-ft(head_rounds=2, restart=false)")
    assert [one.phases(clients_view(LAYERS, 1, round=round, rounds=5))[0].stage for round in (1, 5)] == [None, None]


@BOTH_ENGINES
@pytest.mark.parametrize(
    ("schedule", "factors"),
    [
        ("exponential:0.5", [1, 0.5, 1, 0.5, 0.25]),
        ("cosine", [1, 0, 1, 0.5, 0]),
        ("step:0.5", [1, 0.5, 1, 1, 0.5]),
        ("plateau(drop=0.5, patience=0, threshold=0.999)", [1, 1, 1, 1, 0.5]),
    ],
)
def test_every_schedule_begins_anew_in_stage_two(engine, schedule, factors):
    """The steps of clients tell their learning rates. No loss is a thousandth of the one before, so each waits once."""
    method, seen = watched(QUICK.replace("head_rounds=1", "backbone_rate=1, head_rounds=2"))
    run(method, engine, rounds=5, steps=1, schedule=schedule)
    for round, factor in enumerate(factors, start=1):
        name = "head.bias" if round <= 2 else "hidden.weight"
        received, trained = seen.received[round, 0][name], seen.trained[round, 0][name]
        slope = seen.gradients[round, 0][name] + 0.001 * received
        moved = (trained != received) & (slope != 0) if factor else slope != 0
        assert moved.any()
        assert torch.allclose((received - trained)[moved], 0.05 * factor * slope[moved], rtol=1e-7, atol=1e-16)


def test_one_schedule_may_run_over_both_stages():
    method, seen = watched(QUICK.replace("head_rounds=1", "restart=false, backbone_rate=1, head_rounds=1"))
    run(method, rounds=3, steps=1, schedule="exponential:0.5")
    received, trained = seen.received[3, 0]["hidden.weight"], seen.trained[3, 0]["hidden.weight"]
    slope, moved = seen.gradients[3, 0]["hidden.weight"] + 0.001 * received, trained != received
    assert moved.any()
    assert torch.allclose((received - trained)[moved], 0.05 * 0.25 * slope[moved], rtol=1e-7)


@BOTH_ENGINES
def test_only_what_moves_travels(engine):
    """Eight bytes for each number, and the frame around them; masks that both sides hold stay at home."""
    simulation = run(QUICK, engine, rounds=3)
    initial, layers = simulation.setting.initial, simulation.setting.layers
    buffers = sum(initial[name].nbytes for name in layers.buffer_names)
    trained = sum(int(mask.sum()) for mask in simulation.engine.server.memory.group("sparse-ft/mask").values())
    payload = [sum(initial[name].nbytes for name in HEAD) + buffers, 8 * trained + buffers, 8 * trained + buffers]
    up, down = (simulation.metrics.series(f"bytes.{way}")[1] for way in ("up", "down"))
    for way, rounds in ((up, (0, 2)), (down, (0, 2))):
        for round in rounds:
            assert 0 < way[round] / 5 - payload[round] < 1500, round
    dense = run("fedavg", rounds=1).metrics.series("bytes.up")[1][0]
    assert up[2] < dense


def test_messages_hold_what_moves_under_the_mask_that_both_sides_know():
    part = methods.make("sparse-ft(head_rounds=1, rule=random, sparsity=0.5)")
    model = {name: torch.ones(2, 2) for name in (*BACKBONE, *HEAD)} | {"scale.running_mean": torch.ones(2)}
    masks = {name: torch.tensor([[True, False], [True, True]]) for name in BACKBONE}
    stacks = {name: tensor[None] for name, tensor in model.items()}
    for round, found, travelling, hidden in ((1, {}, HEAD, {}), (2, {"found": torch.tensor(True)}, BACKBONE, masks)):
        server = server_view(LAYERS, model, round, memory=under("mask", masks) | found)
        clients = clients_view(LAYERS, 1, round, memory=under("mask", {n: mask[None] for n, mask in masks.items()}))
        down, up = part.broadcast(server, Message(stacks)), part.upload(clients, None, Message(stacks))
        for message in (down, up):
            assert sorted(message.tensors) == sorted((*travelling, "scale.running_mean"))
            assert_same_bits(message.masks, {name: mask[None] for name, mask in hidden.items()})
        for known in (part.masks_known(server, upload=False), part.masks_known(clients, upload=True)):
            assert_same_bits(dict(known), {name: mask[None] for name, mask in masks.items()})


def test_what_is_frozen_is_filled_in():
    """The head from memory unless it came, the frozen entries of the backbone from the beginning."""
    part = methods.make("sparse-ft")
    memory = {"head/head.bias": torch.full((2, 1), 5.0), "calibrated": torch.zeros(2)}
    clients = clients_view(LAYERS, 2, memory=memory, initial={"stem.bias": torch.tensor([7.0, 8.0])})
    model = {"head.bias": torch.ones(2, 1), "stem.bias": torch.full((2, 2), 3.0)}
    came = Message({"stem.bias": torch.zeros(1, 2)}, masks={"stem.bias": torch.tensor([[True, False]])})
    filled, kept = part.receive(clients, came, model)
    assert_same_bits(
        filled, {"head.bias": torch.full((2, 1), 5.0), "stem.bias": torch.tensor([[3.0, 8.0], [3.0, 8.0]])}
    )
    assert_same_bits(kept, memory)
    filled, _ = part.receive(clients, Message({"head.bias": torch.ones(1, 1)}), model)
    assert_same_bits(filled, model)


def test_holding_is_for_stage_two():
    part = methods.make("sparse-ft")
    clients = clients_view(LAYERS, 1, memory={"mask/stem.bias": torch.tensor([[True, False]])})
    parameters, received = {"stem.bias": torch.tensor([[1.0, 2.0]])}, {"stem.bias": torch.tensor([[3.0, 4.0]])}
    for name, expected in (("head", [[1.0, 2.0]]), ("backbone", [[1.0, 4.0]])):
        held, memory = part.project(clients, step_view(parameters, received, phase=Phase(name=name)), parameters)
        assert held["stem.bias"].tolist() == expected
        assert memory is clients.memory


def test_memory_begins_with_everything_trained_the_initial_head_and_no_calibration():
    part = methods.make("sparse-ft")
    model = {name: torch.full((2, 3), float(number)) for number, name in enumerate(LAYERS.parameter_names)}
    memory = Stack(part.client_memory(clients_view(LAYERS, 2), model))
    assert sorted(memory.group("mask")) == sorted(BACKBONE)
    assert all(mask.all() for mask in memory.group("mask").values())
    assert_same_bits(dict(memory.group("head")), {name: model[name] for name in HEAD})
    assert memory["calibrated"].tolist() == [0, 0]
    at_server = Stack(part.server_memory(server_view(LAYERS, {name: model[name] for name in (*BACKBONE[1:], *HEAD)})))
    assert sorted(at_server.group("mask")) == sorted(BACKBONE[1:])
    assert all(mask.all() for mask in at_server.group("mask").values())
    assert int(at_server["calibrated"]) == 0


def test_densities_are_told_from_stage_two_on():
    part = methods.make("sparse-ft(head_rounds=2)")
    memory = {"mask/stem.bias": torch.tensor([True, False, False, False])}
    assert [part.metrics(server_view(LAYERS, {}, round, memory=memory)) for round in (1, 2, 3)] == [
        {}, {}, {"density": {"stem": 0.25}},
    ]  # fmt: skip


def test_a_soft_mask_of_a_run_is_found_step_by_step():
    simulation = run(QUICK.replace("batch_size", "fisher=sampled-logit, calibration=soft-mask, batch_size"), rounds=3)
    masks = simulation.engine.server.memory.group("sparse-ft/mask")
    total = sum(mask.numel() for mask in masks.values())
    assert sum(int(mask.sum()) for mask in masks.values()) == total - int(0.3 * total)
    for name, mask in memory_of(simulation, "sparse-ft", "mask").items():
        assert torch.equal(mask, masks[name].expand_as(mask))


def test_clients_that_missed_the_last_head_get_it_with_the_mask():
    simulation = run(QUICK, rounds=2, participation=0.4)
    head = simulation.engine.server.model["head.weight"]
    for member in simulation.engine.members:
        assert torch.equal(member.state["memory/sparse-ft/head/head.weight"][0], head)


def test_the_global_model_is_tested_although_most_of_it_never_travels():
    assert "global.accuracy" in run(QUICK, rounds=3).metrics.latest()


def test_a_model_without_rounds_for_its_head_is_pointed_out():
    with pytest.warns(FedStrataWarning, match="head_rounds=0"):
        prepare("sparse-ft(head_rounds=0)")


@pytest.mark.parametrize(
    ("text", "rounds", "told"),
    [
        ("sparse-ft", 2, []),
        ("sparse-ft", 1, ["never the backbone"]),
        ("sparse-ft(head_rounds=4)", 5, []),
        ("sparse-ft(head_rounds=5)", 5, ["all 5 rounds and never the backbone"]),
        ("sparse-ft(head_rounds=9)", 5, ["all 5 rounds and never the backbone"]),
        ("sparse-ft(head_rounds=0)", 5, ["no rounds for the head"]),
        ("sparse-ft(rule=random)", 5, []),
        ("sparse-ft(rule=random, batches=2, fisher=batch)", 9, ["with rule=random: leave batches and fisher out"]),
        ("sparse-ft(sparsity=0, calibration=soft-mask)", 5, ["with sparsity=0: leave calibration out"]),
        ("sparse-ft(rule=most, calibration_rounds=1, calibration_clients=1, batch_size=2)", 5, []),
    ],
)  # fmt: skip
def test_notes(text, rounds, told):
    notes = list(methods.make(text).notes(outlined(LAYERS, rounds=rounds)))
    assert len(notes) == len(told)
    assert all(part in note for part, note in zip(told, notes, strict=True))


def test_a_model_without_a_head_is_pointed_out():
    layers = LayerMap.read(torch.nn.Sequential(torch.nn.Conv2d(1, 2, 8), torch.nn.Flatten()), (1, 8, 8))
    assert list(methods.make("sparse-ft").notes(outlined(layers))) == [
        "The model has no linear head, so stage one of 'sparse-ft' trains nothing."
    ]


@pytest.mark.parametrize(
    "given",
    [
        "head_rounds=-1", "sparsity=-0.1", "sparsity=1", "rule=largest", "calibration_rounds=0",
        "calibration_clients=0", "calibration_clients=1.1", "batch_size=0", "batches=0", "fisher=exact",
        "calibration=hard", "backbone_rate=0",
    ],
)  # fmt: skip
def test_impossible_values_are_refused(given):
    with pytest.raises(FedStrataError):
        methods.make(f"sparse-ft({given})")


def test_scaled_rounds_keep_the_budget():
    assert [scaled_rounds(steps) for steps in (4, 8, 16, 1000)] == [200, 100, 50, 1]
    with pytest.raises(FedStrataError, match="steps"):
        scaled_rounds(0)


def test_parts_that_would_undo_it_are_refused():
    for other in ("ssfl", "player", "lips"):
        with pytest.raises(FedStrataError, match="cannot be combined"):
            prepare(f"sparse-ft+{other}")
