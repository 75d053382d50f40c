"""The child process that runs students' files: it loads torch once, and forks a limited process for each file.

It is given arguments and returns what the functions return. Neither the expected values of secret cases nor the answers
to other files are ever in its memory, and verdicts are computed elsewhere, so nothing that a file does can change its
mark or another's.
"""

import faulthandler
import importlib.util
import json
import os
import re
import select
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter

from weft.course.calls import CallResult, Case, call, repairs
from weft.course.confine import LIMITS, Limits, confine
from weft.workers import respond

# answer of a process that cannot be made
NOTHING: dict[str, Any] = {"lines": [], "reason": "", "stack": [], "loading": False, "weak": []}
CASES, RESULTS = TypeAdapter(list[Case]), TypeAdapter(CallResult)
FORKS = hasattr(os, "fork")  # not on Windows
Run = Callable[[str], Iterator[CallResult]]
MAX_RESULT_BYTES, MAX_STACK_BYTES = 1 << 26, 1 << 16
MAX_WRITTEN_BYTES, FILE_BYTES = 1 << 28, 1 << 12  # what it may write, and what each file counts at least
WALL_FACTOR = 3  # seconds of wall-clock time per second of CPU time; the machine may be busy
POLL_SECONDS = 0.1
GRACE_SECONDS = 0.5  # between the last answer of a process and its end


def attempt(request: dict[str, Any]) -> dict[str, Any]:
    """Run a file in a new process; return what `confined` returns."""

    def run(folder: str) -> Iterator[CallResult]:
        path = Path(folder) / f"{request['name']}.py"
        path.write_text(request["source"], encoding="utf-8")
        return _run(request, path)

    if FORKS:
        return confined(run, Limits(*request["limits"]))
    with tempfile.TemporaryDirectory(prefix="weft-attempt-") as folder:  # Windows
        return {**NOTHING, "lines": list(map(_line, run(folder))), "weak": ["time", *LIMITS]}


def confined(run: Run, limits: Limits) -> dict[str, Any]:
    """Run a function, which gets a folder, in a limited process that is a copy of this one.

    Returns the lines that it answered, why there are no more, the numbers of the lines of the folder's files that ran
    when the time was up, the innermost first, whether a file was being loaded then, and which limits the system did not
    enforce.
    """
    removed = tempfile.TemporaryDirectory(prefix="weft-attempt-", ignore_cleanup_errors=True)
    with suppress(RecursionError), tempfile.TemporaryFile() as stack, removed as folder:  # a thousand nested are left
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            _child(run, folder, (writer, stack.fileno()), limits=limits)
        os.close(writer)
        raw, reason = _collect(reader, folder, limits.seconds)
        status = _stop(process, late=bool(reason))
        stack.seek(0)
        written = stack.read(MAX_STACK_BYTES).decode("latin-1")
    running = re.findall(rf"{Path(folder).name}.*, line (\d+) in (\S+)", written)
    weak, *lines = raw.decode("utf-8", "replace").split("\n")[:-1] or ["[]"]
    if status in (-signal.SIGXCPU, -signal.SIGKILL):
        reason = reason or f"it takes more than {limits.seconds} seconds"
    reason = reason or f"the process ended with exit status {status} before it answered"
    numbers, loading = [int(number) for number, _ in running], "<module>" in {name for _, name in running}
    return {"lines": lines, "reason": reason, "stack": numbers, "loading": loading, "weak": json.loads(weak)}


def _collect(reader: int, folder: str, seconds: int) -> tuple[bytes, str]:
    """Read until the end, or until the process takes too long, answers too much or writes too much."""
    raw, until = bytearray(), time.monotonic() + WALL_FACTOR * seconds
    with open(reader, "rb", buffering=0) as pipe:
        while len(raw) <= MAX_RESULT_BYTES:
            if time.monotonic() > until:
                return bytes(raw), f"it takes more than {seconds} seconds"
            if not select.select([reader], [], [], POLL_SECONDS)[0]:
                with suppress(OSError, RecursionError):  # files come and go
                    sizes = (path.lstat().st_size for path in Path(folder).rglob("*"))
                    if sum(max(size, FILE_BYTES) for size in sizes) > MAX_WRITTEN_BYTES:
                        return bytes(raw), "it writes too much"
            elif part := pipe.read(1 << 16):
                raw += part
            else:
                return bytes(raw), ""
    return bytes(raw), "its answers are too large"


def _stop(process: int, *, late: bool) -> int:
    """Wait for a process; kill it and its group; return its exit status, negative for a signal.

    One that is late writes its stack before.
    """
    if late:
        os.kill(process, signal.SIGXCPU)
    until, done, status = time.monotonic() + GRACE_SECONDS, 0, 0
    while not done and time.monotonic() < until:
        done, status = os.waitpid(process, os.WNOHANG)
        time.sleep(0 if done else 0.002)
    for kill in (os.killpg, os.kill)[: 1 if done else 2]:
        with suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status if done else os.waitpid(process, 0)[1])


def _child(run: Run, folder: str, files: tuple[int, int], *, limits: Limits) -> None:
    """Limit this process, run the function, and exit. Of the open files, results go to one, the stack to the other."""
    writer, stack = files
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for handle in (0, 1, 2):
            os.dup2(null, handle)
        for low, high in pairwise((2, *sorted(files), os.sysconf("SC_OPEN_MAX"))):
            os.closerange(low + 1, high)
        faulthandler.register(signal.SIGXCPU, stack)
        sys.dont_write_bytecode = True
        torch.set_num_threads(1)  # a forked process has no other threads
        os.chdir(folder)
        tempfile.tempdir = folder
        weak = json.dumps(confine(folder, limits))
        for line in chain([weak], map(_line, run(folder))):
            data = line.encode() + b"\n"
            while data:
                data = data[os.write(writer, data) :]
    finally:
        os._exit(0)


def _line(result: CallResult) -> str:
    try:
        text = json.dumps(RESULTS.dump_python(result), ensure_ascii=False)
        return text.encode("utf-8", "replace").decode()  # lone surrogates are no text
    except (ValueError, RecursionError) as error:  # such as an integer of a million digits
        return _line(CallResult(error=f"its result cannot be read: {error}"))


def _run(request: dict[str, Any], path: Path) -> Iterator[CallResult]:
    """Load the file and yield the result of each call, or of loading it if that fails."""

    def load() -> None:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)

    loaded = call(load, Case({}), str(path))
    function: Any = getattr(sys.modules.get(path.stem), request["name"], None)
    error = loaded.error or ("" if callable(function) else f"there is no function {request['name']} in it")
    cases = CASES.validate_python(request["cases"])
    if cases[0].expected and not error:
        yield repairs(function, cases, str(path))
        return
    for each in cases:
        yield loaded._replace(value=None, error=error, loaded=False) if error else call(function, each, str(path))


def main() -> None:
    """Answer each line of standard input, until it ends."""
    for line in sys.stdin.buffer:
        if not FORKS:
            respond(attempt(json.loads(line)))
        elif os.fork() == 0:  # so that this process, which the next file's is a copy of, never sees an answer
            respond(attempt(json.loads(line)))
            os._exit(0)
        elif os.wait()[1]:
            sys.exit("no answer")


if __name__ == "__main__":
    main()
