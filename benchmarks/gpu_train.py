"""Time training steps on one GPU: weft and its peers, with the same sizes, optimizer and clipping.

    python benchmarks/gpu_train.py [--only gpt2 llama bert vaswani] [--precision bf16 fp8] [--nanogpt PATH/model.py]
                                   [--steps 20] [--warmup 6] [--limit 200] [--tiny]
    python benchmarks/gpu_train.py --profile gpt2 [--precision fp8]
    python benchmarks/gpu_train.py --overhead

`gpu_cases.py` defines the cases. Each model has a separate process. They all compile concurrently, and are then tuned
and measured one at a time, while nothing else runs: a process reports that it is ready and waits for its turn. Compiled
code is kept in --cache, so a second call on the same machine starts sooner. --precision selects the precision of weft's
matrix products; peers run in bf16. MFU is relative to the GPU's bf16 peak for both.

--profile lists the kernels of a step by time. --overhead compares a step of the whole trainer, with its data, guard and
log, with the bare step. --tiny checks the script in a minute on any device; its times mean nothing.
"""

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from gpu_cases import CASES, SIZES, Bench, Size, Step, flops_of, tokens_of
from weft.costs.devices import device_called
from weft.models.build import build
from weft.training.precision import arithmetic

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


# ---- one model, in a worker process


def make(options: argparse.Namespace, case: str, who: str, *, precision: str) -> Step:
    torch.set_float32_matmul_precision("high")  # as the peers' users do
    torch.manual_seed(0)
    bench = Bench(precision if GPU else "fp32", GPU, DEVICE, options.nanogpt)
    return CASES[case][who](bench, size_of(options, case))


def size_of(options: argparse.Namespace, case: str) -> Size:
    return SIZES[case].shrunk() if options.tiny else SIZES[case]


def switches(who: str, precision: str) -> Any:
    """Context manager with weft's arithmetic settings for weft; does nothing for peers."""
    return arithmetic(precision if GPU else "fp32", deterministic=False) if who == "weft" else nullcontext()  # type: ignore[arg-type]


def wait() -> None:
    if GPU:
        torch.cuda.synchronize()


def worker(options: argparse.Namespace, case: str, who: str, precision: str) -> None:
    """Compile, report readiness, wait for a line on stdin, measure, and report the result as a line of JSON."""
    started = time.perf_counter()
    with switches(who, precision):
        step = make(options, case, who, precision=precision)
        if GPU and who == "weft":
            step()  # a capture can't be interrupted
        elif GPU:
            compile_only(step)
        report(ready=True, seconds=time.perf_counter() - started)
        sys.stdin.readline()
        if GPU and who == "weft":  # capture allocates the memory that replays use
            torch.cuda.reset_peak_memory_stats()
        for _ in range(options.warmup):
            step()
        wait()
        if GPU and who != "weft":  # tuning allocates memory that a step does not need
            torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        for _ in range(options.steps):
            loss = step()
        wait()
        ms = 1e3 * (time.perf_counter() - began) / options.steps
    peak = torch.cuda.max_memory_allocated() / 2**30 if GPU else 0.0
    report(ms=ms, peak=peak, loss=float(loss))


class _ReadyError(Exception):
    """Raised when the first kernel is about to start."""


def compile_only(step: Step) -> None:
    """Compile both passes without running a kernel: kernels are tuned later, when nothing else is on the GPU.

    Run the whole step if this torch can't compile the backward pass ahead of time.
    """
    from torch._functorch import config as functorch
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    def stop(*args: Any, **kwargs: Any) -> None:
        raise _ReadyError

    run = CachingAutotuner.run
    if hasattr(functorch, "force_non_lazy_backward_lowering"):
        functorch.force_non_lazy_backward_lowering = True
        CachingAutotuner.run = stop  # type: ignore[method-assign,assignment]
    try:
        step()
    except _ReadyError:
        pass
    except torch.OutOfMemoryError:  # other workers are compiling too; compiled code is kept
        gc.collect()
    finally:
        CachingAutotuner.run = run  # type: ignore[method-assign]
    wait()
    torch.cuda.empty_cache()


def report(**result: Any) -> None:
    print("@" + json.dumps(result), flush=True)


# ---- all models


@dataclass
class Runner:
    """Worker process as seen by its parent."""

    case: str
    who: str
    precision: str
    process: subprocess.Popen[str]
    log: TextIO
    ready: threading.Event
    done: threading.Event
    reported: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.who} {self.precision}" if self.who == "weft" else self.who


