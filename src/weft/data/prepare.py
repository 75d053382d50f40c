"""From documents to token shards: read, split, encode and write at the same time, in bounded memory.

Finished shards are noted in a journal. A run that was killed goes over the text again, which is quick, encodes only
what no finished shard holds, and writes the same bytes as a run that was never stopped.
"""

import json
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from weft.data.config import Data, FilesSplit, HashSplit, Split
from weft.data.documents import stamps
from weft.data.shards import INDEX, PLAN, Index, Shard, Shards, ShardWriter, Side, dtype_for, write_index
from weft.data.split import Piece, check_sides, section_for, split_pieces
from weft.errors import DataError, WeftError
from weft.files import locked, sync, write_text
from weft.progress import bar
from weft.text.tokenizer import Tokenizer

JOURNAL = "journal.jsonl"
SHARD_TOKENS = 64 * 1024 * 1024
BATCH = 1024 * 1024  # bytes of text that are encoded at once
AHEAD = 2  # batches being encoded: one's ids are turned into an array while the other keeps the cores busy


def prepare(
    sources: Sequence[str],
    out: str | Path,
    tokenizer: Tokenizer,
    *,
    validation: Split | None = None,
    column: str = "text",
    shard_tokens: int = SHARD_TOKENS,
    progress: bool = True,
) -> Shards:
    """Writes the sources' tokens to the folder `out`; one that the same call left unfinished is continued."""
    split = HashSplit() if validation is None else validation
    plan = _plan(sources, split, column, shard_tokens, tokenizer)
    out = Path(out)
    try:
        done = _begin(out, plan)
        if done is None:
            return Shards.open(out)
        with locked(out / PLAN):
            tokenizer.save(out)
            pieces = split_pieces(sources, split, column=column, section=plan["section"])
            with bar("preparing", _total(plan), unit="bytes", wanted=progress) as advance:
                try:
                    shards = _write(out, pieces, tokenizer, done, shard_tokens, advance)
                    check_sides(shards, split)
                except WeftError:  # the text itself is wrong: what began with this call goes with it
                    if not done:
                        _discard(out)
                    raise
            ordered = tuple(sorted(shards, key=lambda shard: shard.name))
            size = tokenizer.vocab_size
            index = Index(dtype=dtype_for(size), vocab_size=size, tokenizer=tokenizer.fingerprint, shards=ordered)
            write_index(out, index)
            (out / JOURNAL).unlink()
    except BlockingIOError:
        raise DataError(f"{out}: another `weft prepare` is writing there; wait for it") from None
    except OSError as error:
        raise DataError(f"{error.filename or out}: cannot be written: {error.strerror or error}") from None
    return Shards.open(out)


def open_data(data: Data, folder: str | Path, tokenizer: Tokenizer, *, progress: bool = True) -> list[Shards]:
    """The tokens of each of a recipe's parts, in order: prepared folders as they are, sources prepared in `folder`.

    Every part must have been made with this tokenizer.
    """
    opened = []
    for number, part in enumerate(data.parts):
        if part.prepared is not None:
            shards = Shards.open(part.prepared)
        else:
            place = Path(folder) / f"part-{number}" if len(data.parts) > 1 else folder
            shards = prepare(
                part.sources, place, tokenizer, validation=data.validation, column=data.column, progress=progress
            )
        if shards.index.tokenizer != tokenizer.fingerprint:
            raise DataError(f"{shards.path}: was prepared with another tokenizer; use its own, or prepare it again")
        opened.append(shards)
    if not opened:
        raise DataError("no text is given; name files with --data, or set data.sources in the recipe")
    return opened


# ---- the folder: plan, lock, journal


