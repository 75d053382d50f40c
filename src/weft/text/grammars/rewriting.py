"""Rewriting tasks: copy or reverse letters, convert numbers and dates between words and digits."""

import datetime
import tomllib
from pathlib import Path

from weft.text.grammars.rng import InSplit, Rng, Row

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MIN_LETTERS, MAX_LETTERS = 3, 12
BOTH_CASES = LETTERS + LETTERS.upper()
REPEATED, PAIR_LETTERS = (4, 20), 16  # letters of a repeated text: fewest and most, and of a pair of texts

FIRST_DAY = datetime.date(1900, 1, 1)
DAYS = (datetime.date(2100, 1, 1) - FIRST_DAY).days
_WORDS = tomllib.loads(Path(__file__).with_name("rewriting.toml").read_text(encoding="utf-8"))
SMALL, ORDINALS, MONTHS, WEEKDAYS = (_WORDS[name].split() for name in ("small", "ordinals", "months", "weekdays"))
TENS, DATE_FORMATS, HOLIDAYS = _WORDS["tens"], _WORDS["date_formats"], _WORDS["holidays"]


def copy(rng: Rng, in_split: InSplit) -> Row | None:
    """Return {source, target} such as `abc` → `abc`."""
    word = "".join(rng.pick(LETTERS) for _ in range(rng.between(MIN_LETTERS, MAX_LETTERS)))
    return {"source": word, "target": word} if in_split(word) else None


def reverse(rng: Rng, in_split: InSplit) -> Row | None:
    """Return {source, target} such as `abc` → `cba`."""
    row = copy(rng, in_split)
    return row and {**row, "target": row["target"][::-1]}


def repeated_letters(rng: Rng) -> str:
    """Return random letters three times in a row: only what came earlier in the text tells how it goes on."""
    return 3 * "".join(rng.sample(BOTH_CASES, rng.between(*REPEATED)))


def repeated_pair(rng: Rng, in_split: InSplit) -> Row | None:
    """Return {clean, corrupt, answer, wrong}: letters and the beginning of their repetition, and what follows; in the
    corrupt text the first copy has another letter there."""
    *letters, wrong = rng.sample(BOTH_CASES, PAIR_LETTERS + 1)
    answer, again = letters[PAIR_LETTERS // 2], "".join(letters[: PAIR_LETTERS // 2])
    changed = [wrong if letter == answer else letter for letter in letters]
    row = {"clean": "".join(letters) + again, "corrupt": "".join(changed) + again, "answer": answer, "wrong": wrong}
    return row if in_split(row["clean"]) else None


def cardinal(number: int, link: str = " and ", hyphen: str = "-") -> str:
    """Spell a number, 342 as three hundred and forty-two; `link` follows hundreds and thousands, `hyphen` tens."""
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


def words_to_number(rng: Rng, in_split: InSplit) -> Row | None:
    """Return {source, target} from words, in British, American or unhyphenated spelling, to digits."""
    number = _number(rng)
    if not in_split(str(number)):
        return None
    return {"source": cardinal(number, rng.pick((" and ", " ")), rng.pick(("-", " "))), "target": str(number)}


def number_to_words(rng: Rng, in_split: InSplit) -> Row | None:
    """Return {source, target} from digits to words in British spelling."""
    number = _number(rng)
    return {"source": str(number), "target": cardinal(number)} if in_split(str(number)) else None


def _number(rng: Rng) -> int:
    """Draw the number of digits first, so that short numbers occur too."""
    return rng.below(10 ** rng.pick((2, 3, 3, 4, 4, 5, 5, 5, 6, 6, 6)))


def words_to_date(rng: Rng, in_split: InSplit) -> Row | None:
    """Return {source, target} from a date in one of many formats to 1999-05-03; a date is held out in all formats."""
    day = _day(rng)
    if not in_split(day.isoformat()):
        return None
    holiday, last = f"{day.month}-{day.day}" in HOLIDAYS, (day + datetime.timedelta(days=1)).day == 1
    formats = [*DATE_FORMATS, *["{holiday} {y}"] * 3 * holiday, *["the last day of {month} {y}"] * 3 * last]
    text = _spell_date(rng.pick(formats), day)
    if rng.chance(15):
        text = f"{WEEKDAYS[day.weekday()]}, {text}"
    return {"source": text.lower() if rng.chance(20) else text, "target": day.isoformat()}


def date_to_words(rng: Rng, in_split: InSplit) -> Row | None:
    """Return {source, target} such as 1999-05-03 → the third of May, nineteen ninety-nine."""
    day = _day(rng)
    row = {"source": day.isoformat(), "target": _spell_date(DATE_FORMATS[0], day)}
    return row if in_split(day.isoformat()) else None


def ordinal(number: int) -> str:
    """Spell the ordinal of a day of the month, 3 as third."""
    if number < 20:
        return ORDINALS[number - 1]
    tens, ones = divmod(number, 10)
    return f"{TENS[tens]}-{ORDINALS[ones - 1]}" if ones else f"{TENS[tens][:-1]}ieth"


def spoken_year(year: int) -> str:
    """Spell a year: nineteen ninety-nine, nineteen oh five, two thousand and five."""
    century, rest = divmod(year, 100)
    if rest < 10 and century % 10 == 0:
        return cardinal(year)
    link = " hundred" if rest == 0 else f" oh {cardinal(rest)}" if rest < 10 else f" {cardinal(rest)}"
    return cardinal(century) + link


def _day(rng: Rng) -> datetime.date:
    return FIRST_DAY + datetime.timedelta(days=rng.below(DAYS))


def _spell_date(template: str, day: datetime.date) -> str:
    month, d = MONTHS[day.month - 1], day.day
    return template.format(
        d=d,
        y=day.year,
        month=month,
        short=month[:3],
        abbreviated=month if month == "May" else f"{month[:3]}.",
        nth=f"{d}{'th' if 10 <= d <= 20 else {1: 'st', 2: 'nd', 3: 'rd'}.get(d % 10, 'th')}",
        ordinal=ordinal(d),
        spoken=spoken_year(day.year),
        holiday=HOLIDAYS.get(f"{day.month}-{d}"),
    )
