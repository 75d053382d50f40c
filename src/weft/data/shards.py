"""Tokens on disk: memory-mapped shards, an index with checksums, and the sections of text behind the tokens.

For each shard, a prepared folder holds `NAME.tokens` (little-endian uint16 or uint32) and `NAME.sections` (int64, shape
(3, sections): offset of the section's first token in the shard, its UTF-8 bytes, the number of its document in the
split). `index.json` lists the shards and is written last: a folder without it is unfinished.

A part of a text does not know how many documents precede it: its sections have their position in the whole text
(`prepare.py`) instead of the document's number, and `part.json` lists its shards.

Files whose checksums have been verified are recorded in `.verified.json`, each with its size, times and inode. While
these stay the same, the file is not hashed again. If the folder is read-only, files are hashed each time.
"""

import hashlib
import json
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import IO, Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, NonNegativeInt

from weft.config import Config, validate
from weft.errors import ConfigError, DataError, os_errors
from weft.progress import Advance, bar
from weft.storage import files
from weft.storage.files import THREADS, write_text
from weft.storage.untrusted import parse_json, read_text

Array = npt.NDArray[Any]
Ids = npt.NDArray[np.int64]
Side = Literal["train", "validation"]
SIDES: tuple[Side, ...] = ("train", "validation")
INDEX = "index.json"
PART = "part.json"
PLAN = "plan.json"
VERIFIED = ".verified.json"
BLOCK = 1 << 20  # bytes per read
# seconds: a more recent file may change again with the same time stamp, because some systems store whole seconds
SETTLED = 2.0


class Shard(Config):
    """Entry of one shard in the index: its counts and the checksums of its two files."""

    name: Annotated[str, Field(pattern=r"^(train|validation)-\d{5,}$")]
    split: Side
    tokens: NonNegativeInt
    sections: NonNegativeInt
    documents: NonNegativeInt  # those that begin in this shard; in a part, those that end in it
    bytes: NonNegativeInt  # of UTF-8 text
    tokens_sha256: str
    sections_sha256: str

    @property
    def checksums(self) -> dict[str, str]:
        return {f"{self.name}.tokens": self.tokens_sha256, f"{self.name}.sections": self.sections_sha256}

    def verify(self, folder: Path) -> None:
        """Verify the checksums of the shard's files in a folder; DataError if one is damaged."""
        verify(folder, self.checksums)


