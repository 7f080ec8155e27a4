"""What stands below a table of methods, in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from fedstrata.report.formats import plural
from fedstrata.report.rows import Row, some_dropped_out, some_validated


def notes(rows: Sequence[Row]) -> list[str]:
    """Say in sentences what a table of these rows cannot show: how many seeds, which test, where none was possible."""
    compared = [(row, row.comparison) for row in rows if row.comparison is not None]
    tested = [comparison for _, comparison in compared if comparison.p_value is not None]
    counts = sorted({len(row.seeds) for row in rows})
    said = []
    lost = [f"{row.label} {diverged_in(row.diverged, len(row.seeds))}" for row in rows if row.diverged]
    if lost:
        said.append(f"{_listed(lost)}: the training loss of the last round is not a finite number.")
    if counts == [1]:
        each = " each" if len(rows) > 1 else ""
        said.append(f"One seed{each}: no standard deviation over seeds, and no test.")
    elif counts:
        seeds = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        said.append(f"Mean ± sample standard deviation over {seeds} seeds.")
    if tested:
        correction = f", corrected after Holm for {len(tested)} methods" if len(tested) > 1 else ""
        said.append(f"p: two-sided paired t-test over seeds against {reference_name(rows)}{correction}.")
    if counts != [1]:
        reasons: dict[str, list[str]] = {}
        for row, comparison in compared:
            if comparison.note:
                reasons.setdefault(comparison.note, []).append(row.label)
        for note, labels in reasons.items():
            said.append(note if len(labels) == len(compared) else f"{_listed(labels)}: {note}")
    if some_validated(rows):
        said.append(
            "chosen: of the models that were best on the validation samples, which is the number to report; best looks "
            "at the test samples to find its round."
        )
    early = [f"{row.label} {_after_rounds(row)}" for row in rows if row.ended]
    if early:
        said.append(f"Ended early: {_listed(early)}.")
    if some_dropped_out(rows):
        said.append(
            "took part: of the clients that were asked, those whose replies were merged, in the mean over the rounds."
        )
    unequal = [f"{row.label} {row.fairness.mean:.4f}" for row in rows if row.fairness is not None]
    if len(unequal) > 1:
        said.append(f"Fairness, the variance of the clients' accuracies (less is fairer): {_listed(unequal)}.")
    better_off = [f"{row.label} {100 * row.incentive.mean:.0f} %" for row in rows if row.incentive is not None]
    if better_off:
        said.append(
            "Incentive, the part of the clients that fare better than with both local and fedavg, of the same seed: "
            f"{_listed(better_off)}."
        )
    spent = [f"{row.label} {row.epsilon.mean:.3g}" for row in rows if row.epsilon is not None]
    if spent:
        said.append(f"Epsilon spent by the client that took part most often: {_listed(spent)}.")
    without = [f"{row.label} {row.without_state}" for row in rows if row.without_state]
    if without:
        said.append(f"Sites that had lost their state and went on without it: {_listed(without)}.")
    return said


def diverged_in(seeds: int, of: int) -> str:
    """Say in how many of a method's seeds training has diverged.

    >>> diverged_in(1, 2)
    'diverged in 1 of 2 seeds'
    """
    return f"diverged in {seeds} of {plural(of, 'seed')}"


def _after_rounds(row: Row) -> str:
    """Say after which rounds the runs of a row ended, and how many they were to have."""
    first, last = min(row.ended)[0], max(row.ended)[0]
    after = f"after round {first}" if first == last else f"after rounds {first} to {last}"
    some = f" with {len(row.ended)} of {len(row.seeds)} seeds" if len(row.ended) < len(row.seeds) else ""
    return f"{after} of {max(of for _, of in row.ended)}{some}"


def reference_name(rows: Sequence[Row]) -> str:
    """Name what the rows are tested against, in few words."""
    references = list(dict.fromkeys(row.comparison.reference for row in rows if row.comparison is not None))
    if len(references) < 2:
        return references[0] if references else rows[0].label
    return f"{references[0].split(' [', 1)[0]} at the same setting"


def _listed(labels: Sequence[str], limit: int = 4) -> str:
    shown = ", ".join(labels[:limit])
    return shown if len(labels) <= limit else f"{shown} and {len(labels) - limit} more"
