"""Read packages of Argos Translate: a CTranslate2 folder `model`, a SentencePiece model, and files that weft ignores.
A package is a folder, or a zip archive of that folder with the suffix .argosmodel.

Only the necessary files of an archive are extracted, under fixed names, into a temporary folder, so that its paths
cannot lead outside. Their size is bounded before the first byte is written.
"""

import lzma
import shutil
import tempfile
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path, PurePosixPath

from weft.errors import InteropError, WeftError
from weft.interop.bundle import ModelBundle
from weft.interop.ctranslate2 import ctranslate2
from weft.interop.ctranslate2.file import open_file
from weft.storage.untrusted import refuse_beyond, refuse_pointer

ENDING, FOLDER, PIECES = ".argosmodel", "model", "sentencepiece.model"
MODEL_FILES = {
    ctranslate2.MODEL,
    ctranslate2.CONFIG,
    *(f"{side}_vocabulary.{end}" for side in ("shared", "source", "target") for end in ("json", "txt")),
}
SEARCH = {"num_beams": 4, "length_penalty": 0.2}  # Argos Translate's settings of CTranslate2's search
ALIGNED = {"layer": -1, "heads": 1}  # the attention by which unknown words are replaced
MAX_EXTRACTED_BYTES = 1 << 33  # of all files
MAX_RATIO = 32  # of extracted to archived bytes: weights are hard to compress
DAMAGE = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, zlib.error, lzma.LZMAError)


def recognises(path: Path) -> bool:
    """Return whether a path is the archive or the folder of a package."""
    return (path.suffix == ENDING and path.is_file()) or ctranslate2.recognises(path / FOLDER)


def read(path: Path, tokenizer: Path | None = None) -> ModelBundle:
    """Read the encoder–decoder of a package; `tokenizer`, if given, replaces that of the target."""
    if path.is_dir():
        return _read_folder(path, path, tokenizer)
    refuse_pointer(path)
    with tempfile.TemporaryDirectory(prefix="weft-", ignore_cleanup_errors=True) as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                _extract(path, archive, Path(folder))
        except InteropError:
            raise
        except DAMAGE:
            raise InteropError(f"{path}: not a complete zip archive, as .argosmodel files are") from None
        except OSError as error:
            raise InteropError(f"{path}: cannot be extracted to {folder}: {error.strerror or error}") from None
        try:
            return _read_folder(Path(folder), path, tokenizer)  # weights stay mapped after the files are deleted
        except WeftError as error:
            raise InteropError(str(error).replace(folder, str(path))) from None


def _read_folder(folder: Path, path: Path, tokenizer: Path | None) -> ModelBundle:
    if not (folder / PIECES).is_file() and tokenizer is None:
        raise InteropError(f"{path}: it has no {PIECES}, the only tokenizer of Argos Translate that weft reads")
    bundle = ctranslate2.read(folder / FOLDER, tokenizer)
    file = open_file(folder / FOLDER / ctranslate2.MODEL)
    aligned = [file.number(f"decoder/alignment_{key}", default=default) for key, default in ALIGNED.items()]
    notes = {"generation": ctranslate2.SEARCH | SEARCH | {"replace_unknowns": aligned == list(ALIGNED.values())}}
    return replace(bundle, origin=bundle.origin.replace(str(folder / FOLDER), str(path)), notes=notes)


def _extract(path: Path, archive: zipfile.ZipFile, folder: Path) -> None:
    entries = {PurePosixPath(entry.filename): entry for entry in archive.infolist() if not entry.is_dir()}
    models = [name for name in entries if name.parts[-2:] == (FOLDER, ctranslate2.MODEL)]
    if len(models) != 1:
        raise InteropError(f"{path}: {len(models)} files {FOLDER}/{ctranslate2.MODEL} in it; expected one")
    package = models[0].parent.parent
    names = {package / FOLDER / name: f"{FOLDER}/{name}" for name in MODEL_FILES} | {package / PIECES: PIECES}
    needed = {names[name]: entry for name, entry in entries.items() if name in names}
    size = sum(entry.file_size for entry in needed.values())
    bound = min(MAX_EXTRACTED_BYTES, MAX_RATIO * path.stat().st_size)
    refuse_beyond(size, bound, f"{path}: its files would be {size:,} bytes")
    (folder / FOLDER).mkdir()
    for name, entry in needed.items():
        with archive.open(entry) as content, open(folder / name, "wb") as file:
            shutil.copyfileobj(content, file)  # raises if there are more bytes than `file_size`
