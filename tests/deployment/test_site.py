"""A site answers each request once, keeps what is its own on disk, and believes nothing."""

from __future__ import annotations

import pickletools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_world import SITES, hello, ingredients, request, simulated

from fedstrata import files
from fedstrata.deployment.protocol import (
    BEHIND,
    MISSING,
    OK,
    REFUSED,
    STATUSES,
    UNREADY,
    Place,
    ProtocolError,
    Reply,
    Request,
    Stage,
    digest,
)
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.deployment.store import SiteStore
from fedstrata.engines.loop import LoopEngine
from fedstrata.errors import FedStrataError
from fedstrata.wire import encode


@pytest.fixture
def engine() -> LoopEngine:
    simulation = simulated("fedbn")
    assert isinstance(simulation.engine, LoopEngine)
    return simulation.engine


def site(folder, part=0):
    return Site(folder, SiteData(part=part, ingredients=ingredients()))


def broadcast(engine, round=1):
    return engine.central.messages([0], round)[0]


def train(engine, round=1, **facts):
    return request("train", Place.training(round), broadcast(engine, round), **facts)


def test_a_site_answers_like_a_client_of_the_loop_engine(engine, tmp_path):
    here = site(tmp_path)
    assert here.answer(hello()).status == OK
    for round in (1, 2):
        expected, outcome = engine.members[0].answer(broadcast(engine, round), round)
        answer = here.answer(train(engine, round))
        assert (answer.status, answer.payload) == (OK, expected)
        assert answer.facts["loss"] == float(outcome.loss)


def test_a_site_declares_sizes_and_counts_and_no_sample(tmp_path):
    facts = site(tmp_path).answer(hello()).facts
    assert facts["size"] == 9
    assert facts["input_shape"] == [1, 8, 8]
    assert sum(facts["label_counts"]) == 9
    assert facts["class_names"] == [str(digit) for digit in range(10)]
    assert facts["input_type"] == "float32"
    assert set(facts) == {
        "version", "input_shape", "class_names", "input_type", "columns", "size", "test_size", "label_counts",
        "normalises_by", "head",
    }  # fmt: skip


def test_before_a_hello_a_site_asks_for_one(engine, tmp_path):
    assert site(tmp_path).answer(train(engine)).status == UNREADY


def test_the_same_request_gets_the_same_answer_and_is_done_once(engine, tmp_path):
    here = site(tmp_path)
    here.answer(hello())
    first = here.answer(train(engine))
    state = SiteStore(tmp_path, "run").read(Place.training(1)).state
    again = here.answer(train(engine))
    assert (again.payload, again.facts) == (first.payload, first.facts)
    after = SiteStore(tmp_path, "run").read(Place.training(1)).state
    assert all(torch.equal(state[name], after[name]) for name in state)


def test_a_restarted_site_goes_on_with_its_own_state(engine, tmp_path):
    unbroken, stopped = site(tmp_path / "a"), site(tmp_path / "b")
    for here in (unbroken, stopped):
        here.answer(hello())
        here.answer(train(engine, 1))
    restarted = site(tmp_path / "b")
    restarted.answer(hello())
    second = train(engine, 2)
    assert restarted.answer(second).payload == unbroken.answer(second).payload
    assert restarted.answer(train(engine, 1)).status == OK, "the stored answer to the round before is still there"


def test_without_its_state_a_site_would_answer_otherwise(engine, tmp_path):
    """The personal layers and the optimiser's momentum matter, or the test above would prove nothing."""
    kept, lost = site(tmp_path / "a"), site(tmp_path / "b")
    kept.answer(hello())
    kept.answer(train(engine, 1))
    lost.answer(hello())
    second = train(engine, 2)
    assert kept.answer(second).payload != lost.answer(second).payload


def test_a_round_that_is_over_is_refused(engine, tmp_path):
    here = site(tmp_path)
    here.answer(hello())
    for round in (1, 2, 3):
        assert here.answer(train(engine, round)).status == OK
    other = replace(train(engine, 1), facts={"payload": digest(b"other")}, payload=b"other")
    answer = here.answer(other)
    assert answer.status == REFUSED
    assert "over" in answer.reason


