"""What clients that lie do to a method: accuracy on digits under every attack.

    python benchmarks/robust.py results/robust-digits.csv            run what the table does not hold yet
    python benchmarks/robust.py results/robust-digits.csv --show     print it as Markdown

20 clients, of which the first 4 lie, over 10 rounds; the accuracy of the global model on the global test set after the
last round, in percent, of three seeds. All else is as an experiment that names nothing, but for 2 local epochs.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import warnings
from pathlib import Path

import fedstrata

PARTITIONS = ("iid", "dirichlet:0.1")
METHODS = (
    "fedavg",
    "median",
    "trimmed-mean(trim=0.2)",
    "krum(byzantine=4)",
    "multi-krum(byzantine=4)",
    "rfa",
    "norm-bound",
    "fltrust(epochs=2)",
)
ATTACKS = {
    "none": "",
    "sign-flip": "attack(clients=4, strength=5)",
    "label-flip": "attack(kind=label-flip, clients=4)",
    "scale": "attack(kind=scale, clients=4)",
    "alie": "attack(kind=alie, clients=4)",
}
SEEDS = (0, 1, 2)
SETTING = {"data": "digits", "clients": 20, "rounds": 10, "epochs": 2, "engine": "stacked", "evaluate_every": 10}

Row = dict[str, str]


def accuracy(partition: str, method: str, attack: str, seed: int) -> float:
    """Run once; the accuracy in percent. A model that is no longer finite guesses."""
    text = "+".join(filter(None, (method, attack)))
    result = fedstrata.run(method=text, partition=partition, seed=seed, **SETTING)
    return 100 * result.metrics.latest()["global.accuracy"]


def read(path: Path) -> list[Row]:
    """Read the rows that are there."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(path: Path, rows: list[Row]) -> None:
    """Write all rows."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def run(path: Path) -> None:
    """Run what the table does not hold yet, and write it after every row."""
    rows = read(path)
    held = {(row["partition"], row["method"], row["attack"]) for row in rows}
    for partition in PARTITIONS:
        for method in METHODS:
            for attack in ATTACKS.values():
                if (partition, method, attack) not in held:
                    reached = [accuracy(partition, method, attack, seed) for seed in SEEDS]
                    row = {"partition": partition, "method": method, "attack": attack}
                    row |= {f"seed_{seed}": f"{value:.2f}" for seed, value in zip(SEEDS, reached, strict=True)}
                    row |= {"mean": f"{statistics.mean(reached):.2f}"}
                    row |= {"deviation": f"{statistics.stdev(reached):.2f}"}
                    rows.append(row)
                    write(path, rows)
                    print(*row.values(), sep="  ", flush=True)


def table(rows: list[Row], partition: str) -> str:
    """Write the means and deviations of one partition as Markdown, a row for each method."""
    lines = [f"| {partition} | " + " | ".join(ATTACKS) + " |", "|---" * (1 + len(ATTACKS)) + "|"]
    told = {(row["partition"], row["method"], row["attack"]): row for row in rows}
    for method in METHODS:
        of_method = [told[partition, method, attack] for attack in ATTACKS.values()]
        cells = [f"{float(row['mean']):.1f} ± {float(row['deviation']):.1f}" for row in of_method]
        lines.append(f"| `{method}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run or show the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--show", action="store_true")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", fedstrata.FedStrataWarning)
    if not arguments.show:
        run(arguments.table)
    print("\n\n".join(table(read(arguments.table), partition) for partition in PARTITIONS))


if __name__ == "__main__":
    main()
