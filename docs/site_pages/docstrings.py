"""Docstrings as Markdown: their references, examples, literal blocks and tables are written in reStructuredText.

Formulas, ``:math:`...` ``, stay, each in one line; :mod:`site_pages.mathematics` reads them in Markdown.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

_REFERENCE = re.compile(r":(?:attr|class|data|exc|func|meth|mod|obj):`(~?)([^`]+)`")
_FORMULA = re.compile(r":math:`[^`]+`")
_RULE = re.compile(r"=+(?:\s+=+)+")


def to_markdown(text: str, path_of: Callable[[str], str | None] = lambda name: None) -> str:
    r"""Turn a docstring into Markdown; ``path_of`` finds what a name stands for in the place of the docstring.

    >>> print(to_markdown("A :class:`Part`, as in ``fedprox``::\n\n    fedprox(mu=1)"))
    A `Part`, as in ``fedprox``:
    <BLANKLINE>
    ```text
    fedprox(mu=1)
    ```
    <BLANKLINE>
    """
    whole = _FORMULA.sub(lambda formula: " ".join(formula.group().split()), text)
    return "\n".join(_blocks(whole.splitlines(), path_of))


def _blocks(lines: Sequence[str], path_of: Callable[[str], str | None]) -> Iterator[str]:
    place = 0
    while place < len(lines):
        line = lines[place]
        end = place + 1
        if line.startswith(">>>"):
            end = _end(lines, place, lambda later: bool(later.strip()))
            yield from ("```pycon", *lines[place:end], "```")
        elif line.endswith("::"):
            end = _end(lines, place + 1, lambda later: not later.strip() or later.startswith(" "))
            block = "\n".join(lines[place + 1 : end]).strip("\n").splitlines()
            margin = min((len(one) - len(one.lstrip()) for one in block if one.strip()), default=0)
            yield from (_linked(line[:-1], path_of), "", "```text", *(one[margin:] for one in block), "```", "")
        elif _RULE.fullmatch(line):
            end = _end(lines, place + 1, lambda later: not _RULE.fullmatch(later)) + 1
            yield from _table(line, lines[place + 1 : end - 1], path_of)
        else:
            yield _linked(line, path_of)
        place = end


def _end(lines: Sequence[str], start: int, belongs: Callable[[str], bool]) -> int:
    """Find where the lines end that belong to a block."""
    return next((place for place in range(start, len(lines)) if not belongs(lines[place])), len(lines))


def _table(rule: str, lines: Sequence[str], path_of: Callable[[str], str | None]) -> Iterator[str]:
    """Write a simple table in Markdown; a line without an entry in its first column goes on with the row before it."""
    starts = [column.start() for column in re.finditer("=+", rule)]
    rows: list[list[str]] = []
    for line in lines:
        cells = [line[begin:end].strip() for begin, end in pairwise([*starts, len(line) + 1])]
        if cells[0] or not rows:
            rows.append(cells)
        else:
            rows[-1] = [f"{before} {cell}".strip() for before, cell in zip(rows[-1], cells, strict=True)]
    yield from ("| " * len(starts) + "|", "|---" * len(starts) + "|")
    yield from ("| " + " | ".join(_linked(cell, path_of) for cell in row) + " |" for row in rows)


def _linked(text: str, path_of: Callable[[str], str | None]) -> str:
    """Turn references into links to where the site documents what they name, or into code where it does not."""

    def link(found: re.Match[str]) -> str:
        name = found.group(2)
        shown = name.rpartition(".")[2] if found.group(1) else name
        path = path_of(name)
        return f"`{shown}`" if path is None else reference(path, shown)

    return _REFERENCE.sub(link, text)


def reference(path: str, shown: str) -> str:
    """Link a name to its place in the reference; where that has none, it is left as code."""
    return f'<autoref identifier="{path}" optional><code>{shown}</code></autoref>'
