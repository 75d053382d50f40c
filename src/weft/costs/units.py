"""Parse and format large numbers: 300B tokens, 124.4M parameters, 38.1 GiB, 3.5 days."""

import math
from typing import TYPE_CHECKING

from weft.errors import ConfigError

if TYPE_CHECKING:
    from weft.models.config import LayerKind

SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "P": 1e15}
STEPS = ((1e15, "P"), (1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def parse_count(text: str, what: str) -> int:
    """Parse '300B', '1.5T', '3e11' or '300_000' to an integer; `what` names it in the error."""
    word = text.strip()
    suffix = word[-1:].upper() if word[-1:].isalpha() else ""
    try:
        number = float(word[: len(word) - len(suffix)]) * SUFFIXES[suffix]
    except (ValueError, KeyError):
        number = math.nan
    if not math.isfinite(number) or number < 1:
        raise ConfigError(f"{what} {text!r}: expected a number of at least 1, such as 300B, 1.5T, 3e11 or 20_000")
    return round(number)


def short(number: float) -> str:
    """Format with at most four digits: 124439808 → '124.4M'."""
    size, letter = next((step for step in STEPS if number >= step[0]), (1, ""))
    number = number / size
    return (f"{number:.0f}" if number >= 1000 or number == int(number) else f"{number:.4g}") + letter


def plain(number: float) -> str:
    """Format with three significant digits, from 100 on as an integer: 0.0246, 31.5, 3,737."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def byte_size(bytes_: float) -> str:
    """Format bytes in the largest of B, KiB, MiB, GiB and TiB that gives at least 1."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if bytes_ >= 1024**power:
            return f"{plain(bytes_ / 1024**power)} {unit}"
    return f"{bytes_:.0f} B"


def duration(seconds: float) -> str:
    for size, unit in ((365.25 * 86400, "years"), (86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if seconds >= 1.5 * size:
            return f"{plain(seconds / size)} {unit}"
    return f"{seconds:.3g} seconds"


def reach(kind: "LayerKind", causal: bool) -> str:
    """Describe which tokens a token attends to in a kind of layer, in a decoder (`causal`) or an encoder."""
    if kind.chunk is not None:
        return f"chunks of {kind.chunk:,}"
    if kind.window is None:
        return "all of the past" if causal else "the whole text"
    return f"a window of {kind.window:,}" if causal else f"{kind.window - 1:,} tokens to either side"
