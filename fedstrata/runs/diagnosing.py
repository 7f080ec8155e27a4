"""The diagnostics of a run: which ones, what they keep, what they measure in a round, and what that costs."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedstrata.diagnostics.choosing import Chosen, Objection, choose, lacking
from fedstrata.diagnostics.contract import Diagnostic, Measured, Need, Seen
from fedstrata.engines.engine import RoundReport
from fedstrata.engines.observing import Gathered
from fedstrata.engines.setting import Setting
from fedstrata.errors import FedStrataWarning
from fedstrata.methods import Server
from fedstrata.runs.memory import peak_memory
from fedstrata.runs.metrics import EVERYBODY, MetricLog, TimingLog
from fedstrata.stack import Stack, Tensors, clone, under

if TYPE_CHECKING:
    from fedstrata.runs.driver import Driver

GATHERING = "diagnose"
"""The phase in which that of a round is put together which diagnostics look at."""
PHASE = f"{GATHERING}/"
"""The beginning of the names of the phases in which diagnostics are computed."""
_GROUP = "diagnostics"
_PEAKS = "peak_bytes_of_diagnostics"


@dataclass
class Diagnosis:
    """What looks on while a run goes on."""

    chosen: tuple[Diagnostic, ...] = ()
    memory: dict[str, Stack] = field(default_factory=dict)
    """What each keeps, by its name."""
    peaks: dict[str, int] = field(default_factory=dict)
    """The most memory that each took in a round, in bytes, with what was kept of the round for it."""

    @classmethod
    def of(cls, text: str | None, setting: Setting, missing: Mapping[Need, str] | None = None) -> Diagnosis:
        """Choose the diagnostics of a run; ``missing`` says what nobody can see there, and why.

        What is named and cannot be computed is refused; what is left out is told.
        """
        chosen = choose(text, lacking(missing or {}), misfit_in(setting))
        _tell(chosen, setting)
        return cls(chosen.diagnostics)

    def needs(self, round: int, rounds: int) -> frozenset[Need]:
        """Tell what must be kept of a round."""
        return frozenset(need for one in self.chosen if one.looks(round, rounds) for need in one.needs)

    def measure(self, seen: Seen, gathered: Gathered, metrics: MetricLog, timings: TimingLog) -> dict[str, float]:
        """Measure all that is due in a round and note it; return the numbers of the whole round."""
        of_round: dict[str, float] = {}
        device = seen.sizes.device
        for one in self.chosen:
            if not one.looks(seen.round, seen.rounds) or not _is_there(one, gathered):
                continue
            _synchronise(device)
            began = time.perf_counter()
            with peak_memory(device) as peak:
                of_round |= self._measure(one, seen.only(one.needs), metrics)
                _synchronise(device)
            timings.add(seen.round, f"{PHASE}{one.name}", time.perf_counter() - began)
            taken = gathered.bytes_kept(one.needs) + peak.bytes
            self.peaks[one.name] = max(self.peaks.get(one.name, 0), taken)
        return of_round

    def _measure(self, one: Diagnostic, seen: Seen, metrics: MetricLog) -> dict[str, float]:
        before = self.memory.get(one.name, Stack())
        kept = one.update(seen, before)
        new = {name: tensor for name, tensor in kept.items() if tensor is not before.get(name)}
        self.memory[one.name] = Stack({name: kept[name] for name in kept}) | clone(new)
        if not one.due(seen.round, seen.rounds):
            return {}
        return note(one, one.compute(seen, self.memory[one.name]), seen.round, seen.participants, metrics)

    def state(self) -> Stack:
        """Return all that is kept, as a checkpoint stores it."""
        return under(
            _GROUP,
            Stack({f"{name}/{key}": tensor for name, kept in self.memory.items() for key, tensor in kept.items()}),
        )

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint notes beside it."""
        return {_PEAKS: dict(self.peaks)} if self.peaks else {}

    def restore(self, state: Stack, facts: Mapping[str, Any]) -> None:
        """Go on from a checkpoint."""
        kept = state.group(_GROUP)
        self.memory = {one.name: kept.group(one.name) for one in self.chosen}
        self.peaks = {str(name): int(value) for name, value in facts.get(_PEAKS, {}).items()}

    def not_due(self, round: int, rounds: int) -> list[str]:
        """Name those that would not have been computed in a round."""
        return [one.name for one in self.chosen if not one.due(round, rounds)]

    def costs(self, timings: TimingLog) -> dict[str, dict[str, float]]:
        """Tell what each costs: seconds in a round in which it looked, over all rounds, and the most bytes."""
        if not self.chosen:
            return {}
        spent: dict[str, list[float]] = {}
        table = timings.to_table()
        for phase, seconds in zip(table["phase"].to_pylist(), table["seconds"].to_pylist(), strict=True):
            spent.setdefault(phase, []).append(seconds)
        return {
            one.name: {
                "seconds": sum(own),
                "seconds_per_round": sum(own) / len(own),
                "peak_bytes": self.peaks.get(one.name, 0),
            }
            for one in self.chosen
            if (own := spent.get(f"{PHASE}{one.name}")) is not None
        }


