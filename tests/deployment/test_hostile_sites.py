"""One site against all: whatever it sends, the round goes on without it, the log says why, and memory stays small."""

from __future__ import annotations

import io
import json
import time
import tracemalloc
import zlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from direct_network import DirectNetwork
from replaying import merged_sites
from rich.console import Console
from small_world import EXPERIMENT, SITES, hello, ingredients, simulated

from fedstrata.cli import terminal
from fedstrata.deployment.checks import RefusedReply, most_bytes, read_reply
from fedstrata.deployment.declarations import MOST_SAMPLES, Declaration, Schema, declared_data
from fedstrata.deployment.federation import Federation, _Open, _Question
from fedstrata.deployment.foreign_text import clean, is_clean
from fedstrata.deployment.protocol import LOST, REFUSED, STATUSES, ProtocolError, Reply, Request
from fedstrata.deployment.rules import Rules
from fedstrata.deployment.server import Deployment
from fedstrata.deployment.site import Site
from fedstrata.deployment.site_data import SiteData
from fedstrata.deployment.status import LogFile
from fedstrata.errors import FedStrataError
from fedstrata.runs.folder import RunFolder
from fedstrata.wire import decode, encode
from fedstrata.wire.frame import WireError

NAMES = ["berlin", "paris", "rome", "oslo"]
LIAR = 2
CPU = torch.device("cpu")


def deployment(folder: Path, method: str = "fedavg", rules: Rules | None = None, **changes: Any) -> Deployment:
    experiment = EXPERIMENT.with_changes({"method": method, "rounds": 2, **changes})
    return Deployment(experiment, NAMES, folder / "run", rules or Rules(), rehearsal=True, ingredients=ingredients())


def lying(kind: str, change: Callable[[Reply], Reply], rounds: tuple[int, ...] = (1,)) -> Any:
    """Let one site alter its answers to one kind of request, in some rounds, or before them."""

    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        lies = site == LIAR and request.kind == kind and (request.round in rounds or not request.round)
        return [(0.1, change(reply) if lies else reply)]

    return tamper


def saying(**facts: Any) -> Callable[[Reply], Reply]:
    return lambda reply: replace(reply, facts={**reply.facts, **facts})


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


NUMBERS = {
    "without end": 10**400, "no number": float("nan"), "infinite": float("inf"), "two of them overflow": 1e308,
    "text": "[/x]", "nested": nested(500), "truth": True,
}  # fmt: skip


# Facts ----------------------------------------------------------------------------------------------------------------


@pytest.mark.attack(
    "A site reports a loss of 10**400, of NaN, of infinity, of 1e308, or one that is no number at all.",
    "Its reply is refused by name and the log says why; the round goes on with the others.",
)
@pytest.mark.parametrize("number", NUMBERS)
def test_a_loss_that_is_no_number_is_refused_by_name(number, tmp_path):
    lines: list[str] = []
    network = DirectNetwork(tmp_path, SITES, lying("train", saying(loss=NUMBERS[number])))
    deployment(tmp_path, rounds=1).run(network, log=lines.append)
    [refusal] = [line for line in lines if "refused" in line]
    assert "the reply of rome is refused: its loss is" in refusal
    assert merged_sites(RunFolder.open(tmp_path / "run")) == {1: [0, 1, 3]}


class Killed(BaseException):
    """The server is killed, as by SIGKILL: nothing of it but its files remains."""


