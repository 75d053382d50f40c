"""What this machine's processor has, and how fast it and its GPUs multiply and read memory, measured in moments.

Rates depend on the library as much as on the silicon: a processor may have narrow products that torch does not use, or
torch may compute them number by number. So what is chosen by speed is measured, never looked up.
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
# instructions that matter for products, by Linux's names of them; the more a processor gains by one, the earlier
FEATURES = {"amx_bf16": "AMX bf16", "amx_int8": "AMX int8", "avx512_bf16": "AVX-512 BF16"}
FEATURES |= {"avx512_vnni": "AVX-512 VNNI", "avx512f": "AVX-512", "avx_vnni": "AVX VNNI", "avx2": "AVX2"}
FEATURES |= {"sve2": "SVE2", "sve": "SVE", "bf16": "bf16", "i8mm": "i8mm", "asimddp": "dot product", "asimd": "NEON"}
APPLE = {"FEAT_BF16": "bf16", "FEAT_I8MM": "i8mm", "FEAT_DotProd": "asimddp", "AdvSIMD": "asimd"}  # sysctl's names
# by the number that the core gives; /proc/cpuinfo has no name for them
ARM_PARTS = {"0xd08": "Cortex-A72", "0xd0b": "Cortex-A76", "0xd0c": "Neoverse-N1", "0xd40": "Neoverse-V1"}
ARM_PARTS |= {"0xd49": "Neoverse-N2", "0xd4f": "Neoverse-V2", "0xd84": "Neoverse-V3", "0xd8e": "Neoverse-N3"}

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "int8": torch.int8}
MAX_PRODUCT = (512, 1024, 4096)  # rows, inputs and outputs of a timed product: larger ones are no faster
TRIAL = (32, 256, 256)  # tried first: a format without fast products may take a minute for a large one
MAX_SECONDS = 0.5  # of one product, by the trial's rate
SECONDS = 0.3  # for all formats together, though each has two turns at least
READ = 1 << 25  # numbers of four bytes that are read for the bandwidth: more than a cache holds


@cache
def processor() -> tuple[str, tuple[str, ...]]:
    """The processor's name, and which of `FEATURES` it has."""
    return described_by_sysctl(_sysctl()) if platform.system() == "Darwin" else described_by_cpuinfo(_cpuinfo())


@cache
def has_triton() -> bool:
    """Whether there is Triton to compile kernels for a GPU."""
    return importlib.util.find_spec("triton") is not None


@cache
def fingerprint() -> str:
    """All that is known of what the processor is and can do: what was compiled or timed for another is not for it."""
    wanted = ("flags", "Features", "model name", "CPU part", "CPU implementer")
    lines = {line for line in _cpuinfo().splitlines() if line.startswith(wanted)}
    return "\n".join(sorted(lines)) or f"{platform.machine()} {processor()}"


def described_by_cpuinfo(text: str) -> tuple[str, tuple[str, ...]]:
    """Name and features from Linux's list of processors, of which the first is read."""
    found: dict[str, str] = {}
    for key, value in re.findall(r"^([^:\n]+?)[ \t]*:[ \t]*(.*)$", text, re.MULTILINE):
        found.setdefault(key, value)
    part = ARM_PARTS.get(found.get("CPU part", ""))
    name = found.get("model name") or (f"ARM {part}" if part else "") or platform.processor() or platform.machine()
    return name, _features((found.get("flags") or found.get("Features") or "").split())


def described_by_sysctl(text: str) -> tuple[str, tuple[str, ...]]:
    """Name and features from what macOS's sysctl prints."""
    found = dict(re.findall(r"^([\w.]+): (.*)$", text, re.MULTILINE))
    on = {key.rpartition(".")[2] for key, value in found.items() if value == "1"}
    flags = [ours for theirs, ours in APPLE.items() if theirs in on]
    flags += found.get("machdep.cpu.leaf7_features", "").lower().split()
    return found.get("machdep.cpu.brand_string", platform.machine()), _features(flags)


def _features(flags: Collection[str]) -> tuple[str, ...]:
    return tuple(name for flag, name in FEATURES.items() if flag in flags)


