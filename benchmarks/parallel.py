"""What laying a model out over processes costs, and whether sums travel while the backward pass goes on.

    python benchmarks/parallel.py one [--cases gpt2 llama] [--steps 20] [--tiny]      one GPU, one process
    torchrun --nproc-per-node 2 benchmarks/parallel.py overlap [--trace FILE]         gloo, on processors

`one`: the trainer's step, compiled, plain (without and with CUDA graphs) and through FSDP2 over a mesh of one process,
whose blocks are compiled one by one: what FSDP2 costs where there is nobody to share with. Each has a process of its
own; they take turns, and the best of three rounds counts.

`overlap`: a step of two replicas under torch's profiler: how much of the time of their all-reduces lies within the
backward pass, and when the first began. `--trace` keeps the trace of process 0, for chrome://tracing or Perfetto.
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
WAYS = ("plain", "captured", "fsdp2")
WARMUP = 5


def settings_of(case: str, size: Size) -> Any:
    if case == "llama":
        return llama(
            size.layers, size.d_model, size.heads, d_ff=size.d_ff, context=size.length, vocab_size=size.vocab_size
        )
    return gpt(size.layers, size.d_model, size.heads, context=size.length, vocab_size=size.vocab_size)


def stepping(case: str, size: Size, way: str) -> Any:
    """A step of the trainer."""
    settings, precision = settings_of(case, size), "bf16" if GPU else "fp32"
    if way == "fsdp2":
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
            model.wrap(lambda features: Compiled(without_maps(model), capture=way == "captured"))
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


def one(given: argparse.Namespace) -> None:
    """Each way in a process of its own, in turns."""
    for case in given.cases:
        best: dict[str, dict[str, float]] = {}
        for _ in range(given.rounds):
            for way in WAYS:
                command = [sys.executable, __file__, "one", "--way", way, "--cases", case, "--steps", str(given.steps)]
                told = subprocess.run([*command, *(["--tiny"] if given.tiny else [])], capture_output=True, text=True)
                if told.returncode:
                    sys.exit(told.stderr)
                found = json.loads(told.stdout.splitlines()[-1])
                if way not in best or found["ms"] < best[way]["ms"]:
                    best[way] = found
        plain = best["plain"]["ms"]
        for way, found in best.items():
            cost = found["ms"] / plain - 1.0
            print(f"{case:6} {way:9} {found['ms']:9.2f} ms a step  {cost:+7.2%}  {found['gib']:6.2f} GiB", flush=True)


def measured(given: argparse.Namespace, case: str) -> dict[str, float]:
    size = SIZES[case] if GPU and not given.tiny else SIZES[case].shrunk()
    torch.manual_seed(0)
    with arithmetic("bf16" if GPU else "fp32", deterministic=False):
        step = stepping(case, size, given.way)
        for _ in range(WARMUP):
            step()
        wait()
        if GPU:
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(given.steps):
            step()
        wait()
        ms = 1e3 * (time.perf_counter() - began) / given.steps
    return {"ms": ms, "gib": torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0}


# ---- what overlaps


def overlap(given: argparse.Namespace) -> None:
    """Two replicas of a model whose gradients fill several of DDP's buckets of 25 MiB."""
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
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        step([batch], LR)
    if ranks.leads:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(given.trace or Path(folder) / "trace.json")
            seen.export_chrome_trace(str(file))
            _report(json.loads(file.read_text())["traceEvents"])
    ranks.barrier()


def _report(events: list[dict[str, Any]]) -> None:
    """When sums travelled, beside when the backward pass computed."""
    spans = [event for event in events if event.get("ph") == "X"]
    backward = [event for event in spans if "Backward" in event["name"] and event["name"].startswith("autograd::")]
    begin, end = min(event["ts"] for event in backward), max(event["ts"] + event["dur"] for event in backward)
    sums = [event for event in spans if "all_reduce" in event["name"] and "gloo" in event["name"]]
    large = [event for event in sums if begin < event["ts"] < end]  # before and after, counts and losses are summed
    total = sum(event["dur"] for event in large)
    within = sum(max(0.0, min(end, event["ts"] + event["dur"]) - max(begin, event["ts"])) for event in large)
    print(f"backward pass {(end - begin) / 1e3:.1f} ms; {len(large)} all-reduces, {total / 1e3:.1f} ms in all")
    print(f"{within / total:.0%} of their time lies within the backward pass", end="; ")
    print(f"the first begins after {(min(e['ts'] for e in large) - begin) / (end - begin):.0%} of it")


def main() -> None:
    """What was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("one", "overlap"))
    parser.add_argument("--cases", nargs="+", default=["gpt2", "llama"], choices=("gpt2", "llama"))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--trace")
    given = parser.parse_args()
    if given.what == "overlap":
        overlap(given)
    elif given.way is not None:
        print(json.dumps(measured(given, given.cases[0])))
    else:
        one(given)


if __name__ == "__main__":
    main()