def look(
    driver: Driver, before: Tensors, report: RoundReport, view: Server, own: Mapping[str, float | Mapping[str, float]]
) -> dict[str, float]:
    """Let the diagnostics of a run look at the round that it has just done; return their numbers of the whole round.

    ``before`` is the server's model before the round, and ``own`` what the method tells of itself.
    """
    diagnosis, engine, round, rounds = driver.diagnosis, driver.engine, driver.round, driver.experiment.rounds
    if not diagnosis.chosen:
        return {}
    began = time.perf_counter()
    gathered = engine.observer.gather(report.participants)
    driver.timings.add(round, GATHERING, time.perf_counter() - began)
    asked = Need.DATA in diagnosis.needs(round, rounds)
    seen = Seen(
        round=round,
        rounds=rounds,
        layers=driver.setting.layers,
        before=before,
        after=engine.server.model,
        travelled=report.sent,
        participants=report.participants,
        sizes=view.sizes,
        label_counts=view.label_counts,
        method_metrics=own,
        uploads=gathered.uploads,
        received=gathered.received,
        started=gathered.started,
        trained=gathered.trained,
        probe=engine.probe(report.participants, round) if asked else None,
        client_memory=gathered.client_memory,
        server_memory=engine.server.memory,
        tested=driver.tested_accuracies,
        initial=driver.setting.initial,
    )
    return diagnosis.measure(seen, gathered, driver.metrics, driver.timings)


def misfit_in(setting: Setting) -> Objection:
    """Say of diagnostics why they have nothing to measure with this method or model."""
    method = setting.method
    nothing_sent = {} if setting.shared else {Need.UPLOADS: f"with '{method}' clients send nothing"}
    by_need = lacking(nothing_sent)
    return lambda one: by_need(one) or one.unfit(method, setting.layers)


def note(
    one: Diagnostic, measured: Measured, round: int, participants: Sequence[int], metrics: MetricLog
) -> dict[str, float]:
    """Note what a diagnostic measured, each number in its table; return those of the whole round."""
    one.refuse_unexplained(measured)
    for metric, layers in measured.layers.items():
        metrics.add_layers(round, metric, _defined(_numbers(layers)))
    for metric, values in measured.clients.items():
        told = ~torch.isnan(values)
        clients = [client for client, is_told in zip(participants, told.tolist(), strict=True) if is_told]
        metrics.add_clients(round, metric, clients, values[told].double().cpu().numpy())
    for metric, in_layers in measured.clients_in_layers.items():
        others = participants if one.quantities[metric].pairs else None
        for layer, values in in_layers.items():
            numbers = values.double().cpu().numpy()
            metrics.add_diagnostics(round, metric, layer, participants, numbers, others if numbers.ndim == 2 else None)
    for metric, in_layers in measured.in_layers.items():
        for layer, values in in_layers.items():
            metrics.add_diagnostics(round, metric, layer, [EVERYBODY], values.double().cpu().numpy()[None])
    return _defined(_numbers(measured.of_round))


def _numbers(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Bring numbers from the device at once."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    brought: list[float] = torch.stack([tensor.double() for tensor in tensors.values()]).tolist() if tensors else []
    there = dict(zip(tensors, brought, strict=True))
    return {name: there[name] if name in there else float(value) for name, value in values.items()}


def _defined(values: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value == value}


def _is_there(one: Diagnostic, gathered: Gathered) -> bool:
    """Tell whether the uploads are there that a diagnostic needs: not where a round was read from the disk again."""
    if Need.UPLOADS not in one.needs or gathered.uploads.tensors or gathered.uploads.numbers:
        return True
    warnings.warn(
        f"The diagnostic '{one.name}' has no numbers of a round that was merged before the server was started again.",
        FedStrataWarning,
        stacklevel=2,
    )
    return False


def _tell(chosen: Chosen, setting: Setting) -> None:
    """Say what is left out, and what a promise of privacy does not cover."""
    private = setting.method.answering_for_privacy
    close = [one.name for one in chosen.diagnostics if one.needs]
    words = [chosen.word()]
    if private is not None and close:
        words.append(
            f"The account of '{private}' does not cover the numbers of {_listed(close)}, which look at single "
            "clients; do not publish them under its promise."
        )
    for word in words:
        if word is not None:
            warnings.warn(word, FedStrataWarning, stacklevel=3)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
