"""Sentences of small grammars: opinions, stories with a question, reports, conversations. Words are in TOML files."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weft.text.grammars.rng import InSplit, Rng, Row

CHATTER, LABELLED, PARTICLES, QUESTIONS, REPORTS, SENSES, SENTIMENT, STORIES, TALES = (
    tomllib.loads(Path(__file__).with_name(f"{name}.toml").read_text(encoding="utf-8"))
    for name in ("chatter", "labels", "particles", "questions", "reports", "senses", "sentiment", "stories", "tales")
)
WORDINGS, MEANINGS = CHATTER["wordings"], CHATTER["meanings"]
WORD_SENSES = tuple((word, name) for word, senses in SENSES["words"].items() for name in senses)
LABELS = ("negative", "positive")
PRONOUNS = (("she", "her", "her"), ("he", "him", "his"))
SHARES = 2520  # divisible by 1 … 10: the weight of the k-th item of a list is SHARES / k

Exchange = tuple[str, str, str]  # the key that decides its split, the question, the answer


def an(word: str) -> str:
    """Return a word with its indefinite article."""
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"


def opinion(rng: Rng, in_split: InSplit) -> Row | None:
    """Return {text, label}; half are positive. Words alone don't decide: negation and the main clause do.

    Every pattern is drawn for both labels, with the same words, so that the meaning is in the order of the words:
    `not bad at all` is praise, and so is `though the plot was dull, I loved it`.
    """
    label = rng.below(2)
    thing = rng.pick(tuple(SENTIMENT["things"]))
    text = rng.pick(SENTIMENT["openers"]) + _sentence(rng, thing, label)
    text = f"{text[0].upper()}{text[1:]}."
    return {"text": text, "label": LABELS[label]} if in_split(text) else None


def _sentence(rng: Rng, thing: str, label: int) -> str:
    first, second = rng.sample(SENTIMENT["things"][thing], 2)
    form = rng.below(100)
    if form < 40:
        return _clause(rng, thing, first, label=label)
    if form < 50:
        main, more = _clause(rng, thing, first, label=label), _clause(rng, thing, second, label=label)
        return rng.pick(SENTIMENT["together"]).format(main=main, more=more)
    if form < 85:
        main, but = _clause(rng, thing, first, label=label), _clause(rng, thing, second, label=1 - label)
        return rng.pick(SENTIMENT["against"]).format(main=main, but=but, h=_adjective(rng, 1 - label), a2=second)
    word, meant = _adjective(rng, 1 - label), _adjective(rng, label)
    return rng.pick(SENTIMENT["expected"]).format(s=thing, a=first, w=word, an=an(word), g=meant, ang=an(meant))


def _clause(rng: Rng, thing: str, aspect: str, *, label: int) -> str:
    negated = rng.chance(45)
    side = 1 - label if negated else label
    word, (did, to) = _adjective(rng, side), rng.pick(SENTIMENT[LABELS[side]]["verbs"])
    pattern = rng.pick(SENTIMENT["negated" if negated else "plain"])
    return pattern.format(s=thing, a=aspect, d=rng.pick(SENTIMENT["degrees"]), w=word, an=an(word), v=did, to=to)


def _adjective(rng: Rng, label: int) -> str:
    return rng.pick(SENTIMENT[LABELS[label]]["adjectives"])


def question(rng: Rng, in_split: InSplit) -> Row | None:
    """Return {context, question, answer, source, target}; source and target are the same as one text each.

    A story of made-up facts, and a question that one of them answers: `Omar lives in Lima. Anna lives in Rome. Where
    does Anna live?` → `Anna lives in Rome.` All facts of a story are of one kind, about two or three people, so the
    kind of word in the question doesn't give the answer away. Two properties make lookup easier to learn. The first
    names and values of a list are more frequent, as words are in any text (Zipf 1949), so it is learned on the frequent
    ones first. And all sentences have one length, so a batch of rows of similar length holds every kind of question.
    The pairs of names and values decide the split of a story, in any order and with any question.
    """
    fact, clothes, people = rng.pick(QUESTIONS["facts"]), rng.pick(QUESTIONS["clothes"]), 2 if rng.chance(65) else 3
    names, values = _zipf(rng, QUESTIONS["names"], people), _zipf(rng, fact["values"], people)
    pairs = list(zip(names, values, strict=True))
    if not in_split(" ".join(f"{name} {value}" for name, value in sorted(pairs))):
        return None
    statements = [fact["statement"].format(n=name, x=value, c=clothes) for name, value in pairs]
    chosen = rng.below(people)
    name, value = pairs[chosen]
    wording, answer = (fact["question"], value) if rng.chance(50) else (fact["whose"], name)
    context, question = " ".join(statements), wording.format(n=name, x=value, c=clothes)
    texts = {"source": f"{context} {question}", "target": statements[chosen]}
    return {"context": context, "question": question, "answer": answer, **texts}


def _zipf(rng: Rng, options: Sequence[str], count: int) -> list[str]:
    """Draw `count` distinct options, in random order; the k-th is 1/k as frequent as the first."""
    weights = [SHARES // rank for rank in range(1, len(options) + 1)]
    drawn: list[str] = []
    while len(drawn) < count:
        index, point = 0, rng.below(sum(weights))
        while point >= weights[index]:
            point -= weights[index]
            index += 1
        if options[index] not in drawn:
            drawn.append(options[index])
    return rng.sample(drawn, count)


def report(rng: Rng, in_split: InSplit) -> Row | None:
    """Return {text, summary}: a report of two to five sentences, and who did what and where in one.

    Other people, things and cities in the report don't belong in the summary. Wording and order vary, so that a
    summary is neither the first sentence nor the first name. Who, what and where decide the split of a report, in any
    wording.
    """
    event = rng.pick(REPORTS["events"])
    name, other_name = rng.sample(REPORTS["names"].split(), 2)
    city, other_city = rng.sample(REPORTS["cities"].split(), 2)
    thing, other_thing = rng.sample(event["things"], 2)
    words = {"n": name, "d": event["did"], "p": event["participle"], "x": thing, "c": city}
    others = {"m": other_name, "o": other_thing, "b": other_city}
    summary = REPORTS["summary"].format(**words)
    if not in_split(summary):
        return None
    sentences = rng.sample(REPORTS["other"], rng.between(1, 3))
    sentences.insert(rng.below(len(sentences) + 1), rng.pick(REPORTS["news"]))
    filled = [sentence.format(**words, **others) for sentence in sentences]
    return {"text": " ".join(text[0].upper() + text[1:] for text in filled), "summary": summary}


def conversation(rng: Rng, in_split: InSplit) -> Row | None:
    """Return {messages}: one to three exchanges, sometimes with a greeting before and thanks after.

    The assistant answers in one plain sentence: sums, measures, words and their meanings. A held-out item, such as a
    sum, or a word in one wording, occurs in no training conversation.
    """
    turns: list[tuple[str, str]] = []
    if rng.chance(20):
        turns.append((rng.pick(CHATTER["greetings"]), "Hello! What would you like to know?"))
    kinds = (_sum, _sum, _measure, _meaning, _meaning, _opposite, _spelling, _larger)
    for _ in range(rng.pick((1, 1, 1, 2, 2, 3))):
        key, question, answer = rng.pick(kinds)(rng)
        while not in_split(key):
            key, question, answer = rng.pick(kinds)(rng)
        turns.append((question, answer))
    if rng.chance(15):
        turns.append((rng.pick(CHATTER["thanks"]), "You are welcome."))
    messages = [(role, text) for turn in turns for role, text in zip(("user", "assistant"), turn, strict=True)]
    return {"messages": [{"role": role, "content": text} for role, text in messages]}


def _sum(rng: Rng) -> Exchange:
    sign = rng.pick(("plus", "minus", "times"))
    largest = 12 if sign == "times" else 99
    a, b = rng.between(0, largest), rng.between(0, largest)
    if sign == "minus" and a < b:
        a, b = b, a
    result = {"plus": a + b, "minus": a - b, "times": a * b}[sign]
    words = f"{a} {sign} {b}"
    # 3 plus 4 and 4 plus 3 are one item
    low, high = (a, b) if sign == "minus" else sorted((a, b))
    return f"{low} {sign} {high}", rng.pick(WORDINGS["sum"]).format(words), f"{words} is {result}."


def _measure(rng: Rng) -> Exchange:
    small, large, ratio, plural = rng.pick(CHATTER["measures"])
    count = rng.between(2, 30)
    amount = f"{count} {plural}"
    question = rng.pick(WORDINGS["measure"]).format(s=small, m=amount)
    return f"{count} {large}", question, f"There are {count * ratio} {small} in {amount}."


def _meaning(rng: Rng) -> Exchange:
    word = rng.pick(tuple(MEANINGS))
    question = rng.pick(WORDINGS["meaning"]).format(w=word, a=an(word))
    answer = f"{an(word)} is {MEANINGS[word]}."
    return question, question, answer[0].upper() + answer[1:]


def _opposite(rng: Rng) -> Exchange:
    one, other = rng.pick(CHATTER["opposites"]).split()
    if rng.chance(50):
        one, other = other, one
    question = rng.pick(WORDINGS["opposite"]).format(one)
    return question, question, f"The opposite of {one} is {other}."


def _spelling(rng: Rng) -> Exchange:
    word = rng.pick(tuple(MEANINGS))
    question = rng.pick(WORDINGS["spelling"]).format(word)
    return question, question, f"{word} is spelled {'-'.join(word.upper())}."


def _larger(rng: Rng) -> Exchange:
    a = rng.below(1000)
    b = (a + rng.between(1, 999)) % 1000  # any other number
    question = rng.pick(WORDINGS["larger"]).format(a, b)
    low, high = sorted((a, b))
    return f"{low} or {high}", question, f"{high} is larger than {low}."


def phrasal_verb(rng: Rng) -> str:
    """Return a sentence that ends in the particle of its verb, which is 2 to 12 words before it."""
    words, verb = PARTICLES, rng.pick(tuple(PARTICLES["particles"]))
    sentence = [rng.pick(words["subjects"]), verb, "the", *rng.sample(words["adjectives"], rng.below(4))]
    sentence.append(rng.pick(words["nouns"]))
    for _ in range(rng.below(3)):
        adjective = rng.sample(words["adjectives"], rng.below(2))
        sentence += [rng.pick(words["prepositions"]), "the", *adjective, rng.pick(words["places"])]
    return " ".join([*sentence, words["particles"][verb], "."])


def sense(rng: Rng, _: InSplit) -> Row:
    """Return {text, sense}: a sentence with an ambiguous word in brackets, and the sense that its context decides.

    At least two words of the sense are in it, on one side or on both; patterns are shared by all senses.
    """
    word, name = rng.pick(WORD_SENSES)
    own = SENSES["words"][word][name]
    x, sides = rng.sample(own["x"], 2), rng.pick(("both", "before", "after"))
    subjects = own["who"] if sides == "after" or rng.chance(50) else SENSES["who"]
    verb = rng.pick(own["v"] if sides == "before" or rng.chance(50) else SENSES["v"])
    words = (rng.pick(subjects), verb, x[0] if sides != "after" else "", x[1] if sides != "before" else "")
    return {"text": _in_context(rng, word, own, words=words), "sense": name}


def held_out_sense(rng: Rng, _: InSplit) -> Row:
    """Return {text, sense} with a single noun of the sense: there is one such sentence for each noun.

    No two sentences share a word that tells their sense, so their vectors are alike only if words are related.
    """
    word, name = rng.pick(WORD_SENSES)
    own = SENSES["words"][word][name]
    x = rng.pick(own["x"])
    rng = Rng(f"{word} {name} {x}")  # the same sentence whenever it is drawn
    nouns = rng.sample((x, ""), 2)
    words = (rng.pick(SENSES["who"]), rng.pick(SENSES["v"]), *nouns)
    return {"text": _in_context(rng, word, own, words=words), "sense": name}


def _in_context(rng: Rng, word: str, own: dict[str, Any], *, words: Sequence[str]) -> str:
    """Return a sentence with a subject, a verb, and a noun before and after the word, if not empty."""
    (who, verb, before, after), patterns = words, SENSES[own.get("form", "noun")]
    start = rng.pick(patterns["before" if before else "neutral_before"]).format(v=verb, x=before)
    end = rng.pick(patterns["after" if after else "neutral_after"]).format(x=after)
    return f"{who} {start} [{word}] {end} ."


def story(rng: Rng) -> str:
    """Return 6 to 12 sentences about the work of one person."""
    work = rng.pick(tuple(STORIES["work"]))
    return " ".join(f"The {work} {rng.pick(STORIES['work'][work])}." for _ in range(rng.between(6, 12)))


def tale(rng: Rng) -> str:
    """Return a tale of about a hundred words. What it names first decides words far later: a potter gives a bowl."""
    t = TALES
    trades, animals = rng.sample([*t["trades"]], 2), rng.sample([*t["animals"]], 2)
    people = rng.sample([(name, *pronouns) for pronouns in PRONOUNS for name in t[pronouns[0]]], 2)
    noun, adjective = rng.pick([*t["things"]]), rng.pick(t["adjectives"])
    words = {"noun": noun, "adjective": adjective, "thing": f"{adjective} {noun}", "a_thing": an(f"{adjective} {noun}")}
    for keys, values in (
        ("name he him his", people[0]),
        ("friend friend_he friend_him friend_his", people[1]),
        ("trade other_trade work gift", (*trades, *t["trades"][trades[0]])),
        ("first second", animals),
        ("first_at", t["animals"][animals[0]][:1]),
        ("second_at saying", t["animals"][animals[1]]),
        ("material use", t["things"][noun]),
        ("trouble helper help", rng.pick([*t["obstacles"].values()])),
        ("skill more", rng.pick(t["skills"])),
        ("home there", rng.sample(t["homes"], 2)),
    ):
        words |= zip(keys.split(), values, strict=True)
    words |= {key: rng.pick(t[f"{key}s"]) for key in ("title", "mood", "time", "feeling", "place", "origin", "closing")}
    words |= {key.capitalize(): text[0].upper() + text[1:] for key, text in words.items()}
    text = " ".join(rng.pick(t["stages"][stage]) for stage in rng.pick([*t["plots"].values()]))
    return text.format(**words).format(**words)  # twice, since what is filled in names others


def _phrase(rng: Rng, plural: int) -> list[tuple[str, str]]:
    """Return a noun phrase as words with their tags."""
    form = {kind: rng.pick(LABELLED[kind]).split("|") for kind in ("determiners", "nouns")}
    adjective = [(rng.pick(LABELLED["adjectives"]), "adjective")] if rng.chance(50) else []
    return [(form["determiners"][-plural], "determiner"), *adjective, (form["nouns"][plural], "noun")]


def _subject(rng: Rng) -> tuple[list[tuple[str, str]], int]:
    """Return a subject with one or two nouns after it, whose number is independent, and whether it is plural."""
    plural = rng.below(2)
    words = _phrase(rng, plural)
    for _ in range(rng.between(1, 2)):
        words += [(rng.pick(LABELLED["prepositions"]), "preposition"), *_phrase(rng, rng.below(2))]
    return words, plural


def subject_number(rng: Rng, in_split: InSplit) -> Row | None:
    """Return {text, label}: a subject such as `the keys near the [house]`, and its number, which the marked last noun
    does not tell."""
    words, plural = _subject(rng)
    text = " ".join(word for word, _ in words[:-1]) + f" [{words[-1][0]}]"
    return {"text": text, "label": ("singular", "plural")[plural]} if in_split(text) else None


def tagged(rng: Rng, in_split: InSplit) -> Row | None:
    """Return {words, tags}: a sentence, and the part of speech of each word."""
    words, plural = _subject(rng)
    words += [(word, "verb") for word in rng.pick(LABELLED["verbs"]).split("|")[plural].split()]
    words.append((rng.pick(LABELLED["ends"]), "complement"))
    row = {"words": [word for word, _ in words], "tags": [tag for _, tag in words]}
    return row if in_split(" ".join(row["words"])) else None


def bracket_depth(rng: Rng, in_split: InSplit) -> Row | None:
    """Return {words, tags}: balanced brackets, and how many are open after each of them."""
    words, tags, pending, length = list[str](), list[str](), list[str](), 2 * rng.between(3, 10)
    while len(words) < length:
        if pending and (len(pending) == length - len(words) or rng.chance(45)):
            words.append(pending.pop())
        else:
            opening, closing = rng.pick(LABELLED["brackets"])
            words.append(opening)
            pending.append(closing)
        tags.append(str(len(pending)))
    return {"words": words, "tags": tags} if in_split(" ".join(words)) else None
