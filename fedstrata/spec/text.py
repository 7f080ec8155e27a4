"""Calls as text: ``fedprox(mu=0.01)``, ``dirichlet:0.1``, several with a plus; how they are read and written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from fedstrata.errors import FedStrataError

Value = str | int | float | bool | None
_NAME = re.compile(r"[A-Za-z][\w.-]*")
_WORD = re.compile(r"[\w./*|%@-]+")


@dataclass(frozen=True)
class Call:
    """One parsed ``name(positional..., keyword=value...)``."""

    name: str
    positional: tuple[Value, ...] = ()
    keywords: tuple[tuple[str, Value], ...] = ()


def parse(text: str, kind: str = "name") -> tuple[Call, ...]:
    """Read ``a(x=1)+b:0.1`` into its calls.

    >>> parse("fedprox(mu=0.01)+lws")
    (Call(name='fedprox', positional=(), keywords=(('mu', 0.01),)), Call(name='lws', positional=(), keywords=()))
    """
    pieces = split_outside(text, "+")
    if not all(piece.strip() for piece in pieces):
        raise FedStrataError(
            f"'{text}' is not a {kind}: a name is missing. Write it like 'name' or 'name(parameter=1)'."
        )
    return tuple(_parse_call(piece.strip(), kind) for piece in pieces)


def split_outside(text: str, separator: str) -> list[str]:
    """Split at a separator that stands outside parentheses and quotes.

    >>> split_outside("fedavg, fedprox(mu=1, x='a,b')", ",")
    ['fedavg', " fedprox(mu=1, x='a,b')"]
    """
    pieces, depth, quote, start = [], 0, "", 0
    for position, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "()":
            depth += 1 if character == "(" else -1
        elif character == separator and depth == 0:
            pieces.append(text[start:position])
            start = position + 1
        if depth < 0:
            break
    if depth or quote:
        raise FedStrataError(f"'{text}' has an unmatched {'quote' if quote else 'parenthesis'}.")
    return [*pieces, text[start:]]


def _parse_call(text: str, kind: str) -> Call:
    matched = _NAME.match(text)
    if matched is None:
        raise FedStrataError(
            f"'{text}' is not a {kind}: it must begin with a letter, like 'name' or 'name(parameter=1)'."
        )
    name, rest = matched.group(), text[matched.end() :].strip()
    if not rest:
        return Call(name)
    if rest.startswith(":"):
        return Call(name, tuple(read_value(item.strip()) for item in split_outside(rest[1:], ",")))
    if not (rest.startswith("(") and rest.endswith(")")):
        raise FedStrataError(
            f"'{text}' is not a {kind}: after '{name}' comes ':value', '(parameter=value)' or nothing."
        )
    positional: list[Value] = []
    keywords: list[tuple[str, Value]] = []
    items = split_outside(rest[1:-1], ",") if rest[1:-1].strip() else []
    for item in items:
        if not item.strip():
            raise FedStrataError(f"In '{text}', a value is missing beside a comma.")
        key = split_outside(item, "=")[0]
        if key != item:
            keywords.append((key.strip().replace("-", "_"), read_value(item[len(key) + 1 :].strip())))
        elif keywords:
            raise FedStrataError(f"In '{text}', '{item.strip()}' has no name but follows a named parameter.")
        else:
            positional.append(read_value(item.strip()))
    return Call(name, tuple(positional), tuple(keywords))


def read_value(text: str) -> Value:
    """Read the value of a parameter: a number, true, false, none, a text in quotes, or a word.

    >>> read_value("0.1"), read_value("none"), read_value("'a b'")
    (0.1, None, 'a b')
    """
    if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1].replace(text[0] * 2, text[0])
    constants: Mapping[str, Value] = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def format_value(value: Value) -> str:
    """Write one parameter value so that :func:`parse` reads it back."""
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    if isinstance(value, str):
        plain = _WORD.fullmatch(value) and read_value(value) == value
        return value if plain else "'" + value.replace("'", "''") + "'"
    return repr(value)
