"""Mistakes that one sentence can explain."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class FedStrataError(Exception):
    """A user's mistake: the message says what was given, what is possible and what to do.

    The command line prints the message and exits with code 2; no traceback unless ``--debug`` is given.
    """


class NotHereError(FedStrataError):
    """What a run needs is not on this machine: files, weights or a package.

    ``brief`` says what, and how to get it, for a list of many such things: where one looked is said once for all.
    """

    def __init__(self, message: str, brief: str) -> None:
        super().__init__(message)
        self.brief = brief


class FedStrataWarning(UserWarning):
    """Something works, but not in the way that its name suggests."""


def first_line(error: Exception) -> str:
    r"""Take from the error of another library what fits into a sentence.

    >>> first_line(OSError("It failed.\nMore about it.")), first_line(OSError())
    ('It failed', 'OSError')
    """
    return str(error).strip().split("\n")[0].rstrip(".") or type(error).__name__


def mistake_of_others(error: BaseException) -> str | None:
    """Say where somebody's own code failed, such as a method that was imported: in which file and line; else nothing.

    An error that arose in FedStrata's code, or in a library that this has called, is no mistake of others.
    """
    own, *libraries = (
        Path(__file__).parent,
        *(Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib", "platlib")),
    )
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if path.is_relative_to(own):
            return None
        if path.is_file() and not any(path.is_relative_to(place) for place in libraries):
            what = f"{type(error).__name__}: {error}".rstrip(": .")
            return f"'{path.name}' failed in line {frame.lineno}, in '{frame.name}': {what}."
    return None


def nearest(given: str, known: Iterable[str]) -> str | None:
    """Guess which known name was meant: one that looks alike, that it is short for, or that it is made of.

    >>> nearest("--lr", ["--help", "--learning-rate"]), nearest("num_clients", ["late_clients", "clients", "chunk"])
    ('--learning-rate', 'clients')
    >>> nearest("runn", ["resume", "run"]), nearest("nonsense", ["run"])
    ('run', None)
    """
    plain = {_plain(name): name for name in known}
    wanted = _plain(given)
    alike = get_close_matches(wanted, plain, n=1, cutoff=0.8)
    short_for = [name for name in plain if "-" in name and wanted == "".join(word[0] for word in name.split("-"))]
    made_of = [name for name in plain if set(name.split("-")) < set(wanted.split("-"))]
    begins = [name for name in plain if len(name) > 1 and wanted.startswith(name)]
    less_alike = get_close_matches(wanted, plain, n=1, cutoff=0.5)
    found = [*alike, *short_for, *sorted(made_of, key=len), *sorted(begins, key=len, reverse=True), *less_alike]
    return plain[found[0]] if found else None


def _plain(name: str) -> str:
    return name.lower().strip("-").replace("_", "-")


def unknown_name(kind: str, given: str, known: Iterable[str]) -> FedStrataError:
    """Build the error for a name that does not exist, with the nearest valid one.

    >>> print(unknown_name("method", "fedagv", ["fedavg", "fedbn"]))
    There is no method 'fedagv'. Did you mean 'fedavg'? Known: fedavg, fedbn.
    """
    names = sorted(known)
    near = nearest(given, names)
    hint = f" Did you mean '{near}'?" if near is not None else ""
    return FedStrataError(f"There is no {kind} '{given}'.{hint} Known: {', '.join(names) or 'none'}.")
