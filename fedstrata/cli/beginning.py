"""The command that begins a component of one's own: a file to change, and its test."""

from __future__ import annotations

import keyword
import re
from importlib import import_module
from importlib.resources import files as package_files
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import Annotated

import typer
from rich.text import Text

from fedstrata.cli.options import Json, add_command
from fedstrata.cli.terminal import print_json, results
from fedstrata.errors import FedStrataError, unknown_name

KINDS = {"method": "fedstrata.methods", "model": "fedstrata.models", "dataset": "fedstrata.data"}
"""What can be begun, and the module that has its registry."""
_FIRST_RUNS = {
    "method": "fedstrata run --import {file} --method {name} --data digits --rounds 2",
    "model": "fedstrata run --import {file} --model {name} --data digits --rounds 2",
    "dataset": "fedstrata run --import {file} --data {name} --model mlp --rounds 2",
}


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    examples = ("fedstrata new method my-method", "fedstrata new dataset my-hospital --folder study")
    add_command(app, new, examples=examples)


def new(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="What to begin: a method, a model or a dataset.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name, such as my-method.")],
    folder: Annotated[Path, typer.Option(help="Where to write; by default the current folder.")] = Path(),
    json: Json = False,
) -> None:
    """Begin a method, a model or a dataset of your own.

    A small example that works, with comments, is written to NAME.py, and its test to test_NAME.py.
    """
    if kind not in KINDS:
        raise unknown_name("template for a", kind, KINDS)
    module = _module_name(kind, name)
    written = {folder / f"{module}.py": f"{kind}.py.txt", folder / f"test_{module}.py": f"test_{kind}.py.txt"}
    for path in written:
        if path.exists():
            raise FedStrataError(f"There is already a file '{path}'; choose another name or another --folder.")
    _refuse_taken(kind, name, module)
    texts = {path: filled(template, kind, name, module) for path, template in written.items()}
    from fedstrata import files

    files.make_folder(folder)
    for path, text in texts.items():
        files.write_atomically(path, text)
    path, test = written
    first = _FIRST_RUNS[kind].format(file=path, name=name)
    if json:
        print_json({"file": str(path), "test": str(test), "run": first})
        return
    results.print(Text.assemble((str(path), "bold"), f" is a small {kind} that works; change it to what you need."))
    results.print(
        Text.assemble("Run it:   ", (first, "bold"), "\nTest it:  ", (f"pytest {test}", "bold")), soft_wrap=True
    )


def filled(template: str, kind: str, name: str, module: str) -> str:
    """Fill a template in for a component of some name."""
    text = package_files("fedstrata.cli").joinpath("templates", template).read_text(encoding="utf-8")
    class_name = "".join(word[:1].upper() + word[1:] for word in re.split("[-_]", name))
    used = package_files("fedstrata.cli").joinpath("templates", f"{kind}.py.txt").read_text(encoding="utf-8")
    if re.search(rf"\b{class_name}\b", used):
        class_name += kind.capitalize()
    return Template(text).substitute(name=name, module=module, class_name=class_name)


def _module_name(kind: str, name: str) -> str:
    module = name.replace("-", "_")
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name) or keyword.iskeyword(module):
        raise FedStrataError(
            f"'{name}' is no name for a {kind}: it takes letters, digits and hyphens, such as my-{kind}."
        )
    return module


def _refuse_taken(kind: str, name: str, module: str) -> None:
    """Refuse a name that another component or another module of Python has."""
    if name in getattr(import_module(KINDS[kind]), f"{kind}s").names():
        raise FedStrataError(f"There is already a {kind} '{name}'; choose another name.")
    if find_spec(module) is not None:
        raise FedStrataError(
            f"'{module}' is the name of a Python module, which {module}.py would hide; choose another."
        )
