"""Faults that had wrong words or none: clocks, dates, steps that last, one key or folder in two places, open files."""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from direct_network import DirectNetwork
from flwr.supernode import node_auth_http_interceptor
from small_world import EXPERIMENT, ingredients, simulated

from fedstrata import files
from fedstrata.cli import main
from fedstrata.deployment.flower import GridNetwork, ServerCertificate, SuperLink, SuperNode, app_of
from fedstrata.deployment.keys import SitesFile, make_keys, read_private_key
from fedstrata.deployment.local import _own_place
from fedstrata.deployment.member import Member
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.deployment.status import StatusFile
from fedstrata.deployment.store import SiteStore
from fedstrata.errors import FedStrataError
from fedstrata.runs.folder import RunFolder

NAMES = ["berlin", "paris"]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets") / "keys"
    make_keys(folder, ["127.0.0.1"], NAMES)
    return folder


def super_link(keys: Path, certificate: Path | None = None) -> SuperLink:
    members = SitesFile.read(keys / "server" / "sites.toml").members
    shown = certificate or keys / "server"
    return SuperLink(
        "127.0.0.1",
        0,
        [member.public_key for member in members],
        ServerCertificate(shown / "server.pem", shown / "server.key"),
    )


@pytest.fixture
def link(keys: Path) -> Iterator[SuperLink]:
    with super_link(keys) as running:
        yield running


def super_node(
    address: str, keys: Path, site: Site, log: Callable[[str], None] = lambda line: None, authority: Path | None = None
) -> SuperNode:
    key = read_private_key(keys / "sites" / NAMES[site.number] / "site.key")
    return SuperNode(address, app_of(lambda context: site), key, authority or keys / "server" / "ca.pem", 0.05, log)


def until(happened: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.02)


# Clocks and dates -----------------------------------------------------------------------------------------------------


@pytest.mark.attack(
    "A site's clock is 7 s ahead of the server's, or 10 minutes behind.",
    "Its log names the clock, with both times and the difference; it connects when the clock is set.",
)
@pytest.mark.parametrize(("seconds", "words"), [(7, "ahead of the server's"), (-600, "behind")])
def test_a_wrong_clock_is_named(seconds, words, keys, link, tmp_path, monkeypatch):
    off = datetime.timedelta(seconds=seconds)
    monkeypatch.setattr(node_auth_http_interceptor, "now", lambda: datetime.datetime.now(datetime.UTC) + off)
    told: list[str] = []
    link.refused = lambda address, fingerprint, reason: told.append(reason)
    stop, lines = threading.Event(), []
    node = super_node(link.address, keys, Site(tmp_path, SiteData()), lines.append)
    site = threading.Thread(target=node.run, args=(stop,), daemon=True)
    site.start()
    until(lambda: lines)
    assert "the clock of this machine is wrong, or the server's is (here it is 20" in lines[0]
    link.nodes()
    assert f"{abs(seconds)} s {words}" in told[0]
    monkeypatch.undo()
    until(lambda: len(lines) > 1)
    assert lines[1:] == [f"connected with {link.address}"]
    stop.set()
    site.join(timeout=10)


def certify(folder: Path, host: x509.GeneralName, first: datetime.datetime, last: datetime.datetime) -> None:
    """Make an authority, and a server's certificate with these dates and this name."""
    authority, server = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    folder.mkdir()
    day = datetime.timedelta(days=1)
    for file, key, dates, ca in (
        ("ca.pem", authority, (min(first, last - day) - 9 * day, last + 999 * day), True),
        ("server.pem", server, (first, last), False),
    ):
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, file)])
        issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ca.pem")])
        certificate = (
            x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number(), *dates)
            .add_extension(x509.BasicConstraints(ca, None), critical=True)
            .add_extension(x509.SubjectAlternativeName([host]), critical=False)
            .sign(authority, hashes.SHA256())
        )
        (folder / file).write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "server.key").write_bytes(server.private_bytes(*private))


