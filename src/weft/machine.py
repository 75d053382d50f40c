"""Features of this machine's CPU, and quick measurements of matrix products and memory bandwidth on CPU and GPU.

Rates depend on the library as much as on the hardware: a CPU may have low-precision instructions that torch does not
use, or torch may emulate them. Choices that depend on speed are therefore measured, never looked up.
"""

import importlib.util
import math
import os
import platform
import re
import subprocess
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch.nn import functional as F

ON_ARM = platform.machine().lower() in ("aarch64", "arm64")
# instructions for matrix products, by their names in Linux, in order of their gain
FEATURES = {"amx_bf16": "AMX bf16", "amx_int8": "AMX int8", "avx512_bf16": "AVX-512 BF16"}
FEATURES |= {"avx512_vnni": "AVX-512 VNNI", "avx512f": "AVX-512", "avx_vnni": "AVX VNNI", "avx2": "AVX2"}
FEATURES |= {"sve2": "SVE2", "sve": "SVE", "bf16": "bf16", "i8mm": "i8mm", "asimddp": "dot product", "asimd": "NEON"}
APPLE = {"FEAT_BF16": "bf16", "FEAT_I8MM": "i8mm", "FEAT_DotProd": "asimddp", "AdvSIMD": "asimd"}  # names in sysctl
# by the "CPU part" of the core; /proc/cpuinfo has no name for ARM cores
ARM_PARTS = {"0xd08": "Cortex-A72", "0xd0b": "Cortex-A76", "0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1"}
ARM_PARTS |= {"0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2", "0xd84": "Neoverse-V3", "0xd8e": "Neoverse-N3"}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
MAX_PRODUCT = (512, 1024, 4096)  # bounds rows, inputs and outputs of a timed product: larger ones are no faster
TRIAL = (32, 256, 256)  # sizes of the first product: an emulated dtype may take a minute for a large one
MAX_PRODUCT_SECONDS = 0.5  # skip the large product if it would take longer, by the rate of the trial
SECONDS = 0.3  # for timing all dtypes together; each runs at least twice
READ_ELEMENTS = 1 << 25  # fp32 elements read to measure bandwidth: more than a cache holds


@cache
def processor() -> tuple[str, tuple[str, ...]]:
    """Name of the CPU, and those of `FEATURES` that it has."""
    return parse_sysctl(_sysctl()) if platform.system() == "Darwin" else parse_cpuinfo(_cpuinfo())


@cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@cache
def fingerprint() -> str:
    """Model and features of the CPU, as a key for compiled code and timings, which are not valid on another CPU."""
    keys = ("flags", "Features", "model name", "CPU part", "CPU implementer")
    lines = {line for line in _cpuinfo().splitlines() if line.startswith(keys)}
    return "\n".join(sorted(lines)) or f"{platform.machine()} {processor()}"


def parse_cpuinfo(text: str) -> tuple[str, tuple[str, ...]]:
    """Name and features of the first CPU in Linux's /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for key, value in re.findall(r"^([^:\n]+?)[ \t]*:[ \t]*(.*)$", text, re.MULTILINE):
        fields.setdefault(key, value)
    part = ARM_PARTS.get(fields.get("CPU part", ""))
    name = fields.get("model name") or (f"ARM {part}" if part else "") or platform.processor() or platform.machine()
    return name, _features((fields.get("flags") or fields.get("Features") or "").split())


def parse_sysctl(text: str) -> tuple[str, tuple[str, ...]]:
    """Name and features from the output of macOS's sysctl."""
    fields = dict(re.findall(r"^([\w.]+): (.*)$", text, re.MULTILINE))
    enabled = {key.rpartition(".")[2] for key, value in fields.items() if value == "1"}
    flags = [flag for name, flag in APPLE.items() if name in enabled]
    flags += fields.get("machdep.cpu.leaf7_features", "").lower().split()
    return fields.get("machdep.cpu.brand_string", platform.machine()), _features(flags)


def _features(flags: Collection[str]) -> tuple[str, ...]:
    return tuple(name for flag, name in FEATURES.items() if flag in flags)


