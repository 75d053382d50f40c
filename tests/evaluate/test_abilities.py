"""Questions about abilities: an oracle that follows each rule is at the ceiling, a uniform model at chance."""

from collections.abc import Sequence
from itertools import pairwise
from zlib import crc32

import pytest

from weft.errors import ConfigError
from weft.evaluate.abilities.result import Appearance, answer_value, curve
from weft.evaluate.abilities.tasks import (
    TASKS,
    WORDS,
    Ability,
    AbilityQuestion,
    AbilitySpeller,
    UnspelledError,
    chosen_tasks,
)
from weft.evaluate.minimal_pairs import Accuracy
from weft.text.config import BPE, Byte, Char, Word, WordPiece
from weft.text.tokenizer import Tokenizer, build_tokenizer

TEXT = ["the king near the lords is here and has a book of words ( [ 1 2 3 + 4 = 7 , 0 5 6 8 9 ] ) by day or house"] * 3


def bytes_() -> Tokenizer:
    return build_tokenizer(Byte())


def last_key(question: AbilityQuestion) -> str:
    """Word that followed the earlier occurrence of the last word that was read."""
    words = [*question.source, *question.between]
    return next(after for word, after in pairwise(words) if word == question.prefix[-1])


def rule(name: str, question: AbilityQuestion) -> Sequence[str]:
    """Right continuation, found from the words of a question alone."""
    source, prefix = list(question.source), list(question.prefix)
    match name:
        case "agreement":
            number = next(pair.index(source[1]) for pair in WORDS["nouns"] if source[1] in pair)
            verbs = {pair[number] for pair in WORDS["verbs"]}
            return next(candidate for candidate in question.candidates if candidate[0] in verbs)
        case "brackets":
            closing = {pair[0]: pair[1] for pair in WORDS["brackets"]}
            return (closing[source[len(source) - 1 - len(prefix)]],)
        case "copying":
            return (source[len(prefix)],)
        case "reversal":
            return (source[::-1][len(prefix)],)
        case "counting":
            end = question.examples[-1]
            return (prefix[0],) if len(prefix) < len(source) else (end,)
        case "sums":
            first, second = "".join(source).rstrip("=").split("+")
            return str(int(first) + int(second))
        case _:
            return (last_key(question),)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_an_oracle_is_at_the_ceiling_and_a_uniform_model_at_chance(task: Ability) -> None:
    speller = AbilitySpeller([bytes_()])
    for distance in task.distances:
        questions = speller.questions(task, distance, items=40, seed=1)
        assert all(len(each.candidates) == len({*map(tuple, each.candidates)}) == task.choices for each in questions)
        right = [rule(task.name, question) for question in questions]
        oracle = [
            [float(tuple(candidate) == tuple(answer)) for candidate in question.candidates]
            for question, answer in zip(questions, right, strict=True)
        ]
        assert [answer_value(scores) for scores in oracle] == [1.0] * 40
        uniform = [answer_value([-1.0] * len(question.candidates)) for question in questions]
        assert sum(uniform) / 40 == pytest.approx(task.chance)


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_no_symbol_is_right_more_often_than_chance(task: Ability) -> None:
    """A model that prefers one word to another, whatever the context, is at chance."""
    speller, values = AbilitySpeller([bytes_()]), list[float]()
    for distance in task.distances:
        for question in speller.questions(task, distance, items=150, seed=2):
            values.append(answer_value([float(crc32("".join(each).encode()) % 10007) for each in question.candidates]))
    found = Accuracy.of(values)
    assert found.low - 0.03 < task.chance < found.high + 0.03


def test_questions_are_made_by_seed_and_have_the_distance() -> None:
    speller, task = AbilitySpeller([bytes_()]), TASKS["induction"]
    first = speller.questions(task, 8, items=5, seed=3)
    assert first == speller.questions(task, 8, items=5, seed=3) != speller.questions(task, 8, items=5, seed=4)
    for question in first:
        words = list(question.context)
        assert len(words) - 1 - words.index(words[-1]) == 9  # eight symbols in between


@pytest.mark.parametrize("config", [Char(fallback="unk"), Word(), BPE(vocab_size=320)], ids=["char", "word", "bpe"])
def test_symbols_are_single_tokens_of_any_tokenizer(config: Char | Word | BPE) -> None:
    tokenizer = build_tokenizer(config, TEXT)
    form, symbols = AbilitySpeller([tokenizer]).symbols()
    ids = tokenizer.encode(form.write(symbols))
    assert len(ids) == len(symbols) >= 12 and tokenizer.unk_id not in ids


def test_characters_that_merge_are_written_with_spaces() -> None:
    text = ["a b c d e f g h i j k l m n", "abcd efgh ijkl mn"] * 9
    form, symbols = AbilitySpeller([build_tokenizer(WordPiece(), text)]).symbols()
    assert form.separator == " " and len(symbols) >= 12 and all(len(symbol) == 1 for symbol in symbols)


def test_a_tokenizer_that_lacks_the_words_says_which() -> None:
    speller = AbilitySpeller([build_tokenizer(Char(fallback="unk"), ["abcdefgh"])])
    for name, reason in (("brackets", r"no tokens for \( \)"), ("sums", "no tokens for 0"), ("copying", "8 symbols")):
        with pytest.raises(UnspelledError, match=reason):
            speller.form(TASKS[name])
    with pytest.raises(UnspelledError, match="English"):
        AbilitySpeller([build_tokenizer(Word(), ["el gato duerme"])]).form(TASKS["agreement"])
    with pytest.raises(ConfigError, match="did you mean 'sums'"):
        chosen_tasks(["sum"])


def test_ties_are_shared_and_the_reach_ends_at_chance() -> None:
    assert answer_value([0.0, 0.0, -1.0, 0.0]) == pytest.approx(1 / 3)
    assert (answer_value([-1.0, 0.0]), answer_value([0.0, -1.0])) == (0.0, 1.0)
    found = curve(TASKS["copying"], {4: [1.0] * 50, 8: [1.0] * 40 + [0.0] * 10, 16: [0.0, 1.0, 0.0, 0.0] * 12})
    assert found.reach == 8 and found.points[2].low < 0.25 < found.points[2].high


def test_an_ability_appears_where_it_stays_above_chance() -> None:
    low, high = Accuracy(10, 0.5, 0.4, 0.6), Accuracy(10, 0.9, 0.8, 1.0)
    assert Appearance("x", 0.5, [low, high, low, high, high]).first == 3
    assert Appearance("x", 0.5, [high, high]).first == 0
    assert Appearance("x", 0.5, [high, low]).first is None
