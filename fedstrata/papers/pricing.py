"""What it would cost to run a part, without running it: operations, bytes, and minutes on this device.

Operations follow from the model, the method's phases and the clients' sizes; nothing is trained for them. Bytes are
those of a run in miniature (:mod:`fedstrata.papers.miniature`). Seconds are estimated from a few steps of plain
training, tried once for all settings with the same model, data and batches: a method that trains on more samples takes
as much longer, and a tested sample takes a third of a trained one, as its forward pass takes a third of the operations.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fedstrata.engines.batches import Work
from fedstrata.engines.client import ClientSide
from fedstrata.engines.forward import LoopForward
from fedstrata.engines.planning import Plan, threads_of_this_process, timed_plan
from fedstrata.engines.trying import Candidate
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.flops import PASSES
from fedstrata.optimisers import with_learning_rate
from fedstrata.papers.cells import changed
from fedstrata.papers.miniature import Traffic, measure_traffic
from fedstrata.papers.running import Planned
from fedstrata.runs.preparing import Ingredients, NamedData, Prepared, prepare

PLAIN = "fedavg"
"""The method of plain local training, with which steps are timed."""
HOW = (
    "Operations and bytes follow from models, methods and data. The time is an estimate for one run after another: a "
    "few steps of plain training were timed on this device, for each model and data once, and testing a sample counts "
    "a third of training on it; what methods and the server do beside that is left out."
)
_LONGEST_STEP = 1e10
"""The operations of the longest step that is timed on a CPU: about a second on a slow one."""
_NO_MATTER = ("partition", "seed", "evaluate_every", "evaluate_trained", "diagnose", "metrics", "data_root")
"""Keys that change neither how large messages are nor how long a step takes."""
_NOT_TIMED = (
    *_NO_MATTER, "method", "epochs", "steps", "rounds", "loss", "schedule", "validation", "validation_fraction",
    "patience", "upload_values", "download_values", "statistics", "late_clients", "join_round",
)  # fmt: skip
"""What, beside that, does not change how long a step of plain training takes, or not much."""


@dataclass(frozen=True)
class Price:
    """What the runs of a setting, one for each seed, still cost in all."""

    setting: str
    runs: int
    rounds: int
    flops: float
    bytes: float
    seconds: float


@dataclass
class Pricing:
    """Prices settings one after another, and keeps what several of them share; ``tell`` hears what is being done."""

    tell: Callable[[str], None] = lambda words: None
    named: NamedData = field(default_factory=NamedData)
    _traffic: dict[Experiment, Traffic] = field(default_factory=dict)
    _timed: dict[Experiment, Candidate[Plan]] = field(default_factory=dict)

    def price(self, name: str, setting: Experiment, runs: int, rounds: int) -> Price:
        """Price the runs of a setting, of which so many rounds are left in all."""
        ready = self._prepare(setting)
        participants = _participants(setting, ready.setting.clients)
        share = participants / ready.setting.clients
        traffic = self._traffic_of(setting, ready)
        trained = share * _samples_of_rounds(ready, traffic)
        flops = PASSES * ready.setting.flops.forward * trained
        bytes = traffic.total(setting.rounds, participants, ready.setting.clients)
        seconds = self._seconds(setting, ready, round(participants), trained)
        part = rounds / setting.rounds
        return Price(name, runs, rounds, part * flops, part * bytes, part * seconds)

    def _prepare(self, experiment: Experiment) -> Prepared:
        return prepare(experiment, Ingredients(named=self.named))

    def _traffic_of(self, setting: Experiment, ready: Prepared) -> Traffic:
        method = ready.setting.method
        # A server that trains by itself would do so here too; its clients send what those of plain training send.
        sent = changed(setting, {"method": PLAIN}) if method.needs.proxy else setting
        kind = _without(sent, (*_NO_MATTER, "participation"))
        if kind not in self._traffic:
            self.tell(f"counting the bytes of {sent.method} with {sent.model}")
            self._traffic[kind] = measure_traffic(sent, ready.dataset, ready.split)
        return self._traffic[kind]

    def _seconds(self, setting: Experiment, ready: Prepared, participants: int, trained: float) -> float:
        """Estimate the seconds of all rounds: those of plain rounds, as much longer as more samples are trained on."""
        kind = _without(changed(setting, {"optimiser": with_learning_rate(setting.optimiser, 0.1)}), _NOT_TIMED)
        if kind not in self._timed:
            self.tell(f"timing a few steps of {setting.model} on {setting.data}")
            plain = self._prepare(changed(_plain(setting), {"batch_size": _short_batch(setting, ready)}))
            self._timed[kind] = timed_plan(
                setting.engine, setting.chunk, plain.setting, plain.model, plain.data, plain.declared, participants
            )
        batch, sizes = _short_batch(setting, ready), ready.data.split.sizes
        # Where batches were cut, as many more steps take as long; a whole epoch tells what a sample takes.
        steps = setting.steps if batch == setting.batch_size else None
        work = Work(setting.epochs, steps, batch, setting.last_batch)
        once = participants / len(sizes) * float(work.samples_of(sizes).sum())
        of_round = self._timed[kind].round_seconds(work, sizes, participants)
        tests = -(-setting.rounds // setting.evaluate_every)
        return of_round / once * (trained + tests * _tested(ready, participants) / PASSES)


def price(planned: Planned, tell: Callable[[str], None] = lambda words: None) -> tuple[list[Price], dict[str, str]]:
    """Price what is still to do, setting by setting, and say which settings cannot be run; nothing is written."""
    prices, refused, pricing = [], {}, Pricing(tell)
    settings = list(settings_to_do(planned).items())
    threads = threads_of_this_process()
    try:
        for number, (setting, (name, runs, rounds)) in enumerate(settings, start=1):
            pricing.tell = _numbered(tell, f"{number} of {len(settings)}")
            pricing.tell(f"looking at {name}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FedStrataWarning)
                try:
                    prices.append(pricing.price(name, setting, runs, rounds))
                except FedStrataError as error:
                    refused[name] = str(error)
    finally:
        torch.set_num_threads(threads)
    return prices, refused


def settings_to_do(planned: Planned) -> dict[Experiment, tuple[str, int, int]]:
    """List the settings whose runs are not finished: name, runs and rounds left, those of all seeds together."""
    found: dict[Experiment, tuple[str, int, int]] = {}
    for run in planned.to_do:
        setting = changed(run.experiment, {"seed": 0})
        _, runs, rounds = found.get(setting, ("", 0, 0))
        name = ", ".join(filter(None, (run.experiment.method, run.setting)))
        found[setting] = (name, runs + 1, rounds + run.rounds_left)
    return found


def _numbered(tell: Callable[[str], None], number: str) -> Callable[[str], None]:
    return lambda words: tell(f"{number}: {words}")


def _without(experiment: Experiment, keys: tuple[str, ...]) -> Experiment:
    """Set keys that do not matter back to their defaults, so that experiments which differ in these only are equal."""
    defaults: dict[str, Any] = {one.name: one.default for one in dataclasses.fields(Experiment)}
    return dataclasses.replace(experiment, **{key: defaults[key] for key in keys})


def _plain(setting: Experiment) -> Experiment:
    """The same training by the plainest method, whose steps are timed."""
    defaults: Mapping[str, Any] = {"validation": None, "validation_fraction": None, "patience": None, "late_clients": 0}
    return changed(setting, {**defaults, "method": PLAIN, "join_round": None, "loss": "cross-entropy", "steps": None})


def _short_batch(setting: Experiment, ready: Prepared) -> int:
    """The size of the batches that are timed: the run's own, unless a step would take a CPU long."""
    if ready.setting.device.type == "cuda":
        return setting.batch_size
    possible = int(_LONGEST_STEP / (PASSES * max(ready.setting.flops.forward, 1)))
    return max(2, min(setting.batch_size, possible))


