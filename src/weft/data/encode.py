"""Encode sections of text as token ids, on the threads of this process or in several processes, in reading order.

A document is encoded as one text, and its ids are divided at the boundaries of its sections: a token belongs to the
section in which it begins. A long document is encoded in fragments that do not change its ids (`text/fragments.py`):
between split points, with a short fragment around each boundary between sections. A fragment ends elsewhere only if
MAX_FRAGMENT_BYTES of text contain no split point.
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
from weft.text.fragments import FragmentIds, SplitPoints, TextFragment, first_split_point, last_split_point
from weft.text.tokenizer import Ids, Tokenizer
from weft.workers import Children, requests, respond

BATCH = 1024 * 1024  # characters of text encoded in one call
MAX_FRAGMENT_BYTES = 1024 * 1024  # text of a fragment; encoding takes about a hundred times as much memory
THREADS = 2  # of this process: one converts ids to an array while the other keeps the cores busy
COMMAND = (sys.executable, "-m", "weft.data.encode")

EncodedSection = tuple[TextSection, npt.NDArray[Any]]
EncodedStretch = tuple[TextSection, npt.NDArray[Any], int]  # ids of (part of) a section, and the bytes of their text


class EncodingJob(NamedTuple):
    """A fragment to encode, and the sections that its stretches belong to."""

    fragment: TextFragment
    sections: Sequence[TextSection]


def encode_jobs(
    work: Iterable[EncodingJob], tokenizer: Tokenizer, frame: tuple[Ids, Ids], *, dtype: str, processes: int | None
) -> Generator[EncodedSection]:
    """Yield each wanted section with its ids, in order, encoded while this thread reads and writes.

    A section's size becomes that of the text its ids decode to, unless the next section is on the other side: the total
    of a side does not depend on the tokenizer. `frame` is the ids before and after each document. `processes` encode on
    one thread each; if None, this process encodes on all cores. ChildProcessError means that a process died.
    """
    pending: deque[tuple[list[EncodingJob], Future[list[FragmentIds]]]] = deque()
    threads = processes or THREADS
    settings = {"json": tokenizer.to_json(), "roles": tokenizer.roles, "dtype": dtype}
    children = Children(COMMAND, {"TOKENIZERS_PARALLELISM": "false"}, settings)
    encode = partial(_encode_in_child, children, dtype) if processes else partial(_encode, tokenizer, dtype)
    with ThreadPoolExecutor(threads, "encode") as pool, closing(children):  # children end before their waiting threads

        def stretches() -> Iterator[EncodedStretch]:
            for batch in _batches(work):
                jobs = [job for job in batch if any(section.wanted for section in job.sections)]
                pending.append((jobs, pool.submit(encode, [job.fragment for job in jobs])))
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
    batch, size = list[EncodingJob](), 0
    for job in work:
        batch.append(job)
        size += len(job.fragment.text)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _stretches(jobs: Sequence[EncodingJob], results: Iterable[FragmentIds]) -> Iterator[EncodedStretch]:
    """Yield the stretches of all fragments; a section may continue from one fragment to the next. If a token reaches
    into the next stretch, its bytes there count for the stretch in which it begins, unless that is on the other side.
    """
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
    return (EncodingJob(TextFragment(section.text), [section]) for section in sections)


def document_jobs(sections: Iterable[TextSection], split_points: SplitPoints | None) -> Iterator[EncodingJob]:
    """Encode the sections of each document, in reading order, as one text in fragments."""
    buffer: list[tuple[TextSection, str]] = []  # sections since the last split point, each with its text
    size, begins = 0, True

    def add(section: TextSection, text: str) -> None:
        nonlocal size
        buffer.append((section, text))
        size += utf8_size(text)

    def flush(*, ends: bool) -> EncodingJob:
        nonlocal size, begins
        cuts = list(accumulate(len(text) for _, text in buffer[:-1]))
        fragment = TextFragment("".join(text for _, text in buffer), begins, ends, cuts)
        job = EncodingJob(fragment, [section for section, _ in buffer])
        buffer.clear()
        size, begins = 0, ends
        return job

    for section in sections:
        text = section.text
        if buffer and split_points is not None:
            before = buffer[-1][1][-2:]
            first = first_split_point(split_points, before + text, len(before))
            if first is not None:  # at the section's beginning or later
                first -= len(before)
                if first:
                    add(section, text[:first])
                yield flush(ends=False)
                text = text[first:]
        alone = not buffer
        add(section, text)
        if section.ends or split_points == "anywhere":
            yield flush(ends=section.ends)
            continue
        last = last_split_point(split_points, text) if alone and split_points is not None else None
        if not last and size >= MAX_FRAGMENT_BYTES:  # cut at the last space between words, if there is one
            last = last_split_point("spaces", text) or len(text)
        if last:
            buffer[-1] = (section, text[:last])
            yield flush(ends=False)
            if text[last:]:
                add(section, text[last:])


def _encode(tokenizer: Tokenizer, dtype: str, fragments: list[TextFragment]) -> list[FragmentIds]:
    return [
        row._replace(ids=np.fromiter(row.ids, dtype, len(row.ids))) for row in tokenizer.encode_fragments(fragments)
    ]


def _encode_in_child(children: Children, dtype: str, fragments: list[TextFragment]) -> list[FragmentIds]:
    with children.acquire() as child:
        reply = child.request(fragments)
        if "error" in reply:
            raise TokenizerError(reply["error"])
        rows = reply["fragments"]
        ends = [0, *accumulate(sum(counts) for counts, *_ in rows)]
        ids = np.frombuffer(child.read(np.dtype(dtype).itemsize * ends[-1]), dtype)
    return [FragmentIds(ids[start:stop], *row) for (start, stop), row in zip(pairwise(ends), rows, strict=True)]


def main() -> None:
    """Run a child process, which receives the tokenizer and then lists of fragments, and returns their ids."""
    lists = requests()
    settings = next(lists)
    tokenizer = Tokenizer.from_json(settings["json"], settings["roles"])
    for fragments in lists:
        try:
            rows = _encode(tokenizer, settings["dtype"], [TextFragment(*fragment) for fragment in fragments])
        except TokenizerError as error:
            respond({"error": str(error)})
        else:
            respond({"fragments": [row[1:] for row in rows]}, (row.ids.tobytes() for row in rows))


if __name__ == "__main__":
    main()
