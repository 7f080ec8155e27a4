"""Who gets in: TLS, known keys, and nothing else is open."""

from __future__ import annotations

import datetime
import ssl
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import httpx
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.proto.node_pb2 import Node
from flwr.supercore.corestate import in_memory_corestate
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
from flwr.supernode.fleet_http_client import FleetHttpClient
from small_world import EXPERIMENT, SITES, ingredients, simulated

from fedstrata.cli.connections import is_loopback, read_address
from fedstrata.deployment.flower import GridNetwork, ServerCertificate, SuperLink, SuperNode, app_of, serve
from fedstrata.deployment.flower.internals import (
    PUBLIC_KEY_HEADER,
    SIGNATURE_HEADER,
    TIMESTAMP_HEADER,
    public_key_to_bytes,
)
from fedstrata.deployment.keys import SitesFile, make_keys, read_private_key
from fedstrata.deployment.protocol import Reply, Request
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.errors import FedStrataError
from fedstrata.runs.folder import RunFolder

NAMES = ["berlin", "paris", "rome", "oslo"]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("secrets") / "keys"
    make_keys(folder, ["127.0.0.1", "localhost"], NAMES)
    return folder


@pytest.fixture
def link(keys: Path) -> Iterator[SuperLink]:
    members = SitesFile.read(keys / "server" / "sites.toml").members
    certificate = ServerCertificate(keys / "server" / "server.pem", keys / "server" / "server.key")
    with SuperLink("127.0.0.1", 0, [member.public_key for member in members], certificate) as running:
        yield running


def node(
    address: str,
    keys: Path,
    site: Site,
    authority: Path | None = None,
    plain: bool = False,
    kind: type[SuperNode] = SuperNode,
) -> SuperNode:
    root = None if plain else authority or keys / "server" / "ca.pem"
    name = NAMES[site.number]
    key = read_private_key(keys / "sites" / name / "site.key")
    return kind(address, app_of(lambda context: site), key, root, poll_seconds=0.1)


@dataclass(frozen=True)
class RepeatingNode(SuperNode):
    """Sends every reply twice, and in between those to all earlier questions."""

    sent: list[Message] = field(default_factory=list)

    def _send(self, client: FleetHttpClient, node: Node, reply: Message) -> None:
        for one in (reply, *self.sent, reply):
            super()._send(client, node, one)
        self.sent.append(reply)


def test_sites_in_threads_over_tls_give_the_weights_of_the_simulation(keys, link, tmp_path):
    """Also where half of them repeat everything that they have said."""
    own, stop = ingredients(), threading.Event()
    sites = [
        Site(tmp_path / name, SiteData(part=number, ingredients=own), number=number)
        for number, name in enumerate(NAMES)
    ]
    threads = [
        threading.Thread(target=node(link.address, keys, site, kind=kind).run, args=(stop,), daemon=True)
        for site, kind in zip(sites, (SuperNode, RepeatingNode) * 2, strict=True)
    ]
    for thread in threads:
        thread.start()
    experiment = EXPERIMENT.with_changes({"method": "ssfl(sparsity=0.5)+fedbn", "rounds": 2})
    deployment = Deployment(experiment, NAMES, tmp_path / "run", rehearsal=True, ingredients=own)
    summary = serve(deployment, link)
    stop.set()
    simulation = simulated("ssfl(sparsity=0.5)+fedbn", rounds=2)
    simulation.run()
    model = RunFolder.open(tmp_path / "run").model()
    for name, tensor in simulation.model.items():
        assert model[name].equal(tensor), name
    for thread in threads:
        thread.join(timeout=10)
        assert not thread.is_alive()
    assert len(threads) == SITES
    assert summary["bytes_up"] == sum(simulation.metrics.series("bytes.up")[1]), "each reply is counted once"


