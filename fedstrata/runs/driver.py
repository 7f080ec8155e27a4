"""Driving the rounds of one experiment, simulated or on real sites: the engine runs them, this measures and saves."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fedstrata.data import Dataset, Split
from fedstrata.diagnostics import layer_cosines, layer_updates
from fedstrata.engines.engine import Engine, RoundReport, pack, unpack
from fedstrata.engines.evaluation import Scores
from fedstrata.engines.planning import ENGINES, Plan, build_engine, make_plan
from fedstrata.engines.setting import Setting
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.methods import Method
from fedstrata.runs.folder import RunFolder, describe_environment
from fedstrata.runs.metrics import MetricLog, TimingLog, describe_clients
from fedstrata.runs.models import client_model, global_card, global_model, models_of_clients
from fedstrata.runs.preparing import Ingredients, prepare
from fedstrata.runs.signals import Interrupted, stop_requests
from fedstrata.stack import Stack, Tensors, clone, repeat, take, take_first, under
from fedstrata.trained import TrainedModel


@dataclass(frozen=True)
class Update:
    """What a progress display may show after a round."""

    method: str
    seed: int
    round: int
    rounds: int
    seconds: float
    metrics: dict[str, float]


Listener = Callable[[Update], None]


@dataclass
class Driver:
    """A prepared experiment and the engine that runs its rounds; :meth:`run` does it."""

    experiment: Experiment
    dataset: Dataset
    split: Split
    setting: Setting
    engine: Engine
    plan: Plan
    network: nn.Module
    reference: Tensors = field(default_factory=dict)
    best: Tensors = field(default_factory=dict)
    adapted: Tensors = field(default_factory=dict)
    metrics: MetricLog = field(default_factory=MetricLog)
    timings: TimingLog = field(default_factory=TimingLog)
    round: int = 0

    @property
    def method(self) -> Method:
        """The method that is run."""
        return self.setting.method

    @property
    def model(self) -> Tensors:
        """The shared part of the model that the run gives: that of the best round where samples are held out to tell,
        else the one that is tested after the last; where clients use models of their own, what the server holds.
        """
        if self.best:
            return self.best
        if self.one_for_all and self.plan.engine in ENGINES:
            return take_first(self.engine.models([0], self.round))
        return self.engine.side.tested(self.engine.server, self.round)

    @property
    def headline(self) -> str:
        """The name of the accuracies of the models that clients use in the end."""
        return "client_adapted" if self.method.adaptation is not None else "client_after"

    @property
    def one_for_all(self) -> bool:
        """Whether all clients use the global model as it is."""
        if not self.setting.everybody_alike or self.method.adaptation is not None:
            return False
        return self.engine.side.broadcast(
            self.engine.server, range(self.setting.clients), self.round + 1, testing=True
        ).common

    def used(self, clients: Sequence[int]) -> Tensors:
        """Return the models that some clients use, a stack in their order; adapted, once the run is at its end."""
        if self.best:
            return repeat(self.best, len(clients))
        if self.adapted:
            return take(self.adapted, torch.tensor(list(clients)))
        return self.engine.models(clients, self.round)

    def global_model(self) -> TrainedModel:
        """Make the global model, ready to use."""
        return global_model(self)

    def client_model(self, client: int) -> TrainedModel:
        """Make the model that a client uses, ready to use."""
        return client_model(self, client)

    @classmethod
    def prepare(
        cls, experiment: Experiment, ingredients: Ingredients | None = None, plan: Plan | None = None
    ) -> Driver:
        """Prepare a simulation: load and divide the data, build the model, choose the engine; misfits are refused."""
        ready = prepare(experiment, ingredients)
        plan = plan or make_plan(
            experiment.engine, experiment.chunk, ready.setting, ready.model, ready.data, ready.declared
        )
        plan.set_threads()
        engine = build_engine(plan, ready.setting, ready.model, ready.data, ready.declared)
        return cls(
            ready.experiment,
            ready.dataset,
            ready.split,
            ready.setting,
            engine,
            plan,
            ready.model,
        )

    def run(self, folder: RunFolder | None = None, listener: Listener | None = None) -> dict[str, Any]:
        """Do the remaining rounds and return the summary.

        With a folder, checkpoints are saved on the way and the results at the end.
        """
        with stop_requests() as stop:
            while self.round < self.experiment.rounds:
                self.step(listener)
                due = self.round % self.experiment.checkpoint_every == 0 or self.round == self.experiment.rounds
                if folder is not None and (due or stop):
                    self.save(folder)
                if stop and self.round < self.experiment.rounds:
                    raise Interrupted(stop[0], self.round, None if folder is None else folder.path)
        summary = self.summary()
        if folder is not None:
            own = models_of_clients(self) if self.plan.engine in ENGINES else None
            folder.finish(self.model, own, global_card(self), self.metrics, self.timings, summary)
        return summary

    def step(self, listener: Listener | None = None) -> None:
        """Do one round, and evaluate it if it is due."""
        began = time.perf_counter()
        self.round += 1
        last = self.round == self.experiment.rounds
        evaluate = last or self.round % self.experiment.evaluate_every == 0
        participants = self.engine.side.select(self.experiment.participation, self.round)
        up, down = self.engine.exchange(self.round)
        before = self.engine.server.model
        losses_so_far = self.metrics.series("train.loss")[1].tolist()
        report = self.engine.round(self.round, participants, evaluate, losses_so_far)
        self._synchronise()
        trained = time.perf_counter()
        view = self.engine.side.view(self.engine.server, report.participants, self.round)
        own = self.method.metrics(view)
        values = {
            "train.loss": float(report.loss.mean()),
            "train.flops": float(report.cost.dense.sum()),
            "train.sparse_flops": float(report.cost.sparse.sum()),
            "bytes.up": float(report.bytes_up + up),
            "bytes.down": float(report.bytes_down + down),
            **report.errors,
            **{name: value for name, value in own.items() if not isinstance(value, dict)},
        }
        self._warn_if_diverged(report)
        if last:
            for remark in self.method.remarks(view):
                warnings.warn(remark, FedStrataWarning, stacklevel=2)
        if evaluate:
            values |= self._evaluate(report, last)
        self.metrics.add_round(self.round, values)
        of_layers = {name: value for name, value in own.items() if isinstance(value, dict)}
        for metric, numbers in (self._layer_metrics(before, report) | of_layers).items():
            self.metrics.add_layers(self.round, metric, numbers)
        self._synchronise()
        self.timings.add(self.round, "train", trained - began)
        self.timings.add(self.round, "evaluate", time.perf_counter() - trained)
        if listener is not None:
            seconds = time.perf_counter() - began
            listener(
                Update(str(self.method), self.experiment.seed, self.round, self.experiment.rounds, seconds, values)
            )

    def _evaluate(self, report: RoundReport, last: bool) -> dict[str, float]:
        values: dict[str, float] = {}
        after, everywhere = self.engine.after(self.round)
        if report.before is not None:
            values |= self._note("client_before", report.before)
        values |= self._note("client_after", after)
        values |= everywhere
        if "global.accuracy" in everywhere:
            values |= self._note("global_on_clients", after)
        if self.experiment.validation:
            self._keep_the_best(everywhere)
        if last and self.method.adaptation is not None:
            scores, self.adapted = self.engine.adapted(self.round)
            values |= self._note("client_adapted", scores)
        return values

    def _keep_the_best(self, everywhere: dict[str, float]) -> None:
        """Keep the global model if it is better on the validation samples than all before."""
        if "validation.accuracy" not in everywhere:
            raise FedStrataError(
                f"The server of '{self.method}' sends clients different models, of which none can be chosen on "
                "validation samples; leave validation out."
            )
        before = self.metrics.series("validation.accuracy")[1].tolist()
        if everywhere["validation.accuracy"] > max(before, default=-math.inf):
            self.best = clone(self.engine.side.tested(self.engine.server, self.round))

    def _layer_metrics(self, before: Tensors, report: RoundReport) -> dict[str, dict[str, float]]:
        """Measure the layers that travelled: their update, and their cosine to the reference round."""
        layers, model = self.setting.layers, self.engine.server.model
        if self.round == self.experiment.reference_round:
            self.reference = clone(model)
        travelled = {name: tensor for name, tensor in model.items() if name in report.sent}
        measured = {"update": layer_updates(layers, before, travelled)}
        return {**measured, "cosine": layer_cosines(layers, self.reference, travelled)} if self.reference else measured

    def _note(self, label: str, scores: Scores) -> dict[str, float]:
        """Log one number per client, and return the summary over clients for the round."""
        values: dict[str, float] = {}
        if not scores.clients:
            return values
        for metric, numbers in (("accuracy", scores.accuracy), ("loss", scores.loss)):
            self.metrics.add_clients(self.round, f"{label}.{metric}", scores.clients, numbers.tolist())
            described = describe_clients(numbers, higher_is_better=metric == "accuracy")
            values |= {f"{label}.{metric}.{name}": value for name, value in described.items()}
        return values

    def _warn_if_diverged(self, report: RoundReport) -> None:
        bad = (~torch.isfinite(report.loss)).nonzero().flatten().tolist()
        if bad:
            client = report.participants[bad[0]]
            warnings.warn(
                f"The training loss of client {client} is not a finite number in round {self.round}: "
                "training has diverged. Lower the learning rate or set a clip.",
                FedStrataWarning,
                stacklevel=2,
            )

    def save(self, folder: RunFolder) -> None:
        """Save a checkpoint of the rounds so far."""
        state = pack(self.engine.server, self.engine.clients()) | under("reference", self.reference)
        state |= under("best", self.best)
        folder.save_checkpoint(self.round, state, {}, self.metrics, self.timings)

    def restore(self, folder: RunFolder) -> None:
        """Go on from the newest whole checkpoint, or from the beginning where there is none."""
        checkpoint = folder.load_checkpoint()
        if checkpoint is None:
            return
        state = Stack({name: tensor.to(self.setting.device) for name, tensor in checkpoint.state.items()})
        self.engine.restore(*unpack(state))
        self.reference, self.best = state.group("reference"), state.group("best")
        self.round, self.metrics, self.timings = checkpoint.round, checkpoint.metrics, checkpoint.timings

    def summary(self) -> dict[str, Any]:
        """Sum the run up: the last round, the mean of the last ten, and the best, each under its own name.

        Where samples are held out to choose a model on, ``validated`` is the round of that model.
        """
        rounds, accuracy = self.metrics.series("client_after.accuracy.mean")
        return {
            "method": str(self.method),
            "data": self.experiment.data,
            "model": self.experiment.model,
            "rounds": self.round,
            "clients": self.split.clients,
            "seed": self.experiment.seed,
            "headline": self.headline,
            "final": self.metrics.latest(),
            "last_ten": self.metrics.last_ten(),
            "best": self.metrics.best(),
            "best_round": int(rounds[accuracy.argmax()]) if len(rounds) else None,
            **self._validated(),
            **self.metrics.traffic(),
            "seconds": sum(self.timings.totals().values()),
            "parameters": sum(self.setting.initial[name].numel() for name in self.setting.layers.parameter_names),
            "engine": self.plan.engine,
        }

    def _validated(self) -> dict[str, Any]:
        """Tell in which round the model was best on the validation samples, the first of equals, and all it did."""
        rounds, accuracy = self.metrics.series("validation.accuracy")
        if not len(rounds):
            return {}
        chosen = int(rounds[accuracy.argmax()])
        return {"validated_round": chosen, "validated": self.metrics.of_round(chosen)}

    def environment(self) -> dict[str, Any]:
        """Tell with what the run is made."""
        return describe_environment(self.setting.device, dataclasses.asdict(self.plan))

    def _synchronise(self) -> None:
        if self.setting.device.type == "cuda":
            torch.cuda.synchronize(self.setting.device)
