"""Printing what may come from a file: a terminal obeys escape sequences, so it gets them spelled out.

Names of columns and tensors, labels, and what a model writes are anybody's text. Into a file or a pipe they go as they
are; what is printed on standard error is for a person in any case.
"""

import re
import shutil
import sys
from collections.abc import Iterable, Iterator

import typer

from weft.untrusted import printable


def shown(text: str) -> str:
    """A text as standard output takes it."""
    return printable(text) if sys.stdout.isatty() else text


def echo(text: str = "", *, nl: bool = True, err: bool = False) -> None:
    """Print a text."""
    typer.echo(printable(text) if err else shown(text), nl=nl, err=err)


def write(text: str) -> None:
    """Print a part of a text at once."""
    sys.stdout.write(shown(text))
    sys.stdout.flush()


def broken_between_words(parts: Iterable[str], width: int) -> Iterator[str]:
    """A text that comes in parts, word by word, with line ends before words that no longer fit; spaces stay."""
    column, waiting = 0, ""
    for part in _and_end(parts):
        waiting += part or ""
        pieces = re.findall(r"\s|\S+", waiting)
        # the last word may not be whole yet; one that fills a line is written as far as it is
        held = part is not None and bool(pieces) and not pieces[-1].isspace() and len(pieces[-1]) < width
        waiting = pieces.pop() if held else ""
        for piece in pieces:
            if piece == "\n":
                column = 0
            elif column + len(piece) > width and not piece.isspace():
                yield "\n"
                column = len(piece)
            else:
                column += len(piece)
            yield piece


def _and_end(parts: Iterable[str]) -> Iterator[str | None]:
    yield from parts
    yield None


def terminal_width() -> int | None:
    """The columns of the terminal that standard output is; None where it isn't one."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
