"""What the names of metrics mean: which model was tested on which data, in plain words."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Label:
    """One way of measuring: a short name for axes and menus, and a sentence that says exactly what it is."""

    short: str
    meaning: str


LABELS = {
    "train": Label(
        "Training",
        "The mean loss over the local training steps of the round, on the training samples of the clients that "
        "took part.",
    ),
    "global": Label(
        "Global model, global test set",
        "The one model that the server holds after the round, on the test set of the whole dataset. "
        "Methods with personal parts have no such model, and so no such number.",
    ),
    "validation": Label(
        "Global model, validation samples",
        "The one model that the server holds after the round, on training samples that were held out from all clients; "
        "the model of the best round is kept.",
    ),
    "global_on_clients": Label(
        "Global model, each client's test set",
        "The one model that the server holds after the round, on each client's own test set.",
    ),
    "client_before": Label(
        "Own model before aggregation",
        "Each client's model right after its local training, before anything is merged, on that client's own test set; "
        "only the clients that took part in the round.",
    ),
    "client_after": Label(
        "Own model after aggregation",
        "The model that each client holds at the end of the round (the shared part from the server, the personal part "
        "its own), on that client's own test set; all clients that have one.",
    ),
    "client_validation": Label(
        "Own model, own validation samples",
        "The model that each client holds at the end of the round, on training samples that this client holds out to "
        "choose a model by; the model of the best round is kept.",
    ),
    "client_before_validation": Label(
        "Own model before aggregation, own validation samples",
        "Each client's model right after its local training, on the training samples that this client holds out; only "
        "the clients that took part in the round.",
    ),
    "client_adapted_validation": Label(
        "Own model after fine-tuning, own validation samples",
        "Each client's model after a final fine-tuning on its own training data, on the training samples that this "
        "client holds out to choose a model by; where it is better than before, it is kept.",
    ),
    "client_adapted": Label(
        "Own model after fine-tuning",
        "Each client's model after a final fine-tuning on its own training data, on that client's own test set; "
        "all clients that have one.",
    ),
}

STATISTICS = {
    "mean": "mean over clients",
    "std": "standard deviation over clients",
    "worst10": "mean of the worst 10 % of clients",
}


def label_of(metric: str) -> str:
    """Take the label off a metric's name: ``client_after`` of ``client_after.accuracy.mean``."""
    return metric.split(".", 1)[0]


def short_name(label: str) -> str:
    """Name a label in a few words; an unknown one stands for itself."""
    return LABELS[label].short if label in LABELS else label


def metric_title(metric: str) -> str:
    """Name a metric in words.

    >>> metric_title("client_after.accuracy.worst10")
    'Own model after aggregation, mean of the worst 10 % of clients'
    """
    label, *rest = metric.split(".")
    statistic = STATISTICS.get(rest[-1]) if rest else None
    return short_name(label) + (f", {statistic}" if statistic else "")


def meaning(label: str, everybody: bool = True) -> str:
    """Say what a label measures; nothing for an unknown one. Where not ``everybody`` took part, it is not all clients.

    >>> meaning("client_adapted", everybody=False)[-54:]
    "on that client's own test set; clients that took part."
    """
    words = LABELS[label].meaning if label in LABELS else ""
    return words if everybody else words.replace("; all clients that have one.", "; clients that took part.")
