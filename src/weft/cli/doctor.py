"""`weft doctor`: what this machine offers, and what is missing for what."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from weft.cli import columns, options
from weft.cli.loading import loading
from weft.figures.tables import Table

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


class Row(NamedTuple):
    """A line of the table; `value` stands for the text in JSON where there is more to it."""

    name: str
    text: str
    value: Any = None


def doctor(as_json: options.AsJson = False) -> None:
    """Show what weft runs on and what the machine does well, measured in a second or two; and what is missing."""
    with loading():
        import torch  # noqa: F401 — what follows is quick beside it
    rows = [row for part in (_software, _processor, _gpus, _packages, _folders) for row in part()]
    if as_json:
        columns.print_json({row.name: row.text if row.value is None else row.value for row in rows})
    else:
        columns.show(Table(("", ""), [(row.name, row.text) for row in rows], text=(0, 1)))


def _software() -> Iterator[Row]:
    import platform
    from importlib.metadata import version

    from weft import __version__

    yield Row("weft", __version__)
    yield Row("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    yield Row("torch", version("torch"))
    yield Row("tokenizers", version("tokenizers"))


def _processor() -> Iterator[Row]:
    import os
    import re
    from contextlib import suppress

    import torch

    from weft.errors import counted
    from weft.machine import bandwidth, processor, products
    from weft.recipe.settle import faster_format

    (name, features), cores, threads = processor(), os.cpu_count() or 1, torch.get_num_threads()
    value: dict[str, Any] = {"name": name, "cores": cores, "threads": threads}
    yield Row("processor", f"{name}, {counted(cores, 'core')}, torch uses {counted(threads, 'thread')}", value)
    yield Row("instructions", ", ".join(features) or "no instructions for products that weft knows of", features)
    with suppress(AttributeError, ValueError, OSError):  # not every system knows
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        details = Path("/proc/meminfo")
        free = re.search(r"MemAvailable: +(\d+) kB", details.read_text() if details.exists() else "")
        available = f", {int(free[1]) * 1024 / GIB:.1f} GiB free" if free else ""
        yield Row("memory", f"{total / GIB:.1f} GiB{available}")
    one, all_ = bandwidth(threads=1), bandwidth()
    speeds = f"one thread {one / 1e9:.3g} GB/s, all {all_ / 1e9:.3g} GB/s"
    yield Row("memory bandwidth", speeds, {"one thread": one, "all threads": all_})
    rates = products(*LAYER, ("fp32", "bf16", "int8"))
    yield Row("products", _rates(rates), rates)
    if not torch.cuda.is_available():
        precision, why = faster_format(rates)
        yield Row("training", f"{precision}: {why}", {"precision": precision, "why": why})
    yield _decoding()


def _decoding() -> Row:
    """How long a decoding step's product takes by the kernels that each width is written with here."""
    import torch

    from weft.decode.fast import native
    from weft.decode.fast.packed import layout
    from weft.decode.fast.products import KERNELS, SAMPLE, fastest, seconds

    compiled = native.library() is not None
    shapes = {bits: (*SAMPLE, layout(bits, SAMPLE[1])[1]) for bits in KERNELS}
    kernels = {
        bits: fastest(bits, shape, torch.device("cpu"), torch.float32).__name__ for bits, shape in shapes.items()
    }
    times = {bits: seconds(bits)[name] for bits, name in kernels.items()}
    how = "by weft's own kernels" if compiled else "by torch's kernels: no C compiler was found"
    shown = ", ".join(f"{bits} {time * 1e6:.0f} µs" for bits, time in times.items())
    value = {"compiled": compiled, "seconds": times, "kernels": kernels}
    return Row("decoding", f"{SAMPLE[0]} × {SAMPLE[1]} weights a token, one thread: {shown}, {how}", value)


def _rates(rates: Mapping[str, float]) -> str:
    """Operations a second by number format, in words; a format without products isn't mentioned."""
    unit, name = (1e12, "TFLOP/s") if rates["fp32"] > 1e13 else (1e9, "GFLOP/s")
    return ", ".join(f"{format_} {rate / unit:,.3g} {name}" for format_, rate in rates.items() if rate)


def _gpus() -> Iterator[Row]:
    import torch

    from weft.machine import bandwidth, has_triton, products

    if not torch.cuda.is_available():
        yield Row("GPU", "none that torch can use; models train on the CPU")
    for index in range(torch.cuda.device_count()):
        device, about = f"cuda:{index}", torch.cuda.get_device_properties(index)
        rates, read = products(*GPU_LAYER, ("fp32", "bf16"), device), bandwidth(device)
        kernels = "with Triton" if has_triton() else "without Triton, which weft's own kernels need"
        memory = about.total_memory
        speeds = f"{_rates(rates)}, memory is read at {read / 1e9:,.4g} GB/s"
        value = {"name": about.name, "memory": memory, "rates": rates, "bandwidth": read, "triton": has_triton()}
        yield Row(f"GPU {index}", f"{about.name}, {memory / GIB:.0f} GiB; {speeds}; {kernels}", value)


def _packages() -> Iterator[Row]:
    from importlib.metadata import PackageNotFoundError, version

    for package, (feature, extra) in EXTRAS.items():
        try:
            yield Row(package, f"{version(package)}: {feature}")
        except PackageNotFoundError:
            yield Row(package, f"missing, for {feature}; pip install '{extra}'")


def _folders() -> Iterator[Row]:
    import shutil

    from weft.text.builtin import cache_folder

    for name, folder in {"cache": cache_folder(), "runs": Path("runs").absolute()}.items():
        there = folder
        while not there.exists():  # it will be made inside the nearest folder that exists
            there = there.parent
        if _writable(there):
            yield Row(name, f"{folder}, {shutil.disk_usage(there).free / GIB:.0f} GiB free")
        else:
            yield Row(name, f"{folder} can't be written")


def _writable(folder: Path) -> bool:
    """Whether a file can really be made there; asking for permissions isn't enough on read-only disks."""
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
