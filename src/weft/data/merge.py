"""The parts of a text, prepared by as many machines, put together: the same bytes as one machine would have written.

Tokens are copied, not made again, stripe by stripe in reading order, at about the disk's speed and in little memory.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from weft.data.config import NumberedPart, Split
from weft.data.folder import Plan, Writers, differing, read_plan, written
from weft.data.parts import FILE_BITS, STRIPE_BITS
from weft.data.shards import PART, SIDES, Ids, Shard, Shards, Side
from weft.data.split import check_sides
from weft.data.store import Array
from weft.errors import DataError, TokenizerError
from weft.progress import Advance, bar
from weft.text.tokenizer import Tokenizer


def merge(folders: Sequence[str | Path], out: str | Path) -> Shards:
    """Writes the tokens of all parts of a text to the folder `out`; an unfinished one is continued."""
    parts = sorted(map(_opened, map(Path, folders)), key=lambda part: part.number.number)
    _check_together(parts)
    plan = {key: value for key, value in parts[0].plan.items() if key != "part"}
    tokenizer = _tokenizer(parts)
    for part in parts:
        part.shards.verify()
    out, split = Path(out), TypeAdapter[Split](Split).validate_python(plan["validation"])
    total = sum(shard.tokens for part in parts for shard in part.shards.index.shards)

    def write(done: list[Shard]) -> list[Shard]:
        writers = Writers(out, plan, parts[0].shards.index.dtype, done)
        with bar("merging", total * np.dtype(parts[0].shards.index.dtype).itemsize, unit="bytes") as advance:
            _copy(parts, writers, advance)
        check_sides(writers.shards, split)
        return writers.shards

    return written(out, plan, tokenizer, write)


# ---- which parts there are, and whether they belong together


@dataclass(frozen=True)
class _Part:
    """A part's folder."""

    folder: Path
    number: NumberedPart
    plan: Plan
    shards: Shards


