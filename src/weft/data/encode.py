"""Sections of text to token ids: on the threads of this process, or in several processes, always in reading order.

A document is encoded as one text, and its ids are divided where its sections meet: a token belongs to the section that
it begins in. A long document is encoded in pieces that don't change its ids (`text/pieces.py`): from joint to joint,
with a short one around each place where two sections meet. Only where a stretch of LONGEST bytes has no joint, a piece
ends all the same.

A process of its own (`python -m weft.data.encode`) is told on standard input and answers on standard output. Its first
line is the tokenizer. Each further line is a list of pieces, answered by a line of JSON and the ids as they are stored.
When standard input ends, whoever gave the texts is gone, and the process ends too.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from queue import SimpleQueue
from typing import IO, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.data.split import Section
from weft.errors import TokenizerError
from weft.files import utf8_size
from weft.text.pieces import Joints, Piece, first_joint, last_joint
from weft.text.tokenizer import Tokenizer

BATCH = 1024 * 1024  # bytes of text that are encoded at once
LONGEST = 1024 * 1024  # bytes of a piece; some hundred times as much memory is needed to encode it
THREADS = 2  # batches under way in this process: one's ids become an array while the other keeps the cores busy

Ids = npt.NDArray[Any]
Encoded = tuple[Section, Ids]


class Stretches(NamedTuple):
    """What `PieceIds` has, with the ids as they are stored."""

    ids: Ids
    counts: list[int]
    sizes: list[int]
    over: list[int]


Encode = Callable[[list[Piece]], list[Stretches]]


@dataclass(frozen=True)
class Framing:
    """What stands `before` and `after` the ids of each document."""

    before: Sequence[int] = ()
    after: Sequence[int] = ()


@dataclass(frozen=True)
class Job:
    """A piece to encode, and the sections that its stretches belong to."""

    piece: Piece
    sections: Sequence[Section]

    @property
    def wanted(self) -> bool:
        """Whether somebody wants the ids of one of them."""
        return any(section.wanted for section in self.sections)


def encoded(
    work: Iterable[Job], tokenizer: Tokenizer, framing: Framing, dtype: str, jobs: int | None
) -> Generator[Encoded]:
    """Each section that is wanted with its ids, in order, encoded while this thread reads and writes.

    Its size is that of the text that its ids stand for, where the sections beside it are on the same side: what is on a
    side in all doesn't depend on the tokenizer. With `jobs` that many processes do it, on one thread each;
    otherwise this one does, on all cores. ChildProcessError says that a process died.
    """
    waiting: deque[tuple[list[Job], Future[list[Stretches]]]] = deque()
    threads = jobs or THREADS
    encoding = _in_processes(tokenizer, dtype, jobs) if jobs else _here(tokenizer, dtype)
    joined = _Joined(framing, dtype)
    with ThreadPoolExecutor(threads, "encode") as pool, encoding as encode:  # processes end before threads that wait
        try:
            for batch in _batches(work):
                waiting.append((batch, pool.submit(encode, [job.piece for job in batch if job.wanted])))
                while len(waiting) > 2 * threads:
                    ready, rows = waiting.popleft()
                    yield from joined.add(ready, rows.result())
            for ready, rows in waiting:
                yield from joined.add(ready, rows.result())
            yield from joined.finish()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _batches(work: Iterable[Job]) -> Iterator[list[Job]]:
    batch: list[Job] = []
    size = 0
    for job in work:
        batch.append(job)
        size += len(job.piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Joined:
    """Puts the ids of sections together, which come in the stretches of one piece after another."""

    def __init__(self, framing: Framing, dtype: str) -> None:
        self._before, self._after = (np.array(ids, dtype=dtype) for ids in (framing.before, framing.after))
        self._section: Section | None = None
        self._ids: list[Ids] = []
        self._size = 0

    def add(self, work: Sequence[Job], rows: Iterable[Stretches]) -> Iterator[Encoded]:
        found = iter(rows)
        for job in work:
            if not job.wanted:
                yield from self.finish()
                continue
            stretches = next(found)
            ids, borders = stretches.ids, [0, *accumulate(stretches.counts)]
            for number, (section, size) in enumerate(zip(job.sections, _sizes(job, stretches), strict=True)):
                if section is not self._section:
                    yield from self.finish()
                    self._section = section
                if section.begins and not self._ids:
                    self._ids.append(self._before)
                self._ids.append(ids[borders[number] : borders[number + 1]])
                self._size += size

    def finish(self) -> Iterator[Encoded]:
        section, ids = self._section, self._ids
        if section is not None and section.wanted:
            whole = np.concatenate([*ids, self._after] if section.ends else ids)
            yield (section if section.size == self._size else replace(section, size=self._size)), whole
        self._section, self._ids, self._size = None, [], 0


def _sizes(job: Job, stretches: Stretches) -> list[int]:
    """The bytes of a piece's stretches. Those that a token takes from the next one count there only on another side."""
    sizes = list(stretches.sizes)
    for number in reversed(range(len(sizes) - 1)):
        if job.sections[number].side == job.sections[number + 1].side:
            taken = min(stretches.over[number], sizes[number + 1])
            sizes[number] += taken
            sizes[number + 1] -= taken
    return sizes


