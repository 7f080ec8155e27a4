"""Which diagnostics are computed, and what one takes in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fedstrata
from fedstrata.diagnostics import Diagnostic, Need, diagnostics
from fedstrata.diagnostics.choosing import choose, lacking
from fedstrata.errors import FedStrataError
from fedstrata.runs.memory import peak_memory


def test_plus_and_commas_join_and_all_takes_the_parameters_that_are_given() -> None:
    assert choose("inertia+norms(every=3)") == choose("inertia, norms(3)")
    chosen = choose("all, norms(every=3)")
    assert sorted(one.name for one in chosen.diagnostics) == sorted(diagnostics.names())
    assert "norms(every=3)" in map(str, chosen.diagnostics)
    assert choose(None).diagnostics == ()


def test_all_leaves_out_what_cannot_be_seen_and_a_named_one_is_refused() -> None:
    blind = lacking({Need.DATA: "it is dark"})
    chosen = choose("all", blind)
    assert not any(Need.DATA in one.needs for one in chosen.diagnostics)
    assert chosen.left_out["norms"] == "it is dark"
    assert "norms" in (chosen.word() or "")
    with pytest.raises(FedStrataError, match="'norms' cannot be computed here: it is dark; leave it out"):
        choose("all+norms", blind)


def test_every_diagnostic_draws_what_nobody_else_draws() -> None:
    drawn = [diagnostics.get(name)().draw(number) for name in diagnostics.names() for number in range(3)]
    assert len({0, *drawn}) == len(drawn) + 1


@pytest.mark.usefixtures("fresh_methods")
def test_one_that_was_registered_in_this_process_only_does_not_travel(tmp_path: Path) -> None:
    diagnostics.register("mine-alone")(dataclass(frozen=True)(type("Mine", (Diagnostic,), {"__module__": "mine"})))
    with pytest.raises(FedStrataError, match="the diagnostic 'mine-alone' was registered in this one"):
        fedstrata.compare(["fedavg", "local"], out=tmp_path, jobs=2, rounds=1, clients=2, diagnose="mine-alone")


def test_the_peak_of_a_piece_of_work_is_its_own() -> None:
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        pytest.skip("this system tells only the largest peak so far")
    size = 2**26
    for _ in range(2):  # the peak of the first does not hide that of the second
        with peak_memory(torch.device("cpu")) as peak:
            torch.ones(size, dtype=torch.uint8)
        assert 0.9 * size < peak.bytes < 3 * size
