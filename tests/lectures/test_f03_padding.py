"""F3 (lecture 3): the slide's bug, padding with a literal 0 while the padding token has another id."""

import pytest

from weft.data.batch import pack, pad
from weft.errors import DataError
from weft.text.config import Specials, Word
from weft.text.tokenizer import build_tokenizer


def test_padding_is_the_tokenizers_own() -> None:
    words = Word(specials=Specials(unk="<unk>", pad="<pad>"))
    tokenizer = build_tokenizer(words, ["a b c"])
    moved = type(tokenizer).from_json(
        tokenizer.to_json(), roles={"unk": "<pad>", "pad": "<unk>"}
    )  # the two change places
    for each in (tokenizer, moved):
        assert each.pad_id is not None
        rows, mask = pad(each.encode_batch(["a b c", "a"]), each.pad_id)
        assert rows[1].tolist() == [each.id("a"), each.pad_id, each.pad_id]
        assert mask[1].tolist() == [True, False, False]
        batch = pack(each.encode_batch(["a b c"]), 4, each.pad_id)
        assert batch.tokens[0, 2:].tolist() == batch.targets[0, 2:].tolist() == [each.pad_id] * 2
    assert {tokenizer.pad_id, moved.pad_id} == {0, 1}


def test_no_padding_token_is_an_error_not_a_zero() -> None:
    tokenizer = build_tokenizer(Word(specials=Specials(unk="<unk>")), ["a b c"])
    with pytest.raises(DataError, match="no padding token"):
        pad(tokenizer.encode_batch(["a b c", "a"]), tokenizer.pad_id)
