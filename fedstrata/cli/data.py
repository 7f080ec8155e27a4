"""The commands about data: how a partition divides it, and fetching it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from fedstrata.cli.options import Json, add_command, read_experiment
from fedstrata.cli.terminal import new_table, print_json, print_plain, results, telling
from fedstrata.experiment import Experiment

if TYPE_CHECKING:
    import numpy as np

    from fedstrata.data import Dataset, Split

BARS = " ▁▂▃▄▅▆▇█"
SHOWN_CLIENTS = 30
SHOWN_CLASSES = 40


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    keys = ("data", "data_root", "clients", "partition", "seed", "imports")
    add_command(app, partition, keys, ("fedstrata partition --clients 20 --partition dirichlet:0.1 --plot skew.html",))
    add_command(app, download)


def partition(
    changes: dict[str, Any],
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw who has which classes, as .html, .png, .svg or .pdf.")
    ] = None,
    json: Json = False,
) -> None:
    """Show who gets which data; nothing is trained."""
    experiment = read_experiment(None, None, changes)
    with telling(f"loading the data {experiment.data}"):
        from fedstrata.runs.preparing import divide, load_data

        dataset = load_data(experiment)
    experiment, split = divide(experiment, dataset)
    if plot is not None:
        from fedstrata.report import skew_chart, write_chart

        chart = skew_chart(split.label_counts(dataset), dataset.class_names, split.client_names(dataset))
        write_chart(chart, plot, f"{dataset.name}: {experiment.partition} over {experiment.clients} clients")
    if json:
        print_json(split_as_data(experiment, dataset, split, plot))
    else:
        _print_split(experiment, dataset, split)
        if plot is not None:
            results.print(Text.assemble("plot  ", (str(plot), "bold")), soft_wrap=True)


def download(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The dataset.")],
    data_root: Annotated[
        Path | None, typer.Option(help="Where to put it; by default the cache directory, where it is found again.")
    ] = None,
    json: Json = False,
) -> None:
    """Fetch a dataset from the Hugging Face hub.

    This needs the extra 'hub': pip install 'fedstrata[hub]'. It is the only command that uses the network.
    """
    from fedstrata.data import download as fetch

    folder = fetch(name, data_root)
    if json:
        print_json({"name": name, "path": str(folder)})
    else:
        print_plain(f"'{name}' is in {folder}\n")


def split_as_data(experiment: Experiment, dataset: Dataset, split: Split, plot: Path | None) -> dict[str, Any]:
    """Tell all about a split in plain data."""
    counts = split.label_counts(dataset)
    return {
        "data": dataset.name,
        "partition": experiment.partition,
        "seed": experiment.seed,
        "clients": split.clients,
        "client_names": split.client_names(dataset),
        "hash": split.hash,
        "class_names": dataset.class_names,
        "sizes": split.sizes,
        "test_sizes": [len(positions) for positions in split.test],
        "classes_per_client": (counts > 0).sum(axis=1),
        "label_counts": counts,
        "plot": None if plot is None else str(plot),
    }


def histogram(counts: np.ndarray, columns: int) -> str:
    """Draw counts as one character each, as high as their share of the largest; neighbours share a column if need be.

    >>> import numpy as np
    >>> histogram(np.array([0, 1, 4, 8]), columns=10)
    ' ▁▄█'
    """
    import numpy as np  # half of what the command line takes to start without it

    sums = np.array([part.sum() for part in np.array_split(counts, min(columns, len(counts)))])
    heights = np.ceil((len(BARS) - 1) * sums / max(sums.max(), 1)).astype(int)
    return "".join(BARS[height] for height in heights)


def _print_split(experiment: Experiment, dataset: Dataset, split: Split) -> None:
    from fedstrata.runs.naming import called

    counts = split.label_counts(dataset)
    present = (counts > 0).sum(axis=1)
    first, last = dataset.class_names[0], dataset.class_names[-1]
    names = split.client_names(dataset)
    numeric = ("client", "train", "test", "classes")
    table = new_table(*numeric, f"labels, {first} to {last}", right=numeric)
    for client in range(min(split.clients, SHOWN_CLIENTS)):
        who = called(client, names) if names else f"{client:,}"
        numbers = (split.sizes[client], len(split.test[client]), present[client])
        table.add_row(who, *(f"{number:,}" for number in numbers), Text(histogram(counts[client], SHOWN_CLASSES)))
    results.print(Text(f"{dataset.name}, {experiment.partition}, seed {experiment.seed}\n"))
    results.print(table)
    if split.clients > SHOWN_CLIENTS:
        results.print(f"and {split.clients - SHOWN_CLIENTS:,} more; --json lists them all")
    sizes, classes = _range(split.sizes), f"{_range(present)} of {dataset.classes} classes each"
    results.print(f"\n{split.clients} clients with {sizes} training samples and {classes}")
    results.print(f"hash {split.hash}")


def _range(values: np.ndarray) -> str:
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"
