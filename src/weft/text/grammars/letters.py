"""Strings of letters to write down again, or from the end."""

from weft.text.grammars.rng import Mine, Rng, Row

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MIN_LETTERS, MAX_LETTERS = 3, 12


def copy(rng: Rng, mine: Mine) -> Row | None:
    """`abc` → `abc`."""
    word = "".join(rng.pick(LETTERS) for _ in range(rng.between(MIN_LETTERS, MAX_LETTERS)))
    return {"source": word, "target": word} if mine(word) else None


def reverse(rng: Rng, mine: Mine) -> Row | None:
    """`abc` → `cba`."""
    row = copy(rng, mine)
    return row and {**row, "target": row["target"][::-1]}
