"""Writing a folder of tokens, resumably: a plan, which determines all bytes, and a journal of the finished shards.

A shard enters the journal once it is complete. After a crash, the same plan writes only the missing shards, and the
result has the same bytes as an uninterrupted one. The index is written last and marks the folder as finished.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from weft.data.shards import INDEX, PART, PLAN, SIDES, Array, HashedStream, Index, Shard, Shards, Side, dtype_for
from weft.errors import DataError, TokenizerError, WeftError
from weft.progress import warn
from weft.storage import files
from weft.storage.files import locked, rename, sync, write_bytes, write_text
from weft.text.tokenizer import Tokenizer

FORMAT = "weft plan"
JOURNAL = "journal.jsonl"

Plan = dict[str, Any]


def write_folder(out: Path, plan: Plan, tokenizer: Tokenizer, *, write: Callable[[list[Shard]], list[Shard]]) -> Shards:
    """Write or complete the folder `out`. `write` is called with the finished shards, writes the others and returns
    all of them."""
    index = PART if "part" in plan else INDEX
    try:
        done = _begin(out, plan, index)
        files.sweep(out)
        if done is None and (finished := _open_intact(out, index, tokenizer)) is not None:
            return finished
        done = done or []
        with locked(out / PLAN):
            tokenizer.save(out)
            for path in out.glob("*.partial"):
                path.unlink()
            write_text(out / JOURNAL, "".join(shard.model_dump_json() + "\n" for shard in done))
            try:
                shards = write(done)
            except WeftError:  # the text is unusable: remove everything that this call created
                if not done:
                    for pattern in ("train-*", "validation-*", "tokenizer*.json", JOURNAL, PLAN):
                        for path in out.glob(pattern):
                            path.unlink()
                    if not any(out.iterdir()):
                        out.rmdir()
                raise
            ordered = tuple(sorted(shards, key=lambda shard: shard.name))
            size = tokenizer.vocab_size
            listing = Index(dtype=dtype_for(size), vocab_size=size, tokenizer=tokenizer.fingerprint, shards=ordered)
            listing = listing.replace(sha256=listing.checksum)
            write_text(out / index, json.dumps(listing.model_dump(), indent=1) + "\n")  # the folder is now finished
            (out / JOURNAL).unlink()
    except BlockingIOError:
        raise DataError(f"{out}: another `weft prepare` is writing there; wait for it") from None
    except ChildProcessError as error:
        advice = "the same command continues, with fewer --jobs if need be"
        raise DataError(f"{out}: a process that encodes text died: {error}; {advice}") from None
    except OSError as error:
        raise DataError(f"{error.filename or out}: cannot be written: {error.strerror or error}") from None
    return Shards(out, listing)


def read_plan(folder: Path) -> Plan:
    """Read the plan of a folder that `weft prepare` wrote or is writing; {} if there is none."""
    try:
        plan = json.loads(files.read_text(folder / PLAN))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    except OSError as error:
        raise DataError(f"{folder / PLAN}: cannot be read: {error.strerror}") from None
    return plan if isinstance(plan, dict) and plan.get("format") == FORMAT else {}


def differing_keys(one: Plan, other: Plan) -> list[str]:
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


class ShardWriter:
    """Writes one shard to a temporary file; `close` syncs and renames it, and returns its entry of the index."""

    def __init__(self, path: Path, split: Side, dtype: str) -> None:
        """`path`: the shard's path without a suffix."""
        self.tokens = 0
        self._path, self._split, self._dtype = path, split, np.dtype(dtype).newbyteorder("<")
        self._columns = (array("q"), array("q"), array("q"))
        self._partial = path.with_suffix(".tokens.partial")
        self.file = self._partial.open("wb")
        self._stream = HashedStream(self.file)

    def add(self, ids: Array, size: int, document: int) -> None:
        """Add a section: its ids, the UTF-8 bytes of its text, and the number of its document."""
        for column, value in zip(self._columns, (self.tokens, size, document), strict=True):
            column.append(value)
        self._write(ids)

    def extend(self, ids: Array, sections: Array) -> None:
        """Add several sections: their ids (n,), and (3, m): their offsets in these ids, bytes and documents."""
        offsets, sizes, documents = sections
        for column, values in zip(self._columns, (offsets + self.tokens, sizes, documents), strict=True):
            column.frombytes(values.astype(np.int64).tobytes())
        self._write(ids)

    def _write(self, ids: Array) -> None:
        self._stream.write(ids.astype(self._dtype, copy=False).tobytes())
        self.tokens += len(ids)

    def close(self, first_document: int | None) -> Shard:
        """Finish the shard. `first_document` is the number of the first document that may begin in it, one more than
        any before; None for a shard of a part, whose sections have positions instead of document numbers."""
        table = np.array(self._columns, dtype="<i8")
        sections = table.tobytes()
        write_bytes(self._path.with_suffix(".sections"), sections)
        sync(self.file)
        self.file.close()
        rename(self._partial, self._path.with_suffix(".tokens"))
        documents = int((table[2] & 1).sum()) if first_document is None else int(table[2, -1]) + 1 - first_document
        return Shard(
            name=self._path.name,
            split=self._split,
            tokens=self.tokens,
            sections=table.shape[1],
            documents=documents,
            bytes=int(table[1].sum()),
            tokens_sha256=self._stream.sha256,
            sections_sha256=hashlib.sha256(sections).hexdigest(),
        )


