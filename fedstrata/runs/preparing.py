"""From an experiment to all that an engine needs: the data loaded and divided, the model built, the method made."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedstrata.data import Dataset, Split, datasets, parse_transforms, partitions
from fedstrata.data.channels import Statistics, statistics_of_clients, with_statistics, with_statistics_of_all
from fedstrata.data.columns import ENDINGS as TABLE_ENDINGS
from fedstrata.data.contents import untouched
from fedstrata.data.held_out import hold_out_at_clients, hold_out_for_server, hold_out_for_validation
from fedstrata.data.partitions import Partitioner
from fedstrata.data.transforms import OTHER_WAYS, Transform, normalisation_in
from fedstrata.engines.batches import DeviceData, Work
from fedstrata.engines.planning import Plan
from fedstrata.engines.setting import Setting
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.experiment import Experiment
from fedstrata.flops import Flops
from fedstrata.layers import LayerMap
from fedstrata.losses import CrossEntropy, Loss, losses
from fedstrata.methods import Declared, Method, Outline, Part
from fedstrata.models import ModelSpec, build_model, refuse_frozen
from fedstrata.optimisers import optimisers
from fedstrata.plugins import require_imports
from fedstrata.private_torch import within
from fedstrata.runs.devices import DTYPES, choose_device, set_precision, spare_host
from fedstrata.schedules import schedules
from fedstrata.scores import Metric, describe_metrics, further_metrics, make_metrics
from fedstrata.wire import AS_IS

DEFAULT_CLIENTS = 20
DEFAULT_PARTITION = "dirichlet:0.1"


_NAMED = 5
"""So many clients are named in a warning."""


@dataclass(frozen=True)
class Ingredients:
    """Python objects that replace what an experiment would name: a user's own data, split, model, method or metrics.

    ``secret`` says whether noise comes from the operating system, as it does at a server and at sites unless they are
    told otherwise, or from the seed, as in a simulation. A split takes the place of the ``clients`` and the
    ``partition`` that an experiment names; with ``only_split``, which marks one that a user gave, an experiment that
    names others is refused, and it is told where the split trains on what it tests on.
    """

    dataset: Dataset | None = None
    split: Split | None = None
    model: nn.Module | ModelSpec | Callable[..., nn.Module] | None = None
    method: Method | Part | None = None
    metrics: tuple[Metric, ...] | None = None
    named: NamedData | None = None
    """Where the dataset that an experiment names is kept once it is loaded, if several runs use it."""
    plans: dict[Experiment, Plan] | None = None
    """How runs of the same work were planned, if several are compared: the others are planned alike."""
    secret: bool | None = None
    only_split: bool = False

    def __post_init__(self) -> None:
        """Refuse a split that is of other data."""
        if self.dataset is not None and self.split is not None:
            self.split.check(self.dataset)

    def load(self, experiment: Experiment) -> Dataset:
        """Take the dataset that was given, or load the one that the experiment names."""
        if self.dataset is not None:
            return self.dataset
        return load_data(experiment) if self.named is None else self.named.load(experiment)

    def make_method(self, experiment: Experiment) -> Method:
        """Make the method: the object that was given, or the one that the experiment names."""
        return Method.make(experiment.method if self.method is None else self.method)

    def with_secret(self) -> Ingredients:
        """Draw noise that nobody can draw again, unless something else was said.

        It cannot be drawn again here either: what it was put on leaves the machine once it is on disk, and not before.
        """
        return self if self.secret is not None else dataclasses.replace(self, secret=True)

    def describe(self, experiment: Experiment) -> Experiment:
        """Write the objects' names into the experiment, so that its record tells what was run.

        What it says of dividing data is refused where that is not done.
        """
        changes: dict[str, Any] = {}
        if self.dataset is not None:
            changes["data"] = f"python:{self.dataset.name}"
        if self.split is not None:
            if self.only_split:
                own = self.dataset is not None and bool(self.split.client_names(self.dataset))
                _refuse_idle_division(experiment, self.split, ("natural",) if own else ())
            changes |= {"partition": _recorded(self.split), "clients": self.split.clients}
        if self.model is not None:
            changes["model"] = (
                str(self.model) if isinstance(self.model, ModelSpec) else f"python:{_name_of(self.model)}"
            )
        if self.method is not None:
            changes["method"] = str(self.method)
        if self.metrics is not None:
            changes["metrics"] = describe_metrics(self.metrics) or None
        return experiment.with_changes(changes)


def _refuse_idle_division(experiment: Experiment, split: Split, alike: Sequence[str] = ()) -> None:
    """Refuse what an experiment says of dividing data that is divided already, and not in that way or one ``alike``."""
    idle = []
    if experiment.clients not in (None, split.clients):
        idle.append(f"clients = {experiment.clients}")
    if experiment.partition not in (None, _recorded(split), *alike):
        idle.append(f"partition = '{experiment.partition}'")
    if idle:
        raise FedStrataError(
            f"{' and '.join(idle)} would have no effect: the data comes with its split, over {split.clients} clients; "
            f"leave {'them' if len(idle) > 1 else 'it'} out, or give a dataset without a split, such as the first of "
            "what fedstrata.from_clients returns."
        )


def _recorded(split: Split) -> str:
    return f"python:{split.hash}"


def _name_of(value: object) -> str:
    plain = within(value) if isinstance(value, nn.Module) else value
    return str(getattr(plain, "__name__", type(plain).__name__))


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

    def with_statistics(self, statistics: Statistics) -> Prepared:
        """Normalise the same samples by other statistics."""
        return dataclasses.replace(
            self, dataset=with_statistics(self.dataset, statistics), data=self.data.with_statistics(statistics)
        )


def prepare(
    experiment: Experiment, ingredients: Ingredients | None = None, tell: Callable[[str], None] = lambda words: None
) -> Prepared:
    """Load the data, divide it and build the model; whatever does not fit is refused here.

    ``tell`` hears in a few words what is being done.
    """
    ingredients = ingredients or Ingredients()
    experiment, method = read_experiment(experiment, ingredients)
    transforms = parse_transforms(experiment.transforms)
    tell(f"loading the data {experiment.data}")
    dataset = ingredients.load(experiment)
    for transform in transforms:
        transform.check(dataset)
    tell("dividing the data")
    split = ingredients.split
    if split is None:
        experiment, split = divide(experiment, dataset)
    split.check(dataset)
    if ingredients.split is not None and ingredients.only_split:
        note_trained_tests(split, dataset)
    experiment = experiment.with_changes({"clients": split.clients})
    refuse_odd_joining(experiment, method)
    tell(f"building the model {experiment.model}")
    model, setting = make_setting(experiment, method, ingredients, dataset.input_shape, dataset.classes, dataset.trial)
    refuse_odd_validation(experiment, setting)
    normalisation = normalisation_in(transforms)
    if normalisation is not None and normalisation.of_everybody:
        dataset = with_statistics_of_all(dataset, split)
    validation = None
    if experiment.validation:
        validation = hold_out_for_validation(dataset, experiment.validation, experiment.seed)[1]
    data = device_data(
        setting,
        dataset,
        split,
        transforms,
        DTYPES[experiment.precision],
        validation,
        experiment.validation_fraction,
    )
    declared = Declared(data.sizes, data.label_counts)
    return Prepared(experiment, dataset, split, model, setting, data, declared)


def read_experiment(experiment: Experiment, ingredients: Ingredients) -> tuple[Experiment, Method]:
    """Make the method, and refuse what can be refused before any data is read: what is unknown or does not fit.

    Return the experiment too, with the names of what was given as objects.
    """
    require_imports(experiment.imports)
    method = ingredients.make_method(experiment)
    experiment = ingredients.describe(experiment)
    refuse_misfits(experiment, method)
    if ingredients.metrics is None:
        make_metrics(experiment.metrics or ())
    refuse_odd_patience(experiment)
    if experiment.validation and ingredients.split is not None:
        raise FedStrataError(
            f"validation = {experiment.validation} holds samples out before the data is divided, but the split comes "
            "from Python; give a validation_fraction, or let a partition divide the data."
        )
    refuse_odd_joining(experiment, method)
    if isinstance(ingredients.model, nn.Module):
        refuse_frozen(ingredients.model)
    return experiment, method


def refuse_unfit(experiment: Experiment, ingredients: Ingredients) -> None:
    """Refuse an experiment that could not be prepared, as far as it can be told without dividing the data.

    The data is read and the model built only where it depends on the model's layers whether the method fits.
    """
    experiment, method = read_experiment(experiment, ingredients)
    if experiment.validation:
        dataset = ingredients.load(experiment)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FedStrataWarning)  # they come when the run is prepared
            _, setting = make_setting(
                experiment, method, ingredients, dataset.input_shape, dataset.classes, dataset.trial
            )
        refuse_odd_validation(experiment, setting)


def note_exact_statistics(ready: Prepared) -> None:
    """Say of a simulation that its mean and deviation are outside of what its method promises.

    Real sites refuse to give the sums for them away.
    """
    part, normalisation = ready.setting.method.answering_for_privacy, normalisation_in(ready.data.transforms)
    exact = normalisation is not None and normalisation.of_everybody and ready.dataset.estimated
    if part is not None and exact and ready.dataset.mean is not None:
        warnings.warn(
            "'normalise' takes the exact mean and deviation of all clients' training samples, which the account of "
            f"'{part}' does not cover; on real sites it is refused. To be covered, choose other transforms: "
            f"{OTHER_WAYS}.",
            FedStrataWarning,
            stacklevel=2,
        )


def note_untested_clients(ready: Prepared) -> None:
    """Say which clients are in no accuracy over clients, because they have no test samples."""
    sizes = ready.split.test_sizes
    without = np.flatnonzero(sizes == 0)
    if 0 < len(without) < len(sizes):
        named = ", ".join(map(str, without[:_NAMED])) + (" and others" if len(without) > _NAMED else "")
        warnings.warn(
            f"Clients without test samples: {named} ({len(without)} of {len(sizes)}). They train, but accuracies over "
            "clients are those of the others.",
            FedStrataWarning,
            stacklevel=2,
        )


def note_late_reference(experiment: Experiment) -> None:
    """Say that the layers' inertia will not be measured, where the round that was chosen for it does not come."""
    chosen = experiment.reference_round
    if chosen > experiment.rounds and chosen != Experiment().reference_round:
        warnings.warn(
            f"The reference_round {chosen} does not come in {experiment.rounds} rounds, so that the layers' inertia is "
            f"not measured; choose one of 1 to {experiment.rounds}.",
            FedStrataWarning,
            stacklevel=2,
        )


