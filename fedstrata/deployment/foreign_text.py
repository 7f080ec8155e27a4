"""Text that others wrote, made harmless: one line of visible characters, which logs, files and terminals can take.

A site may write anything into a refusal, and a server into a notice: escape sequences that repaint a terminal, marks
that turn the direction of writing, halves of characters that no file can hold. What is shown is never markup either:
those who print lines see to that.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable

LONGEST_TEXT = 500
"""A reason or an answer in words is cut here."""
LONGEST_LINE = 2000
LONGEST_NAME = 200
"""The most characters in the name of a class or a tensor."""
_UNSEEN = "\N{REPLACEMENT CHARACTER}"
_JOINERS = "\N{ZERO WIDTH NON-JOINER}\N{ZERO WIDTH JOINER}"
"""Unseen, but part of the spelling of some languages."""


def clean(text: str, longest: int = LONGEST_TEXT) -> str:
    r"""Write text in one line, with a mark where a character has no business in it, and not too long.

    >>> clean("no\nway \x1b[31m[/x]")
    'no way \ufffd[31m[/x]'
    """
    shown = "".join(map(_shown, text[:longest]))
    return " ".join(shown.split()) + ("..." if len(text) > longest else "")


def is_clean(name: str) -> bool:
    """Tell whether a name can be shown and saved as it is, and is not too long."""
    return len(name) <= LONGEST_NAME and all(character == " " or _shown(character) == character for character in name)


def cleaned(write: Callable[[str], None]) -> Callable[[str], None]:
    """Let a log take clean lines only, whatever they quote."""
    return lambda line: write(clean(line, LONGEST_LINE))


def _shown(character: str) -> str:
    if character.isspace():
        return " "
    category = unicodedata.category(character)
    return character if character in _JOINERS or not category.startswith("C") else _UNSEEN
