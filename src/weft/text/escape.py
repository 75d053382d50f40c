"""Escapes look-alikes of special tokens in chat messages.

The rendered chat template is tokenized with its special tokens, so text in a message that looks like one is escaped
before rendering, and unescaped by the tokenizer after it has found the special tokens.
"""

import json
import re
from collections.abc import Iterable

import tokenizers
from tokenizers import normalizers

from weft.text.training import look_alikes

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
