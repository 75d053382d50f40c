"""Conversations with an assistant that answers in one plain sentence: sums, measures, words and their meanings."""

from weft.text.grammars.rng import Mine, Rng, Row

MEANINGS = {
    "anchor": "a heavy hook that keeps a ship in its place",
    "anvil": "an iron block on which metal is hammered into shape",
    "atlas": "a book of maps",
    "axle": "a rod on which a wheel turns",
    "bakery": "a place where bread is made and sold",
    "barn": "a farm building for hay, grain or animals",
    "bridge": "a way built over water or a road",
    "candle": "a stick of wax that burns with a small flame",
    "canoe": "a narrow boat that is moved with a paddle",
    "chisel": "a tool with a sharp edge for carving wood or stone",
    "compass": "an instrument whose needle points north",
    "dictionary": "a book that tells what words mean",
    "dynamo": "a machine that turns motion into electricity",
    "easel": "a stand that holds a picture while it is painted",
    "ferry": "a boat that carries people across water",
    "funnel": "a cone for pouring a liquid through a small opening",
    "glacier": "a river of ice that moves slowly down a valley",
    "hammock": "a bed of cloth that hangs between two posts",
    "harbour": "a sheltered place where ships can stay",
    "hinge": "a joint on which a door swings",
    "island": "land with water all around it",
    "kettle": "a pot for boiling water",
    "kiln": "an oven in which clay is baked hard",
    "ladder": "two poles with steps between them for climbing",
    "lantern": "a lamp with a case that keeps off the wind",
    "lever": "a bar that turns on a point to lift a load",
    "lighthouse": "a tower whose light guides ships at night",
    "loom": "a frame for weaving threads into cloth",
    "mortar": "a bowl in which things are ground to powder",
    "needle": "a thin pointed piece of steel for sewing",
    "notebook": "a small book of blank pages for writing",
    "oasis": "a place in a desert where water is found",
    "orchard": "a piece of land where fruit trees grow",
    "oven": "a closed box in which food is baked",
    "paddle": "a short pole with a flat end that moves a boat",
    "pendulum": "a weight that swings to and fro",
    "pillow": "a soft bag to rest the head on",
    "plough": "a tool that turns the soil before sowing",
    "pulley": "a wheel with a rope for lifting loads",
    "quarry": "a place where stone is cut out of the ground",
    "raft": "logs tied together that float on water",
    "ruler": "a straight strip for measuring and drawing lines",
    "saddle": "a seat for the rider of a horse",
    "shuttle": "the tool that carries the thread across a loom",
    "spindle": "a rod on which thread is spun",
    "stable": "a building where horses are kept",
    "sundial": "a clock that tells the time by a shadow",
    "telescope": "an instrument that makes distant things look near",
    "thermometer": "an instrument that measures how warm something is",
    "tunnel": "a way that leads under the ground",
    "valley": "low land between hills",
    "volcano": "a mountain that can throw out fire and ash",
    "well": "a deep hole from which water is drawn",
    "windmill": "a mill whose sails are turned by the wind",
    "workshop": "a room where things are made or mended",
}
OPPOSITES = (
    "hot cold;big small;early late;full empty;light dark;open closed;wet dry;old young;fast slow;high low;near far;"
    "soft hard;loud quiet;strong weak;rich poor;long short;wide narrow;deep shallow;clean dirty;thick thin;"
    "sharp blunt;sweet sour;cheap expensive;safe dangerous;rough smooth;public private;simple complicated;"
    "ancient modern;brave cowardly;generous stingy;polite rude"
)
PAIRS = tuple((one, other) for pair in OPPOSITES.split(";") for one, other in [pair.split()])
MEASURES = (
    ("minutes", "hour", 60), ("seconds", "minute", 60), ("hours", "day", 24), ("days", "week", 7),
    ("months", "year", 12), ("years", "century", 100), ("centimetres", "metre", 100), ("metres", "kilometre", 1000),
    ("grams", "kilogram", 1000), ("eggs", "dozen", 12),
)  # fmt: skip
PLURALS = {"century": "centuries", "dozen": "dozen"}
GREETINGS = ("Hello!", "Hi there.", "Good morning.", "Good evening.", "Hello, are you there?")
THANKS = ("Thank you!", "Thanks, that helps.", "Great, thanks.", "Thank you very much.")

