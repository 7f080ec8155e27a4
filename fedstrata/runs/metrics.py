"""The numbers of a run: logs that only grow, and what is read off them.

A log is held in memory as compact columns and becomes Arrow tables. Equal content gives equal tables, whether a log
grew in one go or was saved, loaded and continued. What a clock has touched is kept in a log of its own, so that the
metrics of two equal runs are equal.
"""

from __future__ import annotations

import math
import re
from array import array
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import pyarrow as pa

from fedstrata import files, scores

METRIC_SCHEMAS: Mapping[str, pa.Schema] = {
    "rounds": pa.schema([("round", pa.int32()), ("metric", pa.string()), ("value", pa.float64())]),
    "clients": pa.schema(
        [("round", pa.int32()), ("client", pa.int32()), ("metric", pa.string()), ("value", pa.float64())]
    ),
    "layers": pa.schema(
        [("round", pa.int32()), ("layer", pa.string()), ("metric", pa.string()), ("value", pa.float64())]
    ),
}
_ADAPTED = "client_adapted"
CLASSES = "classes"
CLASSES_SCHEMA: pa.Schema = pa.schema(
    [
        ("round", pa.int32()),
        ("client", pa.int32()),
        ("metric", pa.string()),
        ("class", pa.int32()),
        ("predicted", pa.int32()),
        ("value", pa.float64()),
    ]
)
"""Numbers of single classes, a table that is there only where an experiment asks for some.

The client :data:`EVERYBODY` stands for all samples together. ``predicted`` is the column of a confusion matrix, whose
zeros are left out, and else :data:`EVERYBODY` too. What is not defined is left out.
"""
EVERYBODY = -1
DIAGNOSTICS = "diagnostics"
DIAGNOSTICS_SCHEMA: pa.Schema = pa.schema(
    [
        ("round", pa.int32()),
        ("metric", pa.string()),
        ("layer", pa.string()),
        ("client", pa.int32()),
        ("other", pa.int32()),
        ("value", pa.float64()),
    ]
)
"""Numbers of single clients in single layers, a table that is there only where diagnostics gave some.

The layer is empty where all layers stand together, and the client :data:`EVERYBODY` where a number is of no single one.
``other`` is :data:`EVERYBODY`, or the second client of a pair, the
class or the bin where a client has several numbers. What is not defined is left out.
"""
OPTIONAL_SCHEMAS: Mapping[str, pa.Schema] = {CLASSES: CLASSES_SCHEMA, DIAGNOSTICS: DIAGNOSTICS_SCHEMA}
"""The tables that are there only where they have rows."""
TIMING_SCHEMA: pa.Schema = pa.schema([("round", pa.int32()), ("phase", pa.string()), ("seconds", pa.float64())])


class _Column:
    """One column that grows: numbers as machine words, texts as positions in a list of distinct texts."""

    def __init__(self, kind: pa.DataType) -> None:
        self.kind = kind
        self.words: array[int] | array[float] = array("d") if kind == pa.float64() else array("i")
        self.texts: dict[str, int] = {}

    def extend(self, values: Iterable[int] | Iterable[float] | Iterable[str] | np.ndarray) -> None:
        if isinstance(values, np.ndarray):
            self.words.frombytes(values.astype(self.words.typecode).tobytes())
        elif self.kind == pa.string():
            self.words.extend(self.texts.setdefault(str(text), len(self.texts)) for text in values)
        else:
            self.words.extend(values)  # type: ignore[arg-type]

    def repeat(self, value: int | str, count: int) -> None:
        """Add one value many times."""
        number = self.texts.setdefault(value, len(self.texts)) if isinstance(value, str) else value
        self.extend(np.full(count, number))

    @classmethod
    def from_array(cls, values: pa.Array) -> _Column:
        column = cls(values.type)
        if column.kind == pa.string():
            values = values.dictionary_encode()
            column.texts = {text: code for code, text in enumerate(values.dictionary.to_pylist())}
            values = values.indices
        column.words.frombytes(values.to_numpy(zero_copy_only=False).astype(column.words.typecode).tobytes())
        return column

    def to_array(self, start: int = 0) -> pa.Array:
        words = np.array(self.words[start:] if start else self.words)
        return (
            files.texts_of(words, list(self.texts)) if self.kind == pa.string() else files.column_of(words, self.kind)
        )


