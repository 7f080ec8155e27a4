"""Options that commands share; those of the experiment are made from its fields, so that nothing is listed twice."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import shlex
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from fedstrata.cli.completing import REGISTRY_OF_KEY, completing, names_in_sources
from fedstrata.cli.loading import loading_pytorch
from fedstrata.cli.terminal import guarded, telling
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment

EXPERIMENT_KEYS = tuple(field.name for field in dataclasses.fields(Experiment))

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document on standard output, and nothing else there.")
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but warnings and errors.")]
NoReport = Annotated[bool, typer.Option("--no-report", help="Write no report.html.")]
Figures = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Also write every chart there as PNG, SVG and PDF for a paper, its data as CSV, and the results as LaTeX "
        "and Markdown.",
    ),
]
FigureWidth = Annotated[
    str | None,
    typer.Option(metavar="column|page", help="The width of figures: 3.25 inches (the default), or 6.75."),
]
FigureFont = Annotated[
    str | None,
    typer.Option(metavar="serif|sans", help="The letters of figures: like Times (the default) or Helvetica."),
]
ExperimentFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="EXPERIMENT.TOML", help="A file with the keys of an experiment; options change what it says."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a key of the experiment, such as method='fedprox(mu=0.01)'; may be repeated.",
    ),
]
LearningRate = Annotated[
    str | None, typer.Option(metavar="X", help="Change the learning rate of the optimiser, and nothing else of it.")
]
Imports = Annotated[
    list[Path] | None,
    typer.Option(
        "--import",
        metavar="FILE",
        help=next(field.metadata["doc"] for field in dataclasses.fields(Experiment) if field.name == "imports"),
    ),
]
Log = Annotated[
    list[str] | None,
    typer.Option(
        "--log",
        metavar="LOGGER",
        help="Keep the numbers in another tool too: tensorboard, mlflow or wandb, or with parameters, such as "
        "'wandb(project=layers, mode=offline)'; may be repeated. Nothing leaves the machine unless that is asked for.",
    ),
]
_Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


class Command(TyperCommand):
    """A command whose help is whole and plain, whatever versions of Typer and Click are installed."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        told = _argument_help(self.callback) if self.callback is not None else {}
        for one in self.params:
            if getattr(one, "help", "") is None:  # Click 8.5 drops what Typer before 0.26 tells it of arguments
                setattr(one, "help", told.get(one.name or ""))  # noqa: B010 - not every kind of parameter has it

    def get_help(self, ctx: Any) -> str:
        """Write the help."""
        # Where Rich is installed, some versions of Typer escape brackets for it, though it prints nothing here.
        return super().get_help(ctx).replace(r"\[", "[")

    def format_arguments(self, ctx: Any, formatter: Any) -> None:
        """Leave arguments to Typer, which writes them with the options, where Click 8.5 would write them again."""


class Group(TyperGroup):
    """A command with commands of its own, whose help is plain as that of a :class:`Command`."""

    def get_help(self, ctx: Any) -> str:
        """Write the help."""
        return super().get_help(ctx).replace(r"\[", "[")


def _argument_help(function: Callable[..., Any]) -> dict[str, str | None]:
    annotations = {name: one.annotation for name, one in inspect.signature(function).parameters.items()}
    return {
        name: info.help
        for name, annotation in annotations.items()
        for info in getattr(annotation, "__metadata__", ())
        if isinstance(info, typer.models.ArgumentInfo)
    }


def add_command(
    app: typer.Typer, function: Callable[..., None], keys: Sequence[str] = (), examples: Sequence[str] = ()
) -> None:
    """Make a function a command that turns errors into sentences.

    For the experiment's ``keys`` it gets options; the function receives what the user gave of them as the dictionary
    ``changes``.
    """
    app.command(cls=Command, epilog=_epilog(examples))(_guarded(function, keys))


def add_group(app: typer.Typer, function: Callable[..., None], examples: Sequence[str] = ()) -> typer.Typer:
    """Make a function a command that may also have commands of its own, which are to be added to what is returned."""
    group = typer.Typer(rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})
    group.callback(cls=Group, invoke_without_command=True, epilog=_epilog(examples))(_guarded(function, ()))
    app.add_typer(group, name=function.__name__)
    return group


def _guarded(function: Callable[..., None], keys: Sequence[str]) -> Callable[..., None]:
    parameters = [
        *(_option(field) for field in dataclasses.fields(Experiment) if field.name in keys),
        *(_keyword(one.name, one.annotation, one.default) for one in _own_parameters(function)),
        _keyword("debug", _Debug, False),
        _keyword("context", typer.Context, inspect.Parameter.empty),
    ]

    @functools.wraps(function)
    def run(*, context: typer.Context, debug: bool, **given: Any) -> None:
        if context.invoked_subcommand is not None:
            return
        with guarded(debug):
            values = {key: given.pop(key) for key in keys}
            changes = {key: read_value(key, value) for key, value in values.items() if _was_given(context, key)}
            function(**given, **({"changes": changes} if keys else {}))

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


