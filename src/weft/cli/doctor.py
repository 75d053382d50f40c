"""`weft doctor`: what this machine offers, and what is missing for what."""

from collections.abc import Iterator
from pathlib import Path

from weft.cli import columns, options
from weft.cli.loading import loading

EXTRAS = {
    "pyarrow": ("Parquet files", "weft[parquet]"),
    "huggingface_hub": ("hub:owner/name sources", "weft[hub]"),
    "tensorboard": ("log.tensorboard = true", "weft[tensorboard]"),
    "ray": ("weft compare --jobs ray", "weft[ray]"),
    "lm_eval": ("tasks of lm-evaluation-harness", "weft[lm-eval]"),
}
GIB = 1 << 30


def doctor(as_json: options.AsJson = False) -> None:
    """Show what weft runs on: Python, torch, devices, memory, optional packages, folders."""
    with loading():
        rows = [row for part in (_software, _devices, _packages, _folders) for row in part()]
    if as_json:
        columns.print_json(dict(rows))
    else:
        columns.show(("", ""), rows, text=(0, 1))


def _software() -> Iterator[tuple[str, str]]:
    import platform
    from importlib.metadata import version

    from weft import __version__

    yield "weft", __version__
    yield "Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield "torch", version("torch")
    yield "tokenizers", version("tokenizers")


def _devices() -> Iterator[tuple[str, str]]:
    import os
    import re
    from contextlib import suppress

    import torch

    from weft.errors import counted

    yield "CPU", f"{counted(os.cpu_count() or 1, 'core')}, torch uses {counted(torch.get_num_threads(), 'thread')}"
    with suppress(AttributeError, ValueError, OSError):  # not every system knows
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        details = Path("/proc/meminfo")
        free = re.search(r"MemAvailable: +(\d+) kB", details.read_text() if details.exists() else "")
        available = f", {int(free[1]) * 1024 / GIB:.1f} GiB free" if free else ""
        yield "memory", f"{total / GIB:.1f} GiB{available}"
    if not torch.cuda.is_available():
        yield "GPU", "none that torch can use; models train on the CPU"
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        yield f"GPU {index}", f"{about.name}, {about.total_memory / GIB:.0f} GiB"


def _packages() -> Iterator[tuple[str, str]]:
    from importlib.metadata import PackageNotFoundError, version

    for package, (feature, extra) in EXTRAS.items():
        try:
            yield package, f"{version(package)}: {feature}"
        except PackageNotFoundError:
            yield package, f"missing: {feature} need it; pip install '{extra}'"


def _folders() -> Iterator[tuple[str, str]]:
    import shutil

    from weft.text.builtin import cache_folder

    for name, folder in {"cache": cache_folder(), "runs": Path("runs").absolute()}.items():
        there = folder
        while not there.exists():  # it will be made inside the nearest folder that exists
            there = there.parent
        if _writable(there):
            yield name, f"{folder}, {shutil.disk_usage(there).free / GIB:.0f} GiB free"
        else:
            yield name, f"{folder} can't be written"


def _writable(folder: Path) -> bool:
    """Whether a file can really be made there; asking for permissions isn't enough on read-only disks."""
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
