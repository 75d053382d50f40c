"""How fast a large run is loaded onto a GPU, against reading its file.

    python benchmarks/gpu_load.py [--preset llama-7b] [--folder FOLDER]

A run with random bf16 weights is written to FOLDER, loaded with `weft.load` in a new process, and its file is read from
end to end beside it. The page cache is warm in both; --drop asks the system to empty it first, which needs root.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from weft.exchange import RunFolder, _write_run
from weft.interop.loaded import Loaded
from weft.interop.mapping import shapes
from weft.models.presets import preset
from weft.text.config import Byte

LOAD = """
import json, resource, sys, time
import torch, weft.api
from pathlib import Path
from weft.train.checkpoint import verify
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.zeros(1, device=device)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
verify((Path(sys.argv[1]) / "checkpoints/best").resolve())
hashed = time.perf_counter() - began
began = time.perf_counter()
model = weft.api.load(sys.argv[1], device=device).model
device == "cuda" and torch.cuda.synchronize()
seconds = time.perf_counter() - began
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
dtype = str(next(model.parameters()).dtype)
print(json.dumps({"seconds": seconds, "hashed": hashed, "host": (rss - before) * 1024, "dtype": dtype}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="llama-7b")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--drop", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.folder) as place:
        run = RunFolder(Path(place) / "run")
        run.path.mkdir()
        model = preset(given.preset)
        drawn = {name: _random(shape) for name, shape in shapes(model).items()}
        _write_run(run, Loaded(model, drawn, Byte().train([]), "random weights"), run.path)
        file = run.checkpoints / "best" / "model.safetensors"
        size = file.stat().st_size
        print(f"{given.preset}: {size / 1e9:.2f} GB in {file}")
        for what in ("read", "load"):
            if given.drop:
                subprocess.run("sync; echo 3 > /proc/sys/vm/drop_caches", shell=True, check=True)
            if what == "read":
                seconds, more = _read(file), ""
            else:
                told = json.loads(subprocess.check_output([sys.executable, "-c", LOAD, str(run.path)]))
                seconds, more = (
                    told["seconds"],
                    f", {told['hashed']:.2f} s of it to hash, "
                    f"{told['host'] / size:.2f} × the file in host memory, {told['dtype']}",
                )
            print(f"{what}: {seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s{more}")


def _random(shape: tuple[int, ...]):  # type: ignore[no-untyped-def]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return lambda: torch.randn(shape, device=device).to(torch.bfloat16).cpu()


def _read(path: Path) -> float:
    began = time.perf_counter()
    with open(path, "rb", buffering=0) as file:
        while file.read(1 << 24):
            pass
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
