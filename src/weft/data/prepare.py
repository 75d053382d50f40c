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

from weft.data.amount import amount
from weft.data.config import FilesSplit, TextSource
from weft.data.documents import stamps
from weft.data.encodings import is_utf8
from weft.data.shards import INDEX, PLAN, Index, Shard, Shards, ShardWriter, Side, dtype_for
from weft.data.split import Section, check_sides, section_for, split_sections
from weft.data.verified import verify
from weft.errors import DataError, TokenizerError, WeftError
from weft.files import locked, sync, write_text
from weft.progress import Advance, bar, warn
from weft.text.tokenizer import Tokenizer

JOURNAL = "journal.jsonl"
SHARD_TOKENS = 64 * 1024 * 1024
BATCH = 1024 * 1024  # bytes of text that are encoded at once
AHEAD = 2  # batches being encoded: one's ids are turned into an array while the other keeps the cores busy


def prepare(text: TextSource, out: str | Path, tokenizer: Tokenizer, *, shard_tokens: int = SHARD_TOKENS) -> Shards:
    """Writes the tokens of a text to the folder `out`; one that the same call left unfinished is continued."""
    plan = _plan(text, shard_tokens, tokenizer)
    out = Path(out)
    try:
        done = _begin(out, plan)
        if done is None and _intact(out, tokenizer):
            return Shards.open(out)
        done = done or []
        with locked(out / PLAN):
            tokenizer.save(out)
            size = tokenizer.vocab_size
            dtype = dtype_for(size)
            try:
                with bar("preparing", _total(text), unit="bytes") as advance:
                    sections = _remaining(split_sections(text, plan["section"]), done, advance)
                    shards = _write(out, _encoded(sections, tokenizer, dtype), done, shard_tokens)
                check_sides(shards, text.validation)
            except WeftError:  # the text itself is wrong: what began with this call goes with it
                if not done:
                    _discard(out)
                raise
            ordered = tuple(sorted(shards, key=lambda shard: shard.name))
            index = Index(dtype=dtype, vocab_size=size, tokenizer=tokenizer.fingerprint, shards=ordered)
            index = index.replace(sha256=index.checksum)
            write_text(out / INDEX, json.dumps(index.model_dump(), indent=1) + "\n")  # now the folder is finished
            (out / JOURNAL).unlink()
    except BlockingIOError:
        raise DataError(f"{out}: another `weft prepare` is writing there; wait for it") from None
    except OSError as error:
        raise DataError(f"{error.filename or out}: cannot be written: {error.strerror or error}") from None
    return Shards.open(out)


# ---- the folder: plan, lock, journal


def _plan(text: TextSource, shard_tokens: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """All that decides the bytes to be written, as JSON would give it back."""
    split = text.validation
    plan = {
        "format": "weft plan",
        "version": 1,
        "sources": stamps(text.sources),
        "validation": split.model_dump(),
        "validation_sources": stamps(split.sources) if isinstance(split, FilesSplit) else [],
        "column": text.column,
        "section": section_for(text.sources),
        "shard_tokens": shard_tokens,
        "tokenizer": tokenizer.fingerprint,
    }
    if not is_utf8(text.encoding):
        plan["encoding"] = text.encoding
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
    differing = [key for key in {**plan, **found} if found.get(key) != plan.get(key)]
    if differing:
        raise DataError(
            f"{out}: was prepared from something else (differs in: {', '.join(differing)}); "
            "remove it or give another folder"
        )
    return None if (out / INDEX).exists() else _journalled(out)


def _intact(out: Path, tokenizer: Tokenizer) -> bool:
    """Whether a finished folder is still what was written."""
    try:
        Shards.open(out).verify()
        if Tokenizer.load(out).fingerprint != tokenizer.fingerprint:
            raise DataError(f"{out}: damaged: its tokenizer is not what was written")
    except (DataError, TokenizerError) as error:
        warn(f"{error}; preparing it again")
        return False
    return True


def _journalled(out: Path) -> list[Shard]:
    """The shards that the journal names and that are whole; a line that a kill cut short ends it."""
    shards: list[Shard] = []
    try:
        lines = (out / JOURNAL).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            shard = Shard.model_validate_json(line)
            verify(out, shard.checksums)
        except (ValidationError, DataError):
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


Encoded = tuple[Section, npt.NDArray[Any]]


def _write(out: Path, encoded: Iterable[Encoded], done: list[Shard], shard_tokens: int) -> list[Shard]:
    """Writes the shards that are not done yet; all of them, old and new."""
    for path in out.glob("*.partial"):
        path.unlink()
    write_text(out / JOURNAL, "".join(shard.model_dump_json() + "\n" for shard in done))
    shards = list(done)
    writers: dict[Side, ShardWriter] = {}

    def finish(side: Side) -> None:
        seen = sum(shard.documents for shard in shards if shard.split == side)
        shards.append(writers.pop(side).close(seen))
        _note(out, shards[-1])

    try:
        for section, ids in encoded:
            side = section.side
            if side not in writers:
                writers[side] = ShardWriter(out, side, sum(shard.split == side for shard in shards), ids.dtype)
            writers[side].add(ids, section.size, section.document)
            if writers[side].tokens >= shard_tokens:
                finish(side)
        for side in sorted(writers):
            finish(side)
    finally:
        for writer in writers.values():
            writer.abandon()
    return shards


def _remaining(sections: Iterable[Section], done: Sequence[Shard], advance: Advance) -> Iterator[Section]:
    """What no finished shard holds: a split's shards hold its first sections. `advance` gets the bytes of them all."""
    held: dict[Side, int] = {"train": 0, "validation": 0}
    for shard in done:
        held[shard.split] += shard.sections
    for section in sections:
        advance(section.size)
        if held[section.side] > 0:
            held[section.side] -= 1
        else:
            yield section


def _encoded(sections: Iterable[Section], tokenizer: Tokenizer, dtype: str) -> Iterator[Encoded]:
    """Each section with its ids, in order. Rust encodes on all cores while this thread reads and writes."""
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]

    def encode(batch: list[Section]) -> list[npt.NDArray[Any]]:
        rows = tokenizer.encode_batch([section.text for section in batch])
        rows = [row + end if section.ends else row for section, row in zip(batch, rows, strict=True)]
        return [np.fromiter(row, dtype=dtype, count=len(row)) for row in rows]

    waiting: deque[tuple[list[Section], Future[list[npt.NDArray[Any]]]]] = deque()
    with ThreadPoolExecutor(AHEAD, thread_name_prefix="encode") as pool:
        try:
            for batch in _batches(sections):
                waiting.append((batch, pool.submit(encode, batch)))
                while len(waiting) > 2 * AHEAD:
                    ready, rows = waiting.popleft()
                    yield from zip(ready, rows.result(), strict=True)
            for ready, rows in waiting:
                yield from zip(ready, rows.result(), strict=True)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _batches(sections: Iterable[Section]) -> Iterator[list[Section]]:
    batch: list[Section] = []
    size = 0
    for section in sections:
        batch.append(section)
        size += section.size
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _total(text: TextSource) -> int | None:
    """About how many bytes of text there are to read."""
    held = text.validation.sources if isinstance(text.validation, FilesSplit) else ()
    return sum(amount(given, [text.column], text.encoding).bytes for given in (text.sources, held)) or None
