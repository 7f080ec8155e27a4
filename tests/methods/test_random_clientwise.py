from __future__ import annotations

import torch
from torch import nn
from watching import BOTH_ENGINES, assert_same_bits, declared, memory_of, run, server_view

from fedstrata.layers import LayerMap
from fedstrata.methods import Message, methods

ONE = LayerMap.read(nn.Linear(4, 1, bias=False), (4,))


def test_what_a_mask_leaves_out_counts_as_zero():
    """Shares 3/4 and 1/4: (1 * .75 + 5 * .25), 2 * .75, 7 * .25, and what nobody keeps becomes zero."""
    part = methods.make("random-clientwise")
    server = server_view(ONE, {"weight": torch.tensor([[0.0, 0.0, 0.0, 9.0]])}, sizes=torch.tensor([30, 10]))
    replies = Message(
        {"weight": torch.tensor([[[1.0, 2.0, 0.0, 0.0]], [[5.0, 0.0, 7.0, 0.0]]])},
        {"weight": torch.tensor([[[True, True, False, False]], [[True, False, True, False]]])},
    )
    merged = part.merge(server, replies, part.weigh(declared(30, 10)) / 40)
    assert merged["weight"].tolist() == [[2.0, 1.5, 1.75, 0.0]]


@BOTH_ENGINES
def test_the_whole_model_comes_and_what_the_mask_keeps_goes(engine):
    simulation = run("random-clientwise(sparsity=0.8)", engine, 2)
    fedavg = run("fedavg", engine, 2)
    up, down = (simulation.metrics.series(way)[1] / fedavg.metrics.series(way)[1] for way in ("bytes.up", "bytes.down"))
    assert (up < 0.75).all()
    assert (down == 1).all()
    message = simulation.engine.side.broadcast(simulation.engine.server, [4, 1], 3)
    assert not message.masks
    assert not simulation.engine.side.masks_known(simulation.engine.server, [4, 1], 3, upload=False)


@BOTH_ENGINES
def test_a_client_trains_and_is_tested_inside_its_mask(engine):
    """The masks are those of random-k; in the first round only the averages differ, so that clients train alike."""
    simulation, other = run("random-clientwise(sparsity=0.8)", engine, 1), run("random-k(sparsity=0.8)", engine, 1)
    masks = memory_of(simulation, "random-clientwise", "mask")
    assert_same_bits(masks, memory_of(other, "random-k", "mask"))
    before = [one.metrics.series("client_before.loss.mean")[1].tolist() for one in (simulation, other)]
    assert before[0] == before[1]
    model = simulation.engine.server.model
    tested = simulation.engine.models([0, 3], 1)
    for name, mask in masks.items():
        assert torch.equal(tested[name], model[name] * mask[[0, 3]])
        assert model[name].expand_as(tested[name])[~mask[[0, 3]]].any()
