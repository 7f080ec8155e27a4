"""What a run takes of the host, and that a model is tried where it will run."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from fedstrata.engines.replaying import Graph
from fedstrata.experiment import Experiment
from fedstrata.methods import Method
from fedstrata.models.trial import undisturbed
from fedstrata.runs.devices import set_precision, spare_host
from fedstrata.runs.preparing import Ingredients, make_setting

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def threads(monkeypatch):
    """Take note of the number of threads that is asked for; without one, nobody has chosen any."""
    asked = []
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    return asked


def test_beside_a_gpu_the_host_takes_few_threads(threads):
    spare_host(torch.device("cuda"))
    assert threads == [4]


def test_on_a_cpu_and_where_they_are_chosen_threads_stay(threads, monkeypatch):
    spare_host(torch.device("cpu"))
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    spare_host(torch.device("cuda"))
    assert threads == []


PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FAULTS = """
import resource
import fedstrata
import torch

before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(2**26)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(
    not PAGES.exists() or "[madvise]" not in PAGES.read_text(), reason="this system gives large pages to all or none"
)
@pytest.mark.parametrize(("chosen", "low", "high"), [({}, 0, 8_000), ({"THP_MEM_ALLOC_ENABLE": "0"}, 60_000, 80_000)])
def test_large_tensors_lie_in_large_pages_unless_the_user_wants_small_ones(monkeypatch, chosen, low, high):
    """A quarter of a gigabyte is 65,536 small pages, or 128 large ones."""
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)  # this process has set it for its children, too
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert low <= int(subprocess.check_output([sys.executable, "-c", FAULTS], text=True)) < high


@pytest.mark.parametrize("deterministic", [True, False])
def test_operations_that_cannot_be_repeated_are_refused_on_demand(deterministic):
    try:
        set_precision("fp32", deterministic)
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        set_precision("fp32", False)


class Telling(nn.Module):
    """Notes where it is called, and whether cuDNN would compute it."""

    seen: ClassVar[list[tuple[str, bool]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(1, 3, 8)

    def forward(self, images):
        self.seen.append((images.device.type, torch.backends.cudnn.enabled))
        return self.layer(images).flatten(1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_gpu)])
def test_the_model_is_tried_on_the_device_of_the_run(device):
    experiment = Experiment(device=device, model="python:Telling")
    Telling.seen.clear()
    model, setting = make_setting(experiment, Method.make("fedavg"), Ingredients(model=Telling), (1, 8, 8), 3)
    enabled = torch.backends.cudnn.enabled
    assert Telling.seen == [(device, enabled and device == "cpu")] * 3, "once for its outputs, layers and operations"
    assert {parameter.device.type for parameter in model.parameters()} == {device}
    assert setting.flops.weights == {"layer.weight": 2 * 3 * 64}


def test_weights_are_drawn_on_the_cpu_whatever_the_device(monkeypatch):
    """As a device that is not the CPU stands one without values, so that nothing could have been drawn there."""
    from fedstrata.models import base

    monkeypatch.setattr(base, "_check", lambda *rest: None)
    drawn = []
    monkeypatch.setattr(nn.Linear, "to", lambda module, device: drawn.append(module.weight.detach().clone()) or module)
    expected = base.build_model(lambda: nn.Linear(4, 3), (4,), 3, seed=5)
    base.build_model(lambda: nn.Linear(4, 3), (4,), 3, seed=5, device=torch.device("meta"))
    assert torch.equal(drawn[0], expected.weight)


@needs_gpu
@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU])
def test_recurrent_layers_cost_the_same_on_a_gpu(layer):
    from fedstrata.flops import Flops

    module = layer(4, 8, batch_first=True)
    assert Flops.read(module.cuda(), (5, 4)) == Flops.read(module.cpu(), (5, 4))


@needs_gpu
def test_a_trial_leaves_the_random_numbers_of_the_gpu_alone():
    class Drawing(nn.Linear):
        def forward(self, given):
            return super().forward(given) + torch.rand(1, device=given.device)

    torch.cuda.manual_seed(0)
    expected = torch.rand(3, device="cuda")
    torch.cuda.manual_seed(0)
    with undisturbed(Drawing(2, 2).cuda(), "drawing") as copy:
        copy(torch.zeros(1, 2, device="cuda"))
    assert torch.equal(torch.rand(3, device="cuda"), expected)
    assert torch.backends.cudnn.enabled


@needs_gpu
def test_graphs_of_steps_that_never_run_together_share_their_memory():
    places = torch.zeros(8, 2**22, device="cuda")
    begin = torch.cuda.memory_reserved()
    graphs = [Graph(partial(_pass_over, places[:clients]), places.device) for clients in range(8, 0, -1)]
    assert torch.cuda.memory_reserved() - begin < 4 * places.nbytes
    for graph in graphs:
        graph.replay()
    assert places[:, 0].tolist() == [8, 7, 6, 5, 4, 3, 2, 1]


def _pass_over(places: torch.Tensor) -> None:
    """Change something in place, by way of a copy that a graph needs memory for."""
    places += (places + 1) - places
