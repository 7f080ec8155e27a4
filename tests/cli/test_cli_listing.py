from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from typing import ClassVar

import pytest
from cli_calls import Call
from rich.console import Console

from fedstrata.cli import main, terminal
from fedstrata.cli.completing import REGISTRY_OF_KEY, completing, names_in_sources
from fedstrata.cli.listing import LISTED, method_facts, read_shape
from fedstrata.cli.words import readable
from fedstrata.errors import FedStrataError
from fedstrata.methods import Facts, Method, Part, methods


@pytest.mark.parametrize(
    ("command", "registry"), [(name, getattr(import_module(home), name)) for name, (home, _) in LISTED.items()]
)
def test_lists_name_everything(call: Call, command: str, registry: object) -> None:
    names = registry.names()  # type: ignore[attr-defined]
    listed = call(command, "--json").json
    assert [entry["name"] for entry in listed] == names
    assert all({"summary", "parameters"} <= set(entry) for entry in listed)
    text = call(command).out
    for name in names:
        assert name in text


@pytest.mark.parametrize(
    ("command", "registry"), [(name, getattr(import_module(home), name)) for name, (home, _) in LISTED.items()]
)
def test_every_single_one_can_be_shown(call: Call, command: str, registry: object) -> None:
    for name in registry.names():  # type: ignore[attr-defined]
        outcome = call(command, name)
        assert outcome.code == 0
        assert outcome.out.startswith(f"{name}\n")
        assert "math:" not in outcome.out


def test_one_method_in_detail(call: Call) -> None:
    text = call("methods", "fedavgm").out
    for expected in (
        "beta",
        "0.9",
        "The momentum.",
        "Hsu et al.",
        "arxiv.org/abs/1909.06335",
        "with any other method but local",
    ):
        assert expected in text


def test_a_pattern_lists_what_matches(call: Call) -> None:
    assert [entry["name"] for entry in call("methods", "fedavg*", "--json").json] == methods.names("fedavg*")
    assert "fedprox" not in call("methods", "fedavg*").out.replace("fedbn+fedprox", "")


def test_facts_follow_from_the_hooks() -> None:
    fedbn = method_facts(methods.get("fedbn")())
    assert (fedbn["personal_layers"], fedbn["client_state"], fedbn["server_state"], fedbn["on_network"]) == (
        True,
        True,
        False,
        True,
    )
    fedavgm = method_facts(methods.get("fedavgm")())
    assert (fedavgm["personal_layers"], fedavgm["client_state"], fedavgm["server_state"]) == (False, False, True)
    assert {"local", "fedadam", "d-psgd"} <= set(fedavgm["refuses"])
    assert not {"fedprox", "lws", "ssfl", "feddisco"} & set(fedavgm["refuses"])


@pytest.mark.parametrize("name", methods.names())
def test_what_a_method_is_said_to_refuse_is_what_cannot_be_combined_with_it(name: str) -> None:
    refused = []
    for other in methods.names():
        try:
            Method.make(f"{name}+{other}")
        except FedStrataError:
            refused.append(other)
    assert method_facts(methods.get(name)())["refuses"] == refused


@dataclass(frozen=True)
class AmongPeers(Part):
    """Not registered: a method that cannot run on a network."""

    facts: ClassVar[Facts] = Facts("peers", "nobody", not_on_network="clients see one another")


def test_a_method_that_cannot_run_on_a_network_says_why() -> None:
    facts = method_facts(AmongPeers())
    assert (facts["on_network"], facts["not_on_network"]) == (False, "clients see one another")
    assert facts["not_under_secure_aggregation"] == "clients see one another"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("fedbn", None),
        ("ssfl", None),
        ("lips", None),
        ("lws", "'lws' looks at the replies of single clients"),
        ("l-dawa", "'l-dawa' merges replies in a way of its own"),
        ("random-k", "'random-k' lets each client send entries of its own"),
        ("feddisco", "'feddisco' weighs a client by who else takes part"),
    ],
)
def test_the_registry_knows_what_secure_aggregation_needs(name, reason):
    facts = method_facts(methods.make(name))
    assert (facts["secure_aggregation"], facts["not_under_secure_aggregation"]) == (reason is None, reason)


