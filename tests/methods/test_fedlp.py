from __future__ import annotations

import pytest
import torch
from watching import BOTH_ENGINES, assert_same_bits, clients_view, run, training_view, watched

from fedstrata.engines.loop import LoopEngine
from fedstrata.errors import FedStrataError
from fedstrata.methods import Message, Method, methods
from fedstrata.stack import repeat, weighted_mean
from fedstrata.testing.world import prepare
from fedstrata.wire import decode

BLOCKS = {
    "stem": {"stem", "scale"}, "body": {"body"}, "shortcut": {"shortcut.0", "shortcut.1"}, "hidden": {"hidden"},
    "head": {"head"},
}  # fmt: skip


def replies(text="fedlp(probability=0.5)", clients=5, round=1):
    """Take what clients send after local training, decoded."""
    engine = prepare(text).engine
    assert isinstance(engine, LoopEngine)
    messages = engine.central.messages(range(clients), round)
    return [decode(engine.members[client].answer(messages[client], round)[0]) for client in range(clients)]


def block_of(name: str) -> str:
    layer = name.rpartition(".")[0]
    return next(block for block, layers in BLOCKS.items() if layer in layers)


def test_a_layer_is_sent_whole_with_its_norm_or_not_at_all():
    drawn = []
    for message in replies():
        assert message.masks.keys() == message.tensors.keys()
        sent = [{bool(message.masks[name]) for name in message.tensors if block_of(name) == block} for block in BLOCKS]
        assert all(len(values) == 1 for values in sent)
        drawn.append(tuple(values.pop() for values in sent))
        for name, tensor in message.tensors.items():
            assert bool(message.masks[name]) or not tensor.any()
    assert len(set(drawn)) > 2


def test_layers_are_drawn_for_each_client_and_round_with_the_probability():
    setting = prepare("fedlp").setting
    message = Message(repeat(setting.initial, 400))
    part = methods.make("fedlp(probability=0.7)")
    training = training_view({"x": torch.zeros(400)}, {})
    masks = [
        part.upload(clients_view(setting.layers, 400, round=round), training, message).masks["body.weight"].flatten()
        for round in (1, 1, 2)
    ]
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])
    assert 0.63 < float(masks[0].double().mean()) < 0.77


@BOTH_ENGINES
def test_a_layer_is_averaged_over_those_who_sent_it(engine):
    method, seen = watched("fedlp(probability=0.3)")
    simulation = run(method, engine, rounds=1)
    sizes = torch.tensor([9.0, 16, 16, 5, 23])
    sent = replies("fedlp(probability=0.3)")
    kept = {name: torch.cat([message.masks[name] for message in sent]) for name in ("stem.weight", "head.weight")}
    assert not any(mask.all() for mask in kept.values())
    for name, mask in kept.items():
        clients = torch.stack([seen.trained[1, client][name] for client in range(5)])
        expected = weighted_mean(clients, sizes, mask, simulation.setting.initial[name])
        assert torch.allclose(simulation.engine.server.model[name], expected, rtol=0, atol=1e-14)


def test_what_nobody_sends_stays_as_it_was():
    simulation = run("fedlp(probability=1e-9)", rounds=2)
    assert_same_bits(simulation.engine.server.model, simulation.setting.initial)


@BOTH_ENGINES
def test_with_probability_one_it_is_fedavg_also_in_bytes(engine):
    left, right = run("fedlp(probability=1)", engine), run("fedavg", engine)
    assert_same_bits(left.engine.server.model, right.engine.server.model)
    assert left.metrics.latest() == right.metrics.latest()


@BOTH_ENGINES
def test_only_the_layers_drawn_cost_bytes_and_only_in_the_upload(engine):
    left, right = (run(text, engine, rounds=1).metrics.latest() for text in ("fedlp(probability=0.5)", "fedavg"))
    missing = sum(
        tensor.numel() * tensor.element_size()
        for message in replies()
        for name, tensor in message.tensors.items()
        if not message.masks[name]
    )
    tensors = len(prepare("fedavg").setting.initial)
    assert left["bytes.down"] == right["bytes.down"]
    saved = right["bytes.up"] - left["bytes.up"]
    assert missing - 5 * 12 * tensors < saved < missing
    assert missing > 0.2 * right["bytes.up"]


def test_with_fedbn_norms_stay_home():
    for message in replies("fedlp(probability=0.5)+fedbn"):
        assert not any(name.startswith(("scale", "shortcut.1")) for name in message.tensors)


def test_under_a_shared_mask_both_decide_what_travels():
    for text in ("ssfl(sparsity=0.5)+fedlp(probability=0.5)", "fedlp(probability=0.5)+ssfl(sparsity=0.5)"):
        simulation = run(text, rounds=2)
        assert isinstance(simulation.engine, LoopEngine)
        mask = simulation.engine.server.memory["ssfl/mask/body.weight"]
        assert 0 < int(mask.sum()) < mask.numel()
        messages = simulation.engine.central.messages(range(5), 3)
        sent = set()
        for client, message in enumerate(messages):
            reply, _ = simulation.engine.members[client].answer(message, 3)
            kept = simulation.engine.central.decoded(reply, client, 3).masks["body.weight"][0]
            assert torch.equal(kept, mask) or not kept.any()
            sent.add(bool(kept.any()))
        assert sent == {True, False}


@pytest.mark.parametrize("other", ["player", "freeze-middle", "fedlama", "feddrop", "local"])
def test_others_that_decide_which_layers_travel_are_refused(other):
    with pytest.raises(FedStrataError, match="each of them decides which layers travel"):
        Method.make(f"fedlp+{other}")
