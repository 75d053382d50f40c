"""Packages of Argos Translate, as folders and as archives, good and bad."""

import io
import json
import shutil
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from tests.interop.test_ctranslate2 import MODELS as CTRANSLATE2
from tests.interop.test_ctranslate2 import SOURCE, TARGET, binary, logits, made, rebuilt, variables

from weft.api.import_model import import_model
from weft.api.load import load
from weft.api.settings import beam, with_defaults
from weft.errors import InteropError
from weft.interop.ctranslate2 import argos
from weft.interop.formats import read_model
from weft.interop.generation import search_settings

sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
LINES = ["the cat sat on the mat", "a dog and a cat", "the mat is red, the dog is not"]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package's folder, with a model whose vocabulary is SentencePiece's."""
    path = tmp_path_factory.mktemp("argos") / "translate-en_de-1_0"
    (path / "model").mkdir(parents=True)
    (path / "stanza").mkdir()
    (path / "stanza/resources.json").write_text("{}")
    (path / "metadata.json").write_text(json.dumps({"package_version": "1.0", "from_code": "en", "to_code": "de"}))
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES), model_writer=file, vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    (path / "sentencepiece.model").write_bytes(file.getvalue())
    cutter = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    tokens = [cutter.id_to_piece(id) for id in range(cutter.get_piece_size())]
    (path / "model/shared_vocabulary.txt").write_text("\n".join(tokens) + "\n")
    model = made(CTRANSLATE2["marian"].replace(vocab_size=len(tokens)))
    (path / "model/model.bin").write_bytes(binary(*variables(model), version=5))
    return path


def packed(package: Path, path: Path, compression: int = zipfile.ZIP_DEFLATED, **renamed: str) -> Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for file in sorted(package.rglob("*")):
            if file.is_file():
                name = str(file.relative_to(package.parent))
                archive.write(file, renamed.get(file.name.replace(".", "_"), name))
    return path


def test_a_folder_and_its_archive_give_the_model(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    cutter = sentencepiece.SentencePieceProcessor(model_file=str(package / "sentencepiece.model"))
    file = package / "model/model.bin"
    archive = packed(package, tmp_path / "en_de.argosmodel")
    found = [read_model(path) for path in (file, file.parent, package, archive)]
    assert list((tmp_path / "scratch").iterdir()) == []
    wanted = logits(rebuilt(found[0]), TARGET, SOURCE)
    for bundle in found:
        assert torch.equal(logits(rebuilt(bundle), TARGET, SOURCE), wanted)
        assert bundle.tokenizer is not None
        for line in LINES:
            assert bundle.tokenizer.encode(line) == cutter.encode(line)
    assert [bundle.notes["generation"]["num_beams"] for bundle in found] == [5, 5, 4, 4]
    beams = {"beams": 4, "length_penalty": {"kind": "power", "alpha": 0.2}}
    usual = {"patience": 1.0, "settled": "likely", "renormalise": True}
    assert search_settings(found[3].notes["generation"]) == ({**usual, **beams, "replace_unknown": True}, [])
    assert found[2].origin == f"{package}: CTranslate2, float32"
    assert found[3].origin == f"{archive}: CTranslate2, float32"


def test_unknown_words_become_those_of_the_source(package: Path, tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    shutil.copytree(package, tmp_path / "package")
    file = tmp_path / "package/model/model.bin"
    cutter = sentencepiece.SentencePieceProcessor(model_file=str(package / "sentencepiece.model"))
    model = made(CTRANSLATE2["marian"].replace(vocab_size=cutter.get_piece_size()))
    with torch.no_grad():
        model.state_dict()["output.bias"][0] = 2.0
    file.write_bytes(binary(*variables(model), version=5))
    import_model(tmp_path / "package", tmp_path / "run")
    run = load(tmp_path / "run")
    settings = beam(**with_defaults({"max_tokens": 20}, run.beam_defaults))
    assert settings.replace_unknown
    program = ctranslate2.Translator(str(file.parent), compute_type="float32")
    plain = settings.model_copy(update={"replace_unknown": False})
    assert "Q" not in run.translate(["cat QQ"], plain)[0]
    for text in ["cat QQ", "<unk> 漢字 the", "ﬁ mat", "x☃y", "😀😀 red, </s> 😀", "the cat sat é on QQ"]:
        pieces = cutter.encode(text, out_type=str)
        given = {"beam_size": 4, "length_penalty": 0.2, "replace_unknowns": True, "max_decoding_length": 20}
        written = program.translate_batch([pieces], **given)[0].hypotheses[0]
        assert run.translate([text], settings) == ["".join(written).replace("▁", " ").removeprefix(" ")]


def test_a_folder_of_models_points_to_one(package: Path) -> None:
    with pytest.raises(InteropError, match=rf"it has no config\.json; name {package.name} in it$"):
        read_model(package.parent)


def test_paths_in_an_archive_lead_nowhere(package: Path, tmp_path: Path) -> None:
    outside = "../" * 12 + str(tmp_path)[1:] + "/outside"
    archive = packed(package, tmp_path / "a.argosmodel", sentencepiece_model=outside)
    with pytest.raises(InteropError, match=r"a\.argosmodel: it has no sentencepiece\.model"):
        argos.read(archive)
    archive = packed(package, tmp_path / "b.argosmodel", model_bin="/model/model.bin")
    with pytest.raises(InteropError, match=r"no source vocabulary|no sentencepiece\.model"):
        argos.read(archive)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.argosmodel", "b.argosmodel"]


def test_archives_that_are_none_or_too_much(package: Path, tmp_path: Path) -> None:
    whole = packed(package, tmp_path / "whole.argosmodel").read_bytes()
    file = tmp_path / "x.argosmodel"
    for data in (b"", b"no archive", whole[: len(whole) // 2], whole[:-30]):
        file.write_bytes(data)
        with pytest.raises(InteropError, match=r"x\.argosmodel: not a complete zip archive") as caught:
            argos.read(file)
        assert "\n" not in str(caught.value)
    damaged = bytearray(whole)
    place = whole.index(b"model/model.bin") + 400
    damaged[place : place + 40] = bytes(40)
    file.write_bytes(damaged)
    with pytest.raises(InteropError, match="not a complete zip archive"):
        argos.read(file)
    shutil.copytree(package, tmp_path / "p")
    (tmp_path / "p/model/model.bin").write_bytes(bytes(1 << 24))
    packed(tmp_path / "p", file)
    with pytest.raises(InteropError, match=r"its files would be 17,\d+,\d+ bytes; the bound is .*WEFT_LIMITS="):
        argos.read(file)
    (tmp_path / "p/model/model.bin").write_bytes(b"\6\0\0\0")
    packed(tmp_path / "p", file)
    with pytest.raises(InteropError, match=r"x\.argosmodel/model/model\.bin: truncated or damaged"):
        argos.read(file)
    (tmp_path / "p/model/model.bin").unlink()
    packed(tmp_path / "p", file)
    with pytest.raises(InteropError, match=r"0 files model/model\.bin in it; expected one"):
        argos.read(file)
