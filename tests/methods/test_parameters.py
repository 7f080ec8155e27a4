"""Defaults and bounds do not change by accident: results that people compare depend on them.

``parameters.txt`` is the record, one parameter on each line. Where a value comes from is said in the docstring of its
method. After a change that is meant, write the record anew and read what became different in it::

    python tests/methods/test_parameters.py > tests/methods/parameters.txt
"""

from __future__ import annotations

from pathlib import Path

from fedstrata.methods import methods
from fedstrata.spec import format_value

RECORD = Path(__file__).with_name("parameters.txt")


def lines() -> list[str]:
    return [
        f"{name}({one['name']}={format_value(one['default'])}): "
        + "; ".join([one["type"], *filter(None, [one["limits"], ", ".join(one["choices"] or ())])])
        for name in sorted(methods.names())
        for one in methods.describe(name)["parameters"]
    ]


def test_parameters_are_those_of_the_record():
    recorded = RECORD.read_text().splitlines()
    assert sorted(set(lines()) - set(recorded)) == [], "not in parameters.txt"
    assert sorted(set(recorded) - set(lines())) == [], "only in parameters.txt"


if __name__ == "__main__":
    print("\n".join(lines()))
