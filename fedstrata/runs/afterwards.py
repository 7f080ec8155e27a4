"""Diagnosing a finished run from what its folder keeps: the last models of the server and the clients, and their data.

The numbers stand in a folder of their own beside the metrics of the run, which stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from fedstrata.diagnostics import Diagnostic, Seen
from fedstrata.diagnostics.choosing import ALL, Objection, choose
from fedstrata.engines.observing import Gathered
from fedstrata.errors import FedStrataError
from fedstrata.runs.diagnosing import Diagnosis
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.metrics import MetricLog, TimingLog
from fedstrata.runs.preparing import Ingredients
from fedstrata.runs.recalling import experiment_as_run, plan_of
from fedstrata.runs.same_data import refuse_other_data
from fedstrata.stack import repeat


@dataclass(frozen=True)
class Diagnosed:
    """What was computed of a run afterwards: the round that it is of, names and numbers of rows, what each cost, and
    what could not be computed, with the reasons.
    """

    out: Path
    round: int
    rows: Mapping[str, int]
    costs: Mapping[str, Mapping[str, float]]
    left_out: Mapping[str, str]


def diagnose(path: Path, text: str = ALL, given: Ingredients | None = None) -> Diagnosed:
    """Compute diagnostics of a finished run that need only what its folder keeps, and write them beside its metrics.

    One that was computed before is computed anew. Objects that a run was made with in Python are given again.
    """
    with RunFolder.resume(path) as folder:
        driver = _restored(folder, given)
        chosen = choose(text, _objection_in(folder, driver))
        if not chosen.diagnostics:
            raise FedStrataError(
                f"Nothing of what '{text}' asks for can be computed of a run that is finished: {chosen.word()}"
            )
        diagnosis = Diagnosis(chosen.diagnostics)
        metrics, timings = MetricLog(), TimingLog()
        seen = _seen(driver)
        gathered = Gathered(received=seen.received, started=seen.started, trained=seen.trained)
        of_round = diagnosis.measure(seen, gathered, metrics, timings)
        metrics.add_round(driver.round, of_round)
        tables = {name: table for name, table in metrics.to_tables().items() if len(table)}
        names = tuple(f"{one.name}." for one in chosen.diagnostics)
        folder.save_diagnosis(_beside(folder.diagnosis(), tables, names))
    rows = {one.name: sum(_count(table, f"{one.name}.") for table in tables.values()) for one in chosen.diagnostics}
    return Diagnosed(path, driver.round, rows, diagnosis.costs(timings), chosen.left_out)


def _restored(folder: RunFolder, given: Ingredients | None) -> Driver:
    """Bring a finished run back to where it ended."""
    folder.summary()  # refuses a run that is not finished
    plan = plan_of(folder)
    if plan is None:
        raise FedStrataError(
            f"The run in '{folder.path}' was made with real sites, whose data and models are not here; diagnose it "
            "while it runs, with --diagnose."
        )
    driver = Driver.prepare(experiment_as_run(folder).with_changes({"diagnose": None}), given, plan)
    refuse_other_data(folder, driver.dataset, driver.split)
    driver.restore(folder)
    if driver.round != folder.summary()["rounds"]:
        raise FedStrataError(
            f"The last checkpoint of the run in '{folder.path}' is gone, without which it cannot be diagnosed; repeat "
            "the run with --diagnose."
        )
    return driver


def _seen(driver: Driver) -> Seen:
    clients = range(driver.setting.clients)
    first = repeat(driver.setting.initial, len(clients))
    view = driver.engine.side.view(driver.engine.server, clients, driver.round)
    return Seen(
        round=driver.round,
        rounds=driver.round,
        layers=driver.setting.layers,
        before=driver.setting.initial,
        after=driver.engine.server.model,
        travelled=driver.setting.shared,
        participants=clients,
        sizes=view.sizes,
        label_counts=view.label_counts,
        method_metrics=driver.method.metrics(view),
        received=first,
        started=first,
        trained={name: tensor.detach() for name, tensor in driver.used(clients, last=True).items()},
        probe=driver.engine.probe(clients, driver.round),
        client_memory=driver.engine.clients().group("memory"),
        server_memory=driver.engine.server.memory,
        initial=driver.setting.initial,
    )


def _objection_in(folder: RunFolder, driver: Driver) -> Objection:
    """Object to what a finished run does not tell, and to what the run has measured itself."""
    own = {one.name for one in choose(folder.experiment.diagnose).diagnostics}
    tables = folder.metrics().to_tables().values()

    def objection(one: Diagnostic) -> str | None:
        if not one.afterwards:
            return "it looks at the rounds themselves, and can be asked for while a run goes on, with --diagnose"
        measured = one.name in own and any(_count(table, f"{one.name}.") for table in tables)
        if measured:
            return "the run has measured it itself"
        return one.unfit(driver.method, driver.setting.layers)

    return objection


def _beside(there: Mapping[str, pa.Table], new: Mapping[str, pa.Table], names: tuple[str, ...]) -> dict[str, pa.Table]:
    """Put new numbers beside those of other diagnostics."""
    kept = {
        name: table.filter(
            pa.array([not metric.startswith(names) for metric in table["metric"].to_pylist()], pa.bool_())
        )
        for name, table in there.items()
    }
    joined = {
        name: pa.concat_tables([tables[name] for tables in (kept, new) if name in tables]) for name in {**kept, **new}
    }
    return {name: table.combine_chunks() for name, table in joined.items() if len(table)}


def _count(table: pa.Table, beginning: str) -> int:
    return sum(metric.startswith(beginning) for metric in table["metric"].to_pylist())
