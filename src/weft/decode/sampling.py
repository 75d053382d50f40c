"""From logits to a token: pure functions on logits (…, V), to be composed.

A filter returns logits in which the tokens it drops are −inf, and keeps at least one. All of them work on any number
of leading dimensions, and none of them changes its argument.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.errors import ModelError


def temperature(logits: Tensor, degree: float) -> Tensor:
    """Logits (…, V) divided by `degree` > 0: below 1 the likely get likelier, above 1 all become alike."""
    assert degree > 0, "temperature 0 is greedy"
    return logits / degree


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k likeliest tokens of logits (…, V), and whatever ties with the last of them (Fan et al. 2018)."""
    if k >= logits.shape[-1]:
        return logits
    least = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the fewest likeliest tokens of logits (…, V) that together have probability p (Holtzman et al. 2020)."""
    if p >= 1.0:
        return logits
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.float().softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    drop = before >= p
    drop[..., 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keep the tokens of logits (…, V) that are at least p times as likely as the likeliest (Nguyen et al. 2024)."""
    best = logits.amax(dim=-1, keepdim=True)
    # p·max probability, in logits: the normaliser cancels
    return logits.masked_fill(logits < best + math.log(p), -torch.inf)


def filtered(logits: Tensor, settings: Sampling) -> Tensor:
    """Logits (…, V) after everything that `settings` asks for, in this order: temperature, top_k, top_p, min_p."""
    logits = temperature(logits.float(), settings.temperature)
    if settings.top_k is not None:
        logits = top_k(logits, settings.top_k)
    if settings.top_p is not None:
        logits = top_p(logits, settings.top_p)
    if settings.min_p is not None:
        logits = min_p(logits, settings.min_p)
    return logits


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token (…) of logits (…, V); of equals, the one with the lowest id."""
    # argmax may return any of the equals; the first of them is the same on every device
    best = logits == logits.amax(dim=-1, keepdim=True)
    return best.int().argmax(dim=-1)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """The token (…) whose slice of [0, 1) holds the uniform number (…), slices being as wide as softmax(logits).

    One number a token, so that what a row draws depends on nothing but its own numbers. The sum runs in float64:
    over a large vocabulary float32 would lose the rare tokens.
    """
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    point = uniforms.to(cumulative).unsqueeze(-1) * cumulative[..., -1:]
    # the first token whose slice ends after the point; a token of probability 0 has no slice, so it is never taken
    token = torch.searchsorted(cumulative, point, right=True).squeeze(-1)
    return token.clamp(max=logits.shape[-1] - 1)


def sample(logits: Tensor, generator: torch.Generator) -> Tensor:
    """Ancestral sampling: tokens (…) drawn from softmax of logits (…, V), all from one CPU generator."""
    return draw(logits, torch.rand(logits.shape[:-1], dtype=torch.float64, generator=generator))


def choose(logits: Tensor, settings: Sampling, generators: Sequence[torch.Generator]) -> Tensor:
    """The next token (B,) of each row of logits (B, V), where row i draws from its own CPU generator i."""
    best = logits.amax(dim=-1)
    if not bool(torch.isfinite(best).all()):
        wrong = float(best[~torch.isfinite(best)][0])
        if wrong == -torch.inf:
            raise ModelError("the model gives no token any probability after this context")
        raise ModelError("the model gives NaN or infinite logits; its training has diverged or its weights are damaged")
    if settings.temperature == 0.0:
        return greedy(logits)
    uniforms = torch.stack([torch.rand((), dtype=torch.float64, generator=g) for g in generators])
    return draw(filtered(logits, settings), uniforms.to(logits.device))
