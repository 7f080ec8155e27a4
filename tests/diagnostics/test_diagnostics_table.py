"""The table of clients in layers: what goes in, what is left out, and that it is read again."""

from __future__ import annotations

import numpy as np
import pytest

from fedstrata.diagnostics import quantity_of
from fedstrata.runs.metrics import DIAGNOSTICS, MetricLog


def test_a_number_of_each_client_in_a_layer() -> None:
    log = MetricLog()
    log.add_diagnostics(1, "drift.cosine", "conv1", [4, 7], np.array([0.5, np.nan]))
    log.add_diagnostics(1, "drift.similarity", "", [4, 7], np.array([[1.0, 0.25], [0.25, 1.0]]), others=[4, 7])
    log.add_diagnostics(2, "weights.histogram", "", [4], np.array([[3.0, 0.0]]))

    assert log.to_tables()[DIAGNOSTICS].to_pydict() == {
        "round": [1, 1, 1, 1, 1, 2, 2],
        "metric": ["drift.cosine", *["drift.similarity"] * 4, *["weights.histogram"] * 2],
        "layer": ["conv1", "", "", "", "", "", ""],
        "client": [4, 4, 4, 7, 7, 4, 4],
        "other": [-1, 4, 7, 4, 7, 0, 1],
        "value": [0.5, 1.0, 0.25, 0.25, 1.0, 3.0, 0.0],
    }


def test_the_table_is_there_only_where_it_has_rows() -> None:
    log = MetricLog()
    log.add_diagnostics(1, "drift.cosine", "", [0], np.array([np.nan]))

    assert DIAGNOSTICS not in log.to_tables()


def test_a_log_goes_on_from_its_tables() -> None:
    whole, first = MetricLog(), MetricLog()
    for log in (whole, first):
        log.add_diagnostics(1, "drift.cosine", "a", [0, 1], np.array([0.1, 0.2]))
    second = MetricLog.from_tables(first.to_tables())
    for log in (whole, second):
        log.add_diagnostics(2, "drift.cosine", "b", [1], np.array([0.3]))

    assert whole.to_tables()[DIAGNOSTICS].equals(second.to_tables()[DIAGNOSTICS])


@pytest.mark.parametrize("values", [np.zeros(3), np.zeros((2, 2, 2)), np.array(0.0)])
def test_numbers_of_other_clients_are_refused(values: np.ndarray) -> None:
    with pytest.raises(ValueError, match="for 2 clients"):
        MetricLog().add_diagnostics(1, "drift.cosine", "", [0, 1], values)


def test_quantities_are_found_by_the_names_of_metrics() -> None:
    known = quantity_of("cosine")

    assert known is not None
    assert (known.low, known.high) == (-1, 1)
    assert quantity_of("gamma") is None
