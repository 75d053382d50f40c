"""Measure the cost of FSDP2 on one process, and how much of the all-reduces the backward pass hides.

    python benchmarks/parallel.py one [--cases gpt2 llama] [--steps 20] [--tiny]      one GPU, one process
    torchrun --nproc-per-node 2 benchmarks/parallel.py overlap [--trace FILE]         gloo, on processors

`one`: the trainer's step, compiled, plain (without and with CUDA graphs) and with FSDP2 over a mesh of one process,
where each block is compiled separately. Each variant has a separate process; they take turns, and the best of three
rounds counts.

`overlap`: a step of two replicas under torch's profiler: how much of the all-reduces' time is within the backward
pass, and when the first begins. `--trace` keeps the trace of process 0, for chrome://tracing or Perfetto.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from gpu_cases import CLIP, DECAY, LR, SIZES, Bench, Size, token_loss_of
from weft.data.batch import Batch
from weft.layout import Layout
from weft.models.build import build
from weft.models.presets import gpt, llama
from weft.models.stack import Stack
from weft.nn.dropout import row_keys
from weft.nn.init import empty_weights
from weft.parallel import apply, mesh
from weft.parallel.mesh import Mesh
from weft.parallel.passes import Parallel, Replicas
from weft.parallel.ranks import ALONE, join
from weft.recipe.objective import NextToken
from weft.recipe.optimizer import AdamW
from weft.training import optimizer
from weft.training.compiled import Compiled, without_maps
from weft.training.precision import arithmetic
from weft.training.step import OptimisationStep

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
VARIANTS = ("plain", "captured", "fsdp2")
WARMUP = 5  # steps


def settings_of(case: str, size: Size) -> Any:
    if case == "llama":
        return llama(
            size.layers, size.d_model, size.heads, d_ff=size.d_ff, context=size.length, vocab_size=size.vocab_size
        )
    return gpt(size.layers, size.d_model, size.heads, context=size.length, vocab_size=size.vocab_size)


def training_step(case: str, size: Size, variant: str) -> Any:
    """Step of the trainer as a function without arguments."""
    settings, precision = settings_of(case, size), "bf16" if GPU else "fp32"
    if variant == "fsdp2":
        distributed.init_process_group(
            "nccl" if GPU else "gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1
        )
        names = ("pipeline", "replicate", "shard", "tensor")
        one = Mesh(mesh.ONE, ALONE, init_device_mesh(DEVICE.type, (1, 1, 1, 1), mesh_dim_names=names))
        with empty_weights():
            model = build(settings).train()
        stacks = [module for module in model.modules() if isinstance(module, Stack)]
        for stack in stacks if GPU else ():
            for block in stack.blocks:
                block.compile()
        root = apply._fully_sharded(model, stacks, one, precision=precision)
        parallel: Parallel = apply.ShardedParallel(model=model, mesh=one, root=root, tensor_sums=[], fused={})
        root.to_empty(device=DEVICE)
        parallel.fill(build(settings).named_parameters())  # type: ignore[attr-defined]
        adamw = optimizer.build(AdamW(betas=(0.9, 0.95), weight_decay=DECAY), model, parallel.local)
    else:
        model = build(settings).to(DEVICE).train()
        if GPU:
            model.wrap(lambda features: Compiled(without_maps(model), capture=variant == "captured"))
        parallel = Parallel(model)
        adamw = optimizer.build(AdamW(betas=(0.9, 0.95), weight_decay=DECAY), model)
    batch = Batch(*Bench(precision, GPU, DEVICE, None).text(size))
    batch = replace(batch, keys=row_keys(0, torch.arange(size.rows, device=DEVICE)))
    take = OptimisationStep(parallel, adamw, token_loss_of(NextToken()), DEVICE, precision, CLIP)  # type: ignore[arg-type]
    limits = torch.full((2,), math.inf, device=DEVICE)
    return lambda: take([batch], LR, limits)


def wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def one(options: argparse.Namespace) -> None:
    """Time each variant in a separate process, taking turns."""
    for case in options.cases:
        best: dict[str, dict[str, float]] = {}
        for _ in range(options.rounds):
            for variant in VARIANTS:
                command = [sys.executable, __file__, "one", "--way", variant, "--cases", case]
                command += ["--steps", str(options.steps), *(["--tiny"] if options.tiny else [])]
                done = subprocess.run(command, capture_output=True, text=True)
                if done.returncode:
                    sys.exit(done.stderr)
                result = json.loads(done.stdout.splitlines()[-1])
                if variant not in best or result["ms"] < best[variant]["ms"]:
                    best[variant] = result
        plain = best["plain"]["ms"]
        for variant, result in best.items():
            cost = result["ms"] / plain - 1.0
            print(
                f"{case:6} {variant:9} {result['ms']:9.2f} ms per step  {cost:+7.2%}  {result['gib']:6.2f} GiB",
                flush=True,
            )


def measure(options: argparse.Namespace, case: str) -> dict[str, float]:
    size = SIZES[case] if GPU and not options.tiny else SIZES[case].shrunk()
    torch.manual_seed(0)
    with arithmetic("bf16" if GPU else "fp32", deterministic=False):
        step = training_step(case, size, options.way)
        for _ in range(WARMUP):
            step()
        wait()
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(options.steps):
            step()
        wait()
        ms = 1e3 * (time.perf_counter() - began) / options.steps
    return {"ms": ms, "gib": torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0}


# ---- overlap of all-reduces


def overlap(options: argparse.Namespace) -> None:
    """Profile a step of two replicas; the gradients fill several of DDP's 25 MiB buckets."""
    ranks, size = join(), Size(4, 128, 6, 512, 8, 2048, 8192)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = build(settings_of("gpt2", size)).train()
    parallel = Replicas(model, mesh.build(Layout(), ranks, torch.device("cpu")))
    adamw = optimizer.build(AdamW(), model)
    batch = Batch(*Bench("fp32", False, torch.device("cpu"), None).text(size))
    step = OptimisationStep(parallel, adamw, token_loss_of(NextToken()), torch.device("cpu"), "fp32", CLIP)
    for _ in range(3):
        step([batch], LR)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step([batch], LR)
    if ranks.leads:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(options.trace or Path(folder) / "trace.json")
            profiler.export_chrome_trace(str(file))
            _report(json.loads(file.read_text())["traceEvents"])
    ranks.barrier()