def _plan(sources: Sequence[str], split: Split, column: str, shard_tokens: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """All that decides the bytes to be written, as JSON would give it back."""
    plan = {
        "format": "weft plan",
        "version": 1,
        "sources": stamps(sources),
        "validation": split.model_dump(),
        "validation_sources": stamps(split.sources) if isinstance(split, FilesSplit) else [],
        "column": column,
        "section": section_for(sources),
        "shard_tokens": shard_tokens,
        "tokenizer": tokenizer.fingerprint,
    }
    return json.loads(json.dumps(plan))


def _begin(out: Path, plan: dict[str, Any]) -> list[Shard] | None:
    """The shards that are finished already; None if everything is. Makes the folder and writes its plan."""
    if out.exists() and not out.is_dir():
        raise DataError(f"{out}: is a file; give a folder to write to")
    out.mkdir(parents=True, exist_ok=True)
    file = out / PLAN
    if not file.exists():
        if any(path.name != PLAN and not path.name.startswith(f".{PLAN}.") for path in out.iterdir()):
            raise DataError(f"{out}: holds other files already; give a new or an empty folder")
        write_text(file, json.dumps(plan, indent=1) + "\n")
        return []
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        found = {}
    if not isinstance(found, dict) or found.get("format") != plan["format"]:
        raise DataError(f"{file}: not a plan that `weft prepare` wrote; give a new folder")
    differing = [key for key in plan if found.get(key) != plan[key]]
    if differing:
        raise DataError(
            f"{out}: was prepared from something else (differs in: {', '.join(differing)}); "
            "remove it or give another folder"
        )
    return None if (out / INDEX).exists() else _journalled(out)


def _journalled(out: Path) -> list[Shard]:
    """The shards that the journal names and that are all there; a line that a kill cut short ends it."""
    shards: list[Shard] = []
    try:
        lines = (out / JOURNAL).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            shard = Shard.model_validate_json(line)
        except ValidationError:
            break
        if not all((out / f"{shard.name}.{file}").exists() for file in ("tokens", "sections")):
            break
        shards.append(shard)
    return shards


def _note(out: Path, shard: Shard) -> None:
    """A finished shard's line in the journal, synced: from now on it need not be made again."""
    with (out / JOURNAL).open("a", encoding="utf-8") as stream:
        stream.write(shard.model_dump_json() + "\n")
        sync(stream)


def _discard(out: Path) -> None:
    """Removes what preparing wrote, and the folder if it is empty then."""
    for pattern in ("train-*", "validation-*", "tokenizer*.json", JOURNAL, PLAN):
        for path in out.glob(pattern):
            path.unlink()
    if not any(out.iterdir()):
        out.rmdir()


# ---- encoding and writing


def _write(
    out: Path, pieces: Iterable[Piece], tokenizer: Tokenizer, done: list[Shard], shard_tokens: int, advance: Any
) -> list[Shard]:
    """Encodes what `done` doesn't hold and writes it; all shards, old and new."""
    for path in out.glob("*.partial"):
        path.unlink()
    write_text(out / JOURNAL, "".join(shard.model_dump_json() + "\n" for shard in done))
    shards = list(done)
    dtype = dtype_for(tokenizer.vocab_size)
    writers: dict[Side, ShardWriter] = {}

    def finish(side: Side) -> None:
        seen = sum(shard.documents for shard in shards if shard.split == side)
        shards.append(writers.pop(side).close(seen))
        _note(out, shards[-1])

    try:
        for piece, ids in _encoded(_remaining(pieces, done, advance), tokenizer, dtype):
            if piece.split not in writers:
                number = sum(shard.split == piece.split for shard in shards)
                writers[piece.split] = ShardWriter(out, piece.split, number, dtype)
            writers[piece.split].add(ids, piece.size, piece.document)
            advance(piece.size)
            if writers[piece.split].tokens >= shard_tokens:
                finish(piece.split)
        for side in sorted(writers):
            finish(side)
    finally:
        for writer in writers.values():
            writer.abandon()
    return shards


def _remaining(pieces: Iterable[Piece], done: Sequence[Shard], advance: Any) -> Iterator[Piece]:
    """The pieces that no finished shard holds: a split's shards hold its first sections."""
    held: dict[Side, int] = {"train": 0, "validation": 0}
    for shard in done:
        held[shard.split] += shard.sections
    for piece in pieces:
        if held[piece.split] > 0:
            held[piece.split] -= 1
            advance(piece.size)
        else:
            yield piece


def _encoded(pieces: Iterable[Piece], tokenizer: Tokenizer, dtype: str) -> Iterator[tuple[Piece, npt.NDArray[Any]]]:
    """Each piece with its ids, in order. Rust encodes on all cores while this thread reads and writes."""
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]

    def encode(batch: list[Piece]) -> list[npt.NDArray[Any]]:
        rows = tokenizer.encode_batch([piece.text for piece in batch])
        rows = [row + end if piece.ends else row for piece, row in zip(batch, rows, strict=True)]
        return [np.fromiter(row, dtype=dtype, count=len(row)) for row in rows]

    waiting: deque[tuple[list[Piece], Future[list[npt.NDArray[Any]]]]] = deque()
    with ThreadPoolExecutor(AHEAD, thread_name_prefix="encode") as pool:
        try:
            for batch in _batches(pieces):
                waiting.append((batch, pool.submit(encode, batch)))
                while len(waiting) > 2 * AHEAD:
                    ready, rows = waiting.popleft()
                    yield from zip(ready, rows.result(), strict=True)
            for ready, rows in waiting:
                yield from zip(ready, rows.result(), strict=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += piece.size
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _total(plan: dict[str, Any]) -> int | None:
    """Bytes of text to read, where that is known: what a packed file holds is not, before it is read."""
    known = plan["sources"] + plan["validation_sources"]
    plain = all(name.endswith((".txt", ".md")) or name.startswith("builtin:") for name, *_ in known)
    return sum(size for _, size, _ in known) if plain else None
