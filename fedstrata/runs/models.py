"""The models that a run gives: the global one, and each client's own, as they are tested and ready to use."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fedstrata.data import parse_transforms
from fedstrata.data.channels import Statistics, statistics_of_clients
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.runs.folder import RunFolder, folder_named
from fedstrata.runs.metrics import MetricLog
from fedstrata.runs.naming import number_of
from fedstrata.runs.recalling import import_experiment
from fedstrata.stack import Tensors, concatenate, take_first
from fedstrata.trained import Card, TrainedModel, preprocessing_of
from fedstrata.trained.model import Network, network_of

if TYPE_CHECKING:
    from fedstrata.runs.driver import Driver

_CLIENTS_AT_ONCE = 16
_SCORES = ("accuracy", "loss")
_STATISTICS = ("normalise/mean", "normalise/deviation")
"""The names of each client's own statistics, beside its tensors."""


def global_model(driver: Driver, last: bool = False) -> TrainedModel:
    """Make the global model of a run: the one that is tested as ``global``, or that the server goes on with.

    Where validation has chosen it, it is of the best round, unless the ``last`` one is asked for.
    """
    tensors = driver.tested() if last else driver.model
    _refuse_half(str(driver.method), [name for name in driver.setting.initial if name not in tensors])
    if not driver.one_for_all:
        _say_it_is_shared(str(driver.method))
    return TrainedModel.make(driver.network, tensors, global_card(driver, last))


def client_model(driver: Driver, client: int | str, last: bool = False) -> TrainedModel:
    """Make the model that a client uses: the one behind the headline of the run."""
    names = driver.split.client_names(driver.dataset)
    client = number_of(client, driver.split.clients, names)
    tensors = take_first(driver.used([client], last))
    card = global_card(driver, last)
    if driver.setting.own_inputs:
        own = statistics_of_clients(driver.dataset, driver.split)
        card = card if own is None else _normalised_by(card, own[client])
    rounds, adapted = ((), ()) if last else (driver.chosen.rounds, driver.chosen.adapted)
    card = _of_client(card, client, names, driver.metrics, driver.headline, rounds, adapted)
    return TrainedModel.make(driver.network, tensors, card)


def global_card(driver: Driver, last: bool = False) -> Card:
    """Tell all that one must know to use the models of a run."""
    experiment, dataset = driver.experiment, driver.dataset
    round = driver.round if last else driver.chosen_round
    return Card(
        architecture=experiment.model,
        input_shape=dataset.input_shape,
        input_type=str(dataset.inputs.dtype).removeprefix("torch."),
        preprocessing=preprocessing_of(dataset, parse_transforms(experiment.transforms)),
        class_names=dataset.class_names,
        table=None if dataset.table is None else dataset.table.to_mapping(),
        vocabulary=None if dataset.vocabulary is None else dataset.vocabulary.to_mapping(),
        metrics=_global_metrics(driver.metrics, round),
        origin={
            "method": str(driver.method),
            "data": experiment.data,
            "partition": experiment.partition,
            "clients": driver.split.clients,
            "round": round,
            "seed": experiment.seed,
            "client": None,
        },
    )


def models_of_clients(driver: Driver, last: bool = False) -> Tensors:
    """Gather the clients' models, as stacks over all clients, as far as they differ from the global one."""
    if driver.one_for_all:
        return {}
    everybody = range(driver.split.clients)
    chunks = [everybody[begin : begin + _CLIENTS_AT_ONCE] for begin in range(0, len(everybody), _CLIENTS_AT_ONCE)]
    shared = driver.tested() if last else driver.model
    parts = [_differing(driver.used(chunk, last), shared) for chunk in chunks]
    names = dict.fromkeys(name for part in parts for name in part)
    whole = [
        {
            name: part[name] if name in part else shared[name].cpu().expand(len(chunk), *shared[name].shape)
            for name in names
        }
        for chunk, part in zip(chunks, parts, strict=True)
    ]
    return _own_statistics(driver) | concatenate(whole)


def _differing(models: Tensors, shared: Tensors) -> Tensors:
    """Bring from the device what differs in some clients' models from the one that they share."""
    common = [name for name in models if name in shared]
    same = [(models[name] == shared[name].to(models[name].device)).all() for name in common]
    alike = dict(zip(common, torch.stack(same).tolist() if same else [], strict=True))
    return {name: tensor.cpu() for name, tensor in models.items() if not alike.get(name, False)}


def _own_statistics(driver: Driver) -> Tensors:
    """Gather the statistics by which each client normalises, beside the models, where it does by its own."""
    own = statistics_of_clients(driver.dataset, driver.split) if driver.setting.own_inputs else None
    rows = () if own is None else zip(*own, strict=True)
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in zip(_STATISTICS, rows, strict=False)}


