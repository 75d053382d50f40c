"""Patterns against Python's own regular expressions, schemas against what they describe, texts that keep to them."""

import json
import re
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.decode.small import complete
from tests.pairwise import each_once

from weft.decode.beam import search_texts
from weft.decode.config import Beam, Sampling
from weft.decode.constrain import json_schema, lark, regex
from weft.decode.prompt import Prompt
from weft.decode.speculative import LookUp, speculate
from weft.decode.text import gather
from weft.errors import ConfigError, ModelError
from weft.models.base import LanguageModel
from weft.models.build import build
from weft.models.config import Recurrent
from weft.text.config import BPE, Byte, Unigram, Word
from weft.text.tokenizer import Tokenizer, build_tokenizer

BYTES = build_tokenizer(Byte(), ["any"])
PATTERNS = [
    "", "abc", "a|b|", "(ab)*c", "a+b?c{2}", "a{2,}", "(a|bc){1,3}", "[a-c]+", "[^a-c]*", "[a-]", r"[\d\-x]+", "^a/b$",
    r"\d+(\.\d{2})?", r"\w+\s\w+", r"\W|\S\D", ".", ".*é.*", "[à-ü]+", "[^é]", "日本|語", "[\\u4e00-\\u9fff]{2}", "😀?",
    r"\x41\n\t", "a\nb", "(?:a(?:b|c)*)+", "((a*)*)*", "[\U0001f600-\U0001f64f]+", "a{0}", "(|a)b",
    r"\(\)\[\]\{\}\|\.\\/",
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=st.text("abcx12 .-é語日本😀😁\n()[]{}|\\/A\t", max_size=5))
@example(text="")
@example(text="a/b")
@example(text="a\nb")
@settings(max_examples=16, deadline=None)
def test_patterns_match_what_python_says(pattern: str, text: str) -> None:
    if pattern.endswith("$") and text.endswith("\n"):
        return  # where Python's $ stands before the last line end, too
    assert regex(BYTES, pattern).matches(text) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        ("(a", "unclosed group"),
        ("a)", "unopened group"),
        ("*a", "repetition operator missing expression"),
        ("a{3,2}", "the start must be <= the end"),
        ("(" * 3000 + ")" * 3000, "exceed the maximum number of nested"),
        ("[a", "unclosed character class"),
        (r"(?=a)", "look-ahead and look-behind, is not supported"),
        (r"\1", "backreferences are not supported"),
        (r"\b", "lookarounds not supported"),
        (r"\xZZ", "invalid hexadecimal digit"),
    ],
)
def test_patterns_that_mean_nothing_are_one_line(pattern: str, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"^pattern .*: .*{words}") as caught:
        regex(BYTES, pattern)
    assert "\n" not in str(caught.value)


# ---- JSON

PERSON = {
    "type": "object",
    "title": "A person",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 4},
        "age": {"type": "integer", "minimum": -1, "exclusiveMaximum": 121},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "home": {"$ref": "#/$defs/place"},
    },
    "required": ["age"],
    "additionalProperties": False,
    "$defs": {"place": {"type": ["object", "null"], "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"value": {"type": "integer"}, "below": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
            "required": ["below"],
            "additionalProperties": False,
        }
    },
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
                {"name": "x", "age": 120, "home": {"x": -1.5e-3}},
            ],
            [
                {},
                {"name": "x"},
                {"name": "", "age": 1},
                {"name": "abcde", "age": 1},
                {"age": 1.5},
                {"age": 121},
                {"age": 1, "tags": ["c"]},
                {"age": 1, "tags": ["a"] * 3},
                {"age": 1, "home": {}},
                {"age": 1, "more": 2},
            ],
        ),
        (
            TREE,
            [{"below": []}, {"value": 1, "below": [{"below": []}, {"value": 2, "below": [{"below": []}]}]}],
            [{"value": 1}, {"below": [1]}, {"below": [{"value": 1}]}],
        ),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "today"]),
        (
            {"type": "array", "items": {"type": "boolean"}, "minItems": 2},
            [[True, False], [True] * 5],
            [[], [True], [1, 2]],
        ),
        ({"anyOf": [{"const": "a.b"}, {"type": "null"}]}, ["a.b", None], ["axb", 1]),
        ({"type": "string", "pattern": "^[A-Z].-[0-9]{2}$"}, ["Ax-12", "A日-99"], ["ax-12", "Ax-1"]),
        ({"type": "array", "items": {"type": "null"}, "maxItems": 0}, [[]], [[None]]),
    ],
)
def test_a_schema_takes_what_it_describes(schema: Any, good: list[Any], bad: list[Any]) -> None:
    grammar = json_schema(BYTES, schema)
    for value in good:
        assert grammar.matches(json.dumps(value, ensure_ascii=False)), value
    for value in bad:
        assert not grammar.matches(json.dumps(value, ensure_ascii=False)), value
    assert not grammar.matches("")


def test_an_object_has_the_members_that_are_named() -> None:
    members = {"type": "object", "properties": {"a": {"type": "null"}}}
    assert not json_schema(BYTES, members).matches('{"a": null, "b": 1}')
    assert json_schema(BYTES, {**members, "additionalProperties": True}).matches('{"a": null, "b": 1}')
    nested = {"properties": {"properties": members}, "type": "object", "required": ["properties"]}
    assert json_schema(BYTES, nested).matches('{"properties": {"a": null}}')
    assert not json_schema(BYTES, nested).matches('{"properties": {"b": null}}')
    both = {"allOf": [members, {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["b"]}]}
    assert json_schema(BYTES, both).matches('{"a": null, "b": null}')