def _participants(setting: Experiment, clients: int) -> float:
    """How many clients take part in a round, on average over all rounds."""
    late = 0 if setting.join_round is None else min(setting.rounds, setting.join_round - 1) / setting.rounds
    numbers = [max(1, int(setting.participation * n + 0.5)) for n in (clients - setting.late_clients, clients)]
    return late * numbers[0] + (1 - late) * numbers[1]


def _samples_of_rounds(ready: Prepared, traffic: Traffic) -> float:
    """Count the samples that all clients would be trained on in all rounds, each as often as it comes.

    Phases change with rounds where messages do.
    """
    side = ClientSide(ready.setting, LoopForward(ready.model), ready.data)
    looked = zip(traffic.rounds, traffic.lengths(ready.setting.rounds), strict=True)
    return sum(length * float(side.samples(range(ready.setting.clients), round).sum()) for round, length in looked)


def _tested(ready: Prepared, participants: int) -> float:
    """Count the samples that models are tested on when a round is evaluated."""
    own = ready.data.split.test_sizes
    judged = ready.data.validation_at_clients.sizes.sum()
    before = participants / len(own) * (own.sum() + judged) if ready.experiment.evaluate_trained else 0.0
    if ready.setting.everybody_alike and ready.setting.method.adaptation is None:
        after = len(np.union1d(ready.data.dataset.test, ready.data.split.test_parts.joined()))
        return float(before + after + len(ready.data.validation) + judged)
    return float(before + own.sum() + judged)