class _Rows:
    """A table that grows row by row and never goes back to an earlier round."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self.columns = {field.name: _Column(field.type) for field in schema}

    @classmethod
    def from_table(cls, table: pa.Table, schema: pa.Schema) -> _Rows:
        rows = cls(schema)
        rows.columns = {name: _Column.from_array(table.column(name).combine_chunks()) for name in schema.names}
        return rows

    def extend(
        self, round: int, count: int, **values: Iterable[int] | Iterable[float] | Iterable[str] | np.ndarray
    ) -> None:
        """Add rows of a round; a text alone stands in all of them."""
        rounds = self.columns["round"].words
        if round < 0 or (rounds and round < rounds[-1]):
            raise ValueError(f"A log only grows: round {round} cannot follow round {rounds[-1] if rounds else 0}.")
        self.columns["round"].repeat(round, count)
        for name, items in values.items():
            if isinstance(items, str):
                self.columns[name].repeat(items, count)
            else:
                self.columns[name].extend(items)

    def __len__(self) -> int:
        return len(self.columns["round"].words)

    def to_table(self, start: int = 0) -> pa.Table:
        return pa.table([column.to_array(start) for column in self.columns.values()], schema=self.schema)


class MetricLog:
    """All metrics of a run: of rounds, of clients in rounds, of layers in rounds; of classes and of clients in layers
    where they are asked for.

    >>> log = MetricLog()
    >>> log.add_round(1, {"accuracy": 0.5, "loss": 1.0})
    >>> log.add_round(2, {"accuracy": 0.25, "loss": 0.75})
    >>> log.latest(), log.best()
    ({'accuracy': 0.25, 'loss': 0.75}, {'accuracy': 0.5, 'loss': 0.75})
    """

    def __init__(self) -> None:
        self._tables = {name: _Rows(schema) for name, schema in METRIC_SCHEMAS.items()}
        self._optional = {name: _Rows(schema) for name, schema in OPTIONAL_SCHEMAS.items()}
        self._last_round: dict[str, int] = {}

    def __repr__(self) -> str:
        """Tell the log in a line."""
        rounds = max(self._last_round.values(), default=0)
        return f"MetricLog({len(self._last_round)} metrics, up to round {rounds}; see series, latest and to_tables)"

    def add_round(self, round: int, values: Mapping[str, float]) -> None:
        """Note metrics of a whole round; each metric at most once a round."""
        for metric in values:
            if self._last_round.get(metric, -1) >= round:
                raise ValueError(f"The metric '{metric}' already has a value for round {self._last_round[metric]}.")
        numbers = [float(value) for value in values.values()]
        self._tables["rounds"].extend(round, len(numbers), metric=values, value=numbers)
        self._last_round.update(dict.fromkeys(values, round))

    def add_clients(
        self, round: int, metric: str, clients: Sequence[int], values: Sequence[float] | np.ndarray
    ) -> None:
        """Note one metric of several clients."""
        if len(clients) != len(values):
            raise ValueError(f"The metric '{metric}' has {len(values)} values for {len(clients)} clients.")
        numbers, members = np.asarray(values, dtype=np.float64), np.asarray(clients, dtype=np.int64)
        self._tables["clients"].extend(round, len(members), client=members, metric=metric, value=numbers)

    def add_layers(self, round: int, metric: str, values: Mapping[str, float]) -> None:
        """Note one metric of several layers."""
        numbers = [float(value) for value in values.values()]
        self._tables["layers"].extend(round, len(numbers), layer=values, metric=metric, value=numbers)

    def add_classes(self, round: int, metric: str, client: int, values: np.ndarray) -> None:
        """Note one metric of all classes, or a confusion matrix, of one client or of :data:`EVERYBODY`."""
        told = ~np.isnan(values) if values.ndim == 1 else ~np.isnan(values) & (values != 0)
        places = np.argwhere(told).tolist()
        self._optional[CLASSES].extend(
            round,
            len(places),
            client=[client] * len(places),
            metric=metric,
            **{
                "class": [place[0] for place in places],
                "predicted": [place[1] if len(place) > 1 else EVERYBODY for place in places],
                "value": values[told].tolist(),
            },
        )

    def add_diagnostics(
        self,
        round: int,
        metric: str,
        layer: str,
        clients: Sequence[int],
        values: np.ndarray,
        others: Sequence[int] | None = None,
    ) -> None:
        """Note one metric of several clients in a layer, the empty one for all layers together.

        ``values`` are ``[K]``, or ``[K, M]`` where a client has several numbers; ``others`` then says what the columns
        are (the second clients of pairs), by default 0 to M - 1. NaN stands for what is not defined and is left out.
        """
        numbers = np.asarray(values, dtype=np.float64)
        if numbers.ndim not in (1, 2) or len(numbers) != len(clients):
            raise ValueError(f"The metric '{metric}' has the shape {numbers.shape} for {len(clients)} clients.")
        columns = np.arange(numbers.shape[1]) if numbers.ndim == 2 else np.array([EVERYBODY])
        if others is not None:
            columns = np.asarray(others, dtype=np.int64)
        if numbers.ndim == 2 and len(columns) != numbers.shape[1]:
            raise ValueError(f"The metric '{metric}' has {numbers.shape[1]} columns, named by {len(columns)} numbers.")
        numbers = numbers.reshape(len(numbers), -1)
        told = ~np.isnan(numbers)
        rows, places = np.nonzero(told)
        self._optional[DIAGNOSTICS].extend(
            round,
            len(rows),
            metric=metric,
            layer=layer,
            client=np.asarray(clients, dtype=np.int64)[rows],
            other=columns[places],
            value=numbers[told],
        )

    def to_tables(self) -> dict[str, pa.Table]:
        """Return the tables ``rounds``, ``clients`` and ``layers``, in the order in which the rows were added.

        Where there are numbers of single classes, or of clients in layers, there are the tables ``classes`` and
        ``diagnostics`` too.
        """
        tables = {name: rows.to_table() for name, rows in self._tables.items()}
        optional = {name: rows.to_table() for name, rows in self._optional.items()}
        return {**tables, **{name: table for name, table in optional.items() if len(table)}}

    def lengths(self) -> dict[str, int]:
        """Count the rows of each table."""
        return {name: len(rows) for name, rows in self._rows().items()}

    def since(self, lengths: Mapping[str, int]) -> dict[str, pa.Table]:
        """Return the rows that each table has had since it was as long as that, and perhaps none."""
        return {name: rows.to_table(lengths[name]) for name, rows in self._rows().items()}

    def _rows(self) -> dict[str, _Rows]:
        return {**self._tables, **self._optional}

    @classmethod
    def from_tables(cls, tables: Mapping[str, pa.Table]) -> MetricLog:
        """Continue from the tables of :meth:`to_tables`."""
        log = cls()
        log._tables = {name: _Rows.from_table(tables[name], schema) for name, schema in METRIC_SCHEMAS.items()}
        for name in OPTIONAL_SCHEMAS.keys() & tables.keys():
            log._optional[name] = _Rows.from_table(tables[name], OPTIONAL_SCHEMAS[name])
        columns = log._tables["rounds"].columns
        names = list(columns["metric"].texts)
        for round, metric in zip(columns["round"].words, columns["metric"].words, strict=True):
            log._last_round[names[int(metric)]] = int(round)
        return log

    def without(self, round: int, labels: Sequence[str]) -> MetricLog:
        """Return a log that lacks what was noted in a round under some labels, the beginnings of metrics' names."""
        beginnings = tuple(f"{label}." for label in labels)

        def kept(table: pa.Table) -> pa.Table:
            rows = zip(table["round"].to_pylist(), table["metric"].to_pylist(), strict=True)
            kept = [not (at == round and name.startswith(beginnings)) for at, name in rows]
            return table.filter(pa.array(kept, pa.bool_()))

        return self.from_tables({name: kept(table) for name, table in self.to_tables().items()})

    def series(self, metric: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the rounds in which a metric of the round table was noted, and its values."""
        columns = self._tables["rounds"].columns
        chosen = np.array(columns["metric"].words) == columns["metric"].texts.get(metric, -1)
        return np.array(columns["round"].words, dtype=np.int32)[chosen], np.array(columns["value"].words)[chosen]

    def of_round(self, round: int) -> dict[str, float]:
        """Return the metrics of the round table that were noted in a round."""
        found = {}
        for metric in self._last_round:
            rounds, values = self.series(metric)
            if round in rounds:
                found[metric] = float(values[rounds == round][-1])
        return found

    def of_layers(self, round: int) -> dict[str, dict[str, float]]:
        """Return what was noted of the layers in a round: by the metric, then by the layer."""
        columns = self._tables["layers"].columns
        begin, end = (bisect_left(columns["round"].words, number) for number in (round, round + 1))
        metrics, layers = (list(columns[name].texts) for name in ("metric", "layer"))
        found: dict[str, dict[str, float]] = {}
        for row in range(begin, end):
            metric, layer = (int(columns[name].words[row]) for name in ("metric", "layer"))
            found.setdefault(metrics[metric], {})[layers[layer]] = float(columns["value"].words[row])
        return found

    def of_client(self, client: int, metric: str, round: int | None = None) -> float | None:
        """Return the value of a metric of one client in a round, by default its last one, if it has any."""
        columns = self._tables["clients"].columns
        chosen = np.array(columns["metric"].words) == columns["metric"].texts.get(metric, -1)
        chosen &= np.array(columns["client"].words) == client
        if round is not None:
            chosen &= np.array(columns["round"].words) == round
        values = np.array(columns["value"].words)[chosen]
        return float(values[-1]) if len(values) else None

    def of_clients(self, metric: str) -> dict[int, float]:
        """Return the values of a metric of single clients in the last round that has it, by the clients' numbers."""
        columns = self._tables["clients"].columns
        chosen = np.array(columns["metric"].words) == columns["metric"].texts.get(metric, -1)
        rounds = np.array(columns["round"].words)
        chosen &= rounds == rounds[chosen].max(initial=-1)
        clients, values = (np.array(columns[name].words)[chosen].tolist() for name in ("client", "value"))
        return dict(zip(clients, values, strict=True))

    def of_clients_at(self, metric: str, rounds: Sequence[int]) -> dict[int, float]:
        """Return the values of a metric of single clients, each in a round of its own, by the clients' numbers."""
        columns = self._tables["clients"].columns
        chosen = np.array(columns["metric"].words) == columns["metric"].texts.get(metric, -1)
        clients, noted, values = (np.array(columns[name].words)[chosen] for name in ("client", "round", "value"))
        own = noted == np.asarray(rounds)[clients] if len(clients) else np.zeros(0, dtype=bool)
        return dict(zip(clients[own].tolist(), values[own].tolist(), strict=True))

    def of_chosen(self, metric: str, rounds: Sequence[int], adapted: Sequence[bool] = ()) -> dict[int, float]:
        """Return the values of a metric of single clients with the models that were chosen for them.

        Each is of a round of its own, as ``metric`` says (``client_after``, where that is ``client_adapted``), or was
        ``adapted`` after the last.
        """
        label, _, name = metric.partition(".")
        before = "client_after" if label == _ADAPTED else label
        after = f"{_ADAPTED}_validation" if label.endswith("_validation") else _ADAPTED
        of_adapted = self.of_clients(f"{after}.{name}") if any(adapted) else {}
        return {
            client: of_adapted.get(client, math.nan) if adapted and adapted[client] else value
            for client, value in self.of_clients_at(f"{before}.{name}", rounds).items()
        }

    def rounds_of_lowest(self, metric: str) -> list[int]:
        """Return for each client the first round in which a metric of its own is lowest; nothing, if nobody has it."""
        columns = self._tables["clients"].columns
        chosen = np.array(columns["metric"].words) == columns["metric"].texts.get(metric, -1)
        clients, noted, values = (np.array(columns[name].words)[chosen] for name in ("client", "round", "value"))
        order = np.lexsort((noted, values, clients))  # a value that is no number comes last
        rounds = np.zeros(int(clients.max(initial=-1)) + 1, dtype=np.int64)
        found, first = np.unique(clients[order], return_index=True)
        rounds[found.astype(np.int64)] = noted[order][first]
        return [int(round) for round in rounds]

    def latest(self) -> dict[str, float]:
        """Return the last value of each metric of the round table."""
        return {metric: float(self.series(metric)[1][-1]) for metric in self._last_round}

    def last_ten(self) -> dict[str, float]:
        """Return the mean of the last ten values (fewer, where there are fewer) of each metric of the round table."""
        return {metric: float(self.series(metric)[1][-10:].mean()) for metric in self._last_round}

    def traffic(self) -> dict[str, int]:
        """Sum up the bytes of the encoded messages and, where there was a real network, those that it carried."""
        ways = [(kind, way) for kind in ("bytes", "network") for way in ("up", "down")]
        values = {(kind, way): self.series(f"{kind}.{way}")[1] for kind, way in ways}
        return {
            f"{kind}_{way}": int(sent.sum()) for (kind, way), sent in values.items() if len(sent) or kind == "bytes"
        }

    def work(self) -> dict[str, float]:
        """Sum up the operations of the clients' training, of all weights and of those that are not zero."""
        done = {name: self.series(f"train.{name}")[1] for name in ("flops", "sparse_flops")}
        return {f"train_{name}": float(values.sum()) for name, values in done.items() if len(values)}

    def participation(self) -> dict[str, float]:
        """Tell, as the mean over the rounds, the fraction of the clients that were asked whose replies were merged."""
        fractions = self.series("participation.fraction")[1]
        return {"took_part": float(fractions.mean())} if len(fractions) else {}

    def best(self) -> dict[str, float]:
        """Return the best value of each metric of the round table that knows better and worse.

        Which way is up is told by :func:`higher_is_better`. Each metric has its own best round. A NaN is never the
        best, unless there is nothing else.
        """
        best = {}
        for metric in self._last_round:
            higher = higher_is_better(metric)
            if higher is not None:
                values = self.series(metric)[1]
                best[metric] = float((np.fmax if higher else np.fmin).reduce(values))
        return best


AGGREGATE = "aggregate"
"""The phase in which the server makes the next model of the replies: weighs, merges, steps and refines."""


class TimingLog:
    """How long the phases of the rounds took, in seconds."""

    def __init__(self) -> None:
        self._rows = _Rows(TIMING_SCHEMA)

    def __repr__(self) -> str:
        """Tell the log in a line."""
        return f"TimingLog({', '.join(f'{phase} {seconds:.1f} s' for phase, seconds in self.totals().items())})"

    def add(self, round: int, phase: str, seconds: float) -> None:
        """Note the time of one phase in one round."""
        self._rows.extend(round, 1, phase=[phase], seconds=[float(seconds)])

    def length(self) -> int:
        """Count the rows."""
        return len(self._rows)

    def since(self, length: int) -> pa.Table:
        """Return the rows that came after the first ``length`` ones."""
        return self._rows.to_table(length)

    def to_table(self) -> pa.Table:
        """Return the table ``round, phase, seconds``."""
        return self._rows.to_table()

    @classmethod
    def from_table(cls, table: pa.Table) -> TimingLog:
        """Continue from the table of :meth:`to_table`."""
        log = cls()
        log._rows = _Rows.from_table(table, TIMING_SCHEMA)
        return log

    def totals(self) -> dict[str, float]:
        """Return the seconds of each phase, over all rounds."""
        columns = self._rows.columns
        phases, seconds = np.array(columns["phase"].words), np.array(columns["seconds"].words)
        return {phase: float(seconds[phases == code].sum()) for phase, code in columns["phase"].texts.items()}

    def summary(self) -> dict[str, float]:
        """Tell the seconds of all phases and, of these, those of the aggregation, where it was measured."""
        totals = self.totals()
        apart = {"aggregation_seconds": totals[AGGREGATE]} if AGGREGATE in totals else {}
        return {"seconds": sum(totals.values()), **apart}


def higher_is_better(metric: str) -> bool | None:
    """Read off a metric's name which way is up: an accuracy should be high, a loss low; for others there is no better.

    Of metrics that an experiment asked for (:mod:`fedstrata.scores`), they themselves know.

    >>> higher_is_better("global_accuracy"), higher_is_better("loss"), higher_is_better("accuracy_std")
    (True, False, None)
    >>> higher_is_better("client_after.f1.mean"), higher_is_better("global.brier")
    (True, False)
    """
    words = set(re.split(r"[^a-z0-9]+", metric.lower()))
    if words & {"std", UNDEFINED}:
        return None
    name = re.match(r"\w+\.([A-Za-z][\w-]*)", metric)
    known = None if name is None else scores.metrics.registered(name.group(1))
    if known is not None:
        return known.higher_is_better
    return True if "accuracy" in words else False if "loss" in words else None


UNDEFINED = "undefined"
"""How many clients have no number, because their test samples do not define it."""
ANSWERED = "answered"
"""The fraction of the clients with test samples that told how they fared, where it was not all of them."""
POOLED = "pooled"
"""The number of all clients' test samples together, each tested by its own client's model."""


def describe_clients(values: Sequence[float] | np.ndarray, *, higher_is_better: bool = True) -> dict[str, float]:
    """Sum up one number per client: the mean, the standard deviation over the clients, and the mean of the worst tenth.

    The clients are the whole population, so the deviation divides by their number K. ``worst10`` is the mean over the
    ceil(K / 10) worst clients; a NaN counts as the worst. Of no clients at all, everything is NaN.

    >>> describe_clients([0.5, 1.0])
    {'mean': 0.75, 'std': 0.25, 'worst10': 0.5}
    """
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.size == 0 or np.isnan(numbers).any():
        return dict.fromkeys(("mean", "std", "worst10"), math.nan)
    worst_first = np.sort(numbers) if higher_is_better else -np.sort(-numbers)
    worst = worst_first[: math.ceil(numbers.size / 10)]
    with np.errstate(invalid="ignore"):  # an infinite loss has no deviation
        deviation = float(numbers.std())
    return {"mean": float(numbers.mean()), "std": deviation, "worst10": float(worst.mean())}
