"""Number formats of axes and tables.

An axis refers to its format by name, so that a page (web/numbers.js) labels ticks exactly as print does;
tests/figures/test_axes.py compares the two.
"""

import math
from collections.abc import Callable
from typing import Literal

Format = Literal["number", "count", "scientific", "multiple", "signed"]
SUFFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
MAX_FIXED = 1e6  # larger numbers say little with all their digits
MIN_SUFFIXED = 1e4  # smaller numbers are written out: 2500, but 25k
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def general(value: float, digits: int = 6) -> str:
    """Format with at most `digits` significant digits, as %g does but with a short exponent: 0.05, 2500, 5e-5."""
    mantissa, exponential, power = f"{value:.{digits}g}".partition("e")
    return f"{mantissa}e{int(power)}" if exponential else mantissa


def fixed(value: float, specification: str = ".3f") -> str:
    """Format as `specification` says (".2f"), but a number of more than six digits as 2.38e10, and infinity as ∞."""
    if math.isfinite(value) and abs(value) < MAX_FIXED:
        return format(value, specification)
    return general(value, 3).replace("inf", "∞")


def number(value: float) -> str:
    """Format with a suffix from 10,000 on: 0.25, 2500, 25k, 1.5M, 2B; 5e-5."""
    if abs(value) < MIN_SUFFIXED:
        return general(value)
    size, suffix = next(step for step in SUFFIXES if abs(value) >= step[0])
    return f"{general(value / size)}{suffix}"


def count(value: float) -> str:
    """Format as an integer with thousands separators: 32,000."""
    return f"{math.floor(value + 0.5):,}"


def scientific(value: float) -> str:
    """Format as a power of ten: 2e14 → '2·10¹⁴'."""
    if not value:
        return "0"
    digits, _, power = f"{value:.2e}".partition("e")
    mantissa, exponent = general(float(digits)), str(int(power)).translate(SUPERSCRIPTS)
    return f"10{exponent}" if mantissa == "1" else f"{mantissa}·10{exponent}"


def multiple(value: float) -> str:
    """Format a factor: 2 → '2×'."""
    return f"{general(value)}×"


def signed(value: float) -> str:
    """Format a change: 0.5 → '+0.5'."""
    return f"+{general(value)}" if value > 0 else general(value)


FORMATS: dict[str, Callable[[float], str]] = {f.__name__: f for f in (number, count, scientific, multiple, signed)}


def table_number(value: float) -> str:
    """Format with three significant digits, for a table: 0.00995, 1.30, 12,400; 1.2·10⁻⁵ instead of many zeros."""
    if value and math.isfinite(value) and not 1e-4 <= abs(value) < 1e7:
        return scientific(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:#.3g}".removesuffix(".")
