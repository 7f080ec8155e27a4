"""What the README shows works as it is shown."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PYTHON = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
SHELL = [line.partition("#")[0].strip() for line in README.splitlines() if line.startswith("fedstrata ")]


@pytest.mark.usefixtures("fresh_methods")
@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_python_examples_run(number, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    exec(compile(PYTHON[number], f"README example {number}", "exec", dont_inherit=True), {"__name__": "__main__"})
    assert not list(tmp_path.iterdir()), "a run without 'out' writes nothing"


def test_there_are_examples():
    assert len(PYTHON) == 3
    assert len(SHELL) == 18


def test_every_method_that_exists_is_listed_and_no_other():
    from fedstrata.methods import methods

    table = README.partition("## Methods\n")[2].partition("What reproduces")[0]
    listed = set(re.findall(r"`([a-z-]+)`", table)) - {"personal-head"}
    assert listed | {"transient"} == {name for name in methods.names() if name != "personal-head"}


@pytest.mark.parametrize("line", SHELL)
def test_shell_examples_name_real_commands_and_options(line):
    from typer.main import get_command

    from fedstrata.cli import app

    _, command, *arguments = shlex.split(line)
    known = get_command(app).commands[command]
    options = {option for parameter in known.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {argument for argument in arguments if argument.startswith("-")} <= options


@pytest.mark.parametrize("link", re.findall(r"\]\(([^)#:]+)\)", README))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()