def _cpuinfo() -> str:
    details = Path("/proc/cpuinfo")
    return details.read_text(encoding="utf-8", errors="replace") if details.exists() else ""


def _sysctl() -> str:
    command = ["sysctl", "machdep.cpu", "hw.optional"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=5).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def best_of(work: Mapping[str, Callable[[], object]], seconds: float = SECONDS) -> dict[str, float]:
    """The seconds that each piece of work takes at best. They take turns, so that what else the machine does falls on
    all alike; each has two turns at least after a first one that isn't counted, and more until `seconds` are over."""
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
def products(
    rows: int, inputs: int, outputs: int, formats: tuple[str, ...] = ("fp32", "bf16"), device: str = "cpu"
) -> dict[str, float]:
    """Operations a second of (rows, inputs) times (inputs, outputs) in each number format, fp32 among them.

    Larger products than a moment allows are made smaller. A format too slow for these has the rate of a tiny one; one
    that torch has no products for on the device has rate 0.
    """
    if device == "cpu":
        rows, inputs, outputs = map(min, (rows, inputs, outputs), MAX_PRODUCT)
    sizes = (rows, inputs, outputs)
    with warnings.catch_warnings():
        # a processor without bf16 products says so with a stack trace, and then computes them another way
        warnings.filterwarnings("ignore", message="mkldnn_matmul failed")
        tiny = _rates(TRIAL, formats, device, 0.0) if device == "cpu" else {}  # a GPU's would be that of its launches
        min_rate = 2.0 * math.prod(sizes) / MAX_SECONDS
        slow = {format_: rate for format_, rate in tiny.items() if rate < min_rate and format_ != "fp32"}
        rest = tuple(format_ for format_ in formats if format_ not in slow)
        rates = slow | _rates(sizes, rest, device, SECONDS)
    return {format_: rates[format_] for format_ in formats}


def _rates(sizes: tuple[int, int, int], formats: tuple[str, ...], device: str, seconds: float) -> dict[str, float]:
    runs = {format_: _product(format_, sizes, device) for format_ in formats}
    found = best_of({format_: run for format_, run in runs.items() if run is not None}, seconds)
    return {format_: 2.0 * math.prod(sizes) / found[format_] if format_ in found else 0.0 for format_ in formats}


def _product(format_: str, sizes: tuple[int, int, int], device: str) -> Callable[[], object] | None:
    """A product in a number format, whose end is waited for; None where torch has none."""
    rows, inputs, outputs = sizes
    x, weight = (torch.ones(n, inputs, device=device).to(TYPES[format_]) for n in (rows, outputs))

    def run() -> None:
        torch._int_mm(x, weight.T) if format_ == "int8" else F.linear(x, weight)
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
    """Bytes a second that a GPU, or `threads` of the processor, read from memory; all of torch's threads by default."""
    numbers, used = torch.ones(READ if device == "cpu" else 8 * READ, device=device), torch.get_num_threads()

    def read() -> None:
        numbers.sum()
        _wait(device)

    torch.set_num_threads(threads or used)
    try:
        return numbers.nbytes / best_of({"read": read}, SECONDS / 3)["read"]
    finally:
        torch.set_num_threads(used)


def pick_device() -> torch.device:
    """The first CUDA device where there is one, else the processor."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def total_memory(device: torch.device) -> int:
    """The bytes of a device's memory; of a processor's, swap space included, as much as this process may have."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    limits = [*_cgroup_limits()]
    with suppress(AttributeError, ValueError, OSError):  # Windows
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _noted("SwapTotal:"))
    return min(limits, default=1 << 62)


def free_memory(device: torch.device) -> int:
    """The bytes that nobody uses now; of a processor's memory no more than this process may have."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    total = total_memory(device)
    return min(_noted("MemAvailable:") or total // 2, total)


def _noted(name: str) -> int:
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(name))
    return 0


def _cgroup_limits() -> Iterator[int]:
    """What a container may have: version 2 and version 1, of the process's own group and those above it."""
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
                with suppress(OSError, ValueError):  # "max" is no limit
                    yield int((folder / file).read_text())
