"""Sentences of small languages: opinions, stories with a question, conversations. Their words stand beside, as TOML."""

import tomllib
from collections.abc import Sequence
from pathlib import Path

from weft.text.grammars.rng import Mine, Rng, Row

CHATTER, QUESTIONS, SENTIMENT = (
    tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))
    for name in ("chatter", "questions", "sentiment")
)
ASK, MEANINGS = CHATTER["ask"], CHATTER["meanings"]
LABELS = ("negative", "positive")
SHARES = 2520  # 1 … 10 divide it: the k-th of a list has SHARES / k of them

Exchange = tuple[str, str, str]  # what identifies it, what the person asks, what the assistant answers


def an(word: str) -> str:
    """A word with its indefinite article."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def opinion(rng: Rng, mine: Mine) -> Row | None:
    """{text, label}; half are positive. Words alone don't tell what is meant: negation turns them round, and the main
    clause outweighs.

    Every pattern is drawn for both labels, with the same words around it, so that what a sentence means lies in the
    order of its words: `not bad at all` praises, and `though the plot was dull, I loved it` does too.
    """
    label = rng.below(2)
    thing = rng.pick(tuple(SENTIMENT["things"]))
    text = rng.pick(SENTIMENT["openers"]) + _sentence(rng, thing, label)
    text = f"{text[0].upper()}{text[1:]}."
    return {"text": text, "label": LABELS[label]} if mine(text) else None


def _sentence(rng: Rng, thing: str, label: int) -> str:
    first, second = rng.some(SENTIMENT["things"][thing], 2)
    form = rng.below(100)
    if form < 40:
        return _clause(rng, thing, first, label)
    if form < 50:
        one, other = _clause(rng, thing, first, label), _clause(rng, thing, second, label)
        return rng.pick(SENTIMENT["together"]).format(main=one, more=other)
    if form < 85:
        main, but = _clause(rng, thing, first, label), _clause(rng, thing, second, 1 - label)
        return rng.pick(SENTIMENT["against"]).format(main=main, but=but, h=_adjective(rng, 1 - label), a2=second)
    word, meant = _adjective(rng, 1 - label), _adjective(rng, label)
    return rng.pick(SENTIMENT["expected"]).format(s=thing, a=first, w=word, an=an(word), g=meant, ang=an(meant))


def _clause(rng: Rng, thing: str, aspect: str, label: int) -> str:
    turned = rng.chance(45)
    side = 1 - label if turned else label
    word, (did, to) = _adjective(rng, side), rng.pick(SENTIMENT[LABELS[side]]["verbs"])
    pattern = rng.pick(SENTIMENT["turned" if turned else "plain"])
    return pattern.format(s=thing, a=aspect, d=rng.pick(SENTIMENT["degrees"]), w=word, an=an(word), v=did, to=to)


def _adjective(rng: Rng, label: int) -> str:
    return rng.pick(SENTIMENT[LABELS[label]]["adjectives"])


def question(rng: Rng, mine: Mine) -> Row | None:
    """{context, question, answer}; also as one text to read and one to write, {source, target}.

    A short story of made-up facts, and a question that one of them answers: `Omar lives in Lima. Anna lives in Rome.
    Where does Anna live?` → `Anna lives in Rome.`
    Every story tells the same of two or three people, so the kind of word that is asked for doesn't give the answer
    away: one has to find out whose it is. Two habits of this small language make that easier to learn. The first names
    and things of a list come more often than the last, as words do in any text (Zipf 1949): what it means to look
    something up is found out on the frequent ones, and the rare ones follow. And all sentences are of one length, so a
    batch of rows of like length holds every kind of question.
    Who has what decides whether a story is held out, in whatever order it is told and whatever is asked.
    """
    fact, clothes, people = rng.pick(QUESTIONS["facts"]), rng.pick(QUESTIONS["clothes"]), 2 if rng.chance(65) else 3
    names, values = _often(rng, QUESTIONS["names"], people), _often(rng, fact["values"], people)
    pairs = list(zip(names, values, strict=True))
    if not mine(" ".join(f"{name} {value}" for name, value in sorted(pairs))):
        return None
    told = [fact["told"].format(n=name, x=value, c=clothes) for name, value in pairs]
    chosen = rng.below(people)
    name, value = pairs[chosen]
    wording, answer = (fact["asked"], value) if rng.chance(50) else (fact["whose"], name)
    context, asked = " ".join(told), wording.format(n=name, x=value, c=clothes)
    both = {"source": f"{context} {asked}", "target": told[chosen]}
    return {"context": context, "question": asked, "answer": answer, **both}


def _often(rng: Rng, options: Sequence[str], count: int) -> list[str]:
    """`count` of these, none twice, in any order: the k-th is drawn a k-th as often as the first."""
    shares = [SHARES // place for place in range(1, len(options) + 1)]
    drawn: list[str] = []
    while len(drawn) < count:
        place, share = 0, rng.below(sum(shares))
        while share >= shares[place]:
            share -= shares[place]
            place += 1
        if options[place] not in drawn:
            drawn.append(options[place])
    return rng.some(drawn, count)


def conversation(rng: Rng, mine: Mine) -> Row | None:
    """{messages}: one to three exchanges, perhaps with a greeting before and thanks after.

    The assistant answers in one plain sentence: sums, measures, words and their meanings.
    What is held out, a sum with its numbers or a word in its wording, is in no conversation of the training side.
    """
    turns: list[tuple[str, str]] = []
    if rng.chance(20):
        turns.append((rng.pick(CHATTER["greetings"]), "Hello! What would you like to know?"))
    kinds = (_sum, _sum, _measure, _meaning, _meaning, _opposite, _spelling, _larger)
    for _ in range(rng.pick((1, 1, 1, 2, 2, 3))):
        key, asked, answer = rng.pick(kinds)(rng)
        while not mine(key):
            key, asked, answer = rng.pick(kinds)(rng)
        turns.append((asked, answer))
    if rng.chance(15):
        turns.append((rng.pick(CHATTER["thanks"]), "You are welcome."))
    said = [(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]
    return {"messages": [{"role": role, "content": text} for role, text in said]}


def _sum(rng: Rng) -> Exchange:
    sign = rng.pick(("plus", "minus", "times"))
    most = 12 if sign == "times" else 99
    a, b = rng.between(0, most), rng.between(0, most)
    if sign == "minus" and a < b:
        a, b = b, a
    result = {"plus": a + b, "minus": a - b, "times": a * b}[sign]
    words = f"{a} {sign} {b}"
    # 3 plus 4 and 4 plus 3 are one item
    low, high = (a, b) if sign == "minus" else sorted((a, b))
    return f"{low} {sign} {high}", rng.pick(ASK["sum"]).format(words), f"{words} is {result}."


def _measure(rng: Rng) -> Exchange:
    small, large, ratio, plural = rng.pick(CHATTER["measures"])
    count = rng.between(2, 30)
    many = f"{count} {plural}"
    asked = rng.pick(ASK["measure"]).format(s=small, m=many)
    return f"{count} {large}", asked, f"There are {count * ratio} {small} in {many}."


def _meaning(rng: Rng) -> Exchange:
    word = rng.pick(tuple(MEANINGS))
    asked = rng.pick(ASK["meaning"]).format(w=word, a=an(word))
    answer = f"{an(word)} is {MEANINGS[word]}."
    return asked, asked, answer[0].upper() + answer[1:]


def _opposite(rng: Rng) -> Exchange:
    one, other = rng.pick(CHATTER["opposites"]).split()
    if rng.chance(50):
        one, other = other, one
    asked = rng.pick(ASK["opposite"]).format(one)
    return asked, asked, f"The opposite of {one} is {other}."


def _spelling(rng: Rng) -> Exchange:
    word = rng.pick(tuple(MEANINGS))
    asked = rng.pick(ASK["spelling"]).format(word)
    return asked, asked, f"{word} is spelled {'-'.join(word.upper())}."


def _larger(rng: Rng) -> Exchange:
    a = rng.below(1000)
    b = (a + rng.between(1, 999)) % 1000  # any other number
    asked = rng.pick(ASK["larger"]).format(a, b)
    low, high = sorted((a, b))
    return f"{low} or {high}", asked, f"{high} is larger than {low}."
