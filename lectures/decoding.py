"""Lecture 3: from a language model to a text. Greedy search, beam search, ancestral sampling, speculative decoding.

    python lectures/decoding.py            the lecture's search tree; then n-gram models of sentences about cows
    python lectures/decoding.py book.txt   n-gram models of your own text

A model is any function from tokens (T,) to logits (T, V): row t predicts the token after the first t + 1.

Figure: with a trigram model as draft, a 5-gram model generates 3.88 tokens per call.
"""

import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

Model = Callable[[Tensor], Tensor]
AHEAD = 4  # tokens that the draft guesses per call of the model


def next_log_p(model: Model, tokens: list[int]) -> Tensor:
    """log p(w_t | w_1, …, w_{t−1}) of every w_t, (V,)."""
    return model(torch.tensor(tokens))[-1].double().log_softmax(-1)


# ---- Search: the path with the lowest sum of −log p


def greedy(model: Model, prompt: list[int], end: int | None, max_tokens: int) -> list[int]:
    """Select the edge with the lowest −log p at each node. A heuristic: it does not always find the best path."""
    output: list[int] = []
    while len(output) < max_tokens and output[-1:] != [end]:
        output.append(int(next_log_p(model, prompt + output).argmax()))
    return output


class Hypothesis(NamedTuple):
    """A finished text, its log p, and its score: log p / length penalty."""

    tokens: list[int]
    log_p: float
    score: float


def mean(length: int) -> float:
    """log p / length. Every token lowers log p, so that without a penalty short texts win."""
    return length


def gnmt(length: int, alpha: float = 0.6) -> float:
    """log p / ((5 + length) / 6)^α: milder for short texts (Wu et al. 2016, §7)."""
    return math.pow((5 + length) / 6, alpha)


def beam_search(
    model: Model, prompt: list[int], end: int | None, max_tokens: int, K: int, penalty: Callable[[int], float] = mean
) -> list[Hypothesis]:
    """Keep the K likeliest prefixes at each step; return the K best texts that end with `end` or at `max_tokens`."""
    alive: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[Hypothesis] = []
    for length in range(1, max_tokens + 1):
        candidates: list[tuple[list[int], float]] = []
        for tokens, log_p in alive:
            log_ps, words = next_log_p(model, prompt + tokens).sort(descending=True)
            best = zip(words[: 2 * K].tolist(), log_ps[: 2 * K].tolist(), strict=True)  # K may end, K may continue
            candidates += [([*tokens, word], log_p + log_q) for word, log_q in best if log_q > -math.inf]
        candidates.sort(key=lambda candidate: -candidate[1])
        alive = []
        for rank, (tokens, log_p) in enumerate(candidates[: 2 * K]):
            if tokens[-1] != end and length < max_tokens:
                alive.append((tokens, log_p))
            elif rank < K:  # finished texts, too, must be among the K best
                ended.append(Hypothesis(tokens, log_p, log_p / penalty(length)))
        alive = alive[:K]
        ended = sorted(ended, key=lambda hypothesis: -hypothesis.score)[:K]
        # log p can only fall, so no prefix can reach a better score than this
        bound = max((log_p / penalty(n) for _, log_p in alive for n in (length + 1, max_tokens)), default=-math.inf)
        if len(ended) == K and (K == 1 or bound <= ended[-1].score):
            break
    return ended


# ---- Sampling: each path is drawn with its probability


def roll(p: Tensor, generator: torch.Generator) -> int:
    return int(p.multinomial(1, generator=generator))


def ancestral_sampling(
    model: Model, prompt: list[int], end: int | None, max_tokens: int, generator: torch.Generator
) -> list[int]:
    """Pick a random edge with its probability at each node. Exact."""
    output: list[int] = []
    while len(output) < max_tokens and output[-1:] != [end]:
        output.append(roll(next_log_p(model, prompt + output).exp(), generator))
    return output


