"""Files of word vectors: written, read back, and read by gensim; broken ones are refused in one line."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from weft.errors import InteropError
from weft.interop import word_vectors
from weft.interop.bundle import ModelBundle, lazy_weights
from weft.interop.formats import read_model
from weft.models.config import Word2Vec
from weft.models.presets import preset
from weft.text.config import Word
from weft.text.tokenizer import build_tokenizer

TEXT = "the bank of the river and the bank that lends to König François"
NAMES = {"word2vec": "v.txt", "word2vec-binary": "v.bin", "glove": "g.txt"}


@pytest.fixture(scope="module")
def bundle() -> ModelBundle:
    tokenizer = build_tokenizer(Word(), [TEXT])
    size = tokenizer.vocab_size
    table = torch.randn(size, 7, generator=torch.Generator().manual_seed(0))
    table[list(tokenizer.special_tokens.values())] = 0
    weights = {"embedding.weight": table}
    model = Word2Vec(vocab_size=size, d_model=7)
    return ModelBundle(model, lazy_weights(weights.__getitem__, weights), tokenizer, origin="a test")


@pytest.mark.parametrize("form", NAMES)
def test_vectors_survive_writing_and_reading(form: str, bundle: ModelBundle, tmp_path: Path) -> None:
    path = tmp_path / NAMES[form]
    assert bundle.tokenizer is not None
    word_vectors.write(bundle, path, form)
    back = read_model(path)
    assert back.tokenizer is not None
    assert back.origin == f"{path.name} ({word_vectors.TITLES[form]})"
    assert back.model.kind == ("glove" if form == "glove" else "word2vec")
    before, after = (each.weights["embedding.weight"]() for each in (bundle, back))
    for word in ("the", "König", "bank"):
        assert torch.equal(before[bundle.tokenizer.id(word)], after[back.tokenizer.id(word)])
    assert len(after) == len(before) - len(bundle.tokenizer.special_tokens) + 1  # an unk token is added
    assert back.tokenizer.encode("the bank, xyz")[-1] == back.tokenizer.unk_id
    again = tmp_path / f"again-{path.name}"
    word_vectors.write(back, again, form)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("form", NAMES)
def test_gensim_reads_and_writes_the_same_vectors(form: str, bundle: ModelBundle, tmp_path: Path) -> None:
    models: ModuleType = pytest.importorskip("gensim.models")
    path, theirs = tmp_path / NAMES[form], tmp_path / f"gensim-{NAMES[form]}"
    word_vectors.write(bundle, path, form)
    binary, bare = form == "word2vec-binary", form == "glove"
    vectors = models.KeyedVectors.load_word2vec_format(str(path), binary=binary, no_header=bare)
    assert bundle.tokenizer is not None
    table = bundle.weights["embedding.weight"]()
    np.testing.assert_array_equal(vectors["König"], table[bundle.tokenizer.id("König")])
    vectors.save_word2vec_format(str(theirs), binary=binary, write_header=not bare)
    back = read_model(theirs)
    assert back.tokenizer is not None
    row = back.weights["embedding.weight"]()[back.tokenizer.id("König")]
    assert torch.equal(row, table[bundle.tokenizer.id("König")])


def test_a_file_in_lower_case_reads_texts_in_lower_case(tmp_path: Path) -> None:
    path = tmp_path / "g.txt"
    path.write_text("king 1 2\nu.s. 3 4\nking 5 6\n")
    read = read_model(path)
    assert read.tokenizer is not None
    table = read.weights["embedding.weight"]()
    assert torch.equal(table[read.tokenizer.encode("King")[0]], torch.tensor([1.0, 2.0]))  # the first of two counts
    assert table.shape == (3, 2)


ROW = np.array([1, 2], dtype="<f4").tobytes()
BROKEN = {
    "tabs": (b"a\t1\t2\nb\t3\t4\n", "separated by spaces"),
    "fewer words than the header": (b"3 2\na 1 2\nb 3 4\n", "its header says 3 words, and it has 2"),
    "more words than the header": (b"1 2\na 1 2\nb 3 4\n", "its header says 1 words, and it has 2"),
    "a number is missing": (b"2 2\na 1 2\nb 3\n", "expected 2 numbers after it"),
    "a number too many": (b"a 1 2\nb 3 4 5\n", "expected 2 numbers after it"),
    "not a number": (b"2 2\na 1 2\nb 3 x\n", "expected 2 numbers after it"),
    "not finite": (b"2 2\na 1 2\nb 3 nan\n", "has a number not finite"),
    "not UTF-8": (b"2 2\na 1 2\n\xff 3 4\n", "is not UTF-8"),
    "no width": (b"2 0\na 1 2\nb 3 4\n", "vectors of 0 numbers"),
    "too wide": (b"2 9999\na 1 2\nb 3 4\n", "vectors of 9999 numbers"),
    "binary, more words than bytes": (b"9000000000 2\na " + ROW, "do not fit into its"),
    "binary, truncated": (b"2 2\na " + ROW + b"\nb " + ROW[:5], "truncated or damaged"),
    "binary, bytes after the end": (b"1 2\na " + ROW + b"\n" + 30 * b"x", "bytes after the 1 words"),
    "binary, no end of a word": (b"1 2\n" + 40 * b"a", "no end of word 1"),
    "control characters": (b"2 2\na 1 2\n\x1b[31mb 3 4\n", "empty or not printable"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_files_are_refused(case: str, tmp_path: Path) -> None:
    content, message = BROKEN[case]
    path = tmp_path / ("v.bin" if case.startswith("binary") else "v.txt")
    path.write_bytes(content)
    with pytest.raises(InteropError, match=message) as caught:
        read_model(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_header_is_recognised_under_any_name(tmp_path: Path) -> None:
    (tmp_path / "v.word2vec").write_bytes(b"2 2\na 1 2\nb 3 4\n")
    assert read_model(tmp_path / "v.word2vec").origin == "v.word2vec (word2vec, text)"


def test_other_models_are_not_written_as_word_vectors(bundle: ModelBundle, tmp_path: Path) -> None:
    with pytest.raises(InteropError, match="only word vectors"):
        word_vectors.write(replace(bundle, model=preset("gpt-tiny")), tmp_path / "v.txt", "glove")
    assert not list(tmp_path.iterdir())
