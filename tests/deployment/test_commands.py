"""The commands for real sites, as far as they go without processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from direct_network import DirectNetwork
from small_world import EXPERIMENT, SITES, ingredients

from fedstrata.cli import main
from fedstrata.deployment.flower import need_flower
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.status import StatusFile
from fedstrata.errors import FedStrataError


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        try:
            code = main(arguments)
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        return code, out, " ".join(err.split())

    return run


@pytest.fixture
def keys(call) -> Path:
    code, out, _ = call("keys", "--host", "fl.example.org", "--site", "berlin", "--site", "paris")
    assert code == 0
    assert "fedstrata client --server" in " ".join(out.split())
    return Path("keys")


SERVER = ("server", "--sites", "keys/server/sites.toml", "--method", "fedbn")


def test_keys_say_who_gets_what_and_hide_the_secrets(keys, call):
    code, out, _ = call("keys", "--host", "localhost", "--site", "rome", "--out", "more", "--json")
    assert code == 0
    assert json.loads(out)["folders"] == {"server": "more/server", "rome": "more/sites/rome"}
    assert "PRIVATE" not in out
    assert {path.name for path in (keys / "sites" / "berlin").iterdir()} == {"ca.pem", "site.pem", "site.key"}
    for secret in (keys / "authority.key", keys / "server" / "server.key", *keys.glob("sites/*/site.key")):
        assert secret.stat().st_mode & 0o777 == 0o600


def test_a_dry_run_tells_what_would_travel_and_leaves_nothing(keys, call):
    code, out, _ = call(*SERVER, "--tls", "keys/server", "--dry-run", "--json")
    told = json.loads(out)
    assert code == 0
    assert told["sites"] == ["berlin", "paris"]
    assert told["tls"] is True
    assert told["parameters"] > 1000
    assert any("sum of their squares" in line for line in told["leaves_a_site"])
    assert any(line.startswith("norm_limit = 100: ") for line in told["rules"])
    assert any(line.startswith("min_samples = 5: ") for line in told["every_site_decides"])
    assert any("after 3 refusals" in line for line in told["refused"])
    assert any("norm" in name for name in told["stays_at_sites"])
    assert not Path("runs").exists()


def test_a_dry_run_prints_the_rules_and_what_masks_hide(keys, call):
    call("keys", "--host", "here", *(part for name in "abc" for part in ("--site", name)), "--out", "more")
    code, out, _ = call("server", "--sites", "more/server/sites.toml", "--tls", "more/server", "--dry-run", "--secure")
    assert code == 0
    assert "leaves a site:\n  - once: the shape of a sample" in out
    assert "the upload of the method, under masks: the server sees the sum over all sites" in out
    assert "secure_threshold = 0.66: " in out
    code, out, _ = call(*SERVER, "--tls", "keys/server", "--dry-run", "--transforms", "normalise:site")
    assert "sum of their squares" not in out
    assert "secure_threshold" not in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*SERVER,), "needs TLS"),
        ((*SERVER, "--tls", "nowhere"), "no file 'nowhere/server.pem'"),
        ((*SERVER, "--tls", "keys/server", "--min-sites", "3", "--dry-run"), "only 2 sites"),
        ((*SERVER, "--tls", "keys/server", "--address", "here", "--dry-run"), "no address"),
        (("server", "--sites", "nowhere.toml", "--tls", "keys/server"), "nowhere.toml"),
        ((*SERVER, "--tls", "keys/server", "--set", "method=d-psgd", "--method", "d-psgd"), "cannot run on real sites"),
        (("client", "--server", "fl.example.org:1", "--site", "a", "--keys", "nowhere"), "needs TLS"),
        (("client", "--server", "127.0.0.1:1", "--site", "a", "--keys", "nowhere"), "nowhere/site.key"),
        (
            ("client", "--server", "127.0.0.1:1", "--site", "a", "--keys", ".", "--lifetime-epsilon", "0"),
            "lifetime_eps",
        ),
        (("deploy", "--local", "2", "--link", "fast"), "no link"),
        (("deploy", "--local", "2", "--min-sites", "3"), "only 2 sites"),
        (("status", "nowhere"), "no run folder"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(arguments, words, keys, call):
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert words in err
    assert "Traceback" not in err


def test_the_status_of_a_run(call, tmp_path):
    names = [f"site-{number}" for number in range(SITES)]
    deployment = Deployment(
        EXPERIMENT.with_changes({"method": "fedavg"}),
        names,
        tmp_path / "run",
        rehearsal=True,
        ingredients=ingredients(),
    )
    deployment.run(DirectNetwork(tmp_path, SITES), watch=StatusFile(tmp_path / "run"))
    code, out, _ = call("status", "run")
    assert code == 0
    assert "finished, 3 of 3 rounds" in out
    assert "accuracy" in out
    code, out, _ = call("status", "run", "--json")
    assert json.loads(out)["rounds_done"] == 3


def test_without_flower_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr.app", None)
    with pytest.raises(FedStrataError, match=r"fedstrata\[flower\]"):
        need_flower()
