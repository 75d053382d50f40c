"""A sign of life while the heavy libraries are imported, which takes seconds."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def loading() -> Iterator[None]:
    """Import what a command needs inside: on a terminal something shows that it happens, and leaves no trace.

    What is imported stays for good, so nobody looks for garbage in it, now or later: that took half a second.
    """
    if "torch" in sys.modules:
        yield
        return
    shown = sys.stderr.isatty()
    if shown:
        sys.stderr.write("loading torch …")
        sys.stderr.flush()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
