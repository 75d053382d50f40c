"""Time a forward pass without instrumentation, and clicks on pages of `weft explain` in Chromium.

    python benchmarks/pages.py [--turns 40] [--before PATH/src]

With --before, a pass of gpt-mini (4 × 128 tokens, CPU, one thread) is timed alternately in this checkout and another
one, each in its own process. Clicks are timed until the next frame is drawn, on attention of 12 layers × 12 heads × 128
tokens and on graphs; pages are written to a temporary folder.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

ROOT = Path(__file__).parent.parent
PASSES = """
import time, torch
from weft.models.build import build
from weft.models.presets import preset
torch.set_num_threads(1); torch.manual_seed(0)
model, tokens = build(preset("gpt-mini")).eval(), torch.randint(0, 1000, (4, 128))
with torch.no_grad():
    model(tokens)
    for line in iter(input, ""):
        begun = time.perf_counter(); model(tokens); print(time.perf_counter() - begun, flush=True)
"""
CLICKS = """
<script>
addEventListener("load", () => setTimeout(async () => {
  const times = [], all = [...document.querySelectorAll("button, [role=button]")];
  for (const element of all.filter((_, n) => n % Math.ceil(all.length / 40) === 0)) {
    const begun = performance.now();
    element.dispatchEvent(new MouseEvent("click", { bubbles: true }));
    await new Promise(done => requestAnimationFrame(() => setTimeout(done)));
    times.push(performance.now() - begun);
  }
  fetch("/done", { method: "POST", body: JSON.stringify(times) });
}, 1500));
</script>
"""


def passes(before: Path, turns: int) -> None:
    """Time forward passes of two checkouts alternately."""
    sources = {"before": before, "now": ROOT / "src"}
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", PASSES],
            env={"PYTHONPATH": str(source), "PATH": "/usr/bin:/bin"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, source in sources.items()
    }
    times: dict[str, list[float]] = {name: [] for name in sources}
    for _ in range(turns):
        for name, process in running.items():
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write("go\n")
            process.stdin.flush()
            times[name].append(float(process.stdout.readline()))
    for process in running.values():
        process.kill()
    least = {name: min(seconds) for name, seconds in times.items()}
    middle = {name: statistics.median(seconds) for name, seconds in times.items()}
    for name in times:
        print(f"{name:8} least {least[name] * 1e3:8.2f} ms   median {middle[name] * 1e3:8.2f} ms")
    print(f"now / before: least {least['now'] / least['before']:.4f}, median {middle['now'] / middle['before']:.4f}")


def clicks() -> None:
    """Write pages, and time clicks on their buttons."""
    import numpy as np
    import torch

    from weft.explain.attention.maps import AttentionMaps, KindMaps
    from weft.explain.graph.picture import graph_picture
    from weft.models.build import build
    from weft.models.presets import preset

    weights = np.tril(np.random.default_rng(0).random((12, 12, 128, 128), dtype=np.float32))
    weights /= weights.sum(-1, keepdims=True)
    tokens = [f"word{n}" for n in range(128)]
    with torch.device("meta"):
        gpt2 = build(preset("gpt2")).eval()
    pages = {
        "attention 12 × 12 × 128": AttentionMaps("Attention", "", (KindMaps("decoder", weights, tokens, tokens),)),
        "graph of GPT-2, folded": graph_picture(gpt2, torch.zeros(1, 4, dtype=torch.long)),
        "graph, a block open": graph_picture(gpt2, torch.zeros(1, 4, dtype=torch.long), open="decoder.0"),
        "graph, all open": graph_picture(gpt2, torch.zeros(1, 4, dtype=torch.long), depth=99),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, picture in pages.items():
            file = picture.save(Path(folder) / "page.html")
            took = sorted(click_times(file.read_text("utf-8") + CLICKS))
            size, middle = file.stat().st_size / 1e6, took[len(took) // 2]
            print(f"{name:26} {size:.2f} MB  {len(took)} clicks: median {middle:.0f} ms, slowest {took[-1]:.0f} ms")


def click_times(page: str) -> list[float]:
    """Milliseconds of each click on a page in Chromium."""
    results: list[list[float]] = []

    class Pages(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(page.encode() if self.path == "/" else b"")

        def do_POST(self) -> None:
            results.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Pages)
    browser = shutil.which("chromium") or "google-chrome"
    url = f"http://127.0.0.1:{server.server_port}/"
    size = "--window-size=1280,1000"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", size, "--remote-debugging-port=0", url]
    chromium = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not results:
        server.handle_request()
    chromium.kill()
    return results[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    if options.before is not None:
        passes(options.before, options.turns)
    clicks()


if __name__ == "__main__":
    main()