class Index(Config):
    """Content of `index.json`."""

    format: Literal["weft tokens"] = "weft tokens"
    version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocab_size: NonNegativeInt
    tokenizer: str  # its fingerprint
    shards: tuple[Shard, ...]
    sha256: str | None = None  # of the fields above; absent from folders of weft 0.1

    @property
    def checksum(self) -> str:
        """Hash of the index, its own checksum excluded."""
        return hashlib.sha256(self.model_dump_json(exclude={"sha256"}).encode()).hexdigest()


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Narrowest dtype that holds every id of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class Tokens:
    """A long sequence of token ids with document boundaries: on disk in shards, or in memory."""

    def __init__(self, shards: Sequence[Array], sections: Sequence[Ids], random_access: Sequence[Array] | None = None):
        """`shards[i]` holds ids (n,); `sections[i]` (3, m): offsets within shard i, UTF-8 bytes, documents.
        `random_access` are the same ids mapped without read-ahead, for windows at random offsets."""
        assert len(shards) == len(sections)
        self._shards, self._sections = list(shards), list(sections)
        self._random_access = self._shards if random_access is None else list(random_access)
        self._starts = np.cumsum([0, *(len(shard) for shard in shards)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, length: int) -> Ids:
        """Ids of [start, start + length), across shard boundaries: (length,)."""
        ids = (self._shards[shard][inside] for shard, inside in self._spans(start, length))
        return np.concatenate([np.zeros(0, np.int64), *ids])

    def windows(self, starts: Ids, length: int) -> Ids:
        """Windows of `length` ids that begin at `starts` (rows,): (rows, length)."""
        shard = np.searchsorted(self._starts, starts, side="right") - 1
        inside = starts + length <= self._starts[shard + 1]
        out = np.empty((len(starts), length), dtype=np.int64)
        for number in np.unique(shard[inside]):
            rows = inside & (shard == number)
            offsets = starts[rows] - self._starts[number]
            out[rows] = self._random_access[number][offsets[:, None] + np.arange(length)]
        for row in np.flatnonzero(~inside):  # across a shard boundary
            out[row] = self.read(int(starts[row]), length)
        return out

    def documents(self, start: int, length: int) -> Ids:
        """Document number of each token in [start, start + length): (length,)."""
        numbers = [np.zeros(0, np.int64)]
        for shard, inside in self._spans(start, length):
            offsets, _, documents = self._sections[shard]
            numbers.append(documents[np.searchsorted(offsets, np.arange(inside.start, inside.stop), side="right") - 1])
        return np.concatenate(numbers)

    def first(self, tokens: int) -> "Tokens":
        """Return the first `tokens` tokens. If that cuts a section, its bytes are reduced in proportion."""
        shards, sections, random_access = [], [], []
        starts = self._starts[:-1].tolist()
        for shard, other, start, table in zip(self._shards, self._random_access, starts, self._sections, strict=True):
            length = min(len(shard), tokens - start)
            if length <= 0:
                break
            kept = table[:, table[0] < length].copy()
            end = int(table[0, kept.shape[1]]) if kept.shape[1] < table.shape[1] else len(shard)
            kept[1, -1] = kept[1, -1] * (length - int(kept[0, -1])) // max(1, end - int(kept[0, -1]))
            shards.append(shard[:length])
            random_access.append(other[:length])
            sections.append(kept)
        return Tokens(shards, sections, random_access)

    def _spans(self, start: int, length: int) -> Iterator[tuple[int, slice]]:
        stop = start + length
        assert 0 <= start <= stop <= len(self), f"{start} + {length} of {len(self)} tokens"
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            before, end = self._starts[shard : shard + 2].tolist()
            yield shard, slice(start - before, min(stop, end) - before)
            start, shard = end, shard + 1

    @property
    def shards(self) -> list[tuple[Array, Ids]]:
        """Ids of each shard in their stored dtype, and its sections (3, n)."""
        return list(zip(self._shards, self._sections, strict=True))

    @property
    def sections(self) -> Ids:
        """(3, sections): offset of the first token of each section, its UTF-8 bytes, its document's number."""
        shifts = (np.array([[start], [0], [0]]) for start in self._starts[:-1])
        return np.concatenate([np.zeros((3, 0), np.int64), *map(np.add, self._sections, shifts)], axis=1)

    @property
    def bytes(self) -> int:
        """UTF-8 bytes of the text of these tokens, for bits per byte."""
        return sum(int(section[1].sum()) for section in self._sections)


class Shards:
    """A prepared folder: `train` and `validation` tokens (None if nothing was held out)."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path, self.index = path, index
        self.train = self.tokens("train")
        self.validation = self.tokens("validation") if self.of("validation") else None

    @classmethod
    def open(cls, path: str | Path, name: str = INDEX) -> "Shards":
        """Open a folder that `weft prepare` wrote by its index, or a part by its `part.json`; checks all file sizes."""
        path = Path(path)
        index = _read_index(path, name)
        width = np.dtype(index.dtype).itemsize
        sizes = {f"{shard.name}.tokens": shard.tokens * width for shard in index.shards}
        sizes |= {f"{shard.name}.sections": shard.sections * 24 for shard in index.shards}
        for file, expected in sizes.items():
            with os_errors(path / file):
                size = (path / file).stat().st_size
            if size != expected:
                raise DataError(f"{path / file}: damaged: {size} bytes instead of {expected}")
        return cls(path, index)

    def verify(self) -> None:
        """Verify the checksums of all files; DataError if one is damaged."""
        verify(self.path, {name: sha for shard in self.index.shards for name, sha in shard.checksums.items()})

    def of(self, split: Side) -> list[Shard]:
        return [shard for shard in self.index.shards if shard.split == split]

    def tokens(self, split: Side) -> Tokens:
        ids, sections, random_access = [], [], []
        dtype = np.dtype(self.index.dtype).newbyteorder("<")
        for shard in self.of(split):
            path = self.path / f"{shard.name}.tokens"
            ids.append(map_array(path, dtype, (shard.tokens,)))
            random_access.append(map_array(path, dtype, (shard.tokens,), random_access=True))
            sections.append(map_array(path.with_suffix(".sections"), "<i8", (3, shard.sections)))
        return Tokens(ids, sections, random_access)

    @property
    def fingerprint(self) -> str:
        """Hash of all tokens and boundaries, and of the tokenizer."""
        return self.index.checksum


def _read_index(path: Path, name: str) -> Index:
    file = path / name
    if not file.exists():
        if (path / PART).exists():
            merge = "weft prepare --merge PART... --out FOLDER"
            raise DataError(f"{path}: a part of a text; merge all parts: {merge}")
        if (path / PLAN).exists():
            raise DataError(f"{path}: unfinished; run the same `weft prepare` again and it continues")
        what = "not a folder that `weft prepare` wrote" if path.exists() else "no such folder"
        raise DataError(f"{path}: {what}")
    tree = parse_json(read_text(file, DataError), f"{file}: damaged", DataError)
    try:
        index = validate(Index, tree if isinstance(tree, dict) else {})
    except ConfigError as error:
        raise DataError(f"{file}: not an index this weft reads: {error}") from None
    if index.sha256 not in (None, index.checksum):
        raise DataError(f"{file}: damaged: the checksum is wrong")
    return index


def tokenizer_note(folder: Path) -> dict[str, str]:
    """Return {"tokenizer": fingerprint} from the index of a prepared folder; {} if it has none."""
    try:
        fingerprint = json.loads(files.read_text(folder / INDEX))["tokenizer"]
    except (OSError, ValueError, LookupError, TypeError):  # not prepared, or damaged, which `Shards.open` reports
        return {}
    return {"tokenizer": fingerprint} if isinstance(fingerprint, str) else {}


class HashedStream:
    """Writes sequentially to a file; `sha256` is the hash of everything written so far."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._digest = stream, hashlib.sha256()

    def write(self, raw: bytes) -> None:
        self._digest.update(raw)
        self._stream.write(raw)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def map_array(
    path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...], *, begin: int = 0, random_access: bool = False
) -> Array:
    """Memory-map an array that begins at byte `begin` of a file; with `random_access`, without read-ahead."""
    if 0 in shape:  # an empty range can't be mapped
        return np.empty(shape, dtype)
    array = np.memmap(path, dtype, "r", begin, shape)
    if random_access and hasattr(mmap, "MADV_RANDOM"):  # otherwise the system reads megabytes around every access
        array._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    return array.view(np.ndarray)  # slicing a memmap costs ten times as much


