"""Strings of letters to write down again, or from the end."""

from weft.text.grammars.rng import Mine, Rng, Row

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SHORTEST, LONGEST = 3, 12


def copy(rng: Rng, mine: Mine) -> Row | None:
    """`abc` → `abc`."""
    word = _word(rng)
    return {"source": word, "target": word} if mine(word) else None


def reverse(rng: Rng, mine: Mine) -> Row | None:
    """`abc` → `cba`."""
    word = _word(rng)
    return {"source": word, "target": word[::-1]} if mine(word) else None


def _word(rng: Rng) -> str:
    return "".join(rng.pick(LETTERS) for _ in range(rng.between(SHORTEST, LONGEST)))
