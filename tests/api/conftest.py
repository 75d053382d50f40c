"""Fixtures of the API's tests."""

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from weft.text.config import BPE
from weft.text.tokenizer import Tokenizer, build_tokenizer


def with_bos(tokenizer: Tokenizer) -> Tokenizer:
    """Return a tokenizer whose file puts bos before every text, as LLaMA's does."""
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    backend.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", tokenizer.need("bos"))])
    framed = Tokenizer.from_json(backend.to_str(), tokenizer.roles)
    assert framed.leading == (tokenizer.bos_id,)
    return framed


@pytest.fixture(scope="session")
def pieces() -> Tokenizer:
    return with_bos(build_tokenizer(BPE(vocab_size=280), ["the cat sat on the mat, and the dog ate the hat. " * 8]))
