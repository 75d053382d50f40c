"""English sentences, their French translations, and the alignment of their words, drawn from one grammar.

Its rules and words are in `english-french.toml`. Both languages are built together, so the grammar knows which words
belong to each other: a rule is a pattern for each language, and words with the same mark are linked.
"""

import tomllib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import NamedTuple

from weft.text.grammars.rng import InSplit, Rng, Row

GRAMMAR = tomllib.loads(Path(__file__).with_name("english-french.toml").read_text(encoding="utf-8"))
SANDHI, VERBS, PATTERNS = GRAMMAR["sandhi"], GRAMMAR["verbs"], GRAMMAR["patterns"]


class Word(NamedTuple):
    """A word and its links: words of the two languages that share an element of `sure` are translations of each other.
    If they share one only in `possible`, a person might link them or not."""

    text: str
    sure: frozenset[int] = frozenset()
    possible: frozenset[int] = frozenset()


class Phrase(NamedTuple):
    """A part of a sentence in both languages, with the features of a noun phrase that other words agree with."""

    english: Sequence[Word]
    french: Sequence[Word]
    person: int = 1  # index into a verb's forms: je, il, nous, vous, ils
    feminine: bool = False

    @property
    def sides(self) -> tuple[Sequence[Word], Sequence[Word]]:
        return self.english, self.french

    @property
    def plural(self) -> bool:
        return self.person > 1


def translation(rng: Rng, in_split: InSplit) -> Row | None:
    """Return {source, target, alignment}; the alignment lists `i-j` for English word i and French word j, counted from
    0, and `ipj` for a possible link. Words are separated by spaces, an elided article too: `l' homme`."""
    english, french, *_ = Composer(rng).sentence()
    source = " ".join(word.text for word in english)
    links = [
        f"{i}{'-' if a.sure & b.sure else 'p'}{j}"
        for i, a in enumerate(english)
        for j, b in enumerate(french)
        if (a.sure | a.possible) & (b.sure | b.possible)
    ]
    row = {"source": source, "target": " ".join(word.text for word in french), "alignment": " ".join(links)}
    return row if in_split(source) else None


