from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

pytest.importorskip("mutmut", reason="pip install fedstrata[mutants]")

from mutations import mutants_of
from selection import CONTRACT, ROOT, sources, suite_of

SOURCE = '''
"""Words about the file."""

class Part(Base):
    """Words about the part."""

    facts = Facts("family", "A paper")
    rate = parameter(0.5, "What it means.", low=0)

    @property
    def needs(self) -> Needs:
        """Words about needs."""
        return Needs(features=True)

    def loss(self, step):
        """Words about the loss."""
        if not step.ready:
            raise FedStrataError(f"No {step}.", 1)
        check_fraction(step.value, "value")
        return step.value.abs() + step.group("mask").sum(1)
'''


def changes():
    return {mutant.change for mutant in mutants_of(SOURCE)}


def test_defaults_bounds_declarations_and_hooks_get_mutants():
    assert {
        'rate = parameter(0.5, "What it means.", low=0) -> rate = parameter(0.25, "What it means.", low=0)',
        'rate = parameter(0.5, "What it means.", low=0) -> rate = parameter(0.5, "What it means.", low=1)',
        "return Needs(features=True) -> return Needs(features=False)",
        "return Needs(features=True) -> return Needs()",
        "def needs -> nothing",
        "def loss -> nothing",
        "if not step.ready: -> if step.ready:",
    } <= changes()


def test_arithmetic_gets_mutants():
    told = 'return step.value.abs() + step.group("mask").sum(1)'
    assert {one.removeprefix(f"{told} -> return ") for one in changes() if one.startswith(told)} == {
        'step.value.abs() - step.group("mask").sum(1)',
        'step.value + step.group("mask").sum(1)',
        "step.value.abs() + step.group().sum(1)",
        'step.value.abs() + step.group("XXmaskXX").sum(1)',
        'step.value.abs() + step.group("mask").mean(1)',
        'step.value.abs() + step.group("mask").sum()',
        'step.value.abs() + step.group("mask").sum(2)',
    }


def test_words_get_none():
    altered = [mutant.diff for mutant in mutants_of(SOURCE) if not mutant.change.endswith("nothing")]
    for words in ("Words", "Facts", "FedStrataError", "check_fraction", "Base"):
        assert not any(words in one for one in altered), words
    assert not any("+" in one and "What it means." not in one for one in altered if "parameter" in one)


def test_names_of_streams_and_protocols_get_none():
    drawn = 'drawn = numpy_generator(seed, 3, "select").random(2)'
    assert {mutant.change.removeprefix(f"{drawn} -> ") for mutant in mutants_of(drawn)} == {
        'drawn = numpy_generator(seed, 4, "select").random(2)',
        'drawn = numpy_generator(seed, 3, "select").random(3)',
        'drawn = numpy_generator(seed, 3, "select").random()',
    }
    assert [one.change.partition(" -> ")[2] for one in mutants_of("uniform(keys, shape) < 0.5")] == [
        "uniform(keys, shape) < 0.25"
    ]
    assert [one.change.partition(" -> ")[2] for one in mutants_of("uniform(keys, shape).to(kind) >= chance")] == [
        "uniform(keys, shape).to() >= chance"
    ]
    assert mutants_of("class Exchange(ABC):\n    @abstractmethod\n    def due(self) -> int: ...\n") == []
    assert mutants_of("class Probe(Protocol):\n    def test(self, held_out: bool = False) -> Tensor: ...\n") == []


def test_a_mutant_says_where_it_is_and_compiles():
    for mutant in mutants_of(SOURCE):
        compile(mutant.source, "mutant", "exec")
        assert mutant.function.split(".")[0] == "Part"
    assert {mutant.function for mutant in mutants_of(SOURCE)} == {"Part", "Part.needs", "Part.loss"}


def test_every_file_has_tests():
    assert [name for name in sources() if not suite_of(name).files] == []
    assert CONTRACT.with_name("test_fedprox.py") in suite_of("fedstrata/methods/fedprox.py").files
    assert CONTRACT.exists()


EQUIVALENT = tomllib.loads((Path(__file__).with_name("equivalent.toml")).read_text()).get("equivalent", [])


def test_what_is_listed_as_equivalent_stands_in_its_file_and_has_a_reason():
    texts = {file: " ".join((ROOT / file).read_text().split()) for file in {one["file"] for one in EQUIVALENT}}
    for one in EQUIVALENT:
        before = " ".join(one["change"].partition(" -> ")[0].split())
        assert before in texts[one["file"]], one
        assert all(f"{name}" in texts[one["file"]] for name in one["function"].split(".")), one
        assert one["reason"].endswith(".")


@pytest.mark.slow
def test_what_is_listed_as_equivalent_is_a_mutant():
    made = {
        file: {(mutant.function, mutant.change) for mutant in mutants_of((ROOT / file).read_text())}
        for file in {one["file"] for one in EQUIVALENT}
    }
    for one in EQUIVALENT:
        assert (one["function"], one["change"]) in made[one["file"]], one