@pytest.mark.attack(
    "The server's certificate has expired, is not valid yet, or is for another name.",
    "The site's error names the dates and its own time, or the names that the certificate has.",
)
@pytest.mark.parametrize(
    ("first", "last", "words"),
    [
        (-30, -1, "until {last}, and here it is"),
        (1, 30, "is valid from {first}"),
        (-1, 30, r"is for another name \(fl.example.org\)"),
    ],
)
def test_a_certificate_that_does_not_fit_is_explained(first, last, words, keys, tmp_path):
    today = datetime.datetime.now(datetime.UTC)
    dates = [today + datetime.timedelta(days=days) for days in (first, last)]
    here, elsewhere = x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("fl.example.org")
    certify(tmp_path / "tls", elsewhere if "name" in words else here, *dates)
    words = words.format(first=f"{dates[0]:%Y-%m-%d}", last=f"{dates[1]:%Y-%m-%d %H:%M:%S} UTC")
    with super_link(keys, tmp_path / "tls") as link:
        node = super_node(link.address, keys, Site(tmp_path, SiteData()), authority=tmp_path / "tls" / "ca.pem")
        with pytest.raises(FedStrataError, match=words):
            node.run(threading.Event())


# Steps that last ------------------------------------------------------------------------------------------------------


@pytest.mark.attack(
    "A step takes longer than Flower keeps its message (12 hours; here a second).",
    "The site is asked again and answers from its disk: nothing is trained twice, and the weights are the same.",
)
def test_a_step_that_outlives_its_message_is_asked_for_again(keys, link, tmp_path, monkeypatch):
    own, steps = ingredients((9, 16)), Counter()
    perform = Site._perform

    def slowly(self: Site, member: Member, request: Any, *more: Any) -> Any:
        steps[self.number, request.ticket] += 1
        if (self.number, request.ticket) == (1, "train 1.0"):
            time.sleep(1.5)
        return perform(self, member, request, *more)

    monkeypatch.setattr(Site, "_perform", slowly)
    stop = threading.Event()
    threads = []
    for number in range(2):
        site = Site(tmp_path / str(number), SiteData(part=number, ingredients=own), number=number)
        threads.append(threading.Thread(target=super_node(link.address, keys, site).run, args=(stop,), daemon=True))
        threads[-1].start()
    network = GridNetwork(link.grid(), link.nodes, 0.02, link.forget, seconds_to_live=0.7)
    experiment = EXPERIMENT.with_changes({"method": "fedavg", "rounds": 2})
    Deployment(experiment, NAMES, tmp_path / "run", rehearsal=True, ingredients=own).run(network)
    stop.set()
    for thread in threads:
        thread.join(timeout=10)
    assert set(steps.values()) == {1}
    simulation = simulated("fedavg", own, rounds=2, clients=2)
    simulation.run()
    model = RunFolder.open(tmp_path / "run").model()
    assert all(model[name].equal(tensor) for name, tensor in simulation.model.items())


# Two where there may be one -------------------------------------------------------------------------------------------


@pytest.mark.attack(
    "Two processes connect with one site's key.",
    "The second waits and says why, the server's log tells it with its address, and the first goes on undisturbed.",
)
def test_one_key_in_two_processes_is_told(keys, link, tmp_path):
    told: list[tuple[str, str, str]] = []
    came: list[tuple[int, str]] = []
    link.refused = lambda *refusal: told.append(refusal)
    link.connected = lambda *arrival: came.append(arrival)
    lines: list[list[str]] = [[], []]
    stops = [threading.Event(), threading.Event()]
    threads = []
    for number in range(2):
        site = Site(tmp_path / str(number), SiteData(), number=0)
        run = super_node(link.address, keys, site, lines[number].append).run
        threads.append(threading.Thread(target=run, args=(stops[number],), daemon=True))
        threads[-1].start()
        until(lambda number=number: lines[number])
    before = link.nodes()
    time.sleep(1.0)
    assert link.nodes() == before, "the first did not have to connect again"
    assert came == [(0, "127.0.0.1")]
    assert lines[0] == [f"connected with {link.address}"]
    assert "another process is connected with this site's key" in lines[1][0]
    assert len(lines[1]) == 1
    assert "another process, at 127.0.0.1, is connected with the same key" in told[0][2]
    stops[0].set()
    threads[0].join(timeout=10)
    until(lambda: len(lines[1]) > 1)
    assert lines[1][1] == f"connected with {link.address}", "once the first has gone, the second takes its place"
    stops[1].set()
    threads[1].join(timeout=10)


def deployment(tmp_path: Path) -> Deployment:
    return Deployment(EXPERIMENT.with_changes({"rounds": 1}), NAMES, tmp_path / "run", ingredients=ingredients((9, 16)))