def speculative_decoding(
    model: Model, draft: Model, prompt: list[int], end: int | None, max_tokens: int, generator: torch.Generator
) -> tuple[list[int], int]:
    """Sample exactly from `model` with fewer calls of it (Leviathan et al. 2023); return the tokens and the calls.

    A small, fast `draft` guesses AHEAD tokens. A guess x from q is kept with probability min(1, p(x) / q(x)); otherwise
    the token is drawn from max(0, p − q), normalised. So x has probability min(p, q) + max(0, p − q) = p.
    """
    output, calls = list[int](), 0
    while len(output) < max_tokens and output[-1:] != [end]:
        guesses, q = list[int](), list[Tensor]()
        for _ in range(min(AHEAD, max_tokens - len(output) - 1)):
            q.append(next_log_p(draft, prompt + output + guesses).exp())
            guesses.append(roll(q[-1], generator))
        # one call checks all guesses: p[i] is the distribution of guess i, and the last row that of the next token
        p = model(torch.tensor(prompt + output + guesses))[-len(guesses) - 1 :].double().softmax(-1)
        calls += 1
        for i, x in enumerate(guesses):
            accepted = bool(torch.rand((), generator=generator, dtype=torch.float64) * q[i][x] < p[i][x])
            output.append(x if accepted else roll((p[i] - q[i]).clamp(min=0), generator))
            if not accepted or x == end:
                break
        else:
            output.append(roll(p[-1], generator))
    return output, calls


# ---- Models: a tree where greedy search fails, and n-gram models of characters
FIRST = torch.tensor([0.0, 0.5, 0.4, 0.1])  # p(w_1); token 0 starts the text
SECOND = torch.tensor([[0.25] * 4, [0.3, 0.25, 0.25, 0.2], [0.9, 0.05, 0.03, 0.02], [0.1, 0.2, 0.3, 0.4]])


def tree(tokens: Tensor) -> Tensor:
    return torch.cat([FIRST[None], SECOND[tokens[1:]]]).log()


def ngram(text: list[int], N: int, V: int) -> Model:
    """p(w | h) = (c(h, w) + 2 p(w | h')) / (c(h) + 2), where h' is h without its first token, down to 1/V."""
    counts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for n in range(N):
        for t in range(n, len(text)):
            counts[tuple(text[t - n : t])][text[t]] += 1

    @cache
    def log_p(h: tuple[int, ...]) -> Tensor:
        p = torch.full((V,), 1 / V)
        for n in range(len(h) + 1):
            c = torch.tensor([counts[h[len(h) - n :]][w] for w in range(V)])
            p = (c + 2 * p) / (c.sum() + 2)
        return p.log()

    return lambda tokens: torch.stack(
        [log_p(tuple(tokens[max(0, t + 2 - N) : t + 1].tolist())) for t in range(len(tokens))]
    )


def make_text() -> str:
    rng = random.Random(0)
    parts = [
        "the|our|your",
        " cows| goats| horses",
        " eat| want| like",
        " corn| grass| hay| leaves",
        ".|, and so do we.",
    ]
    return "".join("".join(rng.choice(part.split("|")) for part in parts) + "\n" for _ in range(2000))


def main() -> None:
    text = make_text()
    if len(sys.argv) > 1:
        try:
            text = Path(sys.argv[1]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            print(f"decoding.py: {sys.argv[1]}: {getattr(error, 'strerror', None) or error}", file=sys.stderr)
            sys.exit(2)
    for name, path in ("greedy", greedy(tree, [0], None, 2)), ("beam", beam_search(tree, [0], None, 2, 2)[0].tokens):
        print(f"{name:6} search: path {path}, p = {FIRST[path[0]] * SECOND[path[0], path[1]]:.2f}")
    vocabulary = sorted({*text, "\n"})
    ids = {char: id for id, char in enumerate(vocabulary)}
    tokens, end, generator = [ids[char] for char in text], ids["\n"], torch.Generator().manual_seed(0)
    model, draft = ngram(tokens, 5, len(ids)), ngram(tokens, 3, len(ids))

    texts = [("greedy", greedy(model, [end], end, 60))]
    texts += [(f"beam, {best.score:.3f}", best.tokens) for best in beam_search(model, [end], end, 60, 3)]
    texts += [("sampled", ancestral_sampling(model, [end], end, 60, generator)) for _ in range(3)]
    for name, output in texts:
        print(f"{name:12}", "".join(vocabulary[token] for token in output).strip())
    output, calls = speculative_decoding(model, draft, [end], None, 400, generator)
    print("speculative\n" + "".join(vocabulary[token] for token in output[:200]).strip())
    print(f"{len(output) / calls:.2f} tokens per call of the model")


if __name__ == "__main__":
    main()
