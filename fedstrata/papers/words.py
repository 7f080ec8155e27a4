"""What is said of cells and claims, alike in the terminal, on the page and in documents."""

from __future__ import annotations

from fedstrata.papers.judging import Judged, JudgedCell, JudgedClaim
from fedstrata.ranks import RankCorrelation
from fedstrata.report.formats import ABSENT, number, p_value
from fedstrata.significance import Estimate

CELL_HEADS = ("row", "column", "published", "ours", "seeds", "difference", "verdict")


def digits_of(judged: Judged) -> int:
    """How many digits numbers have: percentages two, as papers write them."""
    return {"percent": 2, "fraction": 4}.get(judged.recipe.unit, 3)


def cell_line(one: JudgedCell, digits: int) -> tuple[str, ...]:
    """A cell in the words of a table, as :data:`CELL_HEADS` has them."""
    published = None if one.published.mean is None else Estimate(one.published.mean, one.published.std, 0)
    difference = ABSENT if one.difference is None else f"{one.difference:+.{digits}f}".replace("-", "−")
    seeds = ABSENT if one.ours is None else str(one.ours.count)
    return one.row, one.column, number(published, digits), number(one.ours, digits), seeds, difference, one.verdict


def claim_line(claim: JudgedClaim) -> str:
    """A claim in a sentence: what the paper says, what we found, and by which test."""
    by = "" if claim.stated.by is None else f" by {claim.stated.by:g}"
    where = ", ".join(filter(None, claim.columns))
    stated = f"{claim.stated.row} beats {claim.stated.over}{by}" + (f" ({where})" if where else "")
    found = claim.found
    if found is None or found.mean is None:
        return f"{stated}: {claim.word}"
    between = "" if found.interval is None else f", 95 % interval {' to '.join(map(_signed, found.interval))}"
    tested = f"{found.test}, p = {p_value(found.p_value)}" if found.p_value is not None else found.test
    seeds = "1 seed" if found.seeds == 1 else f"{found.seeds} seeds"
    about = (
        "" if found.about is None or claim.word != "shown" else "; about as much" if found.about else "; not as much"
    )
    return f"{stated}: {claim.word}; {_signed(found.mean)} over {seeds}{between} ({tested}){about}"


def order_line(column: str, found: RankCorrelation) -> str:
    """How alike the orders of rows are, in a sentence."""
    where = f" ({column})" if column else ""
    return f"Order of the {found.count} rows{where}: Spearman's rank correlation {found.spearman:.2f}"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")
