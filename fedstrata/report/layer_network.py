"""The network beside the heat maps of the layer view."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedstrata.report.layer_places import about, line_of, pixel

if TYPE_CHECKING:
    import altair as alt


def network(base: alt.Chart, step: int) -> list[alt.Chart]:
    """The layers as blocks along a line, with role, kind and size; once for each line of panels."""
    import altair as alt

    every = -(-10 // step)
    rows = base.transform_filter("datum.column === 0").transform_calculate(
        role="facts[datum.layer].role",
        edge="0",
        name_edge="roles + names",
        spine="roles + names + 8 + (narrow ? 40 : 62) / 2",
        half="(narrow ? 20 : 31) * (0.25 + 0.75 * max(0, log(max(10, facts[datum.layer].size || 10)) - log(10))"
        " / max(0.1, log(max(11, largest)) - log(10)))",
        block_start="datum.spine - datum.half",
        block_end="datum.spine + datum.half",
        size_edge="roles + names + 8 + 66",
        count="facts[datum.layer].size ? format(facts[datum.layer].size, '.2~s') : ''",
        short="facts[datum.layer].short",
        begins="indexof(metric.begins, datum.layer) >= 0",
    )
    tooltip = about()
    font = min(12, step + 1)
    names = rows.transform_filter(f"datum.place % {every} === 0").mark_text(
        align="right", fontSize=font, limit=alt.expr("names"), dir="rtl", style="contrast"
    )
    drawn = [names.encode(x=pixel("name_edge"), y=line_of("slot"), text="layer:N")]
    known = rows.transform_filter("network > 0 && isValid(facts[datum.layer].size)")
    spine = known.transform_filter("datum.place > 0").mark_rect(
        width=2, height=0.26 * step, yOffset=-0.5 * step, style="muted"
    )
    drawn.append(spine.encode(x=pixel("spine"), y=line_of("slot")))
    block: dict[str, Any] = {"cornerRadius": 3, "tooltip": tooltip, "height": {"band": 0.74}}
    across = {"x": pixel("block_start"), "x2": alt.X2("block_end:Q"), "y": line_of("slot")}
    for kinds, style, opacity in (
        ("indexof(['linear', 'embedding'], datum.short) >= 0", "accent", 0.4),
        ("datum.short === 'norm'", "muted", 0.5),
        ("indexof(['linear', 'embedding', 'norm'], datum.short) < 0", "muted", 0.75),
    ):
        drawn.append(known.transform_filter(kinds).mark_rect(**block, style=style, opacity=opacity).encode(**across))
    normed = known.transform_filter("facts[datum.layer].norm")
    stripe = normed.mark_rect(height=max(1.5, 0.09 * step), yOffset=0.43 * step, style="accent", opacity=0.85)
    drawn.append(stripe.encode(**across))
    if step >= 12:
        inside = known.transform_filter("datum.half >= 17").mark_text(fontSize=9, style="contrast")
        drawn.append(inside.encode(x=pixel("spine"), y=line_of("slot"), text="short:N"))
        sizes = known.transform_filter("!narrow").mark_text(fontSize=10, align="left", style="faint")
        drawn.append(sizes.encode(x=pixel("size_edge"), y=line_of("slot"), text="count:N"))
        sided = rows.transform_filter("roles > 0 && datum.role").transform_calculate(side="roles - 1")
        for begins, height, offset in (("!datum.begins", 1.0, 0.0), ("datum.begins", 0.84, 0.08)):
            bar = sided.transform_filter(begins).mark_rect(
                width=1.5, height={"band": height}, yOffset=offset * step, style="muted"
            )
            drawn.append(bar.encode(x=pixel("side"), y=line_of("slot")))
        roles = rows.transform_filter("roles > 0 && datum.begins").mark_text(
            angle=270, fontSize=10, align="right", baseline="top", style="faint", dy=0
        )
        drawn.append(roles.encode(x=pixel("edge"), y=line_of("slot"), text="role:N"))
    return drawn
