"""Sections of text to token ids: on the threads of this process, or in several processes, always in reading order.

A process of its own (`python -m weft.data.encode`) is told on standard input and answers on standard output. Its first
line is the tokenizer. Each further line is a list of texts, answered by a line of JSON and the ids as they are stored.
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
from functools import partial
from queue import SimpleQueue
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from weft.data.split import Section
from weft.errors import TokenizerError
from weft.text.tokenizer import Tokenizer

BATCH = 1024 * 1024  # bytes of text that are encoded at once
THREADS = 2  # batches under way in this process: one's ids become an array while the other keeps the cores busy

Rows = list[npt.NDArray[Any]]
Encoded = tuple[Section, npt.NDArray[Any]]
Encode = Callable[[list[str], list[bool]], Rows]


def encoded(sections: Iterable[Section], tokenizer: Tokenizer, dtype: str, jobs: int | None) -> Generator[Encoded]:
    """Each section with its ids, in order, encoded while this thread reads and writes.

    With `jobs` that many processes do it, on one thread each; otherwise this one does, on all cores. ChildProcessError
    says that a process died.
    """
    waiting: deque[tuple[list[Section], Future[Rows]]] = deque()
    threads = jobs or THREADS
    encoding = _in_processes(tokenizer, dtype, jobs) if jobs else _here(tokenizer, dtype)
    with ThreadPoolExecutor(threads, "encode") as pool, encoding as encode:  # processes end before threads that wait
        try:
            for batch in _batches(sections):
                texts, ends = [section.text for section in batch], [section.ends for section in batch]
                waiting.append((batch, pool.submit(encode, texts, ends)))
                while len(waiting) > 2 * threads:
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


def _rows(tokenizer: Tokenizer, dtype: str, texts: Sequence[str], ends: Sequence[bool]) -> Rows:
    """The ids of texts, with the end of text behind those that end a document."""
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    rows = [row + end if ends else row for row, ends in zip(tokenizer.encode_batch(texts), ends, strict=True)]
    return [np.fromiter(row, dtype=dtype, count=len(row)) for row in rows]


@contextmanager
def _here(tokenizer: Tokenizer, dtype: str) -> Iterator[Encode]:
    yield partial(_rows, tokenizer, dtype)


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

        def encode(texts: list[str], ends: list[bool]) -> Rows:
            process = free.get()
            try:
                return process.encode(texts, ends)
            finally:
                free.put(process)

        yield encode


class _Process:
    """A process that encodes, one list of texts at a time."""

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

    def encode(self, texts: list[str], ends: list[bool]) -> Rows:
        """What `_rows` gives there."""
        self._send([texts, ends])
        assert self._process.stdout is not None
        head = self._process.stdout.readline()
        answer = json.loads(head) if head.endswith(b"\n") else {}
        if "error" in answer:
            raise TokenizerError(answer["error"])
        size = np.dtype(self._dtype).itemsize * sum(answer.get("counts", ()))
        raw = self._process.stdout.read(size)
        if not answer or len(raw) < size:
            raise ChildProcessError(self._death())
        return np.split(np.frombuffer(raw, self._dtype), np.cumsum(answer["counts"])[:-1])

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
    """Reads texts and writes their ids until standard input ends."""
    told, out = sys.stdin.buffer, sys.stdout.buffer
    settings = json.loads(told.readline())
    tokenizer = Tokenizer.from_json(settings["json"], settings["roles"])
    for line in told:
        texts, ends = json.loads(line)
        try:
            rows = _rows(tokenizer, settings["dtype"], texts, ends)
        except TokenizerError as error:
            out.write(json.dumps({"error": str(error)}).encode() + b"\n")
        else:
            out.write(json.dumps({"counts": [len(row) for row in rows]}).encode() + b"\n")
            out.writelines(row.tobytes() for row in rows)
        out.flush()


if __name__ == "__main__":
    main()