def test_layers_of_a_model(call: Call) -> None:
    rows = call(
        "layers", "--model", "resnet8", "--shape", "3,32,32", "--classes", "100", "--method", "fedbn", "--json"
    ).json
    assert rows[0]["role"] == "first"
    assert rows[-1]["role"] == "last"
    assert {row["personal"] for row in rows if row["kind"] == "norm"} == {"all"}
    assert {row["personal"] for row in rows if row["kind"] != "norm"} == {""}
    text = call("layers", "--model", "mlp(hidden=8)").out
    assert "610 parameters" in text  # 64 * 8 + 8 + 8 * 10 + 10


def test_shapes() -> None:
    assert read_shape("3x32x32") == read_shape("3, 32, 32") == (3, 32, 32)


@pytest.mark.parametrize("listed", LISTED)
def test_no_command_of_tex_is_left_in_what_is_told(listed: str) -> None:
    registry = getattr(import_module(LISTED[listed][0]), listed)
    for name in registry.names():
        told = registry.describe(name)
        for text in (told["description"], *(one["meaning"] for one in told["parameters"])):
            assert not re.search(r"[\\{}$`]", readable(text)), (name, readable(text))


def test_docstrings_become_readable() -> None:
    assert readable(r":math:`v \leftarrow \beta v + \Delta`, see :class:`Part`") == "v ← β v + Δ, see Part"
    assert readable("two\nlines\n\n    kept\n    as is") == "two lines\n\n    kept\n    as is"


@pytest.mark.parametrize("command", LISTED)
def test_names_that_a_shell_completes_are_those_of_the_registry(command: str) -> None:
    registry = getattr(import_module(LISTED[command][0]), command)
    own = [name for name in registry.names() if registry.origin(name) is None]
    assert list(names_in_sources(command)) == sorted(own)
    assert set(REGISTRY_OF_KEY.values()) <= set(LISTED)


def test_a_shell_completes_options_names_and_what_comes_after_a_plus_or_a_comma(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def completed(words: str) -> list[str]:
        monkeypatch.setenv("_FEDSTRATA_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        with pytest.raises(SystemExit):
            main([])
        return capsys.readouterr().out.split()

    assert completed("fedstrata resu") == ["resume"]
    assert completed("fedstrata run --learn") == ["--learning-rate"]
    assert completed("fedstrata run --method fedb") == ["fedbabu", "fedbn"]
    assert completed("fedstrata run --data dig") == ["digits"]
    assert completed("fedstrata compare fedav") == ["fedavg", "fedavg-ft", "fedavgm"]
    assert completed("fedstrata schedules exp") == ["exponential"]
    assert completing("methods")("fedavg, fedbn+li") == ["fedavg, fedbn+lips"]
    assert completing("transforms")("nothing") == []


def test_lists_that_need_no_torch_come_without_it(call: Call) -> None:
    text = call("schedules", "exponential").out
    assert text.startswith("exponential\n")
    assert "exponential(decay=0.998)" in text
    assert "'fedstrata optimisers NAME' tells the parameters of one." in call("optimisers").out


@pytest.mark.parametrize(("width", "whole"), [(30, True), (21, True), (20, False), (16, False)])
def test_numbers_stay_whole_where_there_is_room_for_names_beside_them(
    width: int, whole: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is not, numbers are broken, too, and nothing is cut off."""
    monkeypatch.setattr(terminal, "results", Console(width=width, highlight=False))
    table = terminal.new_table("method", "%", right=("%",))
    table.add_row("a longer name", "34.96 ± 0.14")
    terminal.print_table(table)
    shown = capsys.readouterr().out
    assert ("34.96 ± 0.14" in shown) == whole
    assert all(part in shown for part in ("34.96", "0.14", "longer", "name"))


@pytest.mark.parametrize(("width", "whole"), [(46, True), (45, False)])
def test_long_names_stay_whole_where_there_is_room(
    width: int, whole: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The longest words take 15, 6 and 10, the head of the number nine, and two blanks part them: 46."""
    monkeypatch.setattr(terminal, "results", Console(width=width, highlight=False))
    table = terminal.new_table("row", "column", "published", "verdict", right=("published",))
    table.add_row("LocalAdaptation", "one long name of a column", "1.00", "not comparable")
    terminal.print_table(table)
    assert ("LocalAdaptation" in capsys.readouterr().out) == whole
