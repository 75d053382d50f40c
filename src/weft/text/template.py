"""Chat templates: programs in a tokenizer's files, which may produce text and do nothing else.

They run in a separate process (`sandbox.py`) with limited time and memory, so that each ends, and none stops weft.
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

MAX_MILLISECONDS = 5_000  # of CPU time for one rendering; the longest conversations take a few hundred
MAX_MEMORY_BYTES = 1 << 30
MAX_CHARACTERS = 1 << 24  # of a rendered conversation
COMMAND = (sys.executable, "-m", "weft.text.sandbox")


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Return the text that a template renders from JSON-serialisable variables; every failure is a one-line error."""
    seconds = bound(MAX_MILLISECONDS) / 1000
    limits = {"seconds": seconds, "bytes": bound(MAX_MEMORY_BYTES), "characters": bound(MAX_CHARACTERS)}
    try:
        with _processes(os.getpid()).acquire() as child:
            try:
                result = child.request({"template": template, "variables": variables, **limits})
            except BaseException as error:
                child.process.kill()
                if child.process.wait() == -signal.SIGVTALRM:
                    raise ChildProcessError(f"it takes more than {seconds:g} seconds") from None
                raise error
    except (TypeError, RecursionError) as error:
        raise TokenizerError(f"a message of a conversation holds values that JSON lacks: {error}") from None
    except OSError as error:
        result = {"error": str(error)}
    if "error" in result:
        raise TokenizerError(f"the chat template cannot be rendered: {result['error']}")
    return result["text"]


@lru_cache(maxsize=1)
def _processes(_pid: int) -> Children:
    """Return the child processes of this process; a forked process has separate ones."""
    return Children(COMMAND, {})
