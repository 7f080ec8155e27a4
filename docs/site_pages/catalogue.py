"""The catalogue of methods, a page for each family, from the registry and the docstrings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fedstrata.cli.listing import example, method_facts
from fedstrata.methods import methods
from fedstrata.methods.contract.declarations import FAMILIES
from fedstrata.spec import format_value
from site_pages.docstrings import to_markdown

Entry = Mapping[str, Any]


def pages() -> dict[str, str]:
    """Write the pages, by their paths in the site: an overview, one for each family, and one of all defaults."""
    families = entries()
    written = {"methods/index.md": _overview(families), "methods/defaults.md": _defaults(families)}
    return written | {path_of(family): _family(family, members) for family, members in families.items()}


def entries() -> dict[str, list[Entry]]:
    """Describe all methods that come with the package, by family, in the order in which they are listed."""
    described = [{**methods.describe(name), **method_facts(methods.make(name))} for name in methods.names()]
    return {family: [entry for entry in described if entry["family"] == family] for family in FAMILIES}


def path_of(family: str) -> str:
    """Name the page of a family.

    >>> path_of("local objective")
    'methods/local-objective.md'
    """
    return f"methods/{_slug(family)}.md"


def _slug(text: str) -> str:
    return re.sub(r"\W+", "-", text)


def _overview(families: Mapping[str, list[Entry]]) -> str:
    count = sum(map(len, families.values()))
    return f"""# Methods

FedStrata has {count} methods in {len(families)} families. They are combined with `+`, such as `fedbn+fedprox(mu=0.01)`;
[what fits together](../concepts.md#what-fits-together) follows from what each of them touches. `fedstrata methods NAME`
tells the same in a terminal.

*Real sites* says whether a method runs on a [network of sites](../deployment.md), *secure* whether it does under
secure aggregation, where the server sees nothing but the sum of the uploads.
[Where defaults come from](defaults.md) lists the source of each.

{"".join(_overview_table(family, members) for family, members in families.items())}"""


def _overview_table(family: str, members: Iterable[Entry]) -> str:
    rows = "".join(
        f"| [`{entry['name']}`]({_slug(family)}.md#{entry['name']}) | {to_markdown(entry['summary'])} "
        f"| {_yes(entry['on_network'])} | {_yes(entry['secure_aggregation'])} |\n"
        for entry in members
    )
    return f"## {_title(family)}\n\n| method | what it does | real sites | secure |\n|---|---|---|---|\n{rows}\n"


def _defaults(families: Mapping[str, list[Entry]]) -> str:
    rows = "".join(
        f"| [`{entry['name']}`]({_slug(family)}.md#{entry['name']}) | `{one['name']}` "
        f"| `{format_value(one['default'])}` | {_cell(one['source'] or '')} |\n"
        for family, members in families.items()
        for entry in members
        for one in entry["parameters"]
    )
    return f"""# Where defaults come from

A method does what its authors did unless it is told otherwise. A default comes from their code (a repository and a
file), from a section of their paper, or, where neither says anything, from us. Where code and paper differ, the
default follows the authors' code or what the table says, and the other is an option.

| method | parameter | default | from |
|---|---|---|---|
{rows}"""


def _family(family: str, members: Iterable[Entry]) -> str:
    return f"# {_title(family)}\n\n" + "\n".join("\n".join(_method(entry)) for entry in members)


def _method(entry: Entry) -> Iterator[str]:
    yield f"## `{entry['name']}` {{ #{entry['name']} }}\n"
    yield to_markdown(entry["description"], lambda name: name if name.startswith("fedstrata.") else None)
    yield ""
    if entry["parameters"]:
        yield parameter_table(entry["parameters"])
    paper = f"[{entry['paper']}]({entry['link']})" if entry["link"] else entry["paper"]
    facts = {
        "Paper": paper,
        "On real sites": _yes(entry["on_network"], entry["not_on_network"]),
        "Under secure aggregation": _yes(entry["secure_aggregation"], entry["not_under_secure_aggregation"]),
        "Not beside": ", ".join(f"`{name}`" for name in entry["refuses"]),
        "Written as": f"`{example(dict(entry))}`",
    }
    yield "| | |\n|---|---|"
    yield from (f"| {name} | {value} |" for name, value in facts.items() if value)
    yield ""


def parameter_table(parameters: Iterable[Mapping[str, Any]]) -> str:
    """Tell the name, the default and the meaning of some parameters, and what they take."""
    rows = "".join(
        f"| `{one['name']}` | `{format_value(one['default'])}` | {_cell(one['meaning'])} | {_takes(one)} "
        f"| {_cell(one['source'] or '')} |\n"
        for one in parameters
    )
    return f"| parameter | default | meaning | takes | default from |\n|---|---|---|---|---|\n{rows}"


def _cell(text: str) -> str:
    """Keep a bar from ending a cell of a table."""
    return text.replace("|", r"\|")


def _takes(parameter: Mapping[str, Any]) -> str:
    """Say which values a parameter admits."""
    if parameter["choices"]:
        choices = [f"`{format_value(choice)}`" for choice in parameter["choices"]]
        return ", ".join([*choices, *(["none"] if "none" in parameter["type"] else [])])
    return f"{parameter['type']}{', ' + parameter['limits'] if parameter['limits'] else ''}"


def _yes(so: bool, reason: str | None = None) -> str:
    return "yes" if so else f"no: {reason}" if reason else "no"


def _title(family: str) -> str:
    return family[:1].upper() + family[1:]
