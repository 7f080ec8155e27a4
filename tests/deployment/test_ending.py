"""How a run ends for its sites, what they tell on the way, and what a server tells from its first second on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from direct_network import DirectNetwork
from small_world import EXPERIMENT, SITES, Net, ingredients, simulated

from fedstrata import files
from fedstrata.cli import main
from fedstrata.deployment.federation import Standing
from fedstrata.deployment.protocol import Reply, Request
from fedstrata.deployment.rules import Rules
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.status import LOG_FILE, STATUS_FILE, LogFile, StatusFile, doing, status_of
from fedstrata.deployment.telling import LONG_WAIT, Teller
from fedstrata.errors import FedStrataError
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.signals import Interrupted
from fedstrata.stack import take_first
from fedstrata.trained import TrainedModel

NAMES = [f"site-{number}" for number in range(SITES)]


def deployment(folder: Path, rules: Rules | None = None, **changes: Any) -> Deployment:
    experiment = EXPERIMENT.with_changes(changes)
    return Deployment(experiment, NAMES, folder / "run", rules or Rules(), rehearsal=True, ingredients=ingredients())


# Sites ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedbn", "fedavg-ft"])
def test_a_site_ends_with_the_model_that_it_uses(method, tmp_path):
    """For methods with an adaptation that is the adapted one, for others the one after the last merging."""
    network = DirectNetwork(tmp_path, SITES)
    deployment(tmp_path, method=method).run(network)
    simulation = simulated(method)
    simulation.run()
    messages = simulation.engine.central.messages(range(SITES), 4, testing=True)  # type: ignore[attr-defined]
    for number, site in enumerate(network.sites):
        assert site.end is not None
        assert (site.end.state, site.end.words) == ("finished", "the run is finished, after 3 rounds")
        member = simulation.engine.members[number]  # type: ignore[attr-defined]
        uses = member.adapted_model if simulation.method.adaptation is not None else member.model
        assert site.model_folder is not None
        path = site.model_folder / "model.safetensors"
        saved = files.from_safetensors(path.read_bytes(), path)
        for name, tensor in take_first(uses(messages[number], 3)).items():
            assert torch.equal(saved[name], tensor), name


def test_the_card_says_what_is_needed_to_use_the_model(tmp_path):
    network = DirectNetwork(tmp_path, SITES)
    deployment(tmp_path, method="fedbn").run(network)
    [folder] = (tmp_path / "site-2").glob("*/model")
    simulation = simulated("fedbn")
    model, dataset = TrainedModel.load(folder, Net), simulation.dataset
    [step] = model.card.preprocessing
    assert (tuple(step["mean"]), tuple(step["deviation"])) == (dataset.mean, dataset.deviation)
    assert model.card.origin["round"] == 3
    tested = simulation.split.test[2]
    right = [dataset.class_names[label] for label in dataset.labels[tested]]
    assert (model.predict(dataset.inputs[tested]) == right).mean() == pytest.approx(model.card.metrics["accuracy"])


def test_the_model_goes_where_the_operator_wants_it(tmp_path):
    network = DirectNetwork(tmp_path, SITES)
    network.sites[1].out = tmp_path / "mine"
    deployment(tmp_path).run(network)
    assert (tmp_path / "mine" / "model.safetensors").is_file()


def test_every_site_tells_a_line_for_every_round(tmp_path):
    network = DirectNetwork(tmp_path, SITES)
    deployment(tmp_path, evaluate_every=2).run(network)
    lines = [line for line in network.lines[0] if line.startswith("round")]
    assert len(lines) == 3
    number, percent = r"[\d.e-]+", r"[\d.]+ %"
    cost = rf"{number} s, {number} kB down, {number} kB up"
    assert re.fullmatch(rf"round 1 of 3: loss {number}, {cost}", lines[0])
    for round, line in zip((2, 3), lines[1:], strict=True):
        scores = rf"accuracy {percent} when trained, accuracy {percent} merged"
        assert re.fullmatch(rf"round {round} of 3: loss {number}, {scores}, {cost}", line), line


def test_what_is_waited_for_is_told_once_when_it_takes_long():
    lines: list[str] = []
    teller = Teller(lines.append)
    teller.idle(LONG_WAIT / 2)
    assert not lines
    for _ in range(3):
        teller.idle(LONG_WAIT)
    assert lines == ["waits for the server to begin"]
    teller.trained(4, 9, {"loss": None, "scores": {"accuracy": 0.25, "loss": 1.0}}, 2.0, tested=True)
    assert len(lines) == 1, "its test is still to come"
    teller.idle(LONG_WAIT)
    assert lines[1].startswith("round 4 of 9: loss is no number, accuracy 25.0 % when trained, 2.0 s")
    assert lines[2] == "waits for the other sites to finish round 4"
    teller.tested(9, 9, {}, adapted=False)
    teller.idle(LONG_WAIT)
    assert lines[-1] == "waits for the run to end"


def test_a_run_that_fails_ends_its_sites_with_the_reason_and_the_model_so_far(tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply | str]]:
        return [(0.1, "out of memory" if request.kind == "train" and request.round == 2 else reply)]

    network = DirectNetwork(tmp_path, SITES, tamper)
    with pytest.raises(FedStrataError, match="Only 0 of the 3 needed sites"):
        deployment(tmp_path).run(network)
    for site in network.sites:
        assert site.end is not None
        assert site.end.state == "failed"
        assert "Only 0 of the 3 needed sites" in site.end.words
        assert site.model_folder is not None
        assert TrainedModel.load(site.model_folder, Net).card.origin["round"] == 1


def test_sites_of_a_server_that_is_stopped_wait_for_it(tmp_path):
    network = DirectNetwork(tmp_path, SITES)

    def listener(update: Any) -> None:
        raise Interrupted(2, update.round, tmp_path / "run")

    with pytest.raises(Interrupted):
        deployment(tmp_path).run(network, listener)
    for site, lines in zip(network.sites, network.lines, strict=True):
        assert site.end is None
        assert site.teller.waits_for == "the server to come back"
        assert any("stopped after round 1, and can go on" in line for line in lines)


def test_a_site_that_is_away_in_the_end_does_not_keep_the_server(tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        return [] if site == 3 and request.kind == "end" else [(0.1, reply)]

    log: list[str] = []
    network = DirectNetwork(tmp_path, SITES, tamper)
    deployment(tmp_path).run(network, log=log.append)
    assert "site-3 was not there to hear how the run ended" in log
    assert network.time < 60


def test_the_end_of_another_run_is_not_that_of_this_one(tmp_path):
    network = DirectNetwork(tmp_path, SITES)
    deployment(tmp_path).run(network)
    site = network.start(0)
    site.answer(Request("end", "other", facts={"state": "finished", "text": "over"}))
    assert site.end is None


# The server -----------------------------------------------------------------------------------------------------------


def test_the_status_is_there_before_any_site_has_come(tmp_path, capsys):
    asked = deployment(tmp_path, method="fedbn")
    status = StatusFile.begin(asked)
    log = LogFile(tmp_path / "run" / LOG_FILE, lambda line: None)
    log("listening")
    told = status_of(tmp_path / "run")
    assert (told["state"], told["method"], told["rounds"]) == ("waiting for the sites", "fedbn", 3)
    assert told["waiting"] == NAMES
    assert main(["status", str(tmp_path / "run")]) == 0
    assert "fedbn: waiting for the sites, 0 of 3 rounds" in capsys.readouterr().out
    seen: list[str] = []

    def watch(standing: Standing) -> None:
        status(standing)
        seen.append(status_of(tmp_path / "run")["state"])

    asked.run(DirectNetwork(tmp_path, SITES), watch=watch, log=log)
    assert list(dict.fromkeys(seen))[:5] == [
        "waiting for the sites",
        "adding up the statistics of all samples",
        "training in round 1",
        "testing after round 1",
        "training in round 2",
    ]
    assert status_of(tmp_path / "run")["state"] == "finished"
    assert "listening" in (tmp_path / "run" / LOG_FILE).read_text()


def test_a_server_that_waited_in_vain_can_be_started_again(tmp_path):
    StatusFile.begin(deployment(tmp_path))
    deployment(tmp_path).run(DirectNetwork(tmp_path, SITES), watch=StatusFile.begin(deployment(tmp_path)))
    assert RunFolder.open(tmp_path / "run").finished
    with pytest.raises(FedStrataError, match="already holds a finished run"):
        StatusFile.begin(deployment(tmp_path))


def test_nothing_is_written_into_a_folder_of_somebody_else(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("mine")
    with pytest.raises(FedStrataError, match=r"thesis\.tex"):
        StatusFile.begin(deployment(tmp_path))
    assert not (tmp_path / "run" / STATUS_FILE).exists()


@pytest.mark.parametrize(
    ("question", "words"),
    [("", "not begun"), ("adapt 4.0", "adapting after round 3"), ("unmask 2.1", "adding up under masks in round 2")],
)
def test_questions_in_words(question, words):
    assert doing(question) == words


def test_no_run_folder_is_a_matter_of_the_server(tmp_path):
    with pytest.raises(FedStrataError, match="'fedstrata server'"):
        status_of(tmp_path / "nowhere")
