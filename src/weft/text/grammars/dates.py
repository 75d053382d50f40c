"""Days from 1900 to 2099, as people write and say them and as ISO 8601 does."""

import datetime
from collections.abc import Callable

from weft.text.grammars.numbers import cardinal
from weft.text.grammars.rng import Mine, Rng, Row, words

FIRST = datetime.date(1900, 1, 1)
DAYS = (datetime.date(2100, 1, 1) - FIRST).days
MONTHS = words("January February March April May June July August September October November December")
WEEKDAYS = words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
FEASTS = {(1, 1): "New Year's Day", (2, 14): "Valentine's Day", (5, 1): "May Day", (10, 31): "Halloween"}
FEASTS |= {(12, 24): "Christmas Eve", (12, 25): "Christmas Day", (12, 31): "New Year's Eve"}
_ORDINALS = words(
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth fourteenth fifteenth"
    " sixteenth seventeenth eighteenth nineteenth"
)


def to_iso(rng: Rng, mine: Mine) -> Row | None:
    """One of many ways to say a day → 1999-05-03. A day that is held out is held out in every wording."""
    day = _day(rng)
    if not mine(day.isoformat()):
        return None
    ways = [*WAYS, *([_feast] * 3 if (day.month, day.day) in FEASTS else []), *([_last] * 3 if _is_last(day) else [])]
    text = rng.pick(ways)(day)
    if rng.chance(15):
        text = f"{WEEKDAYS[day.weekday()]}, {text}"
    return {"source": text.lower() if rng.chance(20) else text, "target": day.isoformat()}


def to_words(rng: Rng, mine: Mine) -> Row | None:
    """1999-05-03 → the third of May, nineteen ninety-nine."""
    day = _day(rng)
    return {"source": day.isoformat(), "target": spoken(day)} if mine(day.isoformat()) else None


def spoken(day: datetime.date) -> str:
    """The one wording that `to_words` asks for."""
    return f"the {ordinal(day.day)} of {MONTHS[day.month - 1]}, {spoken_year(day.year)}"


def ordinal(number: int) -> str:
    """3 → third, for the days of a month."""
    if number < 20:
        return _ORDINALS[number - 1]
    tens, ones = divmod(number, 10)
    return f"{('twenty', 'thirty')[tens - 2]}-{_ORDINALS[ones - 1]}" if ones else ("twentieth", "thirtieth")[tens - 2]


def spoken_year(year: int) -> str:
    """1999 → nineteen ninety-nine; 1905 → nineteen oh five; 2005 → two thousand and five."""
    century, rest = divmod(year, 100)
    if rest == 0:
        return cardinal(year) if century % 10 == 0 else f"{cardinal(century)} hundred"
    if rest < 10:
        return cardinal(year) if century % 10 == 0 else f"{cardinal(century)} oh {cardinal(rest)}"
    return f"{cardinal(century)} {cardinal(rest)}"


def _day(rng: Rng) -> datetime.date:
    return FIRST + datetime.timedelta(days=rng.below(DAYS))


def _numbered(day: int) -> str:
    """3 → 3rd."""
    return str(day) + ("th" if 10 <= day <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th"))


def _short(day: datetime.date) -> str:
    return MONTHS[day.month - 1][:3]


def _full(day: datetime.date) -> str:
    return MONTHS[day.month - 1]


def _is_last(day: datetime.date) -> bool:
    return (day + datetime.timedelta(days=1)).day == 1


def _last(day: datetime.date) -> str:
    return f"the last day of {_full(day)} {day.year}"


def _feast(day: datetime.date) -> str:
    return f"{FEASTS[day.month, day.day]} {day.year}"


WAYS: tuple[Callable[[datetime.date], str], ...] = (
    spoken,
    lambda d: f"{d.day} {_full(d)} {d.year}",
    lambda d: f"{_full(d)} {d.day}, {d.year}",
    lambda d: f"{d.day} {_short(d)} {d.year}",
    lambda d: f"{_short(d)}{'' if d.month == 5 else '.'} {d.day}, {d.year}",
    lambda d: f"{_numbered(d.day)} {_full(d)} {d.year}",
    lambda d: f"the {_numbered(d.day)} of {_full(d)} {d.year}",
    lambda d: f"{_full(d)} the {_numbered(d.day)}, {d.year}",
    lambda d: f"{_full(d)} the {ordinal(d.day)}, {spoken_year(d.year)}",
    lambda d: f"the {ordinal(d.day)} day of {_full(d)} {d.year}",
    lambda d: f"{d.year}, {_full(d)} {d.day}",
    lambda d: f"{d.day}-{_short(d)}-{d.year}",
    lambda d: f"{ordinal(d.day)} of {_full(d)} in the year {d.year}",
)
