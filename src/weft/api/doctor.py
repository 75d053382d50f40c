"""Report on this machine: hardware, measured speeds, and missing packages with the features that need them."""

import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch

from weft import __version__, machine
from weft.decode.fast import native
from weft.decode.fast.matmul import KERNELS, SAMPLE, MatrixSpec, fastest, seconds
from weft.decode.fast.quantized_weights import layout
from weft.errors import counted
from weft.native import compiler
from weft.recipe.settle import faster_format
from weft.storage.files import cache_folder

EXTRAS = {
    "pyarrow": ("Parquet files", "weft[parquet]"),
    "huggingface_hub": ("hub:owner/name sources", "weft[hub]"),
    "tensorboard": ("log.tensorboard = true", "weft[tensorboard]"),
    "ray": ("weft compare --jobs ray", "weft[ray]"),
    "lm_eval": ("tasks of lm-evaluation-harness", "weft[lm-eval]"),
}
GIB = 1 << 30
LAYER = (512, 768, 3072)  # tokens, d_model and d_ff of the matrix product that is timed: GPT-2's
GPU_LAYER = (8192, 8192, 8192)


class Finding(NamedTuple):
    """A fact about the machine as text; JSON has `value` instead, if there is one."""

    name: str
    text: str
    value: Any = None


def examine() -> list[Finding]:
    """Return versions, processor, GPUs, optional packages, and the folders that weft writes to."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    versions = [Finding("weft", __version__), Finding("Python", python)]
    versions += [Finding(package, version(package)) for package in ("torch", "tokenizers")]
    return [*versions, *_processor(), *_gpus(), *_packages(), *_folders()]


def _processor() -> Iterator[Finding]:
    (name, features), cores, threads = machine.processor(), os.cpu_count() or 1, torch.get_num_threads()
    value: dict[str, Any] = {"name": name, "cores": cores, "threads": threads}
    yield Finding("processor", f"{name}, {counted(cores, 'core')}, torch uses {counted(threads, 'thread')}", value)
    yield Finding("instructions", ", ".join(features) or "none that weft uses for matrix products", features)
    with suppress(AttributeError, ValueError, OSError):  # not available on every system
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        details = Path("/proc/meminfo")
        free = re.search(r"MemAvailable: +(\d+) kB", details.read_text() if details.exists() else "")
        available = f", {int(free[1]) * 1024 / GIB:.1f} GiB free" if free else ""
        yield Finding("memory", f"{total / GIB:.1f} GiB{available}")
    one, all_ = machine.bandwidth(threads=1), machine.bandwidth()
    speeds = f"one thread {one / 1e9:.3g} GB/s, all {all_ / 1e9:.3g} GB/s"
    yield Finding("memory bandwidth", speeds, {"one thread": one, "all threads": all_})
    rates = machine.matmul_rates(*LAYER, dtypes=("fp32", "bf16", "int8"))
    yield Finding("products", _rates(rates), rates)
    if not torch.cuda.is_available():
        precision, why = faster_format(rates)
        yield Finding("training", f"{precision}: {why}", {"precision": precision, "why": why})
    yield _decoding()


def _why_not_compiled() -> str:
    if os.environ.get("WEFT_NATIVE") == "0":
        return "WEFT_NATIVE=0 switches weft's own off"
    try:
        compiler.compiled(native.SOURCE, "weft's decoding step")
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return "weft's own were compiled just now"


def _decoding() -> Finding:
    """Time a decode step's matrix product in each width, with the kernel that is fastest here."""
    compiled, cpu = native.library() is not None, torch.device("cpu")
    cases = {bits: MatrixSpec(*SAMPLE, layout(bits, SAMPLE[1])[1], cpu) for bits in KERNELS}
    kernels = {bits: fastest(bits, case, torch.float32).name for bits, case in cases.items()}
    times = {bits: seconds(bits)[name] for bits, name in kernels.items()}
    how = "with weft's own kernels" if compiled else f"with torch's kernels: {_why_not_compiled()}"
    shown = ", ".join(f"{bits} {time * 1e6:.0f} µs" for bits, time in times.items())
    value = {"compiled": compiled, "seconds": times, "kernels": kernels}
    return Finding("decoding", f"{SAMPLE[0]} × {SAMPLE[1]} weights per token, one thread: {shown}, {how}", value)


def _rates(rates: Mapping[str, float]) -> str:
    """Format operations per second by dtype; a dtype that is not supported is left out."""
    unit, name = (1e12, "TFLOP/s") if rates["fp32"] > 1e13 else (1e9, "GFLOP/s")
    return ", ".join(f"{dtype} {rate / unit:,.3g} {name}" for dtype, rate in rates.items() if rate)


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("GPU", "none that torch can use; models are trained on the CPU")
    for index in range(torch.cuda.device_count()):
        device, about, triton = f"cuda:{index}", torch.cuda.get_device_properties(index), machine.has_triton()
        rates, read = machine.matmul_rates(*GPU_LAYER, device=device), machine.bandwidth(device)
        kernels = "with Triton" if triton else "without Triton, which weft's kernels need"
        memory = about.total_memory
        speeds = f"{_rates(rates)}, memory bandwidth {read / 1e9:,.4g} GB/s"
        value = {"name": about.name, "memory": memory, "rates": rates, "bandwidth": read, "triton": triton}
        yield Finding(f"GPU {index}", f"{about.name}, {memory / GIB:.0f} GiB; {speeds}; {kernels}", value)


def _packages() -> Iterator[Finding]:
    for package, (feature, extra) in EXTRAS.items():
        try:
            yield Finding(package, f"{version(package)}: {feature}")
        except PackageNotFoundError:
            yield Finding(package, f"missing; needed for {feature}: pip install '{extra}'")


def _folders() -> Iterator[Finding]:
    for name, folder in {"cache": cache_folder(), "runs": Path("runs").absolute()}.items():
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        try:
            tempfile.TemporaryFile(dir=existing).close()  # permissions alone do not show a read-only disk
            yield Finding(name, f"{folder}, {shutil.disk_usage(existing).free / GIB:.0f} GiB free")
        except OSError:
            yield Finding(name, f"{folder} cannot be written")