class Composer:
    """Draws the parts of a sentence and joins them."""

    def __init__(self, rng: Rng) -> None:
        self.rng = rng
        self._marks = count()

    def sentence(self) -> Phrase:
        one = self.clause()
        if self.rng.chance(15):
            one = self.pattern("join", one=one, two=self.clause())
        english, french, *_ = self.pattern("end", one=one)
        return Phrase(_articles(english), _sandhi(french))

    def join(self, rule: str, slots: Mapping[str, Phrase]) -> Phrase:
        """Fill the slots of a rule. Words with the same mark are linked; without marks and slots, all words are."""
        marks: dict[str, int] = defaultdict(self._marks.__next__)
        default = "" if "{" in rule or "/" in rule else "all"
        sides: list[list[Word]] = []
        for side, template in enumerate(rule.split(" = ")):
            words: list[Word] = []
            for item in template.split():
                name, _, mark = item.partition("/")
                mark = mark or default
                link = frozenset([marks[mark.rstrip("?")]]) if mark else frozenset()
                sure, possible = (frozenset(), link) if mark.endswith("?") else (link, frozenset())
                slot = slots[name[1:-1]].sides[side] if name[0] == "{" else [Word(name)]
                words += [Word(word.text, word.sure | sure, word.possible | possible) for word in slot]
            sides.append(words)
        english, french = sides
        return Phrase(english, french)

    def entry(self, english: str, french: str) -> Phrase:
        return self.join(f"{english} = {french}", {})

    def pick(self, entries: Sequence[str]) -> Phrase:
        return self.join(self.rng.pick(entries), {})

    def pattern(self, name: str, **slots: Phrase) -> Phrase:
        return self.join(self.rng.pick(PATTERNS[name]), slots)

    def adjective(self, entries: Sequence[str], feminine: bool, plural: bool) -> Phrase:
        english, french = self.rng.pick(entries).split(" = ")
        return self.entry(english, _adjective_forms(french)[feminine + 2 * plural])

    def noun_phrase(self, kind: str, pattern: str = "noun", determiners: str = "") -> Phrase:
        """Draw a noun phrase; its determiner and adjectives agree with the noun."""
        genders = GRAMMAR["nouns"][kind]
        feminine, plural = self.rng.below(2) == 1, self.rng.chance(30)
        noun = self.rng.pick(genders["feminine" if feminine else "masculine"]).split(" = ")
        determiners = determiners or self.rng.pick(("definite", "definite", "indefinite"))
        english, french = self.rng.pick(GRAMMAR["determiners"][determiners]).split(" = ")
        english = english.split("|")[plural]
        adjectives = GRAMMAR["adjectives"][kind].items()
        slots = {name: self.adjective(entries, feminine, plural) for name, entries in adjectives}
        slots["d"] = self.entry(english, french.split("|")[feminine + 2 * plural])
        slots["n"] = self.entry(*(_plural_forms(side)[plural] for side in noun))
        # `some` is `des`, but `de` before an adjective that precedes the noun
        phrase = self.pattern("some" if pattern == "noun" and english == "some" else pattern, **slots)
        return phrase._replace(person=4 if plural else 1, feminine=feminine)

    def subject(self, kind: str = "people") -> Phrase:
        if self.rng.chance(50):
            return self.noun_phrase(kind)
        number = self.rng.below(6)
        pronoun = self.join(GRAMMAR["pronouns"]["subjects"][number], {})
        return pronoun._replace(person=GRAMMAR["pronouns"]["persons"][number], feminine=number == 2)

    def place(self) -> Phrase:
        preposition = self.pick(GRAMMAR["words"]["prepositions"])
        return self.join("{p} {n} = {p} {n}", {"p": preposition, "n": self.noun_phrase("places")})

    def clause(self) -> Phrase:
        draw = self.rng.below(100)
        if draw < 20:
            return self.passive()
        if draw < 40:
            return self.description()
        if draw < 47:
            there = self.noun_phrase(self.rng.pick(("people", "things")), determiners="some")
            be = self.entry(VERBS["be"][there.person].split(" = ")[0], "")
            return self.pattern("there", be=be, o=there, w=self.place())
        return self.action()

    def action(self) -> Phrase:
        """Draw a clause with a transitive verb, in the present or the past, with a noun or a pronoun as its object."""
        subject, kind, negated = self.subject(), self.rng.pick(("things", "people")), self.rng.chance(35)
        base, third, past, _, forms = _verb(self.rng.pick(VERBS[kind]))
        pronouns = GRAMMAR["pronouns"]
        reflexive = subject.person if subject.person in (0, 2, 3) else None  # `I see me` is not said
        number = self.rng.pick([n for n, person in enumerate(pronouns["persons"]) if person != reflexive])
        slots = {
            "s": subject,
            "o": self.noun_phrase(kind, determiners="definite" if negated else ""),
            "p": self.join(pronouns[kind][number], {}),
            "w": self.place(),
            "adverb": self.pick(GRAMMAR["words"]["adverbs"]),
        }
        ending = "_negated" * negated
        if self.rng.chance(55):
            slots["v"] = self.entry(third if subject.person == 1 else base, forms[subject.person])
            slots["b"] = self.entry(base, forms[subject.person])
            slots["x"] = self.entry("does" if subject.person == 1 else "do", "")
            return self.pattern(f"present{ending}", **slots)
        with_pronoun = self.rng.chance(35)
        # the participle agrees with an object before it: `il l' a vue`
        feminine = kind == "people" and number == 2
        french = _adjective_forms(forms[5])[feminine + 2 * (number > 2)] if with_pronoun else forms[5]
        slots |= {"t": self.entry(past, french), "c": self.entry(base, french)}
        slots["x"] = self.entry("", VERBS["avoir"][subject.person])
        return self.pattern(f"past{'_pronoun' * with_pronoun}{ending}", **slots)

    def description(self) -> Phrase:
        """Draw a clause that says what somebody is: `she is a student`, `the old men are tired`."""
        subject = self.subject()
        features = subject.feminine, subject.plural
        state = self.adjective(GRAMMAR["adjectives"]["states"]["all"], *features)
        english, french = self.rng.pick(GRAMMAR["nouns"]["professions"]["both"]).split(" = ")
        job = self.entry(
            _plural_forms(english)[subject.plural], _adjective_forms(french)[features[0] + 2 * features[1]]
        )
        article = self.entry("" if subject.plural else "a", "")
        be = self.join(VERBS["be"][subject.person], {})
        return self.pattern(self.rng.pick(("state", "profession")), s=subject, be=be, state=state, job=job, a=article)

    def passive(self) -> Phrase:
        """Draw a clause such as `the agreement on the European Economic Area was signed in August 1992`."""
        words = GRAMMAR["words"]
        document = self.noun_phrase("documents")
        institution = self.noun_phrase("institutions", "institution", "the")
        subject = self.pattern("document", document=document, institution=institution)
        *_, participle, forms = _verb(self.rng.pick(VERBS["documents"]))
        year = str(self.rng.between(words["first_year"], words["last_year"]))
        return self.pattern(
            "passive",
            s=subject,
            was=self.entry(VERBS["was"][document.person], ""),
            x=self.entry("", VERBS["avoir"][document.person]),
            t=self.entry(participle, _adjective_forms(forms[5])[document.feminine + 2 * document.plural]),
            month=self.pick(words["months"]),
            year=self.entry(year, year),
            agent=self.noun_phrase("people"),
        )


def _plural_forms(entry: str) -> list[str]:
    return entry.split("|") if "|" in entry else [entry, f"{entry}s"]


def _adjective_forms(entry: str) -> list[str]:
    """Return masculine, feminine, masculine plural and feminine plural, the last three derived if not given."""
    forms = entry.split("|")
    if len(forms) == 1:
        forms.append(entry if entry.endswith("e") else f"{entry}e")
    return forms if len(forms) == 4 else [*forms, *(form if form[-1] in "sx" else f"{form}s" for form in forms)]


def _verb(entry: str) -> tuple[str, str, str, str, list[str]]:
    """Return the English base, third person, past and participle, and the six French forms."""
    english, french = entry.split(" = ")
    base, third, past, participle = english.split("|")
    forms = [french[:-1] + ending for ending in VERBS["er"]] if french[-1] == "-" else french.split("|")
    return base, third, past, participle, forms


def _articles(words: Sequence[Word]) -> list[Word]:
    """Write `an` before a vowel."""
    return [
        word._replace(text="an") if word.text == "a" and next_word.text[0] in "aeiou" else word
        for word, next_word in pairwise([*words, Word(".")])
    ]


def _sandhi(words: Sequence[Word]) -> list[Word]:
    """Elide and contract adjacent words: `le homme` is `l' homme`, `de le roi` is `du roi`."""
    elided = [
        word._replace(text=SANDHI.get(word.text, word.text)) if next_word.text[0] in SANDHI["vowels"] else word
        for word, next_word in pairwise([*words, Word(".")])
    ]
    result: list[Word] = []
    for word in elided:
        if result and (pair := f"{result[-1].text} {word.text}") in SANDHI:
            before = result.pop()
            word = Word(SANDHI[pair], before.sure | word.sure, before.possible | word.possible)
        result.append(word)
    return result
