"""The commands that tell what there is: methods, models, datasets and so on, and the layers of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from fedstrata.cli.completing import completing
from fedstrata.cli.loading import loading_pytorch
from fedstrata.cli.options import Imports, Json, add_command
from fedstrata.cli.terminal import new_table, print_json, results, telling
from fedstrata.cli.words import readable
from fedstrata.errors import FedStrataError, unknown_name

if TYPE_CHECKING:
    from fedstrata.diagnostics import Diagnostic
    from fedstrata.layers import LayerMap
    from fedstrata.methods import Part
    from fedstrata.spec import Registry

LISTED = {
    "methods": ("fedstrata.methods", "methods"),
    "models": ("fedstrata.models", "models"),
    "datasets": ("fedstrata.data", "datasets"),
    "partitions": ("fedstrata.data", "ways to divide data among clients"),
    "transforms": ("fedstrata.data", "transforms of inputs"),
    "optimisers": ("fedstrata.optimisers", "optimisers of local training"),
    "schedules": ("fedstrata.schedules", "schedules of the learning rate"),
    "losses": ("fedstrata.losses", "losses of local training"),
    "metrics": ("fedstrata.scores", "metrics that models are judged by"),
    "diagnostics": ("fedstrata.diagnostics", "diagnostics of what happens in the layers"),
}
"""The commands that list a registry, which has the same name: where it is, and what it holds."""


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in LISTED:
        add_command(app, _lister(command))
    add_command(
        app, layers, examples=("fedstrata layers --model resnet8 --shape 3,32,32 --classes 100 --method fedbn",)
    )


def _lister(command: str) -> Callable[..., None]:
    """Make the command that lists a registry."""
    home, what = LISTED[command]
    name_of_one = Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="One of them, to see its parameters; or a pattern such as 'fed*'.",
            autocompletion=completing(command),
        ),
    ]

    def list_them(name: str | None = None, imports: Imports = None, json: Json = False) -> None:
        with loading_pytorch():
            registry = getattr(import_module(home), command)
        _list(registry, command, name, imports, json)

    list_them.__name__ = command
    list_them.__doc__ = f"List the {what}, or tell all about one."
    list_them.__annotations__["name"] = name_of_one
    return list_them


def layers(
    model: Annotated[str, typer.Option(metavar="TEXT", help="The model.")] = "cnn",
    data: Annotated[
        str, typer.Option(metavar="TEXT", help="The dataset whose shape and classes the model is built for.")
    ] = "digits",
    data_root: Annotated[str | None, typer.Option(metavar="TEXT", help="Where the dataset's files lie.")] = None,
    shape: Annotated[
        str | None, typer.Option(metavar="C,H,W", help="The shape of one input, instead of a dataset.")
    ] = None,
    classes: Annotated[int, typer.Option(min=1, help="The number of classes, with --shape.")] = 10,
    method: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Mark what this method keeps at the clients.")
    ] = None,
    imports: Imports = None,
    json: Json = False,
) -> None:
    """Show the layers of a model as methods see them."""
    with loading_pytorch():
        from fedstrata.experiment import Experiment
        from fedstrata.layers import LayerMap
        from fedstrata.methods import Method
        from fedstrata.models import build_model
        from fedstrata.plugins import import_files
        from fedstrata.runs.preparing import load_data

    import_files(imports or ())
    if shape is None:
        with telling(f"loading the data {data}"):
            dataset = load_data(Experiment(data=data, data_root=data_root))
        input_shape, count, trial = dataset.input_shape, dataset.classes, dataset.trial
    else:
        input_shape, count, trial = read_shape(shape), classes, None
    found = LayerMap.read(build_model(model, input_shape, count, 0, trial), input_shape, trial)
    personal = frozenset[str]() if method is None else Method.make(method).personal(found)
    rows: list[dict[str, Any]] = [
        {**row, **({} if method is None else {"personal": _share(layer.names, personal)})}
        for layer, row in zip(found.all, found.table(), strict=True)
    ]
    if json:
        print_json(rows)
        return
    shown = [column for column in rows[0] if column != "tensors"]
    table = new_table(
        *(f"stays with {method}" if column == "personal" else column for column in shown), right=("parameters",)
    )
    for row in rows:
        table.add_row(*(Text(f"{row[column]:,}" if isinstance(row[column], int) else row[column]) for column in shown))
    results.print(table)
    total = sum(layer.size for layer in found.all)
    results.print()
    results.print(
        Text(f"{model} for inputs {'x'.join(map(str, input_shape))} and {count} classes: {total:,} parameters."),
        soft_wrap=True,
    )


def read_shape(text: str) -> tuple[int, ...]:
    """Read a shape.

    >>> read_shape("3,32,32")
    (3, 32, 32)
    """
    try:
        shape = tuple(int(piece) for piece in text.replace("x", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise FedStrataError(f"'{text}' is not a shape; write the sizes of one input like 3,32,32.")
    return shape


def _share(names: tuple[str, ...], personal: frozenset[str]) -> str:
    kept = sum(name in personal for name in names)
    return "all" if kept == len(names) else "" if kept == 0 else "a part"


def _list(
    registry: Registry[Any], command: str, pattern: str | None, imports: Sequence[Path] | None, json: bool
) -> None:
    from fedstrata.plugins import import_files

    import_files(imports or ())
    names = registry.names(pattern or "*")
    if not names:
        raise unknown_name(registry.kind, pattern or "", registry.names())
    if json:
        print_json([_describe(registry, name) for name in names])
    elif pattern is not None and len(names) == 1:
        _print_details(_describe(registry, names[0]))
    else:
        _print_list([{**registry.describe(name), **_family(registry, name)} for name in names], registry.kind, command)


def _describe(registry: Registry[Any], name: str) -> dict[str, Any]:
    from fedstrata.diagnostics import Diagnostic
    from fedstrata.methods import Part

    cls = registry.get(name)
    facts = method_facts(cls()) if issubclass(cls, Part) else {}
    return {**registry.describe(name), **facts, **(diagnostic_facts(cls) if issubclass(cls, Diagnostic) else {})}


def diagnostic_facts(diagnostic: type[Diagnostic]) -> dict[str, Any]:
    """Tell what a diagnostic looks at, where it can be computed, and what its numbers are."""
    from fedstrata.diagnostics import Need

    return {
        "needs": [need.value for need in Need if need in diagnostic.needs],
        "on_real_sites": diagnostic.needs <= {Need.UPLOADS},
        "under_secure_aggregation": not diagnostic.needs,
        "afterwards": diagnostic.afterwards,
        "quantities": [{"name": name, **dataclasses.asdict(one)} for name, one in diagnostic.quantities.items()],
    }


def _family(registry: Registry[Any], name: str) -> dict[str, Any]:
    facts = getattr(registry.get(name), "facts", None)
    return {} if facts is None else {"family": facts.family}


def method_facts(method: Part) -> dict[str, Any]:
    """Tell what is true of a method: what its author says, and what its hooks show."""
    from fedstrata.methods import Method
    from fedstrata.methods import methods as registry
    from fedstrata.methods.contract.compatibility import defines, objection

    parts, layers = method.parts(), _example_layers()
    keeps_personal = any(list(part.keeps(layers).personal) for part in parts)

    def some_define(*hooks: str) -> bool:
        return any(defines(part, *hooks) for part in parts)

    def refuses(other: Part) -> bool:
        return any(objection(one, part) for one in parts for part in other.parts() if one != part)

    obstacles = [part.facts.not_on_network for part in (method, *parts) if part.facts.not_on_network]
    if any(part.needs.proxy for part in parts):
        obstacles.append("it needs labelled samples at the server, which only a rehearsal has")
    seen = obstacles[0] if obstacles else Method.make(method).objection_to_secure_aggregation
    return {
        "family": method.facts.family,
        "paper": method.facts.paper,
        "link": method.facts.link,
        "personal_layers": keeps_personal,
        "client_state": some_define("keeps", "client_memory") or any(part.needs.previous for part in parts),
        "server_state": some_define("server_memory"),
        "refuses": [name for name in registry.names() if name != method.name and refuses(registry.make(name))],
        "on_network": not obstacles,
        "not_on_network": obstacles[0] if obstacles else None,
        "secure_aggregation": seen is None,
        "not_under_secure_aggregation": seen,
    }


@cache
def _example_layers() -> LayerMap:
    """Read the layers of a small model with convolutions, norms and a head, on which methods show what they keep."""
    from fedstrata.layers import LayerMap
    from fedstrata.models import build_model

    return LayerMap.read(build_model("cnn", (1, 8, 8), 10, seed=0), (1, 8, 8))


def _print_list(described: list[dict[str, Any]], kind: str, command: str) -> None:
    """Print one line for each component, under its family where there are families."""
    families: dict[str | None, list[dict[str, Any]]] = {}
    for entry in described:
        families.setdefault(entry.get("family"), []).append(entry)
    widest = max(len(entry["name"]) for entry in described)
    for number, (family, members) in enumerate(families.items()):
        if family is not None:
            results.print(Text(f"{family}\n" if number == 0 else f"\n{family}\n", style="dim italic"), end="")
            table = Table.grid(padding=(0, 2))
            table.add_column(min_width=widest)
        else:
            table = new_table(kind, "what it is")
        for entry in members:
            origin = "" if entry["origin"] is None else f" (from {entry['origin']})"
            table.add_row(
                Text(entry["name"], style="bold"), Text.assemble(readable(entry["summary"]), (origin, "dim italic"))
            )
        results.print(table)
    hint = f"\n'fedstrata {command} NAME' tells the parameters of one."
    if kind == "diagnostic":
        hint += " 'fedstrata run --diagnose inertia+norms' computes some of them, --diagnose all all that it can."
    if kind == "method":
        hint += " Methods are combined with '+', such as 'fedbn+fedprox(mu=0.01)'."
    results.print(Text(hint, style="dim"))


def _print_details(entry: dict[str, Any]) -> None:
    results.print(Text(entry["name"], style="bold"))
    results.print(Text(readable(entry["description"])))
    if entry["parameters"]:
        told = any(one["source"] for one in entry["parameters"])
        table = new_table("parameter", "default", "meaning", *(["default from"] if told else []))
        for one in entry["parameters"]:
            source = [Text(one["source"] or "", style="dim")] if told else []
            table.add_row(Text(one["name"], style="bold"), Text(_default(one["default"])), Text(_meaning(one)), *source)
        results.print()
        results.print(table)
    results.print()
    facts = Table.grid(padding=(0, 2))
    origin = {} if entry["origin"] is None else {"from": entry["origin"]}
    for name, value in {**origin, **_facts(entry), "written as": example(entry)}.items():
        facts.add_row(Text(name, style="dim"), Text(value, overflow="fold"))
    results.print(facts)


def example(entry: dict[str, Any]) -> str:
    """Show how a component is written, with its first parameters that have a value."""
    given = [f"{one['name']}={_default(one['default'])}" for one in entry["parameters"] if one["default"] is not None][
        :2
    ]
    return f"{entry['name']}({', '.join(given)})" if given else str(entry["name"])


def _facts(entry: dict[str, Any]) -> dict[str, str]:
    """Word the facts about a method or a diagnostic."""
    if "quantities" in entry:
        return _facts_of_diagnostic(entry)
    if "family" not in entry:
        return {}
    refused = ", ".join(entry["refuses"])
    facts = {
        "family": entry["family"],
        "paper": entry["paper"],
        "link": entry["link"],
        "personal layers": "yes, they never leave the client" if entry["personal_layers"] else "no",
        "client remembers": "yes, from round to round" if entry["client_state"] else "no",
        "server remembers": "yes, from round to round" if entry["server_state"] else "no",
        "by messages alone": "yes" if entry["on_network"] else f"no: {entry['not_on_network']}",
        "secure aggregation": "yes" if entry["secure_aggregation"] else f"no: {entry['not_under_secure_aggregation']}",
        "combining": f"with any other method but {refused}" if refused else "with any other method",
    }
    return {name: value for name, value in facts.items() if value}


def _facts_of_diagnostic(entry: dict[str, Any]) -> dict[str, str]:
    needed = ", ".join(entry["needs"])
    return {
        "looks at": needed or "the server's model before and after a round",
        "on real sites": "yes" if entry["on_real_sites"] else "no: what it looks at stays at the sites",
        "secure aggregation": "yes" if entry["under_secure_aggregation"] else "no: the server sees only sums",
        "of finished runs": f"yes, by 'fedstrata diagnose RUN --diagnose {entry['name']}'"
        if entry["afterwards"]
        else "no: only while a run goes on, with --diagnose",
        **{one["name"]: f"{one['title']}. {one['explanation']}" for one in entry["quantities"]},
    }


def _meaning(described: dict[str, Any]) -> str:
    choices = [*map(str, described["choices"] or ()), *(["none"] if "none" in described["type"] else [])]
    return (
        f"{described['meaning']} One of: {', '.join(choices)}." if described["choices"] else str(described["meaning"])
    )


def _default(value: Any) -> str:
    from fedstrata.spec import format_value

    return format_value(value)
