"""From logits to a token: pure functions on logits (…, V), to be composed.

A filter returns logits in which the tokens it drops are −inf, and keeps at least one. All of them work on any number
of leading dimensions, and none of them changes its argument. Its parameter is one number, or a tensor (…) of one
number a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.errors import ModelError

Amount = float | Tensor


def top_k(logits: Tensor, k: int | Tensor) -> Tensor:
    """Keep the k likeliest tokens of logits (…, V), and whatever ties with the last of them (Fan et al. 2018)."""
    V = logits.shape[-1]
    if isinstance(k, Tensor):
        ordered = logits.sort(dim=-1, descending=True).values
        last = k.to(logits.device).clamp(max=V).unsqueeze(-1) - 1
        return logits.masked_fill(logits < ordered.gather(-1, last), -torch.inf)
    if k >= V:
        return logits
    least = logits.topk(k, dim=-1).values[..., -1:]
    return logits.masked_fill(logits < least, -torch.inf)


def top_p(logits: Tensor, p: Amount) -> Tensor:
    """Keep the fewest likeliest tokens of logits (…, V) that together have probability p (Holtzman et al. 2020)."""
    p = column(p, logits)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.float().softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    drop = (before >= p) & (p < 1.0)  # 1 keeps all, also where rounding makes the sum reach it early
    drop[..., 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)


def min_p(logits: Tensor, p: Amount) -> Tensor:
    """Keep the tokens of logits (…, V) that are at least p times as likely as the likeliest (Nguyen et al. 2024)."""
    best = logits.amax(dim=-1, keepdim=True)
    # p·max probability, in logits: the normaliser cancels
    return logits.masked_fill(logits < best + column(p, logits).log(), -torch.inf)


def typical(logits: Tensor, p: Amount) -> Tensor:
    """Keep the most typical tokens of logits (…, V) that together have probability p (Meister et al. 2023).

    Typical is a token whose surprise −log p(token) is near the entropy, the surprise that is expected; what ties with
    the last one kept is kept as well.
    """
    p = column(p, logits)
    log_p = logits.float().log_softmax(dim=-1)
    entropy = torch.special.entr(log_p.exp()).sum(dim=-1, keepdim=True)
    strangeness = (-log_p - entropy).abs()
    ordered, order = strangeness.sort(dim=-1, stable=True)
    reached = log_p.exp().gather(-1, order).cumsum(dim=-1)
    last = (reached < p).sum(dim=-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    return logits.masked_fill((strangeness > ordered.gather(-1, last)) & (p < 1.0), -torch.inf)


def column(amount: Amount, like: Tensor) -> Tensor:
    """A number, or (…) numbers as (…, 1), beside logits `like`."""
    return torch.as_tensor(amount, device=like.device).unsqueeze(-1)


class Filters:
    """What several rows' settings do to logits (B, V): temperature, top_k, top_p, min_p and typical_p, in this order.

    A row comes out as it would alone. Their numbers are on the device, so that a CUDA graph can hold the filters.
    """

    def __init__(self, settings: Sequence[Sampling], vocab_size: int, device: torch.device):
        def amounts(values: list[float], neutral: float) -> Tensor | None:
            """None where no row asks for anything."""
            return on_device(torch.tensor(values), device) if any(value != neutral for value in values) else None

        # greedy rows stay as they are
        self.temperature = amounts([1.0 if each.greedy else each.temperature for each in settings], 1.0)
        self.top_k: Tensor | int | None = None
        ks = [min(each.top_k or vocab_size, vocab_size) for each in settings]
        if min(ks) < vocab_size:
            self.top_k = ks[0] if len(set(ks)) == 1 else on_device(torch.tensor(ks), device)
        self.top_p = amounts([1.0 if each.top_p is None else each.top_p for each in settings], 1.0)
        self.min_p = amounts([0.0 if each.min_p is None else each.min_p for each in settings], 0.0)
        self.typical = amounts([1.0 if each.typical_p is None else each.typical_p for each in settings], 1.0)
        # filters of one kind run the same kernels
        self.kind = [type(each) for each in (self.temperature, self.top_k, self.top_p, self.min_p, self.typical)]

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits (B, V) with −inf for what is dropped."""
        if self.temperature is not None:
            logits = logits / column(self.temperature, logits)
        if self.top_k is not None:
            logits = top_k(logits, self.top_k)
        for keep, amount in ((top_p, self.top_p), (min_p, self.min_p), (typical, self.typical)):
            if amount is not None:
                logits = keep(logits, amount)
        return logits


def filtered(logits: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Logits (B, V) after all that settings[i] ask of row i."""
    return Filters(settings, logits.shape[-1], logits.device)(logits.float())


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on its way to the device; the host doesn't wait until it is there."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


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


def choose(logits: Tensor, settings: Sequence[Sampling], uniforms: Sequence[float]) -> list[int]:
    """The next token of each row of logits (B, V): drawn with the row's own number in [0, 1), or greedy."""
    drawn = [row for row, each in enumerate(settings) if not each.greedy]
    if not drawn:
        return greedy(logits).tolist()
    numbers = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)
    if len(drawn) == len(settings):
        return draw(filtered(logits, settings), numbers).tolist()
    index = torch.tensor(drawn, device=logits.device)
    tokens = draw(filtered(logits[index], [settings[row] for row in drawn]), numbers[index])
    return greedy(logits).index_copy(0, index, tokens).tolist()


def check_logits(logits: Tensor) -> None:
    """Refuse logits (…, V) from which nothing can be chosen, and say why."""
    best = logits.amax(dim=-1)
    if not bool(torch.isfinite(best).all()):
        wrong = float(best[~torch.isfinite(best)][0])
        if wrong == -torch.inf:
            raise ModelError("no token is left to choose: the model or the settings exclude all of them here")
        raise ModelError("the model gives NaN or infinite logits; its training diverged or its weights are damaged")
