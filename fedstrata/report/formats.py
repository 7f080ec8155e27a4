"""Numbers and words as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedstrata.significance import Estimate

ABSENT = "–"


def percent(estimate: Estimate | None, digits: int = 1) -> str:
    """Write a fraction in percent, with its spread where there is one.

    >>> percent(Estimate(0.87312, 0.0123, 3))
    '87.3 ± 1.2'
    """
    if estimate is None:
        return ABSENT
    spread = None if estimate.std is None else 100 * estimate.std
    return number(Estimate(100 * estimate.mean, spread, estimate.count), digits)


def points(estimate: Estimate | None, digits: int = 1) -> str:
    """Write a difference of fractions in percentage points, with its sign."""
    if estimate is None:
        return ABSENT
    return f"{100 * estimate.mean:+.{digits}f}".replace("-", "−")


def number(estimate: Estimate | None, digits: int = 3) -> str:
    """Write a number with its spread where there is one."""
    if estimate is None:
        return ABSENT
    return _number(estimate.mean, digits) + ("" if estimate.std is None else f" ± {_number(estimate.std, digits)}")


def p_value(value: float | None) -> str:
    """Write a p-value; the smallest ones as a bound.

    >>> p_value(0.0004), p_value(0.0312), p_value(1.0)
    ('< 0.001', '0.031', '1.000')
    """
    if value is None:
        return ABSENT
    return "< 0.001" if value < 0.001 else f"{value:.3f}"


def data_size(count: float | None) -> str:
    """Write a number of bytes in decimal units with three digits.

    >>> data_size(999), data_size(1_234_000), data_size(999_999)
    ('999 B', '1.23 MB', '1.00 MB')
    """
    if count is None:
        return ABSENT
    units = ("B", "kB", "MB", "GB", "TB", "PB")
    step = 0
    while step + 1 < len(units) and _three_digits(count / 1000**step) >= 1000:
        step += 1
    value = _three_digits(count / 1000**step)
    if step == 0:
        return f"{value:.0f} B"
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {units[step]}"


def duration(seconds: float | None) -> str:
    """Write a duration in the unit that suits it.

    >>> duration(4.25), duration(75), duration(3725), duration(400_000)
    ('4.2 s', '75 s', '62 min', '111 h')
    """
    if seconds is None:
        return ABSENT
    value, unit = next((seconds / size, unit) for size, unit, limit in _UNITS_OF_TIME if round(seconds / size) < limit)
    return f"{value:.1f} {unit}" if value < 9.95 else f"{value:.0f} {unit}"


def plural(count: int, noun: str) -> str:
    """Write a count with its noun.

    >>> plural(1, "seed"), plural(1200, "client")
    ('1 seed', '1,200 clients')
    """
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def listed(words: Sequence[str]) -> str:
    """Write words in a row.

    >>> listed(["a"]), listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def numbered(noun: str, numbers: Sequence[int]) -> str:
    """Name things by their numbers.

    >>> numbered("seed", [3]), numbered("seed", [0, 2])
    ('seed 3', 'seeds 0 and 2')
    """
    return f"{noun}{'s' * (len(numbers) > 1)} {listed([str(number) for number in numbers])}"


_UNITS_OF_TIME = ((1, "s", 100), (60, "min", 100), (3600, "h", math.inf))


def _number(value: float, digits: int) -> str:
    return f"{value:.{digits}f}" if math.isfinite(value) else "NaN"


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}")
