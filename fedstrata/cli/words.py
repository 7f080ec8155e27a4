"""Docstrings as text for a terminal."""

from __future__ import annotations

import re

from fedstrata.cli.formulas import plain


def readable(text: str) -> str:
    r"""Take the marks of documentation tools out of a docstring, and write formulas with ordinary characters.

    >>> print(readable(r"the loss: :math:`f(w) + \frac{\mu}{2} \lVert w - w^t \rVert^2`, as in ``fedprox``"))
    the loss: f(w) + μ/2 ‖w - w^t‖², as in fedprox
    """
    text = re.sub(r":math:`([^`]*)`", lambda found: plain(found.group(1)), text)
    text = re.sub(r":[a-z]+:`~?\.?([^`]*)`", r"\1", text)
    return "\n\n".join(map(_one_line, text.replace("``", "").split("\n\n")))


def _one_line(paragraph: str) -> str:
    """Join the lines of a paragraph, for the terminal to break anew; what is indented stays as it is."""
    return paragraph if paragraph.startswith(" ") or "\n " in paragraph else " ".join(paragraph.split())
