from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, assert_same_bits, clients_view, layer_values, outlined, run, server_view, watched

from fedstrata.engines.loop import LoopEngine
from fedstrata.errors import FedStrataError
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method
from fedstrata.testing.world import prepare
from fedstrata.wire import decode

THREE = LayerMap.read(nn.Sequential(nn.Linear(4, 1, bias=False), nn.Linear(1, 2), nn.Linear(2, 1, bias=False)), (4,))
MODEL = {
    "0.weight": torch.zeros(1, 4), "1.weight": torch.zeros(2, 1), "1.bias": torch.zeros(2),
    "2.weight": torch.zeros(1, 2),
}  # fmt: skip
ORDER = ["stem", "body", "shortcut.0", "hidden", "head"]


def replies(*distances: float) -> Message:
    """Two clients, each this far from the mean in every entry of the three weights, and very far in the bias."""
    signs = torch.tensor([1.0, -1.0])
    spread = dict(zip(("0.weight", "1.weight", "2.weight"), distances, strict=True)) | {"1.bias": 1000.0}
    return Message({name: signs.view(2, *[1] * MODEL[name].dim()) * value * torch.ones(2, *MODEL[name].shape)
                    for name, value in spread.items()})  # fmt: skip


def waits(text: str, waited: list[bool], round: int, *distances: float) -> list[bool]:
    method = Method.make(text)
    memory = {"fedlama/waits": torch.tensor(waited)}
    _, memory = method.aggregate(server_view(THREE, MODEL, round=round, memory=memory), replies(*distances))
    return memory["fedlama/waits"].tolist()


# By hand -------------------------------------------------------------------------------------------------------------


def test_the_layers_with_the_least_discrepancy_for_their_size_wait():
    """d = (1, 4, 9): delta = 4/30, 12/30 and 1 - lambda = 4/8, 2/8: the second layer crosses, and waits too."""
    assert waits("fedlama(warmup=0)", [False] * 3, 2, 1.0, 2.0, 3.0) == [True, True, False]
    assert waits("fedlama(warmup=0)", [False] * 3, 2, 3.0, 2.0, 1.0) == [True, True, True]


def test_a_discrepancy_grows_with_the_interval():
    """After an interval of 2 the first layer's d is 12.5 / 2 = 6.25 instead of 12.5, and it comes before the third."""
    far = 12.5**0.5
    assert waits("fedlama(warmup=0)", [False] * 3, 4, far, 1.0, 3.0) == [True, True, True]
    assert waits("fedlama(warmup=0)", [True, False, False], 4, far, 1.0, 3.0) == [True, True, False]


def test_an_interval_of_two_halves_the_discrepancy():
    """17 / 2 lies below the third layer's 9, and 20 / 2 above."""
    assert waits("fedlama(warmup=0)", [True, False, False], 4, 17**0.5, 1.0, 3.0) == [True, True, False]
    assert waits("fedlama(warmup=0)", [True, False, False], 4, 20**0.5, 1.0, 3.0) == [True, True, True]


def test_clients_are_compared_with_their_mean_in_double_precision():
    """Both clients are 10, 20 or 30 further; and squares of 1e20 are beyond float32."""
    method = Method.make("fedlama(warmup=0)")
    for shift, scale in ((10.0, 1.0), (0.0, 1e20)):
        sent = {name: (tensor + shift) * scale for name, tensor in replies(1.0, 2.0, 3.0).tensors.items()}
        server = server_view(THREE, MODEL, round=2, memory={"fedlama/waits": torch.tensor([False] * 3)})
        assert method.aggregate(server, Message(sent))[1]["fedlama/waits"].tolist() == [True, True, False]


def test_entries_that_a_client_did_not_send_do_not_count():
    """In the first layer only one client sent anything: it is the mean itself, and the other's zeros are not far."""
    sent = replies(100.0, 2.0, 3.0)
    masks = {"0.weight": torch.tensor([True, False]).view(2, 1, 1)}
    server = server_view(THREE, MODEL, round=2, memory={"fedlama/waits": torch.tensor([False] * 3)})
    _, memory = Method.make("fedlama(warmup=0)").aggregate(server, Message(sent.tensors, masks))
    assert memory["fedlama/waits"].tolist() == [True, True, False]


def test_no_layer_waits_at_first():
    part, clients = Method.make("fedlama").parts[0], clients_view(THREE, 2)
    assert part.client_memory(clients, {})["waits"].tolist() == [[False] * 3] * 2
    assert part.server_memory(server_view(THREE, MODEL))["waits"].tolist() == [False] * 3


def test_intervals_change_only_when_all_layers_came_and_after_the_warmup():
    assert waits("fedlama(warmup=0)", [False] * 3, 3, 1.0, 2.0, 3.0) == [False, False, False]
    assert waits("fedlama(factor=3, warmup=0)", [False] * 3, 3, 1.0, 2.0, 3.0) == [True, True, False]
    assert waits("fedlama", [False] * 3, 6, 1.0, 2.0, 3.0) == [False, False, False]
    assert waits("fedlama", [False] * 3, 8, 1.0, 2.0, 3.0) == [True, True, False]


