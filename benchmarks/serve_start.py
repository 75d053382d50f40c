"""Time a server's start until it is ready and has answered, with empty caches and with warm ones.

    python benchmarks/serve_start.py                                                                # a small model
    python benchmarks/serve_start.py --layers 32 --d-model 4096 --d-ff 11008 --vocab 32000 --streams 64   # 7B's shape

The first start has empty caches: no compiled C, Triton kernels, or code of torch and the driver. The second, in another
process, uses the caches of the first. Weights are random and created on the device, so nothing is read from disk:
`model` is the time to create them. CUDA graphs are never cached, but captured at first use: `text` and `texts` are the
first answers to one client and to `--streams` clients, `again` repeats `texts`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

CACHES = ("WEFT_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH")
STAGES = ("imports", "model", "ready", "text", "texts", "again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--d-model", type=int, default=256)
    parser.add_argument("--d-ff", type=int, default=768)
    parser.add_argument("--vocab", type=int, default=2000)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument(
        "--begun", type=float, help=argparse.SUPPRESS
    )  # start of the serving process, in seconds since the epoch
    options = parser.parse_args()
    if options.begun is not None:
        print(json.dumps(stages(options)))
        return
    print(f"| seconds | {' | '.join(STAGES)} |\n|---|{'---|' * len(STAGES)}")
    with tempfile.TemporaryDirectory() as folder:
        caches = {name: str(Path(folder, name)) for name in CACHES}
        for start in ("first start", "second start"):
            command = [sys.executable, *sys.argv, "--begun", str(time.time())]
            done = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE, check=True, text=True)
            seconds = json.loads(done.stdout.splitlines()[-1])
            print(f"| {start} | {' | '.join(f'{seconds[stage]:.2f}' for stage in STAGES)} |", flush=True)


def stages(options: argparse.Namespace) -> dict[str, float]:
    """Seconds of each stage, in this process."""
    seconds: dict[str, float] = {}
    before = options.begun

    def took(stage: str) -> None:
        nonlocal before
        seconds[stage], before = time.time() - before, time.time()

    import uvicorn

    import serve_engine
    from weft.serve.app import make_app
    from weft.serve.config import Limits, Serving
    from weft.serve.library import Library, ServedModel
    from weft.serve.listen import configure_interpreter, freeze_loaded
    from weft.serve.model_thread import ModelThread

    took("imports")
    run = serve_engine.random_run(options)
    took("model")
    limits = Limits(rows=options.streams, queue=2 * options.streams, per_client=2 * options.streams)
    library = Library([], None, limits)
    configure_interpreter()
    library.models["model"] = ServedModel("model", None, 0, ModelThread("model", run, limits))  # type: ignore[arg-type]
    freeze_loaded()
    app = make_app(library, Serving(limits=limits))
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_config=None, access_log=False))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    while True:
        with suppress(HTTPError), urlopen(f"http://127.0.0.1:{port}/ready", timeout=60):
            break
        time.sleep(0.01)
    took("ready")
    prompts = [[8 + (31 * row + n) % (options.vocab - 16) for n in range(options.prompt)] for row in range(64)]
    serve_engine.streams_of(port, prompts[:1], options.answer)
    took("text")
    for stage in ("texts", "again"):
        serve_engine.streams_of(port, [prompts[row % 64] for row in range(options.streams)], options.answer)
        took(stage)
    server.should_exit = True
    thread.join()
    return seconds


if __name__ == "__main__":
    main()
