"""`weft doctor`: what this machine offers, and what is missing for what."""

from collections.abc import Iterator
from pathlib import Path

EXTRAS = {
    "pyarrow": ("Parquet files", "weft[parquet]"),
    "huggingface_hub": ("hub:owner/name sources", "weft[hub]"),
    "tensorboard": ("log.tensorboard = true", "weft[tensorboard]"),
}
GIB = 1 << 30


def doctor() -> None:
    """Show what weft runs on: Python, torch, devices, memory, optional packages, folders."""
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for rows in (_software, _devices, _packages, _folders):
        for name, about in rows():
            table.add_row(name, about)
    Console(soft_wrap=False).print(table)


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

    yield "CPU", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"
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
            install = extra.replace("[", r"\[")
            yield package, f"[yellow]missing[/yellow]: {feature} need it; pip install '{install}'"


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
            yield name, f"[red]{folder} can't be written[/red]"


def _writable(folder: Path) -> bool:
    """Whether a file can really be made there; asking for permissions isn't enough on read-only disks."""
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
