"""What it would cost to run a part: operations, bytes, and minutes on this device, after two rounds of each setting."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fedstrata import api
from fedstrata.experiment import Experiment
from fedstrata.papers.running import Planned
from fedstrata.progress import Progress
from fedstrata.runs.preparing import Ingredients, NamedData

ROUNDS = 2
"""The first round also prepares; the second is one of many."""


@dataclass(frozen=True)
class Price:
    """What the runs of a setting, one for each seed, still cost in all."""

    setting: str
    runs: int
    rounds: int
    flops: float
    bytes: float
    seconds: float


def price(planned: Planned, shown: Progress) -> list[Price]:
    """Price what is still to do, setting by setting; nothing is written."""
    rounds: Counter[Experiment] = Counter()
    runs: Counter[Experiment] = Counter()
    names: dict[Experiment, str] = {}
    for run in planned.to_do:
        setting = run.experiment.with_changes({"seed": 0})
        runs[setting] += 1
        rounds[setting] += run.rounds_left
        names[setting] = ", ".join(filter(None, (run.experiment.method, run.setting)))
    data = Ingredients(named=NamedData())
    prices = []
    for setting, count in runs.items():
        shown.begin(names[setting])
        prices.append(_price(names[setting], setting, count, rounds[setting], data, shown))
    return prices


def rounds_to_price(planned: Planned) -> tuple[int, int]:
    """How many settings are tried, and how many rounds that takes."""
    settings = {run.experiment.with_changes({"seed": 0}) for run in planned.to_do}
    return len(settings), sum(min(ROUNDS, setting.rounds) for setting in settings)


def _price(name: str, setting: Experiment, runs: int, rounds: int, data: Ingredients, shown: Progress) -> Price:
    short = setting.with_changes({"rounds": min(ROUNDS, setting.rounds), **_within(setting)})
    result = api.carry_out(short, data, None, (), shown)
    final, clock = result.summary["final"], _last_round(result)
    traffic = final.get("bytes.up", 0.0) + final.get("bytes.down", 0.0)
    return Price(name, runs, rounds, rounds * final["train.flops"], rounds * traffic, rounds * clock)


def _within(setting: Experiment) -> Mapping[str, object]:
    """Let nobody join after the end."""
    joins = setting.join_round is not None and setting.join_round > ROUNDS
    return {"late_clients": 0, "join_round": None} if joins else {}


def _last_round(result: api.Result) -> float:
    """The seconds of the last round."""
    assert result.driver is not None
    table = result.driver.timings.to_table().to_pydict()
    last = max(table["round"])
    pairs: Iterable[tuple[int, float]] = zip(table["round"], table["seconds"], strict=True)
    return sum(seconds for round, seconds in pairs if round == last)
