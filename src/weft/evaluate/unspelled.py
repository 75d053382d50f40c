"""What of a text its tokens don't give back: unknown words, and white space that a tokenizer drops.

A model pays nothing for what it isn't asked to predict. An unknown word costs one token, whatever it says; so bits per
byte would fall with the vocabulary. A coder would have to write those bytes out, and that is what they are charged:
8 bits each, which no vocabulary can get round.
"""

from dataclasses import dataclass

import numpy as np

from weft.data.shards import Tokens
from weft.text.tokenizer import Tokenizer

READ = 1 << 20  # tokens counted at a time


@dataclass(frozen=True)
class Spelling:
    """How much of a text its tokens spell."""

    bytes: int  # of the text
    spelled: int  # of them by tokens
    unknown: int  # tokens that are unknown words

    @property
    def unspelled(self) -> int:
        """Bytes that no token spells; an unknown word has at least one."""
        return max(self.bytes - self.spelled, self.unknown)

    @property
    def exact(self) -> bool:
        """Whether the tokens decode to the text itself, as far as sizes tell."""
        return not self.unknown and 1000 * abs(self.bytes - self.spelled) <= self.bytes


def spelling(text: Tokens, tokenizer: Tokenizer) -> Spelling:
    """Count the bytes that each token of a text adds to it. Special tokens add none."""
    counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
    for start in range(0, len(text), READ):
        counts += np.bincount(text.read(start, min(READ, len(text) - start)), minlength=len(counts))
    met = np.flatnonzero(counts)
    special = set(tokenizer.special_tokens.values())
    sizes = np.array([0 if id in special else len(tokenizer.token_bytes(id)) for id in met.tolist()], dtype=np.int64)
    unknown = 0 if tokenizer.unk_id is None else int(counts[tokenizer.unk_id])
    return Spelling(text.bytes, int((counts[met] * sizes).sum()), unknown)
