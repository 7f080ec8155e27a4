"""Where the parts of the layer view stand, and the expressions that several of them share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import altair as alt

SNOWFLAKE = "M-1,0L1,0M-0.5,-0.87L0.5,0.87M-0.5,0.87L0.5,-0.87"
STRIPE = "M-1.8,-0.35H1.8V0.35H-1.8Z"
CHECKED = "M-1,-1H0V0H1V1H0V0H-1Z"
DIFFERENCE = "against === '' ? '' : format(datum.number, '+.3~g') + (metric.scale.log ? ' powers of ten' : '')"
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left")


@dataclass(frozen=True)
class Lines:
    """How many lines of the chart, each ``step`` pixels high, what is no layer takes."""

    step: int

    @property
    def head(self) -> int:
        """Above a heat map."""
        return -(-24 // self.step)

    @property
    def title(self) -> int:
        """In which of these the title stands."""
        return max(0, self.head * self.step - 14) // self.step

    @property
    def foot(self) -> int:
        """Below a heat map."""
        return -(-28 // self.step)

    @property
    def numbers(self) -> int:
        """In which of these the rounds stand."""
        return 10 // self.step

    @property
    def below(self) -> str:
        """Below all heat maps: the legend, and on narrow pages the dots and the signs."""
        return f"(narrow ? tall + {4 * self.apart} : {3 * self.apart})"

    @property
    def apart(self) -> int:
        """From one line of the legend to the next."""
        return -(-20 // self.step)


def about(of_method: bool = False, **more: str) -> alt.Parameter | Any:
    """What is told where the pointer is: of the layer, of what a method does with it, and ``more``, an expression for
    each title; what is empty is left out.
    """
    import altair as alt

    told = {
        **({"method": "datum.method"} if of_method else {}),
        "layer": "datum.layer",
        "role": "facts[datum.layer].role",
        "kind": "facts[datum.layer].kind + (facts[datum.layer].norm ? ', norm follows' : '')",
        "parameters": "facts[datum.layer].size === null ? '' : format(facts[datum.layer].size, ',')",
        **({"here": "datum.mark"} if of_method else {}),
        **more,
    }
    parts = [f"({value}) ? {{'{title.replace('_', ' ')}': {value}}} : {{}}" for title, value in told.items()]
    return alt.expr(f"merge({', '.join(parts)})")


def about_method(**more: str) -> alt.Parameter | Any:
    """The same in the heat map of a method."""
    return about(True, **more)


def shown_number(value: str, other: str) -> str:
    """The number itself, or its difference to another method; of logarithmic scales, in powers of ten."""
    difference = (
        f"metric.scale.log ? (log(max({value}, metric.scale.low)) - log(max({other}, metric.scale.low))) / LN10"
        f" : {value} - {other}"
    )
    return f"against === '' ? {value} : (isValid({value}) && isValid({other}) ? ({difference}) : null)"


def share_of_scale(number: str) -> str:
    """Where on the scale a number lies, from 0 to 1."""
    return (
        f"(scale.log ? (log(max({number}, scale.low)) - log(scale.low)) / (log(scale.high) - log(scale.low))"
        f" : ({number} - scale.low) / (scale.high - scale.low))"
    )


def written(number: str) -> str:
    """Write a number with three digits."""
    return f"format({number}, '.3~g')"


def pixel(name: str) -> alt.X:
    """Place a mark so many pixels from the left."""
    import altair as alt

    return alt.X(f"{name}:Q", scale=None, axis=None)


def line_of(name: str) -> alt.Y:
    """Place a mark in a line, counted from the top."""
    import altair as alt

    return alt.Y(f"{name}:O", axis=None, scale=alt.Scale(paddingInner=0, paddingOuter=0))


def method_colour(methods: Sequence[str]) -> alt.Color:
    """The colour that a method has in all charts; by its number, for the names stand above the heat maps."""
    import altair as alt

    return alt.Color("order:N").scale(domain=list(range(len(methods))), range="category").legend(None)


def method_shape(methods: Sequence[str]) -> alt.Shape:
    """A shape for each method, for those who cannot tell the colours apart."""
    import altair as alt

    shapes = [_SHAPES[place % len(_SHAPES)] for place in range(len(methods))]
    return alt.Shape("order:N").scale(domain=list(range(len(methods))), range=shapes).legend(None)
