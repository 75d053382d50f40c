"""Questions about abilities, made by seed: sequences with one right continuation among a few.

Most are made of symbols, tokens of the model's own vocabulary, so that a model of any text can be asked.
"""

import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from weft.errors import ConfigError, counted, suggestion
from weft.text.tokenizer import Tokenizer

MIN_SYMBOLS, MAX_SYMBOLS = 12, 64  # of an alphabet
FORMS = ((" {}", ""), ("{}", " "), ("{}", ""))  # of a word or symbol, and what separates two
NOISE = 4  # symbols, or pairs of them, before those that are asked for again
Words = Sequence[str]


class Ability(NamedTuple):
    """Ability by name: what is asked, its distances and their `unit`, and the number of answers to choose from."""

    name: str
    about: str
    unit: str
    distances: tuple[int, ...]
    choices: int

    @property
    def chance(self) -> float:
        return 1 / self.choices


class AbilityQuestion(NamedTuple):
    """Words that a model reads, and continuations of which the first is right.

    A model that continues texts reads `examples` of the task, the source, the symbol `between`, and the answer so far,
    the `prefix`. An encoder–decoder reads the source alone, and the prefix is the beginning of its target.
    """

    source: Words
    prefix: Words
    candidates: Sequence[Words]
    examples: Words = ()
    between: Words = ()

    @property
    def context(self) -> Words:
        """All words before the answer."""
        return (*self.examples, *self.source, *self.between, *self.prefix)


class Form(NamedTuple):
    """Form of a word in a text, and what separates two."""

    word: str
    separator: str

    def write(self, words: Iterable[str]) -> str:
        return self.separator.join(self.word.format(word) for word in words)


class UnspelledError(Exception):
    """Reason why a tokenizer cannot spell a task."""


_DATA = tomllib.loads(Path(__file__).with_name("tasks.toml").read_text(encoding="utf-8"))
TASKS = {
    name: Ability(name, **{**entry, "distances": tuple(entry["distances"])})
    for name, entry in _DATA["abilities"].items()
}
WORDS = _DATA["words"]


def chosen_tasks(names: Sequence[str]) -> list[Ability]:
    """Return the tasks with these names, or all of them."""
    for name in names:
        if name not in TASKS:
            raise ConfigError(f"'{name}': no such ability; {suggestion(name, TASKS)}")
    return [task for task in TASKS.values() if not names or task.name in names]


