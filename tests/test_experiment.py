from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.wire import VALUES

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
counts = st.integers(min_value=1, max_value=2**64)

experiments = st.builds(
    Experiment,
    data=texts,
    data_root=st.none() | texts,
    clients=counts,
    method=texts,
    participation=st.floats(min_value=0, max_value=1, exclude_min=True),
    steps=st.none() | counts,
    seed=st.integers(min_value=0, max_value=2**64),
    engine=st.sampled_from(["auto", "loop", "stacked"]),
    deterministic=st.booleans(),
    imports=st.lists(st.just(f"my methods.py@sha256:{64 * '0'}"), max_size=2),
)


@pytest.fixture(scope="module")
def toml_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experiment") / "experiment.toml"


@settings(deadline=None)
@given(experiment=experiments)
@example(experiment=Experiment(data="quote ' \" backslash \\ newline \n return \r tab \t null \0 delete \x7f end"))
@example(experiment=Experiment(data="Größe 数据 🌍 \u2028 \x85 \ufeff"))
@example(experiment=Experiment(participation=1e-7))
@example(experiment=Experiment(participation=5e-324))
@example(experiment=Experiment(participation=1))
def test_toml_gives_back_the_experiment(toml_path: Path, experiment: Experiment) -> None:
    toml_path.write_bytes(experiment.to_toml().encode("utf-8"))
    read = Experiment.read(toml_path)
    assert read == experiment
    assert read.to_toml() == experiment.to_toml()


def test_toml_is_what_a_person_would_write() -> None:
    lines = Experiment(method="fedprox(mu=0.01)", participation=0.5, deterministic=True).to_toml().splitlines()
    assert 'method = "fedprox(mu=0.01)"' in lines
    assert "participation = 0.5" in lines
    assert "deterministic = true" in lines
    assert not any(line.startswith(("steps", "chunk", "data_root")) for line in lines)


def test_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(FedStrataError, match="not Unicode"):
        Experiment(data_root="folder-\udcff").to_toml()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0, -0.5, 1.5])
def test_numbers_outside_their_range_are_refused(value: float) -> None:
    with pytest.raises(FedStrataError, match="participation"):
        Experiment(participation=value)


def test_overrides_win_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text('method = "fedbn"\nrounds = 3\n')
    assert Experiment.read(path, {"rounds": 5}) == Experiment(method="fedbn", rounds=5)


def test_with_changes_leaves_the_rest() -> None:
    experiment = Experiment(rounds=7, steps=4)
    assert experiment.with_changes({"seed": 3}) == dataclasses.replace(experiment, seed=3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"rouns = 3", "Did you mean 'rounds'"),
        (b"rounds = ", "is not a TOML file"),
        (b"rounds = 3\xff", "is not a TOML file"),
        (b"rounds = 0", "at least 1"),
        (b'rounds = "many"', "takes a whole number"),
        (b"rounds = [3]", "takes a whole number"),
        (b'engine = "stakced"', "Did you mean 'stacked'"),
    ],
)
def test_a_bad_file_is_answered_with_a_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "experiment.toml"
    path.write_bytes(content)
    with pytest.raises(FedStrataError, match=message):
        Experiment.read(path)


def test_a_missing_file_and_a_folder_are_answered_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(FedStrataError, match="There is no file"):
        Experiment.read(tmp_path / "absent.toml")
    with pytest.raises(FedStrataError, match="cannot be read"):
        Experiment.read(tmp_path)


@pytest.mark.parametrize("key", ["upload_values", "download_values"])
def test_values_can_travel_in_every_way_that_the_wire_knows(key):
    [field] = (field for field in dataclasses.fields(Experiment) if field.name == key)
    assert tuple(field.metadata["choices"]) == VALUES


def test_a_file_says_from_where_on_its_imports_are_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "experiment.toml"
    path.write_text('imports = ["a.py", "/b/c.py"]\n')
    assert Experiment.read(path).imports == (str(tmp_path / "a.py"), "/b/c.py")
    assert Experiment.read(path, {"imports": ["d.py"]}).imports == ("d.py",)