@pytest.mark.attack(
    "No site answers for an hour, because a round takes that long.",
    "The server goes on afterwards: what it asks arrives, and answers are taken.",
)
def test_an_hour_without_an_answer_does_not_end_the_run(keys, link, monkeypatch):
    asked: list[str] = []

    class Answering:
        number = 0

        def answer(self, request: Request) -> Reply:
            asked.append(request.kind)
            return Reply(request.ticket, "ok", {})

    stop = threading.Event()
    thread = threading.Thread(target=node(link.address, keys, Answering()).run, args=(stop,), daemon=True)
    thread.start()
    while 0 not in link.nodes():
        time.sleep(0.01)
    network = GridNetwork(link.grid(), link.nodes, 0.02, link.forget)
    later = in_memory_corestate.now() + datetime.timedelta(hours=1)
    monkeypatch.setattr(in_memory_corestate, "now", lambda: later)
    assert [event.joined for event in network.receive(0)] == [True]
    network.send(0, Request("who"))
    [event] = network.receive(10)
    stop.set()
    thread.join(timeout=10)
    assert (asked, event.reply.status) == (["who"], "ok")


def site_of(folder: Path) -> Site:
    return Site(folder, SiteData(ingredients=ingredients()))


def test_a_site_with_an_unknown_key_is_refused(keys, link, tmp_path):
    make_keys(tmp_path / "others", ["127.0.0.1"], NAMES)
    with pytest.raises(FedStrataError, match="does not accept this site's key"):
        node(link.address, tmp_path / "others", site_of(tmp_path / "site"), keys / "server" / "ca.pem").run(
            threading.Event()
        )
    assert link.nodes() == {}


def test_a_server_of_another_authority_is_not_trusted(keys, link, tmp_path):
    make_keys(tmp_path / "others", ["127.0.0.1"], ["bern"])
    authority = tmp_path / "others" / "server" / "ca.pem"
    with pytest.raises(FedStrataError, match="does not come from the authority"):
        node(link.address, keys, site_of(tmp_path / "site"), authority).run(threading.Event())


def test_plain_text_to_a_server_with_tls_is_refused(keys, link, tmp_path):
    with pytest.raises(FedStrataError, match="TLS only"):
        node(link.address, keys, site_of(tmp_path / "site"), plain=True).run(threading.Event())


def test_tls_to_a_server_in_plain_text_is_refused(keys, tmp_path):
    with (
        SuperLink("127.0.0.1", 0, [], None) as plain,
        pytest.raises(FedStrataError, match="no TLS"),
    ):
        node(plain.address, keys, site_of(tmp_path / "site")).run(threading.Event())


def post(
    link: SuperLink, keys: Path, path: str, content: bytes | Iterator[bytes] = b"", site: str | None = None
) -> httpx.Response:
    """Send a request with nothing or anything in it, over TLS, signed by a site or not."""
    trusted = ssl.create_default_context(cafile=str(keys / "server" / "ca.pem"))
    headers = {"content-type": PROTOBUF_MEDIA_TYPE}
    if site is not None:
        headers |= signed(read_private_key(keys / "sites" / site / "site.key"))
    return httpx.post(f"https://{link.address}{path}", verify=trusted, content=content, headers=headers)


def signed(key: ec.EllipticCurvePrivateKey, seconds_ahead: float = 0.0) -> dict[str, str]:
    """Sign the head of a request as a site does whose clock is so far ahead."""
    stamp = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds_ahead)).isoformat()
    return {
        PUBLIC_KEY_HEADER: b64encode(public_key_to_bytes(key.public_key())).decode(),
        TIMESTAMP_HEADER: stamp,
        SIGNATURE_HEADER: b64encode(key.sign(stamp.encode(), ec.ECDSA(hashes.SHA256()))).decode(),
    }


@pytest.mark.parametrize(
    "path", ["/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/get-nodes", "/docs", "/openapi.json"]
)
def test_nobody_can_start_runs_or_register_nodes(path, keys, link):
    assert post(link, keys, path).status_code == 401
    assert post(link, keys, path, site="berlin").status_code == 404


