"""Tokens on disk: memory-mapped shards, an index with checksums, and the sections they were made from.

A prepared folder holds, for each shard, `NAME.tokens` (little-endian uint16 or uint32) and `NAME.sections` (int64,
shape (3, sections): a section's first token in the shard, its UTF-8 bytes, its document's number in the split).
`index.json` lists the shards and is written last: a folder without it is unfinished.

In a part of a text, what comes before isn't known, and a section's place in the whole text (`prepare.py`) stands where
its document's number would; `part.json` lists the shards.

That a file is what was written is noted beside it, in `.verified.json`, with what the system says of the file (size,
times, number): a file of which that is still true isn't read again. Where the folder can't be written, files are read
each time.
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
from weft.errors import ConfigError, DataError
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
NOTE = ".verified.json"
BLOCK = 1 << 20  # bytes read at once
# a file that changed so shortly ago may change again without another time: some systems keep whole seconds
SETTLED = 2.0


class Shard(Config):
    """One shard's line in the index: what it holds, and the checksums of its two files."""

    name: Annotated[str, Field(pattern=r"^(train|validation)-\d{5,}$")]
    split: Side
    tokens: NonNegativeInt
    sections: NonNegativeInt
    documents: NonNegativeInt  # those that begin in this shard; in a part those that end
    bytes: NonNegativeInt  # of UTF-8 text
    tokens_sha256: str
    sections_sha256: str

    @property
    def checksums(self) -> dict[str, str]:
        return {f"{self.name}.tokens": self.tokens_sha256, f"{self.name}.sections": self.sections_sha256}

    def verify(self, folder: Path) -> None:
        """Refuse the shard's files in a folder where they are not what was written."""
        verify(folder, self.checksums)


class Index(Config):
    """`index.json`: all a reader has to know."""

    format: Literal["weft tokens"] = "weft tokens"
    version: Literal[1] = 1
    dtype: Literal["uint16", "uint32"]
    vocab_size: NonNegativeInt
    tokenizer: str  # its fingerprint
    shards: tuple[Shard, ...]
    sha256: str | None = None  # of all the above; weft 0.1 wrote none

    @property
    def checksum(self) -> str:
        """The hash of what the index says."""
        return hashlib.sha256(self.model_dump_json(exclude={"sha256"}).encode()).hexdigest()


