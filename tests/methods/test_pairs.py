"""Two parts that may stand together must both do something: no composition silently does nothing."""

from __future__ import annotations

import warnings
from functools import cache
from itertools import combinations

import pytest

from fedstrata.errors import FedStrataError
from fedstrata.methods import Method, methods
from fedstrata.testing.world import prepare

# With parameters under which a part acts within three rounds, and differs from another part's defaults.
ACTING = {
    "attack": "attack(clients=4, strength=3)",
    "central-dp": "central-dp(noise=0.1)",
    "feddst": "feddst(every=1, until=1.0, alpha=0.3)",
    "fedlama": "fedlama(warmup=0)",
    "fedvc": "fedvc(samples=20)",
    "flash-jmwst": "flash-jmwst(first_epochs=2)",
    "flash-spdst": "flash-spdst(first_epochs=2)",
    "freeze-middle": "freeze-middle(after=1)",
    "l-dawa": "l-dawa(warmup=0)",
    "local-dp": "local-dp(noise=0.01)",
    "pfedme": "pfedme(strength=1.0, inner_steps=2)",
    "norm-bound": "norm-bound(bound=0.05)",
    "player": "player(threshold=1.1)",
    "sparse-ft": "sparse-ft(head_rounds=1, sparsity=0.5, batch_size=4)",
    "subfedavg": "subfedavg(accuracy=0, rate=0.2)",
    "top-k": "top-k(sparsity=0.8)",
    "transient": "transient(every=1)",
    "trimmed-mean": "trimmed-mean(trim=0.2)",
}
PARTS = [name for name in methods.names() if name != "fedavg" and len(Method.make(name).parts) == 1]
PARTS = [name for name in PARTS if Method.make(name).parts[0].name == name]


def allowed_pairs() -> list[tuple[str, str]]:
    def fits(first: str, second: str) -> bool:
        try:
            Method.make(f"{first}+{second}")
        except FedStrataError:
            return False
        return True

    return [(first, second) for first, second in combinations(PARTS, 2) if fits(first, second)]


ALLOWED = allowed_pairs()


@cache
def outcome(*names: str) -> str:
    """Run parts together: all losses of all clients, and all bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = "+".join(ACTING.get(name, name) for name in names)
        driver = prepare(text, "stacked", precision="fp32", epochs=1)
        for _ in range(3):
            driver.step()
    tables = driver.metrics.to_tables()
    told = [row for row in tables["rounds"].to_pylist() if row["metric"] in ("train.loss", "bytes.up", "bytes.down")]
    return str([*told, *(row for row in tables["clients"].to_pylist() if "loss" in row["metric"])])


def check(first: str, second: str) -> None:
    together = outcome(first, second)
    assert together != outcome(first), f"'{second}' does nothing beside '{first}'"
    assert together != outcome(second), f"'{first}' does nothing beside '{second}'"


@pytest.mark.parametrize("name", PARTS)
def test_every_part_acts(name):
    assert outcome(name) != outcome("fedavg")


@pytest.mark.parametrize(("first", "second"), ALLOWED[::40])
def test_some_pairs_that_are_allowed_do_what_both_do(first, second):
    check(first, second)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), ALLOWED)
def test_every_pair_that_is_allowed_does_what_both_do(first, second):
    check(first, second)


def test_most_pairs_are_decided_by_their_declarations():
    """The table is neither empty nor everything."""
    assert 0.3 < len(ALLOWED) / (len(PARTS) * (len(PARTS) - 1) / 2) < 0.8
