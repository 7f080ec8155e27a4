"""The commands that use what training gave: predict, evaluate, export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedstrata.cli.options import Imports, Json, Quiet, add_command
from fedstrata.cli.terminal import messages, new_table, print_json, results
from fedstrata.errors import FedStrataError

Model = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run, or of an exported model.")]
Client = Annotated[
    str | None,
    typer.Option(
        metavar="N|NAME",
        help="Take the model that this client uses, else the global one: its number, from 0 on, or the name of its "
        "site, where the data has sites. What is a number of a client is never taken as a name.",
    ),
]
Last = Annotated[
    bool, typer.Option("--last", help="Take the model of the last round, where validation has chosen another.")
]
_SHOWN = 20


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    add_command(
        app,
        predict,
        examples=(
            "fedstrata predict runs/a images/ --client 3",
            "fedstrata predict runs/a new-patients.csv --out predictions.csv",
        ),
    )
    add_command(
        app, evaluate, examples=("fedstrata evaluate runs/a --client north", "fedstrata evaluate model --data digits")
    )
    add_command(
        app, export, examples=("fedstrata export runs/a --client 3 --onnx -o model", "fedstrata export runs/a --hub")
    )


def predict(
    model: Model,
    inputs: Annotated[
        Path,
        typer.Argument(metavar="INPUT", help="A NumPy array (.npy), an image, a folder of images, a table, or texts."),
    ],
    client: Client = None,
    last: Last = False,
    out: Annotated[Path | None, typer.Option(help="Write all predictions to this CSV file.")] = None,
    imports: Imports = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Name the class of each sample, and how probable it is.

    Inputs are raw, as in the data: what is done to them before is saved with the model.
    """
    from fedstrata.trained.inputs import names_of

    loaded, _ = _loaded(model, client, last, imports)
    probabilities = loaded.predict_proba(inputs)
    labels = names_of(inputs) or [str(number) for number in range(len(probabilities))]
    chosen = probabilities.argmax(1)
    rows = [
        {"sample": label, "class": loaded.class_names[best], "probability": float(row[best])}
        for label, best, row in zip(labels, chosen, probabilities, strict=True)
    ]
    if out is not None:
        _write_csv(out, rows, loaded.class_names, probabilities)
    if json:
        print_json({"predictions": rows, "out": None if out is None else str(out)})
    elif not quiet:
        table = new_table("sample", "class", "probability", right=("probability",))
        for one in rows[:_SHOWN]:
            table.add_row(str(one["sample"]), str(one["class"]), f"{one['probability']:.3f}")
        results.print(table)
        if len(rows) > _SHOWN:
            more = "--out FILE.csv writes all" if out is None else "all are in the file"
            results.print(f"and {len(rows) - _SHOWN} more; {more}.")
        if out is not None:
            results.print(f"\npredictions  {out}", soft_wrap=True)


def evaluate(
    model: Model,
    data: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The dataset, see 'fedstrata datasets'; else that of the run.")
    ] = None,
    data_root: Annotated[str | None, typer.Option(metavar="FOLDER", help="Where the dataset's files lie.")] = None,
    client: Client = None,
    last: Last = False,
    part: Annotated[
        str, typer.Option(metavar="test|train|all", help="Which samples: those for testing, for training, or all.")
    ] = "test",
    metrics: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Further metrics beside accuracy and loss, joined by '+', such as 'f1+auc'."),
    ] = None,
    imports: Imports = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Test a model on data.

    Of the data of its own run, a client's model is tested on the client's samples.
    """
    from fedstrata.runs.evaluating import evaluate_model

    loaded, number = _loaded(model, client, last, imports)
    with messages.status("testing"):
        found = evaluate_model(loaded, model, data, data_root, number, part, metrics)
    if json:
        print_json(found)
    elif not quiet:
        results.print(f"{found['data']}, {found['samples']} samples ({found['part']})", soft_wrap=True, markup=False)
        table = new_table("metric", "value", right=("value",))
        for name, value in found["metrics"].items():
            table.add_row(name, f"{value:.0f}" if name.startswith("confusion.") else f"{value:.4f}")
        results.print(table)


def export(
    model: Model,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The folder to write: 'model', or 'model-client-N'.")
    ] = None,
    client: Client = None,
    last: Last = False,
    onnx: Annotated[
        bool,
        typer.Option("--onnx", help="Write model.onnx too, checked with onnxruntime: pip install 'fedstrata[onnx]'."),
    ] = False,
    hub: Annotated[bool, typer.Option("--hub", help="Write a README.md for the Hugging Face hub.")] = False,
    imports: Imports = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a model for others.

    The folder holds the weights as safetensors, which every program can read, and a card as JSON that tells the
    architecture, what is done to inputs, the classes, and where the model comes from.
    """
    from fedstrata.trained.export import export as write

    loaded, number = _loaded(model, client, last, imports)
    folder = out or Path("model" if number is None else f"model-client-{number}")
    with messages.status("exporting"):
        write(loaded, folder, onnx=onnx, hub=hub)
    written = sorted(file.name for file in folder.iterdir())
    if json:
        print_json({"out": str(folder), "files": written})
    elif not quiet:
        results.print(f"{folder}: {', '.join(written)}", soft_wrap=True)
        results.print(f'\nIn Python:\n  fedstrata.load("{folder}").predict(inputs)', soft_wrap=True)
        if hub:
            results.print(f"Put it on the hub:\n  hf upload OWNER/NAME {folder}", soft_wrap=True)


def _loaded(path: Path, client: str | None, last: bool, imports: list[Path] | None) -> tuple[Any, int | None]:
    """Load the model of a run, or of one of its clients, with the number of that client."""
    from fedstrata.experiment import Experiment
    from fedstrata.plugins import load_imports
    from fedstrata.runs.models import client_number, load_model

    if imports:
        load_imports(Experiment(imports=tuple(map(str, imports))), Path())
    if not path.exists():
        raise FedStrataError(f"There is no folder '{path}'.")
    number = None if client is None else client_number(path, client)
    return load_model(path, number, last=last), number


def _write_csv(path: Path, rows: list[dict[str, Any]], class_names: tuple[str, ...], probabilities: Any) -> None:
    """Write what was predicted, with the probability of every class."""
    import csv
    import io

    from fedstrata import files

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["sample", "class", *(f"probability of {name}" for name in class_names)])
    for row, numbers in zip(rows, probabilities, strict=True):
        writer.writerow([row["sample"], row["class"], *(f"{number:.6f}" for number in numbers)])
    files.write_atomically(path, text.getvalue())
