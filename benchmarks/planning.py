"""Whether ``--engine auto`` chooses well on a CPU: what it chose against every fixed choice, and what choosing took.

    python benchmarks/planning.py                  all cases
    python benchmarks/planning.py --cases 1 4      some of them
    python benchmarks/planning.py --chunks 4 8     also stacks of fewer clients
    OMP_NUM_THREADS=1 python benchmarks/planning.py --processor     on a busy machine: the processor's time, one thread

A choice is an engine, how many clients it takes at once, and how many threads PyTorch takes for each. Rounds of all
choices alternate, and the fastest of each counts: the choice of ``auto`` is worth the fastest round of the best choice
over its own.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from types import SimpleNamespace

import speed
from speed import CPU_CASES, Case, rounds_of, seconds  # sets the environment before torch is imported

import numpy as np  # isort: skip
import torch  # isort: skip

from fedstrata.data import Split, from_arrays
from fedstrata.engines import trying
from fedstrata.engines.planning import Plan
from fedstrata.experiment import Experiment
from fedstrata.runs.driver import Driver
from fedstrata.runs.preparing import Ingredients

CASES = [
    *CPU_CASES,
    Case("digits CNN, 30 unequal clients", "cnn", (1, 8, 8), 10, 30, 40, 10),
    Case("MLP, 100 unequal clients", "mlp(hidden=64)", (1, 8, 8), 10, 100, 40, 10),
]


def sizes_of(case: Case) -> np.ndarray:
    """Tell how many samples each client has: all the same, or shares drawn from Dir(1), at least two."""
    if "unequal" not in case.name:
        return np.full(case.clients, case.samples)
    shares = np.random.default_rng(0).dirichlet(np.ones(case.clients))
    return np.maximum(2, (shares * case.clients * case.samples).astype(np.int64))


def prepared(case: Case, plan: Plan | None, rounds: int = 1000) -> Driver:
    """Prepare a federation with random data of the right shape; without a plan ``auto`` makes one."""
    sizes = sizes_of(case)
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(int(sizes.sum()), *case.shape, generator=generator)
    labels = torch.randint(0, case.classes, (len(inputs),), generator=generator)
    dataset = from_arrays(inputs, labels, class_names=tuple(map(str, range(case.classes))), test_fraction=0.0)
    positions = tuple(np.split(np.arange(len(inputs)), np.cumsum(sizes)[:-1]))
    experiment = Experiment(
        model=case.model,
        method=case.method,
        optimiser=case.optimiser,
        epochs=case.epochs,
        batch_size=case.batch_size,
        transforms="none",
        rounds=rounds,
        device="cpu",
    )
    split = Split(positions, tuple(own[:0] for own in positions))
    return Driver.prepare(experiment, Ingredients(dataset=dataset, split=split), plan)


def measure(case: Case, repetitions: int, chunks: list[int], threads: int) -> None:
    """Print a row: what was chosen, what it is worth, what choosing took, and the fastest round of every choice."""
    prepared(case, Plan("loop", 1))  # what is done once in a process is not what choosing takes
    began = time.perf_counter()
    prepared(case, Plan("loop", 1))
    fixed = time.perf_counter() - began
    began = time.perf_counter()
    chosen = prepared(case, None).plan
    spent = time.perf_counter() - began - fixed
    sizes = [*dict.fromkeys((*(chunk for chunk in chunks if chunk < case.clients), case.clients))]
    plans = [Plan("stacked", size, count) for size in sizes for count in sorted({1, threads})]
    plans += [Plan("loop", *how) for how in sorted({(1, 1), (1, threads), (threads, 1)})]
    if chosen not in plans:
        plans.append(chosen)
    ways = {plan: rounds_of(prepared(case, plan)) for plan in plans}
    fastest = dict.fromkeys(ways, float("inf"))
    for repetition in range(repetitions + 1):
        for plan, one_round in ways.items():
            plan.set_threads()
            taken = seconds(one_round, "cpu")
            if repetition:  # the first one warms up
                fastest[plan] = min(fastest[plan], taken)
    worth = min(fastest.values()) / fastest[chosen]
    cells = ", ".join(f"{_words(plan)} {taken:.3f}" for plan, taken in sorted(fastest.items(), key=lambda one: one[1]))
    print(f"| {case.name} | {_words(chosen)} | {worth:.2f} | {spent:.2f} | {cells} |", flush=True)


def _words(plan: Plan) -> str:
    return f"{plan.engine} of {plan.chunk}, threads: {plan.threads or 'all'}"


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))), help="their numbers, from 0")
    parser.add_argument("--chunks", type=int, nargs="+", default=[], help="also stacks of so many clients")
    parser.add_argument("--clients", type=int, help="so many clients at the most, where rounds take long")
    parser.add_argument("--repetitions", type=int, default=4)
    parser.add_argument("--processor", action="store_true", help="auto and the rounds go by the processor's time")
    arguments = parser.parse_args()
    threads = torch.get_num_threads()
    if arguments.processor:
        if threads > 1:
            parser.error("the processor's time tells how long a round takes on one thread: set OMP_NUM_THREADS=1")
        trying.time = speed.time = SimpleNamespace(perf_counter=time.process_time)  # type: ignore[attr-defined]
    print("| setting | auto | worth | choosing, s | fastest rounds, s |\n|---|---|---|---|---|")
    for number in arguments.cases:
        case = CASES[number]
        case = replace(case, clients=min(case.clients, arguments.clients or case.clients))
        measure(case, arguments.repetitions, arguments.chunks, threads)


if __name__ == "__main__":
    main()