def test_a_server_that_fell_back_gets_the_state_from_before(engine, tmp_path):
    """After a restart the server may ask for a round again with another content: the site takes its last one back."""
    here, fresh = site(tmp_path / "a"), site(tmp_path / "b")
    other = broadcast(engine)
    engine.central.state.model["head.bias"] += 1
    changed = broadcast(engine)
    assert other != changed
    here.answer(hello())
    here.answer(request("train", Place.training(1), other))
    here.answer(request("train", Place.training(2), other))
    here.answer(hello(committed=1, session="two"))
    fresh.answer(hello())
    fresh.answer(request("train", Place.training(1), other))
    second = request("train", Place.training(2), changed)
    assert here.answer(second).payload == fresh.answer(second).payload


def test_a_payload_that_the_site_holds_is_only_named(engine, tmp_path):
    here = site(tmp_path)
    here.answer(hello())
    message = broadcast(engine)
    here.answer(request("test", Place(1), message))
    named = replace(request("train", Place.training(1), message), payload=b"")
    assert here.answer(named).status == OK
    other = replace(named, place=Place.training(2), facts={"payload": digest(b"never sent")})
    assert here.answer(other).status == MISSING


def test_a_site_that_missed_an_announcement_says_so(tmp_path):
    simulation = simulated("ssfl(sparsity=0.5)")
    engine = simulation.engine
    assert isinstance(engine, LoopEngine)
    here = site(tmp_path)
    here.answer(hello(method="ssfl(sparsity=0.5)"))
    [exchange] = simulation.setting.exchanges_before(1)
    surveyed = here.answer(request("survey", Place.survey(1, 0), broadcast(engine)))
    assert surveyed.payload == engine.members[0].answer_survey(exchange, broadcast(engine), 1)
    engine.exchange(1)
    asked = request("train", Place.training(1), broadcast(engine), adopted=Place.announcement(1, 0).to_facts())
    assert here.answer(asked).status == BEHIND
    announcement = encode(exchange.announce(engine.central.side.view(engine.server, range(SITES), 1)), round=1)
    assert here.answer(request("adopt", Place.announcement(1, 0), announcement)).status == OK
    answer = here.answer(asked)
    assert answer.payload == engine.members[0].answer(broadcast(engine), 1)[0]
    assert engine.central.decoded(answer.payload, 0, 1).masks


def test_only_the_last_rounds_are_kept(engine, tmp_path):
    here, greeting = site(tmp_path), hello()
    here.answer(
        replace(greeting, facts={**greeting.facts, "experiment": {**greeting.facts["experiment"], "rounds": 7}})
    )
    for round in range(1, 8):
        here.answer(train(engine, round))
    assert [place.round for place in SiteStore(tmp_path, "run").places()] == [5, 6, 7]


def test_damage_on_disk_is_named(engine, tmp_path):
    here = site(tmp_path)
    here.answer(hello())
    here.answer(train(engine))
    [path] = tmp_path.glob("run/step-*/state.safetensors")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    restarted = site(tmp_path)
    restarted.answer(hello())
    answer = restarted.answer(train(engine, 2))
    assert answer.status == REFUSED
    assert "damaged" in answer.reason


def test_nothing_on_disk_is_pickled_and_the_final_model_is_there(engine, tmp_path):
    here = site(tmp_path)
    here.answer(hello())
    here.answer(train(engine))
    here.answer(request("test", Place(4), broadcast(engine, 4)))
    for path in tmp_path.rglob("*"):
        if path.is_file():
            with pytest.raises(ValueError, match=r".*"):
                list(pickletools.genops(path.read_bytes()))
    model = files.from_safetensors((tmp_path / "run" / "model" / "model.safetensors").read_bytes(), tmp_path)
    assert model.keys() == engine.setting.initial.keys()


@pytest.mark.parametrize(
    "change",
    [
        {"number": SITES},
        {"number": -1},
        {"number": "0"},
        {"sites": 10**9},
        {"experiment": []},
        {"experiment": {"data": "no such data"}},
        {"experiment": {"unheard_of": 1}},
        {"committed": None},
    ],
)
def test_a_strange_hello_is_refused_with_a_sentence(change, tmp_path):
    here = Site(tmp_path, SiteData())
    greeting = hello()
    answer = here.answer(replace(greeting, facts={**greeting.facts, **change}))
    assert answer.status == REFUSED
    assert answer.reason


