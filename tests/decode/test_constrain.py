"""Patterns against Python's own regular expressions, schemas against what they describe, texts that keep to them."""

import json
import random
import re
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.decode.small import complete

from weft.decode.beam import search_texts
from weft.decode.completion import gather
from weft.decode.config import Beam, Sampling
from weft.decode.constrain import Pattern, schema_text
from weft.decode.pattern import LARGEST, Automaton, spelled
from weft.decode.prompt import Prompt
from weft.decode.schema import integers, schema_pattern
from weft.decode.speculative import LookUp, speculate
from weft.errors import ConfigError, ModelError
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import Recurrent
from weft.text.config import BPE, Byte, Unigram, Word
from weft.text.tokenizer import Tokenizer, build_tokenizer


def matches(pattern: str, text: str) -> bool:
    automaton = Automaton(pattern)
    return automaton.matches(automaton.follow(automaton.start, text.encode()))


PATTERNS = [
    "", "abc", "a|b|", "(ab)*c", "a+b?c{2}", "a{2,}", "(a|bc){1,3}", "[a-c]+", "[^a-c]*", "[]a]", "[a-]", r"[\d\-x]+",
    r"\d+(\.\d{2})?", r"\w+\s\w+", r"\W|\S\D", ".", ".*é.*", "[à-ü]+", "[^é]", "日本|語", "[\\u4e00-\\u9fff]{2}", "😀?",
    r"\x41\n\t", "(?:a(?:b|c)*)+", "((a*)*)*", "[\U0001f600-\U0001f64f]+", "a{0}", "(|a)b", r"\(\)\[\]\{\}\|\.\\",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=st.text("abcx12 .-é語日本😀😁\n()[]{}|\\A\t", max_size=5))
@example(text="")
@settings(max_examples=40, deadline=None)
def test_patterns_match_what_python_says(pattern: str, text: str) -> None:
    assert matches(pattern, text) == (re.fullmatch(pattern, text, re.ASCII) is not None)


