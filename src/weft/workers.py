"""Child processes that serve requests over pipes: a line of JSON in, a line of JSON out, optionally followed by bytes.

The standard library's process pools do not fit: they can't start a process through another command, such as Slurm's
srun, and their processes import the main script again, which starts everything over in a script that does not check
`__name__ == "__main__"`. Nothing is pickled here. A child runs in a separate session, so that only its parent receives
Ctrl-C and can decide what to save; and it ends when its parent does, for whatever reason.
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

PACKAGES = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # the folder that contains weft
MAX_ERROR_BYTES = 10_000  # end of a child's standard error that is read, to find the last line


class Child:
    """A child process, which serves one request at a time; None in `environment` removes a variable."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str | None]) -> None:
        # not a pipe: a full pipe that nobody reads would block the child
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # `wait` closes it
        # safe path: a file json.py in the working directory must not be imported
        path = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), PACKAGES)))
        changed = {**os.environ, "PYTHONSAFEPATH": "1", "PYTHONPATH": path, **environment}
        variables = {name: value for name, value in changed.items() if value is not None}
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=self._errors, env=variables, start_new_session=True
        )

    def send(self, value: Any) -> None:
        """Send a value; `None` interrupts the child, as Ctrl-C would."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # the child died; `request` reports it
            self.process.stdin.write(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n")
            self.process.stdin.flush()

    def request(self, value: Any) -> dict[str, Any]:
        """Send a value and return the response; raise ChildProcessError with the reason if the process died."""
        self.send(value)
        assert self.process.stdout is not None
        for line in iter(self.process.stdout.readline, b""):
            if line.startswith(b"{") and line.endswith(b"\n"):  # a launcher may write lines too
                return json.loads(line)
        raise ChildProcessError(self._death())

    def read(self, size: int) -> bytes:
        """Return the bytes that follow a response."""
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
        self._errors.seek(max(0, end - MAX_ERROR_BYTES))
        lines = self._errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), f"it ended with exit status {status}")

    def wait(self, until: float) -> None:
        """Wait until a monotonic time for the process to end; kill it then."""
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
    """Child processes of one command, started on demand. Each is sent `first` before any request."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str | None], first: Any = None) -> None:
        self._command, self._environment, self._first = command, environment, first
        self._started: list[Child] = []
        self._free: SimpleQueue[Child] = SimpleQueue()
        self._lock, self._closed = Lock(), False

    @contextmanager
    def acquire(self) -> Iterator[Child]:
        """Yield a child for exclusive use."""
        try:
            child = self._free.get_nowait()
        except Empty:
            with self._lock:
                if self._closed:
                    raise ChildProcessError("it was not started: all are being closed") from None
                child = Child(self._command, self._environment)
                self._started.append(child)
            if self._first is not None:
                child.send(self._first)
        yield child
        self._free.put(child)

    def interrupt(self, seconds: float) -> None:
        """Interrupt all children, and give them this many seconds to save their work."""
        for child in self._started:
            child.send(None)  # not a signal: srun would kill the child
        until = time.monotonic() + seconds
        for child in self._started:
            with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
                child.process.wait(max(0.1, until - time.monotonic()))

    def close(self, seconds: float = 0.0) -> None:
        """End all children: immediately, or through the launcher that started them, within this many seconds."""
        with self._lock:
            self._closed = True
        for child in self._started:
            child.process.send_signal(signal.SIGTERM if seconds else signal.SIGKILL)
        until = time.monotonic() + seconds
        for child in self._started:
            child.wait(until)


def cores() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def requests() -> Iterator[Any]:
    """Yield the values sent to this child process. It exits immediately when standard input ends."""
    values: SimpleQueue[Any] = SimpleQueue()

    def read() -> None:
        with open(0, "rb", closefd=False) as lines:  # not sys.stdin, whose lock an exiting interpreter waits for
            for line in lines:
                value = json.loads(line)
                if value is None:
                    os.kill(os.getpid(), signal.SIGINT)
                else:
                    values.put(value)
        os._exit(0)  # the parent is gone

    Thread(target=read, daemon=True).start()
    while True:
        yield values.get()


def respond(head: Mapping[str, Any], body: Iterable[bytes] = ()) -> None:
    """Respond to the last request to this child process."""
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n")
    sys.stdout.buffer.writelines(body)
    sys.stdout.buffer.flush()