def start(options: argparse.Namespace, case: str, who: str, precision: str, folder: Path) -> Runner:
    """Start a worker, and a thread that reads its output."""
    command = [sys.executable, __file__, "--worker", case, who, precision]
    command += ["--steps", str(options.steps), "--warmup", str(options.warmup)]
    command += ["--nanogpt", str(options.nanogpt)] if options.nanogpt else []
    command += ["--tiny"] if options.tiny else []
    log = (folder / f"{case}-{who}-{precision}.log").open("w+")
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
    runner = Runner(case, who, precision, process, log, threading.Event(), threading.Event(), {})

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("@"):
                runner.reported |= json.loads(line[1:])
                (runner.done if "ms" in runner.reported else runner.ready).set()
        process.wait()  # end of output
        runner.ready.set()
        runner.done.set()

    threading.Thread(target=listen, daemon=True).start()
    return runner


def measure_all(options: argparse.Namespace) -> None:
    """Measure all requested models and print the table."""
    began = time.perf_counter()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(options.cache.resolve())
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "4")
    jobs = [
        (case, who, precision)
        for case in sorted(options.only, key=lambda case: -SIZES[case].layers * SIZES[case].d_model)
        for who in CASES[case]
        if who != "nanoGPT" or options.nanogpt is not None
        for precision in (options.precision if who == "weft" else ["bf16"])
    ]
    with tempfile.TemporaryDirectory() as folder:
        runners = [start(options, *job, Path(folder)) for job in jobs]
        try:
            for runner in runners:
                runner.ready.wait(max(0.0, began + options.patience - time.perf_counter()))
            print(f"compiled in {time.perf_counter() - began:.0f} s", flush=True)
            for runner in sorted(runners, key=lambda r: list(SIZES).index(r.case)):  # stable: weft before its peers
                turn(runner, began + options.limit)
                show(options, runner, runners)
        finally:
            for runner in runners:
                runner.process.kill()
                runner.process.wait()


def turn(runner: Runner, end: float) -> None:
    """Let one worker measure."""
    runner.ready.wait(max(0.0, end - time.perf_counter()))
    if runner.process.poll() is None and runner.ready.is_set():
        assert runner.process.stdin is not None
        runner.process.stdin.write("go\n")
        runner.process.stdin.flush()
        runner.done.wait(max(0.0, end - time.perf_counter()))


def show(options: argparse.Namespace, runner: Runner, runners: list[Runner]) -> None:
    """Print a line of the table, or the error."""
    if "ms" not in runner.reported:
        failed = runner.process.poll() is not None
        print(f"{runner.case:8} {runner.name:22} {'failed:' if failed else 'did not finish in time'}", flush=True)
        runner.log.seek(0)
        print("".join(runner.log.readlines()[-30:]) if failed else "", end="", flush=True)
        return
    ms, size = runner.reported["ms"], size_of(options, runner.case)
    known = device_called(torch.cuda.get_device_name(DEVICE)) if GPU else None
    share = f"{flops_of(runner.case, size) / (1e-3 * ms * known.bf16):6.1%}" if known else "     –"
    ratios = [
        f"{ms / other.reported['ms']:.2f}× {other.precision}"
        for other in runners
        if other.case == runner.case and other.who == "weft" and runner.who != "weft" and "ms" in other.reported
    ]
    print(
        f"{runner.case:8} {runner.name:22} {ms:8.2f} ms {1e3 * tokens_of(runner.case, size) / ms:11,.0f} tok/s  "
        f"MFU {share}  {runner.reported['peak']:6.1f} GiB  loss {runner.reported['loss']:6.3f}  "
        f"ready after {runner.reported['seconds']:4.0f} s  {'weft is ' + ', '.join(ratios) if ratios else ''}",
        flush=True,
    )


# ---- profile and overhead


def profile(options: argparse.Namespace) -> None:
    """Print the kernels of three of weft's steps, the longest first."""
    for precision in options.precision:
        with switches("weft", precision):
            step = make(options, options.profile, "weft", precision=precision)
            for _ in range(options.warmup):
                step()
            wait()
            with torch.profiler.profile() as profiler:
                for _ in range(3):
                    step()
                wait()
        key = "self_device_time_total" if GPU else "self_cpu_time_total"
        events = sorted(profiler.key_averages(), key=lambda event: -getattr(event, key))
        total = sum(getattr(event, key) for event in events) / 3e3
        print(f"{options.profile} in {precision}: {total:.2f} ms of kernels per step")
        for event in events[:40]:
            print(f"{getattr(event, key) / 3e3:8.3f} ms {event.count // 3:5d} × {event.key[:140]}")


