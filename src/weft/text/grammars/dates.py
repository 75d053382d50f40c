"""Days from 1900 to 2099, as people write and say them and as ISO 8601 does."""

import datetime

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
SPOKEN = "the {ordinal} of {month}, {spoken}"
WAYS = (
    SPOKEN,
    "{d} {month} {y}",
    "{month} {d}, {y}",
    "{d} {short} {y}",
    "{abbreviated} {d}, {y}",
    "{nth} {month} {y}",
    "the {nth} of {month} {y}",
    "{month} the {nth}, {y}",
    "{month} the {ordinal}, {spoken}",
    "the {ordinal} day of {month} {y}",
    "{y}, {month} {d}",
    "{d}-{short}-{y}",
    "{ordinal} of {month} in the year {y}",
)


def to_iso(rng: Rng, mine: Mine) -> Row | None:
    """One of many ways to say a day → 1999-05-03. A day that is held out is held out in every wording."""
    day = _day(rng)
    if not mine(day.isoformat()):
        return None
    feast, last = (day.month, day.day) in FEASTS, (day + datetime.timedelta(days=1)).day == 1
    ways = [*WAYS, *["{feast} {y}"] * 3 * feast, *["the last day of {month} {y}"] * 3 * last]
    text = _said(rng.pick(ways), day)
    if rng.chance(15):
        text = f"{WEEKDAYS[day.weekday()]}, {text}"
    return {"source": text.lower() if rng.chance(20) else text, "target": day.isoformat()}


def to_words(rng: Rng, mine: Mine) -> Row | None:
    """1999-05-03 → the third of May, nineteen ninety-nine."""
    day = _day(rng)
    return {"source": day.isoformat(), "target": _said(SPOKEN, day)} if mine(day.isoformat()) else None


def ordinal(number: int) -> str:
    """3 → third, for the days of a month."""
    if number < 20:
        return _ORDINALS[number - 1]
    tens, ones = divmod(number, 10)
    return f"{('twenty', 'thirty')[tens - 2]}-{_ORDINALS[ones - 1]}" if ones else ("twentieth", "thirtieth")[tens - 2]


def spoken_year(year: int) -> str:
    """1999 → nineteen ninety-nine; 1905 → nineteen oh five; 2005 → two thousand and five."""
    century, rest = divmod(year, 100)
    if rest < 10 and century % 10 == 0:
        return cardinal(year)
    link = " hundred" if rest == 0 else f" oh {cardinal(rest)}" if rest < 10 else f" {cardinal(rest)}"
    return cardinal(century) + link


def _day(rng: Rng) -> datetime.date:
    return FIRST + datetime.timedelta(days=rng.below(DAYS))


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
        feast=FEASTS.get((day.month, d)),
    )
