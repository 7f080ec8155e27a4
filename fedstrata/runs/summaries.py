"""Numbers of a run's summary: the one that stands for the run, and who took part, what was spent, what was lost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

WITHOUT_STATE = "sites.without_state"
"""The metric that counts the real sites which have gone on without the state that they had lost."""


def headline_key(headline: str, values: Mapping[str, Any]) -> str:
    """The metric that stands for a run: the mean over clients where the label is about clients."""
    over_clients = f"{headline}.accuracy.mean"
    return over_clients if over_clients in values else f"{headline}.accuracy"


def headline_value(summary: Mapping[str, Any]) -> float | None:
    """The accuracy that stands for a run, in its last round; none where it was not tested."""
    final = summary.get("final", {})
    return metric_value(final, headline_key(summary["headline"], final))


def metric_value(values: Mapping[str, Any], key: str) -> float | None:
    """Read a number of a summary: none where it is absent, NaN where the JSON has null, which is how NaN is saved."""
    if key not in values:
        return None
    return math.nan if values[key] is None else float(values[key])


def diverged(summary: Mapping[str, Any]) -> bool:
    """Tell whether the training loss of a run's last round is not a finite number."""
    loss = metric_value(summary.get("final") or {}, "train.loss")
    return loss is not None and not math.isfinite(loss)


def everybody_took_part(summary: Mapping[str, Any]) -> bool:
    """Tell whether every reply that was asked for was merged, and every client told how it fared in the end."""
    final = summary.get("final") or {}
    answered = metric_value(final, f"{summary['headline']}.answered")
    return summary.get("took_part", 1.0) == 1.0 and answered is None


def epsilon_spent(summary: Mapping[str, Any]) -> float | None:
    """Read off a run's summary what it has spent of privacy, if its method keeps an account."""
    return metric_value(summary.get("final") or {}, "privacy.epsilon")


def sites_without_state(summary: Mapping[str, Any]) -> int:
    """Read off a run's summary how many sites have gone on without the state that they had lost."""
    return int(metric_value(summary.get("final") or {}, WITHOUT_STATE) or 0)
