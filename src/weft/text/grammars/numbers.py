"""Whole numbers below a million, in digits and in English words."""

from weft.text.grammars.rng import Mine, Rng, Row, words

SMALL = words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen"
    " eighteen nineteen"
)
TENS = ("", "", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")


def cardinal(number: int, link: str = " and ", hyphen: str = "-") -> str:
    """342 → three hundred and forty-two. `link` stands after hundreds and thousands, `hyphen` inside a ten."""
    assert 0 <= number < 1_000_000
    if number < 20:
        return SMALL[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS[tens] + (hyphen + SMALL[ones] if ones else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{SMALL[hundreds]} hundred" + (link + cardinal(rest, link, hyphen) if rest else "")
    thousands, rest = divmod(number, 1000)
    between = link if rest < 100 else " "
    return f"{cardinal(thousands, link, hyphen)} thousand" + (between + cardinal(rest, link, hyphen) if rest else "")


def to_digits(rng: Rng, mine: Mine) -> Row | None:
    """Words, in British, American or unhyphenated spelling → digits."""
    number = _number(rng)
    if not mine(str(number)):
        return None
    return {"source": cardinal(number, rng.pick((" and ", " ")), rng.pick(("-", " "))), "target": str(number)}


def to_words(rng: Rng, mine: Mine) -> Row | None:
    """Digits → words, in British spelling."""
    number = _number(rng)
    return {"source": str(number), "target": cardinal(number)} if mine(str(number)) else None


def _number(rng: Rng) -> int:
    """Long numbers come less often than their share of all numbers, so that short ones come too."""
    digits = rng.pick((2, 3, 3, 4, 4, 5, 5, 5, 6, 6, 6))
    return rng.below(10**digits)
