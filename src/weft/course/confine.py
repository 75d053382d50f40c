"""Limits on the process that runs a student's code: time, memory, files, network and other processes.

The kernel enforces them where it can (Linux: resource limits, seccomp, Landlock). Python's audit hooks, which native
code can evade, enforce the rest; `confine` returns what is left to them.
"""

import ctypes
import os
import platform
import re
import struct
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weft.config import read_toml

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

LIMITS = ("memory", "files outside the folder", "network and new processes")
MAX_FILE = 1 << 24  # bytes of a file that it writes
CLONE3, CLONE_THREAD = 435, 0x10000
OTHER_ABI = 0x40000000  # numbers of x32's system calls
ALLOW, EPERM, ENOSYS = 0x7FFF0000, 0x00050001, 0x00050026  # results of a seccomp filter
LOAD, EQUAL, AT_LEAST, MASK, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of BPF
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2  # arguments of prctl
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
READ_FILE, READ_DIR = 1 << 2, 1 << 3  # Landlock's rights; the others are to write and remove files and folders
RIGHTS = 0b1111111111110, 1 << 13, 1 << 14  # that the versions 1, 2 and 3 added, without the right to execute
SYSTEM = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/etc/localtime", "/dev/urandom", "/sys/devices/system/cpu")
# audit events: those with a path as first argument, and those refused always
PATH_EVENTS = re.compile(
    r"os\.(?:remove|rename|rmdir|mkdir|truncate|link|symlink|chmod|chown|utime|setxattr|removexattr)|shutil\."
)
DENIED_EVENTS = re.compile(r"socket\.|subprocess\.|os\.(?:system|exec|fork|posix_spawn|spawn|kill)|pty\.")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class Limits(NamedTuple):
    """Limits on a process: CPU time, bytes of memory beyond torch's, and folders that it must not read."""

    seconds: int
    memory: int = 2 << 30
    hidden: Sequence[str] = ()


def confine(folder: str, limits: Limits) -> list[str]:
    """Limit this process, which may write in `folder` only. Return what is not fully enforced."""
    hidden = limits.hidden
    readable = [os.path.realpath(path) for path in (*SYSTEM, sys.prefix, sys.base_prefix, *sys.path)]
    memory, rules = _limit_resources(limits), [rule for path in readable for rule in _rules(path, hidden)]
    enforced = memory, _landlock(folder, rules), _seccomp()
    _add_hook(folder, hidden, readable, native=not all(enforced[1:]))
    return [limit for limit, holds in zip(LIMITS, enforced, strict=True) if not holds]


def _limit_resources(limits: Limits) -> bool:
    if resource is None:
        return False
    resource.setrlimit(resource.RLIMIT_CPU, (limits.seconds, limits.seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE, MAX_FILE))
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + limits.memory, used + limits.memory))
    except (OSError, ValueError):
        return False
    return True


def _within(path: Any, place: str) -> bool:
    return os.path.join(os.path.realpath(os.fsdecode(path)), "").startswith(os.path.join(place, ""))


def _rules(path: str, hidden: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield paths and rights that together allow to read everything in `path` but the folders `hidden`."""
    if not any(_within(place, path) for place in hidden):
        yield path, READ_FILE | (READ_DIR if os.path.isdir(path) else 0)
    elif path not in hidden:
        yield path, READ_DIR
        for entry in os.scandir(path):
            yield from () if entry.is_symlink() else _rules(entry.path, hidden)


def _landlock(folder: str, rules: Sequence[tuple[str, int]]) -> bool:
    """Allow nothing but writing in `folder` and what the rules say (Linux 5.13); return whether the kernel does."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return False
    handled = sum(RIGHTS[:version])
    ruleset = libc.syscall(LANDLOCK_CREATE, struct.pack("<Q", handled), 8, 0)
    for path, rights in ((folder, handled), (os.devnull, READ_FILE | 1 << 1), *rules):
        if os.path.exists(path):
            handle = os.open(path, os.O_PATH)
            libc.syscall(LANDLOCK_ADD, ruleset, 1, struct.pack("<Qi", rights, handle), 0)
            os.close(handle)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return libc.syscall(LANDLOCK_RESTRICT, ruleset, 0) == 0


def _seccomp() -> bool:
    """Refuse sockets, new processes and signals to others, but not threads; return whether the kernel does."""
    calls = read_toml(Path(__file__).with_name("syscalls.toml")).get(platform.machine())
    if sys.platform != "linux" or calls is None:
        return False
    # instruction, value, and how many instructions to skip if it holds, and if it does not
    program = [(LOAD, 4, 0, 0), (EQUAL, calls["audit"], 1, 0), (RETURN, EPERM, 0, 0), (LOAD, 0, 0, 0)]
    program += [(AT_LEAST, OTHER_ABI, 0, 1), (RETURN, EPERM, 0, 0)]
    program += [step for number in calls["denied"] for step in ((EQUAL, number, 0, 1), (RETURN, EPERM, 0, 0))]
    # clone3 passes its flags in memory, which a filter can't read; libc then uses clone
    program += [(EQUAL, CLONE3, 0, 1), (RETURN, ENOSYS, 0, 0)]
    program += [(EQUAL, calls["clone"], 0, 4), (LOAD, 16, 0, 0), (MASK, CLONE_THREAD, 1, 0), (RETURN, EPERM, 0, 0)]
    program += [(RETURN, ALLOW, 0, 0)]
    # prlimit: the pointer to new limits, two halves, has to be null
    program += [(EQUAL, calls["limit"], 0, 5), (LOAD, 32, 0, 0), (EQUAL, 0, 0, 2), (LOAD, 36, 0, 0), (EQUAL, 0, 1, 0)]
    program += [(RETURN, EPERM, 0, 0), (RETURN, ALLOW, 0, 0)]
    steps = b"".join(struct.pack("<HBBI", code, true, false, value) for code, value, true, false in program)
    code = ctypes.create_string_buffer(steps)
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return libc.prctl(SECCOMP, FILTER, header, 0, 0) == 0


def _add_hook(folder: str, hidden: Sequence[str], readable: Sequence[str], *, native: bool) -> None:
    """Refuse the same in Python, with a message; `native`: refuse native code as well, for want of the kernel."""

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        path = arguments[0] if arguments and isinstance(arguments[0], str | bytes | os.PathLike) else None
        opened = event == "open" and path is not None
        if opened and any(_within(path, place) for place in hidden):
            raise PermissionError("reading the solutions is not allowed")
        writes = bool(PATH_EVENTS.match(event)) or (opened and isinstance(arguments[2], int) and arguments[2] & WRITING)
        allowed = [folder, os.devnull] if writes else [folder, *readable]
        if path is not None and (writes or opened) and not any(_within(path, place) for place in allowed):
            verb = "writing" if writes else "reading"
            raise PermissionError(f"{verb} {os.fsdecode(path)} is not allowed: outside the folder")
        if DENIED_EVENTS.match(event) or (native and event.startswith("ctypes.")):
            raise PermissionError(f"{event} is not allowed")

    sys.addaudithook(hook)