def file_blocks(path: Path) -> Iterable[bytes]:
    """Yield the bytes of a regular file in blocks."""
    with files.open_regular(path) as file:
        yield from iter(lambda: file.read(BLOCK), b"")


def verify(folder: Path, expected: Mapping[str, str], blocks: Callable[[Path], Iterable[bytes]] = file_blocks) -> None:
    """Raise DataError unless every file of `expected`, name → SHA-256, has that checksum. `blocks` yields the bytes of
    a file that its checksum covers."""
    stamps: dict[str, list[int]] = {}
    for name in expected:
        with os_errors(folder / name):
            status = os.stat(folder / name)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"{folder / name}: damaged: not a file")
        stamps[name] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino]
    try:
        verified = json.loads(files.read_text(folder / VERIFIED))
    except (OSError, ValueError):
        verified = {}
    verified = verified if isinstance(verified, dict) else {}
    unverified = [name for name, sha in expected.items() if verified.get(name) != [*stamps[name], sha]]
    if not unverified:
        return
    total = sum(stamps[name][0] for name in unverified)
    with bar("verifying", total, unit="bytes") as advance, ThreadPoolExecutor(THREADS, "verify") as pool:
        hashes = pool.map(lambda name: sha256(blocks(folder / name), advance), unverified)
        try:
            for name, sha in zip(unverified, hashes, strict=True):
                if sha != expected[name]:
                    raise DataError(f"{folder / name}: damaged: the checksum is wrong")
        except OSError as error:
            raise DataError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from None
    now = time.time_ns()
    settled = {name: [*stamps[name], expected[name]] for name in expected if stamps[name][1] < now - SETTLED * 1e9}
    if settled:
        with suppress(OSError):
            write_text(folder / VERIFIED, json.dumps({**verified, **settled}, indent=1) + "\n")


def sha256(blocks: Iterable[bytes], advance: Advance = lambda size: None) -> str:
    """SHA-256 of these blocks; `advance` is called with the size of each."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
        advance(len(block))
    return digest.hexdigest()
