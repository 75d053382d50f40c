"""The child process that runs students' files: it loads torch once, and forks a limited process for each file.

It is given arguments and returns what the functions return. Expected values are never in its memory, and verdicts are
computed elsewhere, so nothing that a file does to this process can change its own mark or another's.
"""

import importlib.util
import json
import os
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from weft.course.calls import CallRequest, CallResult, TracedValue, call
from weft.course.confine import confine
from weft.course.values import decode, encode
from weft.workers import respond

MAX_RESULT_BYTES = 1 << 26
GRACE_SECONDS = 0.5  # between the last answer of a process and its end


def attempt(request: dict[str, Any]) -> dict[str, Any]:
    """Run a file in a new process; return the lines that it answered, and why it ended."""
    with tempfile.TemporaryDirectory(prefix="weft-attempt-", ignore_cleanup_errors=True) as folder:
        if not hasattr(os, "fork"):  # Windows
            path = Path(folder) / request["file"]
            path.write_text(request["source"], encoding="utf-8")
            weak = {"weak": ["time", "memory", "writing outside the folder", "network and new processes"]}
            return {"lines": list(map(json.dumps, (weak, *_run(request, path)))), "ended": "", "status": 0}
        reader, writer = os.pipe()
        process = os.fork()
        if process == 0:
            os.close(reader)
            _child(request, folder, writer)
        os.close(writer)
        raw, ended = _collect(reader, time.monotonic() + request["wall"])
        status = _stop(process, late=bool(ended))
    lines = [line for line in raw.split(b"\n") if line.endswith(b"}")]
    return {"lines": [line.decode("utf-8", "replace") for line in lines], "ended": ended, "status": status}


def _collect(reader: int, until: float) -> tuple[bytes, str]:
    """Read until the end, the time or the size allowed."""
    parts, size = list[bytes](), 0
    try:
        while size <= MAX_RESULT_BYTES:
            left = until - time.monotonic()
            if left <= 0 or not select.select([reader], [], [], left)[0]:
                return b"".join(parts), "time"
            part = os.read(reader, 1 << 16)
            if not part:
                return b"".join(parts), ""
            parts.append(part)
            size += len(part)
        return b"".join(parts), "size"
    finally:
        os.close(reader)


def _stop(process: int, *, late: bool) -> int:
    """Wait for a process, or kill it if it is late; kill its group; return its exit status, negative for a signal."""
    until, done, status = time.monotonic() + (0 if late else GRACE_SECONDS), 0, 0
    while not done and time.monotonic() < until:
        done, status = os.waitpid(process, os.WNOHANG)
        time.sleep(0 if done else 0.002)
    for kill in (os.killpg, os.kill)[: 1 if done else 2]:
        with suppress(ProcessLookupError, PermissionError):
            kill(process, signal.SIGKILL)
    return os.waitstatus_to_exitcode(status if done else os.waitpid(process, 0)[1])


def _child(request: dict[str, Any], folder: str, writer: int) -> None:
    """Limit this process, run the file, and exit."""
    try:
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for handle in (0, 1, 2):
            os.dup2(null, handle)
        sys.dont_write_bytecode = True
        os.chdir(folder)
        path = Path(folder) / request["file"]
        path.write_text(request["source"], encoding="utf-8")
        weak = confine(folder, request["hidden"], seconds=request["seconds"], max_bytes=request["bytes"])
        _send(writer, {"weak": weak})
        for result in _run(request, path):
            _send(writer, result)
    finally:
        os._exit(0)


def _send(writer: int, value: dict[str, Any]) -> None:
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(writer, data) :]


def _run(request: dict[str, Any], path: Path) -> Iterator[dict[str, Any]]:
    """Load the file and yield the result of each call."""

    def load(**_: Any) -> Any:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
        return module

    loaded = call(load, CallRequest({}), str(path))
    function = getattr(loaded.value, request["function"], None)
    if loaded.error or not callable(function):
        missing = f"there is no function {request['function']} in it"
        yield {"load": to_json(loaded._replace(value=None, error=loaded.error or missing))}
        return
    for each in request["calls"]:
        wanted = CallRequest(**{**each, "arguments": decode(each["arguments"])})
        yield to_json(call(function, wanted, str(path)))


def to_json(result: CallResult) -> dict[str, Any]:
    """Convert a result to JSON data."""
    steps = [[*each[:3], encode(each.value)] for each in result.steps]
    return {**result._asdict(), "value": encode(result.value), "gradients": encode(result.gradients), "steps": steps}


def from_json(data: dict[str, Any]) -> CallResult:
    """Convert JSON data, which may come from a student's code, to a result."""
    steps = [TracedValue(str(name), int(line), str(text), decode(value)) for name, line, text, value in data["steps"]]
    return CallResult(
        decode(data["value"]),
        {str(name): value for name, value in decode(data["gradients"]).items()},
        error=str(data["error"]),
        line=int(data["line"]),
        text=str(data["text"]),
        changed=tuple(map(str, data["changed"])),
        random=bool(data["random"]),
        steps=tuple(steps),
        lines=int(data["lines"]),
        printed=str(data["printed"]),
    )


def main() -> None:
    """Answer each line of standard input, until it ends."""
    torch.set_num_threads(1)  # a forked process has no other threads
    for line in sys.stdin.buffer:
        respond(attempt(json.loads(line)))


if __name__ == "__main__":
    main()
