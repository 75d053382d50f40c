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
OTHER_ABI = 0x40000000  # numbers of x32's system calls
EPERM, ENOSYS = 1, 38
ALLOW, ERROR = 0x7FFF0000, 0x00050000  # results of a seccomp filter; the error's number is added
NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2  # arguments of prctl
LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 444, 445, 446
WRITES = 0b1111111110010  # Landlock: write and remove files, make and remove folders, devices, sockets and links
WRITE_FILE, REFER, TRUNCATE = 1 << 1, 1 << 13, 1 << 14
# audit events: those with a path as first argument, and those refused always
PATH_EVENTS = re.compile(r"os\.(?:remove|rename|rmdir|mkdir|truncate|link|symlink|chmod|chown)|shutil\.")
DENIED_EVENTS = re.compile(r"socket\.|subprocess\.|os\.(?:system|exec|fork|posix_spawn|spawn|kill)|pty\.")
NATIVE_EVENTS = re.compile(r"ctypes\.")
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def confine(folder: str, hidden: str, *, seconds: int, max_bytes: int) -> list[str]:
    """Limit this process: write in `folder` only, read nothing in `hidden`. Return what is not fully enforced."""
    weak = [] if _limit_resources(seconds, max_bytes) else ["memory"]
    files, processes = _landlock(folder), _seccomp()
    weak += [] if files else ["writing outside the folder"]
    weak += [] if processes else ["network and new processes"]
    _add_hook(folder, hidden, native=files and processes)
    return weak


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


def _landlock(folder: str) -> bool:
    """Allow writing in `folder` and to /dev/null only (Linux 5.13); return whether the kernel does."""
    if sys.platform != "linux":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(LANDLOCK_CREATE, None, 0, 1)
    if version < 1:
        return False
    handled = WRITES | (REFER if version >= 2 else 0) | (TRUNCATE if version >= 3 else 0)
    rules = libc.syscall(LANDLOCK_CREATE, struct.pack("<Q", handled), 8, 0)
    for path, rights in ((folder, handled), (os.devnull, WRITE_FILE)):
        handle = os.open(path, os.O_PATH)
        libc.syscall(LANDLOCK_ADD, rules, 1, struct.pack("<Qi", rights, handle), 0)
        os.close(handle)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return libc.syscall(LANDLOCK_RESTRICT, rules, 0) == 0


def _seccomp() -> bool:
    """Refuse sockets, new processes and signals to others, but not threads; return whether the kernel does."""
    if sys.platform != "linux" or platform.machine() not in DENIED:
        return False
    architecture, denied, clone = DENIED[platform.machine()]
    load, equal, at_least, mask, result = (
        0x20,
        0x15,
        0x35,
        0x45,
        0x06,
    )  # of BPF; then the value, and jumps if true or not
    program = [(load, 4, 0, 0), (equal, architecture, 1, 0), (result, ERROR | EPERM, 0, 0), (load, 0, 0, 0)]
    program += [(at_least, OTHER_ABI, 0, 1), (result, ERROR | EPERM, 0, 0)]
    program += [step for number in denied for step in ((equal, number, 0, 1), (result, ERROR | EPERM, 0, 0))]
    # clone3 passes its flags in memory, which a filter can't read; libc then uses clone
    program += [(equal, CLONE3, 0, 1), (result, ERROR | ENOSYS, 0, 0)]
    program += [(equal, clone, 0, 3), (load, 16, 0, 0), (mask, CLONE_THREAD, 1, 0), (result, ERROR | EPERM, 0, 0)]
    program.append((result, ALLOW, 0, 0))
    steps = b"".join(struct.pack("<HBBI", code, true, false, value) for code, value, true, false in program)
    code = ctypes.create_string_buffer(steps)
    header = ctypes.create_string_buffer(struct.pack("@HP", len(program), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    return libc.prctl(SECCOMP, FILTER, header, 0, 0) == 0


def _add_hook(folder: str, hidden: str, *, native: bool) -> None:
    """Refuse the same in Python, with a message; without the kernel's help refuse native code as well."""

    def within(path: Any, place: str) -> bool:
        return os.path.join(os.path.realpath(os.fsdecode(path)), "").startswith(
            os.path.join(os.path.realpath(place), "")
        )

    def may_write(path: Any) -> bool:
        return isinstance(path, int) or os.path.realpath(os.fsdecode(path)) == os.devnull or within(path, folder)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(path, str | bytes | os.PathLike) and within(path, hidden):
                raise PermissionError("reading the solutions is not allowed")
            if isinstance(flags, int) and flags & WRITING and path is not None and not may_write(path):
                raise PermissionError(f"writing {path} is not allowed: outside the folder")
        elif PATH_EVENTS.match(event):
            if arguments and isinstance(arguments[0], str | bytes | os.PathLike) and not may_write(arguments[0]):
                raise PermissionError(f"{event} of {arguments[0]!r} is not allowed: outside the folder")
        elif DENIED_EVENTS.match(event) or (not native and NATIVE_EVENTS.match(event)):
            raise PermissionError(f"{event} is not allowed")

    sys.addaudithook(hook)
