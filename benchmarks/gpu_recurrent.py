"""Time training steps of recurrent models on a GPU: weft beside torch's own modules in their usual loop.

    python benchmarks/gpu_recurrent.py [--cells lstm gru elman] [--sizes medium large] [--steps 200] [--rounds 3]

Both sides have the same sizes, dropout, clipping, SGD and tf32 products. The peer is an embedding, `nn.LSTM` (`nn.GRU`,
`nn.RNN`) with its dropout between the layers, and a linear layer, trained as in PyTorch's word language model example:
carried states, cross-entropy, `clip_grad_norm_`, SGD. weft's steps are those of `weft train`, from pinned batches of
its loader to updated weights. Rounds alternate between the two; the median round counts.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from weft.data.batch import Batch
from weft.models.build import build
from weft.nn.dropout import row_keys
from weft.objectives.tokens import token_loss
from weft.parallel.passes import Parallel
from weft.recipe.objective import NextToken
from weft.recipe.optimizer import SGD
from weft.recipe.resolve import resolve
from weft.training import optimizer as optimizers
from weft.training.captured import CapturedStep
from weft.training.precision import arithmetic
from weft.training.step import OptimisationStep

VOCAB, LAYERS, P, CLIP, LR = 10_000, 2, 0.5, 0.25, 1.0
SIZES = {"medium": (20, 35, 650), "large": (64, 256, 1024)}  # rows, tokens per row, d_model; `lstm-medium` is the first
CUDA = torch.device("cuda")
Step = Callable[[], Tensor]


class Peer(nn.Module):
    """The word language model of PyTorch's examples."""

    def __init__(self, cell: str, d_model: int):
        super().__init__()
        kind = {"lstm": nn.LSTM, "gru": nn.GRU, "elman": nn.RNN}[cell]
        self.drop, self.embedding = nn.Dropout(P), nn.Embedding(VOCAB, d_model)
        self.rnn = kind(d_model, d_model, LAYERS, dropout=P, batch_first=True)
        self.output = nn.Linear(d_model, VOCAB)

    def forward(self, tokens: Tensor, state: object) -> tuple[Tensor, object]:
        hidden, state = self.rnn(self.drop(self.embedding(tokens)), state)
        return self.output(self.drop(hidden)), state


def detached(state: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return state.detach() if isinstance(state, Tensor) else tuple(part.detach() for part in state)


def peer_step(cell: str, rows: int, time_steps: int, *, d_model: int) -> Step:
    model = Peer(cell, d_model).to(CUDA).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    data = torch.randint(VOCAB, (50, 2, rows, time_steps)).pin_memory()
    state, number = None, 0

    def step() -> Tensor:
        nonlocal state, number
        tokens, targets = data[number % 50].to(CUDA, non_blocking=True)
        number += 1
        optimizer.zero_grad()
        logits, after = model(tokens, state)
        state = detached(after)  # type: ignore[arg-type]
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        return loss.detach()

    return step


def weft_step(cell: str, rows: int, time_steps: int, *, d_model: int) -> Step:
    changes = [f"model.{key}={value}" for key, value in {"layers": LAYERS, "d_model": d_model, "dropout": P}.items()]
    recipe = resolve(cell, ["tokenizer=byte", f"model.vocab_size={VOCAB}", "model.tied=false", *changes])
    model = build(recipe.model).to(CUDA).train()
    optimizer = optimizers.build(SGD(lr=LR, momentum=0.0), model)
    loss = partial(token_loss, settings=NextToken())
    plain = OptimisationStep(Parallel(model), optimizer, loss, CUDA, "tf32", clip=CLIP, lanes=rows)
    take, lanes = CapturedStep.of(plain), torch.arange(rows)
    batches, limits, number = [], torch.full((2,), 1e9, device=CUDA), 0
    for seed in range(50):
        tokens = torch.randint(VOCAB, (rows, time_steps + 1))
        keys, begins = row_keys(seed, lanes), torch.full((rows,), seed == 0)
        rows_of = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), keys=keys, lanes=lanes, begins=begins)
        batches.append(rows_of.pin())

    def step() -> Tensor:
        nonlocal number
        number += 1
        return take([batches[number % 50]], LR, limits).loss

    return step


def seconds(step: Step, steps: int) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["lstm", "gru", "elman"])
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {LAYERS} layers, tf32, dropout {P}")
    with arithmetic("tf32", deterministic=False):
        for size in options.sizes:
            rows, time_steps, d_model = SIZES[size]
            for cell in options.cells:
                torch.manual_seed(0)
                sides = [make(cell, rows, time_steps, d_model=d_model) for make in (weft_step, peer_step)]
                for side in sides:
                    for _ in range(10):
                        side()
                steps = options.steps if size == "medium" else max(10, options.steps // 10)
                rounds = [[seconds(side, steps) for side in sides] for _ in range(options.rounds)]
                weft, peer = (statistics.median(times) for times in zip(*rounds, strict=True))
                tokens = rows * time_steps
                ours, theirs = (f"{1e3 * each:7.2f} ms {tokens / each:10,.0f} tok/s" for each in (weft, peer))
                case = f"{cell:6} {rows} × {time_steps} × {d_model:<5}"
                print(f"{case} weft {ours}   torch {theirs}   {peer / weft:.2f} ×", flush=True)


if __name__ == "__main__":
    main()
