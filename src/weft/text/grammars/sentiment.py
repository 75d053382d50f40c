"""Opinions whose words alone don't tell what is meant: negation turns them round, and the main clause outweighs.

Every pattern is drawn for both labels, with the same words around it, so that what a sentence means lies in the order
of its words: `not bad at all` praises, and `though the plot was dull, I loved it` does too.
"""

from weft.text.grammars.rng import Mine, Rng, Row, an, load

LABELS = ("negative", "positive")
GRAMMAR = load("sentiment")
THINGS = GRAMMAR["things"]


def opinion(rng: Rng, mine: Mine) -> Row | None:
    """{text, label}; half are positive."""
    label = rng.below(2)
    thing = rng.pick(tuple(THINGS))
    text = rng.pick(GRAMMAR["openers"]) + _sentence(rng, thing, label)
    text = f"{text[0].upper()}{text[1:]}."
    return {"text": text, "label": LABELS[label]} if mine(text) else None


def _sentence(rng: Rng, thing: str, label: int) -> str:
    first, second = rng.some(THINGS[thing], 2)
    form = rng.below(100)
    if form < 40:
        return _clause(rng, thing, first, label)
    if form < 50:
        one, other = _clause(rng, thing, first, label), _clause(rng, thing, second, label)
        return rng.pick(GRAMMAR["together"]).format(main=one, more=other)
    if form < 85:
        main, but = _clause(rng, thing, first, label), _clause(rng, thing, second, 1 - label)
        return rng.pick(GRAMMAR["against"]).format(main=main, but=but, h=_adjective(rng, 1 - label), a2=second)
    word, meant = _adjective(rng, 1 - label), _adjective(rng, label)
    return rng.pick(GRAMMAR["expected"]).format(s=thing, a=first, w=word, an=an(word), g=meant, ang=an(meant))


def _clause(rng: Rng, thing: str, aspect: str, label: int) -> str:
    """What `label` says, in its own words or by denying the opposite."""
    turned = rng.chance(45)
    side = 1 - label if turned else label
    word, (did, to) = _adjective(rng, side), rng.pick(GRAMMAR[LABELS[side]]["verbs"])
    pattern = rng.pick(GRAMMAR["turned" if turned else "plain"])
    return pattern.format(s=thing, a=aspect, d=rng.pick(GRAMMAR["degrees"]), w=word, an=an(word), v=did, to=to)


def _adjective(rng: Rng, label: int) -> str:
    return rng.pick(GRAMMAR[LABELS[label]]["adjectives"])