def _opened(folder: Path) -> _Part:
    plan = read_plan(folder)
    if "part" not in plan:
        if not folder.is_dir():
            raise DataError(f"{folder}: no such folder")
        what = "prepared as a whole, not in parts" if plan else "not a folder that `weft prepare --part` wrote"
        raise DataError(f"{folder}: {what}; --merge takes the folders of all parts")
    try:
        number = NumberedPart(*map(int, plan["part"]))
        what = f"part {number}"
        if not (folder / PART).exists():
            raise DataError(f"{folder}: {what} is unfinished; run the same `weft prepare` again and it continues")
        return _Part(folder, number, plan, Shards.open(folder, PART))
    except (TypeError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{folder}: damaged: its plan doesn't say which part it is") from None


def _check_together(parts: Sequence[_Part]) -> None:
    """Refuse parts that one machine wouldn't have written together."""
    first = parts[0]
    for part in parts[1:]:
        if part.number.of != first.number.of:
            raise DataError(f"{part.folder} is part {part.number}, but {first.folder} part {first.number}")
    numbers = [part.number.number for part in parts]
    for before, part in pairwise(parts):
        if before.number == part.number:
            raise DataError(f"part {part.number} is given twice: {before.folder} and {part.folder}")
    missing = sorted(set(range(1, first.number.of + 1)) - set(numbers))
    if missing:
        named = ", ".join(map(str, missing[:5])) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise DataError(f"of {first.number.of} parts {named} {'is' if len(missing) == 1 else 'are'} missing")
    for part in parts[1:]:
        if keys := differing(_compared(first.plan), _compared(part.plan)):
            what = {"tokenizer": "another tokenizer", "sources": "other sources"}.get(keys[0], f"another {keys[0]}")
            raise DataError(f"{part.folder}: was made with {what} than {first.folder}; prepare it again with the same")


def _compared(plan: Plan) -> Plan:
    """A plan without what may differ between machines: a file's folder, and when it was copied there."""
    alike = {key: value for key, value in plan.items() if key != "part"}
    for key in ("sources", "validation_sources"):
        alike[key] = [[Path(str(name)).name, size] for name, size, *_ in plan.get(key, ())]
    return dict(sorted(alike.items(), key=lambda item: item[0] != "tokenizer"))


def _tokenizer(parts: Sequence[_Part]) -> Tokenizer:
    """The tokenizer of all parts."""
    for part in parts:
        if part.shards.index.tokenizer != part.plan["tokenizer"]:
            raise DataError(f"{part.folder}: damaged: its index is of another tokenizer than its plan")
    try:
        tokenizer = Tokenizer.load(parts[0].folder)
    except TokenizerError as error:
        raise DataError(f"{parts[0].folder}: damaged: {error}") from None
    if tokenizer.fingerprint != parts[0].plan["tokenizer"]:
        raise DataError(f"{parts[0].folder}: damaged: its tokenizer is not what was written")
    return tokenizer


# ---- copying


@dataclass(frozen=True)
class _Run:
    """Sections of one stripe and one side: ids (n,) as they are stored, and what `ShardWriter.extend` takes (3, m)."""

    stripe: int
    side: Side
    ids: Array
    sections: Ids


def _copy(parts: Sequence[_Part], writers: Writers, advance: Advance) -> None:
    """All stripes in reading order, but for the sections that finished shards hold."""
    held = dict(writers.held)
    numbering = {side: _Numbering() for side in SIDES}
    runs = heapq.merge(*(_runs(part.shards, side) for part in parts for side in SIDES), key=lambda run: run.stripe)
    last = -1  # the place before
    with writers.writing():
        for _, group in groupby(runs, key=lambda run: run.stripe):
            stripe = list(group)
            last = _follow(last, np.sort(np.concatenate([run.sections[2] for run in stripe])))
            for run in stripe:
                advance(run.ids.nbytes)
                numbered = np.stack([*run.sections[:2], numbering[run.side](run.sections[2])])
                skipped = min(held[run.side], numbered.shape[1])
                held[run.side] -= skipped
                writers.extend(run.side, run.ids, numbered[:, skipped:])
    if last >= 0 and not last & 1:
        raise _gap()


def _runs(part: Shards, side: Side) -> Iterator[_Run]:
    """A part's sections of a side, stripe by stripe."""
    for ids, sections in part.tokens(side).shards:
        stripes = sections[2] >> (STRIPE_BITS + 1)
        bounds = [0, *(np.flatnonzero(np.diff(stripes)) + 1).tolist(), sections.shape[1]]
        firsts = [*sections[0].tolist(), len(ids)]
        for start, stop in pairwise(bounds):
            begins = np.array([[firsts[start]], [0], [0]])
            yield _Run(int(stripes[start]), side, ids[firsts[start] : firsts[stop]], sections[:, start:stop] - begins)


class _Numbering:
    """The numbers of a side's documents: a new one, unless a section goes on where the one before it stopped."""

    def __init__(self) -> None:
        self._place, self._number = -1, -1

    def __call__(self, places: Ids) -> Ids:
        before = np.concatenate([[self._place], places[:-1]])
        goes_on = (places >> 1 == (before >> 1) + 1) & (before & 1 == 0)
        numbers = self._number + np.cumsum(~goes_on)
        self._place, self._number = int(places[-1]), int(numbers[-1])
        return numbers


def _follow(last: int, places: Ids) -> int:
    """The last of a stripe's places, if they follow the `last` one before without a gap."""
    before = np.concatenate([[last], places[:-1]])
    goes_on = places >> 1 == (before >> 1) + 1
    begins_file = (places % (1 << FILE_BITS) <= 1) & (before & 1 == 1) & (places > before)
    if not (goes_on | begins_file).all():
        raise _gap()
    return int(places[-1])


def _gap() -> DataError:
    return DataError("the parts don't fit together: a file of the text was another one, or changed, on some machine")