@given(st.integers(0, LARGEST), st.integers(0, LARGEST))
@settings(max_examples=40, deadline=None)
def test_spellings_cover_a_range_and_nothing_else(one: int, other: int) -> None:
    low, high = min(one, other), max(one, other)
    sequences = list(spelled(low, high))
    pick = random.Random(low)
    near = [low - 1, low, low + 1, high - 1, high, high + 1, *[pick.randint(0, LARGEST) for _ in range(20)]]
    for point in near:
        if not 0 <= point <= LARGEST or 0xD800 <= point <= 0xDFFF:
            continue
        text = chr(point).encode()
        found = [
            s for s in sequences if len(s) == len(text) and all(a <= b <= c for b, (a, c) in zip(text, s, strict=True))
        ]
        assert len(found) == (1 if low <= point <= high else 0)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(a", "a group is not closed"),
        ("a)", "no group to close"),
        ("*a", "nothing to repeat"),
        ("a{3,2}", "ends before it begins"),
        ("a{x}", "a repeat is written"),
        ("(){1000000000}", "at most 10000"),
        ("(" * 3000 + ")" * 3000, "nested too deeply"),
        ("a{2", "ends too early"),
        ("[b-a]", "from a lower character"),
        ("[a", "ends too early"),
        ("a+?", "lazy"),
        ("^a$", "the whole text has to match"),
        (r"(?=a)", r"only groups"),
        (r"\1", "not supported"),
        (r"\b", "not supported"),
        (r"\xZZ", "no character"),
        ("(a{1000}){1000}", "too large"),
        (r"[^\s\S]", "empty"),
    ],
)
def test_patterns_that_mean_nothing_are_one_line(pattern: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        Automaton(pattern)
    assert "\n" not in str(caught.value)


# ---- JSON

PERSON = {
    "type": "object",
    "title": "A person",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["age"],
    "$defs": {"place": {"type": ["object", "null"], "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (
            PERSON,
            [
                {"age": 3},
                {"name": 'é"\\😀', "age": -1},
                {"age": 0, "tags": []},
                {"age": 1, "tags": ["a", "b"], "home": None},
                {"name": "x", "age": 2, "home": {"x": -1.5e-3}},
            ],
            [
                {},
                {"name": "x"},
                {"name": "", "age": 1},
                {"name": "abcde", "age": 1},
                {"age": 1.5},
                {"age": 1, "tags": ["c"]},
                {"age": 1, "tags": ["a"] * 3},
                {"age": 1, "home": {}},
                {"tags": [], "age": 1},
            ],
        ),
        (
            {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
            [[True, False], [True] * 5],
            [[], [True], [1, 2]],
        ),
        ({"anyOf": [{"const": "a.b"}, {"type": "null"}]}, ["a.b", None], ["axb", 1]),
        ({"type": "string", "pattern": "^[A-Z].-[0-9]{2}$"}, ["Ax-12", "A日-99"], ["ax-12", 'A"-12', "A\\-12", "Ax-1"]),
        (
            {"type": "object", "properties": {"a": {"type": "null"}, "b": {"type": "null"}}},
            [{}, {"a": None}, {"b": None}, {"a": None, "b": None}],
            [{"c": None}],
        ),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 0}, [[]], [[None]]),
    ],
)
def test_a_schema_takes_what_it_describes(schema: Any, good: list[Any], bad: list[Any]) -> None:
    pattern = schema_pattern(schema)
    for value in good:
        assert matches(pattern, json.dumps(value, ensure_ascii=False)), value
    for value in bad:
        assert not matches(pattern, json.dumps(value, ensure_ascii=False)), value
    assert not matches(pattern, "")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "strin"}, "type = 'strin': expected one of string"),
        ({}, "type = None"),
        (7, "expected a schema"),
        ({"type": "number", "minimum": 3}, "minimum: not supported for a number; supported here: type"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "maxLength = 2: less than"),
        ({"type": "string", "minLength": -1}, "minLength = -1"),
        ({"type": "array"}, "items: missing"),
        ({"type": "object", "required": ["a"]}, "'a' is not among the properties"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}}, "contains itself"),
        ({"$ref": "#/$defs/b"}, "not in the schema"),
        ({"enum": []}, "a list that is not empty"),
        ({"type": "string", "pattern": 'a"b'}, "not supported in the pattern of a string"),
        ({"type": "object", "additionalProperties": {"type": "null"}}, "only false"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("$", r"\$")):
        schema_pattern(schema)


# ---- texts


TEXTS = ["the cat sat on the mat, 12 cats and 345 dogs: [1, 2] {x}. naïve 日本 " * 6]
TOKENIZERS = {
    "byte": build_tokenizer(Byte(), TEXTS),
    "bpe": build_tokenizer(BPE(vocab_size=290), TEXTS),
    "unigram": build_tokenizer(Unigram(vocab_size=291), TEXTS),
}


def model_for(tokenizer: Tokenizer, seed: int = 0) -> LanguageModel:
    torch.manual_seed(seed)
    return build(Recurrent(vocab_size=tokenizer.vocab_size, d_model=8, cell="gru")).eval()


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("expression", [r"(the|cat|on)( (the|cat|on)){2,4}\.", r"\[\d(, \d){0,3}\]"])
def test_texts_keep_to_a_pattern(name: str, expression: str) -> None:
    tokenizer = TOKENIZERS[name]
    pattern = Pattern(tokenizer, expression)
    texts = complete(model_for(tokenizer), tokenizer, [""] * 6, Sampling(max_tokens=60), grammar=pattern)
    assert {text.finish for text in texts} <= {"stop", "eos"}
    assert len({text.text for text in texts}) > 1
    for text in texts:
        assert re.fullmatch(expression, text.text), text


def test_texts_are_json_of_the_schema() -> None:
    tokenizer = TOKENIZERS["bpe"]
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 5}, "ok": {"type": "boolean"}, "n": {"enum": [1, 22]}},
        "required": ["name", "ok"],
    }
    pattern = schema_text(tokenizer, schema)
    settings = Sampling(max_tokens=120, temperature=1.5)
    for text in complete(model_for(tokenizer), tokenizer, [""] * 5, settings, grammar=pattern):
        value = json.loads(text.text)
        assert isinstance(value["ok"], bool)
        assert len(value["name"]) <= 5
        assert value.get("n", 1) in (1, 22)


