"""Find files by pattern, as `glob` does, but visit each folder once: links to a parent would never end."""

import fnmatch
import glob
import os
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

is_pattern = glob.has_magic


def identity(path: str) -> tuple[int, int] | None:
    """Device and inode of a file or folder, independent of its name; None for anything else."""
    if not os.path.isfile(path) and not os.path.isdir(path):
        return None
    status = os.stat(path)
    return status.st_dev, status.st_ino


def find_matches(pattern: str) -> Iterator[tuple[str, str | None]]:
    """Yield the sorted paths that match, each with None; then skipped links to folders below `**`, with the reason."""
    parts = pattern.replace(os.sep, "/").split("/")
    if "**" not in parts:
        yield from ((path, None) for path in sorted(glob.glob(pattern)))
        return
    at = parts.index("**")
    matches, repeated = set[str](), set[str]()
    visited = set[tuple[tuple[int, int] | None, int]]()  # folders, each with the number of parts that follow `**`
    queue = deque((folder, parts[at:]) for folder in (glob.glob("/".join([*parts[:at], ""])) if at else [""]))
    while queue:
        folder, (part, *tail) = queue.popleft()
        if part == "**":
            state = identity(folder or "."), len(tail)
            if state in visited:
                repeated |= {folder} if os.path.islink(folder) else set()
                continue
            visited.add(state)
            if tail:
                queue.appendleft((folder, tail))
        for path in _entries(folder, part):
            if not os.path.isdir(path):
                matches |= set() if tail else {path}
            elif part == "**" or tail:
                # links last, so that a folder that also has a link is found under its own name
                add = queue.append if os.path.islink(path) else queue.appendleft
                add((path, [part, *tail] if part == "**" else tail))
    yield from ((path, None) for path in sorted(matches))
    yield from ((path, "a link to a folder that is read already") for path in sorted(repeated))


def _entries(folder: str, part: str) -> list[str]:
    """Paths in a folder that match one part of a pattern; hidden files only if the part begins with a dot."""
    if part != "**" and not glob.has_magic(part):
        return [path] if os.path.lexists(path := os.path.join(folder, part)) else []
    with suppress(OSError):  # an unreadable folder has no entries, as for `glob`
        names = (name for name in os.listdir(folder or ".") if name[0] != "." or part[0] == ".")
        return [os.path.join(folder, name) for name in names if fnmatch.fnmatch(name, part)]
    return []
