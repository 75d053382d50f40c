"""Large numbers as people write and read them: 300B tokens, 1.5T, 124 M parameters, 38.1 GiB."""

import math

from weft.errors import ConfigError

SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "P": 1e15}
STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def parse_count(text: str, what: str) -> int:
    """'300B', '1.5T', '3e11' or '300_000' as a whole number; `what` names it in the error."""
    word = text.strip()
    suffix = word[-1:].upper() if word[-1:].isalpha() else ""
    digits = word[: len(word) - len(suffix)]
    try:
        number = float(digits) * SUFFIXES[suffix]
    except (ValueError, KeyError):
        number = math.nan
    if not math.isfinite(number) or number < 1:
        raise ConfigError(f"{what} {text!r}: expected a number of at least 1, such as 300B, 1.5T, 3e11 or 20_000")
    return round(number)


def short(number: float) -> str:
    """124439808 → '124.4M': four digits at most."""
    size, letter = next((step for step in STEPS if number >= step[0]), (1, ""))
    number = number / size
    return (f"{number:.0f}" if number >= 1000 or number == int(number) else f"{number:.4g}") + letter


def plain(number: float) -> str:
    """A number with three significant digits and no exponent where that can be read: 0.0246, 31.5, 3,737."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def byte_size(bytes_: float) -> str:
    """Bytes in the largest of B, KiB, MiB, GiB, TiB that leaves at least 1."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if bytes_ >= 1024**power:
            return f"{plain(bytes_ / 1024**power)} {unit}"
    return f"{bytes_:.0f} B"


def duration(seconds: float) -> str:
    for size, unit in ((365.25 * 86400, "years"), (86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 1.5 * size:
            return f"{plain(seconds / size)} {unit}"
    return f"{seconds:.3g} seconds"


def reach(window: int | None, causal: bool) -> str:
    """What a token looks at, in a decoder (`causal`) or an encoder, with a window as attention has it."""
    if window is None:
        return "all of the past" if causal else "the whole text"
    return f"a window of {window:,}" if causal else f"{window - 1:,} tokens to either side"