def deep(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "strin"}, "Invalid type: strin"),
        (7, "expected an object"),
        ({"type": "string", "minLength": 3, "maxLength": 2}, "minLength (3) is greater than maxLength (2)"),
        ({"type": "integer", "minimum": 4, "maximum": 3}, "minimum (4) is greater than maximum (3)"),
        ({"$ref": "#/$defs/b"}, "Pointer '/$defs/b' does not exist"),
        ({"enum": []}, "Unsatisfiable"),
        ({"not": {"type": "string"}}, "Unimplemented keys"),
        ({"type": "string", "format": "nonsense"}, "Unknown format: nonsense"),
        ({"properties": 3}, "are objects that name schemas"),
        (deep(200), "recursion limit exceeded"),
    ],
)
def test_a_schema_that_cannot_be_kept_is_refused(schema: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^the schema: .*{re.escape(words)}") as caught:
        json_schema(BYTES, schema)
    assert "\n" not in str(caught.value)


def test_a_schema_that_is_too_deep_for_python_is_refused() -> None:
    schema = deep(100_000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        json_schema(BYTES, schema)
    while isinstance(schema, dict):  # one level at a time: so deep a thing can't be let go of at once
        schema = schema.get("items")


# ---- context-free grammars

SUM = """
start: sum
sum: product ("+" product)*
product: number ("*" number)*
number: /[0-9]+/ | "(" sum ")"
"""


def test_a_grammar_derives_its_texts() -> None:
    grammar = lark(BYTES, SUM)
    for text in ("1", "12+3*4", "((1+2)*3)+4"):
        assert grammar.matches(text)
    for text in ("", "1+", "(1", "1)", "a"):
        assert not grammar.matches(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('start: a\na: "x" b', "line 2, column 4: unknown name"),
        ("hello", "Expected token ':'"),
        ("", "start"),
        ('start: "a" x\nx: /[/', "line 2, column 4: unclosed character class"),
    ],
)
def test_a_grammar_with_a_mistake_is_one_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^the grammar: .*({words})") as caught:
        lark(BYTES, text)
    assert "\n" not in str(caught.value)


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


@pytest.mark.parametrize(
    ("name", "expression"), each_once(TOKENIZERS, [r"(the|cat|on)( (the|cat|on)){2,4}\.", r"\[\d(, \d){0,3}\]"])
)
def test_texts_keep_to_a_pattern(name: str, expression: str) -> None:
    tokenizer = TOKENIZERS[name]
    pattern = regex(tokenizer, expression)
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
        "additionalProperties": False,
    }
    pattern = json_schema(tokenizer, schema)
    settings = Sampling(max_tokens=120, temperature=1.5)
    for text in complete(model_for(tokenizer), tokenizer, [""] * 5, settings, grammar=pattern):
        value = json.loads(text.text)
        assert isinstance(value["ok"], bool)
        assert len(value["name"]) <= 5
        assert value.get("n", 1) in (1, 22)


def test_a_constrained_text_is_the_same_with_guesses() -> None:
    tokenizer = TOKENIZERS["byte"]
    model, settings = model_for(tokenizer), Sampling(max_tokens=50, seed=4)
    pattern = regex(tokenizer, "(ab|ba)*!")
    plain = complete(model, tokenizer, ["a"], settings, grammar=pattern)
    prompt = Prompt.of(tokenizer, "a", pattern)
    assert gather(speculate(model, prompt, settings, drafter=LookUp(3)), [prompt]) == plain


@pytest.mark.parametrize("name", TOKENIZERS)
def test_beams_keep_to_a_pattern(name: str) -> None:
    """All texts of a small pattern are found, each once, whichever beams split on the way."""
    tokenizer = TOKENIZERS[name]
    pattern = regex(tokenizer, "(the|cat) (on|mat)!?")
    prompts = [Prompt.of(tokenizer, text, pattern) for text in ("", "")] + [Prompt.of(tokenizer, "")]
    held, again, free = search_texts(model_for(tokenizer), prompts, Beam(beams=300, n=300, max_tokens=20))
    texts = {text.text for text in held}
    assert texts == {f"{a} {b}{c}" for a in ("the", "cat") for b in ("on", "mat") for c in ("", "!")}
    assert held == again and {text.finish for text in held} <= {"stop", "eos"}
    assert not any(pattern.matches(text.text) for text in free)


def test_a_beam_that_leads_nowhere_is_given_up() -> None:
    words = build_tokenizer(Word(), ["one two three"])
    (found,) = search_texts(
        model_for(words), [Prompt.of(words, "", regex(words, "one( four| two)|three"))], Beam(beams=4, n=4)
    )
    assert {text.text for text in found} == {"one two", "three"}
    dead = Prompt.of(words, "", regex(words, "one four"))
    with pytest.raises(ModelError, match="no text is left to search"):
        search_texts(model_for(words), [dead], Beam(beams=2))


def test_what_the_vocabulary_cannot_spell_is_refused() -> None:
    words = build_tokenizer(Word(), ["one two three"])
    with pytest.raises(ModelError, match="no token of this vocabulary can begin a text"):
        complete(model_for(words), words, [""], Sampling(), grammar=regex(words, "four"))
    dead = regex(words, "one four")
    with pytest.raises(ModelError, match="no token of this vocabulary can continue it"):
        complete(model_for(words), words, [""], Sampling(), grammar=dead)
