"""Fifty methods, a thousand clients and ten thousand rounds: the page stays small, and a browser draws it."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import CHROMIUM, running

from fedstrata.experiment import Experiment
from fedstrata.report.page import report
from fedstrata.report.reading import Run
from fedstrata.runs.folder import RunFolder
from fedstrata.runs.metrics import CLASSES_SCHEMA, DIAGNOSTICS_SCHEMA, TimingLog

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

METHODS, CLIENTS, ROUNDS, LAYERS, LABELS = 50, 1_000, 10_000, 20, 10
LIMIT = 3_000_000


@dataclass(frozen=True)
class LargeRun(Run):
    """A run whose numbers are made when they are asked for, since to write so many takes minutes."""

    number: int

    path = property(lambda self: Path(f"/runs/{self.number}"))
    finished = property(lambda self: True)
    split_hash = property(lambda self: "0123456789abcdef")
    environment = property(lambda self: {})
    timings = property(lambda self: TimingLog())

    @property
    def draws(self) -> np.random.Generator:
        return np.random.default_rng(self.number)

    @cached_property
    def experiment(self) -> dict[str, Any]:
        method = f"fedprox(mu={self.number / 1000})"
        return dict(Experiment(method=method, clients=CLIENTS, rounds=ROUNDS).to_mapping())

    @cached_property
    def data(self) -> dict[str, Any]:
        counts = np.random.default_rng(0).integers(0, 30, (CLIENTS, LABELS))
        sizes = counts.sum(1).tolist()
        names = [str(label) for label in range(LABELS)]
        described = {"label_counts": counts.tolist(), "sizes": sizes, "test_sizes": sizes, "class_names": names}
        return {"dataset": "digits", "split_hash": self.split_hash, **described}

    @cached_property
    def series(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        rounds = np.arange(1, ROUNDS + 1)
        curve = 1 - np.exp(-rounds / 3000) + self.draws.normal(0, 0.02, ROUNDS)
        named = ("client_before", "client_after", "global_on_clients")
        names = [
            f"{name}.{kind}.{end}" for name in named for kind in ("accuracy", "loss") for end in ("mean", "worst10")
        ]
        return dict.fromkeys((*names, "train.loss", "bytes.up", "bytes.down"), (rounds, curve))

    @cached_property
    def clients(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        values = self.draws.uniform(0, 1, CLIENTS)
        return {f"{name}.accuracy": (np.arange(CLIENTS), values) for name in ("client_before", "client_after")}

    @cached_property
    def layers(self) -> dict[str, np.ndarray]:
        layers, rounds = np.meshgrid([f"stage{n}.conv" for n in range(LAYERS)], np.arange(0, ROUNDS, 500))
        count = layers.size
        values = self.draws.uniform(0, 1, count)
        return {"round": rounds.ravel(), "layer": layers.ravel(), "metric": np.full(count, "update"), "value": values}

    @cached_property
    def classes(self) -> dict[str, np.ndarray]:
        return {name: np.array([]) for name in CLASSES_SCHEMA.names}

    @cached_property
    def diagnostics(self) -> dict[str, np.ndarray]:
        return {name: np.array([]) for name in DIAGNOSTICS_SCHEMA.names}

    @cached_property
    def summary(self) -> dict[str, Any]:
        final = {name: float(values[-1]) for name, (_, values) in self.series.items()}
        return {"headline": "client_after", "final": final, "last_ten": final, "best": final, "bytes_up": 1e9}

    def cumulative_seconds(self) -> tuple[np.ndarray, np.ndarray]:
        rounds = np.arange(1, ROUNDS + 1)
        return rounds, rounds * 0.1


def large_page() -> str:
    return report([LargeRun(RunFolder(Path("/runs")), number) for number in range(METHODS)])


def test_a_large_page_stays_small_and_says_what_it_leaves_out() -> None:
    content = large_page()
    assert len(content.encode()) < LIMIT
    assert "1,000 clients are too many for columns of their own" in content
    assert "points are drawn" in content
    assert "Of 10,000 rounds 33 are drawn" in content


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_draws_a_large_page(tmp_path: Path) -> None:
    path = tmp_path / "large.html"
    path.write_text(large_page(), encoding="utf-8")
    with running(tmp_path / "profile") as browser:
        page = browser.open(path.as_uri())
        assert page.complaints == []
        assert page.evaluate("document.querySelectorAll('.failed').length") == 0
        page.screenshot(tmp_path / "large.png")
