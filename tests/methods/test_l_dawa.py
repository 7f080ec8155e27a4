from __future__ import annotations

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, outlined, run, server_view, watched

from fedstrata.errors import FedStrataError
from fedstrata.functional import ldawa
from fedstrata.layers import LayerMap
from fedstrata.methods import Message, Method, methods

NORMED = LayerMap.read(nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1)), (2,))
MODEL = {
    "0.weight": torch.tensor([[1.0, 0.0]]), "1.weight": torch.ones(1), "1.bias": torch.zeros(1),
    "1.running_mean": torch.zeros(1), "1.running_var": torch.ones(1), "1.num_batches_tracked": torch.tensor(0),
}  # fmt: skip
REPLIES = Message(
    {
        "0.weight": torch.tensor([[[2.0, 0.0]], [[3.0, 4.0]]]), "1.weight": torch.tensor([[1.0], [3.0]]),
        "1.bias": torch.tensor([[1.0], [3.0]]), "1.running_mean": torch.tensor([[10.0], [20.0]]),
        "1.running_var": torch.tensor([[1.0], [2.0]]), "1.num_batches_tracked": torch.tensor([4, 6]),
    }
)  # fmt: skip


def test_by_hand():
    """Cosines 1 and .6 whatever the sizes; a bias of zeros is averaged; the norm's statistics follow its layer."""
    new, _ = Method.make("l-dawa(warmup=0)").aggregate(
        server_view(NORMED, MODEL, sizes=torch.tensor([30, 10])), REPLIES
    )
    assert new["0.weight"].flatten().tolist() == pytest.approx([1.9, 1.2])
    assert (new["1.weight"].item(), new["1.bias"].item()) == (2.0, 2.0)
    assert new["1.running_mean"].item() == pytest.approx((10 + 0.6 * 20) / 2)
    assert new["1.running_var"].item() == pytest.approx((1 + 0.36 * 2) / 2)
    assert new["1.num_batches_tracked"].item() == 5


@pytest.mark.parametrize(("round", "weight"), [(3, [2.25, 1.0]), (4, [1.9, 1.2])])
def test_the_first_three_rounds_are_fedavg_by_samples(round, weight):
    """The mean of (2, 0) and (3, 4) for 30 and 10 samples, then the cosines 1 and .6 for clients that count alike."""
    server = server_view(NORMED, MODEL, round=round, sizes=torch.tensor([30, 10]))
    new, _ = Method.make("l-dawa").aggregate(server, REPLIES)
    assert new["0.weight"].flatten().tolist() == pytest.approx(weight)
    assert new["1.running_mean"].item() == pytest.approx({3: 12.5, 4: 11.0}[round])


@pytest.mark.parametrize(("text", "rounds", "said"), [("", 3, True), ("", 4, False), ("(warmup=0)", 1, False)])
def test_a_warm_up_that_never_ends_is_said(text, rounds, said):
    notes = Method.make(f"l-dawa{text}").notes(outlined(NORMED, rounds))
    assert notes == ["'l-dawa' begins with 3 rounds of plain FedAvg, and the run has 3; give a shorter warmup=..., or "
                     "more rounds."] * said  # fmt: skip


def test_layers_that_a_client_did_not_send_are_averaged_over_the_others():
    masks = {name: torch.tensor([True, False]).view(2, *[1] * (t.dim() - 1)) for name, t in REPLIES.tensors.items()}
    new, _ = Method.make("l-dawa(warmup=0)").aggregate(server_view(NORMED, MODEL), Message(REPLIES.tensors, masks))
    assert {name: tensor.flatten().tolist() for name, tensor in new.items()} == {
        "0.weight": [2.0, 0.0], "1.weight": [1.0], "1.bias": [1.0], "1.running_mean": [10.0], "1.running_var": [1.0],
        "1.num_batches_tracked": [4],
    }  # fmt: skip


@BOTH_ENGINES
def test_every_parameter_is_merged_by_its_cosines(engine):
    method, seen = watched("l-dawa(warmup=1)")
    simulation = run(method, engine, rounds=2)
    plain = run("fedavg", engine, rounds=2)
    for name in simulation.setting.layers.parameter_names:
        clients = torch.stack([seen.trained[2, client][name] for client in range(5)])
        expected = ldawa(seen.received[2, 0][name], clients)
        assert torch.allclose(simulation.engine.server.model[name], expected, rtol=0, atol=1e-14)
    left, right = (one.engine.server.model["head.weight"] for one in (simulation, plain))
    assert float(left.norm()) < float(right.norm()) - 1e-3
    assert simulation.metrics.latest()["bytes.up"] == plain.metrics.latest()["bytes.up"]


def test_with_shrinking_it_shrinks_once_more():
    left, right = (
        run(text, rounds=1).engine.server.model for text in ("l-dawa(warmup=0)+lws(beta=5)", "l-dawa(warmup=0)")
    )
    assert float(left["hidden.weight"].norm()) < float(right["hidden.weight"].norm())


@pytest.mark.parametrize("text", ["warmup=-1"])
def test_what_lies_outside_of_its_range_is_refused(text):
    with pytest.raises(FedStrataError, match=text.partition("=")[0]):
        methods.make(f"l-dawa({text})")


def test_another_part_that_decides_the_shares_is_refused():
    with pytest.raises(FedStrataError, match="each of them decides the shares of the clients"):
        Method.make("l-dawa+feddisco")
