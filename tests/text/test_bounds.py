"""Tokenizers that would take gigabytes or never end are refused in one line; merely unusual ones are read."""

import json
import os
from typing import Any

import pytest

from weft.errors import ConfigError, TokenizerError
from weft.text import bounds
from weft.text.tokenizer import Tokenizer

WORDS = {"type": "WordLevel", "vocab": {"<unk>": 0, "a": 1, "<s>": 2}, "unk_token": "<unk>"}


def content(**parts: Any) -> str:
    return json.dumps({"version": "1.0", "added_tokens": [], "model": WORDS, **parts})


def replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "normalizers": list(steps)}


def split(expression: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def template(single: list[dict[str, Any]], ids: int = 1) -> dict[str, Any]:
    named = {"<s>": {"id": "<s>", "ids": [2] * ids, "tokens": ["<s>"] * ids}}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": named}


TEN = replace({"String": "a"}, "a" * 10)
TEXT, MARK = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "<s>", "type_id": 0}}
UNTYPED, BETWEEN = {"pattern": {"String": "a"}, "content": "a" * 10}, replace({"Regex": ""}, "b" * 9)
LONG, LONGER = "x" * 2_100_000, "makes a text more than 64 times as long"
BOMBS = {
    "nine steps": (content(normalizer=sequence(*[TEN] * 9)), f"its normalizer {LONGER}"),
    "steps without types": (content(normalizer={"normalizers": [UNTYPED] * 9}), f"{LONGER}|did not match"),
    "an expression per letter": (content(normalizer=sequence(*[replace({"Regex": "a|b"}, "ab" * 8)] * 3)), LONGER),
    "between all letters": (content(normalizer=sequence(BETWEEN, replace({"String": "b"}, "c" * 9))), LONGER),
    "a decoder": (content(decoder={"type": "Sequence", "decoders": [TEN] * 9}), f"its decoder {LONGER}"),
    "many steps": (content(normalizer=sequence(*[{"type": "Lowercase"}] * 600)), "more than 512 steps"),
    "a large template": (content(post_processor=template([TEXT, *[MARK] * 3000])), "puts 3,001 tokens around"),
    "a token of many ids": (content(post_processor=template([MARK, TEXT], 40_000)), "puts 40,001 tokens around"),
    "the text repeated": (content(post_processor=template([TEXT] * 90)), "repeats a text 90 times"),
    "a prefix": (content(normalizer={"type": "Prepend", "prepend": "x" * 10**6}), "prepends a text"),
    "long pieces": (
        content(model={"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0], ["a" + LONG, -1], ["b" + LONG, -1]]}),
        "3 pieces with 4,200,0.. bytes to search in",
    ),
    "long words": (
        content(model={**WORDS, "type": "WordPiece", "max_input_chars_per_word": 10**9}),
        "model.max_input_chars_per_word = 1000000000",
    ),
    "a long affix": (
        content(model={"type": "BPE", "vocab": {"a": 0}, "merges": [], "end_of_word_suffix": "x" * 10**6}),
        "model.end_of_word_suffix is long",
    ),
    "exponential time": (content(pre_tokenizer=split("(a+)+$")), "not a tokenizer: Onig: Regex search error"),
    "nested": ('{"model": ' + "[" * 100_000, "nested too deeply"),
    "a list": ("[1, 2]", "expected a JSON object"),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_excessive_files_are_refused(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    text, message = BOMBS[name]
    with pytest.raises(TokenizerError, match=message) as caught:
        Tokenizer.from_json(text)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr().err == ""  # a panic prints, which is hidden


def test_a_regular_expression_that_fails_on_a_text_is_refused_in_one_line(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = Tokenizer.from_json(content(pre_tokenizer=split("(b+)+$")))
    assert tokenizer.encode("a") == [1]
    for use in (tokenizer.encode, tokenizer.token_spans):
        with pytest.raises(TokenizerError, match="the tokenizer fails on a text: Onig: Regex search error"):
            use("b" * 40 + "c")
    os.write(2, b"visible again")
    assert capfd.readouterr().err == "visible again"


def test_many_independent_steps_are_allowed() -> None:
    """A private-use letter protects each of SentencePiece's symbols while other text is replaced."""
    forth = [replace({"String": f"<symbol-{n:02}>"}, chr(0xE000 + n)) for n in range(40)]
    back = [replace({"String": chr(0xE000 + n)}, f"<symbol-{n:02}>") for n in range(40)]
    tokenizer = Tokenizer.from_json(content(normalizer=sequence(*forth, *back)))
    assert tokenizer.encode("a") == [1]


def test_the_bounds_can_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    hundred = content(normalizer=sequence(TEN, TEN))
    with pytest.raises(TokenizerError, match=r"the bound is 64 \(WEFT_LIMITS=2 raises it, for a file that you trust\)"):
        Tokenizer.from_json(hundred)
    monkeypatch.setenv("WEFT_LIMITS", "2")
    assert Tokenizer.from_json(hundred).encode("a") == [0]
    monkeypatch.setenv("WEFT_LIMITS", "many")
    with pytest.raises(ConfigError, match="WEFT_LIMITS = 'many': expected a factor by which to raise the bounds"):
        Tokenizer.from_json(hundred)


def test_pieces_with_a_common_prefix_share_nodes_of_the_trie() -> None:
    bounds.check_trie([f"{'long' * 50}{number:03}" for number in range(100)], 1000)
    with pytest.raises(TokenizerError, match="10 pieces with 2,0"):
        bounds.check_trie([f"{number}{'long' * 50}" for number in range(10)], 1000)