class FolderWriter:
    """Writes the shards of both sides, one open shard per side; `shards` are all finished ones."""

    def __init__(self, out: Path, plan: Plan, *, dtype: str, done: Sequence[Shard]) -> None:
        self.shards = list(done)
        # sections of each side in shards that an earlier process finished: always the side's first
        self.finished_sections = {side: sum(shard.sections for shard in done if shard.split == side) for side in SIDES}
        self._out, self._dtype, self._max_tokens = out, dtype, int(plan["shard_tokens"])
        self._numbered = "part" not in plan
        self._open: dict[Side, ShardWriter] = {}

    def add(self, side: Side, ids: Array, *, size: int, document: int) -> None:
        """Add a section to a side; the section that reaches the size of a shard is its last."""
        writer = self._writer(side)
        writer.add(ids, size, document)
        if writer.tokens >= self._max_tokens:
            self._finish(side)

    def extend(self, side: Side, ids: Array, sections: Array) -> None:
        """Add several sections, as in `ShardWriter.extend`; shards end where `add` would end them."""
        offsets = np.append(sections[0], len(ids))
        start, count = 0, sections.shape[1]
        while start < count:
            writer = self._writer(side)
            full = offsets[start + 1 :] - offsets[start] >= self._max_tokens - writer.tokens
            stop = start + int(np.argmax(full)) + 1 if full.any() else count
            shift = np.array([[offsets[start]], [0], [0]])
            writer.extend(ids[offsets[start] : offsets[stop]], sections[:, start:stop] - shift)
            if full.any():
                self._finish(side)
            start = stop

    def _writer(self, side: Side) -> ShardWriter:
        if side not in self._open:
            number = sum(shard.split == side for shard in self.shards)
            self._open[side] = ShardWriter(self._out / f"{side}-{number:05d}", side, self._dtype)
        return self._open[side]

    def _finish(self, side: Side) -> None:
        documents = sum(shard.documents for shard in self.shards if shard.split == side)
        self.shards.append(self._open.pop(side).close(documents if self._numbered else None))
        record_shard(self._out, self.shards[-1])

    @contextmanager
    def finishing(self) -> Iterator[None]:
        """Finish the open shards on success; on an exception, leave them unfinished."""
        try:
            yield
            for side in sorted(self._open):
                self._finish(side)
        finally:
            for writer in self._open.values():
                writer.file.close()


def record_shard(out: Path, shard: Shard) -> None:
    """Append a finished shard to the journal and sync it; from then on, the shard is not written again."""
    with (out / JOURNAL).open("a", encoding="utf-8") as stream:
        stream.write(shard.model_dump_json() + "\n")
        sync(stream)


def _begin(out: Path, plan: Plan, index: str) -> list[Shard] | None:
    """Create the folder and write its plan, or read its journal; return the finished shards, None if all are."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file; give a folder to write to")
    out.mkdir(parents=True, exist_ok=True)
    if not (out / PLAN).exists():
        if any(path.name != PLAN and not path.name.startswith(f".{PLAN}.") for path in out.iterdir()):
            raise DataError(f"{out}: already contains other files; give a new or an empty folder")
        write_text(out / PLAN, json.dumps(plan, indent=1) + "\n")
        return []
    existing = read_plan(out)
    if not existing:
        raise DataError(f"{out / PLAN}: not a plan that `weft prepare` wrote; give a new folder")
    if keys := ", ".join(differing_keys(plan, existing)):
        what = f"was prepared from something else (differs in: {keys})"
        raise DataError(f"{out}: {what}; remove it or give another folder")
    if (out / index).exists():
        return None
    shards: list[Shard] = []
    with suppress(FileNotFoundError, ValidationError, DataError):  # a damaged line or shard ends the journal
        for line in files.read_text(out / JOURNAL).splitlines():
            shard = Shard.model_validate_json(line)
            shard.verify(out)
            shards.append(shard)
    return shards


def _open_intact(out: Path, index: str, tokenizer: Tokenizer) -> Shards | None:
    try:
        shards = Shards.open(out, index)
        shards.verify()
        if Tokenizer.load(out).fingerprint != tokenizer.fingerprint:
            raise DataError(f"{out}: damaged: its tokenizer is not the one in its plan")
    except (DataError, TokenizerError) as error:
        warn(f"{error}; preparing it again")
        return None
    return shards
