"""Files by pattern, as `glob` finds them, but each folder once: links that lead back would give names without end."""

import fnmatch
import glob
import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

is_pattern = glob.has_magic


def identity(path: str) -> tuple[int, int] | None:
    """What a file or a folder is, whatever it is called: device and inode; None for anything else."""
    if not os.path.isfile(path) and not os.path.isdir(path):
        return None
    status = os.stat(path)
    return status.st_dev, status.st_ino


def matching(pattern: str) -> Iterator[tuple[str, str | None]]:
    """What matches, in order, and the reason why a folder that `**` leads to isn't read."""
    parts = pattern.replace(os.sep, "/").split("/")
    if "**" not in parts:
        yield from ((path, None) for path in sorted(glob.glob(pattern)))
        return
    at = parts.index("**")
    found, again = set[str](), set[str]()
    seen = set[tuple[tuple[int, int] | None, int]]()  # folders, each with how much of the pattern is left there
    above = glob.glob("/".join([*parts[:at], ""])) if at else [""]
    waiting = deque((folder, parts[at:]) for folder in above)
    while waiting:
        folder, (part, *rest) = waiting.popleft()
        if part == "**":
            state = identity(folder or "."), len(rest)
            if state in seen:
                again |= {folder} if os.path.islink(folder) else set()
                continue
            seen.add(state)
            if rest:
                waiting.appendleft((folder, rest))
        for path in _inside(folder, part):
            if not os.path.isdir(path):
                found |= set() if rest else {path}
            elif part == "**" or rest:
                # links last: a folder that has both is called by its own name
                add = waiting.append if os.path.islink(path) else waiting.appendleft
                add((path, [part, *rest] if part == "**" else rest))
    yield from ((path, None) for path in sorted(found))
    yield from ((path, "a link to a folder that is read already") for path in sorted(again))


def _inside(folder: str, part: str) -> list[str]:
    """What a part of a pattern, between two slashes, names in a folder; hidden files if it begins with a dot."""
    if part != "**" and not glob.has_magic(part):
        return [path] if os.path.lexists(path := os.path.join(folder, part)) else []
    with suppress(OSError):  # what may not be looked into has no names, as for `glob`
        names = (name for name in os.listdir(folder or ".") if name[0] != "." or part[0] == ".")
        return [os.path.join(folder, name) for name in names if fnmatch.fnmatch(name, part)]
    return []
