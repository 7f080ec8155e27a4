"""Client by client, and which clients are alike."""

import numpy as np
from made_up_runs import MakeRun

from fedstrata.report import client_view, read_run
from fedstrata.report.client_view import client_table, worst_clients
from fedstrata.report.groups import group_runs
from fedstrata.report.series import effective_classes
from fedstrata.report.similarity import clustered, similarities


def test_a_client_has_a_row_with_all_methods_and_its_data(make_run: MakeRun) -> None:
    runs = [read_run(make_run(f"{m}{s}", method=m, seed=s)) for m in ("fedavg", "fedbn") for s in (0, 1)]
    found = client_table(group_runs(runs))
    assert found.methods == {"m0": "fedavg", "m1": "fedbn"}
    assert (len(found.rows), len(found.splits), found.clients, found.left_out) == (16, 2, 8, 0)
    row = next(row for row in found.rows if row["split"].startswith("seed 1,") and row["client"] == 3)
    own = [run.clients["client_after.accuracy"][1][3] for run in (runs[1], runs[3])]
    np.testing.assert_allclose([row["m0"], row["m1"], row["average"]], [*own, np.mean(own)], rtol=1e-3)
    assert row["size"] == runs[1].data["sizes"][3]
    counts = np.array(runs[1].data["label_counts"])[3]
    shares = counts[counts > 0] / counts.sum()
    assert row["effective"] == round(float(np.exp(-(shares * np.log(shares)).sum())), 2)


def test_the_worst_clients_are_named(make_run: MakeRun) -> None:
    runs = [read_run(make_run(method, method=method)) for method in ("fedavg", "fedbn")]
    found = client_table(group_runs(runs))
    named = worst_clients(found)
    assert named is not None
    worst = min(found.rows, key=lambda row: row["average"])
    assert named.index(f"client {worst['client']}<") < min(
        named.index(f"client {row['client']}<") for row in found.rows if row is not worst
    )
    assert worst_clients(client_table([])) is None


def test_too_many_numbers_leave_splits_out(make_run: MakeRun, monkeypatch) -> None:
    monkeypatch.setattr(client_view, "CELLS", 60)
    found = client_table(group_runs([read_run(make_run(f"{s}", seed=s)) for s in range(3)]))
    assert (len(found.splits), found.left_out) == (1, 2)


def test_effective_classes_of_a_client_without_samples_are_none() -> None:
    assert effective_classes(np.array([[0, 0, 0], [4, 4, 4]])).round(9).tolist() == [0.0, 3.0]


def test_clustering_puts_those_that_are_alike_together() -> None:
    groups = np.array([0, 1, 2, 0, 1, 2, 0, 1, 2])
    order = clustered((groups[:, None] == groups[None]) * 0.9)
    assert (np.diff(groups[order]) != 0).sum() == 2
    assert sorted(clustered(np.full((4, 4), np.nan)).tolist()) == [0, 1, 2, 3]


def test_a_matrix_is_read_from_the_last_round_and_ordered(make_run: MakeRun) -> None:
    runs = [read_run(make_run("a", similarity=True)), read_run(make_run("b", method="fedbn"))]
    found = similarities(group_runs(runs))
    assert found.names == ("fedavg",)
    assert (found.clients, found.shown, len(found.rows)) == (8, 8, 64)
    for row in found.rows:
        if row["row"] == row["column"]:
            assert row["client"] == row["other"]
            assert row["value"] == 1.0
    mirrored = {(row["client"], row["other"]): row["value"] for row in found.rows}
    assert all(mirrored[other, client] == value for (client, other), value in mirrored.items())
