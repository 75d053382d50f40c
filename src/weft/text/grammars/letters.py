"""Strings of letters to write down again, or from the end."""

from weft.text.grammars.dice import Dice, Mine, Row

LETTERS = "abcdefghijklmnopqrstuvwxyz"
SHORTEST, LONGEST = 3, 12


def copy(dice: Dice, mine: Mine) -> Row | None:
    """`abc` → `abc`."""
    word = _word(dice)
    return {"source": word, "target": word} if mine(word) else None


def reverse(dice: Dice, mine: Mine) -> Row | None:
    """`abc` → `cba`."""
    word = _word(dice)
    return {"source": word, "target": word[::-1]} if mine(word) else None


def _word(dice: Dice) -> str:
    return "".join(dice.pick(LETTERS) for _ in range(dice.between(SHORTEST, LONGEST)))
