"""Lecture 2: LLaMA, and the changes since 2017: pre-norm, RMSNorm, rotary positions and a gated SiLU. Since LLaMA 2,
groups of query heads also share keys and values, which makes the cache smaller.

    python lectures/llama.py             train on sentences of a small grammar, character by character
    python lectures/llama.py book.txt    train on your own text

Figure: on unseen sentences the loss is 0.332 nats per character; the grammar's entropy is 0.293.
"""

import math
import random
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

Caches = list[list[Tensor]]  # K and V of the tokens read so far, (batch, kv_heads, time, d_k), per layer


class Sizes(NamedTuple):
    vocab_size: int
    layers: int = 2
    d_model: int = 64
    heads: int = 4
    kv_heads: int = 2
    d_ff: int = 176  # 8/3 · d_model: three such matrices have as many weights as two with 4 · d_model
    tied: bool = True  # the rows of W are the word embeddings
    base: float = 10000.0  # of the rotation angles
    eps: float = 1e-5  # avoids division by 0


# ---- The parts that changed
class RMSNorm(nn.Module):
    """RMSNorm(x) = x/RMS(x) · g, where RMS(x) = √(1/n Σ x_i²): LayerNorm without mean and bias."""

    def __init__(self, n: int, eps: float):
        super().__init__()
        self.g, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x: Tensor) -> Tensor:
        RMS = torch.sqrt(x.square().mean(dim=-1, keepdim=True) + self.eps)
        return x / RMS * self.g


def rotate(x: Tensor, m: Tensor, base: float) -> Tensor:
    """R_{Θ,m} x = x ⊗ cos mθ + (−x_2, x_1, −x_4, x_3, …) ⊗ sin mθ, for x (…, time, d) at positions m (time,).

    Each pair is rotated by m θ_i with θ_i = base^(−2(i−1)/d), so that the product of a query at m and a key at n
    depends only on m − n. (Published weights pair x_i with x_{i+d/2}, which only reorders the rows of W^Q and W^K.)
    """
    θ = 1 / base ** (torch.arange(0, x.shape[-1], 2) / x.shape[-1])
    angle = (m[:, None] * θ.to(x.dtype)).repeat_interleave(2, dim=-1)  # one angle per pair
    swapped = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
    return x * angle.cos() + swapped * angle.sin()


class FFN(nn.Module):
    """(Swish(x W_g) ⊙ x W_u) W_d, where Swish(x) = x ⊙ σ(x), also called SiLU, acts as a gate."""

    def __init__(self, d_model: int, d_ff: int):
        super().__init__()
        self.W_g, self.W_u = nn.Linear(d_model, d_ff, bias=False), nn.Linear(d_model, d_ff, bias=False)
        self.W_d = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.W_g(x)
        return self.W_d(gate * gate.sigmoid() * self.W_u(x))


class GroupedAttention(nn.Module):
    """softmax(QKᵀ/√d_k)V, where heads / kv_heads heads of queries share one head of keys and values."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes, self.d_k = sizes, sizes.d_model // sizes.heads
        self.W_q, self.W_o = (nn.Linear(sizes.d_model, sizes.d_model, bias=False) for _ in range(2))
        self.W_k, self.W_v = (nn.Linear(sizes.d_model, sizes.kv_heads * self.d_k, bias=False) for _ in range(2))

    def forward(self, x: Tensor, m: Tensor, cache: list[Tensor]) -> Tensor:
        """x (batch, time, d_model) at positions m (time,) → (batch, time, d_model); adds K and V of x to the cache."""
        Q, K, V = (W(x).unflatten(-1, (-1, self.d_k)).transpose(1, 2) for W in (self.W_q, self.W_k, self.W_v))
        Q, K = rotate(Q, m, self.sizes.base), rotate(K, m, self.sizes.base)
        cache[:] = [torch.cat([old, new], dim=2) for old, new in zip(cache, (K, V), strict=True)] if cache else (K, V)
        K, V = (shared.repeat_interleave(self.sizes.heads // self.sizes.kv_heads, dim=1) for shared in cache)
        future = torch.arange(K.shape[2]) > m[:, None]
        A = (Q @ K.mT / math.sqrt(self.d_k)).masked_fill(future, -math.inf).softmax(dim=-1)
        return self.W_o((A @ V).transpose(1, 2).flatten(2))


# ---- The stack
class Layer(nn.Module):
    """Pre-norm: x + f(RMSNorm(x)): f is first attention, then the feed-forward layer."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(sizes.d_model, sizes.eps), RMSNorm(sizes.d_model, sizes.eps)
        self.attention, self.ffn = GroupedAttention(sizes), FFN(sizes.d_model, sizes.d_ff)

    def forward(self, x: Tensor, m: Tensor, cache: list[Tensor]) -> Tensor:
        x = x + self.attention(self.norm1(x), m, cache)
        return x + self.ffn(self.norm2(x))


