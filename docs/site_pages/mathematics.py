"""Formulas as MathML, which browsers draw by themselves: ``:math:`w^t` `` in docstrings, ``$w^t$`` in pages."""

from __future__ import annotations

import re

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

_ROLE = r":math:`([^`]+)`"
_DOLLARS = r"(?<![\\$\w])\$(?![\s$])([^$]+?)(?<!\s)\$(?!\w)"
_BEFORE_CODE = 195
"""A priority above that of backticks, which would take a formula for code."""


class Mathematics(Extension):
    """Read formulas in Markdown."""

    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802 - the name that Markdown calls
        """Add the two ways to write a formula."""
        md.inlinePatterns.register(_Formula(_ROLE, md), "math-role", _BEFORE_CODE)
        md.inlinePatterns.register(_Formula(_DOLLARS, md), "math-dollars", _BEFORE_CODE - 10)


class _Formula(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:  # noqa: N802
        return self.md.htmlStash.store(to_mathml(m.group(1))), m.start(), m.end()


def to_mathml(formula: str) -> str:
    r"""Write a formula as MathML; what TeX sets upright, such as a name, becomes one word.

    >>> to_mathml(r"\mathrm{clip}(w)").count("<mi")
    2
    """
    mathml = convert(" ".join(formula.split()))
    if "\\" in mathml:
        raise ValueError(f"The formula '{formula}' has a part that cannot be written as MathML: {mathml}")
    return re.sub(r'(?:<mi mathvariant="normal">\w</mi>){2,}', _as_word, mathml)


def _as_word(letters: re.Match[str]) -> str:
    return f"<mi>{re.sub('<[^>]*>', '', letters.group())}</mi>"