@pytest.mark.attack(
    "A site lies in every answer, in its declaration too, before and after the server is killed and started again.",
    "Nothing of it is on the server's disk, and the run comes to its end without the site, both times.",
)
def test_nothing_hostile_outlives_a_restart(tmp_path):
    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply]]:
        if request.round == 2 and not killed:
            killed.append(True)
            raise Killed
        hostile = dict.fromkeys(KEYS, 10**400) | {"size": 2**33, "class_names": [NASTY], "reason": NASTY}
        return [(0.1, replace(reply, facts=hostile) if site == LIAR else reply)]

    killed: list[bool] = []
    rules = Rules(max_refusals=2)
    with pytest.raises(Killed):
        deployment(tmp_path, rules=rules).run(DirectNetwork(tmp_path, SITES, tamper))
    lines: list[str] = []
    deployment(tmp_path, rules=rules).run(DirectNetwork(tmp_path, SITES, tamper), log=lines.append)
    assert any("rome is refused" in line and "the site is left out" in line for line in lines)
    assert merged_sites(RunFolder.open(tmp_path / "run")) == {1: [0, 1, 3], 2: [0, 1, 3]}


def test_an_error_that_nobody_thought_of_costs_one_reply_and_is_told_with_its_type(tmp_path, monkeypatch):
    original = Federation.ask

    def ask(self: Federation, requests: Mapping[int, Request], check: Any, **options: Any) -> Any:
        def failing(site: int, reply: Reply) -> Any:
            if site == LIAR and reply.ticket.startswith("train 1"):
                raise ZeroDivisionError("nobody thought of it")
            return check(site, reply)

        return original(self, requests, failing, **options)

    monkeypatch.setattr(Federation, "ask", ask)
    lines: list[str] = []
    deployment(tmp_path).run(DirectNetwork(tmp_path, SITES), log=lines.append)
    [refusal] = [line for line in lines if "refused" in line]
    assert "it leads to an error (ZeroDivisionError: nobody thought of it)" in refusal
    assert merged_sites(RunFolder.open(tmp_path / "run"))[1] == [0, 1, 3]


@pytest.mark.parametrize("header", ["NaN", "-Infinity", "1e999", "[" * 100_000])
def test_headers_with_numbers_that_are_none_are_no_headers(header):
    with pytest.raises(ProtocolError, match="not JSON, or hold numbers that are not finite"):
        Reply.read(f'{{"ticket": "", "status": "ok", "facts": {{"loss": {header}}}}}', b"")


# Text -----------------------------------------------------------------------------------------------------------------

NASTY = "[/x] [bold]\ud800\x1b[2J\x1b]0;title\x07 \u202egnp.exe\u2066 line\none\r\x00" + "x" * 10_000


@pytest.mark.attack(
    "A site refuses with a text of console markup, half a character, escape sequences, and marks that turn writing "
    "round; or fails with it, or names a tensor so.",
    "The text is shown and logged as one harmless line, cut to a sensible length; the round goes on.",
)
@pytest.mark.parametrize("how", ["refusal", "failure", "tensor"])
def test_text_from_a_site_is_harmless(how, tmp_path, monkeypatch):
    def tamper(site: int, request: Request, reply: Reply) -> list[tuple[float, Reply | str]]:
        if site != LIAR or request.kind != "train":
            return [(0.1, reply)]
        if how == "tensor":
            upload = decode(reply.payload)
            named = replace(upload, tensors={**upload.tensors, NASTY[:400]: torch.full((1, 2), torch.nan)})
            return [(0.1, replace(reply, payload=encode(named, round=request.round)))]
        return [(0.1, NASTY if how == "failure" else Reply(request.ticket, REFUSED, {"reason": NASTY}))]

    shown = io.StringIO()
    monkeypatch.setattr(terminal, "messages", Console(file=io.TextIOWrapper(io.BytesIO(), "utf-8"), width=200))
    monkeypatch.setattr(terminal.messages, "_file", shown)
    (tmp_path / "run").mkdir()
    network = DirectNetwork(tmp_path, SITES, tamper)
    deployment(tmp_path).run(network, log=LogFile(tmp_path / "run" / "deployment.log", terminal.print_line))
    log = (tmp_path / "run" / "deployment.log").read_text()
    assert sum("rome" in line and "[/x] [bold]" in line for line in log.splitlines()) == 2, "a line for each round"
    for text in (log, shown.getvalue(), *network.lines[LIAR]):
        assert not set("\x1b\x07\x00\u202e\u2066\ud800") & set(text)
    assert max(map(len, log.splitlines())) < 1200


