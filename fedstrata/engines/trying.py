"""Which of some ways to run a round is the fastest: short trials with the run's own clients and batches.

A round is as long as its steps. Clients that step together cost something for each of them and something for the step
itself, so two trials, of few clients and of many, tell what all of them cost; unequal clients step in smaller and
smaller groups, which are counted and not tried. Trials take a bounded time, and a small share of a short run.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import numpy as np

from fedstrata.engines.batches import Work

_FEW_CLIENTS = 2
_STEPS = range(2, 9)
"""So few steps a trial has where they are long, and so many where they are short."""
_TRIAL_SECONDS = 0.1
"""What a trial grows to, in clients, where steps are short."""
_ALL_SECONDS = 1.0
_MOST_SECONDS = 5.0
_SHARE_OF_LONG_RUN, _SHARE_OF_SHORT_RUN = 0.002, 0.05
"""What all trials take together: about a second, more where that is a small share of a run, less where it is a large
one. Each of the first two ways is tried once in any case, and what is like one that may be the fastest.
"""
_RUNG = 4
"""How many times more clients, or steps, a closer look has at the least, and by the powers of which they grow: so ways
that differ in their threads alone come to the same numbers, and share what is prepared for them.
"""
_CLOSE = 1.5
"""What would even at its best take so many times longer than the fastest is not tried again."""
_REPETITIONS = 3
_MOST_COUNTED = 200

Choice = TypeVar("Choice")
Round = Callable[[], object]


@dataclass(frozen=True)
class Extent:
    """What a round consists of: steps of single clients, and groups of clients that make a step together."""

    client_steps: float
    groups: float

    @classmethod
    def of(cls, work: Work, sizes: Sequence[int] | np.ndarray) -> Extent:
        """Count the steps of clients of some sizes that train at once; a step groups those with batches of one size.

        >>> Extent.of(Work(epochs=1, steps=None, batch_size=10, last_batch="keep"), [10, 20, 25])
        Extent(client_steps=6, groups=3)
        """
        client_steps, together = 0, set()
        for held, count in zip(*(found.tolist() for found in np.unique(sizes, return_counts=True)), strict=True):
            size = work.samples or held
            each, steps = work.batches_per_epoch(size), range(*work.stretch_of(size))
            client_steps += count * len(steps)
            together |= {(step, min(work.batch_size, size - step % each * work.batch_size)) for step in steps}
        return cls(client_steps, len(together))


@dataclass(frozen=True)
class Trial:
    """What was tried, and how long it took."""

    extent: Extent
    seconds: float


def estimate(whole: Extent, trials: Sequence[Trial], at_best: bool = False) -> float:
    r"""Estimate how long a round takes: :math:`\alpha` for each group and :math:`\beta` for each client's step, from
    the last two trials, neither of them below zero; from a single trial, in proportion to clients' steps, or
    ``at_best`` to groups, as if more clients in a group cost nothing.

    >>> few, many = Trial(Extent(4, 2), 0.08), Trial(Extent(40, 2), 0.44)
    >>> round(estimate(Extent(100, 10), [few, many]), 6)  # 0.02 for each group and 0.01 for each step of a client
    1.2
    """
    last, first = trials[-1], trials[-2] if len(trials) > 1 else trials[-1]
    proportional = last.seconds * whole.client_steps / last.extent.client_steps
    of_groups = last.seconds * whole.groups / last.extent.groups
    if at_best and len(trials) == 1:
        return min(proportional, of_groups)
    determinant = first.extent.groups * last.extent.client_steps - last.extent.groups * first.extent.client_steps
    if determinant <= 0:
        return proportional
    group = (first.seconds * last.extent.client_steps - last.seconds * first.extent.client_steps) / determinant
    step = (first.extent.groups * last.seconds - last.extent.groups * first.seconds) / determinant
    if group <= 0:
        return proportional
    if step <= 0:
        return of_groups
    return group * whole.groups + step * whole.client_steps


def spread(sizes: np.ndarray, count: int) -> list[int]:
    """Choose some clients, from the smallest to the largest in even distances, in the order of their numbers.

    >>> spread(np.array([5, 9, 1, 7, 3]), 1), spread(np.array([5, 9, 1, 7, 3]), 2)
    ([0], [3, 4])
    """
    order = np.argsort(sizes, kind="stable")
    middle = ((np.arange(count) + 0.5) * len(order) / count).astype(np.int64)
    return sorted(order[middle].tolist())


@dataclass
class Candidate(Generic[Choice]):
    """A way to run rounds, on trial: ``prepare`` makes a round of some clients with so many steps each, which has
    nothing left to do that is done once for a kind of step, and ``at_once`` is how many clients train together.

    ``like`` is a way for which the same is prepared, so that trials of this one cost little more than their rounds.
    """

    choice: Choice
    at_once: int
    prepare: Callable[[Sequence[int], int], Round]
    like: Candidate[Choice] | None = None
    trials: list[Trial] = field(default_factory=list)
    _round: Round | None = None
    _tried: list[tuple[int, int]] = field(default_factory=list)
    """How many clients and how many steps the trials had."""

    def look(self, work: Work, sizes: np.ndarray, steps: int) -> None:
        """Try it with few clients, or as often as the one was tried that it is like."""
        before = self.like._tried if self.like is not None else []
        for clients, of_each in before or [(min(_FEW_CLIENTS, self.at_once), steps)]:
            self._try(work, sizes, of_each, clients)

    def look_closer(self, work: Work, sizes: np.ndarray, steps: int, seconds: float) -> bool:
        """Try it with more clients, as many as take about so many seconds, or, when all train at once, with more of
        their steps, over which a round's own work spreads; tell whether these are more.
        """
        times = seconds / max(self.trials[-1].seconds, 1e-9)
        clients, of_each = self._tried[-1]
        if clients < self.at_once:
            now, most = clients, self.at_once
        else:
            now, most = of_each, int(work.steps_of(sizes[spread(sizes, clients)]).max())
        rungs = int(math.log(max(1.5 * times, 1.0), _RUNG))  # more clients at once take less than in proportion
        more = most if most <= now * times else min(most, now * _RUNG**rungs)
        if more <= now:
            return False
        if clients < self.at_once:
            self._try(work, sizes, steps, more)
        else:
            self._try(work, sizes, more, clients)
        return True

    def again(self) -> None:
        """Repeat the last trial; the faster one counts."""
        assert self._round is not None
        last = self.trials[-1]
        self.trials[-1] = replace(last, seconds=min(last.seconds, _seconds(self._round)))

    def _try(self, work: Work, sizes: np.ndarray, steps: int, clients: int) -> None:
        ids = spread(sizes, clients)
        self._round = self.prepare(ids, steps)
        self._tried.append((clients, steps))
        self.trials.append(Trial(Extent.of(replace(work, steps=steps), sizes[ids]), _seconds(self._round)))

    def whole(self, work: Work, sizes: np.ndarray, participants: int) -> Extent:
        """Count what a round of so many participants consists of: some that train at once, then the next.

        Of very many, some hundreds stand for all.
        """
        chunks = min(max(1, _MOST_COUNTED // self.at_once), -(-participants // self.at_once))
        counted = min(participants, chunks * self.at_once)
        chosen = sizes[spread(sizes, counted)]
        parts = [Extent.of(work, chosen[first : first + self.at_once]) for first in range(0, counted, self.at_once)]
        times = participants / counted
        return Extent(times * sum(part.client_steps for part in parts), times * sum(part.groups for part in parts))

    def round_seconds(self, work: Work, sizes: np.ndarray, participants: int) -> float:
        """Estimate how long a round of so many participants takes."""
        return estimate(self.whole(work, sizes, participants), self.trials)


def fastest(
    candidates: Sequence[Candidate[Choice]], work: Work, sizes: np.ndarray, participants: int, rounds: int
) -> Choice:
    """Find the fastest of some ways to run rounds; the first is taken where several are."""
    return fastest_tried(candidates, work, sizes, participants, rounds).choice


def fastest_tried(
    candidates: Sequence[Candidate[Choice]], work: Work, sizes: np.ndarray, participants: int, rounds: int
) -> Candidate[Choice]:
    """Find the fastest of some ways, with the trials that tell how long its rounds take."""
    began = time.perf_counter()
    steps = _short_steps(min(candidates, key=lambda candidate: candidate.at_once))
    tried: list[Candidate[Choice]] = []

    wholes = {id(candidate): candidate.whole(work, sizes, participants) for candidate in candidates}

    def expected(candidate: Candidate[Choice]) -> float:
        return estimate(wholes[id(candidate)], candidate.trials)

    def left() -> float:
        run = rounds * min(map(expected, tried))
        allowed = max(_ALL_SECONDS, min(_MOST_SECONDS, _SHARE_OF_LONG_RUN * run))
        return min(allowed, _SHARE_OF_SHORT_RUN * run) - (time.perf_counter() - began)

    def at_best(candidate: Candidate[Choice]) -> float:
        return estimate(wholes[id(candidate)], candidate.trials, at_best=True)

    def near() -> list[Candidate[Choice]]:
        return [one for one in tried if at_best(one) <= _CLOSE * min(map(expected, tried))]

    for number, candidate in enumerate(candidates):
        if number < 2 or left() > 0 or candidate.like in near():
            candidate.look(work, sizes, steps)
            tried.append(candidate)
            if candidate in near():
                candidate.look_closer(work, sizes, steps, min(_TRIAL_SECONDS, left() / 4))
    for _ in range(_REPETITIONS):
        close = near()
        for candidate in close if len(close) > 1 else ():
            if left() > 0 and not candidate.look_closer(work, sizes, steps, left() / 4):
                candidate.again()
    return min(tried, key=expected)


def try_alone(candidate: Candidate[Choice], work: Work, sizes: np.ndarray) -> Candidate[Choice]:
    """Try the only way that there is, where its time is to be known."""
    steps = _short_steps(candidate)
    candidate.look(work, sizes, steps)
    candidate.look_closer(work, sizes, steps, _ALL_SECONDS)
    return candidate


def _short_steps(candidate: Candidate[Choice]) -> int:
    """Tell how many steps a trial has: by how long one of a single client takes."""
    one = _seconds(candidate.prepare([0], 1))
    return min(max(int(_TRIAL_SECONDS / 2 / max(one, 1e-9)), _STEPS[0]), _STEPS[-1])


def _seconds(one_round: Round) -> float:
    began = time.perf_counter()
    one_round()
    return time.perf_counter() - began
