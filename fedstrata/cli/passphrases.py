"""Passphrases of private keys: asked for at a terminal, or read from a file; never taken from the command line."""

from __future__ import annotations

import getpass
import sys
from pathlib import Path
from typing import Annotated

import typer

from fedstrata.errors import FedStrataError

PassphraseFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A file whose first line is the passphrase of the private key; without it, it is asked for at a terminal.",
    ),
]
Protect = Annotated[
    bool,
    typer.Option(
        "--passphrase",
        help="Put new private keys under a passphrase, which is asked for twice, or read from --passphrase-file.",
    ),
]


def passphrase_of(key: Path, file: Path | None) -> str | None:
    """Get the passphrase of a private key, if it has one."""
    from fedstrata.deployment.keys import is_protected

    if not key.is_file() or not is_protected(key):
        return None
    return _from(file) if file is not None else _asked(f"Passphrase of {key}: ")


def new_passphrase(file: Path | None) -> str:
    """Get a passphrase to protect new keys with; at a terminal it must be typed twice."""
    if file is not None:
        return _from(file)
    first = _asked("New passphrase: ")
    if _asked("The same again: ") != first:
        raise FedStrataError("The two passphrases differ; nothing was written.")
    return first


def _from(file: Path) -> str:
    from fedstrata.deployment.keys import check_mode
    from fedstrata.files import read_bytes

    check_mode(file, "passphrase in")
    try:
        lines = read_bytes(file).decode().splitlines()
    except UnicodeDecodeError:
        raise FedStrataError(f"'{file}' is no text; write the passphrase into its first line.") from None
    if not lines or not lines[0]:
        raise FedStrataError(f"'{file}' is empty; write the passphrase into its first line.")
    return lines[0]


def _asked(question: str) -> str:
    if not sys.stdin.isatty():
        raise FedStrataError(
            "A passphrase is needed, and there is no terminal to ask for it; give --passphrase-file FILE."
        )
    return getpass.getpass(question)
