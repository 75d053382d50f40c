"""Printing what may come from a file: a terminal obeys escape sequences, so it gets them spelled out.

Names of columns and tensors, labels, and what a model writes are anybody's text. Into a file or a pipe they go as they
are; what is printed on standard error is for a person in any case.
"""

import sys

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
