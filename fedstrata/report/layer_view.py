"""From runs to what the layer view draws: layers in execution order, rounds in columns, one scale for all methods.

A metric of the layers is averaged over seeds. Where there are too many rounds for columns, neighbours are averaged too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import numpy as np
import pyarrow as pa

from fedstrata.diagnostics import Quantity, quantity_of
from fedstrata.errors import FedStrataError
from fedstrata.report.layer_scales import Scale, difference_scale, scale_of, short
from fedstrata.report.reading import Run
from fedstrata.report.series import Groups, Rows
from fedstrata.runs.sweeping import METHOD, parameters_of

COLUMNS = 120
"""How many columns a heat map has at most."""
FEWEST_COLUMNS = 8
NUMBERS = 170_000
"""How many numbers all heat maps of a page may have together, so that it stays small; about five bytes each."""
_BESIDE = 7
"""As how many numbers the names and marks of a line count."""
FIRST = ("cosine", "update")
"""The metrics that every run has, which come first."""
_DENSITIES = ("density", "masks.density")
ROLES = ("first", "middle", "last")
"""The roles of layers with weights."""


@dataclass(frozen=True)
class LayerFacts:
    """What is known of a layer; of runs that do not tell, its name alone."""

    name: str
    kind: str = ""
    role: str = ""
    parameters: int | None = None
    norm: bool = False
    """Whether a norm layer works on its output."""


@dataclass(frozen=True)
class Table:
    """A metric of one method: arrays ``[layers, columns]``, NaN where there is nothing; ``spread`` is over seeds."""

    mean: np.ndarray
    spread: np.ndarray | None
    last: np.ndarray
    """In the last round ``[layers]``, not averaged over rounds."""
    last_spread: np.ndarray | None
    common: np.ndarray | None = None
    """The same in the last round that all methods and seeds have, by which methods can be compared."""
    common_spread: np.ndarray | None = None


@dataclass(frozen=True)
class MetricView:
    """A metric of the layers, over all methods that have it."""

    name: str
    quantity: Quantity
    layers: tuple[str, ...]
    columns: tuple[tuple[int, int], ...]
    """The first and the last round of each column."""
    tables: Mapping[str, Table]
    """By method."""
    common_round: int | None = None
    """The last round that all methods and seeds have; runs need not be of one length."""

    @cached_property
    def scale(self) -> Scale:
        """From which colour to which, the same for all methods."""
        values = [part for table in self.tables.values() for part in (table.mean, table.last)]
        return scale_of(self.quantity, np.concatenate([part.ravel() for part in values]))

    @cached_property
    def difference(self) -> Scale:
        """The same for the difference of two methods."""
        return difference_scale(self.scale, [table.mean for table in self.tables.values()])

    @property
    def averaged(self) -> bool:
        """Whether a column stands for several rounds."""
        return any(first != last for first, last in self.columns)

    @property
    def rounds_in_a_column(self) -> str:
        """How many rounds there are from the first to the last of a column."""
        low, high = (choose(last - first + 1 for first, last in self.columns) for choose in (min, max))
        return f"{low:,}" if low == high else f"{low:,} to {high:,}"


@dataclass(frozen=True)
class LayerView:
    """All that the layer view shows."""

    methods: tuple[str, ...]
    layers: Mapping[str, LayerFacts]
    """In execution order."""
    metrics: Mapping[str, MetricView]
    stays: Mapping[str, frozenset[str]]
    """By method: the layers that were not sent in its last round."""
    masked: Mapping[str, frozenset[str]]
    frozen: Mapping[str, frozenset[str]]
    left_out: tuple[str, ...] = ()
    """Metrics for which there is no room."""

    @classmethod
    def of(cls, groups: Groups, methods: Sequence[str], only: str | None = None) -> LayerView | None:
        """Gather what runs tell of their layers, of one metric or of all; none where they tell nothing."""
        runs = {group.label: group.runs for group in groups}
        told = {method: [_Told.of(run) for run in runs[method]] for method in methods}
        facts = layer_facts([run for method in methods for run in runs[method]])
        names = dict.fromkeys(metric for parts in told.values() for one in parts for metric in one.metrics)
        wanted = sorted(names, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
        wanted = [name for name in wanted if only in (None, name)]
        if not wanted:
            return None
        shown = {name: _layers_of(name, told, facts) for name in wanted}
        having = {name: [m for m in methods if any(name in one.metrics for one in told[m])] for name in wanted}
        fitting: list[str] = []
        series = 0
        for name in wanted:
            more = len(shown[name]) * len(having[name])
            if fitting and (series + more) * (FEWEST_COLUMNS + _BESIDE) > NUMBERS:
                continue
            fitting.append(name)
            series += more
        seeds = max(len(parts) for parts in told.values())
        room = NUMBERS / series - _BESIDE
        with_spread = seeds > 1 and room >= 4 * FEWEST_COLUMNS
        limit = int(np.clip(room / (1 + with_spread), FEWEST_COLUMNS, COLUMNS))
        metrics = {
            name: _metric_view(name, shown[name], {m: told[m] for m in having[name]}, limit, with_spread)
            for name in fitting
        }
        return cls(
            tuple(methods),
            facts,
            metrics,
            {method: _stays(told[method], facts) for method in methods},
            {method: _masked(runs[method], told[method]) for method in methods},
            {method: _frozen(told[method]) for method in methods},
            tuple(name for name in wanted if name not in fitting),
        )

    def rows(self) -> Rows:
        """One row for each method, metric and layer, with the values of all columns; ``key`` finds the same layer of
        another method: they are ``stride`` apart.
        """
        rows: Rows = []
        for place, metric in enumerate(self.metrics.values()):
            for method, table in metric.tables.items():
                start = self.methods.index(method) * self.stride + place * len(self.layers)
                for line, layer in enumerate(metric.layers):
                    spread = None if table.spread is None else [short(value, 2) for value in table.spread[line]]
                    last_spread = None if table.last_spread is None else short(float(table.last_spread[line]), 2)
                    rows.append(
                        {
                            "method": method,
                            "metric": metric.name,
                            "layer": layer,
                            "key": start + self._places[layer],
                            "mark": self._mark(method, layer),
                            "last": short(float(table.last[line])),
                            "last_spread": last_spread,
                            "values": [short(value) for value in table.mean[line].tolist()],
                            "spreads": spread,
                        }
                    )
        return rows

    @property
    def stride(self) -> int:
        """How far the keys of two methods are apart."""
        return len(self.metrics) * len(self.layers)

    @cached_property
    def _places(self) -> dict[str, int]:
        return {name: place for place, name in enumerate(self.layers)}

    def _mark(self, method: str, layer: str) -> str:
        marks = {"stays at clients": self.stays, "frozen": self.frozen, "weights masked": self.masked}
        return next((words for words, marked in marks.items() if layer in marked[method]), "")


@dataclass(frozen=True)
class _Told:
    """The layer table of one run, with texts as numbers; where training has diverged, there is nothing to draw."""

    metrics: tuple[str, ...]
    layers: tuple[str, ...]
    metric: np.ndarray
    layer: np.ndarray
    round: np.ndarray
    value: np.ndarray

    @classmethod
    def of(cls, run: Run) -> _Told:
        finite = np.isfinite(np.asarray(run.layers["value"], dtype=np.float64))
        columns = {name: column[finite] for name, column in run.layers.items()}
        metric, layer = (
            pa.array(columns[name].tolist(), pa.string()).dictionary_encode() for name in ("metric", "layer")
        )
        return cls(
            tuple(metric.dictionary.to_pylist()),
            tuple(layer.dictionary.to_pylist()),
            np.asarray(metric.indices),
            np.asarray(layer.indices),
            np.asarray(columns["round"], dtype=np.int64),
            np.asarray(columns["value"], dtype=np.float64),
        )

    def of_metric(self, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Layers (as numbers), rounds and values of a metric."""
        if name not in self.metrics:
            return self.layer[:0], self.round[:0], self.value[:0]
        chosen = self.metric == self.metrics.index(name)
        return self.layer[chosen], self.round[chosen], self.value[chosen]

    def ever_below(self, name: str, bound: float) -> set[str]:
        """The layers of which a metric was below a number in some round."""
        layers, _, values = self.of_metric(name)
        return {self.layers[layer] for layer in np.unique(layers[values < bound])}

    def in_last_round(self, name: str) -> dict[str, float]:
        """The metric of each layer that has it in the last round in which any has."""
        layers, rounds, values = self.of_metric(name)
        if not len(rounds):
            return {}
        last = rounds == rounds.max()
        return {self.layers[layer]: float(value) for layer, value in zip(layers[last], values[last], strict=True)}


