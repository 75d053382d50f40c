"""What this machine offers, measured in a second or two, and what is missing for what."""

import os
import platform
import re
import shutil
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
LAYER = (512, 768, 3072)  # tokens, d_model and d_ff of the product that is timed: GPT-2's
GPU_LAYER = (8192, 8192, 8192)


class Finding(NamedTuple):
    """Something about the machine, in words; `value` stands for the words in JSON where there is more to it."""

    name: str
    text: str
    value: Any = None


def examine() -> list[Finding]:
    """Versions, processor, GPUs, optional packages, and the folders that weft writes to."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    own = [Finding("weft", __version__), Finding("Python", python)]
    own += [Finding(package, version(package)) for package in ("torch", "tokenizers")]
    return [*own, *_processor(), *_gpus(), *_packages(), *_folders()]


def _processor() -> Iterator[Finding]:
    (name, features), cores, threads = machine.processor(), os.cpu_count() or 1, torch.get_num_threads()
    value: dict[str, Any] = {"name": name, "cores": cores, "threads": threads}
    yield Finding("processor", f"{name}, {counted(cores, 'core')}, torch uses {counted(threads, 'thread')}", value)
    yield Finding("instructions", ", ".join(features) or "no instructions for products that weft knows of", features)
    with suppress(AttributeError, ValueError, OSError):  # not every system knows
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


def _decoding() -> Finding:
    """How long a decoding step's product takes by the kernels that each width is written with here."""
    compiled, cpu = native.library() is not None, torch.device("cpu")
    cases = {bits: MatrixSpec(*SAMPLE, layout(bits, SAMPLE[1])[1], cpu) for bits in KERNELS}
    kernels = {bits: fastest(bits, case, torch.float32).name for bits, case in cases.items()}
    times = {bits: seconds(bits)[name] for bits, name in kernels.items()}
    how = "by weft's own kernels" if compiled else "by torch's kernels: no C compiler was found"
    shown = ", ".join(f"{bits} {time * 1e6:.0f} µs" for bits, time in times.items())
    value = {"compiled": compiled, "seconds": times, "kernels": kernels}
    return Finding("decoding", f"{SAMPLE[0]} × {SAMPLE[1]} weights a token, one thread: {shown}, {how}", value)


def _rates(rates: Mapping[str, float]) -> str:
    """Operations a second by number format, in words; a format without products isn't mentioned."""
    unit, name = (1e12, "TFLOP/s") if rates["fp32"] > 1e13 else (1e9, "GFLOP/s")
    return ", ".join(f"{format_} {rate / unit:,.3g} {name}" for format_, rate in rates.items() if rate)


def _gpus() -> Iterator[Finding]:
    if not torch.cuda.is_available():
        yield Finding("GPU", "none that torch can use; models train on the CPU")
    for index in range(torch.cuda.device_count()):
        device, about, triton = f"cuda:{index}", torch.cuda.get_device_properties(index), machine.has_triton()
        rates, read = machine.matmul_rates(*GPU_LAYER, device=device), machine.bandwidth(device)
        kernels = "with Triton" if triton else "without Triton, which weft's own kernels need"
        memory = about.total_memory
        speeds = f"{_rates(rates)}, memory is read at {read / 1e9:,.4g} GB/s"
        value = {"name": about.name, "memory": memory, "rates": rates, "bandwidth": read, "triton": triton}
        yield Finding(f"GPU {index}", f"{about.name}, {memory / GIB:.0f} GiB; {speeds}; {kernels}", value)


def _packages() -> Iterator[Finding]:
    for package, (feature, extra) in EXTRAS.items():
        try:
            yield Finding(package, f"{version(package)}: {feature}")
        except PackageNotFoundError:
            yield Finding(package, f"missing, for {feature}; pip install '{extra}'")


def _folders() -> Iterator[Finding]:
    for name, folder in {"cache": cache_folder(), "runs": Path("runs").absolute()}.items():
        there = next(path for path in (folder, *folder.parents) if path.exists())  # it will be made inside of that
        try:
            tempfile.TemporaryFile(dir=there).close()  # asking for permissions isn't enough on read-only disks
            yield Finding(name, f"{folder}, {shutil.disk_usage(there).free / GIB:.0f} GiB free")
        except OSError:
            yield Finding(name, f"{folder} can't be written")
