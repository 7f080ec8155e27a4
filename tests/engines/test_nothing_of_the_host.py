"""A round asks nothing of the host: no number is read back, and what is moved to the device goes one way, in few calls.

What counts is how often, not how long: a GPU that is asked for a number stands still until it has it.
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from federations import federation, samples, split_by_size
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fedstrata.engines import batches, broadcast, stacked
from fedstrata.engines.batches import DeviceData
from fedstrata.engines.stacked import StackedEngine
from fedstrata.rng import philox

READ_BACK = {"tolist", "item", "cpu", "numpy", "__float__", "__int__", "__bool__", "__index__", "nonzero"}
FROM_LISTS = {"tensor", "as_tensor"}
PARTICIPANTS = (0, 1, 3, 4, 5)
SIZES = (8, 10, 8, 6, 8, 12)
"""Unequal, so that some train while others are done."""


class Functions(TorchFunctionMode):
    """Counts what is read back, and what is made of Python's numbers."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        self.seen.update([name] if name in READ_BACK | FROM_LISTS else [])
        return func(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Counts numbers that leave tensors, also inside of PyTorch's own functions."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def engine_of(method, monkeypatch, device="cpu", chunk=8, epochs=2):
    """An engine after its first round."""
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 3))
    optimiser = "sgd(learning_rate=0.1, momentum=0.9, clip=1.0, weight_decay=0.01)"
    changes = {
        "method": method,
        "rounds": 9,
        "batch_size": 4,
        "epochs": epochs,
        "optimiser": optimiser,
        "device": device,
    }
    dataset, split = samples(60), split_by_size(SIZES)
    world = federation(model, dataset, split, **changes)
    data = DeviceData(dataset, split, (), world.setting.device, torch.float64)
    monkeypatch.setattr(batches, "philox_at_once", philox)  # a CPU draws few words by NumPy, a GPU by its kernel
    engine = StackedEngine(world.setting, world.model.to(device), data, world.declared, chunk)
    engine.exchange(1)
    engine.round(1, PARTICIPANTS, evaluate=False)
    return engine


METHODS = [
    *("fedavg", "fedbn", "fedprox", "ditto", "scaffold", "lips(every=7)", "ssfl", "player(up_to='0')"),
    pytest.param("sparse-ft(head_rounds=0)", marks=pytest.mark.filterwarnings("ignore:'sparse-ft' has no rounds")),
]


@pytest.mark.parametrize("method", METHODS)
def test_a_round_reads_nothing_back(method, monkeypatch):
    """Nor are the bytes of masks counted, before they are asked for."""
    engine = engine_of(method, monkeypatch)
    with Functions() as functions, Operations() as operations:
        report = engine.round(2, PARTICIPANTS, evaluate=False)
    assert operations.seen["_local_scalar_dense"] == operations.seen["nonzero"] == 0
    assert functions.seen == {}
    assert report.bytes_up > 0
    assert report.bytes_down > 0


def test_a_survey_only_asks_whether_scores_are_finite(monkeypatch):
    for module in (broadcast, stacked):
        monkeypatch.setattr(module, "bytes_to_count", lambda *given: lambda: 0)
    engine = engine_of("ssfl(refresh_every=1)", monkeypatch)
    with Functions() as functions:
        engine.exchange(2)
    assert functions.seen.keys() - FROM_LISTS == {"__bool__"}


def test_what_is_moved_to_the_device_does_not_grow_with_clients_or_steps(monkeypatch):
    """Numbers of clients, their order by size, keys, and the plan of all steps of a phase; each in one piece."""
    moved = []
    for participants, epochs in (((0, 1), 1), ((0, 1, 2, 3, 5), 4)):
        engine = engine_of("fedavg", monkeypatch, epochs=epochs)
        with Operations() as operations:
            engine.round(2, participants, evaluate=False)
        moved.append(operations.seen["lift_fresh"])
    assert moved[0] == moved[1] > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chunk", [2, 8])
def test_a_gpu_is_never_waited_for_in_a_round(method, chunk, monkeypatch):
    engine = engine_of(method, monkeypatch, "cuda", chunk)
    for round in range(2, 6):  # what is measured, compiled or captured once is so by now
        engine.round(round, PARTICIPANTS, evaluate=False)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        engine.round(6, PARTICIPANTS, evaluate=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
