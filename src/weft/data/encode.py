"""Encode sections of text as token ids, on the threads of this process or in several processes, in reading order.

A document is encoded as one text, and its ids are divided at the boundaries of its sections: a token belongs to the
section in which it begins. A long document is encoded in pieces that do not change its ids (`text/pieces.py`): from
joint to joint, with a short piece around each boundary between sections. A piece ends without a joint only if
MAX_PIECE_BYTES of text contain none.
"""

import sys
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from weft.data.split import TextSection
from weft.errors import TokenizerError
from weft.storage.files import utf8_size
from weft.text.pieces import Joints, Piece, PieceIds, first_joint, last_joint
from weft.text.tokenizer import Ids, Tokenizer
from weft.workers import Children, answer, told

BATCH = 1024 * 1024  # characters of text encoded in one call
MAX_PIECE_BYTES = 1024 * 1024  # text of a piece; encoding it takes about a hundred times as much memory
THREADS = 2  # of this process: one converts ids to an array while the other keeps the cores busy
COMMAND = (sys.executable, "-m", "weft.data.encode")

EncodedSection = tuple[TextSection, npt.NDArray[Any]]
EncodedStretch = tuple[TextSection, npt.NDArray[Any], int]  # ids of (part of) a section, and the bytes of their text


class EncodingJob(NamedTuple):
    """A piece to encode, and the sections that its stretches belong to."""

    piece: Piece
    sections: Sequence[TextSection]


