"""Compare the predictions of `weft plan` with a training step on this machine: milliseconds and peak memory.

    python benchmarks/plan.py [--cases gpt2:32 gpt2:8 llama:8 llama:2] [--precision bf16] [--steps 10] [--tiny]

A case is a model of `gpu_cases.py` and its rows per micro-batch. Each runs in a separate process: the step of weft's
trainer, compiled and captured, on random tokens (about a minute each to compile). Peak memory is the allocator's after
capturing. Without a GPU, or with --tiny, the models are tiny and the predictions assume a generic CPU: this checks the
script, and its numbers mean nothing.
"""

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace

import torch

from gpu_cases import SIZES, Bench, Size, gpt2_weft, llama_weft
from weft.costs.devices import DEVICES, Device, device_called, interconnect_named
from weft.costs.layout_search import LayoutPrediction, Predictor
from weft.costs.layouts import LayoutChoice, TrainingJob
from weft.layout import Layout
from weft.models.presets import gpt, llama
from weft.training.precision import arithmetic

GPU = torch.cuda.is_available()
STEPS = {"gpt2": gpt2_weft, "llama": llama_weft}
WARMUP = 5  # steps


def size_of(options: argparse.Namespace, case: str) -> tuple[str, Size]:
    name, rows = case.split(":")
    if options.tiny or not GPU:
        return name, replace(SIZES[name].shrunk(), rows=int(rows))
    return name, replace(SIZES[name], rows=int(rows))


def measure(options: argparse.Namespace, case: str) -> dict[str, float]:
    """Milliseconds per step, and peak memory in GiB."""
    name, size = size_of(options, case)
    precision = options.precision if GPU else "fp32"
    torch.manual_seed(0)
    with arithmetic(precision, deterministic=False):
        step = STEPS[name](Bench(precision, GPU, torch.device("cuda" if GPU else "cpu"), None), size)
        step()  # compile and capture, which allocate memory that a step does not need
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(WARMUP):
            step()
        wait()
        began = time.perf_counter()
        for _ in range(options.steps):
            step()
        wait()
        ms = 1e3 * (time.perf_counter() - began) / options.steps
    return {"ms": ms, "gib": torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0}


def wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def predict(options: argparse.Namespace, case: str) -> LayoutPrediction:
    name, size = size_of(options, case)
    if name == "gpt2":
        model = gpt(size.layers, size.d_model, size.heads, context=size.length, vocab_size=size.vocab_size)
    else:
        model = llama(
            size.layers, size.d_model, size.heads, d_ff=size.d_ff, context=size.length, vocab_size=size.vocab_size
        )
    device: Device | None = device_called(torch.cuda.get_device_name()) if GPU else DEVICES["cpu"]
    if device is None:
        sys.exit(f"{torch.cuda.get_device_name()}: not in the planner's table of devices")
    precision = options.precision if GPU else "fp32"
    job = TrainingJob(
        model, size.rows, size.length, device=device, net=interconnect_named(None, device, 1), precision=precision
    )
    return Predictor(job)(LayoutChoice(Layout(replicate=1), size.rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=["gpt2:32", "gpt2:8", "llama:8", "llama:2"])
    parser.add_argument("--precision", default="bf16", choices=["bf16", "fp8"])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    for case in [options.one] if options.one else options.cases:
        name, _, rows = case.partition(":")
        if name not in STEPS or not rows.isdecimal() or int(rows) < 1:
            parser.error(f"--cases {case}: expected a model ({', '.join(STEPS)}) and its rows, such as gpt2:32")
    if options.one:
        print("@" + json.dumps(measure(options, options.one)), flush=True)
        return
    print(f"{torch.cuda.get_device_name() if GPU else 'a CPU'}, torch {torch.__version__}, {options.precision}\n")
    print("| case | ms | planned | error | peak GiB | planned | error |\n|---|---|---|---|---|---|---|")
    for case in options.cases:
        command = [sys.executable, __file__, "--one", case, "--precision", options.precision]
        command += ["--steps", str(options.steps), *(["--tiny"] if options.tiny else [])]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = [line for line in done.stdout.splitlines() if line.startswith("@")]
        if done.returncode or not lines:
            print(f"| {case} | failed: {(done.stderr.strip().splitlines() or ['?'])[-1]} |", flush=True)
            continue
        measured, planned = json.loads(lines[0][1:]), predict(options, case)
        ms, gib = 1e3 * planned.time.total, planned.memory.peak / 2**30
        row = [case, f"{measured['ms']:.1f}", f"{ms:.1f}", f"{ms / measured['ms'] - 1:+.1%}"]
        row += [f"{measured['gib']:.2f}", f"{gib:.2f}", f"{gib / measured['gib'] - 1:+.1%}" if measured["gib"] else ""]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
