"""From logits to a token: pure functions on logits (…, V), to be composed.

First comes what the text so far and the caller's rules do to logits (`apply_rules`), then temperature and the filters.
A filter returns logits in which the tokens it drops are −inf, and keeps at least one. All of them work on any number of
leading dimensions, and none of them changes its argument. Its parameter is one number, or a tensor (…) of one number a
row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.decode.config import Rules, Sampling
from weft.decode.fast import native
from weft.errors import ModelError

Amount = float | Tensor
BLOCK = 256  # logits of which the highest is looked at first
ROWS = 16  # that are summed at a time
NOT_FINITE, NONE_LEFT = -1, -2  # in the place of a token, where none can be chosen


def heated(logits: Tensor, temperature: Amount) -> Tensor:
    """Logits (…, V) at a temperature: below 1 the likely tokens become likelier still."""
    return logits / column(temperature, logits)


def top_k(logits: Tensor, k: int | Tensor) -> Tensor:
    """Keep the k likeliest tokens of logits (…, V), and whatever ties with the last of them (Fan et al. 2018)."""
    V = logits.shape[-1]
    if isinstance(k, Tensor):
        ordered = logits.sort(dim=-1, descending=True).values
        last = k.to(logits.device).clamp(max=V).unsqueeze(-1) - 1
        return logits.masked_fill(logits < ordered.gather(-1, last), -torch.inf)
    return logits if k >= V else logits.masked_fill(logits < logits.topk(k, dim=-1).values[..., -1:], -torch.inf)


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
        self.device = device
        # what is to be done with which rows: all of them where there are none
        self.steps: list[tuple[Callable[[Tensor, Any], Tensor], Amount, Tensor | None]] = []
        # greedy rows stay as they are
        self._add(heated, [1.0 if each.greedy else each.temperature for each in settings], 1.0)
        self._add(top_k, [min(each.top_k or vocab_size, vocab_size) for each in settings], vocab_size)
        self._add(top_p, [1.0 if each.top_p is None else each.top_p for each in settings], 1.0)
        self._add(min_p, [0.0 if each.min_p is None else each.min_p for each in settings], 0.0)
        self._add(typical, [1.0 if each.typical_p is None else each.typical_p for each in settings], 1.0)
        # filters of one kind run the same kernels
        self.kind = [
            (keep.__name__, type(amount), 0 if rows is None else len(rows)) for keep, amount, rows in self.steps
        ]

    def _add(self, keep: Callable[[Tensor, Any], Tensor], amounts: Sequence[float], neutral: float) -> None:
        """Nothing where no row asks for anything; where some do, only those are looked at, for some filters sort."""
        rows = [row for row, amount in enumerate(amounts) if amount != neutral]
        if not rows:
            return
        asked = [amounts[row] for row in rows]
        alike = keep is top_k and len(set(asked)) == 1  # then nothing has to be sorted
        amount = asked[0] if alike else on_device(torch.tensor(asked), self.device)
        everyone = len(rows) == len(amounts)
        self.steps.append((keep, amount, None if everyone else on_device(torch.tensor(rows), self.device)))

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits (B, V) with −inf for what is dropped."""
        for keep, amount, rows in self.steps:
            some = keep(logits if rows is None else logits.index_select(0, rows), amount)
            logits = some if rows is None else logits.index_copy(0, rows, some)
        return logits


