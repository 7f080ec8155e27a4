"""Where a site's samples come from, which is the site's own choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from fedstrata.data import Split
from fedstrata.data.decoded import nothing_kept
from fedstrata.deployment.own_parameters import with_own_parameters
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.methods import Method
from fedstrata.plugins import imported_name, require_imports
from fedstrata.runs.preparing import Ingredients, Prepared, load_data, prepare


@dataclass(frozen=True)
class SiteData:
    """Where a site's samples come from.

    All samples of the dataset are its own, or with ``part`` (for rehearsals on one machine) only those that the
    experiment's partition gives to that client. ``data``, ``data_root`` and ``device`` are the site's own choice,
    whatever the server's experiment says of them; ``own`` are texts for other keys of the experiment, with paths of
    this machine or leave to fetch (:mod:`fedstrata.deployment.own_parameters`). ``ingredients`` are Python objects of
    the site's own.
    """

    data: str | None = None
    data_root: str | None = None
    device: str = "auto"
    part: int | None = None
    ingredients: Ingredients = field(default_factory=Ingredients)
    own: Mapping[str, str] = field(default_factory=dict)

    def _given(self) -> set[str]:
        """Name the keys of an experiment that this site decides itself, so that the server cannot."""
        objects = {"data": self.data or self.ingredients.dataset}
        objects |= {key: getattr(self.ingredients, key) for key in ("model", "method", "metrics")}
        return {key for key, value in objects.items() if value is not None}

    def make_method(self, experiment: Experiment) -> Method:
        """Make the method.

        The server names files that it has imported; only those that the site's operator has given too are used.
        """
        for text in experiment.imports:
            require_imports(
                [text],
                f"get it from the server's operator, read it, and start the client with --import {imported_name(text)}",
            )
        return self.ingredients.make_method(experiment)

    def prepare(self, experiment: Experiment, number: int, sites: int) -> Prepared:
        """Load the site's samples and build the model; no copy of the samples is left anywhere on the disk."""
        with nothing_kept():
            return self._prepare(experiment, number, sites)

    def _prepare(self, experiment: Experiment, number: int, sites: int) -> Prepared:
        self.make_method(experiment)
        experiment = with_own_parameters(experiment, self.own, self._given())
        experiment = replace(
            experiment, data=self.data or experiment.data, data_root=self.data_root, device=self.device, clients=sites
        )
        if self.part is not None:
            if self.part != number:
                raise FedStrataError(
                    f"This site was started with part {self.part} of the data, but the server counts it as {number}; "
                    "start the sites in the order of the sites file."
                )
            return _with_own_statistics(prepare(experiment, self.ingredients.with_secret()), number)
        dataset = load_data(experiment) if self.ingredients.dataset is None else self.ingredients.dataset
        # Every client of the split is this site: the server's numbering holds, and no other site's data is needed.
        split = Split((dataset.train,) * sites, (dataset.test,) * sites)
        own = replace(self.ingredients.with_secret(), dataset=dataset, split=split)
        return _with_own_statistics(prepare(experiment, own), number)


def _with_own_statistics(ready: Prepared, number: int) -> Prepared:
    """Put the numbers by which this site alone normalises, where it does, into its dataset."""
    own = ready.data.own
    return ready if own is None else ready.with_statistics(own[number])
