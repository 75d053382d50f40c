"""Short stories of made-up facts, and a question that one of them answers.

    Omar lives in Lima. Anna lives in Rome. Where does Anna live?  →  Anna lives in Rome.

Every story tells the same of two or three people, so the kind of word that is asked for doesn't give the answer away:
one has to find out whose it is. Two habits of this small language make that easier to learn. The first names and things
of a list come more often than the last, as words do in any text (Zipf 1949): what it means to look something up is
found out on the frequent ones, and the rare ones follow. And all sentences are of one length, so a batch of rows of
like length holds every kind of question.
"""

from collections.abc import Sequence

from weft.text.grammars.rng import Mine, Rng, Row, load

GRAMMAR = load("questions")
SHARES = 2520  # 1 … 10 divide it: the k-th of a list has SHARES / k of them


def question(rng: Rng, mine: Mine) -> Row | None:
    """{context, question, answer}; also as one text to read and one to write, {source, target}.

    Who has what decides whether a story is held out, in whatever order it is told and whatever is asked.
    """
    fact, clothes, people = rng.pick(GRAMMAR["facts"]), rng.pick(GRAMMAR["clothes"]), 2 if rng.chance(65) else 3
    names, values = _often(rng, GRAMMAR["names"], people), _often(rng, fact["values"], people)
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
