"""A run over real sites, from its beginning or from its last committed round to its end."""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedstrata import files
from fedstrata.data import Dataset, Split
from fedstrata.deployment.engine import GlobalTest, NetworkEngine, global_test
from fedstrata.deployment.federation import Declaration, Federation, Network, Schema, Standing
from fedstrata.deployment.rules import Rules
from fedstrata.engines.planning import Plan
from fedstrata.engines.server import Declared, ServerSide
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.methods import Method
from fedstrata.runs import RunFolder, describe_environment
from fedstrata.simulation import Ingredients, Listener, Prepared, Simulation, Update, make_setting, prepare_setting

DEPLOYMENT_FILE = "deployment.json"
STATUS_FILE = "status.json"
ENGINE = "flower"


@dataclass(frozen=True)
class Deployment:
    """What a server is to do, and with whom.

    In a ``rehearsal`` the server has the data too, and tests the global model on the global test set.
    """

    experiment: Experiment
    names: Sequence[str]
    out: Path
    rules: Rules = field(default_factory=Rules)
    rehearsal: bool = False
    ingredients: Ingredients = field(default_factory=Ingredients)
    traffic: Callable[[], Mapping[str, float]] = dict
    """What the network has carried so far, in bytes, under the names of metrics."""

    def check(self) -> None:
        """Refuse what cannot run over a network, before anybody connects."""
        self.rules.check(len(self.names))
        for part in Method.make(self.ingredients.method or self.experiment.method).parts:
            if part.facts.not_on_network is not None:
                raise FedStrataError(f"'{part.name}' cannot run on real sites: {part.facts.not_on_network}")

    def run(
        self,
        network: Network,
        listener: Listener | None = None,
        watch: Callable[[Standing], None] = lambda standing: None,
        log: Callable[[str], None] = lambda line: None,
    ) -> dict[str, Any]:
        """Begin the run in ``out``, or go on with the one that was begun there; return its summary."""
        self.check()
        begun = _Begun.find(self.out, self.names)
        experiment = self.experiment.with_changes({"checkpoint_every": 1, "clients": len(self.names)})
        if begun is None:
            RunFolder.refuse_taken(self.out)
        else:
            experiment = begun.experiment
        federation = Federation(
            network=network,
            names=self.names,
            rules=self.rules,
            run=secrets.token_hex(8) if begun is None else begun.run,
            session=secrets.token_hex(8),
            experiment=experiment,
            committed=0 if begun is None else begun.committed,
            schema=None if begun is None else begun.schema,
            log=log,
            watch=watch,
        )
        simulation = self._prepare(experiment, federation)
        folder = self._begin(simulation, federation.run) if begun is None else RunFolder.resume(self.out)
        with folder:
            simulation.restore(folder)
            return simulation.run(folder, self._noting_traffic(simulation, listener))

    def _prepare(self, experiment: Experiment, federation: Federation) -> Simulation:
        """Greet the sites, and build what the rounds need."""
        test: GlobalTest | None = None
        ready: Prepared | None = None
        if self.rehearsal:
            ready = prepare_setting(experiment, self.ingredients)
            test = global_test(ready)
        declarations = federation.open()
        if ready is None:
            assert federation.schema is not None
            schema = federation.schema
            dataset, split = declared_data(experiment.data, schema, declarations, len(self.names))
            _, setting = make_setting(experiment, self.ingredients, schema.input_shape, len(schema.class_names))
            declared = Declared(torch.from_numpy(split.sizes), torch.from_numpy(split.label_counts(dataset)))
        else:
            dataset, split, setting, declared = ready.dataset, ready.split, ready.setting, ready.declared
        engine = NetworkEngine(setting, declared, federation, test)
        plan = Plan(ENGINE, 1, torch.get_num_threads())
        experiment = self.ingredients.describe(experiment)
        return Simulation(
            experiment, dataset, split, setting.method, setting, engine, plan, ServerSide(setting, declared)
        )

    def _begin(self, simulation: Simulation, run: str) -> RunFolder:
        environment = describe_environment(simulation.setting.device, dataclasses.asdict(simulation.plan))
        folder = RunFolder.create(self.out, simulation.experiment, simulation.dataset, simulation.split, environment)
        described = {"run": run, "sites": list(self.names), "rehearsal": self.rehearsal}
        files.write_atomically(self.out / DEPLOYMENT_FILE, files.to_json(described))
        return folder

    def _noting_traffic(self, simulation: Simulation, listener: Listener | None) -> Listener:
        """Note with every round what the network has carried for it."""
        before = dict(self.traffic())

        def note(update: Update) -> None:
            carried = dict(self.traffic())
            simulation.metrics.add_round(
                update.round, {name: carried[name] - before.get(name, 0.0) for name in carried}
            )
            before.update(carried)
            if listener is not None:
                listener(update)

        return note


@dataclass(frozen=True)
class _Begun:
    """A run that was begun in a folder and is not finished."""

    run: str
    experiment: Experiment
    committed: int
    schema: Schema

    @classmethod
    def find(cls, out: Path, names: Sequence[str]) -> _Begun | None:
        """Find a run to go on with; one of other sites is refused."""
        path = out / DEPLOYMENT_FILE
        if not path.exists() or RunFolder(out).finished:
            return None
        described = files.from_json(files.read_bytes(path), path)
        if described["sites"] != list(names):
            raise FedStrataError(
                f"The run in '{out}' was begun with the sites {', '.join(described['sites'])}; "
                "go on with the same ones, or choose another --out."
            )
        folder = RunFolder.open(out)
        data = folder.data()
        checkpoint = folder.load_checkpoint()
        return cls(
            described["run"],
            folder.experiment,
            0 if checkpoint is None else checkpoint.round,
            Schema(tuple(data["input_shape"]), tuple(data["class_names"])),
        )


def declared_data(
    name: str, schema: Schema, declarations: Mapping[int, Declaration], sites: int
) -> tuple[Dataset, Split]:
    """Describe data that the server does not have, from what the sites declared: the labels, but no inputs.

    A site that has not come yet counts as one sample of the first class until it declares itself.
    """
    classes = np.arange(len(schema.class_names))
    unknown = Declaration(schema, 1, 0, (1, *[0] * (len(classes) - 1)))
    declared = [declarations.get(site, unknown) for site in range(sites)]
    labels = [np.repeat(classes, one.label_counts) for one in declared]
    tests = [np.zeros(one.test_size, dtype=np.int64) for one in declared]
    pool = np.concatenate([*labels, *tests])
    positions = np.split(np.arange(len(pool)), np.cumsum([len(part) for part in (*labels, *tests)])[:-1])
    train, test = positions[:sites], positions[sites:]
    inputs = torch.zeros(1).expand(len(pool), *schema.input_shape)
    dataset = Dataset(
        name, inputs, torch.from_numpy(pool), np.concatenate(train), np.concatenate(test), schema.class_names
    )
    return dataset, Split(tuple(train), tuple(test))


class StatusFile:
    """Writes how a run stands where 'fedstrata status' finds it."""

    def __init__(self, out: Path) -> None:
        self.path = out / STATUS_FILE
        self._last = ""

    def __call__(self, standing: Standing) -> None:
        """Write a standing that differs from the last one."""
        text = json.dumps(dataclasses.asdict(standing)) + "\n"
        if text != self._last and self.path.parent.is_dir():
            files.write_atomically(self.path, text)
            self._last = text
