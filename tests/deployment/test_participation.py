"""Who took part: a run begins with all or says who refuses, and every round tells how many replies were merged."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from direct_network import DirectNetwork
from replaying import merged_sites
from rich.console import Console
from small_world import EXPERIMENT, SITES, ingredients, simulated

from fedstrata.cli.showing import explanation, summary_of_run
from fedstrata.deployment.agreement import NotBegun
from fedstrata.deployment.federation import Event, TooFewAnswers
from fedstrata.deployment.protocol import REFUSED, Reply, Request
from fedstrata.deployment.rules import Rules
from fedstrata.deployment.server import Deployment
from fedstrata.report import write_report
from fedstrata.report.reading import read_run
from fedstrata.report.rows import comparison_rows
from fedstrata.report.terminal import rich_table
from fedstrata.runs.folder import RunFolder

NAMES = ["berlin", "paris", "rome", "oslo"]
SHY = 2


def run(
    folder: Path, network: DirectNetwork, rules: Rules | None = None, **changes: Any
) -> tuple[RunFolder, list[str]]:
    lines: list[str] = []
    experiment = EXPERIMENT.with_changes({"method": "fedavg", "rounds": 2, **changes})
    deployment = Deployment(experiment, NAMES, folder / "run", rules or Rules(), True, ingredients())
    deployment.run(network, log=lines.append)
    return RunFolder.open(folder / "run"), lines


def refusing(*tickets: str) -> Any:
    """Let one site refuse some requests."""

    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        refuses = site == SHY and request.ticket in tickets
        return [(0.1, Reply(request.ticket, REFUSED, {"reason": "Not with me."}) if refuses else reply)]

    return tamper


@pytest.mark.attack(
    "A site refuses to take part in a run that is to wait for all.",
    "The run does not begin: when all have answered, the server stops with a sentence that names the site and its "
    "reason.",
)
def test_a_run_begins_with_all_or_says_who_refuses(tmp_path):
    network = DirectNetwork(tmp_path, SITES, refusing("hello 0.0"))
    with pytest.raises(NotBegun, match=r"not all take part: rome refuses 'hello 0.0': Not with me\. Put that right"):
        run(tmp_path, network)
    assert not (tmp_path / "run" / "experiment.toml").exists()
    assert all(site.end is None for site in network.sites), "the others wait until the server is started again"
    assert any("the run has not begun" in line and "rome" in line for line in network.lines[0])


def test_a_site_that_is_put_right_in_time_takes_part(tmp_path):
    refuse = refusing("hello 0.0")

    def tamper(site: int, request: Request, reply: Reply) -> Any:
        return refuse(site, request, reply) if network.time < 200 else [(0.1, reply)]

    network = DirectNetwork(tmp_path, SITES, tamper, away=[3])
    network.later(300.0, Event(SHY, joined=True))
    network.restart(3, after=400.0)
    network.connected.discard(3)
    original = network.receive

    def receive(seconds: float) -> list[Event]:
        events = original(seconds)
        network.connected |= {event.site for event in events if event.joined}
        return events

    network.receive = receive  # type: ignore[method-assign]
    folder, _ = run(tmp_path, network)
    assert merged_sites(folder) == {1: [0, 1, 2, 3], 2: [0, 1, 2, 3]}


def test_with_min_sites_a_run_begins_without_who_refuses(tmp_path):
    network = DirectNetwork(tmp_path, SITES, refusing("hello 0.0"))
    folder, lines = run(tmp_path, network, Rules(min_sites=3))
    assert any("rome refuses 'hello 0.0': Not with me." in line for line in lines)
    assert merged_sites(folder) == {1: [0, 1, 3], 2: [0, 1, 3]}
    assert folder.metrics().series("participation.fraction")[1].tolist() == [0.75, 0.75]


def test_once_begun_a_refusal_stops_nobody_else_but_one_of_most_sites_does(tmp_path):
    folder, _ = run(tmp_path, DirectNetwork(tmp_path, SITES, refusing("train 1.0")))
    assert merged_sites(folder) == {1: [0, 1, 3], 2: [0, 1, 2, 3]}

    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply | str]]:
        return [(0.1, "out of memory" if site < 2 and request.kind == "train" else reply)]

    other = tmp_path / "other"
    with pytest.raises(TooFewAnswers, match=r"Only 2 of the 3 needed .* \(berlin failed: out of memory; paris failed"):
        run(other, DirectNetwork(other, SITES, tamper))


@pytest.mark.attack(
    "A site drops out of a round, and out of the last test.",
    "Every round notes how many replies were merged; the tables have a column of it, and do not say 'all clients'.",
)
def test_participation_is_a_metric_and_a_column(tmp_path):
    folder, _ = run(tmp_path, DirectNetwork(tmp_path, SITES, refusing("train 1.0", "test 3.0")))
    metrics = folder.metrics()
    assert metrics.series("participation.clients")[1].tolist() == [3, 4]
    assert metrics.series("participation.fraction")[1].tolist() == [0.75, 1.0]
    assert folder.summary()["took_part"] == 0.875
    assert folder.summary()["final"]["client_after.answered"] == 0.75
    shown = _shown(folder)
    assert "Took part: 87.5 % of the clients that were asked" in shown
    assert "87.5" in _table(folder)
    page = _page(folder, tmp_path)
    assert "Took part, %" in page
    for text in (shown, _table(folder), page):
        assert "all clients that" not in text
        assert "clients that took part." in text


def test_where_everybody_took_part_nothing_changes(tmp_path):
    folder, _ = run(tmp_path, DirectNetwork(tmp_path, SITES))
    assert folder.summary()["took_part"] == 1.0
    for text in (_shown(folder), _table(folder), _page(folder, tmp_path)):
        assert "ook part" not in text.replace("clients that took part in the round", "").replace(
            "the clients that took part", ""
        )
        assert "all clients that have one." in text


@pytest.mark.parametrize("participation", [1.0, 0.5])
def test_in_a_simulation_everybody_who_is_asked_takes_part(participation):
    simulation = simulated("fedavg", participation=participation, rounds=2)
    simulation.run()
    assert simulation.metrics.series("participation.clients")[1].tolist() == [4 * participation] * 2
    assert simulation.metrics.series("participation.fraction")[1].tolist() == [1.0, 1.0]
    assert "client_after.answered" not in simulation.metrics.latest()


def _shown(folder: RunFolder) -> str:
    return _printed(summary_of_run(folder.experiment, folder.summary()))


def _table(folder: RunFolder) -> str:
    rows = comparison_rows([read_run(folder.path)])
    return " ".join((_printed(rich_table(rows)), *(str(line) for line in explanation(rows))))


def _page(folder: RunFolder, place: Path) -> str:
    write_report([folder.path], place / "page.html")
    return (place / "page.html").read_text()


def _printed(content: Any) -> str:
    console = Console(width=500, file=io.StringIO())
    console.print(content)
    return str(console.file.getvalue())  # type: ignore[attr-defined]
