"""Formulas in TeX as lines of ordinary characters, for a terminal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

_SYMBOLS = {
    "alpha": "α", "beta": "β", "gamma": "γ", "delta": "δ", "Delta": "Δ", "epsilon": "ε", "varepsilon": "ε",
    "eta": "η", "theta": "θ", "lambda": "λ", "mu": "μ", "pi": "π", "rho": "ρ", "sigma": "σ", "tau": "τ", "phi": "φ",
    "varphi": "φ", "Phi": "Φ", "psi": "ψ", "Sigma": "Σ", "ell": "ℓ", "nabla": "∇", "partial": "∂", "infty": "∞",
    "sum": "Σ", "prod": "Π", "top": "T", "leftarrow": " ← ", "rightarrow": " → ", "cdot": "·", "times": "×",
    "odot": "⊙", "pm": "±", "le": " ≤ ", "ge": " ≥ ", "ne": " ≠ ", "neq": " ≠ ", "in": " ∈ ",
    "sim": " ~ ", "propto": " ∝ ", "cap": " ∩ ", "cup": " ∪ ",
    "lVert": "‖\n", "rVert": "\n‖", "langle": "⟨\n", "rangle": "\n⟩", "lfloor": "⌊\n", "rfloor": "\n⌋",
    "lceil": "⌈\n", "rceil": "\n⌉", "lvert": "|\n", "rvert": "\n|", "dots": "…", "ldots": "…", "mid": " | ",
}  # fmt: skip
"""Spaces stand around what relates two sides, a line break where no space may be, inside of brackets."""
_WORDS = ("cos", "dim", "exp", "log", "max", "min", "Pr")
_FONTS = ("mathrm", "mathcal", "mathbf", "mathbb", "operatorname", "text")
_SIZES = ("left", "right", "bigl", "bigr", "Bigl", "Bigr")
_ACCENTS = {"hat": "\u0302", "tilde": "\u0303", "bar": "\u0304"}
_HIGH = dict(zip("0123456789+-=()niT", "⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻⁼⁽⁾ⁿⁱᵀ", strict=True))
_LOW = dict(zip("0123456789+-=()aehijklmnoprstuvx", "₀₁₂₃₄₅₆₇₈₉₊₋₌₍₎ₐₑₕᵢⱼₖₗₘₙₒₚᵣₛₜᵤᵥₓ", strict=True))
_TOKEN = re.compile(r"\\[A-Za-z]+|\\.|\s+|.", re.DOTALL)
_ONE_TERM = re.compile(r"([^\W_]|[.*∂∇√\u0302-\u0304])+|√?\([^()]*\)|‖[^‖]*‖[²₁]?|\|[^|]*\|")


def plain(formula: str) -> str:
    r"""Write a formula with ordinary characters; a command that is not known stays as it is.

    >>> print(plain(r"f(w) + \frac{\mu}{2} \lVert w - w^t \rVert^2"))
    f(w) + μ/2 ‖w - w^t‖²
    >>> print(plain(r"\hat w_{t+1} = \frac{\sum_k p_k w_k}{\sqrt{v + \varepsilon}}"))
    ŵₜ₊₁ = (Σₖ pₖ wₖ)/√(v + ε)
    """
    text = _Formula(formula).sequence()
    text = re.sub(r" *\n *", "", re.sub(r" +", " ", text))
    return unicodedata.normalize("NFC", re.sub(r"(\() | (?=[),.])", r"\1", text).strip())


class _Formula:
    def __init__(self, text: str) -> None:
        self.tokens = _TOKEN.findall(text.replace("~", " "))

    def sequence(self, end: str | None = None) -> str:
        """Write everything up to a closing mark."""
        return "".join(self._until(end))

    def _until(self, end: str | None) -> Iterator[str]:
        while self.tokens and self.tokens[0] != end:
            yield self.term()
        if end is not None:
            self.tokens.pop(0)

    def argument(self) -> str:
        """Write what a command applies to: a group, or the next term."""
        while self.tokens[0].isspace():
            self.tokens.pop(0)
        return self.term().strip()

    def term(self) -> str:
        """Write one token, with what belongs to it."""
        token = self.tokens.pop(0)
        if token == "{":
            return self.sequence("}")
        if token in "^_":
            return _raised(self.argument()) if token == "^" else _lowered(self.argument())
        if not token.startswith("\\"):
            return " " if token.isspace() else token
        return self._command(token[1:])

    def _command(self, name: str) -> str:
        if name == "|":
            return "‖"
        if not name.isalpha():
            return " " if name in ",;: " else "" if name == "!" else name
        if name == "frac":
            return f"{_closed(self.argument())}/{_closed(self.argument())}"
        if name == "sqrt":
            return f"√{_closed(self.argument())}"
        if name in _ACCENTS:
            return self.argument() + _ACCENTS[name]
        if name in _FONTS:
            return self.argument()
        if name in _SIZES:
            return ""
        if name in _WORDS:
            return f"{name} " if self.tokens and self.tokens[0].isspace() else name
        return _SYMBOLS.get(name, f"\\{name}")


def _closed(text: str) -> str:
    """Put in parentheses what is more than one term."""
    return text if _ONE_TERM.fullmatch(text) else f"({text})"


def _raised(text: str) -> str:
    return "".join(_HIGH[sign] for sign in text) if text and set(text) <= _HIGH.keys() else f"^{_closed(text)}"


def _lowered(text: str) -> str:
    tight = text.replace(" ", "")
    return "".join(_LOW[sign] for sign in tight) if tight and set(tight) <= _LOW.keys() else f"_{_closed(text)}"
