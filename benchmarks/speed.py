"""How fast a round is: ratios measured side by side in one run.

    python benchmarks/speed.py                     the CPU table (and the GPU table where there is a GPU)
    python benchmarks/speed.py --growth            how time and memory grow with the clients (benchmarks/growth.py)
    python benchmarks/speed.py --steps             on a GPU: the time of a step in rounds between two tests, all their
                                                   own work included, and how much of it the GPU computes

``--against results/speed-cpu.csv`` (or ``speed-gpu.csv``) says what became slower than the numbers kept there, and
``--keep`` writes them. What is kept are ratios: of two ways measured side by side, or of the clock to the GPU's work.

Three ways to train the same clients for one round: ``usual`` is the loop that most federated-learning code has (one
``nn.Module``, ``torch.optim``, client after client, no messages); ``loop`` is FedStrata's reference engine, which also
encodes and decodes every message; ``stacked`` trains all clients as one batch of models. Every way does the same local
steps on the same number of samples. Repetitions alternate between the ways; the median counts. On a CPU every way runs
with one thread and with all, and the better one counts.
"""

from __future__ import annotations

import argparse
import copy
import csv
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import fedstrata  # noqa: F401 - sets the environment before torch is imported

import torch  # isort: skip
import torch.nn.functional as F  # isort: skip
from torch.autograd import DeviceType  # isort: skip
from torch.profiler import ProfilerActivity, profile  # isort: skip

from growth import growth

from fedstrata.callbacks import Callbacks
from fedstrata.data import Split, from_arrays
from fedstrata.engines.planning import Plan
from fedstrata.experiment import Experiment
from fedstrata.models import build_model
from fedstrata.runs.driver import Driver
from fedstrata.runs.preparing import Ingredients

_THREADS = torch.get_num_threads()
Ratios = dict[tuple[str, str], float]
"""Numbers that should be high, by the setting and what they are the ratio of."""


@dataclass(frozen=True)
class Case:
    """One setting to measure."""

    name: str
    model: str
    shape: tuple[int, ...]
    classes: int
    clients: int
    samples: int
    batch_size: int
    epochs: int = 5
    precision: str = "fp32"
    method: str = "fedbn"
    optimiser: str = "sgd(learning_rate=0.1, momentum=0.9)"


CPU_CASES = [
    Case("digits CNN, 20 clients x 40", "cnn", (1, 8, 8), 10, 20, 40, 32),
    Case("MLP 64-64-10, 100 clients x 40", "mlp(hidden=64)", (1, 8, 8), 10, 100, 40, 10),
    Case("ResNet-8, 20 clients x 100", "resnet8", (3, 32, 32), 100, 20, 100, 100, epochs=1),
    Case("ResNet-8, 20 clients x 100, batch 10", "resnet8", (3, 32, 32), 100, 20, 100, 10, epochs=1),
]
GPU_CASES = [
    Case(
        f"LIPS: ResNet-8, 100 clients x 100, {precision}",
        "resnet8",
        (3, 32, 32),
        100,
        100,
        100,
        100,
        precision=precision,
    )
    for precision in ("fp32", "tf32", "bf16")
]

CLIPPED = "sgd(learning_rate=0.1, weight_decay=0.0005, clip=10.0)"
STEP_CASES = [  # every client has a single batch, and ten steps on it make a round
    Case("ResNet-8", "resnet8", (3, 32, 32), 100, 100, 100, 100, 10, "tf32"),
    Case("ResNet-8", "resnet8", (3, 32, 32), 100, 100, 100, 100, 10, "bf16"),
    Case("ResNet-18", "resnet18", (3, 32, 32), 10, 10, 50, 50, 10, "tf32", "fedavg", CLIPPED),
    Case("ResNet-18", "resnet18", (3, 32, 32), 10, 10, 16, 16, 10, "tf32", "fedavg", CLIPPED),
    Case("ResNet-18", "resnet18", (3, 32, 32), 10, 10, 16, 16, 10, "tf32", "ssfl(sparsity=0.5)", CLIPPED),
    Case("ResNet-20", "resnet20", (3, 32, 32), 10, 20, 128, 128, 10, "tf32", "fedavg"),
    Case("ResNet-20", "resnet20", (3, 32, 32), 10, 20, 128, 128, 10, "bf16", "fedavg"),
    Case("ViT", "vit", (3, 32, 32), 100, 10, 64, 64, 10, "tf32", "sparse-ft(head_rounds=0)"),
]