@pytest.mark.attack(
    "A server sends sites notices and last words with escape sequences and markup.",
    "A site logs them as one harmless line.",
)
def test_text_from_a_server_is_harmless(tmp_path):
    lines: list[str] = []
    here = Site(tmp_path, SiteData(part=0, ingredients=ingredients()), lines.append)
    here.answer(hello())
    here.answer(Request("notice", "run", facts={"text": NASTY}))
    here.answer(Request("end", "run", facts={"state": "failed", "text": NASTY}))
    assert here.end is not None
    for line in (*lines, here.end.words):
        line.encode()
        assert not set("\x1b\x07\x00\n\u202e") & set(line)
        assert len(line) < 2100


def test_every_line_of_the_log_is_cleaned_whoever_writes_it(tmp_path):
    lines: list[str] = []
    Federation(DirectNetwork(tmp_path, 1), NAMES[:1], Rules(), "run", "one", EXPERIMENT, log=lines.append).log(NASTY)
    assert lines == [clean(NASTY, 2000)]


def test_clean_keeps_what_people_write():
    kept = "Größe 5 µm, 診断, می\u200cخواهم, naïve [x] 50 %"
    assert clean(kept) == kept
    assert is_clean(kept)
    assert not any(map(is_clean, ("a\nb", "a\x1b[0m", "\ud800", "\u202eb", "x" * 201)))
    assert clean("x" * 600) == "x" * 500 + "..."


# Declarations ---------------------------------------------------------------------------------------------------------

DECLARED = {
    "samples": {"size": 2**33, "label_counts": [2**33, *[0] * 9]},
    "test samples": {"test_size": 2**33},
    "entries": {"input_shape": [2**20, 2**20]},
    "axes": {"input_shape": [1] * 100},
    "classes": {"class_names": [str(number) for number in range(70_000)], "label_counts": [0] * 70_000},
    "a long name": {"class_names": ["x" * 10_000, *"123456789"]},
    "a name that repaints": {"class_names": ["\x1b[2J", *"123456789"]},
    "half a character": {"class_names": ["\ud800", *"123456789"]},
    "no numbers": {"label_counts": [1.5] * 10},
    "columns": {"columns": "[/x]"},
    "constants": {"normalises_by": {"mean": [10**400], "deviation": [1.0]}},
    "unhashable": {"normalises_by": [[]], "input_type": [[]]},
}  # fmt: skip


@pytest.mark.attack(
    "A site declares 2**33 samples, samples of 2**40 numbers, 70,000 classes, or class names that no file can hold.",
    "The declaration is refused by name, without memory of that size, and the run begins with the others.",
)
@pytest.mark.parametrize("declared", DECLARED)
def test_a_declaration_beyond_all_limits_is_refused_by_name(declared, tmp_path):
    lines: list[str] = []
    network = DirectNetwork(tmp_path, SITES, lying("hello", saying(**DECLARED[declared])))
    tracemalloc.start()
    deployment(tmp_path, rules=Rules(max_refusals=1), rounds=1).run(network, log=lines.append)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "the reply of rome is refused" in next(line for line in lines if "refused" in line)
    assert merged_sites(RunFolder.open(tmp_path / "run")) == {1: [0, 1, 3]}
    assert peak < 100e6


def test_what_sites_declare_takes_no_memory_of_that_size():
    schema = Schema((3, 8, 8), ("ill", "well"))
    large = Declaration(schema, MOST_SAMPLES, MOST_SAMPLES, (MOST_SAMPLES - 1, 1))
    tracemalloc.start()
    dataset, split = declared_data("table", schema, {0: large}, 2)
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()
    assert split.sizes.tolist() == [MOST_SAMPLES, 1]
    assert split.test_sizes.tolist() == [MOST_SAMPLES, 0]
    assert split.label_counts(dataset).tolist() == [[MOST_SAMPLES - 1, 1], [1, 0]]
    assert split.samples(dataset) == 2 * MOST_SAMPLES + 1
    assert split.hash != declared_data("table", schema, {0: replace(large, test_size=1)}, 2)[1].hash


