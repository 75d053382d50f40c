"""Sections of text to token ids: on the threads of this process, or in several processes, always in reading order.

A document is encoded as one text, and its ids are divided where its sections meet: a token belongs to the section that
it begins in. A long document is encoded in pieces that don't change its ids (`text/fragments.py`): from joint to joint,
with a short one around each place where two sections meet. Only where a stretch of MAX_PIECE_BYTES has no joint, a
piece ends all the same.
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

from weft.data.split import Section
from weft.errors import TokenizerError
from weft.storage.files import utf8_size
from weft.text.fragments import FragmentIds, SplitPoints, TextFragment, first_split_point, last_split_point
from weft.text.tokenizer import Ids, Tokenizer
from weft.workers import Children, requests, respond

BATCH = 1024 * 1024  # characters of text that are encoded at once
MAX_PIECE_BYTES = 1024 * 1024  # some hundred times as much memory is needed to encode a piece
THREADS = 2  # batches under way in this process: one's ids become an array while the other keeps the cores busy
COMMAND = (sys.executable, "-m", "weft.data.encode")

Encoded = tuple[Section, npt.NDArray[Any]]
Stretch = tuple[Section, npt.NDArray[Any], int]  # ids of a section, or of a part of one, and the bytes of their text


class Job(NamedTuple):
    """A piece to encode, and the sections that its stretches belong to."""

    piece: TextFragment
    sections: Sequence[Section]


def encoded(
    work: Iterable[Job], tokenizer: Tokenizer, frame: tuple[Ids, Ids], dtype: str, jobs: int | None
) -> Generator[Encoded]:
    """Each section that is wanted with its ids, in order, encoded while this thread reads and writes.

    Its size is that of the text that its ids stand for, where the sections beside it are on the same side: what is on a
    side in all doesn't depend on the tokenizer. A `frame` is the ids before and after each document. With `jobs` that
    many processes encode, on one thread each; otherwise this one does, on all cores. ChildProcessError says that a
    process died.
    """
    waiting: deque[tuple[list[Job], Future[list[FragmentIds]]]] = deque()
    threads = jobs or THREADS
    settings = {"json": tokenizer.to_json(), "roles": tokenizer.roles, "dtype": dtype}
    children = Children(COMMAND, {"TOKENIZERS_PARALLELISM": "false"}, settings)
    encode = partial(_in_processes, children, dtype) if jobs else partial(_here, tokenizer, dtype)
    with ThreadPoolExecutor(threads, "encode") as pool, closing(children):  # they end before threads that wait for them

        def stretches() -> Iterator[Stretch]:
            for batch in _batches(work):
                wanted = [job for job in batch if any(section.wanted for section in job.sections)]
                waiting.append((wanted, pool.submit(encode, [job.piece for job in wanted])))
                while len(waiting) > 2 * threads:
                    ready, rows = waiting.popleft()
                    yield from _stretches(ready, rows.result())
            for ready, rows in waiting:
                yield from _stretches(ready, rows.result())

        before, after = (np.array(ids, dtype=dtype) for ids in frame)
        try:
            for _, group in groupby(stretches(), key=lambda stretch: id(stretch[0])):
                sections, ids, sizes = zip(*group, strict=True)
                section = sections[0]
                if section.wanted:
                    whole = [*[before] * section.begins, *ids, *[after] * section.ends]
                    yield section._replace(size=sum(sizes)), np.concatenate(whole)
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


def _stretches(work: Sequence[Job], rows: Iterable[FragmentIds]) -> Iterator[Stretch]:
    """A section may come in the stretches of one piece after another. The bytes that a token takes from the next
    stretch count there only on another side."""
    for job, row in zip(work, rows, strict=True):
        sizes = list(row.sizes)
        for number in reversed(range(len(sizes) - 1)):
            if job.sections[number].side == job.sections[number + 1].side:
                taken = min(row.over[number], sizes[number + 1])
                sizes[number] += taken
                sizes[number + 1] -= taken
        borders = pairwise([0, *accumulate(row.counts)])
        for section, (start, stop), size in zip(job.sections, borders, sizes, strict=True):
            yield section, row.ids[start:stop], size


def apart(sections: Iterable[Section]) -> Iterator[Job]:
    """Each section as a text of its own, as weft 0.1 encoded them: a run that began so goes on so."""
    return (Job(TextFragment(section.text), [section]) for section in sections)


def together(sections: Iterable[Section], joints: SplitPoints | None) -> Iterator[Job]:
    """All sections of a document, in reading order, as one text in pieces."""
    held: list[tuple[Section, str]] = []  # since the last joint, the text of each section
    size, begins = 0, True

    def hold(section: Section, text: str) -> None:
        nonlocal size
        held.append((section, text))
        size += utf8_size(text)

    def job(*, ends: bool) -> Job:
        """What is held."""
        nonlocal size, begins
        cuts = list(accumulate(len(text) for _, text in held[:-1]))
        piece = TextFragment("".join(text for _, text in held), begins, ends, cuts)
        of = [section for section, _ in held]
        held.clear()
        size, begins = 0, ends
        return Job(piece, of)

    for section in sections:
        text = section.text
        if held and joints is not None:
            before = held[-1][1][-2:]
            place = first_split_point(joints, before + text, len(before))
            if place is not None:  # it is the first one behind what is held, at the section's beginning or later
                place -= len(before)
                if place:
                    hold(section, text[:place])
                yield job(ends=False)
                text = text[place:]
        alone = not held
        hold(section, text)
        if section.ends or joints == "anywhere":
            yield job(ends=section.ends)
            continue
        last = last_split_point(joints, text) if alone and joints is not None else None
        if not last and size >= MAX_PIECE_BYTES:  # up to the last space between words, if there is one
            last = last_split_point("spaces", text) or len(text)
        if last:
            held[-1] = (section, text[:last])
            yield job(ends=False)
            if text[last:]:
                hold(section, text[last:])


def _here(tokenizer: Tokenizer, dtype: str, pieces: list[TextFragment]) -> list[FragmentIds]:
    return [
        each._replace(ids=np.fromiter(each.ids, dtype, len(each.ids))) for each in tokenizer.encode_fragments(pieces)
    ]


def _in_processes(children: Children, dtype: str, pieces: list[TextFragment]) -> list[FragmentIds]:
    with children.acquire() as child:
        found = child.request(pieces)
        if "error" in found:
            raise TokenizerError(found["error"])
        counted = found["pieces"]
        ends = [0, *accumulate(sum(counts) for counts, *_ in counted)]
        ids = np.frombuffer(child.read(np.dtype(dtype).itemsize * ends[-1]), dtype)
    return [FragmentIds(ids[start:stop], *each) for (start, stop), each in zip(pairwise(ends), counted, strict=True)]


def main() -> None:
    """A child process: the first that it is told is the tokenizer, and then lists of pieces."""
    lists = requests()
    settings = next(lists)
    tokenizer = Tokenizer.from_json(settings["json"], settings["roles"])
    for pieces in lists:
        try:
            rows = _here(tokenizer, settings["dtype"], [TextFragment(*each) for each in pieces])
        except TokenizerError as error:
            respond({"error": str(error)})
        else:
            respond({"pieces": [row[1:] for row in rows]}, (row.ids.tobytes() for row in rows))


if __name__ == "__main__":
    main()
