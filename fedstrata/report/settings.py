"""The sections in words: what the numbers mean, how the runs were configured, and how to run them again."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fedstrata import files
from fedstrata.experiment import Experiment
from fedstrata.plugins import IMPORTS_FOLDER, imported_name
from fedstrata.report import formats
from fedstrata.report.labels import LABELS, STATISTICS, label_of, meaning
from fedstrata.report.markup import Markup, element, join
from fedstrata.report.reading import Run
from fedstrata.report.tables import Cell, Column, Line, table
from fedstrata.report.view import Section, View
from fedstrata.runs.summaries import headline_value
from fedstrata.significance import estimate


def meanings(view: View) -> Section:
    """What each label and each column stands for."""
    everybody = all(row.everybody for row in view.rows)
    used = {label_of(metric) for run in view.runs for metric in run.summary["final"]}
    terms = [
        element("div", element("dt", label.short, " ", element("code", name)), element("dd", meaning(name, everybody)))
        for name, label in LABELS.items()
        if name in used
    ]
    general = {
        "Over clients": "Every client counts the same, however many samples it has. "
        + "; ".join(f"{name}: {words}" for name, words in STATISTICS.items())
        + ".",
        "Last round, last ten, best round": "The accuracy after the last round; the mean of the last ten evaluations; "
        "the highest of all evaluations. The best round is chosen on the test data and therefore flatters.",
        "Up and down": "Bytes that clients sent to the server, and bytes that they received from it, over all clients "
        "and rounds, counted from the encoded messages.",
    }
    terms += [element("div", element("dt", term), element("dd", words)) for term, words in general.items()]
    return Section("meanings", "What the numbers mean", element("dl", *terms, class_="meanings"))


def configuration(view: View) -> Section:
    """What differs between the runs, what they share, and the list of them."""
    documented = {field.name: str(field.metadata.get("doc", "")) for field in dataclasses.fields(Experiment)}
    common, differing = _common_and_differing([run.experiment for run in view.runs])
    shown = [key for key in differing if key != "seed"]
    parts: list[Markup | None] = []
    if shown:
        columns = [*(Column(key, documented[key], numeric=False) for key in shown), Column("seeds", numeric=False)]
        cells: list[Line] = []
        for group in view.groups:
            seeds = ", ".join(str(run.experiment["seed"]) for run in group.runs)
            cells.append([*(written_setting(group.runs[0].experiment.get(key)) for key in shown), seeds])
        parts.append(table("What differs between the runs", columns, cells))
    heads = [Column("Setting", numeric=False), Column("Value", numeric=False), Column("Meaning", numeric=False)]
    settings = [[key, written_setting(value), documented[key]] for key, value in common.items()]
    parts.append(table("The same in all runs" if len(view.runs) > 1 else "Settings", heads, settings, sortable=False))
    parts.append(_run_list(view))
    return Section("configuration", "Configuration", join(parts))


def rerun(view: View) -> Section:
    """The experiment as a file, and the commands that repeat the runs with it."""
    common, differing = _common_and_differing([run.experiment for run in view.runs])
    complete = Experiment.from_mapping(common).to_toml()
    shared = [line for line in complete.splitlines(keepends=True) if line.split(" = ")[0] in common]
    from_python = dict.fromkeys(
        str(value).removeprefix(_FROM_PYTHON)
        for run in view.runs
        for value in run.experiment.values()
        if str(value).startswith(_FROM_PYTHON)
    )
    if from_python:
        parts = ", ".join(from_python)
        reason = f"Parts of these runs came from a Python program ({parts}), so that only that program can repeat them."
        told = (element("p", f"{reason} Their common settings:"), _copyable("".join(shared), "settings"))
        return Section("rerun", "Run it again", join(told))
    names = view.names()
    commands = []
    for run in view.runs:
        own = {key: run.experiment[key] for key in differing if key in run.experiment}
        imports = [str(run.path / IMPORTS_FOLDER / imported_name(text)) for text in own.pop("imports", ())]
        changes = [argument for file in imports for argument in ("--import", file)]
        changes += [argument for key, value in own.items() for argument in ("--set", f"{key}={written_setting(value)}")]
        commands.append(shlex.join([*_program(run), "experiment.toml", *changes, "--out", f"rerun/{names[run.path]}"]))
    body = (
        element("p", "Save this as ", element("code", "experiment.toml"), *_beside(common.get("imports", ())), ":"),
        _copyable("".join(shared), "experiment.toml"),
        element("p", "and run:" if len(commands) == 1 else "and run what you need of these, one line per run:"),
        _copyable("\n".join(commands) + "\n", "commands"),
    )
    return Section("rerun", "Run it again", join(body))


def _program(run: Run) -> list[str]:
    """Tell which command makes such a run: what was run over sites needs them again, whose data is not here."""
    path = run.path / "deployment.json"
    if not path.exists():
        return ["fedstrata", "run"]
    described = files.from_json(files.read_bytes(path), path)
    if described["rehearsal"]:
        return ["fedstrata", "deploy", "--local", str(len(described["sites"]))]
    return ["fedstrata", "server", "--tls", "keys/server", "--sites", "keys/server/sites.toml"]


def _beside(imports: Sequence[str]) -> list[Markup | str]:
    """Say which files the experiment needs, and where they are."""
    if not imports:
        return []
    files = [element("code", imported_name(text)) for text in imports]
    listed = [part for file in files for part in (", ", file)][1:]
    return [" beside ", *listed, " from the folder ", element("code", IMPORTS_FOLDER), " of a run"]


_FROM_PYTHON = "python:"
"""How an experiment marks data, a split or a model that was handed over in Python."""


def environment(view: View) -> Section | None:
    """Software and hardware; where the runs differ, all values."""
    values: dict[str, dict[str, None]] = {}
    for run in view.runs:
        for key, value in _flat(run.environment):
            values.setdefault(key, {})[written_setting(value)] = None
    if not values:
        return None
    heads = [Column("Name", numeric=False), Column("Value", numeric=False)]
    cells = [[key.replace("_", " "), "; ".join(found)] for key, found in values.items()]
    return Section("environment", "Environment", table("With what the runs were made", heads, cells, sortable=False))


def _run_list(view: View) -> Markup:
    names = view.names()
    columns = [
        Column("Run", numeric=False),
        Column("Method", numeric=False),
        Column("Seed"),
        Column("Accuracy, %", "Headline accuracy in the last round"),
        Column("Rounds"),
        Column("Time"),
        Column("Split", "Fingerprint of the split of the data", numeric=False),
    ]
    cells: list[Line] = []
    for group in view.groups:
        for run in group.runs:
            value = headline_value(run.summary)
            found = None if value is None else estimate([value])
            seconds = run.summary.get("seconds")
            cells.append(
                [
                    names[run.path],
                    group.label,
                    Cell(str(run.experiment["seed"]), float(run.experiment["seed"])),
                    Cell(formats.percent(found, 2), None if found is None else found.mean),
                    Cell(f"{run.rounds_done:,}", float(run.rounds_done)),
                    Cell(formats.duration(seconds), seconds),
                    run.split_hash,
                ]
            )
    summary = element("summary", f"The runs one by one ({len(cells):,})")
    return element("details", summary, table("The runs", columns, cells))


def _copyable(text: str, what: str) -> Markup:
    button = element("button", "Copy", type="button", class_="copy", aria_label=f"Copy {what}")
    return element("div", element("pre", element("code", text), tabindex="0"), button, class_="copyable")


def _common_and_differing(experiments: Sequence[Mapping[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """Part the settings into those that all runs share, with their value, and the names of the others."""
    known = [field.name for field in dataclasses.fields(Experiment)]
    keys = [key for key in known if any(key in experiment for experiment in experiments)]
    differing = [key for key in keys if len({repr(experiment.get(key)) for experiment in experiments}) > 1]
    return {key: experiments[0][key] for key in keys if key not in differing}, differing


def settings_that_differ(experiments: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name the settings in which some of the experiments differ."""
    return _common_and_differing(experiments)[1]


def written_setting(value: Any) -> str:
    """Write the value of a setting as the command line takes it."""
    if value is None:
        return "none"
    if isinstance(value, tuple):
        return ", ".join(value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}: ")
        else:
            yield f"{prefix}{key}", value
