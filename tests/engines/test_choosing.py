from __future__ import annotations

import json
import math
import multiprocessing
from pathlib import Path

import pytest
import torch

from fedstrata.engines import convolution
from fedstrata.engines.choosing import Choices, choices_file, quickest
from fedstrata.engines.convolution import case_of, forward_by, images_by, quickest_pair, rule_by_shape, weights_by
from fedstrata.engines.watching import HostWatch
from fedstrata.errors import FedStrataWarning

WAYS = ("windows", "implicit")


def never():
    raise AssertionError("measured although the choice is known")


def test_a_choice_is_measured_once_and_kept_for_other_runs(tmp_path):
    path = tmp_path / "cache" / "h200.json"
    choices = Choices(path, WAYS)
    assert choices.remembered("one") is None
    assert choices.choose("one", lambda: {"images": "implicit"}) == {"images": "implicit"}
    assert choices.choose("one", never) == {"images": "implicit"}
    assert choices.choose("two", lambda: {"images": "windows"}) == {"images": "windows"}
    assert Choices(path, WAYS).choose("one", never) == {"images": "implicit"}
    assert json.loads(path.read_text()) == {"one": {"images": "implicit"}, "two": {"images": "windows"}}


def test_who_writes_first_decides_for_all(tmp_path):
    first, second = Choices(tmp_path / "file.json", WAYS), Choices(tmp_path / "file.json", WAYS)
    assert first.remembered("case") is second.remembered("case") is None
    first.choose("other", lambda: {"images": "implicit"})
    assert first.choose("case", lambda: {"images": "implicit"}) == {"images": "implicit"}
    assert second.choose("case", lambda: {"images": "windows"}) == {"images": "implicit"}
    assert second.choose("case", never) == {"images": "implicit"}
    assert second.choose("other", never) == {"images": "implicit"}


def choose_many(path: Path, name: str) -> None:
    choices = Choices(path, WAYS)
    for number in range(20):
        choices.choose(f"{name} {number}", lambda: {"images": "windows"})


def test_processes_may_write_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=choose_many, args=(tmp_path / "file.json", name)) for name in "ab"]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert len(json.loads((tmp_path / "file.json").read_text())) == 40


@pytest.mark.parametrize("content", ["", "{", "[1]", "\x00\x01", '"windows"'])
def test_a_broken_file_is_told_and_written_anew(tmp_path, content):
    path = tmp_path / "file.json"
    path.write_text(content)
    with pytest.warns(FedStrataWarning, match="is not used and will be written anew"):
        assert Choices(path, WAYS).choose("case", lambda: {"images": "implicit"}) == {"images": "implicit"}
    assert json.loads(path.read_text()) == {"case": {"images": "implicit"}}


def test_choices_that_nobody_knows_are_measured_again(tmp_path):
    path = tmp_path / "file.json"
    path.write_text(json.dumps({"case": {"images": "magic"}, "other": 3, "good": {"images": "windows"}}))
    choices = Choices(path, WAYS)
    assert choices.choose("good", never) == {"images": "windows"}
    assert choices.choose("case", lambda: {"images": "implicit"}) == {"images": "implicit"}
    assert choices.choose("other", lambda: {"images": "implicit"}) == {"images": "implicit"}


