"""Pieces of a document in Markdown, with lines of at most 120 characters outside of tables."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

WIDTH = 120


def paragraph(text: str) -> str:
    """A paragraph, wrapped."""
    return f"{_filled(text)}\n"


def items(texts: Iterable[str]) -> str:
    """A list, wrapped; nothing without items."""
    lines = [_filled(text, "- ", "  ") for text in texts]
    return "\n".join([*lines, ""]) if lines else ""


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numeric: Sequence[str] = ()) -> str:
    """A table, whose lines are as long as they are.

    >>> print(table(("a", "b"), [("x|y", "1")], numeric=("b",)), end="")
    | a | b |
    |---|--:|
    | x\\|y | 1 |
    """
    lines = [_row(heads), "|" + "|".join("--:" if head in numeric else "---" for head in heads) + "|"]
    return "\n".join([*lines, *map(_row, rows), ""])


def commands(words: Iterable[Iterable[str]]) -> str:
    """A block of commands, whose long lines go on in the next one."""
    lines = [_continued(one) for one in words]
    return "\n".join(["```", *lines, "```", ""]) if lines else ""


def _continued(words: Iterable[str]) -> str:
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) + 3 > WIDTH:
            lines.append("  " + word)
        else:
            lines[-1] = f"{lines[-1]} {word}" if lines[-1] else word
    return " \\\n".join(lines)


def _filled(text: str, first: str = "", then: str = "") -> str:
    return textwrap.fill(
        text, WIDTH, initial_indent=first, subsequent_indent=then, break_long_words=False, break_on_hyphens=False
    )


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"
