"""Chat templates: programs in a tokenizer's file, which may write text and do nothing else.

They run in a process of their own (`sandbox.py`), whose time and memory the system limits: whatever a template does, it
ends, and a faulty one takes nothing with it.
"""

import os
import signal
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from weft.errors import TokenizerError
from weft.storage.untrusted import bound
from weft.workers import Children

MAX_MILLISECONDS = 5_000  # of a processor's time for one rendering; the longest conversations take some hundred
MAX_MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 24  # of a conversation
COMMAND = (sys.executable, "-m", "weft.text.sandbox")


def render(template: str, given: Mapping[str, Any]) -> str:
    """The text that a template makes of `given`, which JSON can hold; an error, whatever its kind, is one line."""
    seconds = bound(MAX_MILLISECONDS) / 1000
    limits = {"seconds": seconds, "bytes": bound(MAX_MEMORY_BYTES), "characters": bound(MAX_CHARACTERS)}
    try:
        with _processes(os.getpid()).acquire() as child:
            try:
                found = child.request({"template": template, "given": given, **limits})
            except BaseException as error:
                child.process.kill()
                if child.process.wait() == -signal.SIGVTALRM:
                    raise ChildProcessError(f"it takes more than {seconds:g} seconds") from None
                raise error
    except (TypeError, RecursionError) as error:
        raise TokenizerError(f"a message of a conversation holds what JSON has not: {error}") from None
    except OSError as error:
        found = {"error": str(error)}
    if "error" in found:
        raise TokenizerError(f"the chat template cannot be rendered: {found['error']}")
    return found["text"]


@lru_cache(maxsize=1)
def _processes(_of: int) -> Children:
    """Those that render for a process; one that was forked off has its own."""
    return Children(COMMAND, {})
