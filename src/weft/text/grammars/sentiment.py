"""Opinions whose words alone don't tell what is meant: negation turns them round, and the main clause outweighs.

Every pattern is drawn for both labels, with the same words around it, so that what a sentence means lies in the order
of its words: `not bad at all` praises, and `though the plot was dull, I loved it` does too.
"""

from weft.text.grammars.rng import Mine, Rng, Row, words

LABELS = ("negative", "positive")

# by label: 0 negative, 1 positive
ADJECTIVES = (
    words(
        "awful dreadful terrible poor bad dull clumsy disappointing boring mediocre tiresome sloppy unpleasant"
        " forgettable weak shoddy annoying irritating dismal tedious lousy horrible miserable careless ugly feeble"
        " unbearable pathetic atrocious second-rate frustrating lifeless stale flawed ridiculous embarrassing"
    ),
    words(
        "wonderful delightful superb excellent brilliant charming impressive lovely splendid marvellous great"
        " good fine pleasant memorable remarkable outstanding first-rate refreshing satisfying enjoyable"
        " thoughtful polished clever beautiful solid striking fantastic terrific magnificent rewarding flawless"
        " inspired graceful admirable captivating"
    ),
)
# (did so, to do so)
VERBS = (
    (("hated", "hate"), ("disliked", "dislike"), ("loathed", "loathe"), ("detested", "detest"), ("resented", "resent"),
     ("despised", "despise")),
    (("loved", "love"), ("enjoyed", "enjoy"), ("adored", "adore"), ("admired", "admire"), ("liked", "like"),
     ("cherished", "cherish")),
)  # fmt: skip
THINGS = {
    "film": words("plot acting script ending soundtrack dialogue pacing camerawork"),
    "novel": (*words("plot prose ending hero dialogue translation cover"), "first chapter"),
    "restaurant": words("food service soup dessert menu music wine waiter"),
    "hotel": words("room staff breakfast bed view pool lobby"),
    "phone": words("screen camera battery speaker design keyboard charger"),
    "concert": words("singer sound band lighting encore hall crowd"),
    "museum": (*words("guide collection café building garden catalogue"), "gift shop"),
    "play": (*words("cast stage script ending director lighting"), "second act"),
    "course": (*words("teacher textbook pace homework lecture"), "final exam"),
    "game": (*words("story music map tutorial combat"), "final level"),
    "flight": (*words("seat crew meal boarding legroom"), "safety video"),
    "festival": words("organiser weather campsite lineup atmosphere food"),
}
DEGREES = ("", "", "", "very ", "really ", "truly ", "quite ", "simply ", "rather ", "utterly ", "absolutely ")
OPENERS = ("", "", "", "honestly, ", "in the end, ", "all in all, ", "looking back, ", "to be fair, ", "for once, ")

# {a} an aspect, {s} the thing itself, {d} a degree, {w} an adjective ({an} with its article), {v} {to} a verb
PLAIN = (
    "the {a} was {d}{w}",
    "the {a} turned out {d}{w}",
    "I found the {a} {d}{w}",
    "I thought that the {a} was {d}{w}",
    "we all found the {a} {d}{w}",
    "everything about the {a} was {d}{w}",
    "the {a} of this {s} was {d}{w}",
    "it was {an} {s}",
    "I {v} the {a}",
    "we both {v} the {a}",
    "I {v} the whole {s}",
    "nobody {v} the {a} more than I did",
)
TURNED = (
    "the {a} was not {d}{w}",
    "the {a} was not {w} at all",
    "the {a} was not {w} in the least",
    "the {a} was anything but {w}",
    "the {a} was far from {w}",
    "the {a} was never {w}",
    "the {a} was hardly {w}",
    "I did not find the {a} {d}{w}",
    "nobody could call the {a} {w}",
    "there was nothing {w} about the {a}",
    "I would not say that the {a} was {w}",
    "I did not {to} the {a}",
    "nobody I know {v} the {a}",
    "it was not {an} {s}",
)
# {main} says what is meant, {but} the opposite; {h} is an adjective of the opposite with {a2}, another aspect
AGAINST = (
    "although {but}, {main}",
    "though {but}, {main}",
    "while {but}, {main}",
    "{but}, but {main}",
    "{but}, yet {main}",
    "{but}; still, {main}",
    "{but}, which is a surprise, because {main}",
    "{main}, although {but}",
    "{main}, even though {but}",
    "{main}, while {but}",
    "despite the {h} {a2}, {main}",
    "{main}, despite the {h} {a2}",
    "for all its {h} {a2}, {main}",
)
TOGETHER = ("{main}, and {more}", "{main}; also, {more}", "{main}, and besides, {more}", "{main}, just as {more}")
# {w} of the opposite, {g} of what is meant
EXPECTED = (
    "I expected {an} {s}, and I was wrong",
    "I was told that the {a} would be {w}, and it was not",
    "my friends call the {a} {w}, and I cannot agree",
    "the reviews call it {an} {s}; they are mistaken",
    "they said the {a} was {w}, which is simply untrue",
    "I expected {ang} {s}, and I was right",
    "I was told that the {a} would be {g}, and it was",
    "my friends call the {a} {g}, and I agree",
    "the reviews call it {ang} {s}; they are not mistaken",
    "they said the {a} was {g}, which is simply true",
)


def opinion(rng: Rng, mine: Mine) -> Row | None:
    """{text, label}; half are positive."""
    label = rng.below(2)
    thing = rng.pick(tuple(THINGS))
    text = rng.pick(OPENERS) + _sentence(rng, thing, label)
    text = f"{text[0].upper()}{text[1:]}."
    return {"text": text, "label": LABELS[label]} if mine(text) else None


def _sentence(rng: Rng, thing: str, label: int) -> str:
    first, second = rng.some(THINGS[thing], 2)
    form = rng.below(100)
    if form < 40:
        return _clause(rng, thing, first, label)
    if form < 50:
        one, other = _clause(rng, thing, first, label), _clause(rng, thing, second, label)
        return rng.pick(TOGETHER).format(main=one, more=other)
    if form < 85:
        main, but = _clause(rng, thing, first, label), _clause(rng, thing, second, 1 - label)
        return rng.pick(AGAINST).format(main=main, but=but, h=rng.pick(ADJECTIVES[1 - label]), a2=second)
    word, meant = rng.pick(ADJECTIVES[1 - label]), rng.pick(ADJECTIVES[label])
    return rng.pick(EXPECTED).format(s=thing, a=first, w=word, an=_an(word), g=meant, ang=_an(meant))


def _clause(rng: Rng, thing: str, aspect: str, label: int) -> str:
    """What `label` says, in its own words or by denying the opposite."""
    turned = rng.chance(45)
    side = 1 - label if turned else label
    word, (did, to) = rng.pick(ADJECTIVES[side]), rng.pick(VERBS[side])
    return rng.pick(TURNED if turned else PLAIN).format(
        s=thing, a=aspect, d=rng.pick(DEGREES), w=word, an=_an(word), v=did, to=to
    )


def _an(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"
