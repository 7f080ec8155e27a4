"""Put faults into the methods, one at a time, and see whether their tests notice: ``make mutants``.

    python tests/mutants/run.py                           all of fedstrata/methods and fedstrata/functional
    python tests/mutants/run.py lips functional/lips      some files
    python tests/mutants/run.py --jobs 16 --seconds 500   with so many processes, for so long; call it again to go on

PyTorch and whatever else the tests import is imported once. For each mutant a process is forked, in which the faulty
file takes the place of the right one while FedStrata is imported; the files themselves stay as they are. Verdicts are
kept in ``mutants/`` by file, as long as neither the file nor its tests change. ``mutants/survivors.diff`` shows the
faults that nobody noticed; ``equivalent.toml`` lists those that change nothing.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import importlib.util
import inspect
import json
import os
import re
import resource
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import TypeVar

import pytest
from hypothesis import Phase, settings
from mutations import Mutant, mutants_of
from selection import CONTRACT, PLAIN, ROOT, Suite, sources, suite_of

RESULTS = ROOT / "mutants"
HERE = Path(__file__).parent
EQUIVALENT = tomllib.loads((HERE / "equivalent.toml").read_text()).get("equivalent", [])
TOOL = b"".join((HERE / name).read_bytes() for name in ("mutations.py", "selection.py"))
PRELOADED = (
    "fedstrata", "torch._dynamo", "scipy.stats", "sklearn.datasets", "sklearn.metrics", "pyarrow.parquet",
    "safetensors.torch", "PIL.Image", "_hypothesis_pytestplugin", "hypothesis.internal.entropy",
)  # fmt: skip
"""What the tests import sooner or later, and what takes long to import."""
THRESHOLD, THRESHOLD_FIVE = 90.0, 95.0
FIVE_PAPERS = {
    *(f"fedstrata/methods/{name}.py" for name in ("lips", "transient", "freeze_middle", "fedbn", "ssfl", "random_k")),
    *(f"fedstrata/methods/{name}.py" for name in ("lws", "player", "player_random", "sparse_ft")),
    *(f"fedstrata/functional/{name}.py" for name in ("lips", "ssfl", "lws", "player", "sparse_finetuning", "masks")),
}
"""The files of the methods of the five papers that this package is about."""
PASSED = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
MEMORY = 64 * 2**30
"""The bytes of address space that a mutant may take."""

T = TypeVar("T")


# In a forked process --------------------------------------------------------------------------------------------------


class Faulty(SourceFileLoader):
    """Loads a mutant in the place of its file."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        """Compile the mutant, whatever stands in a cache."""
        return compile(self.source, self.path, "exec", dont_inherit=True)


@dataclass(frozen=True)
class Finder:
    """Finds the mutant first when its module is imported."""

    path: Path
    source: str

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Answer for one module only."""
        if name != ".".join(self.path.relative_to(ROOT).with_suffix("").parts):
            return None
        return importlib.util.spec_from_file_location(name, self.path, loader=Faulty(name, str(self.path), self.source))


@dataclass
class Chosen:
    """Keeps what is about some methods, in the files that test many: the contract suite, and the plain versions."""

    methods: Sequence[str]

    def pytest_collection_modifyitems(self, items: list[pytest.Function]) -> None:
        """Leave out what is about other methods, or about several at once."""
        items[:] = [item for item in items if self._concerns(item)]

    def _concerns(self, item: pytest.Function) -> bool:
        if item.path == CONTRACT:
            method = item.callspec.params.get("method", "+") if hasattr(item, "callspec") else "+"
            return isinstance(method, str) and method.split("(")[0] in self.methods and "+" not in method
        if item.path.parent == PLAIN:
            words = set(re.findall(r"[\w-]+", f"{item.name} {inspect.getsource(item.function)}"))
            return not words.isdisjoint(self.methods)
        return True


def suite_passes(suite: Suite) -> bool:
    """Run tests until one fails: the method's own first, then its part of the contract suite."""
    quick = ["--assert=plain", "--tb=short", *(f"-pno:{one}" for one in ("cacheprovider", "unraisableexception"))]
    options = ["-x", "--doctest-modules", "-p_hypothesis_pytestplugin", "--hypothesis-profile=mutants", *quick]
    stages = (suite.files, (CONTRACT,) if suite.methods else ())
    return all(
        pytest.main([*options, *map(str, stage)], plugins=[Chosen(suite.methods)]) in PASSED
        for stage in stages
        if stage
    )


def passes_with(path: Path, source: str, suite: Suite) -> bool:
    """Whether the tests pass with other text in the place of a file: if it has a fault, nobody noticed."""
    sys.meta_path.insert(0, Finder(path, source))
    return suite_passes(suite)


