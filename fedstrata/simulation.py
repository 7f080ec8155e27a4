"""A run from beginning to end: data, model and method in; rounds; a run folder out."""

from __future__ import annotations

import dataclasses
import secrets
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedstrata.data import Dataset, Split, datasets, parse_transforms, partitions
from fedstrata.data.aside import set_aside, take_proxy
from fedstrata.data.transforms import Transform
from fedstrata.diagnostics import layer_cosines, layer_updates
from fedstrata.engines.batches import DeviceData, Work
from fedstrata.engines.engine import Engine, RoundReport, pack, unpack
from fedstrata.engines.evaluation import Scores
from fedstrata.engines.planning import Plan, build_engine, make_plan
from fedstrata.engines.server import Declared, ServerSide
from fedstrata.engines.setting import Setting
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.layers import LayerMap
from fedstrata.methods import Method, Part
from fedstrata.metrics import MetricLog, TimingLog, describe_clients
from fedstrata.models import ModelSpec, build_model
from fedstrata.optimisers import optimisers
from fedstrata.runs import RunFolder, describe_environment
from fedstrata.schedules import schedules
from fedstrata.stack import Tensors, clone
from fedstrata.wire import AS_IS

DEFAULT_CLIENTS = 20
_REFERENCE = "reference:"
_DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.float32, "fp64": torch.float64}


class Interrupted(Exception):  # noqa: N818 - not an error
    """A run stopped after a round because it was asked to; its checkpoint is saved."""

    def __init__(self, signal_number: int, round: int, out: Path | None) -> None:
        super().__init__(f"stopped after round {round}")
        self.signal_number = signal_number
        self.round = round
        self.out = out


@dataclass(frozen=True)
class Ingredients:
    """Python objects that replace what an experiment would name: a user's own data, split, model or method.

    ``secret`` is what a server or a site of a deployment knows for itself; nothing in a simulation is secret.
    """

    dataset: Dataset | None = None
    split: Split | None = None
    model: nn.Module | ModelSpec | Callable[..., nn.Module] | None = None
    method: Method | Part | None = None
    secret: str | None = field(default=None, repr=False)

    def with_secret(self) -> Ingredients:
        """Draw a secret, unless one was given.

        It need not be kept: noise drawn with it leaves the machine only once its round, or the site's step, is saved.
        """
        return self if self.secret is not None else dataclasses.replace(self, secret=secrets.token_hex(16))

    def describe(self, experiment: Experiment) -> Experiment:
        """Write the objects' names into the experiment, so that its record tells what was run."""
        changes: dict[str, Any] = {}
        if self.dataset is not None:
            changes["data"] = f"python:{self.dataset.name}"
        if self.split is not None:
            changes |= {"partition": f"python:{self.split.hash}", "clients": self.split.clients}
        if self.model is not None:
            changes["model"] = (
                str(self.model) if isinstance(self.model, ModelSpec) else f"python:{_name_of(self.model)}"
            )
        if self.method is not None:
            method = Method.make(self.method)
            changes["method"] = str(method)
        return experiment.with_changes(changes)


