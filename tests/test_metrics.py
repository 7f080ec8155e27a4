from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedstrata.files import to_parquet
from fedstrata.runs.metrics import MetricLog, TimingLog, describe_clients, higher_is_better


def test_describe_clients_by_hand() -> None:
    # 1, 2, 3, 4: mean 2.5, squared deviations 2.25 + 0.25 + 0.25 + 2.25 = 5, over 4 clients 1.25.
    described = describe_clients([3.0, 1.0, 4.0, 2.0])
    assert described == {"mean": 2.5, "std": pytest.approx(math.sqrt(1.25)), "worst10": 1.0}


@pytest.mark.parametrize(
    ("clients", "worst"),
    [
        (1, 0.0),
        (10, 0.0),
        (11, 0.5),  # ceil(1.1) = 2 clients: 0 and 1
        (20, 0.5),
        (21, 1.0),  # ceil(2.1) = 3 clients: 0, 1 and 2
    ],
)
def test_worst_tenth_is_rounded_up(clients: int, worst: float) -> None:
    assert describe_clients(np.arange(clients)[::-1])["worst10"] == worst


def test_worst_of_a_loss_is_the_highest() -> None:
    assert describe_clients(np.arange(20), higher_is_better=False)["worst10"] == 18.5


def test_diverged_clients_are_not_hidden() -> None:
    assert all(math.isnan(value) for value in describe_clients([0.5, math.nan]).values())
    assert all(math.isnan(value) for value in describe_clients([]).values())
    infinite = describe_clients([0.5, math.inf], higher_is_better=False)
    assert infinite["mean"] == infinite["worst10"] == math.inf
    assert math.isnan(infinite["std"])


def sample_log(rounds: int) -> MetricLog:
    log = MetricLog()
    add_rounds(log, 1, rounds)
    return log


def add_rounds(log: MetricLog, first: int, last: int) -> None:
    for round in range(first, last + 1):
        log.add_round(round, {"loss": 1 / round})
        log.add_clients(round, "accuracy", [4, 7, round], [0.25, math.nan, round / 100])
        log.add_layers(round, "drift", {"conv": 0.5 * round, "head": -0.0})
        if round % 2 == 0:
            log.add_round(round, {"accuracy": round / 20})


def test_tables_by_hand() -> None:
    tables = sample_log(2).to_tables()
    assert tables["rounds"].to_pydict() == {
        "round": [1, 2, 2],
        "metric": ["loss", "loss", "accuracy"],
        "value": [1.0, 0.5, 0.1],
    }
    clients = tables["clients"].to_pydict()
    assert clients["round"] == [1, 1, 1, 2, 2, 2]
    assert clients["client"] == [4, 7, 1, 4, 7, 2]
    assert clients["metric"] == ["accuracy"] * 6
    assert clients["value"] == pytest.approx([0.25, math.nan, 0.01, 0.25, math.nan, 0.02], nan_ok=True)
    assert tables["clients"].column("value").null_count == 0
    assert tables["layers"].to_pydict() == {
        "round": [1, 1, 2, 2],
        "layer": ["conv", "head", "conv", "head"],
        "metric": ["drift"] * 4,
        "value": [0.5, 0.0, 1.0, 0.0],
    }
    assert [field.type for field in tables["clients"].schema] == [pa.int32(), pa.int32(), pa.string(), pa.float64()]


def test_an_empty_log_has_its_columns() -> None:
    tables = MetricLog().to_tables()
    assert [table.num_rows for table in tables.values()] == [0, 0, 0]
    assert tables["layers"].column_names == ["round", "layer", "metric", "value"]
    assert MetricLog.from_tables(tables).latest() == {}


def parquet_of(log: MetricLog) -> dict[str, bytes]:
    return {name: to_parquet(table) for name, table in log.to_tables().items()}


@settings(deadline=None)
@given(breaks=st.lists(st.integers(min_value=0, max_value=12)))
def test_a_log_saved_and_continued_has_the_same_bytes(breaks: list[int]) -> None:
    log, done = MetricLog(), 0
    for stop in [*sorted(breaks), 12]:
        log = MetricLog.from_tables(log.to_tables())
        add_rounds(log, done + 1, stop)
        done = stop
    assert parquet_of(log) == parquet_of(sample_log(12))


def test_other_content_has_other_bytes() -> None:
    assert parquet_of(sample_log(12))["rounds"] != parquet_of(sample_log(11))["rounds"]


def test_latest_last_ten_and_best_by_hand() -> None:
    log = sample_log(12)
    log.add_round(13, {"bytes_up": 7.0, "accuracy_std": 0.25})
    assert log.latest() == {"loss": 1 / 12, "accuracy": 0.6, "bytes_up": 7.0, "accuracy_std": 0.25}
    tenths = log.last_ten()
    assert tenths["accuracy"] == pytest.approx((0.1 + 0.2 + 0.3 + 0.4 + 0.5 + 0.6) / 6)
    assert tenths["loss"] == pytest.approx(sum(1 / round for round in range(3, 13)) / 10)
    assert log.best() == {"loss": 1 / 12, "accuracy": 0.6}


def test_best_of_a_curve_that_falls_again_and_of_one_that_diverges() -> None:
    log = MetricLog()
    for round, (accuracy, loss) in enumerate([(0.2, 3.0), (0.9, 1.0), (0.4, 2.0), (math.nan, math.nan)]):
        log.add_round(round, {"accuracy": accuracy, "loss": loss})
    assert log.best() == {"accuracy": 0.9, "loss": 1.0}
    assert math.isnan(log.latest()["loss"])


def test_series_follows_one_metric() -> None:
    rounds, values = sample_log(5).series("accuracy")
    assert rounds.tolist() == [2, 4]
    assert values.tolist() == [0.1, 0.2]
    assert sample_log(5).series("unknown")[0].size == 0


def test_a_log_only_grows() -> None:
    log = MetricLog.from_tables(sample_log(3).to_tables())
    with pytest.raises(ValueError, match="already has a value for round 3"):
        log.add_round(3, {"loss": 0.0})
    with pytest.raises(ValueError, match="round 2 cannot follow round 3"):
        log.add_round(2, {"another": 0.0})
    with pytest.raises(ValueError, match="2 values for 1 clients"):
        log.add_clients(3, "accuracy", [1], [0.5, 0.5])
    assert parquet_of(log) == parquet_of(sample_log(3))


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("accuracy", True),
        ("global/accuracy", True),
        ("own_accuracy_worst10", True),
        ("client.loss.mean", False),
        ("accuracy_std", None),
        ("bytes_up", None),
        ("glossary", None),
    ],
)
def test_which_way_is_up(metric: str, expected: bool | None) -> None:
    assert higher_is_better(metric) is expected


def test_timings_add_up() -> None:
    log = TimingLog()
    log.add(1, "train", 0.5)
    log.add(1, "evaluate", 0.25)
    log = TimingLog.from_table(log.to_table())
    log.add(2, "train", 1.0)
    assert log.totals() == {"train": 1.5, "evaluate": 0.25}
    assert log.to_table().to_pydict() == {
        "round": [1, 1, 2],
        "phase": ["train", "evaluate", "train"],
        "seconds": [0.5, 0.25, 1.0],
    }
    assert TimingLog().totals() == {}
