"""What a model has to beat: characters drawn one by one, each as often as in the training text."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

CHARACTERS = 0x110000 - 0x800  # Unicode's code points, less the surrogates, which no text holds


@dataclass(frozen=True)
class Unigram:
    """Character frequencies with one added to each. All characters that were never seen share one count of one."""

    counts: Counter[str]
    total: int

    def bits(self, character: str) -> float:
        """−log₂ p(character)."""
        mass = self.total + len(self.counts) + 1
        count = self.counts.get(character, 0)
        if count:
            return math.log2(mass / (count + 1))
        return math.log2(mass) + math.log2(CHARACTERS - len(self.counts))


def fit(texts: Iterable[str]) -> Unigram:
    """Count the characters of the training text."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    return Unigram(counts, counts.total())


@dataclass(frozen=True)
class Measure:
    """How many bits a text takes, and how long it is."""

    bits: float
    characters: int
    bytes: int

    @property
    def bits_per_byte(self) -> float:
        """Bits a UTF-8 byte; nan for an empty text."""
        return self.bits / self.bytes if self.bytes else math.nan


def measure(model: Unigram, texts: Iterable[str]) -> Measure:
    """What the character frequencies need for `texts`."""
    counts: Counter[str] = Counter()
    size = 0
    for text in texts:
        counts.update(text)
        size += len(text.encode("utf-8"))
    bits = sum(count * model.bits(character) for character, count in counts.items())
    return Measure(bits, counts.total(), size)
