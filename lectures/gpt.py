"""Lectures 4 and 5: GPT, a stack of decoders that predicts the next token; from lecture 3, the key–value cache and
sampling with temperature, top-k and top-p.

    python lectures/gpt.py             train on sentences of a small grammar, character by character
    python lectures/gpt.py book.txt    train on your own text

Figure: on unseen sentences the loss is 0.335 nats per character; the grammar's entropy is 0.293.
"""

import math
import random
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F


# ---- Attention: every token sees itself and earlier tokens
def attention(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """softmax(QKᵀ/√d_k)V. Q (batch, heads, T, d_k) belongs to the last T of the S tokens of K and V."""
    T, S, d_k = Q.shape[-2], K.shape[-2], Q.shape[-1]
    scores = Q @ K.mT / math.sqrt(d_k)
    future = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)  # the causal mask: the red part of the slide
    A = scores.masked_fill(future, -math.inf).softmax(dim=-1)  # attention maps: each row sums to 1
    return A @ V


class MultiHead(nn.Module):
    """MultiHead(x) = Concat(head_1, …, head_h) W^O, where head_i = Attention(x W_i^Q, x W_i^K, x W_i^V)."""

    def __init__(self, d_model: int, heads: int):
        super().__init__()
        self.heads, self.d_k = heads, d_model // heads
        self.W_q, self.W_k, self.W_v, self.W_o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
        """x (batch, time, d_model) → (batch, time, d_model); adds K and V of x to those in `cache`."""
        Q, K, V = (W(x).unflatten(-1, (self.heads, self.d_k)).transpose(1, 2) for W in (self.W_q, self.W_k, self.W_v))
        if cache:
            K, V = torch.cat([cache[0], K], dim=2), torch.cat([cache[1], V], dim=2)
        if cache is not None:
            cache[:] = K, V
        return self.W_o(attention(Q, K, V).transpose(1, 2).flatten(2))


# ---- A layer, and the stack of them
class LayerNorm(nn.Module):
    """LayerNorm(x; g, b) = g/σ(x) ⊙ (x − μ(x)) + b."""

    def __init__(self, n: int):
        super().__init__()
        self.g, self.b = nn.Parameter(torch.ones(n)), nn.Parameter(torch.zeros(n))

    def forward(self, x: Tensor) -> Tensor:
        μ = x.mean(dim=-1, keepdim=True)
        σ = torch.sqrt((x - μ).square().mean(dim=-1, keepdim=True) + 1e-5)  # 1e-5 avoids division by 0
        return self.g / σ * (x - μ) + self.b


class Layer(nn.Module):
    """Pre-norm: x + f(LayerNorm(x)): f is first attention, then FFN(x) = GELU(x W1 + b1) W2 + b2."""

    def __init__(self, d_model: int, heads: int):
        super().__init__()
        self.norm1, self.norm2, self.attention = LayerNorm(d_model), LayerNorm(d_model), MultiHead(d_model, heads)
        self.W1, self.W2 = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)

    def forward(self, x: Tensor, cache: list[Tensor] | None) -> Tensor:
        x = x + self.attention(self.norm1(x), cache)
        return x + self.W2(F.gelu(self.W1(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """P(w | context) = softmax(W h): the rows of W are the word embeddings, those of p the position embeddings."""

    def __init__(self, vocab_size: int, context: int, layers: int, d_model: int, heads: int):
        super().__init__()
        self.W, self.p = nn.Embedding(vocab_size, d_model), nn.Embedding(context, d_model)
        self.layers = nn.ModuleList(Layer(d_model, heads) for _ in range(layers))
        self.norm = LayerNorm(d_model)
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=0.02)  # small, so that at first all words are about equally likely

    def forward(self, tokens: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        """tokens (batch, time) → logits (batch, time, vocab_size) of the token after each; one cache per layer."""
        cached = caches[0][0].shape[2] if caches and caches[0] else 0
        x = self.W(tokens) + self.p(torch.arange(cached, cached + tokens.shape[1]))
        for number, layer in enumerate(self.layers):
            x = layer(x, caches[number] if caches is not None else None)
        return self.norm(x) @ self.W.weight.T


# ---- Training: the targets are the inputs, shifted by one
def loss(model: GPT, rows: Tensor) -> Tensor:
    """Mean of −log P(w* | context) over all positions of rows (batch, context + 1)."""
    log_P = model(rows[:, :-1]).log_softmax(dim=-1)
    return -log_P.gather(-1, rows[:, 1:, None]).mean()


def train(model: GPT, text: Tensor, steps: int, batch: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    window = torch.arange(model.p.num_embeddings + 1)
    for step in range(1, steps + 1):
        # 100 steps of warm-up, then cosine decay to 0
        optimizer.param_groups[0]["lr"] = 5e-3 * min(step / 100, (1 + math.cos(math.pi * step / steps)) / 2)
        J = loss(model, text[torch.randint(len(text) - len(window) + 1, (batch, 1)) + window])
        optimizer.zero_grad()
        J.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"step {step:4}  loss {J.item():.3f}", flush=True)


# ---- Sampling: roll a weighted die for each token, after removing some of its sides
def with_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divide by the temperature: below 1, likely tokens become even likelier."""
    return logits / temperature


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k likeliest tokens."""
    return logits.masked_fill(logits < logits.topk(min(k, logits.shape[-1])).values[..., -1:], -math.inf)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens whose total probability reaches p."""
    P, order = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
    drop = (P.cumsum(dim=-1) - P >= p) & (p < 1)  # likelier tokens already reach p
    drop[..., 0] = False
    return logits.masked_fill(drop.scatter(-1, order, drop), -math.inf)


@torch.no_grad()
def generate(model: GPT, prompt: Tensor, count: int, choose: Callable[[Tensor], Tensor]) -> Tensor:
    """Continue prompt (batch, time) by `count` tokens; after the prompt, each step reads one token."""
    caches: list[list[Tensor]] = [[] for _ in model.layers]
    text = new = prompt
    for _ in range(count):
        logits = choose(model(new, caches)[:, -1])
        new = torch.multinomial(logits.softmax(dim=-1), 1)
        text = torch.cat([text, new], dim=1)
    return text


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
    model = GPT(len(characters), context, layers=2, d_model=64, heads=4)
    train(model, training, steps=1000, batch=16)
    with torch.no_grad():
        print(f"loss on unseen text: {loss(model, held_out.unfold(0, context + 1, context)[:200]):.3f}")
    if not paths:
        print(f"entropy of the grammar: {10_000 * 15 * math.log(2) / len(text):.3f}")
    filters: dict[str, Callable[[Tensor], Tensor]] = {
        "unfiltered": lambda logits: logits,
        "temperature 0.5": lambda logits: with_temperature(logits, 0.5),
        "top-k 3": lambda logits: top_k(logits, 3),
        "top-p 0.9": lambda logits: top_p(logits, 0.9),
    }
    for name, choose in filters.items():
        output = generate(model, held_out[None, :1], context - 1, choose)
        print(f"\n{name}:\n{''.join(characters[id] for id in output[0].tolist()).strip()}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