# ---- pieces


def apart(sections: Iterable[Section]) -> Iterator[Job]:
    """Each section as a text of its own, as weft 0.1 encoded them: a run that began so goes on so."""
    return (Job(Piece(section.text), [section]) for section in sections)


def together(sections: Iterable[Section], joints: Joints | None) -> Iterator[Job]:
    """All sections of a document, in reading order, as one text in pieces."""
    cutter = _Cutter(joints)
    for section in sections:
        yield from cutter.add(section)


class _Cutter:
    """Cuts one document after another, section by section as they come."""

    def __init__(self, joints: Joints | None) -> None:
        self._joints = joints
        self._held: list[tuple[Section, str]] = []  # since the last joint, the text of each section
        self._size = 0
        self._begins = True

    def add(self, section: Section) -> Iterator[Job]:
        text = section.text
        if self._held and self._joints is not None and (place := self._first(text)) is not None:
            if place:
                self._hold(section, text[:place])
            yield self._job(ends=False)
            text = text[place:]
        self._hold(section, text)
        if section.ends:
            yield self._job(ends=True)
            return
        if self._joints == "anywhere":
            yield self._job(ends=False)
            return
        if len(self._held) == 1 and self._joints is not None and (last := last_joint(self._joints, text)):
            self._let_go()
            self._hold(section, text[:last])
            yield self._job(ends=False)
            self._hold(section, text[last:])
        elif self._size >= LONGEST:
            yield from self._forced()

    def _first(self, text: str) -> int | None:
        """The first joint of what follows the text that is held, at its beginning or later."""
        assert self._joints is not None
        before = self._held[-1][1][-2:]
        place = first_joint(self._joints, before + text, len(before))
        return None if place is None else place - len(before)

    def _forced(self) -> Iterator[Job]:
        """What is held, up to the last space between words of the last section, if it has one; the rest waits."""
        section, text = self._held[-1]
        last = last_joint("spaces", text) or len(text)
        self._held[-1] = (section, text[:last])
        yield self._job(ends=False)
        if text[last:]:
            self._hold(section, text[last:])

    def _hold(self, section: Section, text: str) -> None:
        self._held.append((section, text))
        self._size += utf8_size(text)

    def _let_go(self) -> list[tuple[Section, str]]:
        held, self._held, self._size = self._held, [], 0
        return held

    def _job(self, *, ends: bool) -> Job:
        held = self._let_go()
        cuts = list(accumulate(len(text) for _, text in held[:-1]))
        piece = Piece("".join(text for _, text in held), self._begins, ends, cuts)
        self._begins = ends
        return Job(piece, [section for section, _ in held])