def note_trained_tests(split: Split, dataset: Dataset) -> None:
    """Say of a split in which somebody trains on samples on which models are tested that its accuracies tell less."""
    both = split.trained_and_tested(dataset)
    if both:
        tested = len(np.unique(split.test_parts.flat))
        warnings.warn(
            f"{both:,} of the {tested:,} samples on which clients are tested are trained on too, so that accuracies "
            "tell less of samples that are new; give training and test parts without common positions.",
            FedStrataWarning,
            stacklevel=2,
        )


_REPEATED = 0.1
"""Up to this part, it is not told how many of the samples at clients are repeats."""


def note_repeats(partition: Partitioner, split: Split) -> None:
    """Say where so many samples are asked for (``samples``, ``test_samples``) that clients hold some several times."""
    told = []
    for kind, asked, parts in (("training", "samples", split.train_parts), ("test", "test_samples", split.test_parts)):
        if getattr(partition, asked, None) is not None:
            whole, repeats = int(parts.sizes.sum()), parts.repeats()
            if repeats > _REPEATED * whole:
                told.append((f"{repeats:,} of the {whole:,} {kind} samples", asked))
    if told:
        warnings.warn(
            f"{' and '.join(words for words, _ in told)} at clients are repeats of others at the same client: where a "
            f"class has fewer samples than '{partition}' is to give a client, its rule is to give them several times. "
            f"For samples that differ, ask for fewer ({' and '.join(asked for _, asked in told)}).",
            FedStrataWarning,
            stacklevel=2,
        )


