"""Mistakes that a person can fix: one line each, with what was wrong, where, and what would be right.

The command line prints the line and exits with 2. A bug is an `assert`, never one of these.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from itertools import islice

MAX_NAME_CHARACTERS = 80  # of a name that a message repeats


class WeftError(ValueError):
    """The root of every error that a person can fix."""


class ConfigError(WeftError):
    """A recipe, an override or a preset's name."""


class DataError(WeftError):
    """A text, a corpus, a prepared folder or a batch."""


class TokenizerError(WeftError):
    """A tokenizer that cannot be trained, loaded or applied."""


class ModelError(WeftError):
    """Sizes that do not fit together, or a model asked for what it cannot do."""


class RunError(WeftError):
    """A run's folder or its checkpoints."""


class DamageError(RunError):
    """A checkpoint that is no longer what was written; an older one may serve."""


class LostError(RunError):
    """Another process that took part in a run is gone; the run ends in this one as well."""


class DivergedError(RunError):
    """Training went wrong again and again, whatever was tried."""


class InteropError(WeftError):
    """A model in another program's format that cannot be read, or one that such a format cannot hold."""


# what torch's error reads when the processor's memory is full; a GPU's error has a type of its own
_NO_MEMORY = ("DefaultCPUAllocator", "not enough memory", "Storage size calculation overflowed")


def out_of_memory(error: BaseException) -> bool:
    """Whether there was too little memory, on whichever device."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)


_UNREACHABLE = ("Connect", "Offline", "Timeout", "Proxy", "MaxRetry", "NameResolution")


def hub_failure(error: BaseException) -> str:
    """Why the hub gave nothing, whichever of its client's libraries says so: a part of a sentence."""
    each: BaseException | None = error
    while each is not None:
        if any(word in type(each).__name__ for word in _UNREACHABLE):
            return "weft couldn't reach the hub"
        each = each.__cause__ or each.__context__
    return f"the hub says: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """What an error of another library says, in one line; its name where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def download_first(address: str) -> str:
    """Why an address in the place of a file is of no use, and what to do; the caller says how to give the file."""
    return f"'{address}': weft reads files, not addresses; download it, for instance with curl -LO, and give the file"


def suggestion(name: str, known: Iterable[str], limit: int = 12, what: str = "available") -> str:
    """The tail of an error about an unknown name: the nearest known ones, or a few of all, which `what` describes; or
    nothing if there are none."""
    known = sorted(set(known))
    if near := get_close_matches(name, known, n=3, cutoff=0.6):
        return did_you_mean(near)
    return f"{what}: {listed(known, limit)}" if known else ""


def listed(names: Iterable[str], limit: int = 12) -> str:
    """The first of some names, which may be many and long."""
    first = list(islice(names, limit + 1))
    shown = [name if len(name) <= MAX_NAME_CHARACTERS else f"{name[:MAX_NAME_CHARACTERS]}…" for name in first[:limit]]
    return ", ".join(shown) + (", …" if len(first) > limit else "")


def did_you_mean(near: Iterable[str]) -> str:
    """The tail of an error that offers names."""
    return f"did you mean {' or '.join(repr(name) for name in near)}?"


def counted(number: int, noun: str, plural: str = "") -> str:
    """'1 row', '1,200 rows': a number with its noun; `plural` where an s doesn't make it."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
