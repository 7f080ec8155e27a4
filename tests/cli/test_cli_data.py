from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from cli_calls import Call

from fedstrata.cli.data import histogram


def test_partition_tells_who_gets_what(call: Call) -> None:
    described = call("partition", "--clients", "5", "--partition", "classes:2", "--json").json
    assert described["clients"] == 5
    assert described["classes_per_client"] == [2] * 5
    assert sum(described["sizes"]) == sum(map(sum, described["label_counts"]))
    text = call("partition", "--clients", "5", "--partition", "classes:2").out
    assert described["hash"] in text
    assert "2 of 10 classes each" in text


def test_the_same_seed_gives_the_same_split(call: Call) -> None:
    first, second, other = (call("partition", "--seed", seed, "--json").json["hash"] for seed in ("1", "1", "2"))
    assert first == second != other


def test_many_clients_are_not_all_listed(call: Call) -> None:
    assert "and 20 more" in call("partition", "--clients", "50", "--partition", "iid").out


def test_partition_names_clients_that_are_sites(call: Call) -> None:
    rows = [f"{score},{score % 2},{site}" for site in ("north", "south") for score in range(20)]
    Path("hospitals.csv").write_text("\n".join(["score,outcome,hospital", *rows]))
    given = ("partition", "--data", "table(path=hospitals.csv, label=outcome, site=hospital)")
    told = call(*given)
    assert re.search(r"^ *south \(client 1\) +14 +6 +2 ", told.out, re.MULTILINE)
    assert call(*given, "--json").json["client_names"] == ["north", "south"]
    assert call("partition", "--clients", "2", "--json").json["client_names"] == []


@pytest.mark.parametrize("ending", ["html", "svg"])
def test_partition_draws_the_skew(call: Call, tmp_path: Path, ending: str) -> None:
    pytest.importorskip("altair")
    pytest.importorskip("vl_convert")
    outcome = call("partition", "--clients", "4", "--plot", f"pictures/skew.{ending}")
    assert outcome.code == 0
    assert f"pictures/skew.{ending}" in outcome.out
    assert (tmp_path / "pictures" / f"skew.{ending}").stat().st_size > 1000


def test_a_histogram_has_a_column_per_class_or_per_group_of_classes() -> None:
    assert histogram(np.array([0, 1, 8]), columns=10) == " ▁█"
    assert histogram(np.array([1, 1, 0, 0]), columns=2) == "█ "
    assert histogram(np.zeros(3, dtype=int), columns=3) == "   "


def test_download_hands_over_to_the_data_package(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.data.download", lambda name, root: root / name)
    assert call("download", "cifar10", "--data-root", "data").out == "'cifar10' is in data/cifar10\n"
    assert call("download", "cifar10", "--data-root", "data", "--json").json == {
        "name": "cifar10",
        "path": "data/cifar10",
    }