def device_data(
    setting: Setting,
    dataset: Dataset,
    split: Split,
    transforms: Sequence[Transform],
    dtype: torch.dtype,
    validation: np.ndarray | None = None,
    validation_fraction: float | None = None,
) -> DeviceData:
    """Hold out the samples that the method asks for, and put the data on the device."""
    own = statistics_of_clients(dataset, split) if setting.own_inputs else None
    held_out: tuple[np.ndarray, ...] = ()
    proxy: np.ndarray | None = None
    needs = setting.method.needs
    judged: tuple[np.ndarray, ...] = ()
    if validation_fraction:
        split, judged = hold_out_at_clients(
            split, validation_fraction, setting.seed, "validation_fraction", "validation at clients"
        )
    if needs.held_out:
        split, held_out = hold_out_at_clients(split, needs.held_out, setting.seed)
    if needs.proxy:
        dataset, split, proxy = hold_out_for_server(dataset, split, needs.proxy, setting.seed)
    return DeviceData(dataset, split, transforms, setting.device, dtype, held_out, proxy, validation, judged, own)


def refuse_odd_joining(experiment: Experiment, method: Method) -> None:
    """Refuse clients that join never or where nobody can, and federations in which nobody could begin."""
    if (experiment.late_clients > 0) != (experiment.join_round is not None):
        raise FedStrataError("late_clients says how many clients join later, join_round when: give both or neither.")
    if experiment.clients is not None and experiment.late_clients >= experiment.clients:
        raise FedStrataError(
            f"{experiment.late_clients} of {experiment.clients} clients are to join later, so that nobody could begin; "
            "give fewer late_clients."
        )
    objection = method.objection_to_joining
    if experiment.late_clients and objection is not None:
        raise FedStrataError(
            f"Nobody can join later: {objection}; choose another method, or leave late_clients and join_round out."
        )