def _name_of(value: object) -> str:
    return str(getattr(value, "__name__", type(value).__name__))


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
class Simulation:
    """A prepared experiment; :meth:`run` does it."""

    experiment: Experiment
    dataset: Dataset
    split: Split
    method: Method
    setting: Setting
    engine: Engine
    plan: Plan
    server_side: ServerSide
    reference: Tensors = field(default_factory=dict)
    metrics: MetricLog = field(default_factory=MetricLog)
    timings: TimingLog = field(default_factory=TimingLog)
    round: int = 0

    @classmethod
    def prepare(
        cls, experiment: Experiment, ingredients: Ingredients | None = None, plan: Plan | None = None
    ) -> Simulation:
        """Load the data, divide it, build the model and choose the engine; whatever does not fit is refused here."""
        ready = prepare_setting(experiment, ingredients)
        plan = plan or make_plan(
            experiment.engine, experiment.chunk, ready.setting, ready.model, ready.data, ready.declared
        )
        plan.set_threads()
        engine = build_engine(plan, ready.setting, ready.model, ready.data, ready.declared)
        return cls(
            ready.experiment,
            ready.dataset,
            ready.split,
            ready.setting.method,
            ready.setting,
            engine,
            plan,
            ServerSide(ready.setting, ready.declared),
        )

    def run(self, folder: RunFolder | None = None, listener: Listener | None = None) -> dict[str, Any]:
        """Do the remaining rounds and return the summary.

        With a folder, checkpoints are saved on the way and the results at the end.
        """
        with _stop_requests() as stop:
            while self.round < self.experiment.rounds:
                self.step(listener)
                due = self.round % self.experiment.checkpoint_every == 0 or self.round == self.experiment.rounds
                if folder is not None and (due or stop):
                    self.save(folder)
                if stop and self.round < self.experiment.rounds:
                    raise Interrupted(stop[0], self.round, None if folder is None else folder.path)
        summary = self.summary()
        if folder is not None:
            folder.finish(self.engine.server.model, self.metrics, self.timings, summary)
        return summary

    def step(self, listener: Listener | None = None) -> None:
        """Do one round, and evaluate it if it is due."""
        began = time.perf_counter()
        self.round += 1
        last = self.round == self.experiment.rounds
        evaluate = last or self.round % self.experiment.evaluate_every == 0
        participants = self.server_side.select(self.experiment.participation, self.round)
        up, down = self.engine.exchange(self.round)
        before = self.engine.server.model
        losses_so_far = self.metrics.series("train.loss")[1].tolist()
        report = self.engine.round(self.round, participants, evaluate, losses_so_far)
        self._synchronise()
        trained = time.perf_counter()
        values = {
            "train.loss": float(report.loss.mean()),
            "bytes.up": float(report.bytes_up + up),
            "bytes.down": float(report.bytes_down + down),
            **report.errors,
            **self.method.round_metrics(self.server_side.view(self.engine.server, participants, self.round)),
        }
        self._warn_if_diverged(report, participants)
        if evaluate:
            values |= self._evaluate(report, last)
        self.metrics.add_round(self.round, values)
        for metric, numbers in self._layer_metrics(before, participants).items():
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
        if everywhere is not None:
            values |= {
                "global.accuracy": everywhere[0],
                "global.loss": everywhere[1],
                **self._note("global_on_clients", after),
            }
        if last and self.method.adaptation() is not None:
            values |= self._note("client_adapted", self.engine.adapted(self.round))
        return values

    def _layer_metrics(self, before: Tensors, participants: Sequence[int]) -> dict[str, dict[str, float]]:
        """Measure the layers that travel: update, cosine to the reference round, and the method's own numbers."""
        layers, server = self.setting.layers, self.engine.server
        if self.round == self.experiment.reference_round:
            self.reference = clone(server.model)
        view = self.server_side.view(server, participants, self.round)
        sent = self.server_side.broadcast(server, participants[:1], self.round).tensors  # all get the same names
        travelling = {name: tensor for name, tensor in server.model.items() if name in sent}
        measured = {"update": layer_updates(layers, before, travelling), **self.method.layer_metrics(view)}
        return {**measured, "cosine": layer_cosines(layers, self.reference, travelling)} if self.reference else measured

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

    def _warn_if_diverged(self, report: RoundReport, participants: tuple[int, ...]) -> None:
        bad = (~torch.isfinite(report.loss)).nonzero().flatten().tolist()
        if bad:
            warnings.warn(
                f"The training loss of client {participants[bad[0]]} is not a finite number in round {self.round}: "
                "training has diverged. Lower the learning rate or set a clip.",
                FedStrataWarning,
                stacklevel=2,
            )

    def save(self, folder: RunFolder) -> None:
        """Save a checkpoint of the rounds so far."""
        reference = {f"{_REFERENCE}{name}": tensor for name, tensor in self.reference.items()}
        state = {**pack(self.engine.server, self.engine.clients()), **reference}
        folder.save_checkpoint(self.round, state, {}, self.metrics, self.timings)

    def restore(self, folder: RunFolder) -> None:
        """Go on from the newest whole checkpoint, or from the beginning where there is none."""
        checkpoint = folder.load_checkpoint()
        if checkpoint is None:
            return
        state = {name: tensor.to(self.setting.device) for name, tensor in checkpoint.state.items()}
        self.engine.restore(*unpack(state))
        self.reference = {
            name.removeprefix(_REFERENCE): tensor for name, tensor in state.items() if name.startswith(_REFERENCE)
        }
        self.round, self.metrics, self.timings = checkpoint.round, checkpoint.metrics, checkpoint.timings

    def summary(self) -> dict[str, Any]:
        """Sum the run up: the last round, the mean of the last ten, and the best, each under its own name."""
        headline = "client_adapted" if self.method.adaptation() is not None else "client_after"
        rounds, accuracy = self.metrics.series("client_after.accuracy.mean")
        return {
            "method": str(self.method),
            "data": self.experiment.data,
            "model": self.experiment.model,
            "rounds": self.round,
            "seed": self.experiment.seed,
            "headline": headline,
            "final": self.metrics.latest(),
            "last_ten": self.metrics.last_ten(),
            "best": self.metrics.best(),
            "best_round": int(rounds[accuracy.argmax()]) if len(rounds) else None,
            **self.metrics.traffic(),
            "seconds": sum(self.timings.totals().values()),
            "parameters": sum(self.setting.initial[name].numel() for name in self.setting.layers.parameter_names),
            "engine": self.plan.engine,
        }

    def environment(self) -> dict[str, Any]:
        """Tell with what the run is made."""
        return describe_environment(self.setting.device, dataclasses.asdict(self.plan))

    def _synchronise(self) -> None:
        if self.setting.device.type == "cuda":
            torch.cuda.synchronize(self.setting.device)


