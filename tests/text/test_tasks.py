"""The built-in tasks: what they hold is right, the same everywhere, and held out by construction."""

import datetime
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from weft.data.shards import Side
from weft.text import builtin
from weft.text.grammars import rewriting, sentences
from weft.text.grammars.rng import Rng

ROWS = 1000  # of a side that are looked at
COLUMNS = {
    "sentiment": ("text", "label"),
    "questions": ("context", "question", "answer", "source", "target"),
    "chatter": ("messages",),
}


def first_rows(name: str, split: Side, count: int) -> Iterator[dict[str, Any]]:
    """The first rows of a side."""
    return islice(builtin.task_rows(name, split), count)


@pytest.mark.parametrize("name", builtin.TASKS)
def test_rows_have_their_columns_and_none_comes_twice(name: str) -> None:
    columns = COLUMNS.get(name, ("source", "target"))
    train, held = list(first_rows(name, "train", ROWS)), list(first_rows(name, "validation", 300))
    assert len(train) == ROWS and len(held) == 300
    assert all(tuple(row) == columns for row in train + held)
    written = [json.dumps(row) for row in train + held]
    assert len(set(written)) == len(written)


@pytest.mark.parametrize(("name", "item"), [("dates", "target"), ("dates-back", "source"), ("numbers", "target")])
def test_what_is_held_out_is_so_in_every_wording(name: str, item: str) -> None:
    train = {row[item] for row in first_rows(name, "train", 8000)}
    held = {row[item] for row in first_rows(name, "validation", 800)}
    assert not train & held


def test_a_sum_that_is_held_out_is_in_no_conversation_of_the_training_side() -> None:
    def sums(split: Side, count: int) -> set[tuple[str, ...]]:
        found = set()
        for row in first_rows("chatter", split, count):
            for message in row["messages"]:
                for a, sign, b in re.findall(r"^(\d+) (plus|minus|times) (\d+) is", message["content"]):
                    found.add((sign, *((a, b) if sign == "minus" else sorted((a, b)))))
        return found

    train, held = sums("train", 4000), sums("validation", 400)
    assert len(train) > 500 and len(held) > 50
    assert not train & held


def test_the_rows_are_the_same_everywhere() -> None:
    """A change of a grammar changes this on purpose; a version of Python must not."""
    digest = hashlib.sha256()
    for name in builtin.TASKS:
        for row in (*first_rows(name, "train", 1500), *first_rows(name, "validation", 200)):
            digest.update(json.dumps(row).encode())
    assert digest.hexdigest()[:16] == "621cf67334b72891"


def test_the_generator_falls_evenly() -> None:
    rng = Rng("even")
    counts = Counter(rng.below(6) for _ in range(12_000))
    assert sorted(counts) == list(range(6))
    assert sum((count - 2000) ** 2 / 2000 for count in counts.values()) < 20.5  # χ², 5 degrees of freedom, p = 0.001
    assert sorted(rng.some("abcdef", 6)) == list("abcdef")
    assert Rng("a").below(1 << 60) != Rng("b").below(1 << 60)


def test_copies_and_reversals() -> None:
    assert all(row["target"] == row["source"] for row in first_rows("copy", "train", 200))
    assert all(row["target"] == row["source"][::-1] for row in first_rows("reverse", "train", 200))


# ---- dates and numbers


def test_dates_say_the_day_they_mean() -> None:
    months = {month.lower()[:3]: place for place, month in enumerate(rewriting.MONTHS, 1)}
    read = 0
    for row in first_rows("dates", "train", 2000):
        day = datetime.date.fromisoformat(row["target"])
        text = row["source"].lower()
        for weekday in rewriting.WEEKDAYS:
            if text.startswith(weekday.lower()):
                assert rewriting.WEEKDAYS[day.weekday()] == weekday
                text = text.split(", ", 1)[1]
        if (said := re.search(r"\b(\d\d?)(st|nd|rd|th)?\b", text)) and (year := re.search(r"\b(\d{4})\b", text)):
            month = next(place for name, place in months.items() if re.search(rf"\b{name}", text))
            assert (int(year[1]), month, int(said[1])) == (day.year, day.month, day.day)
            read += 1
    assert read > 800


@pytest.mark.parametrize(
    ("year", "words"),
    [(1900, "nineteen hundred"), (1905, "nineteen oh five"), (1999, "nineteen ninety-nine"), (2000, "two thousand"),
     (2007, "two thousand and seven"), (2010, "twenty ten"), (2063, "twenty sixty-three")],
)  # fmt: skip
def test_years_as_one_says_them(year: int, words: str) -> None:
    assert rewriting.spoken_year(year) == words


def test_days_as_one_says_them() -> None:
    assert rewriting._said(rewriting.WAYS[0], datetime.date(1999, 5, 3)) == "the third of May, nineteen ninety-nine"
    assert [rewriting.ordinal(day) for day in (1, 12, 20, 21, 30, 31)] == [
        "first", "twelfth", "twentieth", "twenty-first", "thirtieth", "thirty-first",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "zero"), (13, "thirteen"), (40, "forty"), (42, "forty-two"), (100, "one hundred"),
     (342, "three hundred and forty-two"), (1000, "one thousand"), (1001, "one thousand and one"),
     (12_300, "twelve thousand three hundred"), (999_999, "nine hundred and ninety-nine thousand nine hundred and "
     "ninety-nine")],
)  # fmt: skip
def test_numbers_in_words(number: int, words: str) -> None:
    assert rewriting.cardinal(number) == words


