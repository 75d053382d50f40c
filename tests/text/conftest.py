"""A small corpus and a tokenizer of each kind, trained on it once."""

import pytest

from weft.text.config import BPE, Byte, Char, TrainedConfig, Unigram, Word, WordPiece
from weft.text.tokenizer import Tokenizer, build_tokenizer

VERSE = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps; the fox doesn't.",
    "Pack my box with five dozen liquor jugs, please!\nHow vexingly quick daft zebras jump.",
    "It was the best of times, it was the worst of times, it was the age of wisdom…",
    "naïve café, größer, 東京, 🙂 and 42 other things (or 43?)",
]
TEXTS = VERSE * 4

CONFIGS: dict[str, TrainedConfig] = {
    "word": Word(),
    "char": Char(),
    "byte": Byte(),
    "bpe": BPE(vocab_size=300),
    "wordpiece": WordPiece(vocab_size=160),
    "unigram": Unigram(vocab_size=340),
}


@pytest.fixture(scope="session")
def tokenizers() -> dict[str, Tokenizer]:
    return {kind: build_tokenizer(config, TEXTS) for kind, config in CONFIGS.items()}


@pytest.fixture(params=sorted(CONFIGS))
def tokenizer(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    return tokenizers[request.param]


@pytest.fixture(params=["char", "byte", "bpe"])
def exact(request: pytest.FixtureRequest, tokenizers: dict[str, Tokenizer]) -> Tokenizer:
    """Each kind that restores every text exactly."""
    return tokenizers[request.param]