@dataclass(frozen=True)
class Prepared:
    """An experiment with its data loaded and divided and its model built, before any engine runs it."""

    experiment: Experiment
    dataset: Dataset
    split: Split
    model: nn.Module
    setting: Setting
    data: DeviceData
    declared: Declared


def prepare_setting(experiment: Experiment, ingredients: Ingredients | None = None) -> Prepared:
    """Load the data, divide it and build the model; whatever does not fit is refused here."""
    ingredients = ingredients or Ingredients()
    experiment = ingredients.describe(experiment)
    refuse_unknown_names(experiment, ingredients)
    transforms = parse_transforms(experiment.transforms)
    dataset = ingredients.dataset or load_data(experiment)
    for transform in transforms:
        transform.check(dataset)
    split = ingredients.split or divide(experiment, dataset)
    experiment = experiment.with_changes({"clients": split.clients})
    refuse_odd_joining(experiment, Method.make(ingredients.method or experiment.method))
    model, setting = make_setting(experiment, ingredients, dataset.input_shape, dataset.classes)
    data = device_data(setting, dataset, split, transforms, _DTYPES[experiment.precision])
    declared = Declared(torch.from_numpy(data.split.sizes), data.label_counts)
    return Prepared(experiment, dataset, split, model, setting, data, declared)


def device_data(
    setting: Setting, dataset: Dataset, split: Split, transforms: Sequence[Transform], dtype: torch.dtype
) -> DeviceData:
    """Set aside the samples that the method asks for, and put the data on the device."""
    held_out: tuple[np.ndarray, ...] = ()
    proxy: np.ndarray | None = None
    if setting.method.held_out():
        split, held_out = set_aside(split, setting.method.held_out(), setting.seed)
    if setting.method.proxy_samples():
        dataset, split, proxy = take_proxy(dataset, split, setting.method.proxy_samples(), setting.seed)
    return DeviceData(dataset, split, transforms, setting.device, dtype, held_out, proxy)


def refuse_odd_joining(experiment: Experiment, method: Method) -> None:
    """Refuse clients that join never or where nobody can, and federations in which nobody could begin."""
    if (experiment.late_clients > 0) != (experiment.join_round is not None):
        raise FedStrataError("late_clients says how many clients join later, join_round when: give both or neither.")
    if experiment.clients is not None and experiment.late_clients >= experiment.clients:
        raise FedStrataError(
            f"{experiment.late_clients} of {experiment.clients} clients are to join later, so that nobody could begin; "
            "give fewer late_clients."
        )
    for part in method.parts:
        if experiment.late_clients and not part.lets_join:
            raise FedStrataError(
                f"Under '{part.name}' the models of all clients count from the first round on, so that nobody can join "
                "later; choose another method, or leave late_clients and join_round out."
            )


