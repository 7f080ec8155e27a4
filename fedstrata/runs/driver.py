"""Driving the rounds of one experiment, simulated or on real sites: the engine runs them, this measures and saves."""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from fedstrata.callbacks import Callbacks, RoundView
from fedstrata.data import Dataset, Split
from fedstrata.diagnostics import LayerNumbers, measure_changes, read_changes
from fedstrata.engines.engine import Adapted, Engine, RoundReport, pack, unpack
from fedstrata.engines.evaluation import Scores
from fedstrata.engines.planning import ENGINES, Plan, SharedMemory, build_engine, make_plan, memory_of
from fedstrata.engines.setting import Setting
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.methods import Method, Server
from fedstrata.plugins import imported_callbacks
from fedstrata.runs.ahead import BegunRound, mark_end, on_host
from fedstrata.runs.choosing import Best
from fedstrata.runs.describing import describe_environment
from fedstrata.runs.devices import spare_host
from fedstrata.runs.diagnosing import Diagnosis, look
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.layer_facts import layer_facts
from fedstrata.runs.metrics import AGGREGATE, ANSWERED, EVERYBODY, MetricLog, TimingLog, describe_clients
from fedstrata.runs.models import client_model, global_card, global_model, models_of_clients
from fedstrata.runs.noting import note_scores
from fedstrata.runs.pacing import Pace
from fedstrata.runs.preparing import (
    Ingredients,
    note_exact_statistics,
    note_late_reference,
    note_untested_clients,
    prepare,
)
from fedstrata.runs.recalling import same_work
from fedstrata.runs.signals import Interrupted, stop_requests
from fedstrata.runs.summing_up import summarise
from fedstrata.stack import Stack, Tensors, clone, take, take_first, under
from fedstrata.trained import TrainedModel

