"""A folder of tokens while it is written: a plan, which is all that decides the bytes, and a journal of what is done.

A shard is noted once it is whole. Whoever was killed and starts again with the same plan writes only what is missing,
and ends with the same bytes as one that was never stopped. The index comes last, and makes the folder a finished one.
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


def written(out: Path, plan: Plan, tokenizer: Tokenizer, write: Callable[[list[Shard]], list[Shard]]) -> Shards:
    """The finished folder. `write` gets the shards that are done already, makes the others and returns them all."""
    index = PART if "part" in plan else INDEX
    try:
        done = _begin(out, plan, index)
        files.sweep(out)
        if done is None and (finished := _intact(out, index, tokenizer)) is not None:
            return finished
        done = done or []
        with locked(out / PLAN):
            tokenizer.save(out)
            for path in out.glob("*.partial"):
                path.unlink()
            write_text(out / JOURNAL, "".join(shard.model_dump_json() + "\n" for shard in done))
            try:
                shards = write(done)
            except WeftError:  # the text itself is wrong: what began with this call goes with it
                if not done:
                    for pattern in ("train-*", "validation-*", "tokenizer*.json", JOURNAL, PLAN):
                        for path in out.glob(pattern):
                            path.unlink()
                    if not any(out.iterdir()):
                        out.rmdir()
                raise
            ordered = tuple(sorted(shards, key=lambda shard: shard.name))
            size = tokenizer.vocab_size
            made = Index(dtype=dtype_for(size), vocab_size=size, tokenizer=tokenizer.fingerprint, shards=ordered)
            made = made.replace(sha256=made.checksum)
            write_text(out / index, json.dumps(made.model_dump(), indent=1) + "\n")  # now the folder is finished
            (out / JOURNAL).unlink()
    except BlockingIOError:
        raise DataError(f"{out}: another `weft prepare` is writing there; wait for it") from None
    except ChildProcessError as error:
        again = "the same command continues, with fewer --jobs if need be"
        raise DataError(f"{out}: a process that encodes text died: {error}; {again}") from None
    except OSError as error:
        raise DataError(f"{error.filename or out}: cannot be written: {error.strerror or error}") from None
    return Shards(out, made)


def read_plan(folder: Path) -> Plan:
    """What a folder was, or is to be, made from; empty where `weft prepare` wrote none."""
    try:
        found = json.loads(files.read_text(folder / PLAN))
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    except OSError as error:
        raise DataError(f"{folder / PLAN}: cannot be read: {error.strerror}") from None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else {}


def differing(one: Plan, other: Plan) -> list[str]:
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]


class ShardWriter:
    """Writes one shard beside its place; `close` syncs it, puts it there and returns its line of the index."""

    def __init__(self, folder: Path, split: Side, number: int, dtype: str) -> None:
        self.tokens = 0
        self._split, self._dtype = split, np.dtype(dtype).newbyteorder("<")
        self._place = folder / f"{split}-{number:05d}"
        self._columns = (array("q"), array("q"), array("q"))
        self._partial = self._place.with_suffix(".tokens.partial")
        self.file = self._partial.open("wb")
        self._stream = HashedStream(self.file)

    def add(self, ids: Array, size: int, document: int) -> None:
        """A section: its ids, the UTF-8 bytes of its text, its document's number in the split."""
        for column, value in zip(self._columns, (self.tokens, size, document), strict=True):
            column.append(value)
        self._add(ids)

    def extend(self, ids: Array, sections: Array) -> None:
        """Several sections: their ids (n,); and (3, m), where they begin in these ids, their bytes, their documents."""
        firsts, sizes, documents = sections
        for column, values in zip(self._columns, (firsts + self.tokens, sizes, documents), strict=True):
            column.frombytes(values.astype(np.int64).tobytes())
        self._add(ids)

    def _add(self, ids: Array) -> None:
        self._stream.write(ids.astype(self._dtype, copy=False).tobytes())
        self.tokens += len(ids)

    def close(self, first_document: int | None) -> Shard:
        """`first_document`: the number of the first document that may begin here, one more than any before. None says
        that this is a part's shard, which has places for numbers."""
        table = np.array(self._columns, dtype="<i8")
        sections = table.tobytes()
        write_bytes(self._place.with_suffix(".sections"), sections)
        sync(self.file)
        self.file.close()
        rename(self._partial, self._place.with_suffix(".tokens"))
        ended = int((table[2] & 1).sum()) if first_document is None else int(table[2, -1]) + 1 - first_document
        return Shard(
            name=self._place.name,
            split=self._split,
            tokens=self.tokens,
            sections=table.shape[1],
            documents=ended,
            bytes=int(table[1].sum()),
            tokens_sha256=self._stream.sha256,
            sections_sha256=hashlib.sha256(sections).hexdigest(),
        )


