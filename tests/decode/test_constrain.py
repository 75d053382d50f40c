"""Patterns against Python's `re`, schemas against valid and invalid values, and texts that follow them."""

import json
import re
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tests.decode.small import complete
from tests.pairwise import each_once
from tests.spread import slow, spread

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
@settings(max_examples=8, deadline=None)
def test_patterns_match_as_in_python(pattern: str, text: str) -> None:
    if pattern.endswith("$") and text.endswith("\n"):
        return  # in Python, $ also matches before a final newline
    assert regex(BYTES, pattern).matches(text) == (re.fullmatch(pattern, text) is not None)


@pytest.mark.parametrize(
    ("pattern", "message"),
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
def test_invalid_patterns_are_refused_in_one_line(pattern: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^pattern .*: .*{message}") as caught:
        regex(BYTES, pattern)
    assert "\n" not in str(caught.value)


# ---- JSON schemas

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
PEOPLE = [
    *[{"age": 3}, {"name": 'é"\\😀', "age": -1}, {"age": 0, "tags": []}, {"age": 1, "tags": ["a", "b"], "home": None}],
    {"name": "x", "age": 120, "home": {"x": -1.5e-3}},
]
NO_PEOPLE = [
    *[{}, {"name": "x"}, {"name": "", "age": 1}, {"name": "abcde", "age": 1}, {"age": 1.5}, {"age": 121}],
    *[{"age": 1, "tags": ["c"]}, {"age": 1, "tags": ["a"] * 3}, {"age": 1, "home": {}}, {"age": 1, "more": 2}],
]
ARRAY = {"type": "array"}
TREES = [{"below": []}, {"value": 1, "below": [{"below": []}, {"value": 2, "below": [{"below": []}]}]}]
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
    ("schema", "valid", "invalid"),
    [
        (PERSON, PEOPLE, NO_PEOPLE),
        (TREE, TREES, [{"value": 1}, {"below": [1]}, {"below": [{"value": 1}]}]),
        ({"type": "string", "format": "date"}, ["2024-02-29"], ["2024-13-01", "today"]),
        ({"items": {"type": "boolean"}, "minItems": 2} | ARRAY, [[True, False], [True] * 5], [[], [True], [1, 2]]),
        ({"anyOf": [{"const": "a.b"}, {"type": "null"}]}, ["a.b", None], ["axb", 1]),
        ({"type": "string", "pattern": "^[A-Z].-[0-9]{2}$"}, ["Ax-12", "A日-99"], ["ax-12", "Ax-1"]),
        ({"items": {"type": "null"}, "maxItems": 0} | ARRAY, [[]], [[None]]),
    ],
)
def test_a_schema_matches_valid_values_only(schema: Any, valid: list[Any], invalid: list[Any]) -> None:
    grammar = json_schema(BYTES, schema)
    for value in valid:
        assert grammar.matches(json.dumps(value, ensure_ascii=False)), value
    for value in invalid:
        assert not grammar.matches(json.dumps(value, ensure_ascii=False)), value
    assert not grammar.matches("")


def test_an_object_has_only_named_properties() -> None:
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
    ("schema", "message"),
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
        ({"properties": {f"p{n}": {} for n in range(2001)}}, "2,001 properties or alternatives in one place"),
        ({"anyOf": [{"properties": {f"p{n}": {} for n in range(2000)}}] * 3}, "6,003 in all; at most 2,000 and 5,000"),
        ({"properties": {f"p{n}": {} for n in range(1001)}}, "1,001 optional properties in one object; at most 1,000"),
        (deep(200), "recursion limit exceeded"),
    ],
)
def test_impossible_schemas_are_refused(schema: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^the schema: .*{re.escape(message)}") as caught:
        json_schema(BYTES, schema)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("required", [1000, slow(2000)])
def test_the_largest_schemas_can_be_followed(required: int) -> None:
    properties = {f"p{n}": {"type": "null"} for n in range(2000)}
    schema = {"type": "object", "properties": properties, "required": list(properties)[:required]}
    constraint = json_schema(BYTES, schema).begin()
    for token in BYTES.encode('{"p0": null, "p1'):
        assert constraint.allowed()[token]
        constraint.push(token)


def test_a_grammar_with_too_many_alternatives_says_so() -> None:
    many = " | ".join(f"/{number}/" for number in range(5000))
    constraint = lark(BYTES, f'start: "a" rest\nrest: {many}\n').begin()
    constraint.push(*BYTES.encode("a"))
    with pytest.raises(ModelError, match="the grammar: too many alternatives in one place"):
        constraint.allowed()


def test_a_schema_beyond_pythons_recursion_limit_is_refused() -> None:
    schema = deep(100_000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        json_schema(BYTES, schema)
    while isinstance(schema, dict):  # free it level by level: freeing it in one go would overflow the stack
        schema = schema.get("items")


# ---- context-free grammars

SUM = """
start: sum
sum: product ("+" product)*
product: number ("*" number)*
number: /[0-9]+/ | "(" sum ")"
"""


def test_a_grammar_matches_its_texts() -> None:
    grammar = lark(BYTES, SUM)
    for text in ("1", "12+3*4", "((1+2)*3)+4"):
        assert grammar.matches(text)
    for text in ("", "1+", "(1", "1)", "a"):
        assert not grammar.matches(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('start: a\na: "x" b', "line 2, column 4: unknown name"),
        ("hello", "Expected token ':'"),
        ("", "start"),
        ('start: "a" x\nx: /[/', "line 2, column 4: unclosed character class"),
    ],
)
def test_invalid_grammars_are_refused_in_one_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^the grammar: .*({message})") as caught:
        lark(BYTES, text)
    assert "\n" not in str(caught.value)


# ---- generated texts

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
def test_texts_follow_a_pattern(name: str, expression: str) -> None:
    tokenizer = TOKENIZERS[name]
    pattern = regex(tokenizer, expression)
    texts = complete(model_for(tokenizer), tokenizer, [""] * 6, Sampling(max_tokens=60), grammar=pattern)
    assert {text.finish for text in texts} <= {"stop", "eos"}
    assert len({text.text for text in texts}) > 1
    for text in texts:
        assert re.fullmatch(expression, text.text), text


def test_texts_follow_a_schema() -> None:
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


def test_a_constrained_text_is_identical_with_drafts() -> None:
    tokenizer = TOKENIZERS["byte"]
    model, settings = model_for(tokenizer), Sampling(max_tokens=50, seed=4)
    pattern = regex(tokenizer, "(ab|ba)*!")
    plain = complete(model, tokenizer, ["a"], settings, grammar=pattern)
    prompt = Prompt.of(tokenizer, "a", pattern)
    assert gather(speculate(model, prompt, settings, drafter=LookUp(3)), [prompt]) == plain


@pytest.mark.parametrize("name", spread(TOKENIZERS, 1))
def test_beams_follow_a_pattern(name: str) -> None:
    """Every text of a small pattern is found once."""
    tokenizer = TOKENIZERS[name]
    pattern = regex(tokenizer, "(the|cat) (on|mat)!?")
    prompts = [Prompt.of(tokenizer, text, pattern) for text in ("", "")] + [Prompt.of(tokenizer, "")]
    first, second, free = search_texts(model_for(tokenizer), prompts, Beam(beams=300, n=300, max_tokens=20))
    texts = {text.text for text in first}
    assert texts == {f"{a} {b}{c}" for a in ("the", "cat") for b in ("on", "mat") for c in ("", "!")}
    assert first == second and {text.finish for text in first} <= {"stop", "eos"}
    assert not any(pattern.matches(text.text) for text in free)


def test_dead_ends_are_left_or_refused() -> None:
    """A pattern may lead to words that are not in the vocabulary."""
    words = build_tokenizer(Word(), ["one two three"])
    model = model_for(words)
    prompt = Prompt.of(words, "", regex(words, "one( four| two)|three"))
    (texts,) = search_texts(model, [prompt], Beam(beams=4, n=4))
    assert {text.text for text in texts} == {"one two", "three"}
    dead = regex(words, "one four")
    with pytest.raises(ModelError, match="no text is left to search"):
        search_texts(model, [Prompt.of(words, "", dead)], Beam(beams=2))
    with pytest.raises(ModelError, match="no token of this vocabulary can continue it"):
        complete(model, words, [""], Sampling(), grammar=dead)
    with pytest.raises(ModelError, match="no token of this vocabulary can begin a text"):
        complete(model, words, [""], Sampling(), grammar=regex(words, "four"))