def dtype_for(vocab_size: int) -> Literal["uint16", "uint32"]:
    """The narrowest type that holds every id of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


class Tokens:
    """A long sequence of token ids with document borders: on disk in shards, or in memory."""

    def __init__(
        self, shards: Sequence[Array], sections: Sequence[Ids], scattered: Sequence[Array] | None = None
    ) -> None:
        """`shards[i]` holds ids (n,); `sections[i]` (3, m): first tokens within shard i, UTF-8 bytes, documents.
        `scattered` are the same ids, for windows here and there, of which nothing beside them should be read."""
        assert len(shards) == len(sections)
        self._shards, self._sections = list(shards), list(sections)
        self._scattered = self._shards if scattered is None else list(scattered)
        self._starts = np.cumsum([0, *(len(shard) for shard in shards)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, length: int) -> Ids:
        """Ids `start` to `start + length`, over shard borders: (length,)."""
        found = (self._shards[shard][inside] for shard, inside in self._spans(start, length))
        return np.concatenate([np.zeros(0, np.int64), *found])

    def windows(self, starts: Ids, length: int) -> Ids:
        """`length` ids from each of `starts` (rows,) on: (rows, length)."""
        shard = np.searchsorted(self._starts, starts, side="right") - 1
        inside = starts + length <= self._starts[shard + 1]
        out = np.empty((len(starts), length), dtype=np.int64)
        for each in np.unique(shard[inside]):
            mine = inside & (shard == each)
            out[mine] = self._scattered[each][(starts[mine] - self._starts[each])[:, None] + np.arange(length)]
        for row in np.flatnonzero(~inside):  # over a shard's border
            out[row] = self.read(int(starts[row]), length)
        return out

    def documents(self, start: int, length: int) -> Ids:
        """For each of these tokens the number of its document: (length,)."""
        found = [np.zeros(0, np.int64)]
        for shard, inside in self._spans(start, length):
            firsts, _, documents = self._sections[shard]
            found.append(documents[np.searchsorted(firsts, np.arange(inside.start, inside.stop), side="right") - 1])
        return np.concatenate(found)

    def first(self, tokens: int) -> "Tokens":
        """The first so many tokens. The bytes of a section that is cut are counted in proportion."""
        shards, sections, scattered = [], [], []
        starts = self._starts[:-1].tolist()
        for shard, other, start, table in zip(self._shards, self._scattered, starts, self._sections, strict=True):
            kept = min(len(shard), tokens - start)
            if kept <= 0:
                break
            begins = table[:, table[0] < kept].copy()
            last = begins.shape[1]
            end = int(table[0, last]) if last < table.shape[1] else len(shard)
            begins[1, -1] = begins[1, -1] * (kept - int(begins[0, -1])) // max(1, end - int(begins[0, -1]))
            shards.append(shard[:kept])
            scattered.append(other[:kept])
            sections.append(begins)
        return Tokens(shards, sections, scattered)

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
        """Each shard's ids as they are stored, and its sections (3, n)."""
        return list(zip(self._shards, self._sections, strict=True))

    @property
    def sections(self) -> Ids:
        """(3, sections): the first token of each section of the text, its UTF-8 bytes, its document's number."""
        shifts = (np.array([[start], [0], [0]]) for start in self._starts[:-1])
        return np.concatenate([np.zeros((3, 0), np.int64), *map(np.add, self._sections, shifts)], axis=1)

    @property
    def bytes(self) -> int:
        """The UTF-8 bytes of the text these tokens spell, for bits per byte."""
        return sum(int(section[1].sum()) for section in self._sections)


class Shards:
    """A prepared folder: `train` and `validation` tokens (None if nothing was held out)."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path, self.index = path, index
        self.train = self.tokens("train")
        self.validation = self.tokens("validation") if self.of("validation") else None

    @classmethod
    def open(cls, path: str | Path, name: str = INDEX) -> "Shards":
        """The folder that `weft prepare` wrote, with its index, or that of a part. Every file's size is checked."""
        path = Path(path)
        index = _read_index(path, name)
        width = np.dtype(index.dtype).itemsize
        sizes = {f"{shard.name}.tokens": shard.tokens * width for shard in index.shards}
        sizes |= {f"{shard.name}.sections": shard.sections * 24 for shard in index.shards}
        for file, size in sizes.items():
            try:
                found = (path / file).stat().st_size
            except OSError as error:
                raise DataError(f"{path / file}: cannot be read: {error.strerror}") from None
            if found != size:
                raise DataError(f"{path / file}: damaged: {found} bytes instead of {size}")
        return cls(path, index)

    def verify(self) -> None:
        """Refuse tokens and sections that are not what was written: every file is read, once."""
        verify(self.path, {name: sha for shard in self.index.shards for name, sha in shard.checksums.items()})

    def of(self, split: Side) -> list[Shard]:
        return [shard for shard in self.index.shards if shard.split == split]

    def tokens(self, split: Side) -> Tokens:
        ids, sections, scattered = [], [], []
        for shard in self.of(split):
            tokens = self.path / f"{shard.name}.tokens", np.dtype(self.index.dtype).newbyteorder("<"), (shard.tokens,)
            ids.append(mapped(*tokens))
            scattered.append(mapped(*tokens, scattered=True))
            sections.append(mapped(self.path / f"{shard.name}.sections", "<i8", (3, shard.sections)))
        return Tokens(ids, sections, scattered)

    @property
    def fingerprint(self) -> str:
        """A hash of every token and border, and of the tokenizer."""
        return self.index.checksum


