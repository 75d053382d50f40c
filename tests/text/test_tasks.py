"""Built-in tasks: their rows are correct, reproducible, and held out by construction."""

import datetime
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from tests.spread import spread

from weft.data.shards import Side
from weft.text import builtin
from weft.text.grammars import rewriting, sentences
from weft.text.grammars.rng import Rng

ROWS = 1000  # of a split that are checked
QUESTIONS = ("context", "question", "answer", "source", "target")
COLUMNS = {
    "sentiment": ("text", "label"),
    "questions": QUESTIONS,
    "chatter": ("messages",),
    "reports": ("text", "summary"),
    "english-french": ("source", "target", "alignment"),
    "senses": ("text", "sense"),
    "induction": ("clean", "corrupt", "answer", "wrong"),
    "number": ("text", "label"),
    "depth": ("words", "tags"),
    "tag": ("words", "tags"),
}


def first_rows(name: str, split: Side, count: int) -> Iterator[dict[str, Any]]:
    return islice(builtin.task_rows(name, split), count)


@pytest.mark.parametrize("name", spread(builtin.TASKS, 8))
def test_rows_have_their_columns_and_are_distinct(name: str) -> None:
    columns = COLUMNS.get(name, ("source", "target"))
    train, held_out = list(first_rows(name, "train", ROWS)), list(first_rows(name, "validation", 300))
    assert len(train) == min(ROWS, builtin.TASKS[name].train) and len(held_out) == min(
        300, builtin.TASKS[name].validation
    )
    assert all(tuple(row) == columns for row in train + held_out)
    texts = [json.dumps(row) for row in train + held_out]
    assert len(set(texts)) == len(texts)


@pytest.mark.parametrize(("name", "item"), [("dates", "target"), ("dates-back", "source"), ("numbers", "target")])
def test_items_are_held_out_in_every_wording(name: str, item: str) -> None:
    train = {row[item] for row in first_rows(name, "train", 8000)}
    held_out = {row[item] for row in first_rows(name, "validation", 800)}
    assert not train & held_out


def test_held_out_sums_are_in_no_training_conversation() -> None:
    def sums(split: Side, count: int) -> set[tuple[str, ...]]:
        found = set()
        for row in first_rows("chatter", split, count):
            for message in row["messages"]:
                for a, sign, b in re.findall(r"^(\d+) (plus|minus|times) (\d+) is", message["content"]):
                    found.add((sign, *((a, b) if sign == "minus" else sorted((a, b)))))
        return found

    train, held_out = sums("train", 4000), sums("validation", 400)
    assert len(train) > 500 and len(held_out) > 50
    assert not train & held_out


def test_rows_are_reproducible() -> None:
    """A change of a grammar changes the digest; a version of Python must not."""
    digest = hashlib.sha256()
    for name in builtin.TASKS:
        for row in (*first_rows(name, "train", 1500), *first_rows(name, "validation", 200)):
            digest.update(json.dumps(row).encode())
    assert digest.hexdigest()[:16] == "7a3809e40bf7e656"


def test_the_generator_is_uniform() -> None:
    rng = Rng("even")
    counts = Counter(rng.below(6) for _ in range(12_000))
    assert sorted(counts) == list(range(6))
    assert sum((count - 2000) ** 2 / 2000 for count in counts.values()) < 20.5  # χ², 5 degrees of freedom, p = 0.001
    assert sorted(rng.sample("abcdef", 6)) == list("abcdef")
    assert Rng("a").below(1 << 60) != Rng("b").below(1 << 60)


def test_copies_and_reversals() -> None:
    assert all(row["target"] == row["source"] for row in first_rows("copy", "train", 200))
    assert all(row["target"] == row["source"][::-1] for row in first_rows("reverse", "train", 200))


# ---- dates and numbers


def test_dates_and_their_words_agree() -> None:
    months = {month.lower()[:3]: number for number, month in enumerate(rewriting.MONTHS, 1)}
    checked = 0
    for row in first_rows("dates", "train", 2000):
        day = datetime.date.fromisoformat(row["target"])
        text = row["source"].lower()
        for weekday in rewriting.WEEKDAYS:
            if text.startswith(weekday.lower()):
                assert rewriting.WEEKDAYS[day.weekday()] == weekday
                text = text.split(", ", 1)[1]
        if (number := re.search(r"\b(\d\d?)(st|nd|rd|th)?\b", text)) and (year := re.search(r"\b(\d{4})\b", text)):
            month = next(number for name, number in months.items() if re.search(rf"\b{name}", text))
            assert (int(year[1]), month, int(number[1])) == (day.year, day.month, day.day)
            checked += 1
    assert checked > 800


@pytest.mark.parametrize(
    ("year", "words"),
    [(1900, "nineteen hundred"), (1905, "nineteen oh five"), (1999, "nineteen ninety-nine"), (2000, "two thousand"),
     (2007, "two thousand and seven"), (2010, "twenty ten"), (2063, "twenty sixty-three")],
)  # fmt: skip
def test_spoken_years(year: int, words: str) -> None:
    assert rewriting.spoken_year(year) == words


def test_spelled_days() -> None:
    spelled = rewriting._spell_date(rewriting.DATE_FORMATS[0], datetime.date(1999, 5, 3))
    assert spelled == "the third of May, nineteen ninety-nine"
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