def _cpuinfo() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def _sysctl() -> str:
    command = ["sysctl", "machdep.cpu", "hw.optional"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def best_of(work: Mapping[str, Callable[[], object]], seconds: float = SECONDS) -> dict[str, float]:
    """Shortest run time of each function, in seconds. After a warm-up they run in turns, so that other load affects all
    equally: at least twice, and until `seconds` have passed."""
    for run in work.values():
        run()
    best, begun, turns = dict.fromkeys(work, float("inf")), time.perf_counter(), 0
    while turns < 2 or time.perf_counter() - begun < seconds:
        for name, run in work.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
        turns += 1
    return best


@cache
def matmul_rates(
    rows: int, inputs: int, outputs: int, *, dtypes: tuple[str, ...] = ("fp32", "bf16"), device: str = "cpu"
) -> dict[str, float]:
    """FLOP/s of (rows, inputs) times (inputs, outputs) in each dtype, which must include fp32.

    A CPU times smaller products than `MAX_PRODUCT`, and only a tiny one in a dtype that is too slow. The rate is 0 if
    torch has no product in the dtype on the device.
    """
    if device == "cpu":
        rows, inputs, outputs = map(min, (rows, inputs, outputs), MAX_PRODUCT)
    sizes = (rows, inputs, outputs)
    with warnings.catch_warnings():
        # on a CPU without bf16 products torch warns with a stack trace, and emulates them
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        # a GPU's rate in a tiny product would be that of its kernel launches
        tiny = _rates(TRIAL, dtypes, device, seconds=0.0) if device == "cpu" else {}
        min_rate = 2.0 * math.prod(sizes) / MAX_PRODUCT_SECONDS
        slow = {dtype: rate for dtype, rate in tiny.items() if rate < min_rate and dtype != "fp32"}
        rates = slow | _rates(sizes, tuple(dtype for dtype in dtypes if dtype not in slow), device)
    return {dtype: rates[dtype] for dtype in dtypes}


def _rates(
    sizes: tuple[int, int, int], dtypes: tuple[str, ...], device: str, *, seconds: float | None = None
) -> dict[str, float]:
    runs = {dtype: _product(dtype, sizes, device) for dtype in dtypes}
    times = best_of(
        {dtype: run for dtype, run in runs.items() if run is not None}, SECONDS if seconds is None else seconds
    )
    return {dtype: 2.0 * math.prod(sizes) / times[dtype] if dtype in times else 0.0 for dtype in dtypes}


def _product(dtype: str, sizes: tuple[int, int, int], device: str) -> Callable[[], object] | None:
    """Function that computes a product and waits for its end; None if torch has no product in this dtype."""
    rows, inputs, outputs = sizes
    x, weight = (torch.ones(n, inputs, device=device).to(DTYPES[dtype]) for n in (rows, outputs))

    def run() -> None:
        torch._int_mm(x, weight.T) if dtype == "int8" else F.linear(x, weight)
        _wait(device)

    try:
        run()
    except (RuntimeError, NotImplementedError):
        return None
    return run


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


def bandwidth(device: str = "cpu", threads: int | None = None) -> float:
    """Bytes per second that a GPU, or `threads` threads of the CPU, read from memory; by default, torch's threads."""
    x = torch.ones(READ_ELEMENTS if device == "cpu" else 8 * READ_ELEMENTS, device=device)
    used = torch.get_num_threads()

    def read() -> None:
        x.sum()
        _wait(device)

    torch.set_num_threads(threads or used)
    try:
        return x.nbytes / best_of({"read": read}, SECONDS / 3)["read"]
    finally:
        torch.set_num_threads(used)


def pick_device() -> torch.device:
    """Return the first CUDA device if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def total_memory(device: torch.device) -> int:
    """Bytes of a device's memory; for the CPU, memory and swap space that this process may use."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [*_cgroup_limits()]
    with suppress(AttributeError, ValueError, OSError):  # Windows
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _meminfo("SwapTotal:"))
    return min(limits, default=1 << 62)


def free_memory(device: torch.device) -> int:
    """Bytes of unused memory; for the CPU, at most the memory that this process may use."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    total = total_memory(device)
    return min(_meminfo("MemAvailable:") or total // 2, total)


def _meminfo(name: str) -> int:
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
    return 0


def _cgroup_limits() -> Iterator[int]:
    """Yield the memory limits of the process's cgroup and its ancestors, in versions 1 and 2."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, name = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            file = "memory.limit_in_bytes" if controllers else "memory.max"
            root = Path("/sys/fs/cgroup", controllers)
            group = root / name.lstrip("/")
            for folder in (group, *group.parents):
                if folder != root and root not in folder.parents:
                    break
                with suppress(OSError, ValueError):  # "max": no limit
                    yield int((folder / file).read_text())