def encode_jobs(
    work: Iterable[EncodingJob], tokenizer: Tokenizer, frame: tuple[Ids, Ids], *, dtype: str, processes: int | None
) -> Generator[EncodedSection]:
    """Yield each wanted section with its ids, in order, encoded while this thread reads and writes.

    A section's size becomes that of the text its ids decode to, unless the next section is on the other side: the total
    of a side does not depend on the tokenizer. `frame` is the ids before and after each document. `processes` encode on
    one thread each; if None, this process encodes on all cores. ChildProcessError means that a process died.
    """
    pending: deque[tuple[list[EncodingJob], Future[list[PieceIds]]]] = deque()
    threads = processes or THREADS
    settings = {"json": tokenizer.to_json(), "roles": tokenizer.roles, "dtype": dtype}
    children = Children(COMMAND, {"TOKENIZERS_PARALLELISM": "false"}, settings)
    encode = partial(_encode_in_child, children, dtype) if processes else partial(_encode, tokenizer, dtype)
    with ThreadPoolExecutor(threads, "encode") as pool, closing(children):  # children end before their waiting threads

        def stretches() -> Iterator[EncodedStretch]:
            for batch in _batches(work):
                jobs = [job for job in batch if any(section.wanted for section in job.sections)]
                pending.append((jobs, pool.submit(encode, [job.piece for job in jobs])))
                while len(pending) > 2 * threads:
                    jobs, results = pending.popleft()
                    yield from _stretches(jobs, results.result())
            for jobs, results in pending:
                yield from _stretches(jobs, results.result())

        before, after = (np.array(ids, dtype=dtype) for ids in frame)
        try:
            for _, group in groupby(stretches(), key=lambda stretch: id(stretch[0])):
                sections, ids, sizes = zip(*group, strict=True)
                section = sections[0]
                if section.wanted:
                    framed = [*[before] * section.begins, *ids, *[after] * section.ends]
                    yield section._replace(size=sum(sizes)), np.concatenate(framed)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _batches(work: Iterable[EncodingJob]) -> Iterator[list[EncodingJob]]:
    batch: list[EncodingJob] = []
    size = 0
    for job in work:
        batch.append(job)
        size += len(job.piece.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _stretches(jobs: Sequence[EncodingJob], results: Iterable[PieceIds]) -> Iterator[EncodedStretch]:
    """Yield the stretches of all pieces; a section may continue from one piece to the next. If a token reaches into the
    next stretch, its bytes there count for the stretch in which it begins, unless that one is on the other side."""
    for job, row in zip(jobs, results, strict=True):
        sizes = list(row.sizes)
        for number in reversed(range(len(sizes) - 1)):
            if job.sections[number].side == job.sections[number + 1].side:
                overlap = min(row.over[number], sizes[number + 1])
                sizes[number] += overlap
                sizes[number + 1] -= overlap
        bounds = pairwise([0, *accumulate(row.counts)])
        for section, (start, stop), size in zip(job.sections, bounds, sizes, strict=True):
            yield section, row.ids[start:stop], size


def separate_jobs(sections: Iterable[TextSection]) -> Iterator[EncodingJob]:
    """Encode each section as a separate text, as weft 0.1 did; resuming its runs requires it."""
    return (EncodingJob(Piece(section.text), [section]) for section in sections)


def document_jobs(sections: Iterable[TextSection], joints: Joints | None) -> Iterator[EncodingJob]:
    """Encode the sections of each document, in reading order, as one text in pieces."""
    buffer: list[tuple[TextSection, str]] = []  # sections since the last joint, each with its text
    size, begins = 0, True

    def add(section: TextSection, text: str) -> None:
        nonlocal size
        buffer.append((section, text))
        size += utf8_size(text)

    def flush(*, ends: bool) -> EncodingJob:
        nonlocal size, begins
        cuts = list(accumulate(len(text) for _, text in buffer[:-1]))
        piece = Piece("".join(text for _, text in buffer), begins, ends, cuts)
        job = EncodingJob(piece, [section for section, _ in buffer])
        buffer.clear()
        size, begins = 0, ends
        return job

    for section in sections:
        text = section.text
        if buffer and joints is not None:
            before = buffer[-1][1][-2:]
            joint = first_joint(joints, before + text, len(before))
            if joint is not None:  # the first joint after the buffer, at the section's beginning or later
                joint -= len(before)
                if joint:
                    add(section, text[:joint])
                yield flush(ends=False)
                text = text[joint:]
        alone = not buffer
        add(section, text)
        if section.ends or joints == "anywhere":
            yield flush(ends=section.ends)
            continue
        last = last_joint(joints, text) if alone and joints is not None else None
        if not last and size >= MAX_PIECE_BYTES:  # cut at the last space between words, if there is one
            last = last_joint("spaces", text) or len(text)
        if last:
            buffer[-1] = (section, text[:last])
            yield flush(ends=False)
            if text[last:]:
                add(section, text[last:])


def _encode(tokenizer: Tokenizer, dtype: str, pieces: list[Piece]) -> list[PieceIds]:
    return [row._replace(ids=np.fromiter(row.ids, dtype, len(row.ids))) for row in tokenizer.encode_pieces(pieces)]


def _encode_in_child(children: Children, dtype: str, pieces: list[Piece]) -> list[PieceIds]:
    with children.free() as child:
        reply = child.ask(pieces)
        if "error" in reply:
            raise TokenizerError(reply["error"])
        rows = reply["pieces"]
        ends = [0, *accumulate(sum(counts) for counts, *_ in rows)]
        ids = np.frombuffer(child.read(np.dtype(dtype).itemsize * ends[-1]), dtype)
    return [PieceIds(ids[start:stop], *row) for (start, stop), row in zip(pairwise(ends), rows, strict=True)]


def main() -> None:
    """Run a child process, which receives the tokenizer and then lists of pieces, and returns their ids."""
    requests = told()
    settings = next(requests)
    tokenizer = Tokenizer.from_json(settings["json"], settings["roles"])
    for pieces in requests:
        try:
            rows = _encode(tokenizer, settings["dtype"], [Piece(*piece) for piece in pieces])
        except TokenizerError as error:
            answer({"error": str(error)})
        else:
            answer({"pieces": [row[1:] for row in rows]}, (row.ids.tobytes() for row in rows))


if __name__ == "__main__":
    main()
