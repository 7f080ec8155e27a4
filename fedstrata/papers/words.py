"""What is said of cells and claims, alike in the terminal, on the page and in documents."""

from __future__ import annotations

import math
from collections import defaultdict

from fedstrata.papers.costs import cells_named
from fedstrata.papers.judging import Judged, JudgedCell, JudgedClaim, Order
from fedstrata.papers.numbers import LAYERS
from fedstrata.papers.of_clients import WEIGHTED
from fedstrata.papers.reading import SECONDS, Recipe
from fedstrata.report.formats import ABSENT, number, p_value, plural
from fedstrata.significance import Estimate

CELL_HEADS = ("row", "column", "published", "ours", "seeds", "difference", "verdict")
WITHIN = "agrees within"
"""A column of documents and pages, for which terminals have no room."""
LONG_CELL_HEADS = (*CELL_HEADS[:-1], WITHIN, CELL_HEADS[-1])
CLAIM_HEADS = ("claim", "where", "published", "ours (95 % interval)", "seeds")


_ROUNDS = {
    "last": "last round",
    "last_ten": "mean of the last ten rounds",
    "best": "best round",
    "validated": "of models chosen on samples held out",
    "validated_before": "of models chosen on samples held out, before aggregation",
}


def digits_of(judged: Judged) -> int:
    """How many digits numbers have: percentages two, as papers write them."""
    return {"percent": 2, "fraction": 4}.get(judged.recipe.unit, 3)


def cell_line(one: JudgedCell, digits: int) -> tuple[str, ...]:
    """A cell in the words of a table, as :data:`CELL_HEADS` has them."""
    digits = _enough(digits, one)
    published = None if one.published.mean is None else Estimate(one.published.mean, one.published.std, 0)
    difference = ABSENT if one.difference is None else f"{one.difference:+.{digits}f}".replace("-", "−")
    seeds = str(one.ours.count) if one.ours is not None and one.ours.count else ABSENT
    return one.row, one.column, number(published, digits), number(one.ours, digits), seeds, difference, one.verdict


def long_cell_line(one: JudgedCell, digits: int) -> tuple[str, ...]:
    """The same, with how far the two may be apart and agree, as :data:`LONG_CELL_HEADS` has them."""
    *words, verdict = cell_line(one, digits)
    within = ABSENT if one.within is None or one.difference is None else f"{one.within:.{_enough(digits, one)}f}"
    return *words, within, verdict


def _enough(digits: int, one: JudgedCell) -> int:
    """More digits where a number would be nothing but zeros: two that count."""
    numbers = (one.published.mean, None if one.ours is None else one.ours.mean)
    small = [abs(number) for number in numbers if number and math.isfinite(number)]
    return max(digits, 1 - math.floor(math.log10(min(small)))) if small and min(small) < 0.1 else digits


def reported_line(judged: Judged, name: str = "{}") -> str:
    """Which number of a run is reported, of which rounds, and in which unit; of cells with one of their own, each.

    Told is of cells that have a number of ours, or of all where none has. ``name`` is how a number's name is written.
    """
    recipe = judged.recipe
    own = [one for one in judged.cells if "derived" not in recipe.told("", one.column)]
    pairs = [(one.row, one.column) for one in own if one.ours is not None] or [(one.row, one.column) for one in own]
    having: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
    for pair in pairs:
        having[_reported(recipe.of_cell(*pair), name)].append(pair)
    if len(having) < 2:
        return next(iter(having), _reported(recipe, name))
    most = max(having, key=lambda words: len(having[words]))
    others = (f"of {cells_named(cells, pairs)} {words}" for words, cells in having.items() if words != most)
    return "; ".join((most, *others))


def _reported(recipe: Recipe, name: str) -> str:
    """Which number is reported of a cell.

    Seconds of a phase and numbers of layers are means over all rounds, whichever rounds others are of.
    """
    over_rounds = recipe.number.endswith(SECONDS) or recipe.number.startswith(LAYERS)
    when = "mean over rounds" if over_rounds else _ROUNDS[recipe.at]
    weighted = " (clients count by their test samples)" if recipe.number.endswith(f".{WEIGHTED}") else ""
    words = f"{name.format(recipe.number)}{weighted}, {when}"
    words += "" if recipe.unit == "plain" else f", in {recipe.unit}"
    if not recipe.over_clients:
        return words
    against = f" against {' and '.join(recipe.against)}" if recipe.against else ""
    return f"the {recipe.over_clients}{against} over clients, each with its {recipe.middle} over runs of {words}"


def deviation_words(recipe: Recipe) -> str:
    """What stands behind our own ±."""
    return "standard error, by drawing runs anew" if recipe.over_clients else "standard deviation over seeds"


def ours_line(recipe: Recipe) -> str:
    """What our own numbers are beside the published ones, and what stands behind their ±, in a sentence.

    Nothing of what is made of others, such as mean ranks, and where there is nothing published to set them beside.
    """
    if recipe.is_derived or not recipe.published:
        return ""
    if recipe.over_clients:
        return f"Behind our ± is the {deviation_words(recipe)}."
    return f"Ours are {recipe.middle}s too, ± the {deviation_words(recipe)}."


def seeds_line(judged: Judged) -> str:
    """Of how many seeds our numbers are, in a sentence; nothing where they are of none of their own."""
    of_count: defaultdict[int, list[tuple[str, str]]] = defaultdict(list)
    for one in judged.cells:
        if one.ours is not None and one.ours.count:
            of_count[one.ours.count].append((one.row, one.column))
    if not of_count:
        return ""
    everything = [pair for pairs in of_count.values() for pair in pairs]
    most, *others = sorted(of_count, key=lambda count: -len(of_count[count]))
    told = [f"of {plural(count, 'seed')} {cells_named(of_count[count], everything)}" for count in others]
    return f"Ours are of {'; '.join((plural(most, 'seed'), *told))}."