EVALUATIONS = (
    "global", "validation", "global_on_clients", "client_before", "client_after", "client_validation",
    "client_before_validation", "client_adapted", "client_adapted_validation",
)  # fmt: skip
"""The labels under which models are tested."""
_DIVERGED = "training has diverged"
"""What is remembered once it was told."""


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
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    reference: Tensors = field(default_factory=dict)
    best: Best = field(default_factory=Best)
    """What validation has chosen of the rounds' models."""
    adapted: Adapted | None = None
    """Clients' models after the final adaptation of a method that has one, once they were made."""
    best_in_the_end: Best | None = None
    """What validation has chosen of the rounds' models and the adapted ones, once there were any."""
    tested_accuracies: dict[int, float] = field(default_factory=dict)
    metrics: MetricLog = field(default_factory=MetricLog)
    timings: TimingLog = field(default_factory=TimingLog)
    round: int = 0
    warned: set[str] = field(default_factory=set)
    stopped: str | None = None
    """Why the run ended before its last round, if it did: by a callback, or for want of better models."""
    seconds: float = 0.0
    """How long the last round took."""
    runs_ahead: bool | None = None
    """Whether a round may begin before the numbers of the one before are read; by default, on a GPU."""
    unread: BegunRound | None = None
    """The round whose numbers are still to be read."""
    read_at: float = 0.0
    """When the numbers of the last round had been read."""

    @property
    def method(self) -> Method:
        """The method that is run."""
        return self.setting.method

    @property
    def model(self) -> Tensors:
        """The shared part of the model that the run gives: that of the best round where samples are held out to tell,
        else the one that is tested after the last; where clients use models of their own, what the server holds.
        """
        return self.best.model or self.tested()

    def tested(self) -> Tensors:
        """Return the shared part of the model that is tested after this round."""
        if self.one_for_all:
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

    @property
    def chosen_round(self) -> int:
        """The round of the model that the run gives: the best on validation samples, else the last."""
        if not self.best.model:
            return self.round
        rounds, accuracy = self.metrics.series(self._judged_by)
        return int(rounds[accuracy.argmax()])

    @property
    def chosen(self) -> Best:
        """What validation has chosen of all models that there were so far."""
        return self.best_in_the_end or self.best

    def used(self, clients: Sequence[int], last: bool = False) -> Tensors:
        """Return the models that some clients use, a stack in their order; adapted, once the run is at its end.

        Where validation has chosen models, it is these, unless the ``last`` ones are asked for.
        """
        chosen = {} if last else self.chosen.of_clients(clients)
        if chosen:
            return chosen
        if self.adapted is not None and self.adapted.models:
            return take(self.adapted.models, torch.tensor(list(clients)))
        return self.engine.models(clients, self.round)

    def global_model(self, last: bool = False) -> TrainedModel:
        """Make the global model, ready to use."""
        return global_model(self, last)

    def client_model(self, client: int | str, last: bool = False) -> TrainedModel:
        """Make the model that a client uses, ready to use."""
        return client_model(self, client, last)

    @classmethod
    def prepare(
        cls,
        experiment: Experiment,
        ingredients: Ingredients | None = None,
        plan: Plan | None = None,
        tell: Callable[[str], None] = lambda words: None,
        shared: SharedMemory | None = None,
    ) -> Driver:
        """Prepare a simulation: load and divide the data, build the model, choose the engine; misfits are refused.

        ``tell`` hears in a few words what is being done. ``shared`` is given where others run on the same device.
        """
        ready = prepare(experiment, ingredients, tell)
        note_exact_statistics(ready)
        note_untested_clients(ready)
        note_late_reference(experiment)
        diagnosis = Diagnosis.of(experiment.diagnose, ready.setting)
        tell("choosing an engine")
        setting, model, data, declared = ready.setting, ready.model, ready.data, ready.declared
        free = None if shared is None else shared.free
        participants = max(1, int(experiment.participation * setting.clients + 0.5))
        known, work = (None if ingredients is None else ingredients.plans), same_work(experiment)
        plan = plan or make_plan(
            experiment.engine,
            experiment.chunk,
            setting,
            model,
            data,
            declared,
            free,
            participants,
            like=None if known is None else known.get(work),
        )
        if known is not None:
            known.setdefault(work, plan)
        if shared is not None:
            tell("waiting for memory")
            shared.take(memory_of(plan, participants, setting, model, data))
        plan.set_threads()
        spare_host(setting.device)
        engine = build_engine(plan, setting, model, data, declared)
        return cls(
            ready.experiment,
            ready.dataset,
            ready.split,
            ready.setting,
            engine,
            plan,
            ready.model,
            diagnosis,
        )

    def run(self, folder: RunFolder | None = None, callbacks: Iterable[object] = ()) -> dict[str, Any]:
        """Do the remaining rounds and return the summary.

        With a folder, checkpoints are saved on the way and the results at the end. Callbacks are those that are given,
        after those that imported files have registered.
        """
        called = Callbacks([*imported_callbacks(self.experiment.imports), *callbacks])
        if folder is not None:
            folder.describe_layers(layer_facts(self.setting.layers, self.method))
            folder.begin_live(self.round, self.metrics, self.timings)
        pace = Pace(self.experiment.checkpoint_every, lambda: sum(tensor.nbytes for tensor in self._state().values()))
        with stop_requests() as stop:
            while not self.ended:
                begun = self.begin_round()
                self.read_numbers(called, folder)  # of the round before, while a GPU does this one
                self.unread = begun
                due = folder is not None and pace.due(self.round)
                if due or self.ended or not self._may_run_ahead(begun, called):
                    self.read_numbers(called, folder)
                if stopping := bool(stop):
                    self.read_numbers(called, folder)
                if folder is not None and (due or self.ended or stopping):
                    with pace.saving():
                        self.save(folder)
                if stopping and not self.ended:
                    if folder is not None:
                        folder.end_live()
                    raise Interrupted(stop[0], self.round, None if folder is None else folder.path)
        if self.round < self.experiment.rounds:
            self._test_early_end()
        if self.method.adaptation is not None and self.adapted is None and self.plan.engine in ENGINES:
            self._adapt()  # a run that ended after its last checkpoint: its numbers are there, its models are not
        summary = self.summary()
        if folder is not None:
            own = models_of_clients(self) if self.plan.engine in ENGINES else None
            if self.best.model or self.best.clients:
                folder.save_last(self.tested(), models_of_clients(self, last=True))
            folder.finish(self.model, own, global_card(self), self.metrics, self.timings, summary)
        called.at_end(self._view(self.round, self.metrics.of_round(self.round)), summary)
        return summary

    @property
    def ended(self) -> bool:
        """Whether there is no round to do: all are done, or a callback has ended the run."""
        return self.stopped is not None or self.round >= self.experiment.rounds

    def step(self, callbacks: Callbacks | None = None) -> None:
        """Do one round, evaluate it if it is due, and show it to the callbacks."""
        self._note_round(self.begin_round(), callbacks)

    def begin_round(self) -> BegunRound:
        """Let the engine do one round; on a GPU it may still be under way when this returns."""
        began = time.perf_counter()
        self.round += 1
        last = self.round == self.experiment.rounds
        evaluate = last or self.round % self.experiment.evaluate_every == 0
        participants = self.engine.side.select(self.experiment.participation, self.round)
        up, down = self.engine.exchange(self.round)
        before = self.engine.server.model
        losses_so_far = self.metrics.series("train.loss")[1].tolist()
        self.engine.observer.begin(self.diagnosis.needs(self.round, self.experiment.rounds))
        trained_too = evaluate and self.experiment.evaluate_trained
        report = self.engine.round(self.round, participants, trained_too, losses_so_far)
        view = self.engine.side.view(self.engine.server, report.participants, self.round)
        moved = self._layer_metrics(before, report, view)
        end, asked = mark_end(self.setting.device), len(participants)
        return BegunRound(self.round, last, evaluate, asked, up, down, before, report, view, moved, began, end)

    def _may_run_ahead(self, begun: BegunRound, callbacks: Callbacks) -> bool:
        """Tell whether the next round may begin before the numbers of this one are read.

        It may in a simulation where nothing depends on them: no test of models, no diagnostic, no schedule that reads
        losses, and nobody who looks at the model of each round or may end the run.
        """
        wanted = self.setting.device.type == "cuda" if self.runs_ahead is None else self.runs_ahead
        return (
            wanted
            and self.plan.engine in ENGINES
            and not begun.evaluated
            and not self.diagnosis.chosen
            and not self.setting.schedule.reads_losses
            and callbacks.only_numbers
        )

    def read_numbers(self, callbacks: Callbacks, folder: RunFolder | None = None) -> None:
        """Read and show the numbers of the round that was begun, where they were not read yet."""
        if self.unread is None:
            return
        begun, self.unread = self.unread, None
        with begun.reading() if begun.number < self.round else nullcontext():
            self._note_round(begun, callbacks)
        if folder is not None:
            folder.show_round(self.metrics, self.timings)

    def _note_round(self, begun: BegunRound, callbacks: Callbacks | None) -> None:
        """Note what a round gave, test models if that is due, and show it to the callbacks."""
        report, since = begun.report, max(begun.began, self.read_at)
        trained = begun.wait()
        own = self.method.metrics(begun.view)
        told, losses = on_host(report)
        values = {
            **told,
            "participation.clients": float(len(report.participants)),
            "participation.fraction": len(report.participants) / begun.asked,
            "bytes.up": float(report.bytes_up + begun.up),
            "bytes.down": float(report.bytes_down + begun.down),
            **report.errors,
            **{name: value for name, value in own.items() if not isinstance(value, dict)},
        }
        self._warn_if_diverged(begun, losses)
        if begun.last:
            self._remark(begun.view)
        self.tested_accuracies = {}
        if begun.evaluated:
            values |= self._evaluate(report.before, begun.last, report.judged)
        of_layers = {name: value for name, value in own.items() if isinstance(value, dict)}
        for metric, numbers in (read_changes(begun.moved) | of_layers).items():
            self.metrics.add_layers(begun.number, metric, numbers)
        if begun.evaluated:
            self._synchronise()
        merging = 0.0 if report.aggregation is None else report.aggregation.seconds()
        self.timings.add(begun.number, "train", max(trained - since - merging, 0.0))
        if report.aggregation is not None:
            self.timings.add(begun.number, AGGREGATE, merging)
        self.timings.add(begun.number, "evaluate", time.perf_counter() - trained)
        values |= look(self, begun.before, report, begun.view, own)
        self.metrics.add_round(begun.number, values)
        self.read_at = time.perf_counter()
        if callbacks is not None:
            self.seconds = self.read_at - since
            asked = callbacks.after_round(self._view(begun.number, values, begun.evaluated))
            if asked is not None and not begun.last:
                self.stopped = str(asked) or "a callback asked for it"
        if begun.evaluated and not begun.last and self.stopped is None:
            self.stopped = self._waited_enough()

    def _view(self, round: int, values: Mapping[str, float], evaluated: bool = True) -> RoundView:
        method, seed, rounds = str(self.method), self.experiment.seed, self.experiment.rounds
        layers = self.metrics.of_layers(round)
        return RoundView(method, seed, round, rounds, self.seconds, values, evaluated, self, layers)

    def tested_model(self, round: int) -> Tensors:
        """Copy the shared part of the model that is tested after a round; refused once that round is over."""
        self._refuse_past(round)
        return clone(self.tested())

    def ready_model(self, round: int, client: int | None) -> TrainedModel:
        """Make a model ready to use, the global one or a client's; refused once that round is over."""
        self._refuse_past(round)
        return self.global_model(last=True) if client is None else self.client_model(client, last=True)

    def rounds_done(self) -> Iterator[tuple[int, dict[str, float], dict[str, dict[str, float]]]]:
        """Tell of each round so far: its number, its metrics, and those of the layers."""
        for number in range(1, self.round + 1):
            yield number, self.metrics.of_round(number), self.metrics.of_layers(number)

    def _refuse_past(self, round: int) -> None:
        if round != self.round:
            raise FedStrataError(
                f"The model of round {round} is gone, the run has come to round {self.round}; take a model while the "
                "callback is called, and keep that."
            )

    def _test_early_end(self) -> None:
        """Test and say what belongs to a last round, where the run was ended before it."""
        participants = self.engine.side.select(self.experiment.participation, self.round)
        self._remark(self.engine.side.view(self.engine.server, participants, self.round))
        if self.round % self.experiment.evaluate_every:
            values = self._evaluate(None, last=True)
        elif self.method.adaptation is not None:
            values = self._note_adapted(self._adapt())
        else:
            return
        self.metrics.add_round(self.round, values)

    def _evaluate(self, before: Scores | None, last: bool, judged: Scores | None = None) -> dict[str, float]:
        values: dict[str, float] = {}
        after, everywhere = self.engine.after(self.round)
        if before is not None:
            values |= self._note("client_before", before)
        if judged is not None:
            values |= note_scores(self.metrics, self.round, "client_before_validation", judged, (), self.warned)
        values |= self._note("client_after", after)
        values |= everywhere
        for metric, numbers in after.of_all.items():
            self.metrics.add_classes(self.round, metric, EVERYBODY, numbers)
        if "global.accuracy" in everywhere:
            values |= self._note("global_on_clients", after)
        if self.experiment.validation:
            self._keep_the_best(everywhere)
        if self.experiment.validation_fraction:
            values |= self._judge_at_clients()
        if last and self.method.adaptation is not None:
            values |= self._note_adapted(self._adapt())
        return values

    def _adapt(self) -> Adapted:
        """Let clients adapt their models; where they judge models, each keeps the better one."""
        self.adapted = adapted = self.engine.adapted(self.round)
        if adapted.judged is not None:
            self.best_in_the_end = self.best.or_adapted(adapted.models, adapted.judged.accuracy, self.round)
        return adapted

    def _note_adapted(self, adapted: Adapted) -> dict[str, float]:
        values = self._note("client_adapted", adapted.scores)
        if adapted.judged is not None:
            judged = adapted.judged
            values |= note_scores(self.metrics, self.round, "client_adapted_validation", judged, (), self.warned)
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
            self.best.keep_model(self.tested())

    def _judge_at_clients(self) -> dict[str, float]:
        """Let clients judge the models on samples of their own, and keep the best: of all, or each client's own."""
        numbers, one_for_all = np.zeros(self.setting.clients), self.one_for_all
        for ids, models, accuracy in self.engine.judged(self.round):
            numbers[list(ids)] = accuracy
            if not one_for_all:
                self.best.keep_clients(ids, models, accuracy, self.round, self.setting.clients)
        name = "client_validation.accuracy"
        self.metrics.add_clients(self.round, name, range(len(numbers)), numbers)
        values = {f"{name}.{statistic}": value for statistic, value in describe_clients(numbers).items()}
        before = self.metrics.series(f"{name}.mean")[1].tolist()
        if one_for_all and values[f"{name}.mean"] > max(before, default=-math.inf):
            self.best.keep_model(self.tested())
        return values

    def _waited_enough(self) -> str | None:
        """Tell that the last evaluations brought no better model, where the experiment asks to end then."""
        patience = self.experiment.patience
        accuracy = self.metrics.series(self._judged_by)[1]
        if patience is None or not len(accuracy) or len(accuracy) - 1 - int(accuracy.argmax()) < patience:
            return None
        return f"no model was better on the validation samples for {patience} evaluation{'s' * (patience > 1)} in a row"

    @property
    def _judged_by(self) -> str:
        """The name of the number by which models are chosen, if they are."""
        return "validation.accuracy" if self.experiment.validation else "client_validation.accuracy.mean"

    def _layer_metrics(self, before: Tensors, report: RoundReport, view: Server) -> dict[str, LayerNumbers]:
        """Measure the layers that travelled: their update, and their cosine to the reference round."""
        if self.round == self.experiment.reference_round:
            self.reference = clone(view.model)
        travelled = {name: tensor for name, tensor in view.model.items() if name in report.sent}
        return measure_changes(self.setting.layers, before, travelled, self.reference)

    def _note(self, label: str, scores: Scores) -> dict[str, float]:
        if label in ("client_after", "client_adapted"):
            self.tested_accuracies = dict(zip(scores.clients, scores.accuracy.tolist(), strict=True))
        values = note_scores(self.metrics, self.round, label, scores, self.setting.metrics, self.warned)
        everybody = np.count_nonzero(self.split.test_sizes)
        if label in ("client_after", "client_adapted") and len(scores.clients) < everybody:
            values[f"{label}.{ANSWERED}"] = len(scores.clients) / everybody
        return values

    def _remark(self, view: Server) -> None:
        for remark in self.method.remarks(view):
            warnings.warn(remark, FedStrataWarning, stacklevel=2)

    def _warn_if_diverged(self, begun: BegunRound, losses: np.ndarray) -> None:
        """Say it once: what is not a number now is mostly none in all later rounds."""
        bad = np.flatnonzero(~np.isfinite(losses))
        if len(bad) and _DIVERGED not in self.warned:
            self.warned.add(_DIVERGED)
            client = begun.report.participants[bad[0]]
            warnings.warn(
                f"The training loss of client {client} is not a finite number in round {begun.number}: "
                "training has diverged. Lower the learning rate or set a clip. Later rounds are not told of.",
                FedStrataWarning,
                stacklevel=2,
            )

    def save(self, folder: RunFolder) -> None:
        """Save a checkpoint of the rounds so far."""
        facts = {} if self.stopped is None else {"stopped": self.stopped, "rounds": self.experiment.rounds}
        facts |= self.diagnosis.facts()
        folder.save_checkpoint(self.round, self._state(), facts, self.metrics, self.timings)

    def _state(self) -> Stack:
        """Put together all tensors that the next round depends on."""
        state = pack(self.engine.server, self.engine.clients()) | under("reference", self.reference)
        return state | self.best.state() | self.diagnosis.state()

    def restore(self, folder: RunFolder) -> None:
        """Go on from the newest whole checkpoint, or from the beginning where there is none."""
        checkpoint = folder.load_checkpoint()
        if checkpoint is None:
            return
        state = Stack({name: tensor.to(self.setting.device) for name, tensor in checkpoint.state.items()})
        self.engine.restore(*unpack(state))
        self.reference, self.best = state.group("reference"), Best.from_state(state)
        self.diagnosis.restore(state, checkpoint.facts)
        self.round, self.metrics, self.timings = checkpoint.round, checkpoint.metrics, checkpoint.timings
        if checkpoint.facts.get("rounds") == self.experiment.rounds:
            self.stopped = checkpoint.facts.get("stopped")
        if self.round < self.experiment.rounds:
            self._forget_the_end()

    def _forget_the_end(self) -> None:
        """Drop what was measured only because a round was the last, where the run was extended since."""
        due = self.round % self.experiment.evaluate_every == 0
        labels = ("client_adapted", "client_adapted_validation") if due else EVALUATIONS
        not_due = self.diagnosis.not_due(self.round, self.experiment.rounds)
        self.metrics = self.metrics.without(self.round, (*labels, *not_due))

    def summary(self) -> dict[str, Any]:
        """Sum the run up."""
        return summarise(self)

    def environment(self) -> dict[str, Any]:
        """Tell with what the run is made."""
        return describe_environment(self.setting.device, dataclasses.asdict(self.plan))

    def _synchronise(self) -> None:
        if self.setting.device.type == "cuda":
            torch.cuda.synchronize(self.setting.device)
