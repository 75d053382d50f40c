"""Argos Translate packages, as folders and as archives, complete and broken."""

import io
import json
import shutil
import tempfile
import zipfile
from pathlib import Path

import pytest
import torch
from tests.interop.ctranslate2_models import MODELS, SOURCE, TARGET, binary, logits, random_model, rebuild, variables

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
    """The folder of a package; the model's vocabulary is that of its SentencePiece model."""
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
    processor = sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())
    tokens = [processor.id_to_piece(id) for id in range(processor.get_piece_size())]
    (path / "model/shared_vocabulary.txt").write_text("\n".join(tokens) + "\n")
    model = random_model(MODELS["marian"].replace(vocab_size=len(tokens)))
    (path / "model/model.bin").write_bytes(binary(*variables(model), version=5))
    return path


def archived(package: Path, path: Path, **names: str) -> Path:
    """A package as a zip archive; `names` are other names for some files, with _ for the dot in the keyword."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(package.rglob("*")):
            if file.is_file():
                name = str(file.relative_to(package.parent))
                archive.write(file, names.get(file.name.replace(".", "_"), name))
    return path


def test_a_folder_and_its_archive_give_the_same_model(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    processor = sentencepiece.SentencePieceProcessor(model_file=str(package / "sentencepiece.model"))
    file = package / "model/model.bin"
    archive = archived(package, tmp_path / "en_de.argosmodel")
    bundles = [read_model(path) for path in (file, file.parent, package, archive)]
    assert list((tmp_path / "scratch").iterdir()) == []
    expected = logits(rebuild(bundles[0]), TARGET, SOURCE)
    for bundle in bundles:
        assert torch.equal(logits(rebuild(bundle), TARGET, SOURCE), expected)
        assert bundle.tokenizer is not None
        for line in LINES:
            assert bundle.tokenizer.encode(line) == processor.encode(line)
    assert [bundle.notes["generation"]["num_beams"] for bundle in bundles] == [5, 5, 4, 4]
    settings = {"patience": 1.0, "settled": "likely", "renormalise": True, "beams": 4, "replace_unknown": True}
    settings["length_penalty"] = {"kind": "power", "alpha": 0.2}
    assert search_settings(bundles[3].notes["generation"]) == (settings, [])
    assert bundles[2].origin == f"{package}: CTranslate2, float32"
    assert bundles[3].origin == f"{archive}: CTranslate2, float32"


def test_unknown_words_are_replaced_by_those_of_the_source(package: Path, tmp_path: Path) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed")
    shutil.copytree(package, tmp_path / "package")
    file = tmp_path / "package/model/model.bin"
    processor = sentencepiece.SentencePieceProcessor(model_file=str(package / "sentencepiece.model"))
    model = random_model(MODELS["marian"].replace(vocab_size=processor.get_piece_size()))
    with torch.no_grad():
        model.state_dict()["output.bias"][0] = 2.0
    file.write_bytes(binary(*variables(model), version=5))
    import_model(tmp_path / "package", tmp_path / "run")
    run = load(tmp_path / "run")
    settings = beam(**with_defaults({"max_tokens": 20}, run.beam_defaults))
    assert settings.replace_unknown
    assert "Q" not in run.translate(["cat QQ"], settings.model_copy(update={"replace_unknown": False}))[0]
    translator = ctranslate2.Translator(str(file.parent), compute_type="float32")
    options = {"beam_size": 4, "length_penalty": 0.2, "replace_unknowns": True, "max_decoding_length": 20}
    for text in ["cat QQ", "<unk> 漢字 the", "ﬁ mat", "x☃y", "😀😀 red, </s> 😀", "the cat sat é on QQ"]:
        pieces = processor.encode(text, out_type=str)
        best = translator.translate_batch([pieces], **options)[0].hypotheses[0]
        assert run.translate([text], settings) == ["".join(best).replace("▁", " ").removeprefix(" ")]


def test_a_folder_of_packages_is_refused_with_the_name_of_one(package: Path) -> None:
    with pytest.raises(InteropError, match=rf"it has no config\.json; name {package.name} in it$"):
        read_model(package.parent)


def test_paths_in_an_archive_are_not_followed(package: Path, tmp_path: Path) -> None:
    outside = "../" * 12 + str(tmp_path)[1:] + "/outside"
    archive = archived(package, tmp_path / "a.argosmodel", sentencepiece_model=outside)
    with pytest.raises(InteropError, match=r"a\.argosmodel: it has no sentencepiece\.model"):
        argos.read(archive)
    archive = archived(package, tmp_path / "b.argosmodel", model_bin="/model/model.bin")
    with pytest.raises(InteropError, match=r"no source vocabulary|no sentencepiece\.model"):
        argos.read(archive)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.argosmodel", "b.argosmodel"]


def test_damaged_archives_are_refused(package: Path, tmp_path: Path) -> None:
    file = archived(package, tmp_path / "x.argosmodel")
    content = file.read_bytes()
    offset = content.index(b"model/model.bin") + 400
    overwritten = content[:offset] + bytes(40) + content[offset + 40 :]
    for data in (b"", b"no archive", content[: len(content) // 2], content[:-30], overwritten):
        file.write_bytes(data)
        with pytest.raises(InteropError, match=r"x\.argosmodel: not a complete zip archive") as caught:
            argos.read(file)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (bytes(1 << 24), r"its files would be 17,\d+,\d+ bytes; the bound is .*WEFT_LIMITS="),
        (b"\6\0\0\0", r"x\.argosmodel/model/model\.bin: truncated or damaged"),
        (None, r"0 files model/model\.bin in it; expected one"),
    ],
    ids=["zip bomb", "truncated", "absent"],
)
def test_archives_of_broken_models_are_refused(
    content: bytes | None, message: str, package: Path, tmp_path: Path
) -> None:
    shutil.copytree(package, tmp_path / "p")
    model = tmp_path / "p/model/model.bin"
    if content is None:
        model.unlink()
    else:
        model.write_bytes(content)
    with pytest.raises(InteropError, match=message):
        argos.read(archived(tmp_path / "p", tmp_path / "x.argosmodel"))