def first_metric(view: LayerView) -> str:
    """The metric that is shown first: the inertia, where there is one."""
    return next((name for name in FIRST if name in view.metrics), next(iter(view.metrics)))


def layer_facts(runs: Iterable[Run]) -> dict[str, LayerFacts]:
    """Gather what runs know of their layers, in execution order; where they know nothing, as their tables name them."""
    told: dict[str, Mapping[str, Any]] = {}
    orders: list[list[str]] = []
    normed: set[str] = set()
    tables: list[list[str]] = []
    for run in runs:
        rows = run.layer_facts.get("layers", ())
        told |= {str(row["layer"]): row for row in rows if row["layer"] not in told}
        normed |= {str(row["follows"]) for row in rows if row["kind"] == "norm" and row.get("follows")}
        orders.append([str(row["layer"]) for row in rows])
        tables.append(list(dict.fromkeys(run.layers["layer"].tolist())))
    facts = {}
    for name in merged_order([*orders, *tables]):
        row = told.get(name, {})
        size = row.get("parameters")
        facts[name] = LayerFacts(
            name,
            str(row.get("kind", "")),
            str(row.get("role", "")),
            None if size is None else int(size),
            name in normed,
        )
    return facts


def merged_order(orders: Iterable[Sequence[str]]) -> list[str]:
    """Merge several orders: who is new comes right after the one that stands before it in its own order.

    >>> merged_order([["stem", "head"], ["stem", "stem.norm", "head"]])
    ['stem', 'stem.norm', 'head']
    """
    merged: list[str] = []
    known: set[str] = set()
    for order in orders:
        before = -1
        for name in order:
            if name in known:
                before = merged.index(name)
                continue
            before = before + 1 if before >= 0 else len(merged)
            merged.insert(before, name)
            known.add(name)
    return merged