def refuse_odd_patience(experiment: Experiment) -> None:
    """Refuse two ways to choose a model, and to wait for a better one where nothing tells what is better."""
    if experiment.validation and experiment.validation_fraction:
        raise FedStrataError(
            "validation holds samples out from all clients, validation_fraction some at each; give one of them."
        )
    if experiment.patience and not (experiment.validation or experiment.validation_fraction):
        raise FedStrataError(
            f"patience = {experiment.patience} waits for better models on validation samples, and there are none; "
            "give validation or validation_fraction too."
        )


def refuse_odd_validation(experiment: Experiment, setting: Setting) -> None:
    """Refuse to choose a global model on validation samples where this is not the one that is used in the end."""
    if experiment.validation and (not setting.everybody_alike or setting.method.adaptation is not None):
        raise FedStrataError(
            f"validation = {experiment.validation} chooses the best global model, but with "
            f"{_what_is_own(setting)}; give a validation_fraction instead, or choose another."
        )


def _what_is_own(setting: Setting) -> str:
    if setting.own_inputs:
        return "'normalise:site' clients prepare inputs by statistics of their own"
    return f"'{setting.method}' clients use models of their own"


def refuse_misfits(experiment: Experiment, method: Method) -> None:
    """Refuse an experiment that names what does not exist or fit together, before any data is read for it."""
    objection = method.objection_to_rounding
    if objection is not None and experiment.upload_values != AS_IS:
        raise FedStrataError(
            f"With '{method}' uploads cannot travel as {experiment.upload_values}: {objection}. "
            "Leave upload_values as it is."
        )
    optimisers.make(experiment.optimiser)
    schedules.make(experiment.schedule)
    refuse_unused_loss(experiment, method)
    normalisation = normalisation_in(parse_transforms(experiment.transforms))
    if method.needs.proxy and normalisation is not None and normalisation.of_each:
        raise FedStrataError(
            f"'{method}' learns from samples at the server, which belong to no client by whose statistics "
            "'normalise:site' could prepare them; use 'normalise'."
        )
    choose_device(experiment.device)


def refuse_unused_loss(experiment: Experiment, method: Method) -> None:
    """Refuse a loss that nobody would train with, because the method has one of its own."""
    loss, decider = losses.make(experiment.loss), method.decides_loss
    if decider is not None and loss != CrossEntropy():
        raise FedStrataError(
            f"The loss '{loss}' would have no effect: '{decider.name}' decides the local loss itself; leave the loss "
            "out, or choose another method."
        )


def make_test_loss(experiment: Experiment, classes: int) -> Loss:
    """Make the loss that tests tell; one that says of a sample what depends on others is refused."""
    loss = losses.make(experiment.test_loss)
    loss.check(classes)
    if not loss.judges:
        raise FedStrataError(
            f"Models cannot be tested by the loss '{loss}', which weighs samples, or looks at all that a client has; "
            "choose one without weights as test_loss, such as 'cross-entropy' or 'focal'."
        )
    return loss


