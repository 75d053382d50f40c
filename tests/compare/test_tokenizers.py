"""Tokenizers on one text: every number is counted again in a simpler way."""

import re
from collections import Counter
from pathlib import Path

import pytest

from weft.compare.config import parse_tokenizer
from weft.compare.tokenizers import LECTURE, TokenizerComparison, TokenizerMeasure, compare_tokenizers
from weft.data.config import FilesSplit, TextSource
from weft.data.split import train_texts
from weft.errors import ConfigError, DataError, TokenizerError
from weft.text.config import BPE, Char, Unigram, Word
from weft.text.tokenizer import Tokenizer, build_tokenizer

TRAINING = "Henry is giving a lecture on transformers, and a café is a place.\n" * 12 + "once only\n"
# “zyzzyva” is frequent here, but must not be learned
HELD_OUT = "a lecture on naïve zyzzyva zyzzyva zyzzyva is  a place\n" * 3 + "Henry’s café 漢字\n"
KINDS = ["word", "char", "byte", "bpe:300", "unigram:286", "wordpiece:60"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextSource:
    folder = tmp_path_factory.mktemp("text")
    (folder / "training.txt").write_text(TRAINING)
    (folder / "held-out.txt").write_text(HELD_OUT)
    return TextSource([str(folder / "training.txt")], FilesSplit(sources=(str(folder / "held-out.txt"),)))


@pytest.fixture(scope="module")
def compared(text: TextSource, tmp_path_factory: pytest.TempPathFactory) -> TokenizerComparison:
    finished = tmp_path_factory.mktemp("<b>a folder with a name that is long")
    build_tokenizer(BPE(vocab_size=280), [TRAINING]).save(finished)
    return compare_tokenizers([*KINDS, str(finished)], text)


def measure(compared: TokenizerComparison, name: str) -> TokenizerMeasure:
    return next(each for each in compared.measures if each.name == name)


def test_words_are_separated_by_white_space(compared: TokenizerComparison) -> None:
    found, known = measure(compared, "word"), Counter(TRAINING.split())
    words = HELD_OUT.split()
    assert found.entries == len(known) + 4  # pad, unk, bos, eos
    assert (found.bytes, found.words, found.tokens) == (len(HELD_OUT.encode()), len(words), len(words))
    unknown = [word for word in words if word not in known]
    assert found.unknown_words == found.unknown_tokens == len(unknown) > 9
    assert found.unknown_words / found.words == pytest.approx(len(unknown) / len(words))
    assert found.used == pytest.approx(len(set(words) & set(known)) / len(known))
    assert found.rare == pytest.approx(sum(count < 10 for count in known.values()) / len(known))
    assert not found.exact  # two spaces, and line ends


def test_a_byte_tokenizer_has_one_token_per_byte(compared: TokenizerComparison) -> None:
    found = measure(compared, "byte")
    assert found.bytes_per_token == found.tokens / found.bytes == 1.0
    assert found.used == pytest.approx(len(set(HELD_OUT.encode())) / 256)
    seen = Counter(TRAINING.encode())
    assert found.rare == pytest.approx(1 - sum(count >= 10 for count in seen.values()) / 256)
    assert found.exact and not found.unknown_words


def test_unseen_characters_are_spelled_in_bytes(compared: TokenizerComparison) -> None:
    found, known = measure(compared, "char"), set(TRAINING)
    spelled = sum(1 if char in known else len(char.encode()) for char in HELD_OUT)
    assert found.tokens == spelled and found.tokens / found.bytes == pytest.approx(spelled / len(HELD_OUT.encode()))
    assert found.entries == len(known) + 256 + 4
    assert found.exact and found.unknown_tokens == 0


@pytest.mark.parametrize("name", ["bpe:300", "unigram:286", "wordpiece:60"])
def test_subwords_are_learned_from_the_training_text_only(
    compared: TokenizerComparison, text: TextSource, name: str
) -> None:
    sections, lines = list(train_texts(text)), HELD_OUT.splitlines(keepends=True)  # a text is read in sections
    assert "".join(sections) == TRAINING
    settings = parse_tokenizer(name)
    assert not isinstance(settings, Tokenizer)
    found, tokenizer = measure(compared, name), build_tokenizer(settings, sections)
    ids = [id for line in lines for id in tokenizer.encode(line)]
    assert found.entries == int(name.partition(":")[2]) == tokenizer.vocab_size
    assert found.tokens == len(ids) and found.tokens / found.words == pytest.approx(len(ids) / len(HELD_OUT.split()))
    ordinary = set(range(tokenizer.vocab_size)) - set(tokenizer.special_tokens.values())
    assert found.used == pytest.approx(len(set(ids) & ordinary) / len(ordinary))
    trained = Counter(id for section in sections for id in tokenizer.encode(section))
    assert found.rare == pytest.approx(sum(trained[id] < 10 for id in ordinary) / len(ordinary))
    unknown = ids.count(tokenizer.unk_id) if tokenizer.unk_id is not None else 0
    assert found.unknown_tokens == unknown and (unknown > 0) == (found.unknown_words > 0) == (name == "wordpiece:60")
    assert found.exact == all(tokenizer.decode(tokenizer.encode(line)) == line for line in lines)


def test_a_trained_tokenizer_is_not_trained_again(compared: TokenizerComparison) -> None:
    found = compared.measures[-1]
    assert found.entries == 280 and found.training_seconds is None and len(found.label) == 16
    assert all(each.training_seconds is not None for each in compared.measures[:-1])
    speeds = [(each.encode_speed, each.encode_all_cores_speed, each.decode_speed) for each in compared.measures]
    assert min(map(min, speeds)) > 0


def test_the_lectures_sentence_is_tokenized_as_on_its_slides(compared: TokenizerComparison) -> None:
    assert compared.sentence == LECTURE == "Henry is givin' a lectrue on transformers"
    pieces = {each.name: each.pieces for each in compared.measures}
    # "transformers," has a comma in the training text, so the word is not in the vocabulary
    assert [known for _, known in pieces["word"]] == [True, True, False, True, False, True, False]
    assert [piece for piece, _ in pieces["word"]] == ["Henry", "is", "<unk>", "a", "<unk>", "on", "<unk>"]
    assert "".join(piece for piece, _ in pieces["char"]) == "".join(piece for piece, _ in pieces["bpe:300"]) == LECTURE
    assert "".join(piece for piece, _ in pieces["unigram:286"]).lstrip() == LECTURE
    assert any(piece.startswith("##") for piece, _ in pieces["wordpiece:60"])


def test_part_of_a_character_is_shown_as_bytes(text: TextSource) -> None:
    (found,) = compare_tokenizers(["byte"], text, sentence="a字").measures
    assert [piece for piece, _ in found.pieces] == ["a", "<0xE5>", "<0xAD>", "<0x97>"]


def test_the_page_shows_every_token_in_a_box(compared: TokenizerComparison, tmp_path: Path) -> None:
    html = compared.save(tmp_path / "page.html").read_text()
    boxes = re.findall(r'<span class="tok-piece tok-(\w+)">(.*?)</span>', html)
    assert len(boxes) == sum(len(each.pieces) for each in compared.measures)
    assert boxes.count(("unknown", "&lt;unk&gt;")) == 3
    assert "&lt;b&gt;a folder" in html and "<b>a folder" not in html
    assert 'aria-label="Bytes per token by vocabulary size"' in html
    for each in compared.measures:
        assert f"{each.bytes_per_token:.3f}" in html and f"{each.entries:,}" in html
    assert ".tok-piece {" in html  # with its style


def test_the_text_fits_80_columns(compared: TokenizerComparison) -> None:
    shown = compared.text()
    assert max(map(len, shown.splitlines())) <= 80
    assert "word (7): Henry is <unk> a <unk> on <unk>" in shown
    assert f"{len(HELD_OUT.encode())} bytes, {len(HELD_OUT.split())} words" in shown


@pytest.mark.parametrize(
    ("specs", "line"),
    [
        ([], "--tokenizers: name at least one: word, char, byte, bpe"),
        (["bpx:80"], r"--tokenizers bpx:80: neither a kind nor a file or folder; did you mean 'bpe'\?; word, char"),
        (["bpe:"], "--tokenizers bpe:: '' is not a vocabulary size; .* with a size as in bpe:8000"),
        (["bpe:8k"], "--tokenizers bpe:8k: '8k' is not a vocabulary size"),
        (["byte:300"], "--tokenizers byte:300: a byte tokenizer has a fixed vocabulary"),
        (["char", "char"], "--tokenizers char: named twice"),
    ],
)
def test_invalid_specs_are_refused_before_the_text_is_read(specs: list[str], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        compare_tokenizers(specs, "no-such-file.txt")


def test_texts_that_do_not_suffice_are_refused(text: TextSource, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"^bpe:9000: .* the text supports \d+ at most"):
        compare_tokenizers(["bpe:9000"], text)
    (tmp_path / "short.txt").write_text("one")
    with pytest.raises(DataError, match="no text is held out, so tokenizers can't be compared"):
        compare_tokenizers(["char"], str(tmp_path / "short.txt"))
    with pytest.raises(DataError, match="standard input can be read only once"):
        compare_tokenizers(["char"], "-")


def test_specs_are_parsed() -> None:
    parsed = [parse_tokenizer(spec) for spec in ("bpe:8000", "word", "unigram:99", "char")]
    assert parsed == [BPE(vocab_size=8000), Word(), Unigram(vocab_size=99), Char()]
