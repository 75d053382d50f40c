"""F3 (lecture 3): the slide's bug, padding with a literal 0 while the padding token has another id."""

from typing import Any

import pytest

from weft.data.batch import pack, pad
from weft.errors import DataError
from weft.text.config import Specials, Word
from weft.text.tokenizer import build_tokenizer


@pytest.mark.parametrize("roles", [{"unk": "<unk>", "pad": "<pad>"}, {"unk": "<pad>", "pad": "<unk>"}])
def test_padding_has_the_tokenizers_id(roles: Any) -> None:
    trained = build_tokenizer(Word(specials=Specials(unk="<unk>", pad="<pad>")), ["a b c"])
    tokenizer = type(trained).from_json(trained.to_json(), roles=roles)
    assert tokenizer.pad_id == trained.id(roles["pad"])
    rows, mask = pad(tokenizer.encode_batch(["a b c", "a"]), tokenizer.pad_id)
    assert rows[1].tolist() == [tokenizer.id("a"), tokenizer.pad_id, tokenizer.pad_id]
    assert mask[1].tolist() == [True, False, False]
    batch = pack(tokenizer.encode_batch(["a b c"]), 4, tokenizer.pad_id)
    assert batch.tokens[0, 2:].tolist() == batch.targets[0, 2:].tolist() == [tokenizer.pad_id] * 2


def test_no_padding_token_is_an_error_not_a_zero() -> None:
    tokenizer = build_tokenizer(Word(specials=Specials(unk="<unk>")), ["a b c"])
    with pytest.raises(DataError, match="no padding token"):
        pad(tokenizer.encode_batch(["a b c", "a"]), tokenizer.pad_id)