def make_setting(
    experiment: Experiment,
    method: Method,
    ingredients: Ingredients,
    input_shape: tuple[int, ...],
    classes: int,
    trial: Tensor | None = None,
) -> tuple[nn.Module, Setting]:
    """Build the model for samples of some shape, and gather what everybody in the run knows; no data is needed.

    The model is tried on zeros, or on ``trial``, two samples, where inputs are whole numbers.
    """
    device = choose_device(experiment.device)
    set_precision(experiment.precision, experiment.deterministic)
    spare_host(device)
    given = experiment.model if ingredients.model is None else ingredients.model
    model = build_model(given, input_shape, classes, experiment.seed, trial, device)
    refuse_frozen(model)
    trial = None if trial is None else trial.to(device)
    layers = LayerMap.read(model, input_shape, trial)
    loss = losses.make(experiment.loss)
    loss.check(classes)
    test_loss = make_test_loss(experiment, classes)
    metrics = further_metrics(experiment.metrics or () if ingredients.metrics is None else ingredients.metrics, classes)
    optimiser = optimisers.make(experiment.optimiser)
    clients = experiment.clients or DEFAULT_CLIENTS
    fewest = max(1, int(experiment.participation * (clients - experiment.late_clients) + 0.5))
    for note in method.notes(Outline(layers, experiment.rounds, optimiser, clients, fewest)):
        warnings.warn(note, FedStrataWarning, stacklevel=2)
    model = model.to(dtype=DTYPES[experiment.precision])
    initial = {name: tensor.detach().clone() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    initial = method.initial(layers, initial, experiment.seed)
    personal = method.personal(layers)
    normalisation = normalisation_in(parse_transforms(experiment.transforms))
    if experiment.statistics == "local":
        personal |= {name for name in layers.norm_names if name in layers.buffer_names}
    return model, Setting(
        method=method,
        layers=layers,
        flops=Flops.read(model, input_shape, trial),
        initial={name: initial[name] for name in (*layers.parameter_names, *layers.buffer_names)},
        personal=personal,
        resident=personal | method.resident(layers),
        optimiser=optimiser,
        schedule=schedules.make(experiment.schedule),
        loss=loss,
        test_loss=test_loss,
        work=Work(
            experiment.epochs,
            experiment.steps,
            experiment.batch_size,
            experiment.last_batch,
            method.needs.samples_per_epoch,
        ),
        rounds=experiment.rounds,
        seed=experiment.seed,
        clients=clients,
        late_clients=experiment.late_clients,
        join_round=experiment.join_round,
        upload_values=experiment.upload_values,
        download_values=experiment.download_values,
        precision=experiment.precision,
        device=device,
        own_inputs=normalisation is not None and normalisation.of_each,
        metrics=metrics,
        secret=bool(ingredients.secret),
        replay=experiment.replay,
    )


def load_data(experiment: Experiment) -> Dataset:
    """Load the dataset that an experiment names."""
    _refuse_python(experiment.data, "data")
    if experiment.data.lower().endswith(TABLE_ENDINGS) and "(" not in experiment.data and ":" not in experiment.data:
        raise FedStrataError(
            f"'{experiment.data}' is a file; write table(path={experiment.data}, label=..., site=...) with the names "
            "of its columns for the class and, if there is one, the owner of a row."
        )
    root = None if experiment.data_root is None else Path(experiment.data_root)
    return untouched(datasets.make(experiment.data).load(root))


class NamedData:
    """Loads a dataset when an experiment first names it, and keeps it for those that name it too."""

    def __init__(self) -> None:
        self._loaded: tuple[tuple[str, str | None], Dataset] | None = None

    def load(self, experiment: Experiment) -> Dataset:
        """Load the dataset that an experiment names, unless it was the last one to be loaded."""
        wanted = experiment.data, experiment.data_root
        if self._loaded is None or self._loaded[0] != wanted:
            self._loaded = None  # so that two are never held at once
            self._loaded = wanted, load_data(experiment)
        return self._loaded[1]


def divide(experiment: Experiment, dataset: Dataset) -> tuple[Experiment, Split]:
    """Divide a dataset as an experiment says, but for the samples that are held out for validation.

    Return the experiment too, with how and over how many clients. Where it does not say, the sites of the data are the
    clients: nobody's data is mixed unless that is asked for.
    """
    text = experiment.partition or (DEFAULT_PARTITION if dataset.sites is None else "natural")
    _refuse_python(text, "split")
    partition = partitions.make(text).with_seed(experiment.seed)
    clients = experiment.clients or partition.clients_for(dataset) or DEFAULT_CLIENTS
    if experiment.validation:
        dataset, _ = hold_out_for_validation(dataset, experiment.validation, experiment.seed)
    split = partition.split(dataset, clients)
    note_repeats(partition, split)
    return experiment.with_changes({"partition": text, "clients": split.clients}), split


def _refuse_python(text: str, what: str) -> None:
    if text.startswith("python:"):
        raise FedStrataError(
            f"This run was made with a {what} from Python ({text.removeprefix('python:')}); "
            "continue it from Python with fedstrata.resume, and pass the same object."
        )