def test_no_two_numbers_share_their_words() -> None:
    assert len({rewriting.cardinal(number) for number in range(20_000)}) == 20_000


# ---- sentiment


def test_there_are_many_opinions_and_half_are_good() -> None:
    rows = list(first_rows("sentiment", "train", 12_000))
    assert len({row["text"] for row in rows}) == 12_000
    assert abs(sum(row["label"] == "positive" for row in rows) / len(rows) - 0.5) < 0.015


def test_words_without_their_order_do_not_tell_an_opinion() -> None:
    train, held = list(first_rows("sentiment", "train", 3000)), list(first_rows("sentiment", "validation", 600))
    label = bag_of_words([row["text"] for row in train], [row["label"] == "positive" for row in train])
    right = np.mean([label(row["text"]) == (row["label"] == "positive") for row in held])
    assert right <= 0.75
    # the same means do tell what a word alone decides, so they are not to blame
    label = bag_of_words([row["text"] for row in train], [" not " in row["text"] for row in train])
    assert np.mean([label(row["text"]) == (" not " in row["text"]) for row in held]) > 0.98


def bag_of_words(texts: list[str], labels: list[bool]):  # type: ignore[no-untyped-def]
    """Logistic regression on which words occur, by Newton's method with a little weight decay."""

    def words(text: str) -> list[str]:
        return re.findall(r"[\w'-]+", text.lower())

    places = {word: place for place, word in enumerate(sorted({word for text in texts for word in words(text)}), 1)}

    def counts(text: str) -> np.ndarray:
        row = np.zeros(len(places) + 1)
        row[0] = 1.0
        row[[places[word] for word in words(text) if word in places]] = 1.0
        return row

    x, y = np.stack([counts(text) for text in texts]), np.asarray(labels, dtype=float)
    weights = np.zeros(x.shape[1])
    for _ in range(6):
        p = 1 / (1 + np.exp(-np.clip(x @ weights, -30, 30)))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + np.eye(len(weights))
        weights -= np.linalg.solve(hessian, x.T @ (p - y) + weights)
    return lambda text: counts(text) @ weights > 0


# ---- questions and conversations


def test_one_sentence_of_a_story_answers_its_question() -> None:
    people: Counter[int] = Counter()
    for row in first_rows("questions", "train", ROWS):
        sentences = re.findall(r"[^. ][^.]*\.", row["context"])
        facts = [told(sentence) for sentence in sentences]
        people[len(sentences)] += 1
        assert row["source"] == f"{row['context']} {row['question']}"
        assert sentences.count(row["target"]) == 1
        fact, name, value, clothes = told(row["target"])
        assert all(each[0] == fact for each in facts)  # every other sentence looks as if it were the answer
        if row["question"].startswith("Who "):
            assert (row["question"], row["answer"]) == (fact["whose"].format(x=value, c=clothes), name)
        else:
            assert (row["question"], row["answer"]) == (fact["asked"].format(n=name), value)
        assert len({each[1] for each in facts}) == len({each[2] for each in facts}) == len(facts)  # and none else is
    assert sorted(people) == [2, 3]


def told(sentence: str) -> tuple[dict[str, Any], str, str, str]:
    """The kind of a fact, of whom it is told, what it holds, and the clothes if it is about some."""
    for fact in sentences.QUESTIONS["facts"]:
        pattern = re.escape(fact["told"]).replace(r"\{n\}", "(?P<n>[A-Z][a-z]+)").replace(r"\{x\}", "(?P<x>[A-Za-z]+)")
        found = re.fullmatch(pattern.replace(r"\{c\}", "(?P<c>[a-z]+)"), sentence)
        if found and found["x"] in fact["values"]:
            return fact, found["n"], found["x"], found.groupdict().get("c", "")
    raise AssertionError(sentence)


def test_frequent_names_are_a_few_and_no_name_is_left_out() -> None:
    counts = Counter(
        name
        for row in first_rows("questions", "train", ROWS)
        for name in sentences.QUESTIONS["names"]
        if name in row["context"]
    )
    assert [name for name, _ in counts.most_common(2)] == ["Anna", "Omar"]
    assert counts["Anna"] > 4 * counts["Ivan"] > 0


def test_who_has_what_is_new_in_the_held_out_stories() -> None:
    def stories(side: str) -> set[tuple[str, ...]]:
        rows = first_rows("questions", side, ROWS)  # type: ignore[arg-type]
        return {tuple(sorted(re.findall(r"[^.]+\.", f" {row['context']}"))) for row in rows}

    assert not stories("train") & stories("validation")


def test_conversations_alternate_and_sums_are_right() -> None:
    signs = {"plus": int.__add__, "minus": int.__sub__, "times": int.__mul__}
    checked = 0
    for row in first_rows("chatter", "train", ROWS):
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["user", "assistant"] * (len(roles) // 2)
        for message in row["messages"]:
            if found := re.fullmatch(r"(\d+) (plus|minus|times) (\d+) is (\d+)\.", message["content"]):
                assert signs[found[2]](int(found[1]), int(found[3])) == int(found[4])
                checked += 1
    assert checked > 300
    assert all(not meaning.endswith(".") for meaning in sentences.MEANINGS.values())
