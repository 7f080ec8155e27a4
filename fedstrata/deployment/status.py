"""How a run over real sites stands: its log and its status, in files for those who look on."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedstrata import files
from fedstrata.deployment.federation import Standing
from fedstrata.deployment.protocol import SECURE_KINDS
from fedstrata.deployment.server import Deployment
from fedstrata.errors import FedStrataError
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.metrics import MetricLog

STATUS_FILE = "status.json"
LOG_FILE = "deployment.log"


class LogFile:
    """A log for people that is also kept in a file, with the time of each line, as soon as its folder exists."""

    def __init__(self, path: Path, show: Callable[[str], None]) -> None:
        self.path = path
        self.show = show
        self._lines: list[str] = []

    def __call__(self, line: str) -> None:
        """Show and keep a line."""
        self.show(line)
        self._lines.append(f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M:%S} {' '.join(line.split())}\n")
        if self.path.parent.is_dir():
            with files.explained(self.path), self.path.open("a", encoding="utf-8", errors="backslashreplace") as file:
                file.writelines(self._lines)
            self._lines.clear()


class StatusFile:
    """Writes how a run stands where 'fedstrata status' finds it."""

    def __init__(self, out: Path) -> None:
        self.path = out / STATUS_FILE
        self.experiment: dict[str, Any] = {}
        self._last = ""

    @classmethod
    def begin(cls, deployment: Deployment) -> StatusFile:
        """Make the folder of a run that is to begin, or to go on, so that it can be looked at while sites are awaited.

        A folder that holds something else is refused.
        """
        deployment.begun()
        files.make_folder(deployment.out)
        files.WriteLock(deployment.out).release()  # where another server is at work, its status stays
        status = cls(deployment.out)
        described = deployment.ingredients.describe(deployment.experiment_of_sites)
        status.experiment = {"method": described.method, "rounds": described.rounds}
        waiting = tuple(name for name in deployment.names if name not in deployment.removed)
        status(Standing("hello 0.0", (), waiting, tuple(deployment.removed)))
        return status

    def __call__(self, standing: Standing) -> None:
        """Write a standing that differs from the last one."""
        text = json.dumps({**dataclasses.asdict(standing), **self.experiment}) + "\n"
        if text != self._last and self.path.parent.is_dir():
            files.write_atomically(self.path, text)
            self._last = text


def status_of(out: Path) -> dict[str, Any]:
    """Tell how a run stands, from its folder alone, from the moment on when its server was started."""
    path = out / STATUS_FILE
    standing = files.from_json(files.read_bytes(path), path) if path.exists() else {}
    if not out.is_dir():
        raise FedStrataError(f"There is no run folder '{out}'; give the --out folder of 'fedstrata server'.")
    begun = not standing or (out / "experiment.toml").exists()
    folder = RunFolder.open(out) if begun else None
    metrics = MetricLog() if folder is None else folder.metrics()
    accuracy, done = metrics.series("client_after.accuracy.mean")[1], metrics.series("train.loss")[0]
    totals = {way: int(metrics.series(f"bytes.{way}")[1].sum()) for way in ("up", "down")}
    network = {way: int(metrics.series(f"network.{way}")[1].sum()) for way in ("up", "down")}
    finished = folder is not None and folder.finished
    return {
        "method": str(standing.get("method", "")) if folder is None else folder.experiment.method,
        "state": "finished" if finished else doing(str(standing.get("question", ""))),
        "rounds_done": int(done[-1]) if len(done) else 0,
        "rounds": int(standing.get("rounds", 0)) if folder is None else folder.experiment.rounds,
        "accuracy": float(accuracy[-1]) if len(accuracy) else None,
        "bytes_up": totals["up"],
        "bytes_down": totals["down"],
        "network_up": network["up"],
        "network_down": network["down"],
        **{key: list(standing.get(key, ())) for key in ("answered", "waiting", "left_out")},
    }


def doing(question: str) -> str:
    """Say in words what a server does that has put a question to its sites.

    >>> doing("train 3.0")
    'training in round 3'
    """
    kind, _, place = question.partition(" ")
    round = int(place.partition(".")[0] or 0)
    words = {
        "hello": "waiting for the sites",
        "statistics": "adding up the statistics of all samples",
        "survey": f"asking the sites before round {round}",
        "adopt": f"telling the sites before round {round}",
        "train": f"training in round {round}",
        "test": f"testing after round {round - 1}",
        "adapt": f"adapting after round {round - 1}",
        **dict.fromkeys(SECURE_KINDS, f"adding up under masks in round {round}"),
    }
    return words.get(kind, "not begun")
