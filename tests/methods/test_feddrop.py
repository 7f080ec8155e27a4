from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, Attending, assert_same_bits, clients_view, run, server_view, watched

import fedstrata
from fedstrata.engines.loop import LoopEngine
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods
from fedstrata.stack import repeat
from fedstrata.testing.world import prepare
from fedstrata.wire import decode

NET = nn.Sequential(
    nn.Linear(2, 3), nn.Linear(3, 50), nn.ReLU(), nn.Linear(50, 40), nn.BatchNorm1d(40), nn.Linear(40, 2)
)
DEEP = LayerMap.read(NET, (2,))
PARAMETERS = {name: torch.ones(2, *tensor.shape) for name, tensor in NET.named_parameters()}


# By hand -------------------------------------------------------------------------------------------------------------


def test_units_are_dropped_whole_and_kept_ones_are_scaled_once():
    effective = methods.make("feddrop(rate=0.5)").effective(clients_view(DEEP, 2), PARAMETERS, 0)
    for name in ("0.weight", "0.bias", "5.weight", "5.bias"):  # the first and the last layer
        assert torch.equal(effective[name], PARAMETERS[name])
    plain = effective["1.bias"]  # without a norm the layer itself is scaled, its bias too
    assert set(plain.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(effective["1.weight"], plain[..., None].expand(2, 50, 3))
    normed = effective["4.bias"]  # with one, the norm is
    assert set(normed.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(effective["4.weight"], normed)
    assert torch.equal(effective["3.weight"], normed[..., None].expand(2, 40, 50) / 2)
    assert torch.equal(effective["3.bias"], normed / 2)
    assert not torch.equal(plain[0], plain[1])


@pytest.mark.parametrize(
    ("model", "shape", "names"),
    [
        (
            nn.Sequential(
                nn.Conv2d(1, 2, 3), nn.ConvTranspose2d(2, 3, 3), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(72, 2)
            ),
            (1, 8, 8), {"0.weight", "0.bias", "2.weight", "2.bias"},
        ),
        (Attending(), (1, 8, 8), {"patches.weight", "patches.bias", "mixing.weight", "mixing.bias"}),
    ],
)  # fmt: skip
def test_only_layers_whose_first_axis_is_units_are_dropped_and_never_the_last(model, shape, names):
    """Not a transposed convolution, not an attention, not a layer with the weight of another."""
    part, layers = methods.make("feddrop(rate=0.5, layers=all)"), LayerMap.read(model, shape)
    parameters = {name: tensor.detach() for name, tensor in model.named_parameters()}
    sent = part.broadcast(server_view(layers, parameters), Message(repeat(parameters, 1)))
    assert sent.masks.keys() == names


def test_dropped_units_have_no_gradient():
    parameters = {name: tensor.clone().requires_grad_() for name, tensor in PARAMETERS.items()}
    effective = methods.make("feddrop(rate=0.5)").effective(clients_view(DEEP, 2), parameters, 0)
    sum(tensor.sum() for tensor in effective.values()).backward()
    assert torch.equal(parameters["1.weight"].grad, effective["1.weight"].detach())


def test_server_and_clients_draw_the_same_and_every_round_anew():
    part = methods.make("feddrop(rate=0.5)")
    message = Message({name: tensor[:1] for name, tensor in PARAMETERS.items()})
    model = {name: tensor[0] for name, tensor in PARAMETERS.items()}
    sent = part.broadcast(server_view(DEEP, model, participants=(4, 7), clients=9), message)
    clients = clients_view(DEEP, 2, ids=(4, 7))
    assert sent.masks.keys() == {"1.weight", "1.bias", "3.weight", "3.bias", "4.weight", "4.bias"}
    effective = part.effective(clients, PARAMETERS, 0)
    for name, mask in sent.masks.items():
        assert torch.equal(effective[name] != 0, mask.expand_as(effective[name]))
    later = part.effective(clients_view(DEEP, 2, ids=(4, 7), round=2), PARAMETERS, 0)
    assert not torch.equal(later["1.bias"], effective["1.bias"])


def test_the_rate_is_the_probability():
    part = methods.make("feddrop(rate=0.3)")
    effective = part.effective(clients_view(DEEP, 200), repeat({n: t[0] for n, t in PARAMETERS.items()}, 200), 0)
    assert 0.67 < float((effective["1.bias"] != 0).double().mean()) < 0.73


# In a federation -----------------------------------------------------------------------------------------------------


@BOTH_ENGINES
def test_an_entry_is_the_mean_over_those_who_trained_it(engine):
    method, seen = watched("feddrop(rate=0.5)")
    simulation = run(method, engine, rounds=1)
    initial, new = simulation.setting.initial, simulation.engine.server.model
    sizes = torch.tensor([9.0, 16, 16, 5, 23]).double()
    loop = prepare("feddrop(rate=0.5)").engine
    masks = torch.stack([decode(data).masks["hidden.bias"][0] for data in loop.central.messages(range(5), 1)])
    assert 0 < int(masks.sum()) < masks.numel()
    for name in ("hidden.weight", "hidden.bias"):
        trained = torch.stack([seen.trained[1, client][name] for client in range(5)])
        for unit in range(8):
            share = sizes * masks[:, unit]
            own = trained[:, unit].reshape(5, -1)
            expected = initial[name][unit].flatten() if share.sum() == 0 else share @ own / share.sum()
            assert torch.allclose(new[name][unit].flatten(), expected, rtol=0, atol=1e-14)
            for client in range(5):
                assert bool(own[client].any()) == bool(masks[client, unit])


@BOTH_ENGINES
def test_what_belongs_to_a_dropped_unit_stays_as_it_was_also_where_it_is_personal(engine):
    changes = {"optimiser": "sgd(learning_rate=0.05, momentum=0.9, weight_decay=0.1, keep=true)"}
    method, seen = watched("fedbn+feddrop(rate=0.5)")
    simulation = run(method, engine, rounds=2, **changes)
    resident = simulation.engine.clients().group("own")
    loop = prepare("fedbn+feddrop(rate=0.5)").engine
    changed = 0
    for client, data in enumerate(loop.central.messages(range(5), 2)):
        mask = decode(data).masks["shortcut.0.weight"].flatten()
        for name in ("shortcut.1.weight", "shortcut.1.bias", "shortcut.1.running_mean", "shortcut.1.running_var"):
            before, after = seen.received[2, client][name], resident[name][client]
            assert torch.equal(before[~mask], after[~mask])
            changed += int((before[mask] != after[mask]).sum())
    assert changed > 10


def test_the_whole_model_is_tested_and_subnets_travel():
    simulation = run("feddrop(rate=0.5)", rounds=1)
    engine = simulation.engine
    assert isinstance(engine, LoopEngine)
    [tested] = set(engine.central.messages(range(5), 2, testing=True))
    assert not decode(tested).masks
    assert "global.accuracy" in simulation.metrics.latest()
    messages = engine.central.messages(range(5), 2)
    replies = [engine.members[client].answer(message, 2)[0] for client, message in enumerate(messages)]
    assert len(set(messages)) == 5
    for down, up in zip(messages, replies, strict=True):
        left, right = decode(down).masks, decode(up).masks
        assert left.keys() == {
            "body.weight", "shortcut.0.weight", "hidden.weight", "hidden.bias", "shortcut.1.weight", "shortcut.1.bias",
            "shortcut.1.running_mean", "shortcut.1.running_var",
        }  # fmt: skip
        assert_same_bits(left, right)


@BOTH_ENGINES
def test_dropped_units_cost_no_bytes(engine):
    text = "feddrop(rate=0.9, layers=hidden)"
    dropped, plain = (run(method, engine, rounds=1).metrics.latest() for method in (text, "fedavg"))
    loop = prepare(text).engine
    kept = sum(int(decode(data).masks["hidden.bias"].sum()) for data in loop.central.messages(range(5), 1))
    values = 8 * (5 * 8 - kept) * (16 + 1)
    for way in ("bytes.up", "bytes.down"):
        assert values - 5 * 2 * 20 < plain[way] - dropped[way] < values


@BOTH_ENGINES
def test_without_a_rate_it_is_fedavg_also_in_bytes(engine):
    left, right = run("feddrop(rate=0)", engine), run("fedavg", engine)
    assert_same_bits(left.engine.server.model, right.engine.server.model)
    assert left.metrics.latest() == right.metrics.latest()


def test_a_model_without_middle_layers_is_told():
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.warns(FedStrataWarning, match="no units to drop in 'middle' layers, so 'feddrop' does what 'fedavg'"):
        fedstrata.run(model=model, method="feddrop", clients=3, rounds=1, epochs=1, engine="loop")


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        ("ssfl", "each of them puts weights to values of its own"),
        ("transient", "each of them puts weights to values of its own"),
        ("player", "each of them decides which layers travel"),
        (
            "scaffold",
            "'feddrop' decides which layers travel, and 'scaffold' needs all shared layers of all participants",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(other, sentence):
    with pytest.raises(FedStrataError, match=sentence):
        Method.make(f"feddrop+{other}")
