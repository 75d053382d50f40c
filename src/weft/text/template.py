"""Chat templates: programs in a tokenizer's files, which may produce text and do nothing else.

They run in a separate process (`sandbox.py`) with limited time and memory, so that each ends, and none stops weft. The
rendered conversation is tokenized with its special tokens, so text in a message that looks like one is escaped before
rendering, and unescaped by the tokenizer after it has found the special tokens.
"""

import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import tokenizers
from tokenizers import normalizers

from weft.errors import TokenizerError
from weft.storage.untrusted import bound
from weft.text.training import look_alikes
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


FIRST_PRIVATE = 0x10FE00  # of the private-use characters that replace the first character of a look-alike
ESCAPED = re.compile(f"[{chr(FIRST_PRIVATE)}-\U0010ffff]")


class SpecialTokenEscape:
    """Replaces the first character of each look-alike; `backend` finds special tokens before it restores them."""

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Iterable[str]) -> None:
        tokens = list(special_tokens)
        firsts = enumerate(sorted({token[0] for token in tokens}), start=FIRST_PRIVATE)
        self._escapes = {first: chr(code) for code, first in firsts}
        self._look_alikes = re.compile(look_alikes(tokens))
        parsed = json.loads(backend.to_str())
        for token in parsed["added_tokens"]:  # if normalized, they would be found after the restoration
            token["normalized"] &= not token["special"]
        self.backend = tokenizers.Tokenizer.from_str(json.dumps(parsed))
        steps = [normalizers.Replace(escaped, first) for first, escaped in self._escapes.items()]
        normalizer = self.backend.normalizer
        self.backend.normalizer = normalizers.Sequence(steps if normalizer is None else [*steps, normalizer])

    def escape(self, text: str) -> str:
        """Return a text in which nothing looks like a special token."""
        return self._look_alikes.sub(lambda match: self._escapes[match[0]], text)
