"""Client by client, and which clients are alike."""

import json
import re
from typing import Any

import numpy as np
from made_up_runs import MakeRun

from fedstrata.report import client_view, read_run, skew_chart
from fedstrata.report.charts import NAMED_CLIENTS
from fedstrata.report.client_view import ClientTable, client_table, fairness_table, worst_clients
from fedstrata.report.groups import group_runs
from fedstrata.report.reading import Run
from fedstrata.report.rows import comparison_rows
from fedstrata.report.sections import clients, data
from fedstrata.report.series import client_rows, effective_classes
from fedstrata.report.similarity import clustered, similarities
from fedstrata.report.view import View


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
    by_accuracy = sorted(found.rows, key=lambda row: row["average"])
    assert re.findall("client\u00a0([0-9])<", named) == [str(row["client"]) for row in by_accuracy[:4]]  # half of 8
    assert by_accuracy[0] is worst
    assert "The 4 clients that fare worst" in named
    assert worst_clients(client_table([])) is None


def told_of(*accuracies: tuple[float, ...]) -> str | None:
    """The table of the worst clients: for each client its accuracies with the methods a, b and so on."""
    methods = {f"m{place}": "abc"[place] for place in range(len(accuracies[0]))}
    rows = [
        {"split": "s", "client": client, "size": 5, "effective": 1.0, "average": float(np.mean(own))}
        | dict(zip(methods, own, strict=True))
        for client, own in enumerate(accuracies)
    ]
    return worst_clients(ClientTable(rows, ("s",), methods, 0, len(rows)))


def test_nobody_is_named_where_all_are_alike() -> None:
    assert told_of((0.5, 0.5), (0.5, 0.5), (0.5, 0.5)) is None
    named = told_of((0.2, 0.2), (0.1, 0.3), (0.9, 0.9), (0.8, 0.8))
    assert named is not None
    assert "2 clients that fare worst" in named
    assert re.findall("client\u00a0([0-9])<", named) == ["0", "1"]
    assert re.findall(r"<td( class=\"absent\")?>(a|b|–)</td>", named) == [(' class="absent"', "–"), ("", "b")]
    named = told_of((0.0, 0.1), (0.0, 0.1), (0.0, 0.1), (0.8, 0.9))
    assert named is not None
    assert "2 of the clients that fare worst" in named  # the third fares as badly
    alone = told_of((0.0, 0.1), (0.5, 0.1))
    assert alone is not None
    assert "The client that fares worst" in alone


def with_names(run: Run, names: list[str]) -> Run:
    described = run.path / "data.json"
    described.write_text(json.dumps(json.loads(described.read_text()) | {"client_names": names}))
    return read_run(run.path)


def test_clients_that_have_names_are_called_by_them(make_run: MakeRun) -> None:
    names = [f"<site {one}>" for one in "hgfedcba"]
    run = with_names(read_run(make_run("named", similarity=True)), names)
    groups = group_runs([run])
    found = client_table(groups)
    assert [row["name"] for row in found.rows] == [f"{name} (client {one})" for one, name in enumerate(names)]
    worst = min(found.rows, key=lambda row: row["average"])["client"]
    named = worst_clients(found)
    assert named is not None
    assert f"&lt;site {names[worst][6]}&gt; (client\u00a0{worst})<" in named.replace("<wbr>", "")
    assert {row["client"] for row in client_rows(groups, ["client_after.accuracy"]).points} == {
        f"{name} (client {one})" for one, name in enumerate(names)
    }
    alike = similarities(groups).rows
    assert {row["other"] for row in alike} == {row["client"] for row in alike} == {row["name"] for row in found.rows}


