"""Conversations with an assistant that answers in one plain sentence: sums, measures, words and their meanings."""

from weft.text.grammars.rng import Mine, Rng, Row, an, load

GRAMMAR = load("chatter")
ASK = GRAMMAR["ask"]
MEANINGS = GRAMMAR["meanings"]

Exchange = tuple[str, str, str]  # what identifies it, what the person asks, what the assistant answers


def conversation(rng: Rng, mine: Mine) -> Row | None:
    """{messages}: one to three exchanges, perhaps with a greeting before and thanks after.

    What is held out, a sum with its numbers or a word in its wording, is in no conversation of the training side.
    """
    turns: list[tuple[str, str]] = []
    if rng.chance(20):
        turns.append((rng.pick(GRAMMAR["greetings"]), "Hello! What would you like to know?"))
    for _ in range(rng.pick((1, 1, 1, 2, 2, 3))):
        key, asked, answer = _exchange(rng)
        while not mine(key):
            key, asked, answer = _exchange(rng)
        turns.append((asked, answer))
    if rng.chance(15):
        turns.append((rng.pick(GRAMMAR["thanks"]), "You are welcome."))
    messages = []
    for asked, answer in turns:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return {"messages": messages}


def _exchange(rng: Rng) -> Exchange:
    return rng.pick((_sum, _sum, _measure, _meaning, _meaning, _opposite, _spelling, _larger))(rng)


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
    small, large, ratio, plural = rng.pick(GRAMMAR["measures"])
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
    one, other = rng.pick(GRAMMAR["opposites"]).split()
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