def overhead(options: argparse.Namespace) -> None:
    """Print milliseconds per step of the whole trainer and of the bare step, with the same model, in one process.

    On a GPU the trainer's work overlaps with the device's, so the difference is its cost. The time between two steps is
    measured too: on a CPU it is too small to show in the difference of two runs.
    """
    from weft.data.batch import Batch
    from weft.models.presets import gpt
    from weft.objectives.next_token import NextToken
    from weft.parallel.passes import Parallel
    from weft.recipe.resolve import resolve
    from weft.recipe.settle import Facts, settle
    from weft.runs.folder import RunFolder
    from weft.training import optimizer, start
    from weft.training.learner import prepare_model
    from weft.training.loader import Loader
    from weft.training.step import OptimisationStep
    from weft.training.worker import TrainingWorker

    sizes = (12, 768, 12, 256, 8192) if GPU and not options.tiny else (2, 64, 2, 32, 256)
    rows, steps = 16, 100
    precision = "bf16" if GPU else "fp32"
    changes = [f"batch.size={rows}", f"batch.length={sizes[3]}", f"steps={steps}", "log.every=10", "tokenizer=byte"]
    changes += [f"checkpoint.every={steps}", f"precision={precision}", "compile=false", f"model.vocab_size={sizes[4]}"]
    recipe = settle(resolve("gpt-tiny", changes), Facts(10**7, sizes[4]))[0]
    recipe = recipe.replace(
        model=gpt(*sizes[:3], context=sizes[3], vocab_size=sizes[4]), batch=recipe.batch.replace(micro=rows)
    )
    text = torch.randint(sizes[4], (rows, sizes[3] + 1))
    batch = Batch(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    take = OptimisationStep.__call__

    class OneBatch(NextToken):
        """Objective that trains on one batch."""

        loader = Loader(lambda *position: batch, lambda step: rows, float, min_rows=rows, row="row", micro=rows)
        fingerprints, holds_out = (), False

    gaps: list[float] = []  # seconds between the end of a step and the start of the next
    ended = None

    def timed(*args: Any) -> Any:
        nonlocal ended
        gaps.extend([] if ended is None else [time.perf_counter() - ended])
        result = take(*args)
        ended = time.perf_counter()
        return result

    OptimisationStep.__call__ = timed  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory() as folder:
        run = RunFolder(folder)
        start.train(recipe, run, OneBatch(recipe, run), worker=TrainingWorker(DEVICE, quiet=True))
        laps = [json.loads(line) for line in run.timings.read_text().splitlines()]
    OptimisationStep.__call__ = take  # type: ignore[method-assign]
    whole = sorted(lap["seconds"] / lap["steps"] for lap in laps[2:])
    model = build(recipe.model).to(DEVICE).train()
    prepare_model(model, recipe)
    loss = OneBatch(recipe, run).loss
    bare_step = OptimisationStep(
        Parallel(model), optimizer.build(recipe.optimizer, model), loss, DEVICE, recipe.precision, 1.0
    )
    on_device = batch.to(DEVICE)
    bare = []
    with arithmetic(recipe.precision, deterministic=False):
        for _ in range(len(laps)):
            wait()
            began = time.perf_counter()
            for _ in range(10):
                bare_step([on_device], 1e-4)
            wait()
            bare.append((time.perf_counter() - began) / 10)
    bare = sorted(bare[2:])
    trainer, step = 1e3 * whole[len(whole) // 2], 1e3 * bare[len(bare) // 2]
    gap = 1e3 * sorted(gaps)[len(gaps) // 2]
    print(
        f"medians: trainer {trainer:.3f} ms per step, bare step {step:.3f} ms: {trainer - step:+.3f} ms, "
        f"{(trainer - step) / 50:+.2%} of a step of 50 ms; between steps {gap:.3f} ms, {gap / 50:.2%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--precision", nargs="+", choices=("bf16", "fp8"), default=["bf16"], help="of weft's matrix products"
    )
    parser.add_argument("--nanogpt", type=Path, help="the model.py of a nanoGPT checkout")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--patience", type=float, default=150.0, help="seconds for compiling, before measuring begins")
    parser.add_argument("--limit", type=float, default=200.0, help="seconds in all")
    parser.add_argument("--cache", type=Path, default=Path("build/inductor"), help="compiled code is kept here")
    parser.add_argument("--profile", choices=CASES, metavar="CASE", help="list the kernels of weft's step instead")
    parser.add_argument("--overhead", action="store_true", help="measure the trainer's overhead per step instead")
    parser.add_argument("--tiny", action="store_true", help="check the script on any device")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        try:
            worker(options, *options.worker)
        except Exception:  # the other workers continue
            traceback.print_exc()
            sys.exit(1)
        return
    if options.overhead:
        overhead(options)
        return
    if not GPU and not options.tiny:
        parser.error("this needs a GPU; --tiny checks the script without one")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(options.cache.resolve())
    name = torch.cuda.get_device_name() if GPU else "a CPU: times mean nothing"
    print(f"{name}, torch {torch.__version__}", flush=True)
    if options.profile:
        profile(options)
    else:
        measure_all(options)


if __name__ == "__main__":
    main()
