"""The Python interpreter of one page: runs the blocks that it is sent, one after the other, in one namespace.

A block arrives as a line of JSON on standard input, and its exit code is answered as a line on standard output. The
output of the block and its child processes goes to the file that the request names.
"""

import json
import linecache
import os
import sys
import traceback
from typing import Any


def main() -> None:
    sys.path[0] = ""  # the page's folder, as at a prompt
    requests, replies = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for line in requests:
        request = json.loads(line)
        with open(request["output"], "wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        status = run(request["code"], f"<{request['name']}>", namespace)
        sys.stdout.flush()
        replies.write(f"{status}\n")
        replies.flush()


def run(code: str, name: str, namespace: dict[str, Any]) -> int:
    """Execute a block and return its exit code; print a traceback for an exception, as Python does."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)  # for tracebacks
    try:
        exec(compile(code, name, "exec"), namespace)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(error)
        return 1
    return 0


if __name__ == "__main__":
    main()
