"""Lecture 1: tensor parallelism as in Megatron: the matrices of a layer are split over two processes.

    python lectures/megatron.py             train on this file, character by character
    python lectures/megatron.py book.txt    train on your own text

Figure: two processes with half of every matrix each reach a loss of 2.40, and one with all of them reaches 2.40.
Attention and the feed-forward layer need one all-reduce each in the forward pass, and one each in the backward pass.

The feed-forward layer is Y = GeLU(XA), Z = Dropout(YB). Should A be split by columns or by rows?

    columns: [Y1, Y2] = [GeLU(X A1), GeLU(X A2)]     each process computes its columns of Y independently
    rows:     Y = GeLU(X1 A1 + X2 A2)                is not GeLU(X1 A1) + GeLU(X2 A2): the sum must come first

So A is split by columns. The columns of Y on each process multiply the matching rows of B: Z = Dropout(Y1 B1 + Y2 B2).
Dropout follows the sum, so all processes must draw the same mask: their random-number generators have the same seed.
"""

import math
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn import functional as F

COLUMNS, ROWS = ("A", "W_q", "W_k", "W_v"), ("B", "W_o")  # how each matrix is split
STEPS, CONTEXT, D_MODEL, HEADS = 200, 64, 64, 4
ALL_REDUCES: Counter[str] = Counter()  # number of all-reduces in each pass


# ---- The two operations that communicate
def all_reduce(x: Tensor, when: str) -> Tensor:
    """Return the sum of x over all processes, on each of them."""
    ALL_REDUCES[when] += 1
    total = x.clone()
    distributed.all_reduce(total)
    return total


class Copy(torch.autograd.Function):
    """The paper's f. Forward: each process reads all of X. Backward: ∂X is the sum over the processes."""

    @staticmethod
    def forward(ctx: Any, X: Tensor) -> Tensor:
        return X.view_as(X)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return all_reduce(gradients[0], "backward")


class Sum(torch.autograd.Function):
    """The paper's g. Forward: Z is the sum over the processes. Backward: each process reads all of ∂Z."""

    @staticmethod
    def forward(ctx: Any, Z: Tensor) -> Tensor:
        return all_reduce(Z, "forward")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


