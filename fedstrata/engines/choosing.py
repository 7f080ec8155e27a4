"""Which of several ways of computing the same is the fastest here: measured once, and kept in a file of the cache.

Different ways add up in different orders, so the choice decides the last bits of a result. It is therefore fixed for a
run, and kept for the runs to come on the same kind of device with the same versions: they repeat bit for bit. A run
that must not depend on a clock at all (``--deterministic``) does not measure, but takes a rule by shape; see
:mod:`fedstrata.engines.convolution`.
"""

from __future__ import annotations

import fcntl
import json
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import IO

import torch

from fedstrata.data.cache import cache_directory
from fedstrata.engines.streams import side_stream
from fedstrata.errors import FedStrataError, FedStrataWarning
from fedstrata.files import make_folder, to_json, write_atomically

Choice = dict[str, str]
"""For each part of a computation the name of the way that it takes."""
_REPEATS = 5


class Choices:
    """Choices by case, in this process and in a file; what is in the file was chosen first and stays chosen."""

    def __init__(self, path: Path, ways: Collection[str]) -> None:
        self.path, self.ways = path, ways
        self._known: dict[str, Choice] | None = None

    def remembered(self, case: str) -> Choice | None:
        """Tell what was chosen for a case, here or in an earlier run."""
        if self._known is None:
            self._known = self._read()
        return self._known.get(case)

    def choose(self, case: str, measure: Callable[[], Choice]) -> Choice:
        """Take what was chosen before, or measure, and keep the choice.

        Of processes that measure the same case at once, the first to write decides for all.
        """
        known = self.remembered(case)
        if known is None:
            assert self._known is not None
            known = self._known[case] = measure()
            try:
                with self._locked():
                    kept = self._read()
                    known = kept.setdefault(case, known)
                    write_atomically(self.path, to_json(dict(sorted(kept.items()))))
                    self._known |= kept
            except (FedStrataError, OSError) as error:
                text = f"What is the quickest is measured in every run anew, and the last bits may differ: {error}"
                warnings.warn(text, FedStrataWarning, stacklevel=2)
        return known

    def _read(self) -> dict[str, Choice]:
        try:
            content = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            reason = str(error)
        else:
            if isinstance(content, dict):
                return {case: choice for case, choice in content.items() if self._is_choice(choice)}
            reason = "it holds no JSON object"
        text = f"'{self.path}' is not used and will be written anew: {reason}."
        warnings.warn(text, FedStrataWarning, stacklevel=2)
        return {}

    def _is_choice(self, choice: object) -> bool:
        return isinstance(choice, dict) and all(way in self.ways for way in choice.values())

    @contextmanager
    def _locked(self) -> Iterator[IO[bytes]]:
        make_folder(self.path.parent)
        with (self.path.parent / ".lock").open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file


def choices_file(kind: str, device: str) -> Path:
    """Name the file for a kind of computation: measurements hold for one kind of device and set of versions."""
    try:
        triton = version("triton")
    except PackageNotFoundError:
        triton = "none"
    name = f"{device}-torch-{torch.__version__}-triton-{triton}"
    plain = "".join(sign if sign.isalnum() or sign in ".-" else "-" for sign in name)
    return cache_directory() / kind / f"{plain}.json"


def quickest(seconds: Mapping[str, float]) -> str:
    """Name the quickest way; among equals the first."""
    return min(seconds, key=seconds.__getitem__)


def milliseconds_on_gpu(work: Callable[[], object]) -> float:
    """Time work on the current GPU, from a recording of it, so that what the host needs to launch it does not count."""
    stream = side_stream(torch.cuda.current_device())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        torch.cuda.empty_cache()  # while something is recorded, memory that earlier recordings left cannot be taken
        recording = torch.cuda.CUDAGraph()
        stream.synchronize()
        recording.capture_begin(capture_error_mode="thread_local")
        try:
            work()
        finally:
            recording.capture_end()
        recording.replay()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            recording.replay()
            event.record()
        stream.synchronize()
    torch.cuda.current_stream().wait_stream(stream)
    return min(float(before.elapsed_time(after)) for before, after in pairwise(events))
