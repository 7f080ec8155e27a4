"""What results cost and what they were made with, in sentences."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fedstrata.papers.keeping import Kept
from fedstrata.report.formats import data_size, duration, numbered, plural


@dataclass(frozen=True)
class Cost:
    """What runs took, each counted once, though several numbers may be of it."""

    runs: int
    seconds: float
    timed: int
    """Of how many runs the seconds are."""
    bytes: int
    devices: tuple[str, ...]

    @classmethod
    def of(cls, kept: Iterable[Kept]) -> Cost:
        """Add up."""
        runs = {one.settings: one for one in kept}.values()
        times = [one.seconds for one in runs if one.seconds is not None]
        devices = tuple(sorted({one.device for one in runs if one.device}))
        return cls(len(runs), sum(times), len(times), sum(one.bytes for one in runs), devices)

    @property
    def time(self) -> str:
        """The time of computing, in words."""
        if not self.timed:
            return "not kept"
        return duration(self.seconds) + (f" for {self.timed} of them" if self.timed < self.runs else "")


def cost_line(kept: Sequence[Kept], seen: Iterable[str] = ()) -> str:
    """Runs, computing, bytes, operations, devices, software and commits; runs that were told of before cost no more."""
    runs = {one.settings: one for one in kept}
    before = set(seen)
    new = [one for settings, one in runs.items() if settings not in before]
    if not new:
        return f"none; its {plural(len(runs), 'run')} are those of parts above. {_made_with(list(runs.values()))}"
    shared = f" and {len(runs) - len(new)} of parts above" if len(new) < len(runs) else ""
    cost = Cost.of(new)
    time = f"{duration(cost.seconds)} of computing" if cost.timed else "computing time not kept"
    if 0 < cost.timed < cost.runs:
        time += f" for {cost.timed} of them (not kept for the others)"
    flops = [one.flops for one in new if one.flops is not None]
    work = f", {_power(sum(flops))} operations of training" if len(flops) == len(new) else ""
    told = f"{plural(cost.runs, 'run')}{shared}, {time}, {data_size(cost.bytes)} sent{work}"
    return f"{told}. {_made_with(list(runs.values()))}"


def _power(value: float) -> str:
    return re.sub(r"e\+0*", "e", f"{value:.1e}")


def _made_with(kept: Sequence[Kept]) -> str:
    """Name device, software and commit, and where these differ, which rows and columns have which."""
    device, software, commit = (
        _by([(value(one) or "unknown", one) for one in kept])
        for value in (lambda one: one.device, lambda one: one.software, _commit)
    )
    return f"On {device} with {software}; commit {commit}."


def _commit(one: Kept) -> str:
    return f"not kept (version {one.commit})" if re.fullmatch(r"\d+(\.\w+)+", one.commit) else f"`{one.commit}`"


def _by(values: Sequence[tuple[str, Kept]]) -> str:
    having: defaultdict[str, list[Kept]] = defaultdict(list)
    for value, one in values:
        having[value].append(one)
    if len(having) == 1:
        return next(iter(having))
    cells = [(one.row, one.column) for _, one in values]
    there = {value: dict.fromkeys((one.row, one.column) for one in ones) for value, ones in having.items()}
    many = {cell for cell, count in Counter(cell for own in there.values() for cell in own).items() if count > 1}
    told = []
    for value in sorted(having):
        alone, shared = ([cell for cell in there[value] if (cell in many) is also] for also in (False, True))
        seeds = sorted({one.seed for one in having[value] if (one.row, one.column) in many})
        named = [cells_named(alone, cells)] if alone else []
        named += [f"{cells_named(shared, cells)}, {numbered('seed', seeds)}"] if shared else []
        told.append(f"{value} for {'; '.join(named)}")
    return " and ".join(told)


def cells_named(cells: Sequence[tuple[str, str]], among: Sequence[tuple[str, str]]) -> str:
    """Name cells by their rows, and those of the same columns together; all rows of columns as such."""
    columns: defaultdict[str, list[str]] = defaultdict(list)
    for row, column in cells:
        columns[row].append(column)
    rows: defaultdict[tuple[str, ...], list[str]] = defaultdict(list)
    for row, of_row in columns.items():
        rows[tuple(of_row)].append(row)
    told = []
    for there, names in rows.items():
        every = {row for row, column in among if column in there} == set(names) and len(names) > 1
        where = ", ".join(filter(None, there))
        told.append(f"{'all rows' if every else ', '.join(names)}" + (f" ({where})" if where else ""))
    return "; ".join(told)
