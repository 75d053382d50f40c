"""A sign of life while the heavy libraries are imported, which takes seconds."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Show on a terminal that something happens, and leave no trace of it; elsewhere nothing is written."""
    if "torch" in sys.modules or not sys.stderr.isatty():
        yield
        return
    sys.stderr.write("loading torch …")
    sys.stderr.flush()
    try:
        yield
    finally:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()