# ---- The two layers on one of `ranks` processes; with a single process they are the usual layers
class FFN(nn.Module):
    """Z = Dropout(GeLU(XA + a) B + b): A is split by columns, B by rows; b is added once, to the sum."""

    def __init__(self, d_model: int, d_ff: int, ranks: int, p: float = 0.0):
        super().__init__()
        self.A, self.B = nn.Linear(d_model, d_ff // ranks), nn.Linear(d_ff // ranks, d_model, bias=False)
        self.b, self.dropout = nn.Parameter(torch.zeros(d_model)), nn.Dropout(p)

    def forward(self, X: Tensor) -> Tensor:
        """(batch, time, d_model) → (batch, time, d_model)."""
        Y = F.gelu(self.A(Copy.apply(X)))  # (batch, time, d_ff / ranks)
        return self.dropout(Sum.apply(self.B(Y)) + self.b)  # the same mask on every process


class Attention(nn.Module):
    """Concat(head_1, …, head_h) W^O: W^Q, W^K and W^V are split by columns, into whole heads, W^O by rows."""

    def __init__(self, d_model: int, heads: int, ranks: int):
        super().__init__()
        self.d_k = d_model // heads
        self.W_q, self.W_k, self.W_v = (nn.Linear(d_model, d_model // ranks) for _ in range(3))
        self.W_o, self.b = nn.Linear(d_model // ranks, d_model, bias=False), nn.Parameter(torch.zeros(d_model))

    def forward(self, X: Tensor) -> Tensor:
        """(batch, time, d_model) → (batch, time, d_model)."""
        X = Copy.apply(X)
        Q, K, V = (W(X).unflatten(-1, (-1, self.d_k)).transpose(1, 2) for W in (self.W_q, self.W_k, self.W_v))
        future = torch.ones(X.shape[1], X.shape[1], dtype=torch.bool).triu(1)
        A = (Q @ K.mT / math.sqrt(self.d_k)).masked_fill(future, -math.inf).softmax(dim=-1)
        heads = (A @ V).transpose(1, 2).flatten(2)  # (batch, time, d_model / ranks)
        return Sum.apply(self.W_o(heads)) + self.b


def part(name: str, weight: Tensor, rank: int, ranks: int) -> Tensor:
    """A process's part of a weight. nn.Linear stores A transposed: its columns are dimension 0 there."""
    matrix = name.split(".")[-2] if "." in name else name
    if matrix in COLUMNS:
        return weight.chunk(ranks, dim=0)[rank]
    return weight.chunk(ranks, dim=1)[rank] if matrix in ROWS else weight


# ---- A small language model: embeddings and norms are replicated on every process
class Model(nn.Module):
    def __init__(self, vocab_size: int, ranks: int):
        super().__init__()
        self.W, self.p = nn.Embedding(vocab_size, D_MODEL), nn.Embedding(CONTEXT, D_MODEL)
        self.norm1, self.norm2, self.norm = (nn.LayerNorm(D_MODEL) for _ in range(3))
        self.attention, self.ffn = Attention(D_MODEL, HEADS, ranks), FFN(D_MODEL, 4 * D_MODEL, ranks, p=0.1)
        for table in (self.W, self.p):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, time) → logits (batch, time, vocab_size)."""
        x = self.W(tokens) + self.p(torch.arange(tokens.shape[1]))
        x = x + self.attention(self.norm1(x))
        x = x + self.ffn(self.norm2(x))
        return self.norm(x) @ self.W.weight.T


def train(rank: int, ranks: int, store: str, text: str) -> None:
    """Train on one process."""
    torch.set_num_threads(1)  # the processes would compete for the cores
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    torch.manual_seed(0)  # all processes draw the same weights
    characters = sorted(set(text))
    tokens = torch.tensor([characters.index(character) for character in text])
    whole, model = Model(len(characters), ranks=1), Model(len(characters), ranks)
    model.load_state_dict({name: part(name, weight, rank, ranks) for name, weight in whole.state_dict().items()})
    torch.manual_seed(1)  # and now the same rows and the same dropout
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, STEPS + 1):
        rows = tokens[torch.randint(len(tokens) - CONTEXT, (16, 1)) + torch.arange(CONTEXT + 1)]
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 50 == 0:
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)
    if rank == 0:
        weights = sum(weight.numel() for layer in (model.attention, model.ffn) for weight in layer.parameters())
        reduces = ", ".join(f"{count / STEPS:g} {when}" for when, count in ALL_REDUCES.items())
        print(f"each process has {weights} weights of the two layers; all-reduces per step: {reduces}")
    distributed.destroy_process_group()


def discuss() -> None:
    """Compare splitting A by rows and by columns."""
    X, A = torch.randn(100, D_MODEL), torch.randn(D_MODEL, D_MODEL) / math.sqrt(D_MODEL)
    Y, (X1, X2) = F.gelu(X @ A), X.chunk(2, dim=1)
    A1, A2 = A.chunk(2, dim=0)
    print(f"rows: GeLU(X1 A1) + GeLU(X2 A2) is off by {(F.gelu(X1 @ A1) + F.gelu(X2 @ A2) - Y).abs().mean():.2f}")
    A1, A2 = A.chunk(2, dim=1)
    side_by_side = torch.cat([F.gelu(X @ A1), F.gelu(X @ A2)], dim=1)
    print(f"columns: [GeLU(X A1), GeLU(X A2)] is off by {(side_by_side - Y).abs().mean():.2f}")


def main(paths: list[str]) -> int:
    try:
        text = Path(*paths or [__file__]).read_text(encoding="utf-8")
        if len(text) < 1000:
            raise ValueError(f"{len(text)} characters are too few; at least 1000 are needed")
    except (OSError, ValueError) as error:
        print(f"{paths[0]}: {error}", file=sys.stderr)
        return 2
    discuss()
    for ranks in (1, 2):
        print(f"\n{ranks} process{'es' * (ranks > 1)}:", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(train, (ranks, f"{folder}/store", text), nprocs=ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
