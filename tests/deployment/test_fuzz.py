"""Thousands of altered messages, at both ends: each is refused or harmless, nothing is half applied, nobody crashes."""

from __future__ import annotations

import json
import random
import zlib

import pytest
import torch
from small_world import SITES, hello, ingredients, request, simulated

from fedstrata.deployment.checks import check_weights, layout, odd_ones_out, read_reply
from fedstrata.deployment.protocol import OK, REFUSED, Place, ProtocolError, Reply, Request
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.deployment.store import SiteStore
from fedstrata.engines.loop import LoopEngine
from fedstrata.errors import FedStrataError

CPU = torch.device("cpu")


def altered(content: bytes, chance: random.Random) -> bytes:
    """Change some bytes, cut, double or insert some, and make the checksum fit again, mostly."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        place = chance.randrange(max(1, len(data)))
        match chance.randrange(5):
            case 0:
                data[place : place + 1] = bytes([chance.randrange(256)])
            case 1:
                del data[place : place + chance.randint(1, 40)]
            case 2:
                data[place:place] = data[place : place + chance.randint(1, 40)]
            case 3:
                data[place : place + 4] = chance.choice(
                    [b"\xff" * 4, bytes(4), b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f"]
                )
            case 4:
                data[place:place] = chance.randbytes(chance.randint(1, 8))
    if chance.random() < 0.9 and len(data) > 4:
        data[-4:] = zlib.crc32(data[:-4]).to_bytes(4, "little")
    return bytes(data)


def test_ten_thousand_altered_replies_are_refused_or_harmless():
    simulation = simulated("ssfl(sparsity=0.5)")
    engine = simulation.engine
    assert isinstance(engine, LoopEngine)
    engine.exchange(1)
    honest = engine.members[0].answer(engine.central.messages([0], 1)[0], 1)[0]
    known = engine.central.side.masks_known(engine.server, [0], 1, upload=True)
    model = engine.setting.initial
    usual = read_reply(honest, model, CPU, known)
    chance, refused = random.Random(0), 0
    for _ in range(10_000):
        try:
            message = read_reply(altered(honest, chance), model, CPU, known)
            check_weights(message, engine.server.model, 100.0)
        except FedStrataError:
            refused += 1
            continue
        if layout(message) == layout(usual):
            assert not odd_ones_out({0: layout(usual), 1: layout(message)})
            for name, tensor in message.tensors.items():
                assert torch.isfinite(tensor).all(), name
                assert tensor.shape[1:] == model[name].shape
    assert 8_000 < refused < 10_000, "most are refused; a changed weight is still a weight"


def test_a_site_survives_altered_broadcasts_and_keeps_its_state(tmp_path):
    simulation = simulated("fedbn")
    engine = simulation.engine
    assert isinstance(engine, LoopEngine)
    here = Site(tmp_path, SiteData(part=0, ingredients=ingredients()))
    here.answer(hello())
    first, second, third = (engine.central.messages([0], round)[0] for round in (1, 2, 3))
    here.answer(request("train", Place.training(1), first))
    expected = here.answer(request("train", Place.training(2), second)).payload
    chance, statuses = random.Random(1), []
    for _ in range(150):
        kind, place = chance.choice(
            [
                ("train", Place.training(3)),
                ("test", Place(3)),
                ("adopt", Place.announcement(3, 0)),
                ("survey", Place.survey(3, 0)),
            ]
        )
        statuses.append(here.answer(request(kind, place, altered(third, chance))).status)
    assert set(statuses) <= {OK, REFUSED}
    assert statuses.count(REFUSED) > 50
    assert here.answer(request("train", Place.training(2), second)).payload == expected
    assert SiteStore(tmp_path, "run").places()[:2] == [Place.training(1), Place.training(2)]


@pytest.mark.parametrize(
    "honest", [Request("train", "run", Place.training(3), {"evaluate": True}), Reply("train 3.0", OK, {"loss": 1.5})]
)
def test_altered_headers_are_read_or_refused(honest):
    chance = random.Random(2)
    for _ in range(5_000):
        text = altered(honest.header().encode(), chance).decode("utf-8", errors="replace")
        try:
            read = type(honest).read(text, b"")
        except ProtocolError:
            continue
        assert json.loads(read.header())


def test_hostile_hellos_do_not_stop_a_site(tmp_path):
    chance = random.Random(3)
    here = Site(tmp_path, SiteData(part=0, ingredients=ingredients()))
    greeting = hello()
    for _ in range(100):
        experiment = dict(greeting.facts["experiment"])
        key = chance.choice(list(experiment))
        experiment[key] = chance.choice([None, -1, 10**30, "x" * 1000, [], {}, 1.5, True, "a(b", "nan"])
        facts = {**greeting.facts, "experiment": experiment}
        assert here.answer(Request("hello", "run", facts=facts)).status in (OK, REFUSED)
    assert here.answer(greeting).status == OK
    assert greeting.facts["sites"] == SITES