def refuse_unknown_names(experiment: Experiment, ingredients: Ingredients) -> None:
    """Refuse an experiment that names what does not exist or fit together, before any data is read for it."""
    method = Method.make(ingredients.method or experiment.method)
    objection = method.objection_to_rounding
    if objection is not None and experiment.upload_values != AS_IS:
        raise FedStrataError(
            f"With '{method}' uploads cannot travel as {experiment.upload_values}: {objection}. "
            "Leave upload_values as it is."
        )
    optimisers.make(experiment.optimiser)
    schedules.make(experiment.schedule)
    parse_transforms(experiment.transforms)
    choose_device(experiment.device)


def make_setting(
    experiment: Experiment, ingredients: Ingredients, input_shape: tuple[int, ...], classes: int
) -> tuple[nn.Module, Setting]:
    """Build the model for samples of some shape, and gather what everybody in the run knows; no data is needed."""
    method = Method.make(ingredients.method or experiment.method)
    device = choose_device(experiment.device)
    set_precision(experiment.precision, experiment.deterministic)
    model = build_model(ingredients.model or experiment.model, input_shape, classes, experiment.seed)
    layers = LayerMap.read(model, input_shape)
    for note in method.notes(layers):
        warnings.warn(note, FedStrataWarning, stacklevel=2)
    model = model.to(device=device, dtype=_DTYPES[experiment.precision])
    initial = {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    initial = method.initial(layers, initial, experiment.seed)
    personal = method.personal(layers)
    if experiment.statistics == "local":
        personal |= {name for name in layers.norm_names if name in layers.buffer_names}
    return model, Setting(
        method=method,
        layers=layers,
        initial={name: initial[name] for name in (*layers.parameter_names, *layers.buffer_names)},
        personal=personal,
        resident=personal | method.resident(layers),
        optimiser=optimisers.make(experiment.optimiser),
        schedule=schedules.make(experiment.schedule),
        work=Work(
            experiment.epochs,
            experiment.steps,
            experiment.batch_size,
            experiment.last_batch,
            method.samples_per_epoch(),
        ),
        rounds=experiment.rounds,
        seed=experiment.seed,
        clients=experiment.clients or DEFAULT_CLIENTS,
        late_clients=experiment.late_clients,
        join_round=experiment.join_round,
        upload_values=experiment.upload_values,
        download_values=experiment.download_values,
        precision=experiment.precision,
        device=device,
        secret=ingredients.secret or "",
    )


def load_data(experiment: Experiment) -> Dataset:
    """Load the dataset that an experiment names."""
    _refuse_python(experiment.data, "data")
    root = None if experiment.data_root is None else Path(experiment.data_root)
    return datasets.make(experiment.data).load(root)


def divide(experiment: Experiment, dataset: Dataset) -> Split:
    """Divide a dataset as an experiment says."""
    _refuse_python(experiment.partition, "split")
    partition = partitions.make(experiment.partition).with_seed(experiment.seed)
    clients = experiment.clients or partition.clients_for(dataset) or DEFAULT_CLIENTS
    return partition.split(dataset, clients)


def _refuse_python(text: str, what: str) -> None:
    if text.startswith("python:"):
        raise FedStrataError(
            f"This run was made with a {what} from Python ({text.removeprefix('python:')}); "
            "continue it from Python with fedstrata.resume, and pass the same object."
        )


def choose_device(given: str) -> torch.device:
    """Turn ``auto``, ``cpu`` or ``cuda`` into a device that exists."""
    name = ("cuda" if torch.cuda.is_available() else "cpu") if given == "auto" else given
    try:
        device = torch.device(name)
    except RuntimeError:
        raise FedStrataError(f"There is no device '{given}'; use auto, cpu, cuda or cuda:0.") from None
    if device.type not in ("cpu", "cuda"):
        raise FedStrataError(f"The device '{given}' is not supported; use auto, cpu, cuda or cuda:0.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise FedStrataError(
            f"The device '{given}' was asked for, but this machine has no usable CUDA GPU; use --device cpu."
        )
    return device


def set_precision(precision: str, deterministic: bool) -> None:
    """Set the process-wide switches for matrix products, and for repeatable operations."""
    allowed = precision in ("tf32", "bf16")
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
    torch.use_deterministic_algorithms(deterministic)
    torch.backends.cudnn.deterministic = deterministic


@contextmanager
def _stop_requests() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM, so that a run ends after a whole round; a second SIGINT interrupts at once."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return

    def note(number: int, frame: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        again = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
        warnings.warn(f"Stopping after this round{again}.", FedStrataWarning, stacklevel=1)

    previous = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