def test_a_site_cannot_register_itself(keys, link):
    assert post(link, keys, "/v1/fleet/register-node").status_code == 401
    assert post(link, keys, "/v1/fleet/register-node", site="berlin").status_code >= 400
    assert link.nodes() == {}


def test_a_request_without_a_signature_gets_nothing(keys, link):
    for path in ("pull-messages", "activate-node", "pull-object"):
        assert post(link, keys, f"/v1/fleet/{path}").status_code == 401


def test_a_body_too_large_to_be_honest_is_cut_off(keys, link):
    def endless() -> Iterator[bytes]:
        for _ in range(80):
            yield bytes(2**20)

    with pytest.raises(httpx.HTTPError):
        post(link, keys, "/v1/fleet/push-object", endless()).raise_for_status()


def test_a_site_waits_for_a_server_that_is_not_there_yet(keys, tmp_path):
    lines: list[str] = []
    stop = threading.Event()

    def log(line: str) -> None:
        lines.append(line)
        stop.set()

    here = node("127.0.0.1:1", keys, site_of(tmp_path / "site"))
    SuperNode(here.server, here.app, here.key, here.root_certificate, 0.01, log).run(stop)
    assert "cannot be reached" in lines[0]


def test_private_keys_are_for_their_owner_alone(keys, tmp_path):
    path = keys / "sites" / "berlin" / "site.key"
    assert path.stat().st_mode & 0o777 == 0o600
    copy = tmp_path / "site.key"
    copy.write_bytes(path.read_bytes())
    copy.chmod(0o644)
    with pytest.raises(FedStrataError, match="chmod 600"):
        read_private_key(copy)
    copy.chmod(0o600)
    copy.write_text("no key")
    with pytest.raises(FedStrataError, match="no private ECDSA key"):
        read_private_key(copy)


def test_keys_are_never_overwritten(keys):
    with pytest.raises(FedStrataError, match="not empty"):
        make_keys(keys, ["127.0.0.1"], ["berlin"])


@pytest.mark.parametrize(
    ("names", "words"), [(["a", "a"], "same name"), (["a/b"], "cannot be the name"), ([""], "name")]
)
def test_names_of_sites_are_checked(names, words, tmp_path):
    with pytest.raises(FedStrataError, match=words):
        make_keys(tmp_path / "keys", ["localhost"], names)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("paris", "berlin"), "same name"),
        (lambda text: text.replace("ecdsa-sha2", "other"), "no public ECDSA key"),
        (lambda text: text + "\nextra = 1\n", "extra"),
        (lambda text: "other = 1\n" + text, "other"),
        (lambda text: "[rules]\nmin_site = 2\n" + text, "min_site"),
        (lambda text: "[rules]\nmin_sites = 0\n" + text, "min_sites"),
        (lambda text: "", "names no sites"),
        (lambda text: "=", "TOML"),
    ],
)
def test_a_wrong_sites_file_is_refused_with_a_sentence(change, words, keys, tmp_path):
    path = tmp_path / "sites.toml"
    path.write_text(change((keys / "server" / "sites.toml").read_text()))
    with pytest.raises(FedStrataError, match=words):
        SitesFile.read(path)


def test_rules_come_from_the_sites_file(keys, tmp_path):
    path = tmp_path / "sites.toml"
    path.write_text("[rules]\nmin_sites = 3\nround_timeout = 5\n" + (keys / "server" / "sites.toml").read_text())
    file = SitesFile.read(path)
    assert (file.rules.min_sites, file.rules.round_timeout) == (3, 5.0)
    assert file.names == NAMES


def test_addresses():
    assert read_address("fl.example.org:9092") == ("fl.example.org", 9092)
    assert is_loopback("127.0.0.1")
    assert is_loopback("localhost")
    assert not is_loopback("0.0.0.0")
    with pytest.raises(FedStrataError, match="no address"):
        read_address("fl.example.org")
