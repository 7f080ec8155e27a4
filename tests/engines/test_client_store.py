"""Where clients' state is kept: the same bits in memory and on disk, and nothing for those who keep nothing."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from federations import federation, samples, split_by_size
from torch import nn

from fedstrata.engines import client_store as module
from fedstrata.engines.client_store import InMemory, OnDisk, client_store
from fedstrata.engines.engine import pack, unpack
from fedstrata.engines.stacked import StackedEngine
from fedstrata.stack import Stack

CPU = torch.device("cpu")
CLIENTS = 7
SIZES = (8, 6, 8, 12, 3, 8, 8)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "fedstrata"


def first(clients):
    """Each client begins with its number."""
    numbers = torch.tensor(list(clients))
    weight = numbers[:, None].expand(-1, 3).to(torch.bfloat16)
    return Stack(weight=weight, mask=numbers[:, None] % 2 == 0, none=weight[:, :0])


def lists(stack):
    return {name: tensor.tolist() for name, tensor in stack.items()}


@pytest.fixture(params=[0, 2**30], ids=["disk", "memory"])
def store(request):
    return client_store(first, CLIENTS, CPU, bound=request.param)


def test_state_is_taken_and_put_in_any_order(store):
    assert isinstance(store, (InMemory, OnDisk))
    assert lists(store.take((5, 2))) == lists(first((5, 2)))
    new = {
        "weight": torch.full((2, 3), 0.1).bfloat16() * torch.tensor([[1], [2]]),
        "mask": torch.tensor([[True], [False]]),
    }
    store.put((5, 2), new)
    taken = store.take((0, 2, 5))
    assert taken["weight"].tolist() == [[0] * 3, new["weight"][1].tolist(), new["weight"][0].tolist()]
    assert taken["mask"].tolist() == [[True], [False], [True]]
    assert store.take((2,))["mask"].tolist() == [[False]]
    assert store.take((6, 5, 2, 0))["weight"][:, 0].tolist() == [6, *new["weight"][:, 0].tolist(), 0]
    everything = store.everything()
    assert everything["weight"].shape == (CLIENTS, 3)
    assert everything["weight"][[0, 1, 3, 4, 6], 0].tolist() == [0, 1, 3, 4, 6]
    assert everything["weight"][5].tolist() == new["weight"][0].tolist()


def test_a_run_goes_on_from_a_saved_state(store):
    store.put((3,), {name: tensor + 1 if name == "weight" else tensor for name, tensor in first((3,)).items()})
    saved = store.everything()
    for bound in (0, 2**30):
        again = client_store(first, CLIENTS, CPU, saved, bound)
        assert lists(again.everything()) == lists(saved)


def test_pieces_are_all_clients(store):
    assert [client for some in store.pieces() for client in some] == list(range(CLIENTS))


def test_a_method_that_keeps_nothing_costs_nothing():
    asked = []
    store = client_store(lambda clients: asked.append(len(clients)) or Stack(), 10**9, CPU)
    assert asked == [1]
    assert store.take(range(10**6)) == {}
    store.put((1, 2), {})
    assert store.everything() == {}


def test_who_never_took_part_is_never_written(cache):
    """The files are as long as all clients need, but hold no more than what was written."""
    many = 10**6
    store = client_store(first, many, CPU, bound=2**20)
    assert isinstance(store, OnDisk)
    store.put((0, many - 1), first((0, many - 1)))
    files = [path.stat() for path in cache.glob("clients-*/*")]
    assert max(file.st_size for file in files) == many * 6
    assert sum(file.st_blocks * 512 for file in files) < 2**16
    assert store.take((many - 1,))["weight"].tolist() == first((many - 1,))["weight"].tolist()


def test_files_go_with_the_store(cache):
    store = client_store(first, CLIENTS, CPU, bound=0)
    store.put((1,), first((1,)))
    assert len(list(cache.glob("clients-*"))) == 1
    del store
    gc.collect()
    assert list(cache.glob("clients-*")) == []


@pytest.mark.parametrize("method", ["fedbn", "scaffold", "ssfl", "d-psgd(neighbours=2)"])
@pytest.mark.filterwarnings("ignore:Clients without test samples")
def test_rounds_are_the_same_from_memory_and_from_disk(method, monkeypatch):
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    split = split_by_size(SIZES, [(53,), (54, 55), (), (53, 54), (55,), (53,), (54,)])
    changes = {"method": method, "batch_size": 4, "optimiser": "sgd(momentum=0.9, keep=true)"}
    states = []
    for bound in (2**30, 3000):
        world = federation(model, samples(56, test=(53, 54, 55)), split, **changes)
        monkeypatch.setattr(module, "_memory_for_state", lambda device, bound=bound: bound)
        engine = StackedEngine(world.setting, world.model, world.data, world.declared, 3)
        assert isinstance(engine._clients, InMemory if bound > 3000 else OnDisk)
        for round, participants in ((1, (0, 2, 5, 6)), (2, (1, 2, 3, 6))):
            engine.exchange(round)
            engine.round(round, participants, evaluate=True)
        scores, _ = engine.after(2)
        state = pack(engine.server, engine.clients())
        engine.restore(*unpack(Stack({name: tensor.clone() for name, tensor in state.items()})))
        engine.round(3, (0, 1, 4), evaluate=False)
        states.append((pack(engine.server, engine.clients()), scores))
    (left, scores), (right, others) = states
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    np.testing.assert_array_equal(scores.loss, others.loss)