@pytest.mark.parametrize("run", ["", "..", "a/b", "x" * 200])
def test_a_run_cannot_name_a_place_outside_the_sites_folder(run, tmp_path):
    answer = site(tmp_path / "state").answer(hello(run=run))
    assert answer.status == REFUSED
    assert [path.name for path in tmp_path.rglob("*")] == ["state", "audit.jsonl"]


@pytest.mark.parametrize("payload", [b"", b"x", b"FSM1" + bytes(50)])
def test_a_broken_payload_changes_nothing(payload, engine, tmp_path):
    here = site(tmp_path)
    here.answer(hello())
    answer = here.answer(request("train", Place.training(1), payload))
    assert answer.status in (REFUSED, MISSING)
    assert SiteStore(tmp_path, "run").places() == []
    assert here.answer(train(engine)).status == OK


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=200), st.binary(max_size=50))
def test_any_header_is_read_or_refused(header, payload):
    for kind in (Request, Reply):
        with pytest.raises(ProtocolError):
            kind.read(header, payload)


def test_headers_are_read_back():
    asked = Request("train", "run", Place.training(3), {"evaluate": True}, b"abc")
    assert Request.read(asked.header(), b"abc") == asked
    for status in STATUSES:
        answer = Reply("train 3.0", status, {"loss": 0.5}, b"abc")
        assert Reply.read(answer.header(), b"abc") == answer


@pytest.mark.parametrize(
    "place",
    [None, 1, [], [1], [1, 0], [1, 0, 0, 0], [1, 3, 0], [1, -1, 0], [-1, 0, 0], [True, 0, 0], [1, 0, 2**31]],
)
def test_what_is_no_place_of_a_run_is_refused(place):
    with pytest.raises(ProtocolError, match="impossible place"):
        Place.read(place)


def test_places_follow_each_other_as_steps_do():
    places = [
        Place(1),
        Place.announcement(1, 0),
        Place.survey(1, 1),
        Place.announcement(1, 1),
        Place.training(1),
        Place.secure_sum(1, 1),
        Place.secure_sum(1, 2),
        Place(2),
    ]
    assert sorted(places) == places
    assert Place.survey(1, 0) == Place(1)
    assert [Place.read(place.to_facts()) for place in places] == places


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("survey", Place.announcement(1, 0)),
        ("survey", Place.training(1)),
        ("adopt", Place.survey(1, 0)),
        ("adopt", Place.secure_sum(1, 1)),
        ("train", Place.survey(1, 0)),
        ("train", Place(1, Stage.TRAINING, 1)),
        ("train", Place.secure_sum(1, 0)),
    ],
)
def test_a_step_is_done_in_its_place_only(kind, place, tmp_path):
    here, method = site(tmp_path), "ssfl(sparsity=0.5)"
    engine = simulated(method).engine
    assert isinstance(engine, LoopEngine)
    here.answer(hello(method=method))
    answer = here.answer(request(kind, place, broadcast(engine)))
    assert (answer.status, answer.payload) == (REFUSED, b"")
    assert "place" in answer.reason
    assert SiteStore(tmp_path, "run").places() == []


def test_an_exchange_that_the_method_does_not_have_is_refused(engine, tmp_path):
    here = site(tmp_path)
    here.answer(hello())
    assert "no exchange number 3" in here.answer(request("survey", Place.survey(1, 3), broadcast(engine))).reason


def test_a_part_of_the_data_belongs_to_the_site_that_the_server_means(tmp_path):
    answer = site(tmp_path, part=1).answer(hello(number=0))
    assert answer.status == REFUSED
    assert "order" in answer.reason


def test_the_whole_dataset_of_a_site_is_its_own(tmp_path):
    facts = Site(tmp_path, SiteData(data="digits")).answer(hello(number=2)).facts
    assert facts["size"] == sum(facts["label_counts"]) > 1000


def test_a_store_refuses_a_name_that_is_a_path(tmp_path):
    with pytest.raises(FedStrataError, match="name of a run"):
        SiteStore(tmp_path, "../elsewhere")


def test_a_message_of_another_round_is_refused(engine, tmp_path):
    here = site(tmp_path)
    here.answer(hello())
    answer = here.answer(request("train", Place.training(2), broadcast(engine, 1)))
    assert answer.status == REFUSED
    assert "A message of round 1 came where one of round 2 is expected." in answer.facts["reason"]
