"""What a model has to beat: characters drawn one by one, each as often as in the training text."""

import math
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import NamedTuple

from weft.storage.files import utf8_size

CHARACTERS = 0x110000 - 0x800  # Unicode's code points, less the surrogates, which no text holds


class Baseline(NamedTuple):
    """How many bits a text takes, and how long it is."""

    bits: float
    characters: int
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        return self.bits / self.bytes if self.bytes else math.nan


def character_baseline(training: Iterable[str], held_out: Iterable[str]) -> Baseline:
    """What the held-out text takes by the training text's counts of characters plus one; the unseen share one count."""
    known, counts = Counter(chain.from_iterable(training)), Counter(chain.from_iterable(held_out))
    mass = known.total() + len(known) + 1
    unseen = math.log2(mass) + math.log2(CHARACTERS - len(known))
    bits = sum(
        count * (math.log2(mass / (known[character] + 1)) if character in known else unseen)
        for character, count in counts.items()
    )
    return Baseline(bits, counts.total(), sum(count * utf8_size(character) for character, count in counts.items()))
