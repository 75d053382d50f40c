"""Child processes that serve requests over pipes: their responses, how they end, and that none is left."""

import os
import sys
import threading
import time
from contextlib import closing, suppress

import pytest

from weft.workers import Child, Children

# responds to a number with this many bytes, sleeps on text, and exits on a list
ANSWERS = """
import sys, time
from weft.workers import requests, respond
print("not a response", flush=True)
for value in requests():
    if isinstance(value, list):
        sys.exit(*value)
    if isinstance(value, str):
        try:
            respond({"begun": value})
            time.sleep(60)
        except KeyboardInterrupt:
            respond({"saved": value})
    else:
        respond({"size": value}, [b"x" * value])
"""
COMMAND = (sys.executable, "-c", ANSWERS)


@pytest.mark.timeout(60)
def test_responses_and_exits() -> None:
    with closing(Children(COMMAND, {})) as children:
        with children.acquire() as child:
            for size in (3, 200_000, 0):
                assert child.request(size) == {"size": size}
                assert child.read(size) == b"x" * size
        with children.acquire() as again:
            assert again is child
            with pytest.raises(ChildProcessError, match=r"^the text is gone$"):
                again.request(["warning\nthe text is gone"])
        for status, why in ((3, "exit status 3"), (0, "exit status 0")):
            with pytest.raises(ChildProcessError, match=why), Children(COMMAND, {}).acquire() as child:
                child.request([status])


@pytest.mark.timeout(60)
def test_a_child_is_interrupted_by_a_line_and_ends_with_its_parent() -> None:
    child = Child(COMMAND, {})
    assert child.request("\ud800 ü") == {"begun": "\ud800 ü"}
    assert child.request(None) == {"saved": "\ud800 ü"}
    child.request("sleep")
    assert child.process.stdin is not None
    child.process.stdin.close()
    assert child.process.wait(10) == 0


@pytest.mark.timeout(60)
def test_no_child_is_left_after_close() -> None:
    children = Children((sys.executable, "-c", "import time; time.sleep(60)"), {})
    started: list[Child] = []

    def request() -> None:
        with suppress(ChildProcessError), children.acquire() as child:
            started.append(child)
            child.request("anything")

    threads = [threading.Thread(target=request, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(started) < 3:
        time.sleep(0.01)
    children.close()
    for child in started:
        with pytest.raises(ProcessLookupError):
            os.kill(child.process.pid, 0)
    with pytest.raises(ChildProcessError, match="not started"), children.acquire():
        pass