def _normalised_by(card: Card, statistics: Statistics) -> Card:
    """Change by what a card says that inputs are normalised."""
    own = {"step": "normalise", **{name: list(values) for name, values in statistics._asdict().items()}}
    steps = [own if step["step"] == "normalise" else step for step in card.preprocessing]
    return card.with_changes(preprocessing=tuple(steps if own in steps else [*steps, own]))


def client_number(path: Path, given: object) -> int:
    """Tell which client of a run is meant, by its number or by the name of its site."""
    folder = _run_with_client(path, given)
    return number_of(given, len(folder.data()["sizes"]), folder.client_names())


def _run_with_client(path: Path, client: object) -> RunFolder:
    if not (path / "experiment.toml").exists():
        raise FedStrataError(f"'{path}' is not the folder of a run, so that there is no client {client} in it.")
    return RunFolder.open(path)


def load_model(
    path: str | Path, client: int | str | None = None, network: Network | None = None, last: bool = False
) -> TrainedModel:
    """Load a model, ready to use: from the folder of a run, or from one that was saved or exported.

    Of a run, it is the global model, or the one that a client uses. A network that was made in Python is given again:
    the module, or a function that returns it. Where validation has chosen models, these are loaded, unless the ``last``
    ones are asked for.
    """
    path = folder_named(path)
    if client is None and not (path / "experiment.toml").exists():
        return TrainedModel.load(path, network)
    folder = RunFolder.open(path) if client is None else _run_with_client(path, client)
    import_experiment(folder)
    card, shared, own = folder.card(), folder.model(last), folder.models_of_clients(last)
    summary, metrics = folder.summary(), folder.metrics()
    if last:
        round = int(summary["rounds"])
        card = card.with_changes(
            metrics=_global_metrics(metrics, round), origin={**card.origin, "round": round}, hash=None
        )
    if client is None:
        method = str(card.origin["method"])
        _refuse_half(method, [name for name in own or () if name not in shared])
        if own:
            _say_it_is_shared(method)
    else:
        names = folder.client_names()
        client = number_of(client, int(card.origin["clients"]), names)
        if own is None:
            raise FedStrataError(
                f"The run in '{path}' was made on a network of sites, and the models that they use lie there; "
                "ask the site for its folder, or leave the client out for the global model."
            )
        rounds, adapted = (() if last else summary.get(f"validated_{what}", ()) for what in ("rounds", "adapted"))
        card = _of_client(card, client, names, metrics, summary["headline"], rounds, adapted)
        mine = {name: stack[client] for name, stack in own.items()}
        if all(name in mine for name in _STATISTICS):
            mean, deviation = (tuple(mine.pop(name).tolist()) for name in _STATISTICS)
            card = _normalised_by(card, Statistics(mean, deviation))
        shared = {**shared, **mine}
    return TrainedModel.make(network_of(card, shared, network), shared, card)


def _of_client(
    card: Card,
    client: int,
    names: Sequence[str],
    metrics: MetricLog,
    headline: str,
    rounds: Sequence[int],
    adapted: Sequence[bool],
) -> Card:
    """Change the global card into a client's, whose model may be of another round, from before it was adapted.

    A client that is a site of the data is told by its name too.
    """
    round = rounds[client] if rounds else int(card.origin["round"])
    label = "client_after" if adapted and not adapted[client] else headline
    reached = {name: metrics.of_client(client, f"{label}.{name}", round) for name in _SCORES}
    return card.with_changes(
        metrics={name: value for name, value in reached.items() if value is not None},
        origin={**card.origin, "round": round, "client": client, **({"site": names[client]} if names else {})},
        hash=None,
    )


def _global_metrics(metrics: MetricLog, round: int) -> dict[str, float]:
    reached = metrics.of_round(round)
    return {name: reached[f"global.{name}"] for name in _SCORES if f"global.{name}" in reached}


def _say_it_is_shared(method: str) -> None:
    warnings.warn(
        f"With '{method}' clients use models of their own, which the reported accuracies are of; this is the one that "
        "they share. Give a client for its own.",
        FedStrataWarning,
        stacklevel=3,
    )


def _refuse_half(method: str, lacking: Sequence[str]) -> None:
    if lacking:
        rest = f" and {len(lacking) - 1} more tensors stay" if len(lacking) > 1 else " stays"
        raise FedStrataError(
            f"With '{method}' there is no global model: '{min(lacking)}'{rest} at the clients. Take the model of a "
            "client: --client 0, or client=0 in Python."
        )
