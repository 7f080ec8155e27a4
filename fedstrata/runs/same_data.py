"""Refusing to go on with a run when its data has changed since it began."""

from __future__ import annotations

from fedstrata.data import Dataset, Split
from fedstrata.data.contents import fingerprint
from fedstrata.errors import FedStrataError
from fedstrata.runs.describing import CONTENTS
from fedstrata.runs.folder import RunFolder


def refuse_other_data(folder: RunFolder, dataset: Dataset, split: Split) -> None:
    """Refuse data of which the split, the classes or a single value differs from what a run began with.

    Runs that were begun before contents were hashed have no fingerprint to compare.
    """
    described = folder.data()
    changed = f"The data of the run in '{folder.path}' has changed since it began: "
    if split.hash != described["split_hash"]:
        raise FedStrataError(f"{changed}its split is not the same any more.")
    names, known = dataset.class_names, tuple(described["class_names"])
    if names != known:
        other = next((name for name in names if name not in known), None)
        raise FedStrataError(
            changed
            + ("it lacks a class" if other is None else f"nobody trained on the label '{other}'")
            + f"; its classes were {', '.join(known)}."
        )
    if described.get(CONTENTS, fingerprint(dataset)) != fingerprint(dataset):
        raise FedStrataError(
            f"{changed}some inputs or labels are others. Go on with the files as they were, or begin a new run."
        )
