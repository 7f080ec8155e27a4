"""What the colours and signs of the layer view mean, below its heat maps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from fedstrata.report.layer_places import CHECKED, SNOWFLAKE, STRIPE, Lines, line_of, pixel, share_of_scale, written
from fedstrata.report.layer_view import LayerView

if TYPE_CHECKING:
    import altair as alt


def legend(first_line: alt.Chart, lines: Lines) -> list[alt.Chart]:
    """The scale of colours, with its numbers and what its ends mean, and what the signs mean."""
    import altair as alt

    one = first_line.transform_filter("datum.rank === 1").transform_calculate(
        top="datum.begin_last + (narrow ? tall : 0)",
        long="min(320, width - (narrow ? 24 : left))",
        from_x="narrow ? 12 : left",
    )
    shades = (
        one.transform_calculate(shade="sequence(0, 64)")
        .transform_flatten(["shade"])
        .transform_calculate(
            line=f"datum.top + {lines.apart}",
            left_edge="datum.from_x + datum.long * datum.shade / 64",
            right_edge="min(datum.left_edge + datum.long / 64 + 1, datum.from_x + datum.long)",
            share="(datum.shade + 0.5) / 64",
        )
    )
    numbers = (
        one.transform_calculate(ticks="scale.ticks")
        .transform_flatten(["ticks"])
        .transform_calculate(
            line=f"datum.top + {2 * lines.apart}",
            across=f"datum.from_x + datum.long * {share_of_scale('datum.ticks')}",
            text=written("datum.ticks"),
        )
    )
    heading = one.transform_calculate(
        line="datum.top",
        words="(against === '' ? metric.title : metric.title + ': difference to ' + against)"
        " + (scale.log ? ', logarithmic' : metric.scale.log ? ', in powers of ten' : '')",
    )
    drawn = []
    for two, colours in (("scale.two", "ramp"), ("!scale.two", "heatmap")):
        colour = alt.Color("share:Q").scale(domain=[0, 1], range=colours, interpolate="rgb").legend(None)
        rects = shades.transform_filter(two).mark_rect(height=17, strokeWidth=0)
        drawn.append(rects.encode(x=pixel("left_edge"), x2=alt.X2("right_edge:Q"), y=line_of("line"), color=colour))
    ends: tuple[tuple[int, Literal["left", "right"], str], ...] = (
        (0, "left", "datum.from_x + 6"),
        (1, "right", "datum.from_x + datum.long - 6"),
    )
    for place, align, end in ends:
        meaning = one.transform_calculate(line=f"datum.top + {lines.apart}", across=end, text=f"scale.ends[{place}]")
        words = meaning.mark_text(align=align, fontSize=11, fontWeight=600, style="inverse")
        drawn.append(words.encode(x=pixel("across"), y=line_of("line"), text="text:N"))
    drawn.append(
        numbers.mark_text(fontSize=11, style="faint").encode(x=pixel("across"), y=line_of("line"), text="text:N")
    )
    drawn.append(
        heading.mark_text(align="left", fontSize=12, style="contrast").encode(
            x=pixel("from_x"), y=line_of("line"), text="words:N"
        )
    )
    return drawn


def signs(view: LayerView, first_line: alt.Chart, lines: Lines) -> list[alt.Chart]:
    """What the signs beside rows mean, as far as there are any."""
    signs = (
        ("weights masked", CHECKED, True, view.masked),
        ("frozen", SNOWFLAKE, False, view.frozen),
        ("norm follows", STRIPE, True, {"": [name for name, layer in view.layers.items() if layer.norm]}),
    )
    shown = [(words, shape, filled) for words, shape, filled, marked in signs if any(marked.values())]
    drawn = []
    for number, (words, shape, filled) in enumerate(shown):
        one = first_line.transform_filter("datum.rank === 1").transform_calculate(
            line=f"datum.begin_last + (narrow ? tall + {3 * lines.apart} : {lines.apart})",
            at=f"(narrow ? 12 : left + 370) + {sum(30 + 6.2 * len(before) for before, _, _ in shown[:number])}",
            text_at="datum.at + 10",
            words=f"'{words}'",
        )
        style = "accent" if shape == STRIPE else "contrast"
        sign = one.mark_point(shape=shape, filled=filled, size=40, strokeWidth=1.2, style=style, opacity=0.9)
        drawn.append(sign.encode(x=pixel("at"), y=line_of("line")))
        text = one.mark_text(align="left", fontSize=11, style="faint")
        drawn.append(text.encode(x=pixel("text_at"), y=line_of("line"), text="words:N"))
    return drawn
