"""Time loading a large run onto a GPU, beside reading its file.

    python benchmarks/gpu_load.py [--preset llama-7b] [--folder FOLDER] [--drop]

A run with random bf16 weights is written to FOLDER and loaded with `weft.load` in a new process; for comparison its
file is read and hashed in full. The file has just been written and is in the page cache; --drop also measures the disk
and a load with an empty page cache, which needs root.
"""

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from weft.api.import_model import recipe_for
from weft.interop.bundle import ModelBundle
from weft.interop.weight_map import shapes
from weft.models.presets import preset
from weft.runs.folder import RunFolder
from weft.runs.imported import write_run
from weft.storage.files import checksums
from weft.text.config import Byte
from weft.text.tokenizer import build_tokenizer

LOAD = """
import json, resource, sys, time
import torch, weft.api.load
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.zeros(1, device=device)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
model = weft.api.load.load(sys.argv[1], device=device).model
device == "cuda" and torch.cuda.synchronize()
seconds = time.perf_counter() - began
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
dtype = str(next(model.parameters()).dtype)
print(json.dumps({"seconds": seconds, "host": (rss - before) * 1024, "dtype": dtype}))
"""
THREADS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="llama-7b")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--drop", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run = RunFolder(Path(folder) / "run")
        run.path.mkdir()
        model = preset(options.preset)
        weights = {name: _random(shape) for name, shape in shapes(model).items()}
        bundle = ModelBundle(model, weights, build_tokenizer(Byte(), []), "random weights")
        write_run(run, bundle, recipe_for(bundle, run.path))
        file = run.checkpoints / "best" / "model.safetensors"
        size = file.stat().st_size
        print(f"{options.preset}: {size / 1e9:.2f} GB in {file}", flush=True)

        def show(label: str, seconds: float, note: str = "") -> None:
            print(f"{label:44} {seconds:6.2f} s {size / seconds / 1e9:6.2f} GB/s{note}", flush=True)

        def load(label: str) -> None:
            result = json.loads(subprocess.check_output([sys.executable, "-c", LOAD, str(run.path)]))
            show(
                label, result["seconds"], f", {result['host'] / size:.2f} × the file in host memory, {result['dtype']}"
            )

        if options.drop:
            _drop()
            show("read from disk, 16 threads", _read(file, direct=True))
            _drop()
            load("weft.load, page cache empty")
        show("read from page cache, one thread", _read(file, threads=1))
        show("read from page cache, 16 threads", _read(file))
        show("hashed from page cache, 16 threads", _timed(lambda: checksums(file)))
        load("weft.load")


def _drop() -> None:
    subprocess.run("sync; echo 3 > /proc/sys/vm/drop_caches", shell=True, check=True)


def _random(shape: tuple[int, ...]):  # type: ignore[no-untyped-def]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return lambda: torch.randn(shape, device=device).to(torch.bfloat16).cpu()


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _read(path: Path, threads: int = THREADS, direct: bool = False) -> float:
    """Seconds to read a file in full; `direct` bypasses the page cache."""
    piece, size = 1 << 24, path.stat().st_size
    handle = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    local = threading.local()

    def read_piece(start: int) -> None:
        if not hasattr(local, "buffer"):
            local.buffer = mmap.mmap(-1, piece)  # page-aligned, as O_DIRECT requires
        os.preadv(handle, [local.buffer], start)

    with ThreadPoolExecutor(threads) as pool:
        seconds = _timed(lambda: list(pool.map(read_piece, range(0, size, piece))))
    os.close(handle)
    return seconds


if __name__ == "__main__":
    main()
