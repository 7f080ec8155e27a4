"""What describes a run before its first round: the experiment, its software and device, the data and who holds it."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from fedstrata import files
from fedstrata._version import __version__
from fedstrata.data.contents import fingerprint
from fedstrata.data.dataset import Dataset
from fedstrata.data.split import Parts, Split
from fedstrata.experiment import Experiment
from fedstrata.plugins import IMPORTS_FOLDER, loaded_packages, require_imports
from fedstrata.runs.local_files import FILES, local_files
from fedstrata.runs.naming import CLIENT_NAMES
from fedstrata.runs.provenance import commit

DESCRIPTION = ("environment.json", "data.json", "split.parquet", "experiment.toml")
"""Written in this order when there is no folder to rename: the experiment comes last and makes the folder a run."""
SPLIT_SCHEMA = pa.schema([("client", pa.int32()), ("part", pa.string()), ("position", pa.int64())])
CONTENTS = "contents"
"""Where the fingerprint of all samples stands in the description of the data."""


def describe_environment(device: torch.device | str, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Tell with which software a run is made and on what, without names of users or machines.

    ``resolved`` is what became of the settings that were left to the program, such as ``engine = "auto"``.
    """
    device = torch.device(device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {
        "fedstrata": __version__,
        **({"commit": known} if (known := commit()) else {}),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu_count": os.cpu_count(),
        "device": device.type,
        "device_name": name,
        "threads": torch.get_num_threads(),
        "resolved": dict(resolved),
        **({"packages": dict(packages)} if (packages := loaded_packages()) else {}),
    }


def describe(
    experiment: Experiment, dataset: Dataset, split: Split, environment: Mapping[str, Any]
) -> dict[str, bytes | str]:
    """Make the files that describe a run, by their names, and copies of those that it imports."""
    data = {
        "dataset": dataset.name,
        "class_names": dataset.class_names,
        "label_counts": split.label_counts(dataset),
        "sizes": split.sizes,
        "test_sizes": split.test_sizes,
        "split_hash": split.hash,
        "input_shape": dataset.input_shape,
        "samples": split.samples(dataset),
        **({CLIENT_NAMES: names} if (names := split.client_names(dataset)) else {}),
        **({"whole_numbers": True} if dataset.whole_numbers else {}),
        **({} if (contents := fingerprint(dataset)) is None else {CONTENTS: contents}),
        **({FILES: found} if (found := local_files(experiment)) else {}),
    }
    imported = require_imports(experiment.imports)
    return {
        **{f"{IMPORTS_FOLDER}/{name}": file.content for name, file in imported.items()},
        "environment.json": files.to_json(environment),
        "data.json": files.to_json(data),
        "split.parquet": files.to_parquet(split_to_table(split)),
        "experiment.toml": experiment.to_toml(),
    }


def split_to_table(split: Split) -> pa.Table:
    """Set a split as a table, one row for each sample that a client holds, with its hash."""
    parts = {"train": split.train_parts, "test": split.test_parts}
    lengths = [int(part.sizes.sum()) for part in parts.values()]
    kinds = np.repeat(np.arange(len(parts)), lengths)
    columns = [
        files.column_of(np.concatenate([part.owners() for part in parts.values()]), pa.int32()),
        files.texts_of(kinds, list(parts)),
        files.column_of(np.concatenate([part.joined() for part in parts.values()]), pa.int64()),
    ]
    return pa.table(columns, schema=SPLIT_SCHEMA.with_metadata({"hash": split.hash}))


def split_from_table(table: pa.Table) -> Split:
    """Read a split from its table."""
    clients, parts, positions = (table.column(name).to_numpy() for name in SPLIT_SCHEMA.names)
    count = int(clients.max(initial=-1)) + 1
    in_part = [(parts == part) & (clients >= 0) for part in ("train", "test")]
    return Split(*(_parts_of(clients[chosen], positions[chosen], count) for chosen in in_part))


def _parts_of(clients: np.ndarray, positions: np.ndarray, count: int) -> Parts:
    """Collect the positions of each client, in the order in which they stand."""
    order = np.argsort(clients, kind="stable")
    return Parts(positions[order], np.bincount(clients, minlength=count))
