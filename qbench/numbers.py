"""How numbers are written in tables, reports and progress. Sentences may round differently."""

import math

DECIMALS = 2
MAX_DECIMALS = 6  # of a difference that two decimals would show as zero
MAX_PLAIN = 1e4  # larger scores and differences are written as powers of ten: their decimals mean nothing
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def fixed(value: float, decimals: int = DECIMALS) -> str:
    """A number with this many decimals: 12.50."""
    return f"{value:.{decimals}f}"


def score(value: float) -> str:
    """A score in the units of tables: 56.61, or 1.3·10⁵."""
    return fixed(value) if abs(value) < MAX_PLAIN else power_of_ten(value)


def signed(value: float, decimals: int = DECIMALS) -> str:
    """A difference with its sign: -5.17, or +1.3·10⁵. Zero is +0.00, never -0.00."""
    if abs(value) >= MAX_PLAIN:
        return power_of_ten(value, "+")
    return f"{round(value, decimals) + 0.0:+.{decimals}f}"


def power_of_ten(value: float, sign: str = "") -> str:
    """A large number with two digits: 1.3·10⁵. sign: "+" to have one in any case."""
    if not math.isfinite(value):
        return f"{value:{sign}g}"
    digits, _, power = f"{value:{sign}.1e}".partition("e")
    return f"{digits}·10{str(int(power)).translate(RAISED)}"


def needed_decimals(value: float) -> int:
    """Two, or as many as it takes for the value not to round to zero."""
    return next((n for n in range(DECIMALS, MAX_DECIMALS) if round(value, n)), MAX_DECIMALS)


def interval(low: float, high: float) -> str:
    """An interval of a score: [55.10, 58.20]."""
    return f"[{score(low)}, {score(high)}]"


def signed_interval(low: float, high: float, decimals: int = DECIMALS) -> str:
    """An interval of a difference: [-0.00, +1.20].

    The ends keep their signs: -0.00 is below zero, so readers can see that zero is inside. If both ends would be shown
    as zero, they have more decimals: [-0.0013, +0.0008].
    """
    low, high = (round(end, 9) + 0.0 for end in (low, high))  # equal sums may differ by rounding
    decimals = max(decimals, min(map(needed_decimals, (low, high)))) if low or high else decimals
    if not any(round(end, decimals) for end in (low, high)):
        return "[0, 0]" if low == high == 0 else f"[{low:+.0e}, {high:+.0e}]"
    return f"[{', '.join(_signed_end(end, decimals) for end in (low, high))}]"


def _signed_end(end: float, decimals: int) -> str:
    return f"{end:+.{decimals}f}" if abs(end) < MAX_PLAIN else power_of_ten(end, "+")


def percent(share: float, decimals: int = 1) -> str:
    """A share in percent: 93.8%."""
    return f"{share:.{decimals}%}"


def significant(value: float, digits: int = 3) -> str:
    """A number whose size is not known in advance, with this many significant digits: 0.0123."""
    return f"{value:.{digits}g}"


def signed_significant(value: float, digits: int = 3) -> str:
    """The same with its sign: +0.0123."""
    return f"{value:+.{digits}g}"


def p_value(p: float) -> str:
    """A probability of a test: 0.013."""
    return significant(p, 2)


def magnitude(value: float) -> str:
    """A number whose order of magnitude is all that matters: 1e-07."""
    return f"{value:.0e}"


def count(number: int) -> str:
    """A whole number: 1,234."""
    return f"{number:,}"


def counted(number: int, thing: str) -> str:
    """How many there are of something: 1 document, 1,234 documents."""
    return f"{count(number)} {thing}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """A time: 3.2 s, 12 min, 1.5 h."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def rough_duration(seconds: float) -> str:
    """An estimated time, to the precision that an estimate has: 40 s, 7 min, 25 min, 2.5 h."""
    steps = ((60, 10), (600, 60), (5400, 300), (math.inf, 1800))  # below this many seconds, to this many
    step = next(step for below, step in steps if seconds < below)
    rounded = max(step, round(seconds / step) * step)
    return f"{rounded} s" if rounded < 60 else f"{rounded // 60} min" if rounded < 5400 else f"{rounded / 3600:g} h"


def byte_size(size: float) -> str:
    """A number of bytes with its unit: 0.35 MB, 1.23 GB."""
    return f"{size / 1e6:.2f} MB" if size < 1e9 else f"{size / 1e9:.2f} GB"
