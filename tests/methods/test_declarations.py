"""What parts say of themselves does not change by accident: which parts fit together depends on it, and what a method
can run under, such as secure aggregation.

``declarations.txt`` is the record, one part on each line, with what follows from its hooks. After a change that is
meant, write the record anew and read what became different in it::

    python tests/methods/test_declarations.py > tests/methods/declarations.txt
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from enum import Enum
from pathlib import Path

from fedstrata.methods import Method, Needs, Part, methods
from fedstrata.methods.contract.compatibility import touched_by

RECORD = Path(__file__).with_name("declarations.txt")


def line(part: Part) -> str:
    touches, needs, nothing = touched_by(part), part.needs, Needs()
    told = {
        "decides": _names(touches.decides),
        "relies on": _names(touches.relies_on),
        "takes away": _names(touches.takes_away),
        "needs": sorted(one.name for one in fields(Needs) if getattr(needs, one.name) != getattr(nothing, one.name)),
    }
    said = "; ".join(f"{kind} {', '.join(what)}" for kind, what in told.items() if what)
    return f"{part.name}: {said or 'nothing'}"


def _names(members: Iterable[Enum]) -> list[str]:
    return sorted({one.name for one in members})


def lines() -> list[str]:
    return sorted({line(part) for name in methods.names() for part in Method.make(name).parts})


def test_declarations_are_those_of_the_record():
    recorded = RECORD.read_text().splitlines()
    assert sorted(set(lines()) - set(recorded)) == [], "not in declarations.txt"
    assert sorted(set(recorded) - set(lines())) == [], "only in declarations.txt"


if __name__ == "__main__":
    print("\n".join(lines()))