def statistics_line(recipe: Recipe) -> str:
    """What the published numbers of a part are, and what stands behind their ±, in half a sentence."""
    spread = {
        "deviation": ", ± their standard deviation",
        "interval95": ", ± half of the 95 % interval",
        "error": ", ± the standard error",
        "layers": ", ± the deviation over layers",
    }[recipe.spread]
    some = any(number.std is not None for number in recipe.published.values())
    counts = {column: recipe.of_cell("", column).published_seeds for column in recipe.columns}
    if not recipe.counted:
        return "single numbers, of how many runs is not said"
    if recipe.published_seeds == 1 and set(counts.values()) == {1}:
        return "single runs" + (spread if some else ", without a deviation")
    odd = ", ".join(f"{column}: {count}" for column, count in counts.items() if count != recipe.published_seeds)
    count = f"{recipe.published_seeds} runs"
    runs = f"of {count} together" if recipe.over_clients else f"{recipe.middle}s of {count}"
    runs += f" ({odd})" if odd else ""
    return runs + (spread if some else ", without a deviation")


def claim_cells(claim: JudgedClaim) -> tuple[str, str, str, str, str]:
    """A claim in the words of a table, as :data:`CLAIM_HEADS` has them."""
    single = " (single)" if claim.single else ""
    seeds = ABSENT if claim.found is None else str(claim.found.seeds)
    return stated_claim(claim), where_words(claim), published_words(claim) + single, found_words(claim), seeds


def where_words(claim: JudgedClaim) -> str:
    """The columns of a claim, and whether these are the paper's at all."""
    where = ", ".join(filter(None, claim.columns))
    return f"{where} (a setting of ours)" if claim.own_setting else where


def stated_claim(claim: JudgedClaim) -> str:
    """Who beats whom, in a few words."""
    return f"{claim.stated.row} beats {claim.stated.over}" + " (another reading)" * claim.reading


def published_words(claim: JudgedClaim) -> str:
    """By how much, as the paper has it, with half of the 95 % interval that its own spreads give."""
    mean = claim.stated.by if claim.published is None else claim.published[0]
    reach = None if claim.published is None else claim.published[1]
    if mean is None:
        return ABSENT
    return _signed(mean) + ("" if reach is None else f" ± {reach:.2f}")


def found_words(claim: JudgedClaim) -> str:
    """By how much here, with the 95 % interval."""
    found = claim.found
    if found is None or found.mean is None:
        return ABSENT
    return _signed(found.mean) + (
        "" if found.interval is None or found.seeds < 2 else f" ({' to '.join(map(_signed, found.interval))})"
    )


def tested_words(claim: JudgedClaim) -> str:
    """The test behind the word, and whether the size is about the published one."""
    found = claim.found
    if found is None:
        return ABSENT
    tested = found.test if found.p_value is None else f"{found.test}, {p_words(found.p_value)}"
    return "; ".join(filter(None, (tested, _size_words(claim) if claim.word == "shown" else "")))


def _size_words(claim: JudgedClaim) -> str:
    """Say whether a difference is as large as the published one; nothing where no size was published."""
    found, by = claim.found, claim.stated.by
    if found is None or found.about is None or found.mean is None or by is None:
        return ""
    return "about as much" if found.about else "more than published" if found.mean > by else "not as much"


def p_words(p: float) -> str:
    """A p-value with its name.

    >>> p_words(0.0004), p_words(0.0312)
    ('p < 0.001', 'p = 0.031')
    """
    text = p_value(p)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def claim_line(claim: JudgedClaim) -> str:
    """A claim in a sentence: what the paper says, what we found, and by which test."""
    by, where = "" if claim.stated.by is None else f" by {claim.stated.by:g}", where_words(claim)
    single = "; published without a deviation" if claim.single else ""
    stated = f"{stated_claim(claim)}{by}" + (f" ({where})" if where else "")
    found = claim.found
    if found is None or found.mean is None:
        return f"{stated}: {claim.word}{single}"
    between = "" if found.interval is None else f", 95 % interval {' to '.join(map(_signed, found.interval))}"
    test, *about = tested_words(claim).split("; ")
    seeds = "1 seed" if found.seeds == 1 else f"{found.seeds} seeds"
    size = "".join(f"; {word}" for word in about)
    return f"{stated}: {claim.word}; {_signed(found.mean)} over {seeds}{between} ({test}){size}{single}"


def order_line(column: str, found: Order) -> str:
    """How alike the orders of rows are, in a sentence; rows of unequal numbers of seeds differ by these, too.

    >>> order_line("C100 .1", Order(0.928, 0.8, 8, seeds=(1, 3)))
    "Order of the 8 rows (C100 .1): Spearman's rank correlation 0.93, over rows of 1 to 3 seeds"
    """
    where = f" ({column})" if column else ""
    uneven = f", over rows of {seeds_in_words(*found.seeds)}" if found.seeds[0] < found.seeds[1] else ""
    spearman = f"{found.spearman:.2f}".replace("-", "−")
    return f"Order of the {found.count} rows{where}: Spearman's rank correlation {spearman}{uneven}"


def seeds_in_words(fewest: int, most: int) -> str:
    """How many seeds rows have, where they do not have the same number."""
    return f"{fewest} to {most} seeds"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")
