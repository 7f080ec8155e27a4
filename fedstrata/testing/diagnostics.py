"""What every diagnostic must hold: it looks on and changes nothing, and it says the same however a run is computed."""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from fedstrata import files
from fedstrata.diagnostics import Diagnostic, diagnostics
from fedstrata.engines.engine import pack
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.runs.driver import Driver
from fedstrata.runs.folder import RunFolder
from fedstrata.testing.requiring import require
from fedstrata.testing.world import prepare

_ROUNDS = 2
_SETTING: dict[str, Any] = {"rounds": _ROUNDS, "epochs": 1, "participation": 0.6, "checkpoint_every": 1}
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9


def check_diagnostic(diagnostic: str | Diagnostic, method: str = "fedavg") -> frozenset[str]:
    """Check that a diagnostic keeps the contract in a small federation under a method; it must be registered.

    On every engine, some clients at a time or all, it tells the same numbers; a run that was killed ends as one that
    was not; the other numbers of the run, and its models, are the same bits as without it; all that it tells is
    explained in its ``quantities``; and what it costs is measured. Returns the names of what was measured. What does
    not hold is an :class:`AssertionError`.

    >>> sorted(check_diagnostic("inertia"))
    ['inertia.step']
    """
    text = str(diagnostic)
    try:
        return Examined.of(text, method).check(text.partition("(")[0])
    except FedStrataError as error:
        raise AssertionError(f"{text}: {error}") from error


@dataclass(frozen=True)
class Examined:
    """Runs of some diagnostics in a small federation, computed in several ways."""

    whole: Driver
    alone: Driver
    """Without any diagnostic."""
    resumed: Driver
    others: Mapping[str, Driver]
    """With other engines, which are named in words."""

    @classmethod
    def of(cls, text: str, method: str = "fedavg") -> Examined:
        """Run them; the text is that of an experiment, such as ``all``."""
        with tempfile.TemporaryDirectory() as place:
            whole = _run(method, text, "stacked", 99, Path(place))
            resumed = _resumed(method, text, Path(place))
        ways = {"the loop engine": ("loop", 1), "clients two at a time": ("stacked", 2)}
        others = {words: _run(method, text, engine, chunk) for words, (engine, chunk) in ways.items()}
        return cls(whole, _run(method, None, "stacked", 99), resumed, others)

    def check(self, name: str) -> frozenset[str]:
        """Check one of the diagnostics, by its name; return the names of what was measured."""
        cls = diagnostics.get(name)
        _check_words(cls)
        measured = _told_by(self.whole, name)
        _check_looking_on(self.whole, self.alone)
        _check_same("a run that was resumed", measured, _told_by(self.resumed, name), exactly=True)
        for words, driver in self.others.items():
            _check_same(words, measured, _told_by(driver, name), exactly=False)
        _check_pairs(cls, self.whole)
        cost = self.whole.diagnosis.costs(self.whole.timings).get(name, {})
        require(cost.get("seconds", 0) > 0 and "peak_bytes" in cost, f"{name}: nothing was measured of its cost")
        return frozenset(str(place[1]) for place in measured)


def _run(method: str, text: str | None, engine: str, chunk: int, folder: Path | None = None) -> Driver:
    driver = _prepared(method, text, engine, chunk)
    if folder is None:
        driver.run()
        return driver
    with RunFolder.create(
        folder / "run", driver.experiment, driver.dataset, driver.split, driver.environment()
    ) as kept:
        driver.run(kept)
    return driver


def _prepared(method: str, text: str | None, engine: str, chunk: int) -> Driver:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedStrataWarning)
        return prepare(method, engine, chunk, diagnose=text, **_SETTING)


def _resumed(method: str, text: str, folder: Path) -> Driver:
    """Go on from the checkpoint before the last, as if the run had been killed after it."""
    files.remove_folder(folder / "run" / "checkpoints" / f"round-{_ROUNDS:06d}")
    driver = _prepared(method, text, "stacked", 99)
    driver.restore(RunFolder.open(folder / "run"))
    require(driver.round == _ROUNDS - 1, f"the run is resumed after round {driver.round}")
    driver.run()
    return driver


def _check_words(cls: type[Diagnostic]) -> None:
    require(bool(cls.quantities), f"{cls.name}: it explains no quantity")
    for metric, quantity in cls.quantities.items():
        require(metric.startswith(f"{cls.name}."), f"{cls.name}: '{metric}' must begin with '{cls.name}.'")
        require(bool(quantity.title), f"{cls.name}: '{metric}' has no title")
        require(quantity.explanation.endswith("."), f"{cls.name}: '{metric}' is explained by no sentence")


def _told_by(driver: Driver, name: str) -> dict[tuple[object, ...], float]:
    """Gather what a diagnostic told: table, metric, and where it belongs."""
    found: dict[tuple[object, ...], float] = {}
    for table, rows in driver.metrics.to_tables().items():
        for row in rows.to_pylist():
            if row["metric"].startswith(f"{name}."):
                metric, value = row.pop("metric"), row.pop("value")
                found[(table, metric, *row.values())] = value
    return found


def _check_same(
    words: str, left: Mapping[tuple[object, ...], float], right: Mapping[tuple[object, ...], float], exactly: bool
) -> None:
    differing = sorted(map(str, left.keys() ^ right.keys()))
    require(not differing, f"{words} measures other things: {differing[:3]}")
    for place, value in left.items():
        close = math.isclose(value, right[place], rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
        same = value == right[place] if exactly else close
        require(same, f"{words} tells {right[place]} instead of {value} for {place}")


def _check_looking_on(driver: Driver, alone: Driver) -> None:
    """Require that all else in a run is as without diagnostics: the same bits."""
    names = tuple(f"{one.name}." for one in driver.diagnosis.chosen)

    def others(tables: Mapping[str, pa.Table]) -> dict[str, list[dict[str, object]]]:
        kept = {
            table: [row for row in rows.to_pylist() if not row["metric"].startswith(names)]
            for table, rows in tables.items()
        }
        return {table: rows for table, rows in kept.items() if rows}

    with_it, without = others(driver.metrics.to_tables()), others(alone.metrics.to_tables())
    require(repr(with_it) == repr(without), "other numbers of the run are not the same beside it")
    states = [pack(one.engine.server, one.engine.clients()) for one in (driver, alone)]
    same = states[0].keys() == states[1].keys() and all(
        torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(states[1][key])) for key, tensor in states[0].items()
    )
    require(same, "the models are not the same beside it")


def _check_pairs(cls: type[Diagnostic], driver: Driver) -> None:
    """Require that a matrix of clients is declared as one: its columns would else be numbered, not named."""
    table = driver.metrics.to_tables().get("diagnostics")
    rows = [] if table is None else [row for row in table.to_pylist() if row["round"] == _ROUNDS]
    for metric, quantity in cls.quantities.items():
        own = [row for row in rows if row["metric"] == metric and row["other"] >= 0]
        clients, columns = (sorted({row[of] for row in own}) for of in ("client", "other"))
        square = columns == list(range(len(clients))) != clients
        require(quantity.pairs or not square, f"{cls.name}: '{metric}' seems to be of pairs of clients; say pairs=True")
