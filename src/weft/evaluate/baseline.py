"""What a model has to beat: characters drawn one by one, each as often as in the training text."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

CHARACTERS = 0x110000 - 0x800  # Unicode's code points, less the surrogates, which no text holds


class Baseline(NamedTuple):
    """How many bits a text takes, and how long it is."""

    bits: float
    characters: int
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Bits a UTF-8 byte; nan for an empty text."""
        return self.bits / self.bytes if self.bytes else math.nan


def character_baseline(training: Iterable[str], held_out: Iterable[str]) -> Baseline:
    """What the held-out text takes by the character frequencies of the training text, with one added to each.

    All characters that were never seen share one count of one.
    """
    known: Counter[str] = Counter()
    for text in training:
        known.update(text)
    mass = known.total() + len(known) + 1
    unseen = math.log2(mass) + math.log2(CHARACTERS - len(known))
    counts: Counter[str] = Counter()
    size = 0
    for text in held_out:
        counts.update(text)
        size += len(text.encode("utf-8"))
    bits = sum(
        count * (math.log2(mass / (known[character] + 1)) if character in known else unseen)
        for character, count in counts.items()
    )
    return Baseline(bits, counts.total(), size)
