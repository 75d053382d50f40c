"""Chat templates: programs in a tokenizer's file, which may write text and do nothing else, and not forever.

They are Jinja's, and run in its sandbox, where no file, no module and no attribute of Python's own is in reach. The
sandbox bounds neither time nor memory, and what hangs inside Python's C code, such as comparing two lists that hold
each other sixty levels deep, cannot be interrupted. So templates are rendered in a process of their own
(`template_worker.py`), which the system ends when it takes too much of either. It is started once and then asked again
and again; asking costs some tens of microseconds.
"""

import atexit
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from weft.errors import TokenizerError

SECONDS = 1  # of a processor, for one rendering; the longest conversations take a tenth of it
MEMORY = 1 << 30  # bytes, of all that the process holds
LARGEST = 1 << 24  # characters of a conversation


def render(template: str, given: Mapping[str, Any]) -> str:
    """The text that a template makes of `given`; whatever goes wrong with it is one line."""
    try:
        answer = _worker.ask(json.dumps({"template": template, "given": given}, default=dict))
    except OSError as error:
        answer = {"error": f"its process cannot be started: {error.strerror or error}"}
    if "error" in answer:
        raise TokenizerError(f"the chat template cannot be rendered: {answer['error']}")
    return answer["text"]


class _Worker:
    """The process that renders. One is started when it is needed, and again when it was ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: str) -> dict[str, Any]:
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self.close()
                self._process = _start()
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            try:
                process.stdin.write(question.encode() + b"\n")
                process.stdin.flush()
                answer = process.stdout.readline()
            except BrokenPipeError:
                answer = b""
            except BaseException:  # an answer may still come, and must not be taken for that to the next question
                self.close()
                raise
            if not answer.endswith(b"\n"):
                return {"error": _ending(process.wait())}
            found = json.loads(answer)
            if found.get("spent"):
                self.close()
            return found

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            with suppress(BrokenPipeError), self._process:
                pass
            self._process = None


def _start() -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [sys.executable, "-P", "-c", "from weft.text.template_worker import serve; serve()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # Ctrl-C is for this process alone
    )


def _ending(code: int) -> str:
    """Why the process ended without an answer."""
    if hasattr(signal, "SIGXCPU") and code == -signal.SIGXCPU:
        return f"it takes more than {SECONDS} second"
    how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
    return f"it ends its process ({how})"


_worker = _Worker()
atexit.register(lambda: _worker.close())


def _forget() -> None:
    """After a fork the child starts a process of its own: two cannot share the pipes of one."""
    global _worker
    _worker = _Worker()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
