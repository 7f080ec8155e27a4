"""What it brings to do several runs at a time on one device: whole comparisons, from the first process to the last.

    python benchmarks/side_by_side.py                              four runs on digits: one after another, two at a time
    python benchmarks/side_by_side.py --model resnet18 --jobs 1 4  made-up images of 32 x 32 pixels, for a GPU

Each is a ``fedstrata compare`` in a process of its own, in an empty folder; repetitions alternate between the numbers
of jobs, and the fastest counts. Afterwards the folders of all runs are compared: equal bytes, but for the times. With
``--mps`` the processes share the GPU through NVIDIA's Multi-Process Service, which is started for the measurement.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

IMAGES = '''
from dataclasses import dataclass

import torch

from fedstrata.data import DatasetSource, datasets, from_arrays
from fedstrata.spec import parameter


@datasets.register("made-up-images")
@dataclass(frozen=True)
class Images(DatasetSource):
    """Noise around a pattern for each of ten classes."""

    samples: int = parameter(2000, "How many.", low=10)

    def load(self, root=None):
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(self.samples) % 10
        patterns = torch.randn(10, 3, 32, 32, generator=generator)
        inputs = patterns[labels] + torch.randn(self.samples, 3, 32, 32, generator=generator)
        return from_arrays(inputs, labels, name=str(self))
'''


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=["1", "2"], help="the numbers of runs at a time")
    parser.add_argument("--model", default="mlp", help="mlp and cnn take digits, all others made-up images")
    parser.add_argument("--clients", default="10")
    parser.add_argument("--rounds", default="10")
    parser.add_argument("--seeds", default="4", help="how many runs")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--batch-size", default="16")
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--set", action="append", default=[], help="further keys, as of fedstrata compare")
    parser.add_argument("--mps", action="store_true", help="on a GPU: compute at the same time instead of in turns")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place, shared_gpu(Path(place), given.mps):
        folder = Path(place) / "runs"
        folder.mkdir()
        (folder / "images.py").write_text(IMAGES)
        own = [] if given.model in ("mlp", "cnn") else ["--import", "images.py", "--data", "made-up-images"]
        options = [*own, *(f"--set={text}" for text in given.set), "--no-report", "--quiet"]
        options += ["--engine", "stacked", "--partition", "iid"]
        for key in ("model", "clients", "rounds", "seeds", "batch_size"):
            options += [f"--{key.replace('_', '-')}", getattr(given, key)]
        seconds: dict[str, list[float]] = {jobs: [] for jobs in given.jobs}
        for repetition in range(given.repeat):
            for jobs in given.jobs:
                began = time.perf_counter()
                compare(folder, [given.method, *options, "--jobs", jobs, "--out", f"{jobs}-{repetition}"])
                seconds[jobs].append(time.perf_counter() - began)
                print(f"--jobs {jobs}: {seconds[jobs][-1]:.1f} s", file=sys.stderr, flush=True)
        fastest = {jobs: min(measured) for jobs, measured in seconds.items()}
        expected = contents(folder / f"{given.jobs[0]}-0")
        print(f"{given.seeds} runs of {given.method}, {given.model}, {given.clients} clients, {given.rounds} rounds")
        for jobs, one in fastest.items():
            same = all(contents(folder / f"{jobs}-{number}") == expected for number in range(given.repeat))
            gain = fastest[given.jobs[0]] / one
            print(f"--jobs {jobs:>4}  {one:7.1f} s  {gain:5.2f} times  {'same' if same else 'OTHER'} bytes")


@contextmanager
def shared_gpu(folder: Path, wanted: bool) -> Iterator[None]:
    """Start the service, where it is wanted, and end it."""
    if not wanted:
        yield
        return
    for what in ("PIPE", "LOG"):
        (folder / what).mkdir()
        os.environ[f"CUDA_MPS_{what}_DIRECTORY"] = str(folder / what)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    try:
        yield
    finally:
        subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False)


def compare(folder: Path, arguments: list[str]) -> None:
    """Run a comparison."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "fedstrata", "compare", *arguments]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, check=True)


def contents(folder: Path) -> dict[str, Any]:
    """Read all files of some runs, but for what a clock has touched."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in ("timings.parquet", "report.html"):
            content: Any = path.read_bytes()
            if path.name == "summary.json":
                content = {**json.loads(content), "seconds": None}
            if path.name == "manifest.json":
                content = json.loads(content)
                content = {**content, "sha256": None, "files": {**content["files"], "timings.parquet": None}}
            found[str(path.relative_to(folder))] = content
    return found


if __name__ == "__main__":
    main()