def _stretches(tokenizer: Tokenizer, dtype: str, pieces: Sequence[Piece]) -> list[Stretches]:
    """The ids of pieces as they are stored."""
    found = tokenizer.encode_pieces(pieces)
    return [Stretches(np.fromiter(each.ids, dtype, len(each.ids)), *each[1:]) for each in found]


@contextmanager
def _here(tokenizer: Tokenizer, dtype: str) -> Iterator[Encode]:
    yield partial(_stretches, tokenizer, dtype)


# ---- processes, as this one sees them


@contextmanager
def _in_processes(tokenizer: Tokenizer, dtype: str, jobs: int) -> Iterator[Encode]:
    """Encodes in a process that is free; at most `jobs` threads may ask at once. However this ends, none goes on."""
    free: SimpleQueue[_Process] = SimpleQueue()
    with ExitStack() as stack:
        for _ in range(jobs):
            process = _Process(tokenizer, dtype)
            stack.callback(process.end)
            free.put(process)

        def encode(pieces: list[Piece]) -> list[Stretches]:
            process = free.get()
            try:
                return process.encode(pieces)
            finally:
                free.put(process)

        yield encode


class _Process:
    """A process that encodes, one list of pieces at a time."""

    def __init__(self, tokenizer: Tokenizer, dtype: str) -> None:
        self._dtype = dtype
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # `end` closes it
        # a session of its own: Ctrl-C comes to the one that writes, which ends the others
        self._process = subprocess.Popen(
            [sys.executable, "-m", "weft.data.encode"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            start_new_session=True,
        )
        self._send({"json": tokenizer.to_json(), "roles": tokenizer.roles, "dtype": dtype})

    def encode(self, pieces: list[Piece]) -> list[Stretches]:
        """What `_stretches` gives there."""
        self._send(pieces)
        assert self._process.stdout is not None
        head = self._process.stdout.readline()
        answer = json.loads(head) if head.endswith(b"\n") else {}
        if "error" in answer:
            raise TokenizerError(answer["error"])
        counted = answer.get("stretches", ())
        ends = [0, *accumulate(sum(counts) for counts, *_ in counted)]
        size = np.dtype(self._dtype).itemsize * ends[-1]
        raw = self._process.stdout.read(size)
        if not answer or len(raw) < size:
            raise ChildProcessError(self._death())
        ids = np.frombuffer(raw, self._dtype)
        return [Stretches(ids[start:stop], *each) for (start, stop), each in zip(pairwise(ends), counted, strict=True)]

    def _send(self, value: Any) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it died, and gives no answer
            self._process.stdin.write(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
            self._process.stdin.flush()

    def _death(self) -> str:
        """How the process ended, in a line."""
        status = self._process.wait()
        self._errors.seek(0)
        last = [line for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()][-1:]
        if status == -signal.SIGKILL:
            return "was killed, perhaps because memory ran out"
        return f"died: {last[0].strip() if last else f'exit status {status}'}"

    def end(self) -> None:
        """Ends the process, whatever it does."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._errors):
            assert pipe is not None
            with suppress(OSError, ValueError):
                pipe.close()


# ---- the process itself


def main() -> None:
    """Reads pieces of texts and writes their ids until standard input ends."""
    told, out = sys.stdin.buffer, sys.stdout.buffer
    settings = json.loads(told.readline())
    tokenizer = Tokenizer.from_json(settings["json"], settings["roles"])
    for line in told:
        try:
            rows = _stretches(tokenizer, settings["dtype"], [Piece(*each) for each in json.loads(line)])
        except TokenizerError as error:
            out.write(json.dumps({"error": str(error)}).encode() + b"\n")
        else:
            out.write(json.dumps({"stretches": [row[1:] for row in rows]}).encode() + b"\n")
            out.writelines(row.ids.tobytes() for row in rows)
        out.flush()


if __name__ == "__main__":
    main()