def test_opinions_are_distinct_and_half_are_positive() -> None:
    rows = list(first_rows("sentiment", "train", 12_000))
    assert len({row["text"] for row in rows}) == 12_000
    assert abs(sum(row["label"] == "positive" for row in rows) / len(rows) - 0.5) < 0.015


def test_a_bag_of_words_does_not_predict_an_opinion() -> None:
    train, held_out = list(first_rows("sentiment", "train", 3000)), list(first_rows("sentiment", "validation", 600))
    label = bag_of_words([row["text"] for row in train], [row["label"] == "positive" for row in train])
    accuracy = np.mean([label(row["text"]) == (row["label"] == "positive") for row in held_out])
    assert accuracy <= 0.75
    # it does predict a label that a single word decides
    label = bag_of_words([row["text"] for row in train], [" not " in row["text"] for row in train])
    assert np.mean([label(row["text"]) == (" not " in row["text"]) for row in held_out]) > 0.98


def bag_of_words(texts: list[str], labels: list[bool]) -> Callable[[str], bool]:
    """Logistic regression on the words of a text, by Newton's method with weight decay."""

    def words(text: str) -> list[str]:
        return re.findall(r"[\w'-]+", text.lower())

    columns = {word: column for column, word in enumerate(sorted({word for text in texts for word in words(text)}), 1)}

    def features(text: str) -> npt.NDArray[np.float64]:
        row = np.zeros(len(columns) + 1)
        row[[0, *(columns[word] for word in words(text) if word in columns)]] = 1.0
        return row

    x, y = np.stack([features(text) for text in texts]), np.asarray(labels, dtype=float)
    weights = np.zeros(x.shape[1])
    for _ in range(6):
        p = 1 / (1 + np.exp(-np.clip(x @ weights, -30, 30)))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + np.eye(len(weights))
        weights -= np.linalg.solve(hessian, x.T @ (p - y) + weights)
    return lambda text: bool(features(text) @ weights > 0)


# ---- questions and conversations


def test_one_statement_of_a_story_answers_its_question() -> None:
    people: Counter[int] = Counter()
    for row in first_rows("questions", "train", ROWS):
        statements = re.findall(r"[^. ][^.]*\.", row["context"])
        facts = [parse_statement(statement) for statement in statements]
        people[len(statements)] += 1
        assert row["source"] == f"{row['context']} {row['question']}"
        assert statements.count(row["target"]) == 1
        fact, name, value, clothes = parse_statement(row["target"])
        assert all(each[0] == fact for each in facts)  # every other statement is of the same kind
        if row["question"].startswith("Who "):
            assert (row["question"], row["answer"]) == (fact["whose"].format(x=value, c=clothes), name)
        else:
            assert (row["question"], row["answer"]) == (fact["question"].format(n=name), value)
        assert len({each[1] for each in facts}) == len({each[2] for each in facts}) == len(facts)
    assert sorted(people) == [2, 3]


def parse_statement(statement: str) -> tuple[dict[str, Any], str, str, str]:
    """Return the kind of fact, the name, the value, and the clothes, if any."""
    groups = {"n": "[A-Z][a-z]+", "x": "[A-Za-z]+", "c": "[a-z]+"}
    for fact in sentences.QUESTIONS["facts"]:
        pattern = fact["statement"].replace(".", r"\.").format(**{k: f"(?P<{k}>{v})" for k, v in groups.items()})
        match = re.fullmatch(pattern, statement)
        if match and match["x"] in fact["values"]:
            return fact, match["n"], match["x"], match.groupdict().get("c", "")
    raise AssertionError(statement)


def test_names_follow_zipfs_law() -> None:
    stories, names = [row["context"] for row in first_rows("questions", "train", ROWS)], sentences.QUESTIONS["names"]
    counts = Counter(name for story in stories for name in names if name in story)
    assert [name for name, _ in counts.most_common(2)] == ["Anna", "Omar"]
    assert counts["Anna"] > 4 * counts["Ivan"] > 0


def test_held_out_stories_are_new() -> None:
    def stories(split: Side) -> set[tuple[str, ...]]:
        rows = first_rows("questions", split, ROWS)
        return {tuple(sorted(re.findall(r"[^.]+\.", f" {row['context']}"))) for row in rows}

    assert not stories("train") & stories("validation")


def test_a_summary_has_who_did_what_and_where() -> None:
    summary, firsts = re.compile(r"([A-Z]\w+) (\w+) (an? \w+) in ([A-Z]\w+)\."), Counter[bool]()
    for row in first_rows("reports", "train", ROWS):
        match = summary.fullmatch(row["summary"])
        assert match is not None
        name, did, thing, city = match.groups()
        (event,) = (event for event in sentences.REPORTS["events"] if event["did"] == did)
        assert thing in event["things"] and did != "was"
        assert name in row["text"] and city in row["text"] and thing in row["text"].lower()
        assert did in row["text"] or f"was {event['participle']}" in row["text"]
        parts = row["text"].split(". ")
        assert 2 <= len(parts) <= 5 and all(part[0].isupper() for part in parts)
        people = [word for word in re.findall(r"[A-Z]\w+", row["text"]) if word in sentences.REPORTS["names"].split()]
        firsts[people[0] == name] += 1
    assert firsts[False] > 0.25 * ROWS  # the first name is often another person's
    assert not {row["summary"] for row in first_rows("reports", "train", ROWS)} & {
        row["summary"] for row in first_rows("reports", "validation", ROWS)
    }


def test_conversations_alternate_and_sums_are_correct() -> None:
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
