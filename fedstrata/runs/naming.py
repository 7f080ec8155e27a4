"""What the clients of a run are called: by their numbers, and by the names of their sites where the data has some."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from fedstrata.errors import FedStrataError, nearest

CLIENT_NAMES = "client_names"
"""Where the names of the clients stand in the description of the data, if they have names."""
_SHOWN = 12


def called(client: int, names: Sequence[str]) -> str:
    """Call a client by its name, if there are names, and its number, by which other places know it.

    >>> called(1, ("north", "south")), called(1, ())
    ('south (client 1)', 'client 1')
    """
    return f"{names[client]} (client {client})" if names else f"client {client}"


def number_of(given: object, clients: int, names: Sequence[str] = ()) -> int:
    """Tell which of so many clients is meant by a number or a name; a text that is both is the number.

    >>> number_of("1", 2, ("1", "2")), number_of("2", 2, ("1", "2")), number_of("01", 2, ("01", "02")), number_of(1, 2)
    (1, 1, 0, 1)
    """
    if isinstance(given, bool) or not isinstance(given, str | Integral):
        raise FedStrataError(
            f"{given!r} is no number or name of a client; the run has {clients}, from 0 to {clients - 1}."
        )
    text = given if isinstance(given, str) else str(int(given))
    if text in map(str, range(clients)):
        return int(text)
    if text not in names or not isinstance(given, str):
        raise unknown_client(text, clients, names)
    return names.index(text)


def unknown_client(given: str, clients: int, names: Sequence[str] = ()) -> FedStrataError:
    """Build the error for a client that a run does not have, with the nearest name.

    >>> print(unknown_client("7", 3))
    There is no client 7; the run has 3, from 0 to 2.
    >>> print(unknown_client("nort", 2, ("north", "south")))
    There is no client 'nort'; the run has 2, from 0 to 1. Did you mean 'north'?
    """
    number = given.lstrip("-").isdecimal()
    near = nearest(given, names)
    if near is not None:
        hint = f" Did you mean '{near}'?"
    elif names:
        hint = f" Their names: {', '.join(names[:_SHOWN])}{', ...' if len(names) > _SHOWN else '.'}"
    else:
        hint = "" if number else " They have no names."
    shown = given if number else f"'{given}'"
    return FedStrataError(f"There is no client {shown}; the run has {clients}, from 0 to {clients - 1}.{hint}")
