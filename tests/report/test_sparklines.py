"""Small curves of the layers in a terminal: bounded, readable, and only where there is room."""

import io
import math

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import fedstrata
from fedstrata.callbacks import RoundView
from fedstrata.progress import Live
from fedstrata.report.sparklines import LAYERS, LayerTrails, Trail, sparkline


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300))
def test_a_trail_is_the_means_of_equally_many_rounds(values: list[float]) -> None:
    trail = Trail(width=8)
    for value in values:
        trail.add(value)
    assert len(trail.values) <= 8
    each = 1
    while -(-len(values) // each) > 8:
        each *= 2
    groups = [values[start : start + each] for start in range(0, len(values), each)]
    assert all(
        math.isclose(mean, sum(group) / len(group), rel_tol=1e-9, abs_tol=1e-6)
        for mean, group in zip(trail.values, groups, strict=True)
    )
    assert trail.last == values[-1]


def test_curves_of_cosines_share_a_scale_and_updates_have_their_own() -> None:
    trails = LayerTrails()
    for round in range(3):
        trails.note({"update": {"conv": 0.1 * round, "head": 10.0 * round}})
    title, conv, head = trails.lines(20)
    assert "Size of the update" in title
    assert conv.split()[1] == head.split()[1] == "▁▅█"
    assert head.split()[2] == "20"
    trails.note({"update": {"conv": 0.0, "head": 0.0}, "cosine": {"conv": 1.0, "head": 0.5}})
    trails.note({"update": {"conv": 0.0, "head": 0.0}, "cosine": {"conv": 0.8, "head": 0.0}})
    title, conv, head = trails.lines(20)
    assert "Inertia" in title
    assert (conv.split()[1], head.split()[1]) == ("█▇", sparkline([0.5, 0.0], 0.0, 1.0))


def test_many_layers_are_thinned_and_little_room_shows_none() -> None:
    trails = LayerTrails()
    trails.note({"update": {f"layer{place}.with.a.very.long.name.conv": 1.0 for place in range(100)}})
    lines = trails.lines(50)
    assert len(lines) == LAYERS + 1
    assert "layer0" in lines[1]
    assert len({line.split()[0] for line in lines[1:]}) == LAYERS
    assert max(map(len, lines)) < 80
    assert len(trails.lines(5)) == 5
    assert trails.lines(2) == LayerTrails().lines(50) == []


def shown(height: int, at_a_time: int = 1, **console: object) -> str:
    file = io.StringIO()
    layers = {"update": {"conv1": 0.25, "head": 0.5}}
    terminal = Console(file=file, force_terminal=True, width=100, height=height, color_system=None, **console)  # type: ignore[arg-type]
    with Live(1, 4, terminal, at_a_time) as progress:
        progress.begin("fedavg, seed 0")
        for round in (1, 2):
            progress.on_round(RoundView("fedavg", 0, round, 4, 0.1, {}, layers=layers))
        progress._bars.refresh()
    return file.getvalue()


def test_layers_are_drawn_below_the_bar_of_one_run_in_a_terminal_that_is_high_enough() -> None:
    assert "conv1" in shown(30)
    assert "0.25" in shown(30)
    assert "conv1" not in shown(6)
    assert "conv1" not in shown(30, at_a_time=2)
    assert "conv1" not in shown(30, force_interactive=False)


def test_a_callback_sees_the_layers_of_its_round() -> None:
    seen: list[RoundView] = []
    result = fedstrata.run(model="mlp", clients=2, rounds=2, epochs=1, partition="iid", callbacks=[seen.append])
    layers = result.metrics.to_tables()["layers"].to_pylist()
    for view in seen:
        of_round = [row for row in layers if row["round"] == view.round]
        assert of_round
        assert sum(map(len, view.layers.values())) == len(of_round)
        assert all(view.layers[row["metric"]][row["layer"]] == row["value"] for row in of_round)
