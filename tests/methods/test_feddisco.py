from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from torch import nn
from watching import BOTH_ENGINES, run, server_view

from fedstrata.errors import FedStrataError
from fedstrata.functional import disco_shares
from fedstrata.layers import LayerMap
from fedstrata.methods import Declared, Message, Method, methods

LINE = LayerMap.read(nn.Sequential(nn.Linear(1, 1, bias=False)), (1,))


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("feddisco", [0.73115464, 0.0, 0.26884536]),
        ("feddisco(normalise=false)", [0.67566016, 0.06016349, 0.26417635]),
        ("feddisco(a=0, b=0)", [0.5, 0.3, 0.2]),
        # The distances are 0, sqrt .5 and sqrt .125: of (.6, .4 - .5 sqrt .5, .3 - .5 sqrt .125), not divided; divided
        # by their sum they are 0, 2/3 and 1/3.
        ("feddisco(distance=l2)", [0.77955496, 0.06034614, 0.16009890]),
        ("feddisco(distance=l2, normalise=true)", [0.75, 0.08333333, 0.16666667]),
        ("feddisco(normalise=true)", [0.73115464, 0.0, 0.26884536]),
        # 0, 1 - sqrt .5 and 1 - 2 / sqrt 5, halved: (.6, .25355339, .24721360).
        ("feddisco(distance=cosine)", [0.54507449, 0.23034247, 0.22458304]),
        # 1 and .5, of which half is (.6, -.1, .05).
        ("feddisco(distance=l1)", [0.92307692, 0.0, 0.07692308]),
    ],
)
def test_shares_by_hand(text, shares):
    server = server_view(
        LINE, {"0.weight": torch.zeros(1, 1)}, clients=3, participants=(0, 1, 2), sizes=torch.tensor([50, 30, 20]),
        label_counts=torch.tensor([[25, 25], [30, 0], [5, 15]]),
    )  # fmt: skip
    replies = Message({"0.weight": torch.tensor([[[1.0]], [[10.0]], [[100.0]]])})
    seen = Declared(server.sizes, server.label_counts)
    assert methods.make(text).weigh(seen).tolist() == pytest.approx(shares, abs=1e-8)
    new, _ = Method.make(text).aggregate(server, replies)
    assert new["0.weight"].item() == pytest.approx(shares[0] + 10 * shares[1] + 100 * shares[2], abs=1e-5)


@BOTH_ENGINES
def test_only_the_participants_count(engine):
    simulation = run("feddisco(a=0.3, distance=l2)", engine, rounds=1, participation=0.6)
    [first, second, third] = simulation.engine.side.select(0.6, 1)
    view = simulation.engine.side.view(simulation.engine.server, (first, second, third), 1)
    shares = methods.make("feddisco(a=0.3, distance=l2)").weigh(Declared(view.sizes, view.label_counts))
    counts = simulation.split.label_counts(simulation.dataset)[[first, second, third]]
    assert torch.equal(shares, disco_shares(view.sizes, torch.from_numpy(counts), 0.3, 0.1, "l2"))


@BOTH_ENGINES
def test_without_a_and_b_it_is_fedavg_and_else_it_is_not(engine):
    plain = run("fedavg", engine)
    same, other = run("feddisco(a=0, b=0)", engine), run("feddisco", engine)
    torch.testing.assert_close(same.engine.server.model, plain.engine.server.model, rtol=0, atol=1e-12)
    assert not torch.allclose(other.engine.server.model["head.weight"], plain.engine.server.model["head.weight"])
    assert other.metrics.latest()["bytes.up"] == plain.metrics.latest()["bytes.up"]


def test_with_shrinking_its_own_step_counts():
    left, right = (run(text, rounds=1).engine.server.model for text in ("feddisco+lws(beta=5)", "feddisco"))
    factors = left["head.weight"] / right["head.weight"]
    assert torch.allclose(factors, factors.mean().expand_as(factors))
    assert 0 < float(factors.mean()) < 1


@pytest.mark.parametrize("other", ["l-dawa", "fedlaw", "scaffold", "feddyn"])
def test_others_that_decide_the_shares_are_refused(other):
    with pytest.raises(FedStrataError, match="each of them decides the shares of the clients"):
        Method.make(f"feddisco+{other}")


@pytest.mark.parametrize("text", ["a=-0.1", "b=-0.1", "distance=l3"])
def test_what_lies_outside_of_its_range_is_refused(text):
    with pytest.raises(FedStrataError, match=text.partition("=")[0]):
        methods.make(f"feddisco({text})")


def test_the_authors_defaults():
    assert asdict(methods.make("feddisco")) == {"a": 0.5, "b": 0.1, "distance": "kl", "normalise": None}
