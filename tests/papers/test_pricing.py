"""What a part would cost is known without running it: operations and bytes as the runs themselves count them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import fedstrata
from fedstrata.cli import main
from fedstrata.experiment import Experiment
from fedstrata.papers.pricing import Pricing, _participants, _tested

SMALL = Path(__file__).parent / "small"
SETTING = Experiment(
    data="digits", model="mlp(hidden=8)", clients=6, partition="dirichlet(alpha=0.5)", rounds=4, epochs=1,
    batch_size=64, engine="loop", evaluate_every=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def pricing() -> Pricing:
    return Pricing()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fedbn", {}),
        ("local", {}),
        ("fedrep(head_epochs=2)", {}),
        ("sparse-ft(head_rounds=2, sparsity=0.5)", {}),
        ("ssfl(sparsity=0.5)", {}),
        ("fedavg", {"late_clients": 2, "join_round": 3}),
        ("fedavg", {"upload_values": "int8", "steps": 3}),
    ],
)
def test_prices_are_what_runs_count(pricing: Pricing, method: str, changes: dict[str, object]) -> None:
    setting = SETTING.with_changes({"method": method, **changes})
    told = pricing.price("a setting", setting, 1, setting.rounds)
    summary = fedstrata.run(setting).summary
    traffic = summary["bytes_up"] + summary["bytes_down"]
    assert told.flops == pytest.approx(summary["train_flops"], rel=1e-6 if not setting.late_clients else 0.1)
    assert told.bytes == pytest.approx(traffic, rel=0.2 if "sparse-ft" in method else 0.02)
    assert told.seconds > 0


def test_what_is_left_is_priced_and_settings_share_what_they_can(pricing: Pricing) -> None:
    told: list[str] = []
    pricing.tell = told.append
    whole, rest = (pricing.price("", SETTING.with_changes({"partition": "iid"}), 1, rounds) for rounds in (4, 1))
    assert (rest.flops, rest.bytes, rest.rounds) == (whole.flops / 4, whole.bytes / 4, 1)
    # Four rounds of six clients, both ways: 64 x 8 + 8 + 8 x 10 + 10 numbers of four bytes, and a little around them.
    assert whole.bytes == pytest.approx(4 * 6 * 2 * 4 * 610, rel=0.1)
    pricing.price("", SETTING.with_changes({"partition": "dirichlet(alpha=9.0)", "seed": 0}), 1, 4)
    assert [words for words in told if words.startswith("timing")] == []
    assert len(told) <= 1


@pytest.mark.parametrize(
    ("changes", "tested"),
    [
        ({}, (300 + 150) + (300 + 150)),
        ({"evaluate_trained": False}, 300 + 150),
        ({"participation": 0.5}, (300 + 150) / 2 + (300 + 150)),
        ({"validation_fraction": None}, 300 + 300),
    ],
)
def test_tests_of_trained_models_are_counted_where_there_are_any(
    changes: dict[str, object], tested: float, pricing: Pricing
) -> None:
    """Six clients with 50 samples to test on, and 25 of 50 to choose by; each has a model of its own."""
    given = {"method": "local", "partition": "dirichlet(alpha=9, samples=50, test_samples=50)"}
    setting = SETTING.with_changes({**given, "validation_fraction": 0.5, **changes})
    ready = pricing._prepare(setting)
    assert _tested(ready, round(_participants(setting, 6))) == tested


def test_a_dry_run_tells_how_and_goes_on_where_one_setting_is_refused(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    own = tmp_path / "own"
    for file in SMALL.rglob("*.*"):
        place = own / file.relative_to(SMALL)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(file.read_text().replace('{ method = "local" }', '{ method = "local", join_round = 2 }'))
    asked = ["paper", "--recipes", str(own), "tiny", "table1", "--columns", ".5", "--seeds", "1", "--dry-run"]
    assert main([*asked, "--json"]) == 0
    told = json.loads(capfd.readouterr().out)
    assert [one["setting"] for one in told["settings"]] == ["fedbn, .5"]
    assert told["cannot_run"][0].startswith("local, .5: late_clients says how many clients join later")
    assert main(asked) == 0
    shown = capfd.readouterr().out
    assert "an estimate" in shown
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