class LLaMA(nn.Module):
    """P(w | context) = softmax(W h). Positions have no table, so the length is not limited."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocab_size, sizes.d_model)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = RMSNorm(sizes.d_model, sizes.eps)
        self.W = self.embedding if sizes.tied else nn.Linear(sizes.d_model, sizes.vocab_size, bias=False)
        for weight in (weight for weight in self.parameters() if weight.dim() == 2):
            nn.init.normal_(weight, std=0.02)  # small, so that at first all words are about equally likely

    def forward(self, tokens: Tensor, caches: Caches | None = None) -> Tensor:
        """tokens (batch, time) → logits (batch, time, vocab_size) of the token after each; one cache per layer."""
        caches = [[] for _ in self.layers] if caches is None else caches
        cached = caches[0][0].shape[2] if caches[0] else 0
        x, m = self.embedding(tokens), torch.arange(cached, cached + tokens.shape[1])
        for layer, cache in zip(self.layers, caches, strict=True):
            x = layer(x, m, cache)
        return self.norm(x) @ self.W.weight.T


# ---- Training and generation, as for GPT
def loss(model: LLaMA, rows: Tensor) -> Tensor:
    """Mean of −log P(w* | context) over all positions of rows (batch, time + 1)."""
    log_P = model(rows[:, :-1]).log_softmax(dim=-1)
    return -log_P.gather(-1, rows[:, 1:, None]).mean()


def train(model: LLaMA, text: Tensor, steps: int, window: Tensor) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    for step in range(1, steps + 1):
        # 100 steps of warm-up, then cosine decay to 0
        optimizer.param_groups[0]["lr"] = 5e-3 * min(step / 100, (1 + math.cos(math.pi * step / steps)) / 2)
        J = loss(model, text[torch.randint(len(text) - len(window) + 1, (16, 1)) + window])
        optimizer.zero_grad()
        J.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:4}  loss {J.item():.3f}", flush=True)


@torch.no_grad()
def generate(model: LLaMA, prompt: Tensor, count: int) -> tuple[Tensor, Caches]:
    """Continue prompt (batch, time) by `count` tokens; return the text and the caches."""
    caches: Caches = [[] for _ in model.layers]
    text = new = prompt
    for _ in range(count):
        new = torch.multinomial(model(new, caches)[:, -1].softmax(dim=-1), 1)
        text = torch.cat([text, new], dim=1)
    return text, caches


# ---- Generated text: in "the boys that the cat sees help" the last verb agrees with a distant noun
NOUNS, VERBS = "bird boy cat dog girl horse king queen".split(), "fear find hear help know like see want".split()


def sentence() -> str:
    """One of 2^15 equally likely sentences."""
    (noun, other), (verb, inner) = random.choices(NOUNS, k=2), random.choices(VERBS, k=2)
    s, t = random.choices(["", "s"], k=2)  # a noun has an s if its verb has none
    who = f"{inner}{'' if s else 's'} the {other}{t}"
    whom = f"the {other}{t} {inner}{'' if t else 's'}"
    return f"the {noun}{s} that {random.choice([who, whom])} {verb}{'' if s else 's'}.\n"


def main(paths: list[str], context: int = 64) -> int:
    random.seed(0)
    torch.manual_seed(0)
    try:
        text = Path(paths[0]).read_text(encoding="utf-8") if paths else "".join(sentence() for _ in range(10_000))
        if len(text) < 20 * context:
            raise ValueError(f"{len(text)} characters are too few; at least {20 * context} are needed")
    except (OSError, ValueError) as error:
        print(f"{paths[0]}: {error}", file=sys.stderr)
        return 2
    characters = sorted(set(text))
    ids = {character: id for id, character in enumerate(characters)}
    tokens = torch.tensor([ids[character] for character in text])
    training, held_out = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]
    model = LLaMA(Sizes(len(characters)))
    train(model, training, steps=1000, window=torch.arange(context + 1))
    with torch.no_grad():
        print(f"loss on unseen text: {loss(model, held_out.unfold(0, context + 1, context)[:200]):.3f}")
    if not paths:
        print(f"entropy of the grammar: {10_000 * 15 * math.log(2) / len(text):.3f}")
    output, caches = generate(model, held_out[None, :1], 2 * context)  # twice the length of training
    print("".join(characters[id] for id in output[0].tolist()).strip())
    print(f"the cache of a layer: keys and values of {caches[0][0].shape[1]} heads, for 4 heads of queries")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