# Bytes and entries ----------------------------------------------------------------------------------------------------


def framed(description: bytes) -> bytes:
    """Put a description without a body into a frame whose checksum fits."""
    content = b"FSM2" + (1).to_bytes(4, "little") + len(description).to_bytes(4, "little") + description
    return content + zlib.crc32(content).to_bytes(4, "little")


def empty_tensors(count: int) -> bytes:
    return json.dumps([[[str(number), "f32", [0]] for number in range(count)], []], separators=(",", ":")).encode()


@pytest.mark.attack(
    "A site answers with 49 MiB of empty tensors, or with many times the bytes that the model can need.",
    "The number of bytes, of tensors and of characters in names is checked before anything is unpacked: the reply is "
    "refused by name.",
)
def test_fat_replies_are_refused_before_they_are_unpacked(record_property):
    small, large = {"weight": torch.zeros(15_000)}, {"weight": torch.zeros(2_000_000)}
    started = b'[[["w","f32",[0]]' + b',["w","f32",[0]]' * (49 * 2**20 // 16) + b"],[]]"
    hostile = {
        "empty tensors": (framed(started), large, "a description of 5"),
        "some empty tensors": (framed(empty_tensors(500)), small, "describes 500 tensors and numbers; 72 are the most"),
        "a long name": (framed(b'[[["' + b"x" * 20_000 + b'","f32",[0]]],[]]'), small, "a name of 20000 characters"),
        "bytes": (bytes(200 * 2**20), small, "it has 209715200 bytes, and 1528576 are the most"),
        "what unpacks": (framed(b'[[["w","f32",[50000000],1]],[]]'), small, "would unpack to 250000000"),
    }
    began, peaks = time.perf_counter(), []
    for payload, model, words in hostile.values():
        tracemalloc.start()
        with pytest.raises(FedStrataError, match=words):
            read_reply(payload, model, CPU, round=1)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    seconds = time.perf_counter() - began
    assert max(peaks) < 2**20
    assert seconds < 5
    record_property("measured", f"at most {max(peaks) / 1e3:.0f} kB more and {seconds:.2f} s for all of them")


def test_an_answer_is_no_larger_than_its_request_can_need(tmp_path):
    """Also where no payload is asked for at all, and under secure aggregation."""
    lines: list[str] = []
    tamper = lying("test", lambda reply: replace(reply, payload=bytes(10**6)), rounds=(2,))
    network = DirectNetwork(tmp_path, SITES, tamper)
    deployment(tmp_path).run(network, log=lines.append)
    assert any("rome is refused: it has 1000000 bytes, and 65536 are the most for 'test 2.0'" in line for line in lines)
    model = simulated("fedavg").setting.initial
    [most] = {request.most_bytes for _, request in network.sent if request.kind == "train"}
    assert most == most_bytes(model) == 8 * sum(tensor.nbytes for tensor in model.values()) + 2**20
    assert "most_bytes" not in Request("train").header()


def test_a_site_does_not_unpack_empty_tensors_either():
    with pytest.raises(WireError, match="describes 10001 tensors"):
        decode(framed(empty_tensors(10_001)))
    assert len(decode(framed(empty_tensors(1_000))).tensors) == 1_000


# All kinds of questions -----------------------------------------------------------------------------------------------

KEYS = (
    "loss", "flops", "sparse_flops", "scores", "error", "entries", "input_shape", "class_names", "input_type",
    "columns",
    "size", "test_size", "label_counts", "normalises_by", "count", "sums", "squares", "keys", "sealed", "seed_hash",
    "shares", "reason", "accuracy", "metrics",
)  # fmt: skip


ORDERLY = [status for status in STATUSES if status != LOST]
"""A site that says that its state is lost stops a run that waits for all, as its silence does."""


def hostile_value(chance: np.random.Generator, depth: int = 0) -> Any:
    plain: list[Any] = [
        None, True, -1, 0, 2**33, 2**63, 10**400, -(10**400), 0.5, float("nan"), float("inf"), 1e308, "", "[/x]",
        "\ud800", "\x1b[2J", "ok", "0" * 64, "f" * 1_000, b"bytes", nested(200), [], {}, [[]], {"0": {}},
    ]  # fmt: skip
    kind = int(chance.integers(0, 10))
    if kind < 7 or depth > 3:
        return plain[int(chance.integers(0, len(plain)))]
    values = [hostile_value(chance, depth + 1) for _ in range(int(chance.integers(1, 12)))]
    return values if kind < 9 else dict(zip((*KEYS, "0", "1"), values, strict=False))


def besiege(monkeypatch: pytest.MonkeyPatch, replies: int, chance: np.random.Generator) -> set[str]:
    """Let one site throw hostile replies at every question before it is answered honestly; return the kinds asked."""
    original, seen = Federation.ask, set()

    def ask(self: Federation, requests: Mapping[int, Request], check: Any, **options: Any) -> Any:
        self.rules = replace(self.rules, max_refusals=10**9)
        request = requests.get(LIAR)
        for _ in range(replies if request is not None else 0):
            assert request is not None
            seen.add(request.kind)
            facts = {key: hostile_value(chance) for key in chance.choice(KEYS, int(chance.integers(1, 8)))}
            status = str(chance.choice(ORDERLY)) if chance.random() < 0.02 else "ok"
            question = _Question(requests, check, {LIAR: _Open([request])})
            known = self.declarations.pop(LIAR, None) if request.kind == "hello" else None
            self._take(LIAR, Reply(request.ticket, status, facts, chance.bytes(int(chance.integers(0, 99)))), question)
            if known is not None:
                self.declarations[LIAR] = known
        return original(self, requests, check, **options)

    monkeypatch.setattr(Federation, "ask", ask)
    return seen


@pytest.mark.attack(
    "A site answers every kind of question with facts drawn at random: numbers without end, NaN, markup, half "
    "characters, deep nesting, wrong types.",
    "Each is refused by name, and the run of the others comes to its end.",
)
@pytest.mark.parametrize(
    ("method", "rules", "kinds"),
    [
        ("ssfl(sparsity=0.5)+local-adaptation", Rules(), {"survey", "adopt", "train", "test", "adapt"}),
        ("fedavg", Rules(secure=True), {"keys", "shares", "masked", "unmask", "train", "test"}),
    ],
)
def test_hostile_answers_to_every_question_end_no_run(method, rules, kinds, tmp_path, monkeypatch):
    seen = besiege(monkeypatch, 50, np.random.default_rng(0))
    lines: list[str] = []
    network = DirectNetwork(tmp_path, SITES)
    deployment(tmp_path, method, rules, rounds=1).run(network, log=lines.append)
    assert seen == kinds | {"hello", "statistics"}
    assert sum("the reply of rome is refused" in line for line in lines) > 200
    assert RunFolder.open(tmp_path / "run").finished


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("secure", [False, True])
def test_many_hostile_answers_to_every_question_end_no_run(seed, secure, tmp_path, monkeypatch):
    besiege(monkeypatch, 5_000, np.random.default_rng(seed))
    deployment(tmp_path, "fedbn", Rules(secure=secure)).run(DirectNetwork(tmp_path, SITES))
    assert RunFolder.open(tmp_path / "run").finished


def test_a_refused_reply_is_a_verdict_and_no_crash():
    with pytest.raises(RefusedReply, match="no list of whole numbers from 1 to"):
        Declaration.read({"input_shape": [True]})