@pytest.mark.attack(
    "A second server is started on the folder of one that still waits for its sites.",
    "It stops with a sentence before it greets anybody, and leaves the first one's files as they are.",
)
def test_a_second_server_on_a_folder_stops_before_it_greets(tmp_path):
    asked: list[Any] = []

    class Looking(DirectNetwork):
        def send(self, site: int, request: Any) -> None:
            asked.append(request)
            if len(asked) == 1:
                status = (tmp_path / "run" / "status.json").read_bytes()
                with pytest.raises(FedStrataError, match="is being written by another process"):
                    StatusFile.begin(deployment(tmp_path))
                with pytest.raises(FedStrataError, match="is being written by another process"):
                    deployment(tmp_path).run(Never())
                assert (tmp_path / "run" / "status.json").read_bytes() == status
            super().send(site, request)

    class Never(DirectNetwork):
        def __init__(self) -> None:
            pass

        def send(self, site: int, request: Any) -> None:
            raise AssertionError("nobody may be greeted")

    first = deployment(tmp_path)
    first.run(Looking(tmp_path, 2, own=ingredients((9, 16))), watch=StatusFile.begin(first))
    assert RunFolder.open(tmp_path / "run").finished
    files.WriteLock(tmp_path / "run").release()


@pytest.mark.attack(
    "A second client is started on the state folder of one that runs.", "It ends with a sentence and code 2."
)
def test_two_clients_on_one_state_folder(keys, tmp_path, capsys):
    held = files.WriteLock(tmp_path)
    arguments = ("--server", "127.0.0.1:1", "--site", "berlin", "--keys", str(keys / "sites" / "berlin"))
    assert main(("client", *arguments, "--state", str(tmp_path))) == 2
    held.release()
    assert "is being written by another process" in " ".join(capsys.readouterr().err.split())


# Whose files they are -------------------------------------------------------------------------------------------------


@pytest.mark.attack(
    "Another account of a site's machine looks for the site's state, its replies and its model.",
    "Only their owner can read them, whatever the umask is.",
)
def test_the_state_of_a_site_is_its_owners_alone(tmp_path):
    before = os.umask(0)
    try:
        deployment(tmp_path).run(DirectNetwork(tmp_path, 2, own=ingredients((9, 16))))
        [run] = (path for path in (tmp_path / "site-0").iterdir() if path.is_dir())
        store = SiteStore(tmp_path / "site-0", run.name)
        store.write_secrets({"round": 1})
    finally:
        os.umask(before)
    kept = [path for site in tmp_path.glob("site-*") for path in (site, *site.rglob("*"))]
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in kept}
    assert {path.name for path in modes} >= {"state.safetensors", "reply.bin", "hello.json", "model.safetensors"}
    assert {mode for path, mode in modes.items() if path.is_file()} == {0o600}
    assert {mode for path, mode in modes.items() if path.is_dir()} == {0o700}


@pytest.mark.attack(
    "Others can read the server's private key.", "The server does not start, and says how to protect it."
)
def test_the_mode_of_the_servers_key_is_checked(keys, tmp_path, capsys):
    shutil.copytree(keys / "server", tmp_path / "tls")
    (tmp_path / "tls" / "server.key").chmod(0o640)
    sites = str(tmp_path / "tls" / "sites.toml")
    assert main(("server", "--tls", str(tmp_path / "tls"), "--sites", sites, "--dry-run")) == 2
    assert "chmod 600" in " ".join(capsys.readouterr().err.split())


def test_what_a_killed_rehearsal_has_left_is_cleared_away(tmp_path):
    left = tmp_path / "run-sites" / ".rehearsal"
    make_keys(left / "keys", ["127.0.0.1"], NAMES)
    (left / "berlin.log").write_text("last words")
    with _own_place(tmp_path / "run") as place:
        assert place == left
        assert [path.name for path in place.iterdir()] == [files.LOCK_FILE]
        with pytest.raises(FedStrataError, match="by another process"), _own_place(tmp_path / "run"):
            pass
    assert not left.exists()


@pytest.mark.slow
@pytest.mark.attack("A rehearsal is killed while it runs.", "No private key is left on the disk.")
def test_a_killed_rehearsal_leaves_no_keys(tmp_path):
    out, temporary = tmp_path / "run", tmp_path / "temporary"
    temporary.mkdir()
    asked = [*(sys.executable, "-m", "fedstrata", "deploy", "--local", "2", "--data", "digits", "--rounds", "200")]
    environment = {**os.environ, "TMPDIR": str(temporary), "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*asked, "--out", str(out)], stdout=log, stderr=log, env=environment)
    until(lambda: (out / "checkpoints").is_dir(), 120)
    process.kill()
    process.wait()
    everything = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert b"PRIVATE KEY" not in everything
