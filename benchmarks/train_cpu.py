"""Time training steps on a CPU beside transformers' GPT-2, with the same shapes, tokens and optimizer.

    python benchmarks/train_cpu.py [--only 1 2 3] [--precision fp32 bf16] [--rounds 5] [--threads 1] [--profile]
    python benchmarks/train_cpu.py --loss [--seeds 3] [--steps 200] [--width 128]

A step is forward, backward, clipping to norm 1 and AdamW, eager. weft's is the step of its trainer; transformers' runs
under torch's autocast in bf16. All models run alternately in one process, so that other load on the machine affects
them equally; ratios are of medians. Processor time is measured with one thread, otherwise wall-clock time.

--loss trains the recipe's GPT on the built-in Python text in fp32 and in bf16, with the same seeds, and prints the
validation losses and how much they differ between precisions and between seeds.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

import weft
from weft.data.batch import Batch
from weft.models.build import build
from weft.models.presets import gpt
from weft.objectives.tokens import token_loss
from weft.parallel.passes import Parallel
from weft.recipe.config import Precision
from weft.recipe.objective import NextToken
from weft.recipe.optimizer import AdamW
from weft.training import optimizer
from weft.training.precision import arithmetic, autocast
from weft.training.step import OptimisationStep

# layers, heads, d_model, length, rows, vocab_size; the first two are nanoGPT's character models for CPU and GPU
SHAPES = [(4, 4, 128, 64, 12, 65), (6, 6, 384, 256, 8, 65), (4, 12, 768, 256, 4, 8192)]
LR = 1e-3
CPU = torch.device("cpu")


def ours(shape: tuple[int, ...], precision: Precision) -> Callable[[Batch], float]:
    """Training step of weft's trainer."""
    layers, heads, d_model, length, _, vocab_size = shape
    model = build(gpt(layers, d_model, heads, context=length, vocab_size=vocab_size)).train()
    settings = NextToken()
    step = OptimisationStep(
        Parallel(model),
        optimizer.build(AdamW(), model),
        lambda model, features, batch: token_loss(model, features, batch, settings=settings),
        CPU,
        precision,
        clip=1.0,
    )

    def run(batch: Batch) -> float:
        with arithmetic(precision, deterministic=False):  # weft's settings, as in its training loop
            return float(step([batch], LR).loss)

    return run


def theirs(shape: tuple[int, ...], precision: Precision) -> Callable[[Batch], float]:
    """Training step of transformers' GPT-2 with scaled_dot_product_attention, as its users write it."""
    import transformers

    layers, heads, d_model, length, _, vocab_size = shape
    settings = transformers.GPT2Config(
        vocab_size=vocab_size,
        n_positions=length,
        n_embd=d_model,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
    )
    model = transformers.GPT2LMHeadModel._from_config(settings, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)

    def step(batch: Batch) -> float:
        # transformers shifts the labels itself
        with autocast(precision, CPU):
            loss = model(input_ids=batch.tokens, labels=batch.tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def example(shape: tuple[int, ...]) -> Batch:
    """Batch of random tokens."""
    torch.manual_seed(0)
    row = torch.randint(shape[5], (shape[4], shape[3] + 1))
    return Batch(row[:, :-1].contiguous(), row[:, 1:].contiguous())


def compare(shape: tuple[int, ...], precisions: list[Precision], rounds: int, steps: int) -> None:
    """Print the median seconds per step of each, and the ratios."""
    layers, _, d_model, length, rows, vocab_size = shape
    batch = example(shape)
    runs = {}
    for precision in precisions:
        runs["weft", precision] = ours(shape, precision)
        runs["transformers", precision] = theirs(shape, precision)
    times: dict[tuple[str, Precision], list[float]] = {name: [] for name in runs}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for turn in range(rounds + 1):
        for name, step in runs.items():
            start = clock()
            for _ in range(steps):
                step(batch)
            if turn:  # the first turn warms up
                times[name].append((clock() - start) / steps)
    median = {name: statistics.median(taken) for name, taken in times.items()}
    print(f"{layers} layers, d {d_model}, T {length}, B {rows}, V {vocab_size}", flush=True)
    for precision in precisions:
        mine, other = median["weft", precision], median["transformers", precision]
        speeds = f"weft {1e3 * mine:8.1f} ms {rows * length / mine:8,.0f} tok/s"
        line = f"  {precision}  {speeds}   transformers {1e3 * other:8.1f} ms   ratio {other / mine:.2f}"
        if precision != precisions[0]:
            line += f"   {median['weft', precisions[0]] / mine:.2f} times weft's {precisions[0]}"
        print(line, flush=True)


def profile(shape: tuple[int, ...], precision: Precision, steps: int) -> None:
    """Print the operations of weft's step by time."""
    batch, step = example(shape), ours(shape, precision)
    for _ in range(3):
        step(batch)
    with torch.profiler.profile() as profiler:
        for _ in range(steps):
            step(batch)
    print(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))


def losses(precisions: list[Precision], seeds: int, steps: int, width: int) -> None:
    """Print validation losses of a small GPT in each precision, over the same seeds."""
    results: dict[Precision, list[float]] = {precision: [] for precision in precisions}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            for precision in precisions:
                changes = {"precision": precision, "seed": seed, "steps": steps, "tokenizer": "byte"}
                changes |= {"model.layers": 2, "model.d_model": width, "model.feedforward.d_ff": 4 * width}
                changes |= {"model.attention.heads": max(1, width // 32), "batch.size": 8, "batch.length": 64}
                run = weft.train(
                    "gpt-tiny",
                    data="builtin:python",
                    run=f"{folder}/{precision}-{seed}",
                    changes=changes,
                    log=lambda line: None,
                )
                results[precision].append(run.evaluate()["loss"])
                print(f"seed {seed}, {precision}: {results[precision][-1]:.4f}", flush=True)
    for precision, values in results.items():
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        differences = [loss - baseline for loss, baseline in zip(values, results[precisions[0]], strict=True)]
        print(
            f"{precision}: mean {statistics.mean(values):.4f}, between seeds ± {spread:.4f}, "
            f"against {precisions[0]} {statistics.mean(differences):+.4f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3], help="numbers of the shapes"
    )
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, help="per turn (default 1); with --loss, per run (default 200)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--profile", action="store_true", help="list the operations of weft's step instead")
    parser.add_argument("--loss", action="store_true", help="compare the losses in fp32 and bf16 instead")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--width", type=int, default=128, help="d_model of the model whose losses are compared")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.loss:
        losses(["fp32", "bf16"], options.seeds, options.steps or 200, options.width)
        raise SystemExit
    for number in options.only:
        if options.profile:
            profile(SHAPES[number - 1], options.precision[0], options.steps or 1)
        else:
            compare(SHAPES[number - 1], options.precision, options.rounds, options.steps or 1)