ASK_MEANING = (
    "What is {a}?",
    "What does the word {w} mean?",
    "Please explain what {a} is.",
    "Can you tell me what {a} is?",
    "I don't know the word {w}. What is it?",
    "Define {w}.",
)

Exchange = tuple[str, str, str]  # what identifies it, what the person says, what the assistant answers


def conversation(rng: Rng, mine: Mine) -> Row | None:
    """{messages}: one to three exchanges, perhaps with a greeting before and thanks after.

    What is held out, a sum with its numbers or a word in its wording, is in no conversation of the training side.
    """
    turns: list[tuple[str, str]] = []
    if rng.chance(20):
        turns.append((rng.pick(GREETINGS), "Hello! What would you like to know?"))
    for _ in range(rng.pick((1, 1, 1, 2, 2, 3))):
        key, said, answer = _exchange(rng)
        while not mine(key):
            key, said, answer = _exchange(rng)
        turns.append((said, answer))
    if rng.chance(15):
        turns.append((rng.pick(THANKS), "You are welcome."))
    messages = []
    for said, answer in turns:
        messages += [{"role": "user", "content": said}, {"role": "assistant", "content": answer}]
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
    ask = ("What is {}?", "How much is {}?", "Please work out {}.", "Can you tell me what {} is?", "{}?")
    # 3 plus 4 and 4 plus 3 are one item
    low, high = (a, b) if sign == "minus" else sorted((a, b))
    return f"{low} {sign} {high}", rng.pick(ask).format(words), f"{words} is {result}."


def _measure(rng: Rng) -> Exchange:
    small, large, ratio = rng.pick(MEASURES)
    count = rng.between(2, 30)
    many = f"{count} {PLURALS.get(large, large + 's')}"
    ask = ("How many {s} are there in {m}?", "{m}: how many {s} is that?", "Please turn {m} into {s}.")
    key = f"{count} {large}"
    return key, rng.pick(ask).format(s=small, m=many), f"There are {count * ratio} {small} in {many}."


def _meaning(rng: Rng) -> Exchange:
    word = rng.pick(tuple(MEANINGS))
    said = rng.pick(ASK_MEANING).format(w=word, a=_an(word))
    answer = f"{_an(word)} is {MEANINGS[word]}."
    return said, said, answer[0].upper() + answer[1:]


def _opposite(rng: Rng) -> Exchange:
    one, other = rng.pick(PAIRS)
    if rng.chance(50):
        one, other = other, one
    ask = ("What is the opposite of {}?", "Which word means the opposite of {}?", "Give me the opposite of {}.")
    said = rng.pick(ask).format(one)
    return said, said, f"The opposite of {one} is {other}."


def _spelling(rng: Rng) -> Exchange:
    word = rng.pick(tuple(MEANINGS))
    said = rng.pick(("How is {} spelled?", "Please spell {}.", "Spell the word {} for me.")).format(word)
    return said, said, f"{word} is spelled {'-'.join(word.upper())}."


def _larger(rng: Rng) -> Exchange:
    a = rng.below(1000)
    b = (a + rng.between(1, 999)) % 1000  # any other number
    said = rng.pick(("Which is larger, {} or {}?", "Is {} or {} the larger number?")).format(a, b)
    low, high = sorted((a, b))
    return f"{low} or {high}", said, f"{high} is larger than {low}."


def _an(word: str) -> str:
    return f"an {word}" if word[0] in "aeiou" else f"a {word}"
