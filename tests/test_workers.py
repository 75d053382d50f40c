"""Child processes that are asked over pipes: what they answer, how they die, and that none is left."""

import os
import sys
import threading
import time
from contextlib import closing, suppress

import pytest

from weft.workers import Child, Children

# answers a number with so many bytes, sleeps when it is told text, and dies of a list
ANSWERS = """
import sys, time
from weft.workers import answer, told
print("not an answer", flush=True)
for value in told():
    if isinstance(value, list):
        sys.exit(*value)
    if isinstance(value, str):
        try:
            answer({"begun": value})
            time.sleep(60)
        except KeyboardInterrupt:
            answer({"saved": value})
    else:
        answer({"size": value}, [b"x" * value])
"""
COMMAND = (sys.executable, "-c", ANSWERS)


@pytest.mark.timeout(60)
def test_answers_and_deaths() -> None:
    with closing(Children(COMMAND, {})) as children:
        with children.free() as child:
            for size in (3, 200_000, 0):
                assert child.ask(size) == {"size": size}
                assert child.read(size) == b"x" * size
        with children.free() as again:
            assert again is child
            with pytest.raises(ChildProcessError, match=r"^the text is gone$"):
                again.ask(["warning\nthe text is gone"])
        for status, why in ((3, "exit status 3"), (0, "exit status 0")):
            with pytest.raises(ChildProcessError, match=why), Children(COMMAND, {}).free() as child:
                child.ask([status])


@pytest.mark.timeout(60)
def test_a_child_is_interrupted_by_a_line_and_ends_with_its_parent() -> None:
    child = Child(COMMAND, {})
    assert child.ask("\ud800 ü") == {"begun": "\ud800 ü"}
    assert child.ask(None) == {"saved": "\ud800 ü"}
    child.ask("sleep")
    assert child.process.stdin is not None
    child.process.stdin.close()
    assert child.process.wait(10) == 0


@pytest.mark.timeout(60)
def test_none_is_left_when_all_end() -> None:
    children = Children((sys.executable, "-c", "import time; time.sleep(60)"), {})
    started: list[Child] = []

    def ask() -> None:
        with suppress(ChildProcessError), children.free() as child:
            started.append(child)
            child.ask("anything")

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(started) < 3:
        time.sleep(0.01)
    children.close()
    for child in started:
        with pytest.raises(ProcessLookupError):
            os.kill(child.process.pid, 0)
    with pytest.raises(ChildProcessError, match="not started"), children.free():
        pass
