"""Texts to be written in another way: letters again or from the end, numbers and days in words and in digits."""

import datetime
import tomllib
from pathlib import Path

from weft.text.grammars.rng import Mine, Rng, Row

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MIN_LETTERS, MAX_LETTERS = 3, 12

FIRST_DAY = datetime.date(1900, 1, 1)
DAYS = (datetime.date(2100, 1, 1) - FIRST_DAY).days
_WORDS = tomllib.loads(Path(__file__).with_name("rewriting.toml").read_text(encoding="utf-8"))
SMALL, ORDINALS, MONTHS, WEEKDAYS = (_WORDS[name].split() for name in ("small", "ordinals", "months", "weekdays"))
TENS, WAYS, FEASTS = _WORDS["tens"], _WORDS["ways"], _WORDS["feasts"]


def copy(rng: Rng, mine: Mine) -> Row | None:
    """`abc` → `abc`."""
    word = "".join(rng.pick(LETTERS) for _ in range(rng.between(MIN_LETTERS, MAX_LETTERS)))
    return {"source": word, "target": word} if mine(word) else None


def reverse(rng: Rng, mine: Mine) -> Row | None:
    """`abc` → `cba`."""
    row = copy(rng, mine)
    return row and {**row, "target": row["target"][::-1]}


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


def words_to_number(rng: Rng, mine: Mine) -> Row | None:
    """Words, in British, American or unhyphenated spelling → digits."""
    number = _number(rng)
    if not mine(str(number)):
        return None
    return {"source": cardinal(number, rng.pick((" and ", " ")), rng.pick(("-", " "))), "target": str(number)}


def number_to_words(rng: Rng, mine: Mine) -> Row | None:
    """Digits → words, in British spelling."""
    number = _number(rng)
    return {"source": str(number), "target": cardinal(number)} if mine(str(number)) else None


def _number(rng: Rng) -> int:
    """Long numbers come less often than their share of all numbers, so that short ones come too."""
    return rng.below(10 ** rng.pick((2, 3, 3, 4, 4, 5, 5, 5, 6, 6, 6)))


def words_to_date(rng: Rng, mine: Mine) -> Row | None:
    """One of many ways to say a day → 1999-05-03. A day that is held out is held out in every wording."""
    day = _day(rng)
    if not mine(day.isoformat()):
        return None
    feast, last = f"{day.month}-{day.day}" in FEASTS, (day + datetime.timedelta(days=1)).day == 1
    ways = [*WAYS, *["{feast} {y}"] * 3 * feast, *["the last day of {month} {y}"] * 3 * last]
    text = _said(rng.pick(ways), day)
    if rng.chance(15):
        text = f"{WEEKDAYS[day.weekday()]}, {text}"
    return {"source": text.lower() if rng.chance(20) else text, "target": day.isoformat()}


def date_to_words(rng: Rng, mine: Mine) -> Row | None:
    """1999-05-03 → the third of May, nineteen ninety-nine."""
    day = _day(rng)
    return {"source": day.isoformat(), "target": _said(WAYS[0], day)} if mine(day.isoformat()) else None


def ordinal(number: int) -> str:
    """3 → third, for the days of a month."""
    if number < 20:
        return ORDINALS[number - 1]
    tens, ones = divmod(number, 10)
    return f"{TENS[tens]}-{ORDINALS[ones - 1]}" if ones else f"{TENS[tens][:-1]}ieth"


def spoken_year(year: int) -> str:
    """1999 → nineteen ninety-nine; 1905 → nineteen oh five; 2005 → two thousand and five."""
    century, rest = divmod(year, 100)
    if rest < 10 and century % 10 == 0:
        return cardinal(year)
    link = " hundred" if rest == 0 else f" oh {cardinal(rest)}" if rest < 10 else f" {cardinal(rest)}"
    return cardinal(century) + link


def _day(rng: Rng) -> datetime.date:
    return FIRST_DAY + datetime.timedelta(days=rng.below(DAYS))


def _said(way: str, day: datetime.date) -> str:
    month, d = MONTHS[day.month - 1], day.day
    return way.format(
        d=d,
        y=day.year,
        month=month,
        short=month[:3],
        abbreviated=month if month == "May" else f"{month[:3]}.",
        nth=f"{d}{'th' if 10 <= d <= 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(d % 10, 'th')}",
        ordinal=ordinal(d),
        spoken=spoken_year(day.year),
        feast=FEASTS.get(f"{day.month}-{d}"),
    )
