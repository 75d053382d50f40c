"""`weft doctor`: what this machine offers, and what is missing for what."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.table import Table

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
    _software(table)
    _devices(table)
    _packages(table)
    _folders(table)
    Console(soft_wrap=False).print(table)


def _software(table: "Table") -> None:
    import platform
    from importlib.metadata import version

    from weft import __version__

    table.add_row("weft", __version__)
    table.add_row("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}")
    table.add_row("torch", version("torch"))
    table.add_row("tokenizers", version("tokenizers"))


def _devices(table: "Table") -> None:
    import os

    import torch

    table.add_row("CPU", f"{os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads")
    total, free = _memory()
    if total:
        table.add_row("memory", f"{total / GIB:.1f} GiB" + (f", {free / GIB:.1f} GiB free" if free else ""))
    if not torch.cuda.is_available():
        table.add_row("GPU", "none that torch can use; models train on the CPU")
    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        table.add_row(f"GPU {index}", f"{about.name}, {about.total_memory / GIB:.0f} GiB")


def _memory() -> tuple[int, int]:
    """Bytes of memory, all and available; 0 where the system doesn't say."""
    import os

    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0, 0
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return total, 0
    return total, next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def _packages(table: "Table") -> None:
    from importlib.metadata import PackageNotFoundError, version

    for package, (feature, extra) in EXTRAS.items():
        try:
            table.add_row(package, f"{version(package)}: {feature}")
        except PackageNotFoundError:
            table.add_row(
                package,
                f"[yellow]missing[/yellow]: {feature} need it; pip install '{extra.replace('[', chr(92) + '[')}'",
            )


def _folders(table: "Table") -> None:
    import shutil

    from weft.text.builtin import cache_folder

    for name, folder in {"cache": cache_folder(), "runs": Path("runs").absolute()}.items():
        there = folder
        while not there.exists():  # it will be made inside the nearest folder that exists
            there = there.parent
        if _writable(there):
            table.add_row(name, f"{folder}, {shutil.disk_usage(there).free / GIB:.0f} GiB free")
        else:
            table.add_row(name, f"[red]{folder} can't be written[/red]")


def _writable(folder: Path) -> bool:
    """Whether a file can really be made there; asking for permissions isn't enough on read-only disks."""
    import tempfile

    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
