"""How time and memory grow with the clients that there are, and with those that take part in a round.

    python benchmarks/growth.py                    from 100 to a million clients, and from 10 to 10,000 participants
    python benchmarks/growth.py --device cuda

Every row is measured in a process of its own, so that its peak memory is its own. The exponent of a column is the slope
of a straight line through the logarithms (least squares): 0 where it does not grow, 1 where it grows in proportion, 2
with the square. Where a column begins with a part that does not grow, the slope of the last two rows tells more.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import fedstrata  # noqa: F401 - sets the environment before torch is imported

import numpy as np  # isort: skip
import torch  # isort: skip

from fedstrata.data import Dataset, Split, from_arrays, partitions
from fedstrata.data.split import Parts
from fedstrata.engines.planning import Plan
from fedstrata.experiment import Experiment
from fedstrata.runs.driver import Driver
from fedstrata.runs.preparing import Ingredients

REGISTERED = (100, 1_000, 10_000, 100_000, 1_000_000)
PARTICIPANTS = (10, 100, 1_000, 10_000)
SAMPLES, TEST_SAMPLES, FEATURES, BATCH, STEPS = 4, 1000, 8, 2, 2
COLUMNS = ("s to divide", "s to prepare", "s a round", "s to test", "GiB at most", "GiB on the GPU")


def federation(clients: int) -> tuple[Dataset, Split]:
    """Give every client four samples of a table, and one of a thousand to be tested on."""
    generator = torch.Generator().manual_seed(0)
    total = clients * SAMPLES
    inputs = torch.randn(total + TEST_SAMPLES, FEATURES, generator=generator)
    labels = torch.randint(0, 10, (len(inputs),), generator=generator)
    dataset = from_arrays(inputs, labels, class_names=tuple(map(str, range(10))), test_fraction=0.0)
    ours = replace(dataset, train=np.arange(total))
    tested = total + np.arange(clients) % TEST_SAMPLES
    split = partitions.make("iid").with_seed(0).split(ours, clients)
    return ours, Split(split.train, Parts(tested, np.ones(clients, dtype=np.int64)))


def measure(clients: int, participants: int, device: str, method: str, repetitions: int) -> list[float]:
    """Measure one federation with an MLP and two steps a round: the numbers under :data:`COLUMNS`."""
    began = time.perf_counter()
    dataset, split = federation(clients)
    divided = time.perf_counter()
    experiment = Experiment(
        model="mlp(hidden=32)",
        method=method,
        optimiser="sgd(learning_rate=0.1)",
        steps=STEPS,
        batch_size=BATCH,
        participation=participants / clients,
        device=device,
        transforms="none",
        rounds=1000,
        evaluate_every=1000,
    )
    driver = Driver.prepare(
        experiment, Ingredients(dataset=dataset, split=split), Plan("stacked", min(participants, 2_500))
    )
    prepared = time.perf_counter()
    driver.step()
    rounds = [seconds(driver.step, device) for _ in range(repetitions)]
    tested = seconds(lambda: driver._evaluate(None, last=False), device)
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    gpu = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return [divided - began, prepared - divided, min(rounds), tested, host, gpu]


def seconds(work: Callable[[], object], device: str) -> float:
    """Time something, with everything on the device done."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def exponents(counts: Sequence[int], rows: Sequence[Sequence[float]]) -> list[float]:
    """Fit the exponent of each column: the slope of its logarithm over that of the counts.

    >>> exponents((1, 10, 100), [(2.0, 3.0), (20.0, 3.0), (200.0, 3.0)])
    [1.0, 0.0]
    """
    logarithms = np.log(np.maximum(np.array(rows), 1e-9))
    return [round(float(slope), 2) + 0.0 for slope in np.polyfit(np.log(counts), logarithms, 1)[0]]


def table(kind: str, counts: Sequence[int], federations: Sequence[tuple[int, int]], rest: Sequence[str]) -> None:
    """Print a row for each federation (clients, participants), measured in a process of its own, and the exponents."""
    columns = COLUMNS if "cuda" in rest else COLUMNS[:-1]
    print(f"\n| {kind} | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
    rows = []
    for count, (clients, participants) in zip(counts, federations, strict=True):
        command = [sys.executable, __file__, "--one", str(clients), str(participants), *rest]
        told = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        rows.append(told[: len(columns)])
        print(f"| {count:,} | {' | '.join(f'{value:.3f}' for value in rows[-1])} |", flush=True)
    for words, last in (("exponent", len(rows)), ("of the last two", 2)):
        fitted = exponents(counts[-last:], rows[-last:])
        print(f"| {words} | {' | '.join(f'{value:.2f}' for value in fitted)} |", flush=True)


def growth(device: str, repetitions: int, method: str = "fedavg", most: int = REGISTERED[-1]) -> None:
    """Print both tables: over the clients that there are, and over those that take part."""
    rest = ["--device", device, "--method", method, "--repetitions", str(repetitions)]
    registered = [count for count in REGISTERED if count <= most]
    table("clients, 100 in a round", registered, [(count, 100) for count in registered], rest)
    taking_part = [count for count in PARTICIPANTS if count <= most]
    table(f"in a round, of {most:,} clients", taking_part, [(most, count) for count in taking_part], rest)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--method", default="fedavg")
    parser.add_argument("--most", type=int, default=REGISTERED[-1], help="the most clients")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--one", type=int, nargs=2, metavar=("CLIENTS", "PARTICIPANTS"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(measure(*arguments.one, arguments.device, arguments.method, arguments.repetitions)))
        return
    growth(arguments.device, arguments.repetitions, arguments.method, arguments.most)


if __name__ == "__main__":
    main()
