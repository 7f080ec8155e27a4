"""What the parser of the command line refuses, in sentences that say what was meant."""

from __future__ import annotations

import re
from typing import Any

from fedstrata.cli.completing import names_in_sources
from fedstrata.errors import nearest


def explain_usage(error: Any) -> str:
    """Word an error of the parser, with the nearest option or command and the help that tells more.

    In some versions of Typer its errors have no public base class, so they are known by what they carry.
    """
    context = getattr(error, "ctx", None)
    command = getattr(context, "command_path", "fedstrata")
    sentence = _unknown_option(error, context) or _unknown_command(error, context) or str(error.format_message())
    return f"{sentence}{'' if sentence.endswith(('.', '?')) else '.'} See '{command} --help'."


def _unknown_option(error: Any, context: Any) -> str | None:
    given = getattr(error, "option_name", None)
    if given is None or context is None or not hasattr(error, "possibilities"):
        return None
    meant = nearest(given, [option for one in context.command.params for option in (*one.opts, *one.secondary_opts)])
    return f"There is no option '{given}'.{_hint(meant)}"


def _unknown_command(error: Any, context: Any) -> str | None:
    found = re.match(r"No such command '(.*?)'", str(error.format_message()))
    if found is None:
        return None
    given = found.group(1)
    meant = nearest(given, getattr(context.command, "commands", ()))
    if meant is None and given in names_in_sources("methods"):
        return f"'{given}' is no command but a method; run it with 'fedstrata run --method {given}'."
    return f"There is no command '{given}'.{_hint(meant)}"


def _hint(meant: str | None) -> str:
    return "" if meant is None else f" Did you mean '{meant}'?"