def test_the_charts_of_clients_point_at_names_where_there_are_some(make_run: MakeRun) -> None:
    plain, named = (read_run(make_run(name, seed=seed)) for seed, name in enumerate(("plain", "named")))
    named = with_names(named, list("hgfedcba"))
    for runs, mentioned in (([plain], False), ([plain, named], True)):
        view = View.of(runs, None)
        section, one_by_one = data(view, with_charts=True), clients(view, with_charts=True)
        assert section is not None
        assert one_by_one is not None
        drawn, rows = json.dumps(section.charts["skew"].chart.to_dict()), section.charts["skew"].rows["rows"]
        assert ('"who"' in drawn) == mentioned
        assert {row.get("who", f"client {row['client']}") for row in rows} >= {"client 3"}
        assert any(row.get("who") == "e (client 3)" for row in rows) == mentioned
        assert ("datum.name" in json.dumps(one_by_one.charts["client-table"].chart.to_dict())) == mentioned


def test_the_axis_of_the_label_skew_has_the_names_of_few_clients(make_run: MakeRun) -> None:
    plain, named = (read_run(make_run(name, seed=seed)) for seed, name in enumerate(("plain", "named")))
    named = with_names(named, [f'site "{one}"' for one in "hgfedcba"])

    def axis(runs: list[Run]) -> dict[str, Any]:
        section = data(View.of(runs, None), with_charts=True)
        assert section is not None
        found: dict[str, Any] = section.charts["skew"].chart.to_dict()["encoding"]["x"]["axis"]
        return found

    assert axis([named])["labelExpr"].startswith('["site \\"h\\"", "site \\"g\\"", ')
    assert axis([named])["labelExpr"].endswith("[datum.value]")
    assert "labelExpr" not in axis([plain])
    assert "labelExpr" not in axis([named, plain])  # one axis for two splits, whose clients are others


def test_the_axis_of_the_label_skew_has_the_numbers_of_many_clients() -> None:
    def axis(clients: int) -> dict[str, Any]:
        chart = skew_chart([[1, 2]] * clients, ["cat", "dog"], [f"site {one}" for one in range(clients)])
        found: dict[str, Any] = chart.to_dict()["encoding"]["x"]["axis"]
        return found

    assert "site 23" in axis(NAMED_CLIENTS)["labelExpr"]
    assert "labelExpr" not in axis(NAMED_CLIENTS + 1)


def test_how_equally_clients_fare_is_told_method_by_method(make_run: MakeRun) -> None:
    methods = {"fedavg": 0.8, "local": 0.7, "fedbn": 0.9}
    made = {
        (method, seed): read_run(make_run(f"{method}{seed}", method=method, seed=seed, level=level))
        for method, level in methods.items()
        for seed in (0, 1)
    }
    told = fairness_table(comparison_rows(list(made.values())))
    assert told is not None
    own = {place: run.clients["client_after.accuracy"][1] for place, run in made.items()}
    means = {method: np.mean([np.var(own[method, seed]) for seed in (0, 1)]) for method in methods}
    for method, mean in means.items():
        assert f">{method}</th>" in told
        assert f">{mean:.4f} ±" in told
    better = [np.mean(own["fedbn", seed] > np.maximum(own["local", seed], own["fedavg", seed])) for seed in (0, 1)]
    assert f">{100 * np.mean(better):.1f} ±" in told
    best = re.findall(r'class="number best"[^>]*>([^ ]*)', told)
    assert best == [f"{min(means.values()):.4f}"]  # of a single incentive there is no best


def test_of_an_incentive_and_of_fairness_is_told_only_where_there_is_something_to_tell(make_run: MakeRun) -> None:
    runs = [read_run(make_run(method, method=method)) for method in ("fedavg", "fedbn")]
    told = fairness_table(comparison_rows(runs))
    assert told is not None
    assert "ncentive" not in told
    assert fairness_table(comparison_rows(runs[:1])) is None
    assert fairness_table([]) is None


def test_the_clients_one_by_one_say_which_model_was_measured(make_run: MakeRun) -> None:
    plain = read_run(make_run("plain"))
    tuned = read_run(make_run("tuned", method="fedavg-ft", headline="client_adapted", adapted=True))
    one, both = (clients(View.of(runs, None), with_charts=True) for runs in ([plain], [plain, tuned]))
    assert one is not None
    assert both is not None
    assert "Measured: own model after aggregation." in one.body
    assert "own model after aggregation (fedavg); own model after fine-tuning (fedavg-ft)." in both.body


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
