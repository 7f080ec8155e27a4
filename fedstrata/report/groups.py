"""Runs in groups: those that differ in their seed only are one configuration, and what tells it from the others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from fedstrata.errors import FedStrataError
from fedstrata.spec import parse

NOT_DISTINGUISHING = frozenset(
    {"seed", "data_root", "checkpoint_every", "metrics", "evaluate_trained", "diagnose", "chunk", "replay"}
)
"""Keys of an experiment that do not make it another configuration."""


_FINGERPRINT = re.compile(r"@sha256:(\w{6})\w*")


class ComparableRun(Protocol):
    """What a comparison needs of a run: its configuration, its numbers, and which split of the data it saw."""

    @property
    def experiment(self) -> Mapping[str, Any]:
        """The keys and values of the experiment."""

    @property
    def summary(self) -> Mapping[str, Any]:
        """The summary of the run: ``headline``, ``final``, ``last_ten``, ``best``, bytes and seconds."""

    @property
    def split_hash(self) -> str:
        """The fingerprint of the split."""

    @property
    def client_accuracies(self) -> Mapping[int, float]:
        """Each client's accuracy behind the headline when it was last tested, by the client's number."""


R = TypeVar("R", bound=ComparableRun)


@dataclass(frozen=True)
class Group(Generic[R]):
    """The runs that differ in their seed only: one per seed, in the order of the seeds.

    ``repeated`` are further runs of a seed that is already there: no new evidence, and left out of every mean.
    """

    label: str
    runs: tuple[R, ...]
    repeated: tuple[R, ...] = ()


def group_runs(runs: Sequence[R]) -> list[Group[R]]:
    """Gather the seeds of each configuration, in the order in which configurations first appear.

    A group is labelled by its method; where several configurations share a method, by what else differs between those.
    """
    members: dict[str, dict[int, R]] = {}
    repeated: dict[str, list[R]] = {}
    for run in runs:
        seen = members.setdefault(_configuration(run), {})
        if seed_of(run) in seen:
            repeated.setdefault(_configuration(run), []).append(run)
        else:
            seen[seed_of(run)] = run
    labels = _labels([next(iter(seen.values())).experiment for seen in members.values()])
    return [
        Group(label, tuple(seen[seed] for seed in sorted(seen)), tuple(repeated.get(configuration, ())))
        for label, (configuration, seen) in zip(labels, members.items(), strict=True)
    ]


def setting_of(group: Group[R]) -> str:
    """Tell apart what a group's runs share with those of other methods: everything but the method and the seed."""
    kept = {key: value for key, value in group.runs[0].experiment.items() if key not in {"method", *NOT_DISTINGUISHING}}
    return json.dumps(kept, sort_keys=True, default=str)


def _configuration(run: ComparableRun) -> str:
    kept = {key: value for key, value in run.experiment.items() if key not in NOT_DISTINGUISHING}
    return json.dumps(kept, sort_keys=True, default=str)


def seed_of(run: ComparableRun) -> int:
    """The seed of a run."""
    return int(run.experiment.get("seed", 0))


def _labels(experiments: Sequence[Mapping[str, Any]]) -> list[str]:
    by_method: dict[str, list[Mapping[str, Any]]] = {}
    for experiment in experiments:
        by_method.setdefault(str(experiment.get("method", "")), []).append(experiment)
    told = {method: iter(_short_names(_told_apart(same))) for method, same in by_method.items()}
    labels = []
    for experiment in experiments:
        method = str(experiment.get("method", ""))
        parts = [f"{key}={_in_words(value)}" for key, value in next(told[method]).items()]
        labels.append(f"{method} [{', '.join(parts)}]" if parts else method)
    return labels


def _in_words(value: object) -> str:
    """Write a value in a label; of imported files the names, and enough of what they held to tell two versions apart.

    >>> _in_words(None), _in_words(("slow.py@sha256:146f20ef96b7f20ef96b7",))
    ('none', 'slow.py@146f20')
    """
    if isinstance(value, list | tuple):
        return "+".join(_FINGERPRINT.sub(r"@\1", str(one)) for one in value)
    return "none" if value is None else str(value)


def _told_apart(experiments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What to name experiments by: those on several datasets by these, and then by what differs on each of them.

    What else goes with a dataset, such as its model, would make a name longer and tell nobody more.

    >>> _told_apart([{"data": "a", "model": "mlp"}, {"data": "b", "model": "cnn"}, {"data": "b", "model": "vit"}])
    [{'data': 'a'}, {'data': 'b', 'model': 'cnn'}, {'data': 'b', 'model': 'vit'}]
    """
    if not _varies("data", experiments):
        return differing_settings(experiments)
    by_data: dict[str, list[Mapping[str, Any]]] = {}
    for one in experiments:
        by_data.setdefault(repr(one.get("data")), []).append(one)
    differing = {data: iter(differing_settings(same)) for data, same in by_data.items()}
    return [{"data": one.get("data"), **next(differing[repr(one.get("data"))])} for one in experiments]


def differing_settings(experiments: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tell for each experiment what makes it another than the others, beside seed and method.

    Where a text names the same component everywhere, it is the parameters that differ.

    >>> differing_settings([{"partition": "dirichlet(alpha=0.1)"}, {"partition": "dirichlet(alpha=0.5)"}])
    [{'partition.alpha': 0.1}, {'partition.alpha': 0.5}]
    """
    keys = dict.fromkeys(key for one in experiments for key in one if key != "method" and _varies(key, experiments))
    found: list[dict[str, Any]] = [{} for _ in experiments]
    for key in keys:
        values = [one.get(key) for one in experiments]
        for place, differing in enumerate(_differing_parameters(key, values) or [{key: value} for value in values]):
            found[place] |= differing
    return found


def _differing_parameters(key: str, texts: Sequence[Any]) -> list[dict[str, Any]] | None:
    """Tell the parameters in which texts of one component differ; none where it is not one, or they have no names."""
    calls = []
    for text in texts:
        try:
            calls.append(parse(text) if isinstance(text, str) else ())
        except FedStrataError:
            return None
    if {len(call) for call in calls} != {1} or len({call[0].name for call in calls}) > 1:
        return None
    if any(call[0].positional for call in calls):
        return None
    given = [dict(call[0].keywords) for call in calls]
    names = [name for name in dict.fromkeys(name for one in given for name in one) if _varies(name, given)]
    if any(name not in one for name in names for one in given):
        return None  # a default that is not written here
    return [{f"{key}.{name}": one[name] for name in names} for one in given]


def _short_names(settings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Leave out the keys that parameters belong to, where they can be told apart without."""
    keys = list(dict.fromkeys(key for one in settings for key in one))
    ends = [key.rsplit(".", 1)[-1] for key in keys]
    names = {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}
    return [{names[key]: value for key, value in one.items()} for one in settings]


def _varies(key: str, experiments: Sequence[Mapping[str, Any]]) -> bool:
    return key not in NOT_DISTINGUISHING and len({repr(experiment.get(key)) for experiment in experiments}) > 1
