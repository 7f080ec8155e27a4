"""Mistakes that one sentence can explain."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class FedStrataError(Exception):
    """A user's mistake: the message says what was given, what is possible and what to do.

    The command line prints the message and exits with code 2; no traceback unless ``--debug`` is given.
    """


class FedStrataWarning(UserWarning):
    """Something works, but not in the way that its name suggests."""


def unknown_name(kind: str, given: str, known: Iterable[str]) -> FedStrataError:
    """Build the error for a name that does not exist, with the nearest valid one.

    >>> print(unknown_name("method", "fedagv", ["fedavg", "fedbn"]))
    There is no method 'fedagv'. Did you mean 'fedavg'? Known: fedavg, fedbn.
    """
    names = sorted(known)
    near = get_close_matches(given, names, n=1, cutoff=0.5)
    hint = f" Did you mean '{near[0]}'?" if near else ""
    return FedStrataError(f"There is no {kind} '{given}'.{hint} Known: {', '.join(names) or 'none'}.")
