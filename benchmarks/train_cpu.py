"""Training steps on the processor beside transformers' GPT-2: the same shapes, the same tokens, the same optimizer.

    python benchmarks/train_cpu.py [--only 1 2 3] [--rounds 5] [--threads 1] [--profile]

A step is forward, backward, clipping to norm 1 and AdamW, in fp32 and eager. weft's is the step of its trainer.
Both models run in the same process, turn by turn, so that whatever else the machine does falls on both; the ratio is
that of the medians.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from weft.data.batch import Batch
from weft.models.build import build
from weft.models.presets import gpt
from weft.objectives.words import word_loss
from weft.parallel.passes import Parallel
from weft.recipe.config import AdamW
from weft.recipe.objective import NextToken
from weft.training import optimizer
from weft.training.step import OptimisationStep

# layers, heads, d_model, length, rows, words; the first two are nanoGPT's character models for a processor and a GPU
SHAPES = [(4, 4, 128, 64, 12, 65), (6, 6, 384, 256, 8, 65), (4, 12, 768, 256, 4, 8192)]
LR = 1e-3


def ours(layers: int, heads: int, d_model: int, length: int, vocab_size: int) -> Callable[[Batch], float]:
    """A step of weft's trainer."""
    model = build(gpt(layers, d_model, heads, length, vocab_size)).train()
    settings = NextToken()
    step = OptimisationStep(
        Parallel(model),
        optimizer.build(AdamW(), model),
        lambda model, batch: word_loss(settings, model, batch),
        torch.device("cpu"),
        clip=1.0,
    )
    return lambda batch: float(step([batch], LR).loss)


def theirs(layers: int, heads: int, d_model: int, length: int, vocab_size: int) -> Callable[[Batch], float]:
    """The same step with transformers' GPT-2 on scaled_dot_product_attention, as its users write it."""
    import transformers

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
        # transformers shifts the labels itself: it is given the row that holds both tokens and targets
        loss = model(input_ids=batch.tokens, labels=batch.tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def compare(shape: tuple[int, ...], rounds: int, steps: int) -> None:
    """Median seconds a step of both, and the ratio."""
    layers, heads, d_model, length, rows, vocab_size = shape
    torch.manual_seed(0)
    row = torch.randint(vocab_size, (rows, length + 1))
    batch = Batch(row[:, :-1].contiguous(), row[:, 1:].contiguous())
    runs = {"weft": ours(layers, heads, d_model, length, vocab_size)}
    runs["transformers"] = theirs(layers, heads, d_model, length, vocab_size)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds + 1):
        for name, step in runs.items():
            start = time.perf_counter()
            for _ in range(steps):
                step(batch)
            if turn:  # the first turn warms up
                times[name].append((time.perf_counter() - start) / steps)
    mine, other = (statistics.median(times[name]) for name in ("weft", "transformers"))
    name = f"{layers} layers, d {d_model}, T {length}, B {rows}, V {vocab_size}"
    speeds = f"weft {1e3 * mine:8.1f} ms {rows * length / mine:8,.0f} tok/s"
    print(f"{name:42} {speeds}   transformers {1e3 * other:8.1f} ms   ratio {other / mine:.2f}", flush=True)


def profile(shape: tuple[int, ...], steps: int) -> None:
    """Where weft's step spends its time."""
    layers, heads, d_model, length, rows, vocab_size = shape
    row = torch.randint(vocab_size, (rows, length + 1))
    batch, step = (
        Batch(row[:, :-1].contiguous(), row[:, 1:].contiguous()),
        ours(layers, heads, d_model, length, vocab_size),
    )
    for _ in range(3):
        step(batch)
    with torch.profiler.profile() as watched:
        for _ in range(steps):
            step(batch)
    print(watched.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=50))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", choices=(1, 2, 3), default=[1, 2, 3], help="which shapes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1, help="steps a turn")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--profile", action="store_true", help="show where weft's time goes instead")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    for number in given.only:
        if given.profile:
            profile(SHAPES[number - 1], given.steps)
        else:
            compare(SHAPES[number - 1], given.rounds, given.steps)
