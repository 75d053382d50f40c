"""Child processes that are asked over pipes: a line of JSON in, a line of JSON out, with bytes behind it if need be.

The standard library's pools don't serve: they can't start a process by way of another command, as Slurm's srun is, and
their processes import the main script again, which starts everything over in a script that doesn't ask whether
`__name__ == "__main__"`. Nothing is pickled here. A child runs in a session of its own, so that Ctrl-C comes to its
parent alone, which knows what has to be saved; and it ends when its parent does, however that ends.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import IO, Any

PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # where weft is
ERROR_BYTES = 10_000  # of what a child wrote to standard error, of which the last line says why it died


class Child:
    """A child process, which answers one question at a time."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        # a pipe that nobody reads would hold the process up once it is full
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # `end` closes it
        # a file called json.py in the folder where somebody works is no module of ours
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), PACKAGES)))
        variables = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path, **environment}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, env=variables, start_new_session=True
        )

    def tell(self, value: Any) -> None:
        """Send a value; `None` interrupts what the child does, as Ctrl-C would."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it died, and gives no answer
            self.process.stdin.write(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
            self.process.stdin.flush()

    def ask(self, value: Any) -> dict[str, Any]:
        """The line that answers a value. ChildProcessError says how the process died."""
        self.tell(value)
        assert self.process.stdout is not None
        for line in iter(self.process.stdout.readline, b""):
            if line.startswith(b"{") and line.endswith(b"\n"):  # whatever starts a process may write lines as well
                return json.loads(line)
        raise ChildProcessError(self._death())

    def read(self, size: int) -> bytes:
        """The bytes behind an answer."""
        assert self.process.stdout is not None
        raw = self.process.stdout.read(size)
        if len(raw) < size:
            raise ChildProcessError(self._death())
        return raw

    def _death(self) -> str:
        status = self.process.wait()
        if status == -signal.SIGKILL:
            return "it was killed, perhaps because memory ran out"
        end = self._errors.seek(0, os.SEEK_END)
        self._errors.seek(max(0, end - ERROR_BYTES))
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), f"it ended with exit status {status}")

    def wait(self, until: float) -> None:
        """Wait for the process to end, until a monotonic time; then it is killed."""
        try:
            self.process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self._errors):
            assert pipe is not None
            with suppress(OSError, ValueError):
                pipe.close()


class Children:
    """Child processes of one command, started as they are needed. Each is told `first` before anything is asked."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], first: Any = None) -> None:
        self._command, self._environment, self._first = command, environment, first
        self._started: list[Child] = []
        self._free: SimpleQueue[Child] = SimpleQueue()
        self._lock, self._closed = Lock(), False

    @contextmanager
    def free(self) -> Iterator[Child]:
        """A child that nobody else asks meanwhile."""
        try:
            child = self._free.get_nowait()
        except Empty:
            with self._lock:
                if self._closed:
                    raise ChildProcessError("it was not started, for all are to end") from None
                child = Child(self._command, self._environment)
                self._started.append(child)
            if self._first is not None:
                child.tell(self._first)
        yield child
        self._free.put(child)

    def interrupt(self, seconds: float) -> None:
        """Interrupt all, and give them so many seconds to save what they have."""
        for child in self._started:
            child.tell(None)  # not a signal: srun kills on those that mean an end
        until = time.monotonic() + seconds
        for child in self._started:
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                child.process.wait(max(0.1, until - time.monotonic()))

    def close(self, seconds: float = 0.0) -> None:
        """End all: at once, or, where something else has started them, by asking it, which has so many seconds."""
        with self._lock:
            self._closed = True
        for child in self._started:
            child.process.send_signal(signal.SIGTERM if seconds else signal.SIGKILL)
        until = time.monotonic() + seconds
        for child in self._started:
            child.wait(until)


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def told() -> Iterator[Any]:
    """The values that this child process is told, as they come. When standard input ends, it does, at once."""
    values: SimpleQueue[Any] = SimpleQueue()

    def read() -> None:
        with open(0, "rb", closefd=False) as lines:  # not sys.stdin, which an ending interpreter waits for
            for line in lines:
                value = json.loads(line)
                if value is None:
                    os.kill(os.getpid(), signal.SIGINT)
                else:
                    values.put(value)
        os._exit(0)  # nobody is left to answer

    Thread(target=read, daemon=True).start()
    while True:
        yield values.get()


def answer(head: Mapping[str, Any], body: Iterable[bytes] = ()) -> None:
    """Answer what this child process was told last."""
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n")
    sys.stdout.buffer.writelines(body)
    sys.stdout.buffer.flush()
