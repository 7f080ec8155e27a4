from __future__ import annotations

from watching import (
    run,
)


def test_local_adaptation_is_fine_tuning_for_one_epoch():
    ours, theirs, longer = (
        run(method, epochs=2, rounds=1).metrics.latest()
        for method in ("local-adaptation", "fedavg-ft(epochs=1)", "fedavg-ft")
    )
    assert ours == theirs
    assert ours["client_adapted.loss.mean"] not in (ours["client_after.loss.mean"], longer["client_adapted.loss.mean"])