def bins(rounds: np.ndarray, limit: int) -> tuple[np.ndarray, tuple[tuple[int, int], ...]]:
    """Part distinct rounds, in order, into at most ``limit`` columns of equal numbers of rounds, as far as that goes.

    Return the column of each round, and the first and last round of each column.
    """
    count = min(limit, len(rounds))
    column = np.arange(len(rounds)) * count // max(1, len(rounds))
    starts = np.searchsorted(column, np.arange(count))
    ends = np.searchsorted(column, np.arange(count), side="right") - 1
    return column, tuple((int(rounds[start]), int(rounds[end])) for start, end in zip(starts, ends, strict=True))


def plain_quantity(metric: str) -> Quantity:
    """What a metric is; of one that nobody has explained, its name."""
    return quantity_of(metric) or _OF_METHODS.get(metric) or Quantity(metric, "")


_OF_METHODS = {
    "density": Quantity(
        "Density", "Which part of a layer's weights the mask keeps: 1 where it keeps all.", low=0, high=1
    ),
    "gamma": Quantity(
        "Shrinking factor", "By what the server multiplies a layer after averaging: below 1 it shrinks.", high=1
    ),
}


def _metric_view(
    name: str, layers: tuple[str, ...], told: Mapping[str, Sequence[_Told]], limit: int, with_spread: bool
) -> MetricView:
    found = {method: [one.of_metric(name) for one in parts] for method, parts in told.items()}
    rounds = np.unique(np.concatenate([part[1] for parts in found.values() for part in parts]))
    column, columns = bins(rounds, limit)
    lines = {layer: line for line, layer in enumerate(layers)}
    shared = reduce(np.intersect1d, [part[1] for parts in found.values() for part in parts if len(part[1])])
    common_round = int(shared[-1]) if len(shared) else None
    tables = {}
    for method, parts in found.items():
        seeds: list[np.ndarray] = []
        lasts: list[np.ndarray] = []
        commons: list[np.ndarray] = []
        for one, (layer, noted, values) in zip(told[method], parts, strict=True):
            if not len(noted):
                continue
            line = np.array([lines.get(layer_name, -1) for layer_name in one.layers])[layer]
            at = column[np.searchsorted(rounds, noted)]
            seeds.append(_means(line, at, values, (len(layers), len(columns))))
            for kept, number in ((lasts, noted.max()), (commons, common_round)):
                then = noted == number
                kept.append(_means(line[then], np.zeros(int(then.sum()), int), values[then], (len(layers), 1))[:, 0])
        several = len(seeds) > 1
        tables[method] = Table(
            *_over_seeds(np.stack(seeds), with_spread and several),
            *_over_seeds(np.stack(lasts), several),
            *_over_seeds(np.stack(commons), several),
        )
    return MetricView(name, plain_quantity(name), layers, columns, tables, common_round)


