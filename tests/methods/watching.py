"""Runs of small federations, and a part that watches them without changing anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from fedstrata.methods import (
    Clients,
    Declared,
    Facts,
    LocalStep,
    Message,
    Method,
    ModelAndMemory,
    Needs,
    Outline,
    Part,
    Probe,
    Server,
    Touches,
    Training,
)
from fedstrata.optimisers import SGD
from fedstrata.runs.driver import Driver
from fedstrata.runs.preparing import Ingredients
from fedstrata.stack import Stack, Tensors, clone
from fedstrata.testing.world import EXPERIMENT, digits, prepare, unequal_split


class Attending(nn.Module):
    """Positions, patches, an attention with packed projections, and a weight that two layers use."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(4, 6))
        self.patches = nn.Linear(16, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.mixing = nn.Linear(6, 6)
        self.again = nn.Linear(6, 6)
        self.again.weight = self.mixing.weight
        self.head = nn.Linear(6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x.reshape(len(x), 4, 16)) + self.positions
        hidden = self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(1)
        return self.head(torch.tanh(self.again(torch.tanh(self.mixing(hidden)))))


def attending(method: str, engine: str = "loop", **changes: Any) -> Driver:
    """Prepare a run of the small federation with attention and a weight that two layers use."""
    dataset = digits()
    ingredients = Ingredients(dataset, unequal_split(dataset), Attending, Method.make(method))
    return Driver.prepare(EXPERIMENT.with_changes({"engine": engine, "epochs": 1, **changes}), ingredients)


BOTH_ENGINES = pytest.mark.parametrize("engine", ["loop", "stacked"])


@dataclass
class Seen:
    """What a watching part saw of one client, by round."""

    received: dict[tuple[int, int], Tensors] = field(default_factory=dict)
    start: dict[tuple[int, int], Tensors] = field(default_factory=dict)
    steps: dict[tuple[int, int], list[Tensors]] = field(default_factory=dict)
    trained: dict[tuple[int, int], Tensors] = field(default_factory=dict)
    gradients: dict[tuple[int, int], Tensors] = field(default_factory=dict)


def watched(text: str) -> tuple[Method, Seen]:
    """Put a part behind a method that notes, for each (round, client), what passes by."""
    seen = Seen()

    def rows(clients: Clients, stack: Tensors) -> list[tuple[tuple[int, int], Tensors]]:
        copy = clone(stack)
        return [
            ((clients.round, client), {name: tensor[row] for name, tensor in copy.items()})
            for row, client in enumerate(clients.ids)
        ]

    class Watch(Part):
        name: ClassVar[str] = "watch"
        facts: ClassVar[Facts] = Facts("test", "none")
        touches: ClassVar[Touches] = Touches()

        @property
        def needs(self) -> Needs:
            return Needs(last_gradients=True)

        def start(self, clients: Clients, message: Message, model: Tensors) -> ModelAndMemory:
            seen.start |= dict(rows(clients, model))
            return model, clients.memory

        def project(self, clients: Clients, step: LocalStep, parameters: Tensors) -> ModelAndMemory:
            for place, own in rows(clients, parameters):
                seen.steps.setdefault(place, []).append(own)
            return parameters, clients.memory

        def finish(self, clients: Clients, training: Training) -> ModelAndMemory:
            for place, own in rows(clients, training.start):
                assert_same_bits(own, seen.start[place])
            seen.received |= dict(rows(clients, training.received))
            seen.trained |= dict(rows(clients, training.trained))
            seen.gradients |= dict(rows(clients, training.gradients))
            return training.trained, clients.memory

    method = Method.make(text)
    return Method(f"{text}+watch", (*method.parts, Watch())), seen


def run(method: str | Method, engine: str = "loop", rounds: int = 3, **changes: Any) -> Driver:
    """Do some rounds of one local epoch, with an evaluation only after the last."""
    simulation = prepare(method, engine, **{"rounds": rounds, "epochs": 1, "evaluate_every": 99, **changes})
    for _ in range(rounds):
        simulation.step()
    return simulation


def assert_same_bits(left: Tensors, right: Tensors) -> None:
    assert left.keys() == right.keys()
    for name in left:
        assert torch.equal(left[name], right[name]), name


def layer_values(simulation: Driver, metric: str, round: int) -> dict[str, float]:
    """Read one metric of the layers in one round."""
    rows = simulation.metrics.to_tables()["layers"].to_pylist()
    return {row["layer"]: row["value"] for row in rows if row["metric"] == metric and row["round"] == round}


def memory_of(driver: Driver, part: str, group: str) -> Stack:
    """Read a group of what a part remembers at all clients."""
    return driver.engine.clients().group(f"memory/{part}/{group}")


def clients_view(layers: Any, count: int, round: int = 1, rounds: int = 3, **changes: Any) -> Clients:
    """Make what client hooks see, by hand."""
    given = {
        "round": round, "rounds": rounds, "epochs": 1, "layers": layers, "ids": tuple(range(count)), "seed": 0,
        "sizes": torch.ones(count), "label_counts": torch.ones(count, 1),
        "shared": frozenset((*layers.parameter_names, *layers.buffer_names)), **changes,
    }  # fmt: skip
    return Clients(**{**given, "memory": Stack(given.get("memory", {}))})


def outlined(layers: Any, rounds: int = 30, **changes: Any) -> Outline:
    """Make what a part knows of an experiment before it runs, by hand."""
    given = {"optimiser": SGD(0.1, momentum=0.9), "clients": 20, "participants": 20, **changes}
    return Outline(layers, rounds, **given)


def probing(probe: Probe) -> dict[str, Callable[[Clients], Probe]]:
    """Let clients made by hand find out what a test made up."""
    return {"probing": lambda clients: probe}


def server_view(layers: Any, model: Tensors, round: int = 1, **changes: Any) -> Server:
    """Make what server hooks see, by hand."""
    given = {
        "round": round, "rounds": 3, "layers": layers, "seed": 0, "clients": 2, "participants": (0, 1),
        "sizes": torch.tensor([10, 10]), "label_counts": torch.zeros(2, 1), "model": model, **changes,
    }  # fmt: skip
    return Server(**{**given, "memory": Stack(given.get("memory", {}))})


def declared(*sizes: int, label_counts: torch.Tensor | None = None) -> Declared:
    """Make what clients tell the server about their data, by hand."""
    counts = torch.zeros(len(sizes), 1) if label_counts is None else label_counts
    return Declared(torch.tensor(sizes), counts)


def step_view(parameters: Tensors, received: Tensors | None = None, **changes: Any) -> LocalStep:
    """Make what client hooks see of a local step, by hand; a model's outputs are made up unless given."""
    clients = len(next(iter(parameters.values())))
    none = torch.zeros(clients, 1)
    return LocalStep(
        **{
            "parameters": parameters, "received": received or {}, "inputs": none, "labels": none.long(),
            "outputs": none[..., None], "learning_rate": 0.1, "forward": lambda chosen: none[..., None],
            "predict": lambda model: (none[..., None], none[..., None]), **changes,
        }
    )  # fmt: skip


def training_view(start: Tensors, trained: Tensors, gradients: Tensors | None = None, **changes: Any) -> Training:
    """Make what client hooks see after local training, by hand."""
    clients = len(next(iter(start.values())))
    return Training(
        **{
            "received": start, "start": start, "trained": trained, "gradients": gradients or {}, "mean_gradients": {},
            "after_phase": (trained,), "steps": torch.ones(clients), "stretches": (), "learning_rate": 0.1,
            **changes,
        }
    )  # fmt: skip


@dataclass(frozen=True)
class GivenProbe:
    """Answers with gradients, a trained model and scores that a test made up."""

    slopes: Tensors = field(default_factory=dict)
    after: Tensors = field(default_factory=dict)
    scores: tuple[torch.Tensor, torch.Tensor] = (torch.zeros(1), torch.zeros(1))

    def test(self, model: Tensors, held_out: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        return self.scores

    def gradients(
        self, model: Tensors, batch_size: int, all_samples: bool = False, balanced: bool = False, draw: int = 0
    ) -> Tensors:
        return self.slopes

    def train(self, model: Tensors, epochs: int) -> Tensors:
        assert epochs == 1
        return self.after
