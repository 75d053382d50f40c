"""Limits on the process that runs a student's code: time, memory, files, network and other processes.

The kernel enforces them where it can (Linux: resource limits, seccomp, Landlock). Python's audit hooks, which native
code can evade, enforce the rest; `confine` returns what is left to them.
"""

import ctypes
import os
import platform
import struct
import sys
from collections.abc import Callable
from typing import Any

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

# system calls by number: sockets, new processes and programs, signals, debugging, sessions, io_uring
DENIED = {
    "x86_64": (0xC000003E, (41, 42, 49, 53, 57, 58, 59, 62, 101, 109, 112, 200, 234, 310, 311, 322, 424, 425), 56),
    "aarch64": (0xC00000B7, (198, 199, 200, 203, 221, 129, 117, 154, 157, 130, 131, 270, 271, 281, 424, 425), 220),
}
CLONE3, CLONE_THREAD = 435, 0x10000
EPERM, ENOSYS = 1, 38
ALLOW, ERROR = 0x7FFF0000, 0x00050000  # results of a seccomp filter; the error's number is added
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2  # arguments of prctl
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
WRITES = 0b1111111110010  # Landlock: write and remove files, make and remove folders, devices, sockets and links
WRITE_FILE = 0b10
# audit events: those with a path as first argument, and those refused always
PATH_EVENTS = (
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.truncate",
    "os.link",
    "os.symlink",
    "os.chmod",
    "shutil.",
)
DENIED_EVENTS = (
    "socket.",
    "subprocess.",
    "os.system",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
    "os.kill",
    "pty.",
)
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def confine(folder: str, seconds: int, max_bytes: int) -> list[str]:
    """Limit this process from now on; files may be written in `folder` only. Return what is not fully enforced."""
    weak = [] if _limit_resources(seconds, max_bytes) else ["memory"]
    files = _attempt(lambda: _landlock(folder))
    processes = _attempt(_seccomp)
    weak += [] if files else ["writing outside the folder"]
    weak += [] if processes else ["network and new processes"]
    _add_hook(folder, native=files and processes)
    return weak


def _attempt(install: Callable[[], None]) -> bool:
    try:
        install()
    except (OSError, AttributeError, KeyError):
        return False
    return True


def _limit_resources(seconds: int, max_bytes: int) -> bool:
    if resource is None:
        return False
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (max_bytes, max_bytes))
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + max_bytes, used + max_bytes))
    except (OSError, ValueError):
        return False
    return True


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused by the kernel")
    return result


def _landlock(folder: str) -> None:
    """Allow writing in `folder` and to /dev/null only (Linux 5.13)."""
    if sys.platform != "linux":
        raise OSError("not Linux")
    libc = _libc()
    rules = _checked(libc.syscall(LANDLOCK_CREATE, struct.pack("<Q", WRITES), 8, 0))
    for path, rights in ((folder, WRITES), (os.devnull, WRITE_FILE)):
        handle = os.open(path, getattr(os, "O_PATH", 0))
        _checked(libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("<Qi", rights, handle), 0))
        os.close(handle)
    _checked(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _checked(libc.syscall(LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)


def _seccomp() -> None:
    """Refuse sockets, new processes and signals to others; threads are allowed."""
    if sys.platform != "linux":
        raise OSError("not Linux")
    architecture, denied, clone = DENIED[platform.machine()]

    def statement(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
        return struct.pack("<HBBI", code, true, false, value)

    load, equal, mask, result = 0x20, 0x15, 0x45, 0x06  # of BPF: load a word, compare, test bits, return
    program = [
        statement(load, 4),
        statement(equal, architecture, 1, 0),
        statement(result, ERROR | EPERM),
        statement(load, 0),
    ]
    program += [
        part for number in denied for part in (statement(equal, number, 0, 1), statement(result, ERROR | EPERM))
    ]
    # clone3 passes its flags in memory, which a filter can't read; libc then uses clone
    program += [statement(equal, CLONE3, 0, 1), statement(result, ERROR | ENOSYS)]
    program += [statement(equal, clone, 0, 3), statement(load, 16), statement(mask, CLONE_THREAD, 1, 0)]
    program += [statement(result, ERROR | EPERM), statement(result, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(program))
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc = _libc()
    _checked(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    _checked(libc.prctl(SECCOMP, FILTER, header, 0, 0))


def _add_hook(folder: str, *, native: bool) -> None:
    """Refuse the same in Python, with a message; without the kernel's help refuse native code as well."""
    inside = os.path.join(os.path.realpath(folder), "")
    denied = DENIED_EVENTS if native else (*DENIED_EVENTS, "ctypes.")

    def may_write(path: Any) -> bool:
        if isinstance(path, int):
            return True
        place = os.path.realpath(os.fsdecode(path))
        return place == os.devnull or os.path.join(place, "").startswith(inside)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITING and path is not None and not may_write(path):
                raise PermissionError(f"writing {path} is not allowed: outside the folder")
        elif event.startswith(PATH_EVENTS):
            if arguments and isinstance(arguments[0], str | bytes | os.PathLike) and not may_write(arguments[0]):
                raise PermissionError(f"{event} of {arguments[0]!r} is not allowed: outside the folder")
        elif event.startswith(denied):
            raise PermissionError(f"{event} is not allowed")

    sys.addaudithook(hook)
