"""Keys and certificates that change while a server runs, and who gets in then."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import httpx
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from replaying import assert_same_model
from small_world import EXPERIMENT, ingredients, simulated

from fedstrata.deployment.certificates import site_context
from fedstrata.deployment.flower import ServerCertificate, SuperLink, SuperNode, app_of, serve
from fedstrata.deployment.keys import KeyFolder, make_keys, read_private_key
from fedstrata.deployment.live_keys import SECONDS_BETWEEN_LOOKS, LiveKeys
from fedstrata.deployment.protocol import Reply, Request
from fedstrata.deployment.roll import Roll
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.deployment.sites_file import SitesFile
from fedstrata.errors import FedStrataError
from fedstrata.runs.folder import RunFolder

NAMES = ("berlin", "paris", "rome", "oslo")
PASSPHRASE = "correct horse battery"
PROTOBUF = {"content-type": PROTOBUF_MEDIA_TYPE}


def now() -> datetime.datetime:
    return datetime.datetime.now(datetime.UTC)


class World:
    """A folder of keys, and a server that looks at it whenever it is told to."""

    def __init__(self, folder: Path, made_at: datetime.datetime | None = None, mutual: bool = False) -> None:
        make_keys(folder, ["127.0.0.1"], NAMES, now=made_at, passphrase=PASSPHRASE)
        self.made = KeyFolder(folder, now())
        self.time, self.later = 0.0, datetime.timedelta()
        self.lines: list[str] = []
        server = folder / "server"
        authority = server / "ca.pem" if mutual else None
        self.certificate = ServerCertificate(server / "server.pem", server / "server.key", PASSPHRASE, authority)
        self.roll = Roll.of(SitesFile.read(self.made.sites_file), None, folder)
        self.link = SuperLink("127.0.0.1", 0, self.roll.first_keys, self.certificate)

    def live(self, clock: Callable[[], float] | None = None) -> LiveKeys:
        return LiveKeys(
            self.link, self.roll, self.made.sites_file, self.certificate.certificate, self.lines.append,
            clock or (lambda: self.time), lambda: now() + self.later,
        )  # fmt: skip

    def look(self, live: LiveKeys) -> list[int]:
        self.time += SECONDS_BETWEEN_LOOKS
        return live()

    def node(self, name: str, app: object = None, keys: Path | None = None, mutual: bool = False) -> SuperNode:
        folder = keys or self.made.folder / "sites" / name
        shown = folder / "ca.pem", folder / "site.pem", folder / "site.key", PASSPHRASE
        key = read_private_key(folder / "site.key", PASSPHRASE)
        root = self.made.folder / "server" / "ca.pem"
        return SuperNode(
            self.link.address, app, key, root, 0.05, self.lines.append, tls=site_context(*shown) if mutual else None
        )

    def copy(self, name: str, folder: Path) -> Path:
        """Keep what a site has, as the site itself or a thief does."""
        folder.mkdir()
        for path in (self.made.folder / "sites" / name).iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
            (folder / path.name).chmod(0o600)
        return folder


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path / "keys")
    with made.link:
        yield made


class Connected:
    """A site that connects and asks for work until it is stopped or refused."""

    def __init__(self, node: SuperNode) -> None:
        self.stop = threading.Event()
        self.refusal: FedStrataError | None = None
        self.thread = threading.Thread(target=self.run, args=(node,), daemon=True)
        self.thread.start()

    def run(self, node: SuperNode) -> None:
        try:
            node.run(self.stop)
        except FedStrataError as error:
            self.refusal = error

    def end(self) -> str:
        self.stop.set()
        self.thread.join(timeout=20)
        return str(self.refusal)


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it has not happened"
        time.sleep(0.01)


# Keys -----------------------------------------------------------------------------------------------------------------


@pytest.mark.attack(
    "A key is stolen: its site gets another one while the server runs, and the thief comes with the old one.",
    "The site connects with its new key, under its name and number; who connects with the old one is refused, at once, "
    "or when the days are over for which both were to be accepted.",
)
@pytest.mark.parametrize("days", [0, 7])
def test_an_old_key_is_refused_once_a_site_has_another_one(days, world, tmp_path):
    live, stolen = world.live(), world.copy("paris", tmp_path / "stolen")
    thief = Connected(world.node("paris", keys=stolen))
    until(lambda: world.link.nodes().keys() == {1})
    world.made.rotate("paris", None, world.made.sites_file, None, datetime.timedelta(days=days), PASSPHRASE)
    assert world.look(live) == []
    assert "paris is known by the key SHA256:" in world.lines[-1]
    if days:
        assert thief.thread.is_alive(), "the old key is accepted too"
        world.later = datetime.timedelta(days=8)
        assert world.look(live) == []
    until(lambda: not thief.thread.is_alive())
    assert "does not accept this site's key" in thief.end()
    owner = Connected(world.node("paris"))
    until(lambda: any("connected" in line for line in world.lines[-1:]))
    assert world.link.nodes().keys() == {1}
    assert owner.end() == "None"


@pytest.mark.attack(
    "A site is removed from the list in the middle of a round, keeps knocking, and sends its upload all the same.",
    "Within about a second its key is refused; its upload is not merged, the round ends with the others, and the log "
    "names it.",
)
def test_a_revoked_site_is_out_at_once_and_the_round_goes_on(world, tmp_path):
    own, training, let_go = ingredients(), threading.Event(), threading.Event()
    sites = [
        Site(tmp_path / name, SiteData(part=number, ingredients=own), number=number)
        for number, name in enumerate(NAMES)
    ]

    class Slow(Site):
        def answer(self, request: Request) -> Reply:
            if request.kind == "train" and request.place.round == 2:
                training.set()
                let_go.wait(60)
            return super().answer(request)

    sites[3] = Slow(tmp_path / "oslo", SiteData(part=3, ingredients=own), number=3)
    connected = [
        Connected(world.node(name, app_of(lambda context, site=site: site)))
        for name, site in zip(NAMES, sites, strict=True)
    ]

    def revoke() -> None:
        training.wait(60)
        world.made.remove("oslo", world.made.sites_file)
        until(lambda: any("oslo is not on the list" in line for line in world.lines))
        let_go.set()

    threading.Thread(target=revoke, daemon=True).start()
    experiment = EXPERIMENT.with_changes({"method": "fedavg", "rounds": 2})
    deployment = Deployment(experiment, NAMES, tmp_path / "run", rehearsal=True, ingredients=own)
    serve(deployment, world.link, log=world.lines.append, revoked=world.live(time.monotonic))
    assert "its key is refused, and the run goes on without it, with berlin, paris, rome" in " ".join(world.lines)
    assert "does not accept this site's key" in connected[3].end()
    assert RunFolder.open(tmp_path / "run").finished
    for one in connected[:3]:
        assert one.end() == "None"
    assert not any("was not there to hear" in line for line in world.lines), "nobody waits for it in the end"


def test_a_site_whose_key_is_replaced_in_a_round_goes_on_with_the_new_one(world, tmp_path):
    own, training, let_go = ingredients(), threading.Event(), threading.Event()

    class Slow(Site):
        def answer(self, request: Request) -> Reply:
            if request.kind == "train" and request.place.round == 2:
                training.set()
                let_go.wait(60)
            return super().answer(request)

    def connect(name: str, kind: type[Site] = Site) -> Connected:
        number = NAMES.index(name)
        site = kind(tmp_path / name, SiteData(part=number, ingredients=own), number=number)
        return Connected(world.node(name, app_of(lambda context: site)))

    connected = [connect(name) for name in NAMES[:3]] + [connect("oslo", Slow)]

    def rotate() -> None:
        training.wait(60)
        world.made.rotate("oslo", None, world.made.sites_file, None, passphrase=PASSPHRASE)
        until(lambda: any("oslo is known by" in line for line in world.lines))
        let_go.set()
        until(lambda: not connected[3].thread.is_alive())
        connected.append(connect("oslo"))

    threading.Thread(target=rotate, daemon=True).start()
    experiment = EXPERIMENT.with_changes({"method": "fedavg", "rounds": 2})
    deployment = Deployment(experiment, NAMES, tmp_path / "run", rehearsal=True, ingredients=own)
    serve(deployment, world.link, log=world.lines.append, revoked=world.live(time.monotonic))
    simulation = simulated("fedavg", rounds=2)
    simulation.run()
    assert_same_model(RunFolder.open(tmp_path / "run"), simulation)
    assert "does not accept this site's key" in connected[3].end()
    for one in (*connected[:3], connected[4]):
        assert one.end() == "None"


@pytest.mark.attack(
    "Somebody saves half a sites file, or deletes it, while the server runs.",
    "Nobody is let in or out by it: everything stays as it was, and the log says why.",
)
def test_a_broken_list_changes_nothing(world):
    live, path = world.live(), world.made.sites_file
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    assert world.look(live) == []
    assert "all stays as it was" in world.lines[-1]
    assert len(world.lines) == 1
    path.unlink()
    assert world.look(live) == []
    path.write_text("[rules]\nmin_sites = 2\n" + whole)
    assert world.look(live) == []
    assert world.lines[1:] == [f"the rules in '{path}' have changed; they hold when the server is started again"]
    site = Connected(world.node("rome"))
    until(lambda: world.link.nodes().keys() == {2})
    assert site.end() == "None"


def test_who_comes_to_the_list_or_back_to_it_is_told_of_and_waits(world):
    live = world.live()
    world.made.add("bern", None, world.made.sites_file, None, PASSPHRASE)
    world.made.remove("rome", world.made.sites_file)
    assert world.look(live) == [2]
    assert world.lines == ["bern is on the list now, but the run was begun without it; it can join the next run"]
    world.made.add("rome", None, world.made.sites_file, None, PASSPHRASE)
    assert world.look(live) == []
    assert world.lines[1:] == ["rome is on the list again; it is let in when the server is started again"]
    knocking = Connected(world.node("rome"))
    until(lambda: not knocking.thread.is_alive())
    assert "does not accept this site's key" in knocking.end()


def test_the_files_are_looked_at_once_a_second_only(world):
    live = world.live()
    assert world.look(live) == []
    world.made.remove("rome", world.made.sites_file)
    assert live() == []
    assert world.look(live) == [2]


# Certificates ---------------------------------------------------------------------------------------------------------


def answer(world: World, context: ssl.SSLContext) -> int:
    return httpx.post(
        f"https://{world.link.address}/v1/fleet/pull-messages", verify=context, headers=PROTOBUF
    ).status_code


@pytest.mark.attack(
    "The server's certificate expires while it runs.",
    "Sites do not trust it any more. Renewed by the same authority, it is taken in without a restart, and the sites "
    "trust it with the ca.pem that they have; a certificate that does not fit the key is not taken in.",
)
def test_an_expired_certificate_is_renewed_while_the_server_runs(tmp_path):
    world = World(tmp_path / "keys", made_at=now() - datetime.timedelta(days=366))
    trusting = ssl.create_default_context(cafile=str(world.made.folder / "sites" / "rome" / "ca.pem"))
    with world.link:
        live = world.live()
        with pytest.raises(httpx.ConnectError, match="certificate has expired"):
            answer(world, trusting)
        path = world.certificate.certificate
        old, of_rome = path.read_bytes(), (world.made.folder / "sites" / "rome" / "site.pem").read_bytes()
        for wrong, words in ((of_rome, "belongs to another key"), (b"", "all stays as it was")):
            path.write_bytes(wrong)
            world.look(live)
            assert words in world.lines[-1]
            with pytest.raises(httpx.ConnectError, match="certificate has expired"):
                answer(world, trusting)
        path.write_bytes(old)
        world.made.renew_server(world.made.authority(PASSPHRASE))
        world.look(live)
        assert "was renewed" in world.lines[-1]
        assert answer(world, trusting) == 401


@pytest.mark.attack(
    "Strangers knock at a server with --mutual-tls: without a certificate, with one of another authority, with an "
    "expired one, and with the server's own.",
    "The handshake fails, and not one request of theirs is read.",
)
def test_without_a_certificate_of_the_authority_nobody_gets_past_the_handshake(tmp_path):
    world = World(tmp_path / "keys", mutual=True)
    make_keys(tmp_path / "others", ["127.0.0.1"], ["paris"])
    old = KeyFolder(world.made.folder, now() - datetime.timedelta(days=400))
    with world.link:
        site = Connected(world.node("paris", mutual=True))
        until(lambda: world.link.nodes().keys() == {1})
        assert site.end() == "None"
        carried = world.link.traffic()
        mine, server = world.made.folder / "sites" / "paris", world.made.folder / "server"
        other = tmp_path / "others" / "sites" / "paris"
        old.certify("paris", read_private_key(mine / "site.key", PASSPHRASE).public_key(), old.authority(PASSPHRASE))
        root = server / "ca.pem"
        strangers = [
            ssl.create_default_context(cafile=str(root)),
            site_context(root, other / "site.pem", other / "site.key", None),
            site_context(root, mine / "site.pem", mine / "site.key", PASSPHRASE),
            site_context(root, server / "server.pem", server / "server.key", PASSPHRASE),
        ]
        for context in strangers:
            with pytest.raises(httpx.TransportError):
                answer(world, context)
        assert world.link.traffic() == carried
        stop = threading.Event()
        plain = SuperNode(world.link.address, None, read_private_key(other / "site.key"), root, 0.05)
        lines: list[str] = []

        def log(line: str) -> None:
            lines.append(line)
            stop.set()

        SuperNode(plain.server, None, plain.key, root, 0.05, log).run(stop)
        assert "--mutual-tls" in lines[0]
        host, port = world.link.address.split(":")
        with suppress(OSError), socket.create_connection((host, int(port)), timeout=5) as plain_text:
            plain_text.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\n\r\n")
            assert plain_text.recv(100) == b""
