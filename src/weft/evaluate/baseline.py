"""A baseline for language models: characters drawn independently, with their frequencies in the training text."""

import math
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from weft.storage.files import utf8_size

CHARACTERS = 0x110000 - 0x800  # Unicode code points without the surrogates, which no text holds


class Baseline(NamedTuple):
    """Bits that a text takes, and its length."""

    bits: float
    characters: int
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        return self.bits / self.bytes if self.bytes else math.nan


def character_baseline(training: Iterable[str], held_out: Iterable[str]) -> Baseline:
    """Score the held-out text by the training text's character counts plus one; unseen characters share one count."""
    known, counts = Counter(chain.from_iterable(training)), Counter(chain.from_iterable(held_out))
    total = known.total() + len(known) + 1
    unseen = math.log2(total) + math.log2(CHARACTERS - len(known))
    costs = {character: math.log2(total / (count + 1)) for character, count in known.items()}
    bits = sum(count * costs.get(character, unseen) for character, count in counts.items())
    return Baseline(bits, counts.total(), sum(count * utf8_size(character) for character, count in counts.items()))