def test_without_a_folder_to_write_the_choice_stays_in_the_process(tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    choices = Choices(tmp_path / "cache" / "file.json", WAYS)
    with pytest.warns(FedStrataWarning) as caught:
        assert choices.choose("case", lambda: {"images": "implicit"}) == {"images": "implicit"}
    assert "the last bits may differ" in str(caught[-1].message)
    assert choices.choose("case", never) == {"images": "implicit"}


def test_a_file_for_each_device_and_version(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = choices_file("convolutions", "NVIDIA H200/SXM")
    assert path.parent == tmp_path / "fedstrata" / "convolutions"
    assert path.name.startswith("NVIDIA-H200-SXM-torch-")
    assert path.suffix == ".json"
    assert path != choices_file("convolutions", "NVIDIA H100")


def test_the_quickest():
    assert quickest({"windows": 2.0, "implicit": 1.0, "grouped": float("inf")}) == "implicit"
    assert quickest({"windows": 1.0, "implicit": 1.0}) == "windows"
    times = {"windows": 5.0, "implicit": 4.0}
    assert quickest_pair(times, times, unfolding=1.0) == {"forward": "implicit", "weights": "implicit"}
    assert quickest_pair(times, times, unfolding=3.0) == {"forward": "windows", "weights": "windows"}
    assert quickest_pair(times, {"windows": 1.0, "implicit": 4.0}, 0.5) == {"forward": "implicit", "weights": "windows"}


def test_windows_that_do_not_fit_the_memory_are_not_chosen():
    times = {"windows": float("inf"), "implicit": 4.0}
    assert quickest_pair(times, times, float("inf")) == {"forward": "implicit", "weights": "implicit"}


def shapes(clients, channels, outputs, batch, size, kernel):
    return torch.Size((clients, channels, batch, size, size)), torch.Size((clients, outputs, channels, kernel, kernel))


@pytest.mark.parametrize(
    ("layer", "stride", "padding", "ahead", "back"),
    [
        ((100, 3, 64, 100, 32, 7), 2, 3, "implicit", "implicit"),
        ((100, 64, 64, 100, 8, 3), 1, 1, "implicit", "implicit"),
        ((100, 64, 128, 100, 8, 3), 2, 1, "windows", "windows"),
        ((100, 64, 128, 100, 8, 1), 2, 0, "windows", "windows"),
        ((100, 256, 256, 100, 2, 3), 1, 1, "windows", "implicit"),
        ((10, 128, 128, 16, 16, 3), 1, 1, "implicit", "implicit"),
        ((10, 512, 512, 16, 4, 3), 1, 1, "windows", "implicit"),
    ],
)
def test_the_rule_follows_what_was_measured(layer, stride, padding, ahead, back):
    geometry = *shapes(*layer), (stride, stride), (padding, padding)
    for_weights = ahead if layer[1] >= 64 else "windows"  # a tile with several taps was wrong on a GPU
    for part, way in (("forward", ahead), ("weights", for_weights), ("images", back)):
        assert rule_by_shape(part, *geometry, torch.float32) == way
        assert rule_by_shape(part, *geometry, torch.float64) == "windows"


@pytest.fixture
def choices(monkeypatch, tmp_path):
    choices = Choices(tmp_path / "file.json", convolution.WAYS)
    monkeypatch.setattr(convolution, "_choices", lambda device: choices)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return choices


def chosen(multiplications, measure):
    return convolution._chosen("case", torch.device("cuda"), multiplications, measure, {"images": "windows"})


def test_small_convolutions_follow_the_rule(choices):
    assert chosen(10, never) == {"images": "windows"}
    assert chosen(10**9, lambda: {"images": "grouped"}) == {"images": "grouped"}


def test_deterministic_runs_follow_the_rule_whatever_the_file_says(choices, monkeypatch):
    choices.choose("case", lambda: {"images": "implicit"})
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert chosen(10**9, never) == {"images": "windows"}


def test_nothing_is_measured_while_a_graph_is_recorded(choices, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert chosen(10**9, never) == {"images": "windows"}
    choices.choose("case", lambda: {"images": "implicit"})
    assert chosen(10**9, never) == {"images": "implicit"}


def test_a_case_names_all_that_decides():
    images, weights = shapes(2, 3, 4, 5, 6, 3)
    cases = {case_of("forward", images, weights, (1, 1), (1, 1), dtype) for dtype in (torch.float32, torch.bfloat16)}
    cases |= {case_of("images", images, weights, (1, 1), (1, 1), torch.float32)}
    cases |= {case_of("forward", images, weights, stride, (1, 2), torch.float32) for stride in ((1, 1), (1, 2), (2, 1))}
    allowed = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        cases |= {case_of("forward", images, weights, (1, 1), (1, 1), torch.float32)}
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    assert len(cases) == 7
    assert "forward tf32 2x3x8x6x6 by 4x3x3x3 stride (1, 1) padding (1, 1)" in cases


def test_groups_that_shrink_and_last_batches_are_not_measured_one_by_one():
    cases = {
        case_of("forward", *shapes(clients, 3, 4, batch, 6, 3), (1, 1), (1, 1), torch.float32)
        for clients in range(33, 65)
        for batch in range(9, 17)
    }
    assert len(cases) == 1


@pytest.mark.parametrize(("stride", "padding"), [((1, 1), (1, 1)), ((2, 1), (0, 2)), ((3, 2), (3, 3))])
def test_grouped_convolutions_and_windows_agree(stride, padding):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(3, 2, 4, 7, 6, dtype=torch.float64, generator=generator)
    weights = torch.randn(3, 5, 2, 3, 2, dtype=torch.float64, generator=generator)
    outputs = forward_by("windows", images, weights, stride, padding)
    gradient = torch.randn(outputs.shape, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(forward_by("grouped", images, weights, stride, padding), outputs)
    for way, others in (
        (weights_by, (gradient, images, weights.shape)),
        (images_by, (gradient, weights, images.shape)),
    ):
        expected = way("windows", *others, stride, padding)
        torch.testing.assert_close(way("grouped", *others, stride, padding), expected)
        torch.testing.assert_close(way("implicit", *others, stride, padding), expected)  # on a CPU: by windows


def test_a_way_that_gives_another_result_is_never_taken(monkeypatch):
    monkeypatch.setattr(convolution, "milliseconds_on_gpu", lambda work: 1.0)
    right = torch.tensor([3.0, 4.0])
    results = {"windows": right, "implicit": torch.tensor([3.0, torch.nan]), "grouped": right * 1.001}
    with pytest.warns(FedStrataWarning) as told:
        times = convolution._times(lambda way: results[way], convolution.WAYS)
    assert times == {"windows": 1.0, "implicit": math.inf, "grouped": math.inf}
    assert "by 'implicit' are not used for [2]: the result is off by inf" in str(told[0].message)


def test_measuring_is_no_part_of_the_step_in_which_a_shape_is_first_met(monkeypatch):
    """Else a first run on a machine would not record its steps: they would seem to look at values."""
    monkeypatch.setattr(convolution, "milliseconds_on_gpu", lambda work: 1.0)
    right = torch.tensor([3.0, 4.0])
    with HostWatch() as watch:
        convolution._times(lambda way: right * 1.0, convolution.WAYS)
    assert watch.found is None
    with HostWatch() as watch:
        convolution.relative_error(right, right)
    assert "__float__" in str(watch.found)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("tf32", [True, False])
@pytest.mark.parametrize(("channels", "outputs", "size", "kernel", "stride"), [(3, 64, 32, 7, 2), (64, 64, 8, 3, 1)])
def test_all_ways_agree_at_the_size_of_a_real_setting(monkeypatch, channels, outputs, size, kernel, stride, tf32):
    """With 100 clients a kernel was wrong that was right with two."""
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", tf32)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    draw = torch.Generator("cuda").manual_seed(1)
    images = torch.randn(100, channels, 100, size, size, device="cuda", generator=draw)
    weights = torch.randn(100, outputs, channels, kernel, kernel, device="cuda", generator=draw)
    step, edge = (stride, stride), (kernel // 2, kernel // 2)
    gradient = torch.randn(convolution.forward_by("windows", images, weights, step, edge).shape, device="cuda")
    ways = {
        "forward": lambda way: convolution.forward_by(way, images, weights, step, edge),
        "weights": lambda way: convolution.weights_by(way, gradient, images, weights.shape, step, edge),
        "images": lambda way: convolution.images_by(way, gradient, weights, images.shape, step, edge),
    }
    for compute in ways.values():
        for way in ("implicit", "grouped"):
            error = convolution.relative_error(compute(way), compute("windows"))
            assert error < (5e-3 if tf32 else 1e-4), way
