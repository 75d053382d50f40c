"""Short stories of made-up facts, and a question whose answer stands in the story."""

from weft.text.grammars.dice import Dice, Mine, Row, words

NAMES = words(
    "Ada Amir Anna Bela Boris Carla Dario Dina Edgar Elif Emil Farid Greta Hana Hugo Ines Ivan Jana Kofi Lara Leon Lina"
    " Malik Mira Nadia Noah Olga Omar Paula Rosa Samir Selma Tara Tomas Uma Vera Viktor Wanda Yusuf Zoe"
)
TOWNS = words(
    "Ankara Athens Bergen Bologna Bremen Cairo Cork Dakar Delhi Geneva Ghent Havana Kyoto Lima Lisbon London Lyon"
    " Madrid Malmö Nairobi Oslo Porto Prague Quito Riga Rome Seoul Sofia Tallinn Turin Vienna Warsaw"
)
JOBS = words(
    "baker carpenter chemist cook dentist doctor farmer florist gardener judge librarian locksmith mechanic miller"
    " nurse painter pilot plumber sailor singer tailor teacher translator weaver"
)
COLOURS = words("black blue brown green grey orange pink purple red white yellow")
BELONGINGS = words("bicycle boat coat guitar hat kite lamp piano scarf suitcase table umbrella vase wagon")
ANIMALS = words("camel canary cat dog donkey frog goat goose hamster horse mouse parrot pony rabbit sheep turtle")
ROOMS = words("attic bathroom bedroom cellar garage garden hall kitchen library office pantry workshop")
FOODS = words("apples beans bread cheese cherries dumplings honey lentils noodles olives pears plums rice soup")

# (how a fact is told, how it is asked for, what it holds)
FACTS = (
    (("{n} lives in {x}.", "{n}'s home is in {x}."), ("Where does {n} live?", "In which town does {n} live?"), TOWNS),
    (("{n} works as a {x}.", "{n} is a {x}."), ("What is {n}'s job?", "What does {n} work as?"), JOBS),
    (("{n} has a {x}.", "A {x} belongs to {n}."), ("Which animal does {n} have?", "What animal is {n}'s?"), ANIMALS),
    (("{n} likes {x}.", "{n} is fond of {x}."), ("What does {n} like to eat?", "Which food does {n} like?"), FOODS),
)


def question(dice: Dice, mine: Mine) -> Row | None:
    """{context, question, answer}; also as one text to read and one to write, {source, target}."""
    context, asked, answer = dice.pick((_known, _known, _whose, _two_steps, _moved, _coloured))(dice)
    if not mine(f"{context}\n{asked}"):
        return None
    both = {"source": f"{context} {asked}", "target": answer}
    return {"context": context, "question": asked, "answer": answer, **both}


def _known(dice: Dice) -> tuple[str, str, str]:
    """Several people, a few facts of each kind; the name and the kind together point at one."""
    names = dice.some(NAMES, dice.between(2, 3))
    told = []
    for tell, ask, values in dice.some(FACTS, 2):
        for name, value in zip(names, dice.some(values, len(names)), strict=True):
            told.append((dice.pick(tell).format(n=name, x=value), dice.pick(ask).format(n=name), value))
    _, asked, answer = dice.pick(told)
    return " ".join(text for text, _, _ in dice.some(told, len(told))), asked, answer


def _whose(dice: Dice) -> tuple[str, str, str]:
    """The other way round: who is it?"""
    names = dice.some(NAMES, 4)
    place = dice.below(len(FACTS))
    tell, _, values = FACTS[place]
    held = dice.some(values, 4)
    chosen = dice.below(4)
    ask = ("Who lives in {x}?", "Who is a {x}?", "Who has a {x}?", "Who likes {x}?")[place]
    context = " ".join(dice.pick(tell).format(n=name, x=value) for name, value in zip(names, held, strict=True))
    return context, ask.format(x=held[chosen]), names[chosen]


def _two_steps(dice: Dice) -> tuple[str, str, str]:
    """Two facts have to be joined by the name they share."""
    names, towns, jobs = dice.some(NAMES, 3), dice.some(TOWNS, 3), dice.some(JOBS, 3)
    told = [f"{name} lives in {town}." for name, town in zip(names, towns, strict=True)]
    told += [f"{name} works as a {job}." for name, job in zip(names, jobs, strict=True)]
    context, chosen = " ".join(dice.some(told, len(told))), dice.below(3)
    if dice.chance(50):
        return context, f"Where does the {jobs[chosen]} live?", towns[chosen]
    return context, f"What is the job of the person who lives in {towns[chosen]}?", jobs[chosen]


def _moved(dice: Dice) -> tuple[str, str, str]:
    """Who went where; only the last place holds."""
    names = dice.some(NAMES, 2)
    steps = [(dice.pick(names), dice.pick(ROOMS)) for _ in range(dice.between(3, 5))]
    verbs = ("went to", "walked into", "moved to", "is now in")
    context = " ".join(f"{name} {dice.pick(verbs)} the {room}." for name, room in steps)
    asked = dice.pick(steps)[0]
    return context, f"Where is {asked}?", next(room for name, room in reversed(steps) if name == asked)


def _coloured(dice: Dice) -> tuple[str, str, str]:
    """Whose thing has which colour."""
    names, thing = dice.some(NAMES, 3), dice.pick(BELONGINGS)
    colours, chosen = dice.some(COLOURS, 3), dice.below(3)
    context = " ".join(f"{name} bought a {colour} {thing}." for name, colour in zip(names, colours, strict=True))
    if dice.chance(50):
        return context, f"What colour is {names[chosen]}'s {thing}?", colours[chosen]
    return context, f"Who bought the {colours[chosen]} {thing}?", names[chosen]
