from __future__ import annotations

import dataclasses
import re
import subprocess
import sys

import pytest
from cli_calls import ROOT, Call, environment
from typer.main import get_command

import fedstrata
from fedstrata.cli import app
from fedstrata.experiment import Experiment


def test_without_a_command_it_tells_how_to_begin(call: Call) -> None:
    outcome = call()
    assert outcome.code == 0
    assert "fedstrata run" in outcome.out


@pytest.mark.parametrize("arguments", [("--version",), ("version",)])
def test_version(call: Call, arguments: tuple[str, ...]) -> None:
    outcome = call(*arguments)
    assert (outcome.code, outcome.out) == (0, f"fedstrata {fedstrata.__version__}\n")


def test_help_lists_every_key_of_the_experiment_with_its_default(call: Call) -> None:
    outcome = call("run", "--help")
    text = " ".join(outcome.out.split())
    assert outcome.code == 0
    for field in dataclasses.fields(Experiment):
        option = "import" if field.name == "imports" else field.name.replace("_", "-")
        assert f"--{option} " in text
        assert field.metadata["doc"] in text
    assert "[default: sgd(learning_rate=0.1," in text


COMMANDS = {
    "": get_command(app),
    **get_command(app).commands,
    **{
        f"{group} {name}": command
        for group, commands in get_command(app).commands.items()
        for name, command in getattr(commands, "commands", {}).items()
    },
}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_plain_text_and_explains_every_argument_and_option(call: Call, command: str) -> None:
    outcome = call(*command.split(), "--help")
    assert outcome.code == 0
    assert "\\" not in outcome.out
    assert not re.search(r"\b(every )?so (many|often|slow|long)\b", outcome.out)
    text = " ".join(outcome.out.split())
    assert text.lower().count("arguments:") <= 1
    for one in COMMANDS[command].params:
        if not getattr(one, "hidden", False):
            assert one.help, one.name
            assert one.help in text, one.name


def test_the_package_and_its_help_start_without_torch() -> None:
    code = (
        "import sys; from fedstrata.cli import main; "
        "main(['run', '--help']); main(['run', '--nonsense']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], env=environment(), check=True, capture_output=True, timeout=60)


def test_it_runs_as_a_module_from_a_checkout() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fedstrata", "--version"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, f"fedstrata {fedstrata.__version__}\n")


def test_all_public_names_are_there() -> None:
    for name in fedstrata.__all__:
        assert getattr(fedstrata, name) is not None
        assert name in dir(fedstrata)
    with pytest.raises(AttributeError, match="nonsense"):
        fedstrata.nonsense  # noqa: B018
