"""What of an experiment is a site's own to set: parameters that name a place on a machine, or let it fetch something.

A server cannot know the folders of a site, and must not make it open or fetch what its operator has not chosen. So a
site refuses an experiment that sets such a parameter (``local`` in its declaration, see :mod:`fedstrata.spec`), unless
its operator has set it too; everything else must then stay as the server says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from fedstrata.data import datasets, parse_transforms, partitions
from fedstrata.diagnostics.choosing import choose
from fedstrata.errors import FedStrataError, unknown_name
from fedstrata.experiment import Experiment
from fedstrata.losses import losses
from fedstrata.methods import Method
from fedstrata.models import models
from fedstrata.optimisers import optimisers
from fedstrata.schedules import schedules
from fedstrata.scores import make_metrics
from fedstrata.spec import Spec

_PYTHON = "python:"
COMPONENTS: Mapping[str, Callable[[str], Sequence[Spec]]] = {
    "data": lambda text: (datasets.make(text),),
    "partition": lambda text: (partitions.make(text),),
    "model": lambda text: (models.make(text),),
    "method": lambda text: Method.make(text).parts,
    "optimiser": lambda text: (optimisers.make(text),),
    "schedule": lambda text: (schedules.make(text),),
    "loss": lambda text: (losses.make(text),),
    "test_loss": lambda text: (losses.make(text),),
    "transforms": parse_transforms,
    "metrics": make_metrics,
    "diagnose": lambda text: choose(text).diagnostics,
}
"""How the text under each key of an experiment becomes components."""


def components(experiment: Experiment, key: str) -> Sequence[Spec]:
    """Make what an experiment names under a key; nothing is opened or fetched for that."""
    text = getattr(experiment, key)
    return () if text is None or text.startswith(_PYTHON) else COMPONENTS[key](text)


def local_parameters(experiment: Experiment, keys: Collection[str] = tuple(COMPONENTS)) -> dict[str, dict[str, Any]]:
    """List, by key, the parameters that name a place on a machine or let it fetch something."""
    found = {
        key: {name: value for one in components(experiment, key) for name, value in one.local_values().items()}
        for key in COMPONENTS
        if key in keys
    }
    return {key: values for key, values in found.items() if values}


def with_own_parameters(experiment: Experiment, own: Mapping[str, str], given: Collection[str] = ()) -> Experiment:
    """Put what a site's operator has set in the place of what the server says, and refuse what nobody else may set.

    ``own`` are texts by key. Keys that are ``given`` in another way, such as by ``--data``, are not looked at.
    """
    for key, text in own.items():
        if key not in COMPONENTS:
            raise unknown_name("key that a site can set called", key, COMPONENTS)
        server, site = (
            _without_local(components(one, key)) for one in (experiment, experiment.with_changes({key: text}))
        )
        if server != site:
            raise FedStrataError(
                f"This site was started with --set {key}='{text}', but the server's experiment has "
                f"'{getattr(experiment, key)}'; a site can set only paths and what may be fetched."
            )
    for key, values in local_parameters(experiment, COMPONENTS.keys() - {*own, *given}).items():
        set_there = ", ".join(f"{name}={value}" for name, value in values.items())
        how = "--data or --data-root" if key == "data" else f"--set {key}='...', with what is right on this machine"
        raise FedStrataError(
            f"The server sets {set_there} in {key} = '{getattr(experiment, key)}': a place on this machine, or leave "
            f"to fetch, which only the site itself may give, with {how}."
        )
    return experiment.with_changes(dict(own))


def _without_local(made: Sequence[Spec]) -> list[tuple[type[Spec], dict[str, Any]]]:
    """Tell components apart by all but their local parameters."""
    return [
        (
            type(one),
            {field.name: getattr(one, field.name) for field in dataclasses.fields(one) if not one.is_local(field)},
        )
        for one in made
    ]
