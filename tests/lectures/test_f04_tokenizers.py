"""F4 (lecture 3): words, characters and subwords of "Henry is giving a lecture on transformers"."""

import pytest

from weft.text.config import BPE, Char, Specials, TrainedConfig, Unigram, Word, WordPiece
from weft.text.tokenizer import build_tokenizer

SENTENCE = "Henry is giving a lecture on transformers"
TYPOS = "Henry is givin' a lectrue on transformers"
OOV = Specials(pad="<PAD>", unk="<OOV>")


@pytest.mark.parametrize(
    ("text", "expected"),
    [(SENTENCE, "henry is giving a lecture on transformers"), (TYPOS, "henry is <OOV> a <OOV> on transformers")],
)
def test_typos_are_out_of_a_vocabulary_of_words(text: str, expected: str) -> None:
    word = build_tokenizer(Word(lowercase=True, specials=OOV), [SENTENCE])
    assert [word.token(id) for id in word.encode(text)] == expected.split()


@pytest.mark.parametrize("config", [BPE(specials=OOV), WordPiece(specials=OOV), Unigram(specials=OOV)])
def test_typos_are_not_out_of_a_vocabulary_of_subwords(config: TrainedConfig) -> None:
    # the training text has every character of the sentence, as on the slide
    subword = build_tokenizer(config, [SENTENCE, "it's Henry's"])
    assert subword.unk_id is not None
    for text in (SENTENCE, TYPOS):
        ids = subword.encode(text)
        assert subword.unk_id not in ids
        decoded = subword.decode(ids).replace(" ", "")
        assert decoded == (text.lower() if config.kind == "wordpiece" else text).replace(" ", "")


def test_characters() -> None:
    char = build_tokenizer(Char(lowercase=True), [SENTENCE])
    assert [char.token(id) for id in char.encode("Henry is givin")] == list("henry is givin")
    assert char.decode(char.encode(TYPOS)) == TYPOS.lower()
