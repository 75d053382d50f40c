"""Text → ids → text, in one call and as a stream."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.errors import TokenizerError
from weft.text.config import Char
from weft.text.tokenizer import Tokenizer, build_tokenizer

# all planes, control characters, and known hard cases
any_text = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
        st.sampled_from(["\r\n", "\0", " ", "  ", "\t", "\u200d", "é", "e\u0301", "👩‍🚀", "\U0010ffff", "�", "▁", "Ġ"]),
        st.sampled_from(["<pad>", "<eos>", "<0x41>", "<0xC3>", "[SEP]", "##a", "the quick"]),
    ),
    max_size=12,
).map("".join)
many = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@many
@given(text=any_text)
def test_decode_inverts_encode(exact: Tokenizer, text: str) -> None:
    ids = exact.encode(text)
    assert exact.decode(ids) == text
    assert exact.decode(ids, specials=True) == text
    assert all(0 <= id < exact.vocab_size for id in ids)


@many
@given(text=any_text)
def test_a_stream_yields_complete_characters_and_the_same_text(exact: Tokenizer, text: str) -> None:
    stream = exact.stream()
    parts = [stream.push(id) for id in exact.encode(text)]
    assert "".join(parts) + stream.flush() == text
    assert "�" in text or not any("�" in part for part in parts)
    assert stream.flush() == ""


@many
@given(data=st.data())
def test_a_stream_of_any_ids_equals_decode(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    for specials in (False, True):
        stream = tokenizer.stream(specials=specials)
        assert stream.extend(ids) + stream.flush() == tokenizer.decode(ids, specials=specials)


@many
@given(text=any_text)
def test_no_text_becomes_a_special_token(tokenizer: Tokenizer, text: str) -> None:
    hidden = set(tokenizer.special_tokens.values()) - {tokenizer.unk_id}
    assert hidden.isdisjoint(tokenizer.encode(text))


@many
@given(text=any_text)
def test_bpe_and_unigram_know_every_text(tokenizers: dict[str, Tokenizer], text: str) -> None:
    assert tokenizers["unigram"].unk_id not in tokenizers["unigram"].encode(text)
    assert tokenizers["bpe"].unk_id is None


@many
@given(text=any_text)
def test_token_spans_are_the_encoding_and_cover_the_text(exact: Tokenizer, text: str) -> None:
    spans = exact.token_spans(text)
    assert [span.id for span in spans] == exact.encode(text)
    assert [span.token for span in spans] == [exact.token(span.id) for span in spans]
    assert all(span.text == text[span.start : span.end] for span in spans)
    assert set(range(len(text))) == {position for span in spans for position in range(span.start, span.end)}


def test_half_a_character_is_held_back_and_replaced_at_the_end(tokenizers: dict[str, Tokenizer]) -> None:
    byte = tokenizers["byte"]
    first, second, third = byte.encode("€")
    stream = byte.stream()
    assert [stream.push(first), stream.push(second)] == ["", ""]
    assert stream.push(third) == "€"
    assert stream.push(first) == ""
    assert stream.flush() == "�" == byte.decode([first])


def test_unseen_characters_become_bytes_or_unknown(tokenizers: dict[str, Tokenizer]) -> None:
    char = tokenizers["char"]
    assert [char.token(id) for id in char.encode("xñ")] == ["x", "<0xC3>", "<0xB1>"]
    compact = build_tokenizer(Char(fallback="unk"), ["hello"])
    assert compact.vocab_size == 4 + len(set("hello"))
    assert compact.decode(compact.encode("hole")) == "hole"
    assert compact.encode("hat") == [compact.id("h"), compact.unk_id, compact.unk_id]


@pytest.mark.parametrize("value", [5, "\ud800", "ok \udfff", "\ude00\ud83d"])
def test_values_that_are_no_text_are_refused(tokenizer: Tokenizer, value: Any) -> None:
    message = "^5: expected a text, not int" if value == 5 else r"lone surrogate, U\+D[8-F]"
    encoders: list[Callable[[Any], Any]] = [tokenizer.encode, tokenizer.token_spans]
    for encode in (*encoders, lambda value: tokenizer.encode_batch(["fine", value])):
        with pytest.raises(TokenizerError, match=message):
            encode(value)


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    for id in (-1, tokenizer.vocab_size, 10**9):
        with pytest.raises(TokenizerError, match=f"id {id} is not in the vocabulary of {tokenizer.vocab_size} tokens"):
            tokenizer.decode([id])
        with pytest.raises(TokenizerError, match=f"id {id} "):
            tokenizer.stream().push(id)