def simulation(case: Case, engine: str, device: str, chunk: int | None = None) -> Driver:
    """Prepare a federation with random data of the right shape."""
    generator = torch.Generator().manual_seed(0)
    total = case.clients * case.samples
    inputs = torch.randn(total, *case.shape, generator=generator)
    labels = torch.randint(0, case.classes, (total,), generator=generator)
    dataset = from_arrays(inputs, labels, class_names=tuple(map(str, range(case.classes))), test_fraction=0.0)
    positions = torch.arange(total).reshape(case.clients, case.samples).numpy()
    split = Split(tuple(positions), tuple(positions[:, :0]))
    experiment = Experiment(
        model=case.model,
        method=case.method,
        optimiser=case.optimiser,
        epochs=case.epochs,
        batch_size=case.batch_size,
        precision=case.precision,
        device=device,
        engine=engine,
        chunk=chunk,
        transforms="none",
        rounds=1000,
        evaluate_every=1000,
    )
    plan = Plan("loop", 1) if engine == "loop" else None
    return Driver.prepare(experiment, Ingredients(dataset=dataset, split=split), plan)


def usual_loop(case: Case, device: str) -> Callable[[], None]:
    """Build the loop of most federated-learning code: one module, one optimiser per client and round."""
    model = build_model(case.model, case.shape, case.classes, 0).to(device).train()
    inputs = torch.randn(case.clients, case.samples, *case.shape, device=device)
    labels = torch.randint(0, case.classes, (case.clients, case.samples), device=device)
    server = copy.deepcopy(model.state_dict())

    def one_round() -> None:
        total = {name: torch.zeros_like(tensor, dtype=torch.float32) for name, tensor in server.items()}
        for client in range(case.clients):
            model.load_state_dict(server)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for _ in range(case.epochs):
                order = torch.randperm(case.samples, device=device)
                for begin in range(0, case.samples, case.batch_size):
                    chosen = order[begin : begin + case.batch_size]
                    optimiser.zero_grad()
                    with torch.autocast(device, dtype=torch.bfloat16, enabled=case.precision == "bf16"):
                        outputs = model(inputs[client, chosen])
                    F.cross_entropy(outputs.float(), labels[client, chosen]).backward()
                    optimiser.step()
            for name, tensor in model.state_dict().items():
                total[name] += tensor / case.clients
        for name, tensor in server.items():
            tensor.copy_(total[name])

    return one_round


def seconds(one_round: Callable[[], None], device: str) -> float:
    """Time one round, with everything on the device done."""
    if device == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    one_round()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began


def rounds_of(prepared: Driver) -> Callable[[], None]:
    """Run round after round without evaluation."""
    everybody = range(prepared.setting.clients)
    counter = iter(range(1, 10**6))
    return lambda: [prepared.engine.round(next(counter), everybody, evaluate=False), None][1]


_WARM_UP = 3
"""Rounds that are not counted: in the first ones steps run in Python, and are recorded."""


def measure(case: Case, device: str, repetitions: int) -> Ratios:
    """Print one row: the median of each way, and how many times faster than the usual loop."""
    ways = {
        "usual": usual_loop(case, device),
        "loop": rounds_of(simulation(case, "loop", device)),
        "stacked": rounds_of(simulation(case, "stacked", device)),
    }
    medians = dict.fromkeys(ways, math.inf)
    for threads in {1, _THREADS} if device == "cpu" else {torch.get_num_threads()}:
        torch.set_num_threads(threads)
        times: dict[str, list[float]] = {way: [] for way in ways}
        for repetition in range(repetitions + _WARM_UP):
            for way, one_round in ways.items():
                spent = seconds(one_round, device)
                if repetition >= _WARM_UP:
                    times[way].append(spent)
        medians = {way: min(medians[way], statistics.median(values)) for way, values in times.items()}
    ratios = {way: medians["usual"] / medians[way] for way in ("loop", "stacked")}
    cells = [f"{medians[way]:.3f}" for way in ways] + [f"{ratio:.2f}" for ratio in ratios.values()]
    print(f"| {case.name} | {' | '.join(cells)} |", flush=True)
    return {(case.name, f"{way}: times usual"): ratio for way, ratio in ratios.items()}


_STRETCH = 9
"""Rounds from one test of models to the next, as in a run that tests in every tenth."""