def _means(line: np.ndarray, column: np.ndarray, values: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Average what falls into each cell; NaN where nothing does."""
    cell = line * shape[1] + column
    size = shape[0] * shape[1]
    count = np.bincount(cell, minlength=size)
    with np.errstate(invalid="ignore", divide="ignore"):
        return (np.bincount(cell, weights=values, minlength=size) / count).reshape(shape)


def _over_seeds(values: np.ndarray, with_spread: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Mean and standard deviation over the seeds that have a value; a single one has no deviation."""
    count = np.isfinite(values).sum(0)
    with np.errstate(invalid="ignore", divide="ignore"):
        mean = np.nansum(values, 0) / count
        if not with_spread:
            return mean, None
        return mean, np.sqrt(np.nansum((values - mean) ** 2, 0) / np.where(count > 1, count - 1, np.nan))


def _layers_of(metric: str, told: Mapping[str, Sequence[_Told]], facts: Mapping[str, LayerFacts]) -> tuple[str, ...]:
    """The layers with a number in any run, and all others with weights, in execution order."""
    having = {
        one.layers[code] for parts in told.values() for one in parts for code in np.unique(one.of_metric(metric)[0])
    }
    return tuple(name for name, layer in facts.items() if name in having or layer.role in ROLES)


def _stays(told: Sequence[_Told], facts: Mapping[str, LayerFacts]) -> frozenset[str]:
    """The layers of which a method moved none in its last round, while it moved others: they did not travel."""
    sent = {layer for one in told for layer in one.in_last_round("update")}
    return frozenset(facts).difference(sent) if sent else frozenset()


def _masked(runs: Sequence[Run], told: Sequence[_Told]) -> frozenset[str]:
    """The layers that were masked in some round of some run; where no density was noted, those that were to be."""
    found: set[str] = set()
    for run, one in zip(runs, told, strict=True):
        noted = [metric for metric in _DENSITIES if metric in one.metrics]
        if noted:
            found = found.union(*(one.ever_below(metric, 1) for metric in noted))
        elif _had_time_to_mask(run):
            found |= {str(layer) for layer in run.layer_facts.get("masked", ())}
    return frozenset(found)


def _had_time_to_mask(run: Run) -> bool:
    """Whether a method that masks every few rounds, which notes nothing of it, came to do so in the rounds there were.

    It acts on the round after a multiple of these; as released, whose rounds count from 0, on the second one first.
    """
    try:
        given = parameters_of(METHOD, str(run.experiment[METHOD]))
    except FedStrataError:  # a method that is not known here
        return True
    parameters = {name.rsplit(".", 1)[-1]: value for name, value in given.items()}
    before = 1 if parameters.get("schedule") == "released" else parameters.get("every")
    return not isinstance(before, int) or run.rounds_done > before


def _frozen(told: Sequence[_Told]) -> frozenset[str]:
    """The layers that travelled in the last round, and did not move at all in any run."""
    updates = [one.in_last_round("update") for one in told]
    names = {layer for update in updates for layer in update}
    return frozenset(name for name in names if all(update.get(name, math.inf) == 0 for update in updates))
