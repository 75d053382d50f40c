"""F4 (lecture 3): words, characters and subwords of "Henry is giving a lecture on transformers"."""

import pytest

from weft.text.config import BPE, Char, Specials, TrainedConfig, Unigram, Word, WordPiece
from weft.text.tokenizer import build_tokenizer

SENTENCE = "Henry is giving a lecture on transformers"
TYPOS = "Henry is givin' a lectrue on transformers"
OOV = Specials(pad="<PAD>", unk="<OOV>")


def test_seven_words_in_lower_case() -> None:
    word = build_tokenizer(Word(lowercase=True, specials=OOV), [SENTENCE])
    cut = [word.token(id) for id in word.encode(SENTENCE)]
    assert cut == ["henry", "is", "giving", "a", "lecture", "on", "transformers"]


def test_typos_are_out_of_vocabulary() -> None:
    word = build_tokenizer(Word(lowercase=True, specials=OOV), [SENTENCE])
    cut = [word.token(id) for id in word.encode(TYPOS)]
    assert cut == ["henry", "is", "<OOV>", "a", "<OOV>", "on", "transformers"]


@pytest.mark.parametrize(
    "config",
    [BPE(specials=OOV), WordPiece(specials=OOV), Unigram(specials=OOV)],
    ids=lambda config: config.kind,
)
def test_subwords_never_are(config: TrainedConfig) -> None:
    # every character of the sentence is in the text that was trained on, as the slide asks
    subword = build_tokenizer(config, [SENTENCE, "it's Henry's"])
    assert subword.unk_id is not None
    for text in (SENTENCE, TYPOS):
        ids = subword.encode(text)
        assert subword.unk_id not in ids
        together = subword.decode(ids).replace(" ", "")
        assert together == (text.lower() if config.kind == "wordpiece" else text).replace(" ", "")


def test_characters_spell_it() -> None:
    char = build_tokenizer(Char(lowercase=True), [SENTENCE])
    assert [char.token(id) for id in char.encode("Henry is givin")] == list("henry is givin")
    assert char.decode(char.encode(TYPOS)) == TYPOS.lower()