def _read_index(path: Path, name: str) -> Index:
    file = path / name
    if not file.exists():
        if (path / PART).exists():
            merge = "weft prepare --merge PART... --out FOLDER"
            raise DataError(f"{path}: a part of a text; put all parts together: {merge}")
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
        raise DataError(f"{file}: damaged: it is not what was written")
    return index


def noted_tokenizer(folder: Path) -> dict[str, str]:
    """The fingerprint of the tokenizer that made a folder's tokens, where there are some and their index names it."""
    try:
        noted = json.loads(files.read_text(folder / INDEX))["tokenizer"]
    except (OSError, ValueError, LookupError, TypeError):  # no text of its own, or damage, which others report
        return {}
    return {"tokenizer": noted} if isinstance(noted, str) else {}


class HashedStream:
    """A file that is written from its beginning to its end; `sha256` is that of all that was written."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._digest = stream, hashlib.sha256()

    def write(self, raw: bytes) -> None:
        self._digest.update(raw)
        self._stream.write(raw)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def mapped(path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...], begin: int = 0, scattered: bool = False) -> Array:
    """An array in a file, from the byte `begin` on, read as it is used; `scattered`: here and there."""
    if 0 in shape:  # nothing can't be mapped
        return np.empty(shape, dtype)
    array = np.memmap(path, dtype, "r", begin, shape)
    if scattered and hasattr(mmap, "MADV_RANDOM"):  # else the system reads megabytes around every place
        array._mmap.madvise(mmap.MADV_RANDOM)  # type: ignore[attr-defined]
    return array.view(np.ndarray)  # slices of a memmap cost ten times as much


def verify(folder: Path, expected: Mapping[str, str], blocks: Callable[[Path], Iterable[bytes]] | None = None) -> None:
    """Refuse a folder in which a file is not the one that its checksum (SHA-256, by its name) was taken of. `blocks`
    are the bytes that a file's checksum is of; by default they are all of its own."""
    stamps: dict[str, list[int]] = {}
    for name in expected:
        try:
            found = os.stat(folder / name)
        except OSError as error:
            raise DataError(f"{folder / name}: cannot be read: {error.strerror}") from None
        if not stat.S_ISREG(found.st_mode):
            raise DataError(f"{folder / name}: damaged: not a file")
        stamps[name] = [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]
    try:
        noted = json.loads(files.read_text(folder / NOTE))
    except (OSError, ValueError):
        noted = {}
    noted = noted if isinstance(noted, dict) else {}
    unread = [name for name, sha in expected.items() if noted.get(name) != [*stamps[name], sha]]
    if not unread:
        return
    total = sum(stamps[name][0] for name in unread)
    with bar("verifying", total, unit="bytes") as advance, ThreadPoolExecutor(THREADS, "verify") as pool:
        hashes = pool.map(lambda name: sha256((blocks or file_blocks)(folder / name), advance), unread)
        try:
            for name, sha in zip(unread, hashes, strict=True):
                if sha != expected[name]:
                    raise DataError(f"{folder / name}: damaged: it is not what was written")
        except OSError as error:
            raise DataError(f"{error.filename or folder}: cannot be read: {error.strerror or error}") from None
    now = time.time_ns()
    settled = {name: [*stamps[name], expected[name]] for name in expected if stamps[name][1] < now - SETTLED * 1e9}
    if settled:
        with suppress(OSError):
            write_text(folder / NOTE, json.dumps({**noted, **settled}, indent=1) + "\n")


def file_blocks(path: Path) -> Iterable[bytes]:
    with files.open_regular(path) as file:
        yield from iter(lambda: file.read(BLOCK), b"")


def sha256(blocks: Iterable[bytes], advance: Advance = lambda size: None) -> str:
    """The checksum of these bytes; `advance` gets their sizes."""
    digest = hashlib.sha256()
    for block in blocks:
        digest.update(block)
        advance(len(block))
    return digest.hexdigest()
