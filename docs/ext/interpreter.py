"""The Python of one page: runs the blocks that it is sent, one after the other, with the same names.

A block comes as a line of JSON on standard input; the exit code goes back as a line on standard output, and what the
block printed, its child processes too, into the file that the line named.
"""

import json
import linecache
import os
import sys
import traceback
from typing import Any


def main() -> None:
    sys.path[0] = ""  # the page's folder, as at a prompt
    asking, answering = os.fdopen(os.dup(0), encoding="utf-8"), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    names: dict[str, Any] = {"__name__": "__main__"}
    for line in asking:
        asked = json.loads(line)
        with open(asked["output"], "wb") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        status = run(asked["code"], f"<{asked['name']}>", names)
        sys.stdout.flush()
        answering.write(f"{status}\n")
        answering.flush()


def run(code: str, name: str, names: dict[str, Any]) -> int:
    """Execute a block; what it raises is printed as Python would."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)  # for tracebacks
    try:
        exec(compile(code, name, "exec"), names)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        traceback.print_exception(error)
        return 1
    return 0


if __name__ == "__main__":
    main()
