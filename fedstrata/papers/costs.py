"""What results cost and what they were made with, in sentences."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from fedstrata.papers.keeping import Kept
from fedstrata.report.formats import data_size, duration, plural


def cost_line(kept: Sequence[Kept], seen: Iterable[str] = (), of: str = "cell") -> str:
    """Runs, computing, bytes, operations, devices, software and commits; runs that were told of before cost no more."""
    runs = {one.settings: one for one in kept}
    before = set(seen)
    new = [one for settings, one in runs.items() if settings not in before]
    if not new:
        return f"none; its {plural(len(runs), 'run')} are those of parts above. {_made_with(list(runs.values()), of)}"
    shared = f" and {len(runs) - len(new)} of parts above" if len(new) < len(runs) else ""
    times = [one.seconds for one in new if one.seconds is not None]
    time = f"{duration(sum(times))} of computing" if times else "computing time not kept"
    if times and len(times) < len(new):
        time += f" for {len(times)} of them (not kept for the others)"
    flops = [one.flops for one in new if one.flops is not None]
    work = f", {_power(sum(flops))} operations of training" if len(flops) == len(new) else ""
    sent = data_size(sum(one.bytes for one in new))
    return f"{plural(len(new), 'run')}{shared}, {time}, {sent} sent{work}. {_made_with(list(runs.values()), of)}"


def _power(value: float) -> str:
    return re.sub(r"e\+0*", "e", f"{value:.1e}")


def _made_with(kept: Sequence[Kept], of: str) -> str:
    """Name device, software and commit, and where these differ, which rows and columns or papers have which."""
    device, software, commit = (
        _by([(value(one) or "unknown", one) for one in kept], of)
        for value in (lambda one: one.device, lambda one: one.software, _commit)
    )
    return f"On {device} with {software}; commit {commit}."


def _commit(one: Kept) -> str:
    return f"not kept (version {one.commit})" if re.fullmatch(r"\d+(\.\w+)+", one.commit) else f"`{one.commit}`"


def _by(values: Sequence[tuple[str, Kept]], of: str) -> str:
    having: defaultdict[str, list[Kept]] = defaultdict(list)
    for value, one in values:
        having[value].append(one)
    if len(having) == 1:
        return next(iter(having))
    cells = [(one.row, one.column) for _, one in values]
    names = {
        value: cells_named(list(dict.fromkeys((one.row, one.column) for one in ones)), cells)
        if of == "cell"
        else ", ".join(dict.fromkeys(one.paper for one in ones))
        for value, ones in having.items()
    }
    return " and ".join(f"{value} for {names[value]}" for value in sorted(names))


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
