"""Docstrings as text for a terminal."""

from __future__ import annotations

import re

_SYMBOLS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "Delta": "Δ", "epsilon": "ε", "eta": "η", "theta": "θ",
    "lambda": "λ", "mu": "μ", "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "φ", "leftarrow": "←", "sum": "Σ",
    "cdot": "·", "times": "×", "le": "≤", "ge": "≥", "in": "∈", "sqrt": "√", "odot": "⊙", "infty": "∞", "nabla": "∇",
    "partial": "∂", "left": "", "right": "",
}  # fmt: skip


def readable(text: str) -> str:
    r"""Take the marks of documentation tools out of a docstring, and write formulas with ordinary characters.

    >>> print(readable(r"the loss: :math:`f(w) + \frac{\mu}{2} \lVert w - w^t \rVert^2`, as in ``fedprox``"))
    the loss: f(w) + μ/2 ‖w - w^t‖^2, as in fedprox
    """
    text = re.sub(r":math:`([^`]*)`", lambda found: _formula(found.group(1)), text)
    text = re.sub(r":[a-z]+:`~?\.?([^`]*)`", r"\1", text)
    return "\n\n".join(map(_one_line, text.replace("``", "").split("\n\n")))


def _one_line(paragraph: str) -> str:
    """Join the lines of a paragraph, for the terminal to break anew; what is indented stays as it is."""
    return paragraph if paragraph.startswith(" ") or "\n " in paragraph else " ".join(paragraph.split())


def _formula(text: str) -> str:
    text = re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"\\lVert\s*", "‖", text)
    text = re.sub(r"\s*\\rVert", "‖", text)
    text = re.sub(r"\\(hat|tilde|bar)\s*", "", text)
    text = re.sub(r"\\([A-Za-z]+)", lambda found: _SYMBOLS.get(found.group(1), found.group(1)), text)
    text = re.sub(r"\\[,;! ]", " ", text)
    return text.replace("{", "").replace("}", "")
