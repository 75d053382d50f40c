"""Errors that a user can fix: one line each that says what was wrong, where, and what would be right.

The command line prints that line and exits with 2. Bugs are caught by `assert`, never by one of these.
"""

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import islice

MAX_NAME_CHARACTERS = 80  # length at which a name quoted in a message is truncated


class WeftError(ValueError):
    """Base of all errors that a user can fix."""


class ConfigError(WeftError):
    """Invalid recipe, override or preset name."""


class DataError(WeftError):
    """Invalid text, corpus, prepared folder or batch."""


class TokenizerError(WeftError):
    """Tokenizer that cannot be trained, loaded or applied."""


class ModelError(WeftError):
    """Incompatible sizes, or an operation that the model doesn't support."""


class RunError(WeftError):
    """Invalid run folder or checkpoint."""


class DamageError(RunError):
    """Corrupt checkpoint; an older one may still be readable."""


class LostError(RunError):
    """Another rank of a distributed run died, so this rank stops too."""


class DivergedError(RunError):
    """Training diverged repeatedly, and all rollbacks are used up."""


class InteropError(WeftError):
    """Model in another program's format that cannot be read, or one that such a format cannot represent."""


@contextmanager
def located(where: str) -> Iterator[None]:
    """Put a file and a line before an error of what is read from them."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{where}{error}") from None


@contextmanager
def os_errors(path: object, kind: type[WeftError] = DataError, *, verb: str = "read") -> Iterator[None]:
    """Raise `kind` instead of an OSError, or for text that is not UTF-8: `path` cannot be read, or whatever is done."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        raise kind(f"{path}: cannot be {verb}: {getattr(error, 'strerror', 'not UTF-8 text') or error}") from None


# parts of torch's messages when CPU memory is exhausted; for a GPU torch raises OutOfMemoryError
_NO_MEMORY = ("DefaultCPUAllocator", "not enough memory", "Storage size calculation overflowed")


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on the CPU or on a GPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in _NO_MEMORY)


# parts of the names of network errors in the libraries that huggingface_hub uses
_UNREACHABLE = ("Connect", "Offline", "Timeout", "Proxy", "MaxRetry", "NameResolution")


def hub_failure(error: BaseException) -> str:
    """Say why a download from the Hugging Face Hub failed: a clause for an error message."""
    cause: BaseException | None = error
    while cause is not None:
        if any(word in type(cause).__name__ for word in _UNREACHABLE):
            return "weft couldn't reach the hub"
        cause = cause.__cause__ or cause.__context__
    return f"the hub says: {first_line(error)}"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def download_first(address: str) -> str:
    """Say that weft doesn't read addresses; the caller appends how to pass the downloaded file."""
    return f"'{address}': weft reads files, not addresses; download it, for instance with curl -LO, and give the file"


def quoted(name: object) -> str:
    """Quote a name or path for a shell, in a command that a message shows."""
    return shlex.quote(str(name))


def suggestion(name: str, known: Iterable[str], limit: int = 12, *, what: str = "available") -> str:
    """Return the end of an error about an unknown name: the nearest known names, or else the first `limit` of them
    after the heading `what`, or "" if none are known."""
    known = sorted(set(known))
    if near := get_close_matches(name, known, n=3, cutoff=0.6):
        return did_you_mean(near)
    return f"{what}: {listed(known, limit)}" if known else ""


def listed(names: Iterable[str], limit: int = 12) -> str:
    """Join the first `limit` names with commas, long ones truncated; an ellipsis follows if there are more."""
    first = list(islice(names, limit + 1))
    shown = [name if len(name) <= MAX_NAME_CHARACTERS else f"{name[:MAX_NAME_CHARACTERS]}…" for name in first[:limit]]
    return ", ".join(shown) + (", …" if len(first) > limit else "")


def did_you_mean(near: Iterable[str]) -> str:
    """Return the end of an error that offers these names instead."""
    return f"did you mean {' or '.join(repr(name) for name in near)}?"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Format a count with its noun: '1 row', '1,200 rows'; `plural` is for nouns that don't just take an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
