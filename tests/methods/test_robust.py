"""Methods that withstand clients which lie within the rules, and the lies."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, outlined, run, server_view, watched

import fedstrata
from fedstrata.deployment.rules import Rules
from fedstrata.deployment.server import Deployment
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.functional import coordinate_median, geometric_median_shares, krum_scores
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method
from fedstrata.testing.world import digits, prepare, unequal_split

ROBUST = ["median", "trimmed-mean", "krum", "multi-krum", "rfa", "norm-bound", "fltrust"]
NORMED = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1)), (2,))
MODEL = {
    "0.weight": torch.tensor([[1.0, 0.0]]), "1.weight": torch.ones(1), "1.bias": torch.zeros(1),
    "1.running_mean": torch.zeros(1), "1.running_var": torch.ones(1), "1.num_batches_tracked": torch.tensor(0),
}  # fmt: skip
MOVES = torch.tensor([0.0, 1.0, 2.0, 4.0, 900.0])


def five_replies(moves=MOVES, **changes):
    """Five clients, of which each moves every entry by a number of its own; all have counted five batches."""
    tensors = {
        name: torch.stack([tensor + move for move in moves]) if tensor.is_floating_point() else torch.full((5,), 5)
        for name, tensor in MODEL.items()
    }
    return Message({**tensors, **changes})


def merged(text, replies, **changes):
    """Merge five replies, of which the last declares as many samples as it likes."""
    server = server_view(
        NORMED, MODEL, participants=tuple(range(5)), clients=5, sizes=torch.tensor([10, 10, 10, 10, 10**6]),
        label_counts=torch.zeros(5, 1), **changes,
    )  # fmt: skip
    return Method.make(text).aggregate(server, replies)[0]


# By hand --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "move"),
    [
        ("median", 2.0),
        ("trimmed-mean", 907 / 5),
        ("trimmed-mean(trim=0.2)", 7 / 3),
        ("krum", 1.0),
        ("krum(byzantine=1)", 1.0),
        ("krum(byzantine=0)", 2.0),
        ("multi-krum", 0.5),
        ("multi-krum(byzantine=1)", 0.5),
        ("multi-krum(byzantine=1, keep=3)", 1.0),
        ("multi-krum(keep=4)", 7 / 4),
    ],
)
def test_by_hand(text, move):
    """Every entry moves alike, whatever the last client says of its samples, and counters are the median."""
    new = merged(text, five_replies())
    for name, tensor in MODEL.items():
        wanted = tensor + move if tensor.is_floating_point() else torch.tensor(5)
        torch.testing.assert_close(new[name], wanted, msg=name)


def test_rfa_by_hand():
    """The first step begins at the model that was sent: shares by one over the lengths sqrt(6) * 1, 2, 4 and 900.

    Who has not moved is 1e-5 away at least, so that all but its share is left for nobody else.
    """
    weights = [1e5, *(1 / (math.sqrt(6) * move) for move in (1, 2, 4, 900))]
    move = sum(weight * of for weight, of in zip(weights, MOVES.tolist(), strict=True)) / sum(weights)
    new = merged("rfa(iterations=1)", five_replies())
    assert new["1.weight"].item() == pytest.approx(1 + move)
    assert new["1.num_batches_tracked"].item() == 5


def test_norm_bound_by_hand():
    """Six entries that move alike: lengths are sqrt(6) times the moves; the median length is that of 2."""
    new = merged("norm-bound", five_replies())
    torch.testing.assert_close(new["1.bias"], torch.tensor([(0 + 1 + 2 + 2 + 2) / 5]))
    new = merged(f"norm-bound(bound={math.sqrt(6) / 2})", five_replies())
    torch.testing.assert_close(new["0.weight"], MODEL["0.weight"] + 4 * 0.5 / 5)
    assert new["1.num_batches_tracked"].item() == 5


@pytest.mark.parametrize("text", ["median", "krum", "multi-krum", "trimmed-mean(trim=0.2)", "rfa", "norm-bound"])
def test_only_what_was_sent_under_a_common_mask_is_merged(text):
    mask = torch.tensor([[[True, False]]])
    weight = torch.tensor([[[1.0 + move, 0.0]] for move in MOVES.tolist()])
    new = merged(text, Message({**five_replies().tensors, "0.weight": weight}, {"0.weight": mask}))
    whole = merged(text, Message({**five_replies().tensors, "0.weight": weight}))
    assert new["0.weight"][0, 1].item() == 0.0
    torch.testing.assert_close(new["0.weight"], whole["0.weight"])


@pytest.mark.attack(
    "A client's reply holds NaN or infinite numbers, numbers near the largest there are, or counters of 2**62.",
    "Every robust method leaves it out or bounds it; the model stays finite, and near the honest ones.",
)
@pytest.mark.parametrize("lie", [math.nan, math.inf, -3e38])
@pytest.mark.parametrize("text", ["median", "trimmed-mean(trim=0.2)", "krum", "multi-krum", "rfa", "norm-bound"])
def test_numbers_without_measure_do_not_reach_the_model(text, lie):
    counted = torch.tensor([5, 5, 5, 5, 2**62])
    new = merged(text, five_replies(torch.tensor([1.0, 1.5, 2.0, 3.0, lie]), **{"1.num_batches_tracked": counted}))
    for name, tensor in MODEL.items():
        assert torch.isfinite(new[name]).all()
        assert float((new[name] - tensor).abs().max()) <= 5, name


def test_where_all_replies_are_nonsense_the_model_stays():
    for text in ("median", "trimmed-mean", "krum", "multi-krum", "rfa", "norm-bound"):
        new = merged(text, five_replies(torch.full((5,), math.nan)))
        assert all(torch.equal(new[name], MODEL[name]) for name in MODEL if MODEL[name].is_floating_point()), text


# Too few clients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["krum", "multi-krum"])
def test_too_few_participants_are_refused_before_the_run(name):
    with pytest.raises(FedStrataError) as caught:
        fedstrata.run(method=f"{name}(byzantine=4)", data="digits", clients=20, participation=0.5, rounds=1)
    assert str(caught.value) == (
        f"'{name}(byzantine=4)' needs more than 2 x 4 + 2 replies to tell 4 liars, and a round has 10 participants; "
        "give byzantine=3 or less, or more participants."
    )
    with pytest.raises(FedStrataError, match="a round has 10 participants"):
        fedstrata.run(method=f"{name}(byzantine=4)", data="digits", clients=12, late_clients=2, join_round=2, rounds=3)
    Method.make(f"{name}(byzantine=4)").notes(outlined(NORMED, participants=11))


def test_to_believe_more_than_the_honest_is_refused():
    with pytest.raises(FedStrataError, match="believes 17 clients, but of 20 participants only 16 are"):
        Method.make("multi-krum(byzantine=4, keep=17)").notes(outlined(NORMED))
    assert Method.make("multi-krum(byzantine=4, keep=16)").notes(outlined(NORMED)) == []


@pytest.mark.parametrize(
    ("text", "participants", "said"),
    [
        ("median", 2, "of fewer than three participants is their mean"),
        ("trimmed-mean", 9, "leaves nobody out: 0.1 of 9 participants is less than one"),
        ("krum", 4, "with 4 participants withstands no liar; from five participants on it does"),
        ("attack(clients=20)", 20, "lets all clients lie"),
        ("attack(kind=alie, clients=1)", 20, "one client alone has no deviation to hide in"),
    ],
)
def test_what_would_do_nothing_is_said_before_the_run(text, participants, said):
    [note] = Method.make(text).notes(outlined(NORMED, participants=participants))
    assert said in note
    assert Method.make(text.partition("(")[0]).notes(outlined(NORMED, participants=20)) == []


@pytest.mark.attack(
    "So many sites stay away from a round that Krum could no longer tell the liars among the rest.",
    "The model of that round stays as it was, and a metric says so; the run goes on.",
)
def test_where_too_few_replies_are_left_the_model_stays():
    method = Method.make("krum(byzantine=1)")
    replies = five_replies().rows(torch.tensor([1, 2, 3, 4]))
    server = server_view(NORMED, MODEL, participants=(1, 2, 3, 4), clients=5, sizes=torch.ones(4))
    new, _ = method.aggregate(server, replies)
    assert all(torch.equal(new[name], tensor) for name, tensor in MODEL.items())
    assert method.metrics(server) == {"krum.too_few": 1.0}
    assert method.metrics(server_view(NORMED, MODEL, participants=tuple(range(5)))) == {"krum.too_few": 0.0}


# What they can stand beside -------------------------------------------------------------------------------------------


@pytest.mark.attack(
    "A method that must look at single replies is asked to run under secure aggregation, where the server sees sums.",
    "It is refused before anything starts, with that reason.",
)
@pytest.mark.parametrize("name", ROBUST)
def test_what_looks_at_single_replies_is_refused_under_secure_aggregation(name, tmp_path):
    experiment = Experiment(method=name, data="digits", rounds=1, clients=5)
    deployment = Deployment(
        experiment, [f"site-{n}" for n in range(5)], tmp_path, rules=Rules(secure=True), rehearsal=True
    )
    with pytest.raises(FedStrataError) as caught:
        deployment.check()
    assert str(caught.value) == (
        f"'{name}' cannot run with secure aggregation: '{name}' looks at the replies of single clients. Run it "
        "without, or choose another method."
    )


@pytest.mark.parametrize("name", ROBUST)
@pytest.mark.parametrize("other", ["top-k", "random-k", "fedlp", "subfedavg"])
def test_beside_entries_of_ones_own_a_liar_would_be_alone(name, other):
    with pytest.raises(FedStrataError, match="cannot be combined"):
        Method.make(f"{name}+{other}")
    with pytest.raises(FedStrataError, match="lets each client send entries of its own, and 'median' bounds what a"):
        Method.make("median+top-k")


@pytest.mark.parametrize("name", [name for name in ROBUST if name != "norm-bound"])
@pytest.mark.parametrize("other", ["lws", "scaffold", "fedlaw", "l-dawa", "feddisco"])
def test_what_lets_liars_in_by_another_door_is_refused(name, other):
    with pytest.raises(FedStrataError, match="cannot be combined"):
        Method.make(f"{name}+{other}")


def test_the_reason_is_said():
    with pytest.raises(FedStrataError) as caught:
        Method.make("median+lws")
    assert (
        "'lws' goes by what every single client sent, liars too, and 'median' keeps single replies from deciding"
        in str(caught.value)
    )


@pytest.mark.parametrize("text", ["median+fedbn", "krum+lips", "rfa+ssfl", "fltrust+fedprox", "norm-bound+lws",
                                  "trimmed-mean+fedadam", "attack+multi-krum+fedbn"])  # fmt: skip
def test_what_fits_is_taken(text):
    assert str(Method.make(text)) == text


# In a run -------------------------------------------------------------------------------------------------------------


@BOTH_ENGINES
def test_runs_merge_by_the_papers_mathematics(engine):
    for text in ("median", "rfa(iterations=2)", "krum(byzantine=1)"):
        method, seen = watched(text)
        model = run(method, engine, rounds=1).engine.server.model
        old = seen.received[1, 0]
        trained = {name: torch.stack([seen.trained[1, client][name] for client in range(5)]) for name in old}
        updates = [trained[name] - old[name] for name in old if old[name].is_floating_point()]
        shares = torch.zeros(5, dtype=torch.float64)
        shares[krum_scores(updates, 1).argmin()] = 1
        shares = geometric_median_shares(updates, 2) if text.startswith("rfa") else shares
        for name in (name for name in old if old[name].is_floating_point()):
            expected = torch.einsum("k,k...->...", shares, trained[name])
            expected = coordinate_median(trained[name]) if text == "median" else expected
            torch.testing.assert_close(model[name], expected, rtol=0, atol=1e-12, msg=f"{text}: {name}")


def test_fltrust_steps_as_far_as_the_server_and_keeps_its_statistics():
    fitted = prepare("fltrust(samples=30, epochs=2, batch_size=16)", "loop")
    before = fitted.engine.server.model
    fitted.step()
    after, part = fitted.engine.server.model, fitted.method.parts[0]
    server = fitted.engine.side.view(fitted.engine.server, range(5), 1)
    own, buffers = part._trained(replace(server, model=before), server.proxy)
    length = torch.stack([(own[name] - before[name]).norm() for name in own]).norm()
    step = torch.stack([(after[name] - before[name]).norm() for name in own]).norm()
    assert 0.1 * length < step <= length * (1 + 1e-9)
    assert all(torch.equal(after[name], tensor) for name, tensor in buffers.items())
    assert buffers["scale.num_batches_tracked"].item() == 4


def test_fltrust_without_samples_at_the_server_says_so(tmp_path):
    experiment = Experiment(method="fltrust", data="digits", rounds=1, clients=5)
    with pytest.raises(FedStrataError, match="needs labelled samples at the server, which a server of real sites"):
        Deployment(experiment, [f"site-{n}" for n in range(5)], tmp_path).check()


# Lies -----------------------------------------------------------------------------------------------------------------


def lied(text, moves=(1.0, 3.0, 0.0, 0.0, 0.0)):
    """Let clients lie about their replies; tell by how much each then moves a bias."""
    part = Method.make(f"attack({text})").parts[0]
    server = server_view(NORMED, MODEL, participants=tuple(range(5)), clients=5, sizes=torch.ones(5))
    return part.admit(server, five_replies(torch.tensor(moves)))


@pytest.mark.parametrize(
    ("text", "moves"),
    [
        ("kind=sign-flip", [-1, -3, 0, 0, 0]),
        ("kind=sign-flip, strength=5, clients=1", [-5, 3, 0, 0, 0]),
        ("kind=scale", [10, 30, 0, 0, 0]),
        ("kind=alie", [2 - 1.5, 2 - 1.5, 0, 0, 0]),
        ("kind=alie, strength=1, clients=3", [4 / 3 - math.sqrt(14 / 9)] * 3 + [0, 0]),
        ("kind=label-flip", [1, 3, 0, 0, 0]),
    ],
)
def test_what_liars_send(text, moves):
    replies = lied(text)
    assert replies.tensors["1.bias"][:, 0].tolist() == pytest.approx(moves)
    assert replies.tensors["1.num_batches_tracked"].tolist() == [5] * 5
    assert float(replies.tensors["1.running_var"].min()) >= 0


def test_noise_is_of_each_liar_and_can_be_repeated():
    first, second = (lied("kind=noise, strength=2").tensors["0.weight"] for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(first[0], first[1])
    assert first[2:].tolist() == [[[1.0, 0.0]]] * 3


def test_liars_whose_training_diverged_do_not_end_the_run():
    for kind in ("sign-flip", "scale", "alie", "noise"):
        assert lied(f"kind={kind}", (math.nan, 1.0, 0.0, 0.0, 0.0)).tensors["1.bias"][2:, 0].tolist() == [0.0] * 3


def test_lies_stay_under_the_mask():
    part = Method.make("attack(kind=noise)").parts[0]
    server = server_view(NORMED, MODEL, participants=tuple(range(5)), clients=5, sizes=torch.ones(5))
    mask = torch.tensor([[[True, False]]])
    sent = part.admit(server, Message({"0.weight": torch.tensor([[[1.0, 0.0]]] * 5)}, {"0.weight": mask}))
    assert sent.tensors["0.weight"][:, 0, 1].tolist() == [0.0] * 5
    assert sent.tensors["0.weight"][0, 0, 0].item() != 1.0


def test_liars_lie_before_the_server_looks_whatever_the_order():
    moves = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0])
    for text in ("attack(kind=scale)+norm-bound", "norm-bound+attack(kind=scale)"):
        torch.testing.assert_close(merged(text, five_replies(moves))["1.bias"], torch.tensor([2.0]))


@BOTH_ENGINES
def test_who_flips_labels_trains_on_others(engine):
    """As if the labels of their samples were others: digit d for 9 - d."""
    data = digits()
    false, labels = np.concatenate(unequal_split(data).train[:2]), data.labels.clone()
    labels[false] = 9 - labels[false]
    lying = run("attack(kind=label-flip, clients=2)", engine, rounds=2)
    misled = run("fedavg", engine, rounds=2, dataset=replace(data, labels=labels))
    for name, tensor in misled.engine.server.model.items():
        torch.testing.assert_close(lying.engine.server.model[name], tensor, rtol=0, atol=1e-12)


def test_label_flips_are_beside_no_other_loss_and_have_no_strength():
    with pytest.raises(FedStrataError, match="each of them decides the local loss"):
        Method.make("attack(kind=label-flip)+fedir")
    assert str(Method.make("attack(kind=sign-flip)+fedir")) == "attack+fedir"
    with pytest.raises(FedStrataError, match="label-flip has no strength"):
        Method.make("attack(kind=label-flip, strength=2)")
    with pytest.raises(FedStrataError, match="the parameter 'kind' of the method 'attack'"):
        Method.make("attack(kind=bribe)")


def test_more_liars_than_clients_are_refused():
    with pytest.raises(FedStrataError, match="lets 6 clients lie, and there are 5"):
        prepare("attack(clients=6)")


@pytest.mark.attack(
    "Four of twenty clients send ten times their update, or five times its opposite.",
    "FedAvg loses most of what it has learned; median, Multi-Krum and RFA stay within five points of no attack.",
)
@pytest.mark.filterwarnings("ignore::fedstrata.FedStrataWarning")
def test_robust_methods_withstand_what_fedavg_does_not(record_property):
    small = {"data": "digits", "model": "mlp(hidden=32)", "partition": "iid", "rounds": 4, "epochs": 2}
    small |= {"engine": "stacked", "clients": 20}
    reached = {}
    for lie in ("scale, strength=10", "sign-flip, strength=5"):
        attack = f"attack(kind={lie}, clients=4)"
        for text in ("median", "multi-krum(byzantine=4)", "rfa"):
            plain, robust = (
                fedstrata.run(method=one, **small).metrics.latest()["global.accuracy"]
                for one in (text, f"{text}+{attack}")
            )
            assert robust > plain - 0.05, (text, lie)
        reached[lie] = fedstrata.run(method=attack, **small).metrics.latest()["global.accuracy"]
        assert reached[lie] < 0.6
    record_property("measured", f"FedAvg {100 * min(reached.values()):.0f} to {100 * max(reached.values()):.0f} %")


def test_warnings_are_those_of_the_package():
    with pytest.warns(FedStrataWarning, match="withstands no liar"):
        prepare("krum", participation=0.4)