def _report(events: list[dict[str, Any]]) -> None:
    """Print how much of the all-reduces' time is within the backward pass."""
    spans = [event for event in events if event.get("ph") == "X"]
    backward = [event for event in spans if "Backward" in event["name"] and event["name"].startswith("autograd::")]
    begin, end = min(event["ts"] for event in backward), max(event["ts"] + event["dur"] for event in backward)
    sums = [event for event in spans if "all_reduce" in event["name"] and "gloo" in event["name"]]
    large = [
        event for event in sums if begin < event["ts"] < end
    ]  # outside the pass, only counts and losses are reduced
    total = sum(event["dur"] for event in large)
    hidden = sum(max(0.0, min(end, event["ts"] + event["dur"]) - max(begin, event["ts"])) for event in large)
    print(f"backward pass {(end - begin) / 1e3:.1f} ms; {len(large)} all-reduces, {total / 1e3:.1f} ms in all")
    print(f"{hidden / total:.0%} of their time is within the backward pass", end="; ")
    print(f"the first begins after {(min(e['ts'] for e in large) - begin) / (end - begin):.0%} of it")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("one", "overlap"))
    parser.add_argument("--cases", nargs="+", default=["gpt2", "llama"], choices=("gpt2", "llama"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--way", choices=VARIANTS)
    parser.add_argument("--trace")
    options = parser.parse_args()
    if options.what == "overlap":
        overlap(options)
    elif options.way is not None:
        print(json.dumps(measure(options, options.cases[0])))
    else:
        one(options)


if __name__ == "__main__":
    main()
