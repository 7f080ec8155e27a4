"""What of a recipe can run here: whether its methods and models exist, and its data and weights are where they belong.

Files are looked for, and none is read: that is quick, and what is wrong inside of one is told when it is run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fedstrata.data import datasets
from fedstrata.errors import FedStrataError, NotHereError
from fedstrata.experiment import Experiment
from fedstrata.methods import Method
from fedstrata.models import models
from fedstrata.papers.cells import Cell


@dataclass
class Here:
    """Looks for methods, models with their weights and, unless somebody brings it, data; for each once."""

    data: bool = True
    briefs: dict[str, str] = field(default_factory=dict)
    """What was found to be missing, by the sentence that tells it: the same for a list of many."""
    _told: dict[tuple[str, str], str] = field(default_factory=dict)

    def problem(self, cell: Cell) -> str:
        """Say in a sentence why a cell cannot run here; nothing where it can."""
        experiment = cell.experiment
        return (
            self.about("method", experiment)
            or self.about("model", experiment)
            or (self.about("data", experiment) if self.data else "")
            or cell.problem
        )

    def problems(self, cells: Iterable[Cell]) -> list[str]:
        """Say once each what keeps cells from running."""
        return [text for text in dict.fromkeys(map(self.problem, cells)) if text]

    def about(self, key: str, experiment: Experiment) -> str:
        """Say why a component of an experiment is not there."""
        text = getattr(experiment, key)
        if (key, text) not in self._told:
            self._told[key, text] = self._look(key, text, experiment)
        return self._told[key, text]

    def _look(self, key: str, text: str, experiment: Experiment) -> str:
        try:
            if key == "method":
                Method.make(text)
            elif key == "model":
                models.make(text).find()
            else:
                datasets.make(text).find(None if experiment.data_root is None else Path(experiment.data_root))
        except NotHereError as error:
            self.briefs[str(error)] = error.brief
            return str(error)
        except FedStrataError as error:
            return str(error).split(" Known: ")[0].split(" Did you mean")[0]
        return ""