class AbilitySpeller:
    """Writes questions with tokens of a model: of its tokenizer, and of its source's if that is another."""

    def __init__(self, tokenizers: Sequence[Tokenizer]):
        self.tokenizers = tokenizers
        self._symbols: tuple[Form, list[str]] | None = None

    def form(self, task: Ability) -> Form:
        """Return how a task is written; raise UnspelledError if there are no tokens for it."""
        if task.name == "agreement":
            return self._agreement()
        if task.name == "brackets":
            return self._spelling(["".join(WORDS["brackets"][: task.choices])], (FORMS[2], FORMS[0]))
        if task.name == "sums":
            return self._spelling([f"0123456789+={end}" for end in WORDS["ends"]], (FORMS[2], FORMS[0]))
        return self.symbols()[0]

    def symbols(self) -> tuple[Form, list[str]]:
        """Return the form and the alphabet of random sequences: words, or else characters, of one token each."""
        if self._symbols is None:
            self._symbols = self._find_symbols()
        return self._symbols

    def spells(self, text: str) -> bool:
        """Return whether the tokens of a text spell it, apart from white space and case."""
        plain = re.sub(r"\s", "", text).lower()
        for tokenizer in self.tokenizers:
            ids = tokenizer.encode(text)
            if tokenizer.unk_id in ids or re.sub(r"\s", "", tokenizer.decode(ids)).lower() != plain:
                return False
            if not plain and not ids:  # a tokenizer that drops line breaks
                return False
        return True

    def known(self, form: Form, entries: Sequence[Sequence[str] | str]) -> list[list[str]]:
        """Return the words, or the groups of words, that tokens spell."""
        groups = [[entry] if isinstance(entry, str) else list(entry) for entry in entries]
        return [group for group in groups if all(self.spells(form.write([word])) for word in group)]

    def _agreement(self) -> Form:
        for form in (Form(*each) for each in FORMS[:2]):
            counts = [len(self.known(form, WORDS[key])) for key in ("nouns", "prepositions", "verbs")]
            if counts[0] >= 2 and all(counts) and self.spells(form.write(["the"])):
                return form
        raise UnspelledError("the vocabulary lacks its English words")

    def _spelling(self, alternatives: Sequence[str], forms: Sequence[tuple[str, str]]) -> Form:
        for form in (Form(*each) for each in forms):
            if any(all(self.spells(form.write([char])) for char in characters) for characters in alternatives):
                return form
        lacking = [char for char in alternatives[0] if not self.spells(char) and char.strip()]
        raise UnspelledError(f"no tokens for {' '.join(lacking) or 'a separator'}")

    def _find_symbols(self) -> tuple[Form, list[str]]:
        tokenizer, most = self.tokenizers[-1], 0
        special = set(tokenizer.special_tokens.values())
        # words, else characters without spaces, else with spaces, where characters beside each other merge
        for (word, separator), single in ((FORMS[0], 0), (FORMS[1], 0), (FORMS[2], 1), (FORMS[1], 1), (FORMS[0], 1)):
            form, found = Form(word, separator), dict[str, str]()  # symbol by its lower case
            for id in range(tokenizer.vocab_size):
                word = "" if id in special else tokenizer.decode([id]).strip()
                if not word.isalnum() or (len(word) == 1) != single or word.lower() in found:
                    continue
                if tokenizer.encode(form.write([word])) == [id] and self.spells(form.write([word])):
                    found[word.lower()] = word
                if len(found) == MAX_SYMBOLS:
                    break
            symbols = list(found.values())
            most = max(most, len(symbols))
            if len(symbols) >= MIN_SYMBOLS and len(tokenizer.encode(form.write(symbols))) == len(symbols):
                return form, symbols
        raise UnspelledError(f"the vocabulary has {counted(most, 'symbol')} of one token; {MIN_SYMBOLS} are needed")

    def lacks(self, task: Ability, distance: int) -> str:
        """Return why a distance cannot be asked for although shorter ones can; "" if it can."""
        if task.name != "reversal" or distance + 2 <= len(symbols := self.symbols()[1]):
            return ""
        return f"longer than the vocabulary's {len(symbols)} symbols of one token allow"

    def questions(self, task: Ability, distance: int, *, items: int, seed: int) -> list[AbilityQuestion]:
        """Return questions at a distance; the same for every model with the same alphabet."""
        form, rng = self.form(task), Random(f"{seed}/{task.name}/{distance}")
        if task.name == "agreement":
            english = [self.known(form, WORDS[key]) for key in ("nouns", "prepositions", "verbs")]
            return [_agreement(rng, english, distance // 3) for _ in range(items)]
        if task.name == "brackets":
            return [_brackets(rng, WORDS["brackets"][: task.choices], distance) for _ in range(items)]
        if task.name == "sums":
            end = next(end for end in WORDS["ends"] if self.spells(form.write([end])))
            return [_sums(rng, end, distance) for _ in range(items)]
        symbols = self.symbols()[1]
        return [SYMBOLIC[task.name](rng, symbols, distance) for _ in range(items)]


def _candidates(rng: Random, right: str, others: Iterable[str], *, fill: Iterable[str] = ()) -> list[tuple[str]]:
    """Return the right symbol and three others; those of `fill` if there are too few."""
    wrong = sorted(set(others) - {right})
    wrong = rng.sample(wrong, min(3, len(wrong)))
    wrong += rng.sample(sorted(set(fill) - {right, *wrong}), 3 - len(wrong)) if len(wrong) < 3 else []
    return [(symbol,) for symbol in (right, *wrong)]


def _string(rng: Random, symbols: Words, length: int) -> list[str]:
    """Return random symbols, without repetition as far as there are enough."""
    return rng.sample(symbols, length) if length <= len(symbols) else rng.choices(symbols, k=length)


def _agreement(rng: Random, words: Sequence[Sequence[Words]], attractors: int) -> AbilityQuestion:
    nouns, prepositions, verbs = words
    number, verb = rng.randrange(2), rng.choice(verbs)
    subject = ["the", rng.choice(nouns)[number]]
    for _ in range(attractors):
        subject += [rng.choice(prepositions)[0], "the", rng.choice(nouns)[1 - number]]
    return AbilityQuestion(subject, (), [(verb[number],), (verb[1 - number],)])


def _brackets(rng: Random, kinds: Words, depth: int) -> AbilityQuestion:
    opened = rng.choices(kinds, k=depth)
    closed = [kind[1] for kind in reversed(opened)]
    done = rng.randrange(depth)
    wrong = [(kind[1],) for kind in kinds if kind[1] != closed[done]]
    return AbilityQuestion([kind[0] for kind in opened], closed[:done], [(closed[done],), *wrong])


def _sums(rng: Random, end: str, digits: int) -> AbilityQuestion:
    def number() -> int:
        return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)

    pairs = [(number(), number()) for _ in range(4)]
    examples = "".join(f"{a}+{b}={a + b}{end}" for a, b in pairs[:3])
    (a, b), answer = pairs[3], str(sum(pairs[3]))
    # all answers differ in one digit, so that none stands out; the first is often 1
    place = rng.randrange(1, len(answer)) if len(answer) > 1 else 0
    wrong = rng.sample([digit for digit in "0123456789" if digit != answer[place]], 3)
    candidates = [answer[:place] + digit + answer[place + 1 :] for digit in (answer[place], *wrong)]
    return AbilityQuestion(f"{a}+{b}=", (), candidates, examples)


def _copying(rng: Random, symbols: Words, length: int) -> AbilityQuestion:
    gap, *others = rng.sample(symbols, len(symbols))
    string, done = _string(rng, others, length), rng.randrange(1, length)
    return AbilityQuestion(string, string[:done], _candidates(rng, string[done], string, fill=others), between=[gap])


def _induction(rng: Random, symbols: Words, distance: int) -> AbilityQuestion:
    key, *others = rng.sample(symbols, len(symbols))
    after = _string(rng, others, distance)
    before = rng.choices(others, k=NOISE)
    return AbilityQuestion([*before, key, *after], [key], _candidates(rng, after[0], [*before, *after], fill=others))


def _recall(rng: Random, symbols: Words, distance: int) -> AbilityQuestion:
    key, *others = rng.sample(symbols, len(symbols))
    keys, values = others[::2], others[1::2]
    right, *others = _string(rng, values, 1 + NOISE + distance)
    pairs = [word for value in others for word in (rng.choice(keys), value)]
    source = [*pairs[: 2 * NOISE], key, right, *pairs[2 * NOISE :]]
    return AbilityQuestion(source, [key], _candidates(rng, right, others, fill=values))


def _counting(rng: Random, symbols: Words, count: int) -> AbilityQuestion:
    first, second, end = rng.sample(symbols, 3)
    examples = [word for n in (1, 2, 3) for word in (*[first] * n, *[second] * n, end)]
    ended = rng.random() < 0.5
    done = count if ended else rng.randrange(1, count)
    right, wrong = (end, second) if ended else (second, end)
    return AbilityQuestion([first] * count, [second] * done, [(right,), (wrong,)], examples)


def _reversal(rng: Random, symbols: Words, length: int) -> AbilityQuestion:
    middle, end, *others = rng.sample(symbols, len(symbols))
    examples = list[str]()
    for _ in range(2):
        string = rng.sample(others, length)
        examples += [*string, middle, *reversed(string), end]
    string, done = rng.sample(others, length), rng.randrange(length)
    answer = string[::-1]
    return AbilityQuestion(string, answer[:done], _candidates(rng, answer[done], string), examples, [middle])


def _mapping(rng: Random, symbols: Words, examples: int) -> AbilityQuestion:
    *inputs, one, two = rng.sample(symbols, 6)
    labels = dict(zip(inputs, (one, one, two, two), strict=True))
    shown = rng.choices(inputs, k=examples)
    asked = rng.choice(shown)
    wrong = two if labels[asked] == one else one
    return AbilityQuestion(
        [word for each in shown for word in (each, labels[each])], [asked], [(labels[asked],), (wrong,)]
    )


SYMBOLIC: dict[str, Callable[[Random, Words, int], AbilityQuestion]] = {
    "copying": _copying,
    "induction": _induction,
    "recall": _recall,
    "counting": _counting,
    "reversal": _reversal,
    "mapping": _mapping,
}