def stretch_of(prepared: Driver) -> Callable[[], None]:
    """Do rounds as a run does between two tests: each begins before the numbers of the one before are read."""
    nobody = Callbacks()

    def stretch() -> None:
        for _ in range(_STRETCH):
            begun = prepared.begin_round()
            prepared.read_numbers(nobody)
            prepared.unread = begun
        prepared.read_numbers(nobody)

    return stretch


def steps(repetitions: int, wanted: Sequence[int]) -> Ratios:
    """Print the time of a step on the clock, and the part of it in which the GPU computes."""
    print(
        "| model | clients x batch | method, precision | step, ms | GPU busy, ms | clock / busy | launches "
        "| peak memory, GiB |\n|---|---|---|---|---|---|---|---|"
    )
    ratios: Ratios = {}
    for case in [STEP_CASES[number] for number in wanted] if wanted else STEP_CASES:
        prepared = simulation(case, "stacked", "cuda")
        stretch, made = stretch_of(prepared), _STRETCH * case.epochs
        stretch()
        torch.cuda.reset_peak_memory_stats()
        spent = statistics.median(seconds(stretch, "cuda") for _ in range(repetitions)) / made
        busy, launches = (amount / made for amount in device_work(stretch))
        setting = f"{case.name} | {case.clients} x {case.batch_size} | `{case.method}`, {case.precision}"
        ratio = spent / busy
        print(
            f"| {setting} | {1e3 * spent:.1f} | {1e3 * busy:.1f} | {ratio:.2f} "
            f"| {launches:.0f} | {torch.cuda.max_memory_allocated() / 2**30:.1f} |",
            flush=True,
        )
        ratios[setting.replace(" | ", ", "), "busy: times clock"] = 1 / ratio
        del prepared, stretch
        torch.cuda.empty_cache()
    return ratios


def keep(ratios: Ratios, path: Path) -> None:
    """Write the ratios into a file, beside those of other settings that are there."""
    kept = {**(read_kept(path) if path.exists() else {}), **ratios}
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("setting", "ratio", "value"))
        writer.writerows((*names, f"{value:.3g}") for names, value in sorted(kept.items()))


def read_kept(path: Path) -> Ratios:
    """Read the ratios that were kept."""
    with path.open(newline="") as file:
        return {(row["setting"], row["ratio"]): float(row["value"]) for row in csv.DictReader(file)}


def slower(ratios: Ratios, kept: Ratios, by: float = 1.1) -> list[str]:
    """Say which ratios fell, by more than measurements differ."""
    return [
        f"{setting}: {what} is {value:.2f}, and was {kept[setting, what]:.2f}"
        for (setting, what), value in ratios.items()
        if (setting, what) in kept and value * by < kept[setting, what]
    ]


def device_work(one_round: Callable[[], None]) -> tuple[float, int]:
    """Tell for how many seconds the GPU computes in a round, and how often something was launched on it."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        seconds(one_round, "cuda")
    kernels = [event for event in profiled.events() if event.device_type == DeviceType.CUDA]
    return sum(event.time_range.elapsed_us() for event in kernels) / 1e6, len(kernels)


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--growth", action="store_true", help="how time and memory grow with clients, instead of the ratios"
    )
    parser.add_argument("--steps", action="store_true", help="on a GPU: time of a step, and the GPU's part of it")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--case", type=int, action="append", default=[], help="only this one, counted from 0")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--against", type=Path, help="say what became slower than in this file")
    parser.add_argument("--keep", type=Path, help="write the ratios into this file")
    arguments = parser.parse_args()
    if arguments.growth:
        growth(arguments.device, arguments.repetitions)
        return
    if arguments.steps:
        ratios = steps(arguments.repetitions, arguments.case)
    else:
        print(
            "| setting (seconds a round) | usual | loop | stacked | loop: times usual | stacked: times usual |\n"
            "|---|---|---|---|---|---|"
        )
        cases = CPU_CASES if arguments.device == "cpu" else GPU_CASES
        ratios = {}
        for case in [cases[number] for number in arguments.case] or cases:
            ratios |= measure(case, arguments.device, arguments.repetitions)
    if arguments.against is not None:
        found = slower(ratios, read_kept(arguments.against))
        print("\n".join(("Slower than before:", *found) if found else ("Nothing became slower.",)))
    if arguments.keep is not None:
        keep(ratios, arguments.keep)


if __name__ == "__main__":
    main()
