"""What looks like a special token in a message of a conversation, between the chat template and the tokenizer.

The template's text is read with its special tokens, so what must not become one goes through it in disguise.
"""

import json
import re
from collections.abc import Iterable

import tokenizers
from tokenizers import normalizers

from weft.text.training import look_alikes

FIRST_PRIVATE = 0x10FE00  # of the characters that no text has
WORN = re.compile(f"[{chr(FIRST_PRIVATE)}-\U0010ffff]")


class Disguise:
    """Special tokens whose first character is another one; `backend` finds special tokens before it puts that right."""

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Iterable[str]) -> None:
        tokens = list(special_tokens)
        firsts = enumerate(sorted({token[0] for token in tokens}))
        self._worn = {first: chr(FIRST_PRIVATE + number) for number, first in firsts}
        self._spelled = re.compile(look_alikes(tokens))
        parsed = json.loads(backend.to_str())
        for token in parsed["added_tokens"]:  # after normalizing they would be found in what has no disguise any more
            token["normalized"] &= not token["special"]
        self.backend = tokenizers.Tokenizer.from_str(json.dumps(parsed))
        steps = [normalizers.Replace(worn, first) for first, worn in self._worn.items()]
        own = self.backend.normalizer
        self.backend.normalizer = normalizers.Sequence(steps if own is None else [*steps, own])

    def put_on(self, text: str) -> str:
        """A text in which nothing looks like a special token."""
        return self._spelled.sub(lambda found: self._worn[found[0]], text)
