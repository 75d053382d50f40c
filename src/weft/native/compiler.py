"""Compile weft's C sources for this machine's CPU on first use.

Without a compiler torch's operations compute the same results. Compiled libraries are kept in weft's cache folder,
named by a hash of the sources, the compiler, its flags and the CPU, and end with a checksum. `WEFT_NATIVE=0` disables
them; `WEFT_NATIVE_FLAGS` adds compiler flags, such as a sanitizer's.
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
from ctypes import Structure, c_int32, c_void_p
from functools import cache
from pathlib import Path

import torch

from weft.machine import ON_ARM, fingerprint
from weft.progress import log_to_stderr
from weft.storage.files import cache_folder, write_bytes

SOURCES = Path(__file__).parent
INCLUDE = SOURCES / "include"  # headers shared by the libraries
FLAGS = ("-O3", "-std=gnu11", "-shared", "-fPIC", "-pthread")
# The first that the compiler accepts: on ARM -march leaves out instruction timings, on x86 -mcpu does less.
TUNING = (*(("-mcpu=native",), ("-march=native",))[:: 1 if ON_ARM else -1], ())
OPENMP = re.compile(r"/lib(gomp|omp|iomp5)[^/]*\.so[^/]*$")
MAX_LIBRARY_BYTES = 1 << 24  # larger files in the cache are not read
MAX_SECONDS = 120  # compile time; two seconds are usual, on a busy machine many more


@cache
def load(source: Path, purpose: str, structs: tuple[type[Structure], ...]) -> ctypes.CDLL | None:
    """Load the library compiled from a C file, or None if it is disabled or cannot be compiled.

    It runs on torch's threads. `structs` are the arguments that Python and C both declare: their sizes must agree.
    """
    if os.environ.get("WEFT_NATIVE") == "0" or os.name != "posix":
        return None
    try:
        library = ctypes.CDLL(str(compiled(source, purpose)))
    except (OSError, subprocess.SubprocessError):
        return None  # no compiler, or no safe place for its output
    sizes = (c_int32 * len(structs)).in_dll(library, "weft_struct_sizes")
    assert list(sizes) == [ctypes.sizeof(struct) for struct in structs], f"{source.name} declares other structs"
    library.weft_use_openmp.argtypes = [c_void_p, c_void_p, c_void_p]
    library.weft_use_openmp.restype = None
    if (openmp := _openmp()) is not None:
        functions = (openmp.GOMP_parallel, openmp.omp_get_thread_num, openmp.omp_get_num_threads)
        library.weft_use_openmp(*(ctypes.cast(function, c_void_p) for function in functions))
    return library


def _openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch uses, if it is found and has the entry points that compilers call."""
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # not Linux
        return None
    paths = {line.split(maxsplit=5)[-1] for line in lines if OPENMP.search(line)}
    for path in _torch_first(paths, os.path.dirname(torch.__file__)):
        try:
            openmp = ctypes.CDLL(path)
            openmp.GOMP_parallel, openmp.omp_get_thread_num, openmp.omp_get_num_threads  # noqa: B018 — raises if absent
        except (OSError, AttributeError):
            continue
        return openmp
    return None


def _torch_first(paths: Collection[str], folder: str) -> list[str]:
    """Sort torch's libraries before those of other packages, whose threads would be a second pool."""
    return sorted(paths, key=lambda path: (not path.startswith((f"{folder}/", f"{folder}.libs/")), path))


def compiled(source: Path, purpose: str) -> Path:
    """Return the path of the library compiled from `source`. A file that is damaged, or that other users could have
    written, is compiled again."""
    names = (os.environ.get("CC") or "cc", "cc", "gcc", "clang")
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        raise OSError("no C compiler")
    flags = (*FLAGS, *os.environ.get("WEFT_NATIVE_FLAGS", "").split())
    sources = [path.read_bytes() for path in sorted((*INCLUDE.iterdir(), *source.parent.iterdir()))]
    status = os.stat(compiler)
    key = f"{compiler} {status.st_size} {status.st_mtime} {flags} {fingerprint()}".encode()
    name = f"{source.stem}-{hashlib.sha256(b'%'.join([key, *sources])).hexdigest()[:16]}.so"
    path = (folder := cache_folder() / "compiled") / name
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not _writable_only_by_us(os.lstat(folder)):
        raise OSError(f"{folder} is a link, or others can write to it")
    if not _is_intact(path):
        if sys.stderr.isatty():
            log_to_stderr(f"compiling {purpose} for this processor, once …")
        with tempfile.TemporaryDirectory() as scratch:
            content = _compile([compiler, *flags], source, Path(scratch) / name)
        if path.is_dir() and not path.is_symlink():
            raise OSError(f"{path} is a folder")
        if path.is_symlink():  # to a device, it would be written to instead of replaced
            path.unlink()
        write_bytes(path, content + hashlib.sha256(content).digest())  # bytes after a library's end are not loaded
        path.chmod(0o700)
    return path


def _writable_only_by_us(status: os.stat_result) -> bool:
    ours = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return ours and (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode))


def _is_intact(path: Path) -> bool:
    """Whether a file is as this user wrote it: loading a truncated library would end the process."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode) or not _writable_only_by_us(status):
                return False
            if status.st_size > MAX_LIBRARY_BYTES:
                return False
            content = file.read()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _compile(compiler: list[str], source: Path, output: Path) -> bytes:
    deadline = time.monotonic() + MAX_SECONDS
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # a sanitizer's runtime
    for tuning in TUNING:
        command = [*compiler, *tuning, f"-I{INCLUDE}", str(source), "-o", str(output), "-lm"]
        timeout = max(0.1, deadline - time.monotonic())
        try:
            result = subprocess.run(command, capture_output=True, timeout=timeout, check=False, env=environment)
        except subprocess.TimeoutExpired:
            raise OSError(f"{compiler[0]} did not compile {source.name} within {MAX_SECONDS} seconds") from None
        if result.returncode == 0:
            return output.read_bytes()
    raise OSError(f"{compiler[0]} can't compile {source}")
