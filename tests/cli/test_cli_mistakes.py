"""Each mistake gets one sentence, the exit code 2, nothing on standard output and nothing half-written."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_calls import TINY, Call

import fedstrata
from fedstrata.cli import terminal
from fedstrata.errors import FedStrataError


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("run --method fedagv", "There is no method 'fedagv'. Did you mean 'fedavg'?"),
        ("run --method fedprox(nu=1)", "Did you mean 'mu'?"),
        ("run --method fedprox(mu=-1)", "'mu' of the method 'fedprox' takes: at least 0"),
        ("run --learning-rate -0.1", "learning_rate"),
        ("run --learning-rate fast", "it takes a number"),
        ("run --optimiser sdg", "Did you mean 'sgd'?"),
        ("run --participation 1.5", "more than 0 and at most 1"),
        ("run --rounds 0", "at least 1"),
        ("run --rounds many", "it takes a whole number"),
        ("run --engine fast", "Known: auto, loop, stacked"),
        ("run --partition classes:11", "has 10; use at most 10"),
        ("run --clients 5000", "use at most 1346 clients"),
        ("run --model simplecnn", "the inputs have the shape (1, 8, 8)"),
        ("run --model resnet9", "Did you mean 'resnet8'?"),
        ("run --data digitz", "Did you mean 'digits'?"),
        ("run --data mnist --data-root .", "--data-root"),
        ("run --device tpu", "There is no device 'tpu'"),
        ("run --set rounds", "KEY=VALUE"),
        ("run --set roundz=3", "Did you mean 'rounds'?"),
        ("run --methd fedavg", "--method"),
        ("run nowhere.toml", "There is no file 'nowhere.toml'"),
        ("runn", "There is no command 'runn'. Did you mean 'run'? See"),
        ("method", "Did you mean 'methods'?"),
        ("xyzzy", "There is no command 'xyzzy'. See 'fedstrata --help'."),
        ("fedbn", "'fedbn' is no command but a method; run it with 'fedstrata run --method fedbn'."),
        ("run --lr 0.1", "There is no option '--lr'. Did you mean '--learning-rate'? See 'fedstrata run --help'."),
        ("run fedbn", "There is no file 'fedbn'; to run the method, write --method fedbn."),
        ("run fedbn+lips", "write --method fedbn+lips."),
        ("run --num-clients 3", "Did you mean '--clients'?"),
        ("run --dataset digits", "Did you mean '--data'?"),
        ("run --optimizer adam", "Did you mean '--optimiser'?"),
        ("run --set lr=0.1", "optimiser = 'sgd(learning_rate=0.1)'; --learning-rate changes it alone"),
        ("compare fedavg fedprx", "Did you mean 'fedprox'?"),
        ("compare fedavg a.toml b.toml", "the file of one experiment, not of 2"),
        ("compare", "Missing argument"),
        ("compare fedavg,fedprx", "Did you mean 'fedprox'?"),
        ("compare ,", "There is no method to compare"),
        ("compare fedavg --seeds 0", "use at least 1"),
        ("compare fedavg --seeds 1,2", "how many each method runs with, counted from --seed on, such as --seeds 3."),
        ("compare fedavg,fedprox --sweep method.nu=1,2", "Did you mean 'method.mu'? Known: method.mu."),
        ("resume nowhere", "There is no run folder 'nowhere'"),
        ("report nowhere", "There is no run folder 'nowhere'"),
        ("partition --partition dirichlet:-1", "more than 0"),
        ("partition --plot skew.txt", ".html"),
        ("download digits", "can be fetched"),
        ("layers --shape 3;32", "3,32,32"),
        ("methods fedagv", "Did you mean 'fedavg'?"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(call: Call, tmp_path: Path, arguments: str, said: str) -> None:
    assert said in call(*arguments.split()).sentence
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_on_standard_output_after_a_mistake_even_if_json_is_asked_for(call: Call) -> None:
    assert call("run", "--method", "fedagv", "--json").sentence


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"methd = 'fedavg'", "Did you mean 'method'?"),
        (b"rounds = ", "is not a TOML file"),
        (b"rounds = [1]", "it takes a whole number"),
        (b"data = '\xff'", "is not a TOML file"),
    ],
)
def test_a_bad_experiment_file_is_told_in_one_sentence(call: Call, tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "experiment.toml").write_bytes(content)
    assert said in call("run", "experiment.toml").sentence


def test_an_image_that_is_none_is_named(call: Call, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "1.png").write_text("not an image")
    assert "cat/1.png" in call("run", "--data", "image_folder(path=images)").sentence


def test_a_nan_in_the_data_is_refused() -> None:
    inputs = np.zeros((8, 2), dtype=np.float32)
    inputs[3, 1] = np.nan
    with pytest.raises(FedStrataError, match="Sample 3 of the dataset 'arrays' holds a NaN"):
        fedstrata.run(data=fedstrata.from_arrays(inputs, [0, 1] * 4), model="mlp", clients=2, rounds=1)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_missing_gpu_is_told(call: Call) -> None:
    assert "no usable CUDA GPU" in call("run", "--device", "cuda").sentence


def test_a_file_is_no_run_and_no_place_for_one(call: Call) -> None:
    Path("README.md").write_text("mine")
    assert call("resume", "README.md").sentence == (
        "'README.md' is a file, not the folder of a run; give the --out folder of a run."
    )


def test_a_folder_with_other_things_is_left_alone(call: Call, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "notes.txt" in call("run", *TINY, "--out", str(tmp_path)).sentence
    assert "a file, not a folder" in call("run", *TINY, "--out", "notes.txt").sentence
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_told(call: Call, tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    assert "permission is missing" in call("run", *TINY, "--out", "closed/a").sentence


def test_a_full_disk_leaves_nothing_behind(call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    assert "the disk is full" in call("run", *TINY, "--out", "a").sentence
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_file_sizes_leaves_nothing_behind(call: Call, tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, limits[1]))
    try:
        outcome = call("run", *TINY, "--out", "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"'{tmp_path}/a' cannot be written: file too large" in outcome.sentence
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_output_that_cannot_be_written_is_told(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    full = Path("/dev/full").open("w")  # noqa: SIM115 - closing it fails
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", full)
        assert call("methods", "--json").sentence == "The system refuses: no space left on device."
    with contextlib.suppress(OSError):
        full.close()


def test_debug_shows_the_traceback(call: Call) -> None:
    outcome = call("run", "--method", "fedagv", "--debug")
    assert outcome.code == 2
    assert "Traceback" in outcome.err
    assert outcome.err.endswith("Known: " + outcome.err.rpartition("Known: ")[2])


def test_a_bug_is_called_a_bug(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedstrata.runs.preparing.load_data", {}.__getitem__)  # which no file of anybody's has
    outcome = call("partition")
    assert (outcome.code, outcome.out) == (1, "")
    assert "a bug in FedStrata (KeyError: " in outcome.err
    assert "--debug" in outcome.err
    assert outcome.err.count("\n") == 1
    assert "Traceback" in call("partition", "--debug").err


def test_what_is_said_of_other_errors() -> None:
    assert terminal.explain(MemoryError())[0].startswith("There is not enough memory")
    assert terminal.explain(PermissionError(errno.EACCES, "Permission denied", "x.png")) == (
        "The system refuses: 'x.png': permission denied.",
        2,
    )
    assert terminal.explain(KeyboardInterrupt()) == ("The command was interrupted.", 130)
