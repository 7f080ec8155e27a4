"""What pages have drawn from the code: the round with its hooks, what fits together, and what a run leaves behind.

The order of hooks, their sides, words and types are those of :class:`fedstrata.methods.Part`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any, Literal

from fedstrata.cli.beginning import filled
from fedstrata.diagnostics import Need, diagnostics
from fedstrata.errors import FedStrataError
from fedstrata.experiment import Experiment
from fedstrata.methods import Decision, Exchange, Matter, Message, Method, Part, methods
from fedstrata.methods.contract.compatibility import EXCLUSIVE_HOOKS, touched_by
from fedstrata.runs import folder
from fedstrata.spec import describe_parameters
from site_pages.catalogue import parameter_table
from site_pages.docstrings import reference, to_markdown

Side = Literal["server", "client", "both"]
_HEADING = re.compile(r"\s*# (.+?) -{5,}")
_SIDES: dict[str, Side] = {"Server": "server", "Client": "client", "Clients": "client"}
_SIDE_NAMES: dict[Side, str] = {"server": "server", "client": "client", "both": "either side"}


@dataclass(frozen=True)
class Hook:
    """A point of a round that a part can touch, as its definition tells."""

    path: str
    stage: str
    side: Side
    says: str
    sees: tuple[str, ...]
    gives: str
    decision: Decision | None
    at_every_step: bool

    @classmethod
    def read(cls, owner: type, name: str, stage: str = "") -> Hook:
        """Read a hook from its signature and the first sentence of its docstring."""
        function: Callable[..., Any] = getattr(owner, name)
        signature = inspect.signature(function)
        parameters = [one for key, one in signature.parameters.items() if key != "self"]
        prefix, says = _opening(function)
        first = parameters[0].annotation if parameters else ""
        return cls(
            path=f"{owner.__module__}.{owner.__qualname__}.{name}",
            stage=stage,
            side=_SIDES.get(prefix) or _SIDES.get(first) or "both",
            says=says,
            sees=tuple(f"{one.name}: {one.annotation}" for one in parameters),
            gives=signature.return_annotation,
            decision=EXCLUSIVE_HOOKS.get(name),
            at_every_step="step" in signature.parameters,
        )

    @property
    def name(self) -> str:
        """The name by which a part defines it."""
        return self.path.rpartition(".")[2]

    @property
    def sends(self) -> bool:
        """Whether a message leaves this side after it."""
        return self.gives == Message.__name__ and f"message: {Message.__name__}" in self.sees


def hooks() -> list[Hook]:
    """List the hooks of a part in the order of a round, each with the heading under which it stands.

    >>> [hook.name for hook in hooks() if hook.sends]
    ['broadcast', 'upload']
    """
    lines, start = inspect.getsourcelines(Part)
    matches = {start + number: _HEADING.match(line) for number, line in enumerate(lines)}
    headings = {place: heading.group(1) for place, heading in matches.items() if heading}
    first_stage = next(iter(headings.values()))
    found = []
    for name, function in vars(Part).items():
        if inspect.isfunction(function) and not name.startswith("_"):
            line = function.__code__.co_firstlineno
            stage = [heading for place, heading in headings.items() if place < line][-1]
            if stage != first_stage:  # what a part says of itself is no point of a round
                found.append(Hook.read(Part, name, stage))
    return found


def exchange_hooks() -> list[Hook]:
    """List the steps of an exchange before a round, in their order."""
    return [Hook.read(Exchange, name) for name, value in vars(Exchange).items() if inspect.isfunction(value)]


def _opening(function: Callable[..., Any]) -> tuple[str, str]:
    """Take the side and the first sentence from a docstring: ``Server: choose the participants (exclusive).``"""
    paragraph = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.;])\s", paragraph)[0]
    found = re.match(r"(Server|Client): (.*)", sentence)
    prefix, says = found.groups() if found else ("", sentence)
    says = says.replace(" (exclusive)", "").rstrip(".;")
    return prefix, says[:1].upper() + says[1:]


# The diagram ----------------------------------------------------------------------------------------------------------


def diagram() -> str:
    """Draw the hooks as two columns, the server's and the clients', with what travels between them."""
    stages = groupby(hooks(), key=lambda hook: hook.stage)
    drawn = "".join(_stage(stage, list(members)) for stage, members in stages)
    columns = '<div class="round-side">Server</div><div class="round-side">Clients</div>'
    return f'<div class="round">{columns}{drawn}</div>\n'


def _stage(stage: str, members: list[Hook]) -> str:
    drawn = [f'<div class="round-stage">{escape(stage)}</div>']
    for at_every_step, group in groupby(members, key=lambda hook: hook.at_every_step):
        boxes = [_box(hook) + (_arrow(hook) if hook.sends else "") for hook in group]
        drawn.append(_loop(boxes) if at_every_step else "".join(boxes))
    return "".join(drawn)


def _box(hook: Hook) -> str:
    """Draw a hook on its side, with its words up to a colon."""
    words = hook.says.partition(": ")[0]
    mark = "" if hook.decision is None else ' <span class="round-one" title="one part only">one part</span>'
    return f'<div class="round-hook round-{hook.side}">{_name(hook)}{mark}<br>{_html(words)}</div>'


def _loop(boxes: Iterable[str]) -> str:
    return f'<div class="round-loop"><div class="round-note">at every local step</div>{"".join(boxes)}</div>'


def _arrow(hook: Hook) -> str:
    return f'<div class="round-arrow round-from-{hook.side}">a message travels</div>'


def _html(text: str) -> str:
    """Write a few words of a docstring as HTML: code in backticks, formulas left out of the diagram."""
    return re.sub(r"``([^`]+)``", r"<code>\1</code>", escape(re.sub(r":math:`[^`]*`", "", text), quote=False))


# The tables -----------------------------------------------------------------------------------------------------------


def hook_table() -> str:
    """Tell of every hook who runs it, what it sees and what it returns."""
    rows = [f"| {_name(hook)} | {_SIDE_NAMES[hook.side]} | {_codes(hook.sees)} | `{hook.gives}` |" for hook in hooks()]
    return "\n".join(["| hook | side | what it sees | what it returns |", "|---|---|---|---|", *rows, ""])


def exchange_table() -> str:
    """Tell the steps of an exchange with clients before a round."""
    rows = [
        f"| {_name(hook)} | {_SIDE_NAMES[hook.side]} | {to_markdown(hook.says)} | {_codes(hook.sees)} |"
        for hook in exchange_hooks()
    ]
    return "\n".join(["| step | side | what it does | what it sees |", "|---|---|---|---|", *rows, ""])


def _name(hook: Hook) -> str:
    return reference(hook.path, hook.name)


def decisions() -> str:
    """List what only one part of a method can do, and the methods that do it."""

    def rows() -> Iterator[str]:
        for decision in Decision:
            deciding = [name for name, part in _single_parts() if decision in touched_by(part).decides]
            yield f"| {decision.value} | {_codes(deciding)} |"

    return "| a part that ... | methods |\n|---|---|\n" + "\n".join(rows()) + "\n"


def matters() -> str:
    """List what parts rely on, and which methods take it away."""

    def rows() -> Iterator[str]:
        for matter in Matter:
            taking = [name for name, part in _single_parts() if matter in touched_by(part).takes_away]
            yield f"| {matter.relied_on} | {matter.taken_away} | {_codes(taking)} |"

    head = "| a part that ... | does not fit beside one that ... | such as |\n|---|---|---|\n"
    return head + "\n".join(rows()) + "\n"


def refusals() -> str:
    """Show what is said of some compositions that cannot work."""
    return "\n".join(f"- `{text}`: {refusal_of(text)}" for text in ("local+lws", "ditto+pfedme", "fedadam+fedyogi"))


def refusal_of(text: str) -> str:
    """Quote why a composition is refused."""
    try:
        Method.make(text)
    except FedStrataError as error:
        return str(error)
    raise ValueError(f"'{text}' is not refused any more; show another example.")


def _single_parts() -> Iterator[tuple[str, Part]]:
    """Go through the registered methods that are one part."""
    for name in methods.names():
        part = methods.make(name)
        if part.parts() == (part,):
            yield name, part


def _codes(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "-"


def run_folder() -> str:
    """List what a run leaves behind."""
    return to_markdown(inspect.getdoc(folder) or "")


def experiment() -> str:
    """List the keys of an experiment."""
    return parameter_table(describe_parameters(Experiment))


def template() -> str:
    """Show the method that 'fedstrata new method steady' writes."""
    return f"```python\n{filled('method.py.txt', 'method', 'steady', 'steady')}```\n"


def diagnostic_table() -> str:
    """List the diagnostics: what each is, what it looks at, and the names of its numbers."""

    def rows() -> Iterator[str]:
        for name in diagnostics.names():
            one = diagnostics.get(name)
            needs = ", ".join(need.value.removeprefix("the ") for need in Need if need in one.needs)
            summary = to_markdown(diagnostics.describe(name)["summary"]).replace("|", "\\|").replace("\n", " ")
            yield f"| `{name}` | {summary} | {needs or 'the model alone'} | {_codes(one.quantities)} |"

    return "| | what it is | looks at | numbers |\n|---|---|---|---|\n" + "\n".join(rows()) + "\n"


PIECES: dict[str, Callable[[], str]] = {
    "round": diagram,
    "hooks": hook_table,
    "exchange": exchange_table,
    "decisions": decisions,
    "matters": matters,
    "refusals": refusals,
    "folder": run_folder,
    "experiment": experiment,
    "template": template,
    "diagnostics": diagnostic_table,
}
"""What pages can have drawn in the place of a line ``<!-- drawn: name -->``."""