def test_a_constrained_text_is_the_same_with_guesses() -> None:
    tokenizer = TOKENIZERS["byte"]
    model, settings = model_for(tokenizer), Sampling(max_tokens=50, seed=4)
    pattern = Pattern(tokenizer, "(ab|ba)*!")
    plain = complete(model, tokenizer, ["a"], settings, grammar=pattern)
    prompt = Prompt.of(tokenizer, "a", pattern)
    assert gather(speculate(model, LookUp(3), prompt, settings), [prompt]) == plain


@pytest.mark.parametrize("name", TOKENIZERS)
def test_beams_keep_to_a_pattern(name: str) -> None:
    """All texts of a small pattern are found, each once, whichever beams split on the way."""
    tokenizer = TOKENIZERS[name]
    pattern = Pattern(tokenizer, "(the|cat) (on|mat)!?")
    prompts = [Prompt.of(tokenizer, text, pattern) for text in ("", "")] + [Prompt.of(tokenizer, "")]
    held, again, free = search_texts(model_for(tokenizer), prompts, Beam(beams=300, n=300, max_tokens=20))
    texts = {text.text for text in held}
    assert texts == {f"{a} {b}{c}" for a in ("the", "cat") for b in ("on", "mat") for c in ("", "!")}
    assert held == again and {text.finish for text in held} <= {"stop", "eos"}
    assert not any(pattern.matches(text.text) for text in free)


def test_a_beam_that_leads_nowhere_is_given_up() -> None:
    words = Tokenizer.train(Word(), ["one two three"])
    (found,) = search_texts(
        model_for(words), [Prompt.of(words, "", Pattern(words, "one( four| two)|three"))], Beam(beams=4, n=4)
    )
    assert {text.text for text in found} == {"one two", "three"}
    dead = Prompt.of(words, "", Pattern(words, "one four"))
    with pytest.raises(ModelError, match="no text is left to search"):
        search_texts(model_for(words), [dead], Beam(beams=2))


def test_what_the_vocabulary_cannot_spell_is_refused() -> None:
    words = build_tokenizer(Word(), ["one two three"])
    with pytest.raises(ModelError, match="no token of this vocabulary can begin it"):
        Pattern(words, "four")
    dead = Pattern(words, "one four")
    with pytest.raises(ModelError, match="no token of this vocabulary can go on with it"):
        complete(model_for(words), words, [""], Sampling(), grammar=dead)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_bounds_of_integers(data: st.DataObject) -> None:
    bound = st.none() | st.integers(-40, 40) | st.integers(-(10**6), 10**6)
    low, high = data.draw(bound), data.draw(bound)
    if low is not None and high is not None and low > high:
        low, high = high, low
    expression = re.compile("|".join(integers(low, high)))
    near = [value + step for value in (low, high, 0) if value is not None for step in (-11, -1, 0, 1, 11)]
    for value in [*near, data.draw(st.integers(-(10**7), 10**7))]:
        inside = (low is None or low <= value) and (high is None or value <= high)
        assert bool(expression.fullmatch(str(value))) == inside
    assert not expression.fullmatch("007") and not expression.fullmatch("")


def test_a_schema_bounds_its_integers() -> None:
    automaton = Automaton(schema_pattern({"type": "integer", "minimum": 3.0, "exclusiveMaximum": 121}))
    for text, right in (("3", True), ("120", True), ("2", False), ("121", False), ("-4", False), ("03", False)):
        assert automaton.matches(automaton.follow(automaton.start, text.encode())) == right


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 4, "maximum": 3}, "no integer lies between"),
        ({"type": "integer", "minimum": 2.5}, "minimum = 2.5: expected a whole number of at most 18 digits"),
        ({"type": "integer", "maximum": 10**30}, "at most 18 digits"),
    ],
)
def test_bounds_that_mean_nothing(schema: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        schema_pattern(schema)


@pytest.mark.parametrize("depth", [40, 100_000])
def test_a_schema_that_is_too_deep_is_refused_before_it_fills_the_memory(depth: int) -> None:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    with pytest.raises(ConfigError, match="too deeply"):
        schema_pattern(schema)
    while isinstance(schema, dict):  # one level at a time: so deep a thing can't be let go of at once
        schema = schema.get("items")