@pytest.mark.parametrize(
    ("text", "rounds"), [("fedlama", 10), ("fedlama(warmup=0)", 4), ("fedlama(factor=4)", 10), ("fedlama(factor=7)", 9)]
)
def test_too_few_rounds_for_a_layer_to_wait_are_announced(text, rounds):
    """Decided is after round 8, 2, 8 or 7; the round after it must not be the last one, which aggregates all."""
    method = Method.make(text)
    assert list(method.parts[0].notes(outlined(THREE, rounds))) == []
    [note] = method.parts[0].notes(outlined(THREE, rounds - 1))
    assert f"in {rounds - 1} rounds none does" in note
    assert f"at least {rounds} rounds" in note


@pytest.mark.filterwarnings("ignore::fedstrata.errors.FedStrataWarning")
def test_the_note_is_right_about_when_a_layer_waits():
    """With four rounds and no warm-up something stays at home in round 3; with three rounds nothing ever does."""
    for rounds, expected in ((3, False), (4, True)):
        simulation = run("fedlama(warmup=0)", rounds=rounds)
        up = simulation.metrics.series("bytes.up")[1]
        assert (len(set(up.tolist())) > 1) == expected


# In a federation -----------------------------------------------------------------------------------------------------


def waiting_after(simulation, round: int) -> list[str]:
    return [layer for layer, interval in layer_values(simulation, "interval", round).items() if interval > 1]


@BOTH_ENGINES
def test_layers_that_wait_go_on_where_each_client_left_them(engine):
    method, seen = watched("fedlama(warmup=0)")
    simulation = run(method, engine, rounds=5)
    assert waiting_after(simulation, 1) == []
    waiting = waiting_after(simulation, 2)
    assert 0 < len(waiting) < len(ORDER)
    for layer in ORDER:
        name = f"{layer}.weight"
        third, fourth, fifth = ([seen.received[round, client][name] for client in range(5)] for round in (3, 4, 5))
        for same in (third, fifth):  # all layers are aggregated after rounds 2 and 4
            assert all(torch.equal(same[0], other) for other in same)
        for client in range(5):
            own = torch.equal(fourth[client], seen.trained[3, client][name])
            assert own == (layer in waiting)
        mean = sum(share * seen.trained[4, client][name] for client, share in enumerate(simulation.split.sizes / 69))
        assert torch.allclose(fifth[0], mean, rtol=0, atol=1e-14)


def test_only_layers_that_are_due_travel_and_each_message_says_which_wait():
    simulation = prepare("fedlama(warmup=0)", rounds=9, epochs=1, evaluate_every=9)
    for _ in range(2):
        simulation.step()
    names = set(simulation.setting.initial)
    waiting = {f"{layer}.weight" for layer in waiting_after(simulation, 2)}
    engine = simulation.engine
    assert isinstance(engine, LoopEngine)
    message = engine.central.messages([0], 3)[0]
    reply, _ = engine.members[0].answer(message, 3)
    later = engine.central.messages([0], 4)[0]
    answer, _ = engine.members[0].answer(later, 4)
    sent = [set(decode(data).tensors) for data in (message, reply, later, answer)]
    assert sent == [names | {"fedlama/waits"}, names - waiting, names - waiting | {"fedlama/waits"}, names]
    assert len(reply) < len(answer) - 8 * sum(simulation.setting.initial[name].numel() for name in waiting)


@BOTH_ENGINES
def test_bytes_are_those_of_the_layers_that_are_due(engine):
    simulation = run("fedlama(warmup=0)", engine, rounds=5)
    waiting = [f"{layer}.weight" for layer in waiting_after(simulation, 2)]
    values = 5 * 8 * sum(simulation.setting.initial[name].numel() for name in waiting)
    up, down = (simulation.metrics.series(f"bytes.{way}")[1] for way in ("up", "down"))
    assert values < up[1] - up[2] < values + 5 * 40 * len(waiting)
    assert values < down[2] - down[3] < values + 5 * 40 * len(waiting)
    assert up[1] == up[3] == up[4]  # the last round aggregates all


@BOTH_ENGINES
def test_with_a_factor_of_one_it_is_fedavg(engine):
    left, right = run("fedlama(factor=1)", engine), run("fedavg", engine)
    assert_same_bits(left.engine.server.model, right.engine.server.model)


def test_participants_change_only_when_all_layers_were_aggregated():
    side = prepare("fedlama(factor=3)", rounds=11).engine.side
    chosen = [side.select(0.4, round) for round in range(1, 10)]
    assert chosen[0] == chosen[1] == chosen[2]
    assert chosen[3] == chosen[4] == chosen[5]
    assert chosen[6] == chosen[7] == chosen[8]
    assert len({chosen[0], chosen[3], chosen[6]}) > 1
    assert chosen[0] == prepare("fedavg").engine.side.select(0.4, 1)


def test_with_fedbn_and_a_server_optimiser():
    simulation = run("fedlama(warmup=0)+fedbn+fedadam", rounds=4)
    assert waiting_after(simulation, 2)
    assert not any("scale" in name for name in simulation.engine.server.model)


@pytest.mark.parametrize("other", ["player", "freeze-middle", "fedlp"])
def test_others_that_decide_which_layers_travel_are_refused(other):
    with pytest.raises(FedStrataError, match="each of them decides which layers travel"):
        Method.make(f"fedlama+{other}")