def filtered(logits: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Logits (B, V) after all that settings[i] ask of row i."""
    return Filters(settings, logits.shape[-1], logits.device)(logits.float())


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on its way to the device; the host doesn't wait until it is there."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def fetched(row: Tensor) -> Callable[[], list[int]]:
    """Tokens (batch,) on their way to the host; the function waits for them."""
    if not row.is_cuda:
        return row.tolist
    host = torch.empty(row.shape, dtype=row.dtype, pin_memory=True)
    host.copy_(row, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()

    def wait() -> list[int]:
        arrived.synchronize()
        return host.tolist()

    return wait


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token (…) of logits (…, V); of equals, the one with the lowest id."""
    if not logits.is_cuda:
        return logits.max(dim=-1).indices
    # on a GPU argmax may return any of the equals
    return (logits == logits.amax(dim=-1, keepdim=True)).int().argmax(dim=-1)


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


def picked(logits: Tensor, settings: Sequence[Sampling], uniforms: Sequence[float]) -> Tensor:
    """The next token (B,) of each row of logits (B, V): drawn with the row's own number in [0, 1), or greedy. The host
    doesn't wait for the device."""
    drawn = [row for row, each in enumerate(settings) if not each.greedy]
    if not drawn:
        return greedy(logits)
    numbers = on_device(torch.tensor([uniforms[row] for row in drawn], dtype=torch.float64), logits.device)
    if len(drawn) == len(settings):
        return draw(filtered(logits, settings), numbers)
    index = on_device(torch.tensor(drawn), logits.device)
    tokens = draw(filtered(logits[index], [settings[row] for row in drawn]), numbers)
    return greedy(logits).index_copy(0, index, tokens)


def marked(tokens: Tensor, logits: Tensor) -> Tensor:
    """Tokens (B,) that were chosen from logits (B, V); NOT_FINITE or NONE_LEFT where they mean nothing."""
    best = logits.amax(dim=-1)
    return torch.where(best.isfinite(), tokens, torch.where(best == -torch.inf, NONE_LEFT, NOT_FINITE))


def refusal(mark: int) -> ModelError:
    if mark == NONE_LEFT:
        return ModelError("no token is left to choose: the model or the settings exclude all of them here")
    return ModelError("the model gives NaN or infinite logits; its training diverged or its weights are damaged")


def check_logits(logits: Tensor) -> None:
    """Refuse logits (…, V) from which nothing can be chosen, and say why."""
    best = logits.amax(dim=-1)
    if not bool(best.isfinite().all()):
        raise refusal(NONE_LEFT if best[~best.isfinite()][0] == -torch.inf else NOT_FINITE)


def likeliest(logits: Tensor, count: int, normalised: bool = False) -> tuple[Tensor, Tensor]:
    """Of each row of logits (rows, V) the `count` likeliest tokens: log p in float64, best first, and their ids.

    Logits that are `normalised` are log p already. A row of −∞ alone, which leads nowhere, gives −∞; a row that is not
    finite is refused.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    best, ids = highest(logits, min(count, logits.shape[-1]))
    dead = best[:, :1] == -torch.inf
    check_logits(best.masked_fill(dead, 0.0))
    # log p = x − log Σ eˣ, of the few that count
    log_p = best.double() if normalised else best.double() - log_total(logits).double()
    return torch.where(dead, -torch.inf, log_p), ids


def log_total(logits: Tensor) -> Tensor:
    """log Σ eˣ of each row of logits (rows, V): (rows, 1). torch copies all x for that, so on a CPU a few at a time;
    weft's C takes a third of its time."""
    plain = logits.dtype == torch.float32 and logits.stride(1) == 1 and not logits.is_cuda
    if plain and native.library() is not None:
        return native.logsumexp(logits)
    some = logits.split(len(logits) if logits.is_cuda else ROWS)
    return torch.cat([part.logsumexp(dim=-1, keepdim=True) for part in some])


def highest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`x.topk(count)` of x (rows, V), for few of many: they stand in the blocks with the highest maxima. torch sorts
    pairs of values and places, which takes longer than a fast product with the whole vocabulary leaves."""
    rows, size = x.shape
    blocks = size // BLOCK
    if count * 4 > blocks:
        return x.topk(count, dim=-1)
    whole = x[:, : blocks * BLOCK].unflatten(1, (blocks, BLOCK))
    chosen = whole.amax(dim=-1).topk(count, dim=-1).indices
    places = torch.arange(BLOCK, device=x.device) + chosen.unsqueeze(-1) * BLOCK
    rest = torch.arange(blocks * BLOCK, size, device=x.device).expand(rows, -1)
    looked_at = torch.cat((places.flatten(1), rest), dim=1)
    best, where = x.gather(1, looked_at).topk(count, dim=-1)
    return best, looked_at.gather(1, where)


def repetition_penalty(logits: Tensor, seen: Tensor, penalty: Amount) -> Tensor:
    """Make the tokens that were `seen` (…, V) less likely: positive logits are divided, negative ones multiplied.
    Keskar et al. 2019, §4.1, with the sign handled so that a penalty above 1 always lowers."""
    penalty = column(penalty, logits)
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def count_penalties(logits: Tensor, counts: Tensor, frequency: Amount, presence: Amount) -> Tensor:
    """Take `frequency` off logits (…, V) for each time a token was written, counts (…, V), and `presence` if it was."""
    return logits - column(frequency, logits) * counts - column(presence, logits) * (counts > 0)


def no_repeat_ngram(logits: Tensor, texts: Sequence[Sequence[int]], sizes: Sequence[int]) -> Tensor:
    """Logits (B, V) with −inf where a token would make the last sizes[i] tokens of texts[i] come a second time. Paulus
    et al. 2018, §2.5. A size of 0 allows everything."""
    banned = torch.zeros_like(logits, dtype=torch.bool)
    for row, (text, size) in enumerate(zip(texts, sizes, strict=True)):
        if size:
            last = text[len(text) - size + 1 :]
            again = [text[at + size - 1] for at in range(len(text) - size + 1) if text[at : at + size - 1] == last]
            banned[row, [token for token in again if token < logits.shape[-1]]] = True
    return logits.masked_fill(banned, -torch.inf)


class Past:
    """The tokens of each row so far, `texts`; which it has `read`, and how often it has `written` each: (batch, V)."""

    def __init__(self, prompts: Sequence[Sequence[int]], vocab_size: int, device: torch.device):
        self.read = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
        for row, prompt in enumerate(prompts):
            # a prompt may hold ids that are never chosen, beyond the tokenizer's own
            self.read[row, [token for token in prompt if token < vocab_size]] = True
        self.written = torch.zeros(len(prompts), vocab_size, device=device)
        self.texts = [list(prompt) for prompt in prompts]

    def push(self, tokens: Sequence[int]) -> None:
        self.written[range(len(tokens)), tokens] += 1
        for text, token in zip(self.texts, tokens, strict=True):
            text.append(token)

    def reorder(self, index: Sequence[int]) -> None:
        """Row i goes on from row index[i]."""
        self.read, self.written = self.read[index], self.written[index]
        self.texts = [self.texts[row].copy() for row in index]

    @classmethod
    def joined(cls, several: "Sequence[Past]") -> "Past":
        first = several[0]
        joined = cls([], first.read.shape[1], first.read.device)
        joined.texts = [text for each in several for text in each.texts]
        joined.read = torch.cat([each.read for each in several])
        joined.written = torch.cat([each.written for each in several])
        return joined


def apply_rules(
    logits: Tensor, rules: Sequence[Rules], past: Past | None, written: Sequence[int], eos_id: int | None
) -> Tensor:
    """Logits (B, V) after all that rules[i] asks of row i, of which written[i] tokens are written.

    In this order: logit_bias, repetition_penalty, frequency_penalty, presence_penalty, no_repeat_ngram, banned and
    min_tokens, forced and last. The `past` is needed where a rule penalises.
    """
    logits = logits.float()
    if any(rule.logit_bias for rule in rules):
        biases = torch.zeros_like(logits)
        for row, rule in enumerate(rules):
            for token, amount in rule.logit_bias.items():
                biases[row, token] = amount
        logits = logits + biases
    if past is not None:
        amounts = [(rule.repetition_penalty, rule.frequency_penalty, rule.presence_penalty) for rule in rules]
        repetition, *others = torch.tensor(amounts, device=logits.device).unbind(1)
        logits = repetition_penalty(logits, past.read | (past.written > 0), repetition)
        logits = count_penalties(logits, past.written, *others)
        sizes = [rule.no_repeat_ngram for rule in rules]
        logits = no_repeat_ngram(logits, past.texts, sizes) if any(sizes) else logits
    banned, forced = [], []
    for rule, count in zip(rules, written, strict=True):
        ends = () if count >= rule.min_tokens else (*rule.stop_ids, *(() if eos_id is None else (eos_id,)))
        banned.append([*rule.banned, *ends])
        last = rule.last if count == rule.max_tokens - 1 else None
        forced.append(rule.forced[count] if count < len(rule.forced) else last)
    if any(banned):
        never = torch.zeros_like(logits, dtype=torch.bool)
        for row, tokens in enumerate(banned):
            never[row, tokens] = True
        logits = logits.masked_fill(never, -torch.inf)
    if any(only is not None for only in forced):
        logits = logits.clone()
        for row, only in enumerate(forced):
            if only is not None:  # it is certain, even if the model excludes it
                logits[row] = -torch.inf
                logits[row, only] = 0.0
    return logits


def check_rules(rules: Sequence[Rules], vocab_size: int) -> None:
    """Refuse token ids that a vocabulary of this size doesn't have, and rules that leave nothing to write."""
    for rule in rules:
        named = {name: getattr(rule, name) for name in ("logit_bias", "banned", "forced", "stop_ids")}
        named["last"] = () if rule.last is None else (rule.last,)
        for name, tokens in named.items():
            wrong = next((token for token in tokens if token >= vocab_size), None)
            if wrong is not None:
                raise ModelError(f"{name}: token {wrong} is outside the vocabulary of {vocab_size}")
        if len(set(rule.banned)) == vocab_size:
            raise ModelError(f"banned: all {vocab_size} tokens of the vocabulary, so nothing can be written")