def _epilog(examples: Sequence[str]) -> str | None:
    # The control character keeps the lines of a paragraph as they are.
    return "\n".join(["\b", "Examples:", *(f"  {example}" for example in examples)]) if examples else None


def read_experiment(
    path: Path | None,
    settings: Sequence[str] | None,
    changes: dict[str, Any],
    learning_rate: str | None = None,
    quiet: bool = False,
) -> Experiment:
    """Put an experiment together: the file (or the defaults), then ``--set``, then single options.

    Files with components are imported; those of the command line come beside those of the experiment's file, or in the
    place of one that has the same name.
    """
    from fedstrata.plugins import IMPORTS_FOLDER, imported_name, load_imports

    if path is not None and not path.exists() and re.split(r"[+(:]", str(path))[0] in names_in_sources("methods"):
        raise FedStrataError(f"There is no file '{path}'; to run the method, write --method {shlex.quote(str(path))}.")
    start = Experiment() if path is None else Experiment.read(path)
    experiment = start.with_changes(dict(map(read_setting, settings or ())))
    given = {file.name: str(file) for file in changes.get("imports", ())}
    kept = [text for text in experiment.imports if imported_name(text) not in given]
    experiment = experiment.with_changes({**changes, "imports": (*kept, *given.values())})
    places = [Path()] if path is None else [path.parent, path.parent / IMPORTS_FOLDER]
    with telling(f"importing {', '.join(map(imported_name, experiment.imports))}", quiet or not experiment.imports):
        experiment = load_imports(experiment, *places)
    if learning_rate is None:
        return experiment
    with loading_pytorch(quiet):
        from fedstrata.optimisers import with_learning_rate

    changed = with_learning_rate(experiment.optimiser, _as_number(float, learning_rate))
    return experiment.with_changes({"optimiser": changed})


def read_setting(text: str) -> tuple[str, Any]:
    """Read ``key=value``.

    >>> read_setting("method=fedprox(mu=0.01)"), read_setting("rounds=5")
    (('method', 'fedprox(mu=0.01)'), ('rounds', 5))
    """
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise FedStrataError(f"'--set {text}' is not of the form KEY=VALUE; write it like --set rounds=50.")
    key = key.strip().replace("-", "_")
    return key, read_value(key, value)


def read_value(key: str, value: Any) -> Any:
    """Turn the text of a value into what a key of the experiment takes; the experiment refuses what does not fit."""
    kinds = _kinds(key) if key in EXPERIMENT_KEYS else ()
    if not isinstance(value, str):
        return value
    text = value.strip()
    if type(None) in kinds and text.lower() == "none":
        return None
    if bool in kinds:
        return {"true": True, "false": False}.get(text.lower(), text)
    for kind in (int, float):
        if kind in kinds:
            return _as_number(kind, text)
    return value


def _as_number(kind: type[int] | type[float], text: str) -> int | float | str:
    try:
        return kind(text)
    except ValueError:
        return text


def _kinds(key: str) -> tuple[Any, ...]:
    hint = typing.get_type_hints(Experiment)[key]
    return typing.get_args(hint) or (hint,)


def _own_parameters(function: Callable[..., None]) -> list[inspect.Parameter]:
    return [one for name, one in inspect.signature(function, eval_str=True).parameters.items() if name != "changes"]


def _option(field: dataclasses.Field[Any]) -> inspect.Parameter:
    if field.name == "imports":
        return _keyword(field.name, Imports, None)
    flag = f"--{field.name.replace('_', '-')}"
    kinds = _kinds(field.name)
    text = field.metadata["doc"]
    if bool in kinds:
        return _keyword(
            field.name,
            Annotated[bool, typer.Option(f"{flag}/--no-{flag.removeprefix('--')}", help=text)],
            field.default,
        )
    choices = field.metadata.get("choices")
    metavar = "|".join(choices) if choices else "N" if int in kinds else "X" if float in kinds else "TEXT"
    default = None if field.default is None else str(field.default)
    registry = REGISTRY_OF_KEY.get(field.name)
    complete = None if registry is None else completing(registry)
    option = typer.Option(flag, metavar=metavar, help=text, autocompletion=complete)
    return _keyword(field.name, Annotated[str | None, option], default)


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _was_given(context: typer.Context, key: str) -> bool:
    source = context.get_parameter_source(key)
    return source is not None and source.name == "COMMANDLINE"
