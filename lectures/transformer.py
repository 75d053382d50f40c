"""Lectures 2 and 4: the Transformer of 2017, an encoder, a decoder and attention between them, trained with label
smoothing and a learning rate that rises and then falls.

    python lectures/transformer.py              learn to write 4 March 1957 as 1957-03-04
    python lectures/transformer.py pairs.tsv    learn from your own lines: a text, a tab and its translation

Figure: of 200 unseen dates, it writes 99 % without a mistake.
"""

import math
import random
import sys
from collections import Counter
from datetime import date
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

PAD, BEGIN, END, UNKNOWN = range(4)
DROPOUT, SMOOTHING, WARMUP_STEPS = 0.1, 0.1, 300


# ---- Attention
def attention(Q: Tensor, K: Tensor, V: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(QKᵀ/√d_k)V, and the softmax A: who attends to whom. The mask is True where a query may see a key."""
    scores = Q @ K.mT / math.sqrt(Q.shape[-1])
    A = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
    return A @ V, A


class MultiHead(nn.Module):
    """MultiHead(Q, K, V) = Concat(head_1, …, head_h) W^O, where head_i = Attention(Q W_i^Q, K W_i^K, V W_i^V)."""

    def __init__(self, d_model: int, heads: int):
        super().__init__()
        self.heads, self.d_k, self.attn = heads, d_model // heads, torch.empty(0)
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """query (batch, T, d_model), key and value (batch, S, d_model) → (batch, T, d_model)."""
        pairs = (self.W_q, query), (self.W_k, key), (self.W_v, value)
        Q, K, V = (W(x).unflatten(-1, (self.heads, self.d_k)).transpose(1, 2) for W, x in pairs)
        x, self.attn = attention(Q, K, V, mask)  # (batch, heads, T, d_k), (batch, heads, T, S)
        return self.W_o(x.transpose(1, 2).flatten(2))


# ---- The layers
class AddNorm(nn.Module):
    """LayerNorm(x + f(x)), where LayerNorm(x; g, b) = g/σ(x) ⊙ (x − μ(x)) + b: post-LayerNorm."""

    def __init__(self, n: int):
        super().__init__()
        self.g, self.b, self.dropout = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n)), nn.Dropout(DROPOUT)

    def forward(self, x: Tensor, fx: Tensor) -> Tensor:
        x = x + self.dropout(fx)
        μ = x.mean(dim=-1, keepdim=True)
        σ = torch.sqrt((x - μ).square().mean(dim=-1, keepdim=True) + 1e-5)  # 1e-5 avoids division by 0
        return self.g / σ * (x - μ) + self.b


class EncoderLayer(nn.Module):
    """Self-attention, then FFN(x; W1, b1, W2, b2) = max(0, x W1 + b1) W2 + b2."""

    def __init__(self, d_model: int, heads: int, d_ff: int):
        super().__init__()
        self.self_attention, self.norm1, self.norm2 = MultiHead(d_model, heads), AddNorm(d_model), AddNorm(d_model)
        self.W1, self.W2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x, self.self_attention(x, x, x, mask))
        return self.norm2(x, self.W2(self.W1(x).relu()))


class DecoderLayer(nn.Module):
    """Masked self-attention, cross-attention with K and V from the encoder, and feed-forward."""

    def __init__(self, d_model: int, heads: int, d_ff: int):
        super().__init__()
        self.self_attention, self.cross_attention = MultiHead(d_model, heads), MultiHead(d_model, heads)
        self.norm1, self.norm2, self.norm3 = AddNorm(d_model), AddNorm(d_model), AddNorm(d_model)
        self.W1, self.W2 = nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor, mask: Tensor, encoded: Tensor, source_mask: Tensor) -> Tensor:
        x = self.norm1(x, self.self_attention(x, x, x, mask))
        x = self.norm2(x, self.cross_attention(x, encoded, encoded, source_mask))
        return self.norm3(x, self.W2(self.W1(x).relu()))


# ---- The whole model
def sinusoids(length: int, d: int) -> Tensor:
    """p_t^(2k) = sin(ω_k · t) and p_t^(2k+1) = cos(ω_k · t), where ω_k = 1/10000^(2k/d): (length, d)."""
    t, k = torch.arange(length, dtype=torch.float64)[:, None], torch.arange(d // 2, dtype=torch.float64)
    ω = 10000 ** (-2 * k / d)
    return torch.stack([torch.sin(ω * t), torch.cos(ω * t)], dim=-1).flatten(-2)


class Transformer(nn.Module):
    """One embedding matrix serves the source, the target and (transposed) the logits."""

    def __init__(self, vocab_size: int, layers: int, d_model: int, heads: int, d_ff: int):
        super().__init__()
        self.embedding, self.dropout = nn.Embedding(vocab_size, d_model), nn.Dropout(DROPOUT)
        self.encoder = nn.ModuleList(EncoderLayer(d_model, heads, d_ff) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(d_model, heads, d_ff) for _ in range(layers))
        for weight in (weight for weight in self.parameters() if weight.dim() == 2):
            nn.init.xavier_uniform_(weight)
        nn.init.normal_(self.embedding.weight, std=d_model**-0.5)

    def embed(self, tokens: Tensor) -> Tensor:
        """x_i = t_i + p_i, (batch, time) → (batch, time, d_model)."""
        t = self.embedding(tokens) * math.sqrt(self.embedding.embedding_dim)
        return self.dropout(t + sinusoids(*t.shape[1:]).to(t))

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """source (batch, S) → output of the encoder (batch, S, d_model), and the mask, False at padding."""
        x, mask = self.embed(source), (source != PAD)[:, None, None]  # the same for all heads and queries
        for layer in self.encoder:
            x = layer(x, mask)
        return x, mask

    def decode(self, target: Tensor, encoded: Tensor, source_mask: Tensor) -> Tensor:
        """target (batch, T) → logits (batch, T, vocab_size) of the token after each; no token sees a later one."""
        x, mask = self.embed(target), torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).tril()
        for layer in self.decoder:
            x = layer(x, mask, encoded, source_mask)
        return x @ self.embedding.weight.T


# ---- Training
def smoothed_loss(logits: Tensor, targets: Tensor, ε: float) -> Tensor:
    """Mean of −Σ_w q(w) log p(w) over all words but padding; q gives 1 − ε to the target and spreads ε evenly."""
    log_p = logits.log_softmax(dim=-1)
    losses = -(1 - ε) * log_p.gather(-1, targets[..., None])[..., 0] - ε * log_p.mean(dim=-1)
    return losses[targets != PAD].mean()


def lrate(step: int, d_model: int, warmup_steps: int) -> float:
    return d_model**-0.5 * min(step**-0.5, step * warmup_steps**-1.5)


def train(model: Transformer, pairs: list[tuple[list[int], list[int]]], steps: int) -> None:
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98), eps=1e-9)
    for step in range(1, steps + 1):
        optimizer.param_groups[0]["lr"] = lrate(step, model.embedding.embedding_dim, WARMUP_STEPS)
        sides = zip(*random.sample(pairs, 32), strict=True)
        source, target = (pad_sequence([torch.tensor(text) for text in side], True, PAD) for side in sides)
        loss = smoothed_loss(model.decode(target[:, :-1], *model.encode(source)), target[:, 1:], SMOOTHING)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:4}  loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def translate(model: Transformer, source: list[int]) -> tuple[list[int], Tensor]:
    """Greedy decoding: always the likeliest token. Return it with the last layer's attention (target, source)."""
    target, encoded = [BEGIN], model.encode(torch.tensor([source]))
    while target[-1] != END and len(target) < 40:
        target.append(int(model.decode(torch.tensor([target]), *encoded)[0, -1].argmax()))
    last = model.decoder[-1]
    assert isinstance(last, DecoderLayer)
    return target[1:], last.cross_attention.attn[0].mean(dim=0)


def main(paths: list[str]) -> int:
    random.seed(0)
    torch.manual_seed(0)
    days = [date.fromordinal(day) for day in random.sample(range(600_000, 740_000), 10_000)]
    rows = [[f"{' '.join(str(day.day))} {day:%B} {' '.join(str(day.year))}", " ".join(str(day))] for day in days]
    try:
        if paths:
            rows = [line.split("\t")[:2] for line in Path(paths[0]).read_text(encoding="utf-8").splitlines()]
        if len(rows) < 500 or any(len(row) != 2 for row in rows):
            raise ValueError("expected at least 500 lines, each with a text, a tab and its translation")
    except (OSError, ValueError) as error:
        print(f"{paths[0]}: {error}", file=sys.stderr)
        return 2
    common = Counter(word for row in rows for text in row for word in text.split()).most_common(2000)
    vocabulary = ["<pad>", "<s>", "</s>", "<unk>", *(word for word, _ in common)]
    ids = {word: id for id, word in enumerate(vocabulary)}
    encoded = [[[ids.get(word, UNKNOWN) for word in text.split()[:20]] for text in row] for row in rows]
    pairs = [([*source, END], [BEGIN, *target, END]) for source, target in encoded]
    model = Transformer(len(vocabulary), layers=2, d_model=64, heads=4, d_ff=256)
    train(model, pairs[:-200], steps=800)
    model.eval()
    right = sum(translate(model, source)[0] == target[1:] for source, target in pairs[-200:])
    print(f"translated without a mistake: {right / 2:.1f} % of 200 unseen texts")
    for source, _ in pairs[-3:]:
        print(f"\n{'':12}", *(f"{vocabulary[id]:>8.8}" for id in source))
        for word, row in zip(*translate(model, source), strict=True):  # attention to each source word
            print(f"{vocabulary[word]:>12.12}", *(f"{share:8.2f}" for share in row))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
