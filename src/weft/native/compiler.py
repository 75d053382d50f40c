"""C that comes with weft, compiled for this machine's processor when it is first wanted.

Without a compiler everything goes as it does without C, by torch's operations. What was compiled is kept in weft's
cache folder, by the text of the sources, the compiler and the processor, with its hash behind it. `WEFT_NATIVE=0` does
without it.
"""

import ctypes
import hashlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from ctypes import c_void_p
from functools import cache
from pathlib import Path

import torch

from weft.machine import ON_ARM, fingerprint
from weft.progress import log_to_stderr
from weft.storage.files import cache_folder, write_bytes

SOURCES = Path(__file__).parent
SHARED = SOURCES / "include"  # headers that several libraries include
FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-pthread")
# The first that the compiler knows: on ARM -march leaves out how long instructions take; on x86 -mcpu does less.
TUNING = (*(("-mcpu=native",), ("-march=native",))[:: 1 if ON_ARM else -1], ())
OPENMP = re.compile(r"/lib(gomp|omp|iomp5)[^/]*\.so[^/]*$")
MAX_LIBRARY_BYTES = 1 << 24
MAX_SECONDS = 30  # that compiling may take; two are usual


@cache
def load(source: Path, purpose: str) -> ctypes.CDLL | None:
    """A library made of a C file, or None where that is not possible or not wanted. Its threads are torch's."""
    if os.environ.get("WEFT_NATIVE") == "0" or os.name != "posix":
        return None
    try:
        found = ctypes.CDLL(str(compiled(source, purpose)))
    except (OSError, subprocess.SubprocessError):
        return None  # no compiler, or nowhere to keep its result safely: torch's operations do the same
    found.weft_share.argtypes = [c_void_p, c_void_p, c_void_p]
    found.weft_share.restype = None
    if (threads := _openmp()) is not None:
        functions = (threads.GOMP_parallel, threads.omp_get_thread_num, threads.omp_get_num_threads)
        found.weft_share(*(ctypes.cast(function, c_void_p) for function in functions))
    return found


def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library whose threads torch uses, where it can be found and has what compilers call."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return None
    paths = {line.split(maxsplit=5)[-1] for line in lines if OPENMP.search(line)}
    for path in _torch_first(paths, os.path.dirname(torch.__file__)):
        try:
            found = ctypes.CDLL(path)
            found.GOMP_parallel, found.omp_get_thread_num, found.omp_get_num_threads  # noqa: B018 — are they there?
        except (OSError, AttributeError):
            continue
        return found
    return None


def _torch_first(paths: Collection[str], folder: str) -> list[str]:
    """Torch's own libraries before those of other packages, whose threads would be a second pool."""
    return sorted(paths, key=lambda path: (not path.startswith((f"{folder}/", f"{folder}.libs/")), path))


def compiled(source: Path, purpose: str) -> Path:
    """The library's place; what is damaged there, or others could have put there, is compiled again."""
    names = (os.environ.get("CC") or "cc", "cc", "gcc", "clang")
    compiler = next((found for name in names if (found := shutil.which(name))), None)
    if compiler is None:
        raise OSError("no C compiler")
    sources = [path.read_bytes() for path in sorted((*SHARED.iterdir(), *source.parent.iterdir()))]
    compiler_itself = os.stat(compiler)
    known = f"{compiler} {compiler_itself.st_size} {compiler_itself.st_mtime} {FLAGS} {fingerprint()}".encode()
    name = f"{source.stem}-{hashlib.sha256(b'%'.join([known, *sources])).hexdigest()[:16]}.so"
    path = (folder := cache_folder() / "compiled") / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _only_ours(os.lstat(folder)):
        raise OSError(f"{folder} is a link, or others can write to it")
    if not _is_whole(path):
        if sys.stderr.isatty():
            log_to_stderr(f"compiling {purpose} for this processor, once …")
        with tempfile.TemporaryDirectory() as scratch:
            content = _compile(compiler, source, Path(scratch) / name)
        if path.is_dir() and not path.is_symlink():
            raise OSError(f"{path} is a folder")
        write_bytes(path, content + hashlib.sha256(content).digest())  # what follows a library's end is not loaded
        path.chmod(0o700)
    return path


def _only_ours(place: os.stat_result) -> bool:
    mine = place.st_uid == os.getuid() and not place.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return mine and (stat.S_ISREG(place.st_mode) or stat.S_ISDIR(place.st_mode))


def _is_whole(path: Path) -> bool:
    """Whether a file is as this process's user wrote it: a library that was cut short would end the process."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            place = os.fstat(file.fileno())
            if not stat.S_ISREG(place.st_mode) or not _only_ours(place) or place.st_size > MAX_LIBRARY_BYTES:
                return False
            content = file.read()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _compile(compiler: str, source: Path, made: Path) -> bytes:
    end = time.monotonic() + MAX_SECONDS
    for tuning in TUNING:
        command = [compiler, *FLAGS, *tuning, f"-I{SHARED}", str(source), "-o", str(made), "-lm"]
        left = max(0.1, end - time.monotonic())
        if subprocess.run(command, capture_output=True, timeout=left, check=False).returncode == 0:
            return made.read_bytes()
    raise OSError(f"{compiler} can't compile {source}")