class Writers:
    """The shards that are written now, one for each side, and all that are finished.

    `held` counts the sections that were finished already: a side's shards hold its first sections.
    """

    def __init__(self, out: Path, plan: Plan, dtype: str, done: Sequence[Shard]) -> None:
        self.shards = list(done)
        self.held = {side: sum(shard.sections for shard in done if shard.split == side) for side in SIDES}
        self._out, self._dtype, self._max_tokens = out, dtype, int(plan["shard_tokens"])
        self._numbered = "part" not in plan
        self._open: dict[Side, ShardWriter] = {}

    def add(self, side: Side, ids: Array, size: int, document: int) -> None:
        """A section, as `ShardWriter.add` takes it; the one that reaches the tokens of a shard is its last."""
        writer = self._to(side)
        writer.add(ids, size, document)
        if writer.tokens >= self._max_tokens:
            self._finish(side)

    def extend(self, side: Side, ids: Array, sections: Array) -> None:
        """Several sections, as `ShardWriter.extend` takes them; a shard ends where `add` would have ended it."""
        firsts = np.append(sections[0], len(ids))
        start, count = 0, sections.shape[1]
        while start < count:
            writer = self._to(side)
            full = firsts[start + 1 :] - firsts[start] >= self._max_tokens - writer.tokens
            stop = start + int(np.argmax(full)) + 1 if full.any() else count
            begins = np.array([[firsts[start]], [0], [0]])
            writer.extend(ids[firsts[start] : firsts[stop]], sections[:, start:stop] - begins)
            if full.any():
                self._finish(side)
            start = stop

    def _to(self, side: Side) -> ShardWriter:
        if side not in self._open:
            number = sum(shard.split == side for shard in self.shards)
            self._open[side] = ShardWriter(self._out, side, number, self._dtype)
        return self._open[side]

    def _finish(self, side: Side) -> None:
        seen = sum(shard.documents for shard in self.shards if shard.split == side)
        self.shards.append(self._open.pop(side).close(seen if self._numbered else None))
        note(self._out, self.shards[-1])

    @contextmanager
    def writing(self) -> Iterator["Writers"]:
        """Finishes the last shards where all went well; otherwise what is unfinished is left."""
        try:
            yield self
            for side in sorted(self._open):
                self._finish(side)
        finally:
            for writer in self._open.values():
                writer.file.close()


def note(out: Path, shard: Shard) -> None:
    """A finished shard's line in the journal, synced: from now on it need not be made again."""
    with (out / JOURNAL).open("a", encoding="utf-8") as stream:
        stream.write(shard.model_dump_json() + "\n")
        sync(stream)


def _begin(out: Path, plan: Plan, index: str) -> list[Shard] | None:
    """The shards that are finished already; None if everything is. Makes the folder and writes its plan."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file; give a folder to write to")
    out.mkdir(parents=True, exist_ok=True)
    if not (out / PLAN).exists():
        if any(path.name != PLAN and not path.name.startswith(f".{PLAN}.") for path in out.iterdir()):
            raise DataError(f"{out}: holds other files already; give a new or an empty folder")
        write_text(out / PLAN, json.dumps(plan, indent=1) + "\n")
        return []
    found = read_plan(out)
    if not found:
        raise DataError(f"{out / PLAN}: not a plan that `weft prepare` wrote; give a new folder")
    if keys := ", ".join(differing(plan, found)):
        what = f"was prepared from something else (differs in: {keys})"
        raise DataError(f"{out}: {what}; remove it or give another folder")
    if (out / index).exists():
        return None
    shards: list[Shard] = []
    with suppress(FileNotFoundError, ValidationError, DataError):  # a line that a kill cut short ends the journal
        for line in files.read_text(out / JOURNAL).splitlines():
            shard = Shard.model_validate_json(line)
            shard.verify(out)
            shards.append(shard)
    return shards


def _intact(out: Path, index: str, tokenizer: Tokenizer) -> Shards | None:
    try:
        found = Shards.open(out, index)
        found.verify()
        if Tokenizer.load(out).fingerprint != tokenizer.fingerprint:
            raise DataError(f"{out}: damaged: its tokenizer is not what was written")
    except (DataError, TokenizerError) as error:
        warn(f"{error}; preparing it again")
        return None
    return found