# In the process that forks --------------------------------------------------------------------------------------------


@dataclass
class Task:
    """Something that is tried in a process of its own."""

    passes: Callable[[], bool]
    limit: float
    output: str = os.devnull
    began: float = 0.0
    processor_seconds: float = 0.0
    pid: int = 0

    def start(self) -> None:
        """Fork. The process tells by its exit status whether its tests passed; one that crashes says no."""
        self.began = time.monotonic()
        self.pid = os.fork()
        if self.pid:
            return
        os.setsid()
        output = os.open(self.output, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        for stream in (0, 1, 2):
            os.dup2(output, stream)
        status = 1
        try:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            status = 0 if self.passes() else 1
        finally:
            os._exit(status)

    def verdict(self) -> str | None:
        """Say what came of it, once something did; one that takes too long is ended."""
        ended, status, usage = os.wait4(self.pid, os.WNOHANG)
        if ended:
            self.processor_seconds = usage.ru_utime + usage.ru_stime
            return "killed" if status else "survived"
        if time.monotonic() - self.began < self.limit:
            return None
        self.end()
        return "timeout"

    def end(self) -> None:
        """End the process and all that it started."""
        os.killpg(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def run_all(tasks: Iterable[tuple[T, Task]], jobs: int, deadline: float) -> Iterator[tuple[T, str, Task]]:
    """Run tasks side by side, and yield the verdict on each; none begins after the deadline."""
    waiting, running = iter(tasks), list[tuple[T, Task]]()
    try:
        while True:
            while len(running) < jobs and time.monotonic() < deadline and (following := next(waiting, None)):
                following[1].start()
                running.append(following)
            if not running:
                return
            time.sleep(0.01)
            for place in range(len(running) - 1, -1, -1):
                label, task = running[place]
                if verdict := task.verdict():
                    del running[place]
                    yield label, verdict, task
    finally:
        for _, task in running:
            task.end()


@dataclass
class File:
    """A file with its mutants, and what is known of them; each line of its results is the verdict on one."""

    name: str

    def __post_init__(self) -> None:
        self.path = ROOT / self.name
        self.suite = suite_of(self.name)
        self.results = RESULTS / f"{self.name.replace('/', '.')}.jsonl"
        self.mutants = mutants_of(self.path.read_text())
        equivalent = {(one["function"], one["change"]) for one in EQUIVALENT if one["file"] == self.name}
        self.mutants = [one for one in self.mutants if (one.function, one.change) not in equivalent]
        self.head = {"made of": [digest(self.path.read_bytes()), digest(self.suite.content()), digest(TOOL)]}
        self.seconds: float | None = None
        self.verdicts: dict[str, str] = {}
        self._read()

    def _read(self) -> None:
        lines = [json.loads(line) for line in self.results.read_text().splitlines()] if self.results.exists() else []
        if not lines or lines[0] != self.head:
            self.results.write_text(json.dumps(self.head) + "\n")
            return
        for line in lines[1:]:
            self.seconds = line.get("seconds", self.seconds)
            self.verdicts |= {line["mutant"]: line["verdict"]} if "mutant" in line else {}

    def note(self, **what: str | float) -> None:
        """Write something down that need not be found out again."""
        with self.results.open("a") as lines:
            lines.write(json.dumps(what) + "\n")
        self._read()

    def unmutated(self) -> Task:
        """Run the tests on the file as it is: they must pass, and their time tells how long a mutant may take."""
        log = str(self.results.with_suffix(".log"))
        return Task(partial(passes_with, self.path, self.path.read_text(), self.suite), 1200, log)

    def waiting(self) -> Iterator[tuple[tuple[File, Mutant], Task]]:
        """Go through the mutants on which there is no verdict."""
        assert self.seconds is not None
        for mutant in self.mutants:
            if _key(mutant) not in self.verdicts:
                yield (
                    (self, mutant),
                    Task(partial(passes_with, self.path, mutant.source, self.suite), 30 + 5 * self.seconds),
                )

    def count(self, verdict: str) -> int:
        """Count the mutants with a verdict."""
        return sum(self.verdicts.get(_key(mutant)) == verdict for mutant in self.mutants)

    def survivors(self) -> list[Mutant]:
        """List the mutants that no test noticed."""
        return [mutant for mutant in self.mutants if self.verdicts.get(_key(mutant)) == "survived"]


def digest(content: bytes) -> str:
    """Make a short text that stands for a long one."""
    return hashlib.sha256(content).hexdigest()[:16]


def _key(mutant: Mutant) -> str:
    return digest(mutant.source.encode())


# What is told ---------------------------------------------------------------------------------------------------------


def row(name: str, files: Sequence[File]) -> tuple[str, float | None]:
    """Set one line of the table, and compute its score; who takes too long counts as noticed."""
    killed, survived, timeouts = (sum(file.count(one) for file in files) for one in ("killed", "survived", "timeout"))
    judged = killed + survived + timeouts
    score = 100 * (killed + timeouts) / judged if judged else None
    told = f"{score:.1f}" if score is not None else ""
    return f"| {name} | {judged} | {killed} | {survived} | {timeouts} | {told} |", score


def report(files: Sequence[File]) -> bool:
    """Print the table, write the survivors down, and say whether enough was noticed."""
    print("\n| file | mutants | killed | survived | timeouts | score in % |\n|---|---|---|---|---|---|")
    for file in files:
        print(row(file.name.removeprefix("fedstrata/"), [file])[0])
    five = [file for file in files if file.name in FIVE_PAPERS]
    enough = True
    for name, group, threshold in (("all", files, THRESHOLD), ("the five papers", five, THRESHOLD_FIVE)):
        line, score = row(f"**{name}**", group)
        enough &= score is None or score >= threshold
        print(line)
    survivors = RESULTS / "survivors.diff"
    survivors.write_text(
        "\n".join(
            f"# {file.name}:{mutant.line} {mutant.function}\n# {mutant.change}\n{mutant.diff}\n"
            for file in files
            for mutant in file.survivors()
        )
    )
    left = sum(len(file.mutants) - len(file.verdicts) for file in files)
    print(f"\n{sum(len(file.survivors()) for file in files)} survivors: {survivors.relative_to(ROOT)}")
    if left:
        print(f"{left} mutants were not tried yet; the same command goes on with them.")
    if not enough:
        print(f"Too few: {THRESHOLD:g} % are asked for, and {THRESHOLD_FIVE:g} % for the methods of the five papers.")
    return enough and not left


def chosen(words: Sequence[str]) -> list[str]:
    """Find the files that are meant: a method (``lips``), a file (``functional/lips``), a folder (``mechanisms``)."""
    names = list(sources())
    if not words:
        return names
    found = []
    for word in words:
        word = word.replace("-", "_").removesuffix(".py").removeprefix("fedstrata/")
        meant = [name for name in names if f"fedstrata/{word}.py" == name or f"fedstrata/methods/{word}.py" == name]
        meant = meant or [name for name in names if f"/{word}/" in name or f"/{word}.py" in name]
        if not meant:
            sys.exit(f"There is no file '{word}' in fedstrata/methods or fedstrata/functional.")
        found += meant
    return list(dict.fromkeys(found))


def prepare() -> None:
    """Import what takes long, on one thread and without a GPU, so that it can be forked."""
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(ROOT)
    sys.path.insert(0, str(ROOT))
    for module in PRELOADED:
        import_module(module)
    phases = (Phase.explicit, Phase.generate)
    settings.register_profile("mutants", deadline=None, derandomize=True, database=None, phases=phases)
    RESULTS.mkdir(exist_ok=True)
    gc.freeze()


def main() -> int:
    """Try the mutants that were not tried yet, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="methods, such as lips, or files, such as functional/lips")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="how many processes")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin with no mutant after this time")
    asked = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that what was forked ends too.
    deadline = time.monotonic() + asked.seconds
    prepare()
    files = [File(name) for name in chosen(asked.files)]
    broken = []
    unknown = [(file, file.unmutated()) for file in files if file.seconds is None]
    for file, verdict, task in run_all(unknown, asked.jobs, deadline):
        if verdict == "survived":
            file.note(seconds=time.monotonic() - task.began)
        else:
            broken.append(file.results.with_suffix(".log").relative_to(ROOT))
    if broken:
        print("Tests fail already without any fault; see:", *broken, sep="\n")
        return 2
    known = [file for file in files if file.seconds is not None]
    tasks = [task for file in sorted(known, key=lambda file: -(file.seconds or 0)) for task in file.waiting()]
    begun = time.monotonic()
    for done, ((file, mutant), verdict, task) in enumerate(run_all(tasks, asked.jobs, deadline), 1):
        file.note(mutant=_key(mutant), verdict=verdict, processor_seconds=round(task.processor_seconds, 2))
        if done % 50 == 0 or done == len(tasks):
            print(f"{done} of {len(tasks)} mutants after {time.monotonic() - begun:.0f} s", flush=True)
    return 0 if report(files) else 1


if __name__ == "__main__":
    sys.exit(main())
