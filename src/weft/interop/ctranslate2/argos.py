"""Packages of Argos Translate: a CTranslate2 folder `model`, a SentencePiece model beside it, and things weft has no
use for. A package is a folder, or a zip archive of that folder whose name ends in .argosmodel.

Of an archive only the files that are needed are unpacked, under names of ours, into a folder that is removed again: a
path in it can lead nowhere. How much they may become is bounded before the first byte is written.
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
SEARCH = {"num_beams": 4, "length_penalty": 0.2}  # how Argos Translate has CTranslate2 search
ALIGNED = {"layer": -1, "heads": 1}  # what an unknown word looks at, by which it is replaced
MAX_UNPACKED_BYTES = 1 << 33  # of all files
MAX_GROWTH = 32  # times the archive's bytes that they may become: weights are hard to compress
WRONG = (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError, ValueError, zlib.error, lzma.LZMAError)


def recognises(path: Path) -> bool:
    """Whether a path is a package's archive, or the folder of one."""
    return (path.suffix == ENDING and path.is_file()) or ctranslate2.recognises(path / FOLDER)


def read(path: Path, tokenizer: Path | None = None) -> ModelBundle:
    """The encoder–decoder of a package; `tokenizer` is used for the target if it is given."""
    if path.is_dir():
        return _read_folder(path, path, tokenizer)
    refuse_pointer(path)
    with tempfile.TemporaryDirectory(prefix="weft-", ignore_cleanup_errors=True) as place:
        try:
            with zipfile.ZipFile(path) as archive:
                _unpack(path, archive, Path(place))
        except WRONG as error:
            if isinstance(error, InteropError):
                raise
            raise InteropError(f"{path}: not a whole zip archive, as .argosmodel files are") from None
        except OSError as error:
            raise InteropError(f"{path}: cannot be unpacked into {place}: {error.strerror or error}") from None
        try:
            return _read_folder(Path(place), path, tokenizer)  # whose weights stay mapped once the file has no name
        except WeftError as error:
            raise InteropError(str(error).replace(place, str(path))) from None


def _read_folder(folder: Path, path: Path, tokenizer: Path | None) -> ModelBundle:
    if not (folder / PIECES).is_file() and tokenizer is None:
        raise InteropError(f"{path}: it has no {PIECES}, the one tokenizer that weft reads of Argos Translate's")
    bundle = ctranslate2.read(folder / FOLDER, tokenizer)
    file = open_file(folder / FOLDER / ctranslate2.MODEL)
    aligned = [file.number(f"decoder/alignment_{key}", default=usual) for key, usual in ALIGNED.items()]
    notes = {"generation": ctranslate2.SEARCH | SEARCH | {"replace_unknowns": aligned == list(ALIGNED.values())}}
    return replace(bundle, origin=bundle.origin.replace(str(folder / FOLDER), str(path)), notes=notes)


def _unpack(path: Path, archive: zipfile.ZipFile, place: Path) -> None:
    entries = {PurePosixPath(entry.filename): entry for entry in archive.infolist() if not entry.is_dir()}
    models = [each for each in entries if each.parts[-2:] == (FOLDER, ctranslate2.MODEL)]
    if len(models) != 1:
        raise InteropError(f"{path}: {len(models)} files {FOLDER}/{ctranslate2.MODEL} in it; expected one")
    package = models[0].parent.parent
    names = {package / FOLDER / name: f"{FOLDER}/{name}" for name in MODEL_FILES} | {package / PIECES: PIECES}
    wanted = {names[each]: entry for each, entry in entries.items() if each in names}
    size = sum(entry.file_size for entry in wanted.values())
    bound = min(MAX_UNPACKED_BYTES, MAX_GROWTH * path.stat().st_size)
    refuse_beyond(size, bound, f"{path}: its files would be {size:,} bytes")
    (place / FOLDER).mkdir()
    for name, entry in wanted.items():
        with archive.open(entry) as packed, open(place / name, "wb") as file:
            shutil.copyfileobj(packed, file)  # which gives as many bytes as the entry says, or an error
