"""From logits to a token: pure functions on logits (…, V), to be composed.

Rules come first (`apply_rules`): the effect of the text so far and of the caller's settings. Then come the temperature
and the filters. A filter sets the tokens it drops to −inf and keeps at least one. Filters accept any number of leading
dimensions and don't modify their argument. Their parameter is a number, or a tensor (…) with one value per row.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.decode.config import Rules, Sampling
from weft.decode.fast import native
from weft.errors import ModelError

PerRow = float | Tensor
TOPK_BLOCK = 256  # logits per block of `fast_topk`
LOGSUMEXP_ROWS = 16  # rows that one call of torch.logsumexp copies on a CPU
NOT_FINITE, NONE_LEFT = -1, -2  # replace a token id where none can be chosen


def apply_temperature(logits: Tensor, temperature: PerRow) -> Tensor:
    """Divide logits (…, V) by the temperature: below 1, likely tokens become likelier."""
    return logits / _column(temperature, logits)


def top_k(logits: Tensor, k: int | Tensor) -> Tensor:
    """Keep the k likeliest tokens of logits (…, V), and all that tie with the last of them (Fan et al. 2018)."""
    V = logits.shape[-1]
    if isinstance(k, Tensor):
        ordered = logits.sort(dim=-1, descending=True).values
        last = k.to(logits.device).clamp(max=V).unsqueeze(-1) - 1
        return logits.masked_fill(logits < ordered.gather(-1, last), -torch.inf)
    return logits if k >= V else logits.masked_fill(logits < logits.topk(k, dim=-1).values[..., -1:], -torch.inf)


def top_p(logits: Tensor, p: PerRow) -> Tensor:
    """Keep the nucleus of logits (…, V): the fewest likeliest tokens with probability p (Holtzman et al. 2020)."""
    p = _column(p, logits)
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    probabilities = ordered.float().softmax(dim=-1)
    before = probabilities.cumsum(dim=-1) - probabilities
    drop = (before >= p) & (p < 1.0)  # p = 1 keeps all, even if rounding makes the sum reach 1 early
    drop[..., 0] = False
    return logits.masked_fill(torch.zeros_like(drop).scatter(-1, order, drop), -torch.inf)


def min_p(logits: Tensor, p: PerRow) -> Tensor:
    """Keep the tokens of logits (…, V) that are at least p times as likely as the likeliest (Nguyen et al. 2024)."""
    best = logits.amax(dim=-1, keepdim=True)
    # p · max probability, in logits: the normaliser cancels
    return logits.masked_fill(logits < best + _column(p, logits).log(), -torch.inf)


def typical(logits: Tensor, p: PerRow) -> Tensor:
    """Keep the most typical tokens of logits (…, V) that together have probability p (Meister et al. 2023).

    A token is typical if its surprisal, −log p, is near the entropy. Tokens that tie with the last one kept stay too.
    """
    p = _column(p, logits)
    log_p = logits.float().log_softmax(dim=-1)
    entropy = torch.special.entr(log_p.exp()).sum(dim=-1, keepdim=True)
    deviation = (-log_p - entropy).abs()
    ordered, order = deviation.sort(dim=-1, stable=True)
    reached = log_p.exp().gather(-1, order).cumsum(dim=-1)
    last = (reached < p).sum(dim=-1, keepdim=True).clamp(max=logits.shape[-1] - 1)
    return logits.masked_fill((deviation > ordered.gather(-1, last)) & (p < 1.0), -torch.inf)


def _column(value: PerRow, logits: Tensor) -> Tensor:
    """A number, or values (…), as (…, 1) on the device of the logits."""
    return torch.as_tensor(value, device=logits.device).unsqueeze(-1)


class Filters:
    """Temperature, top_k, top_p, min_p and typical_p of rows of logits (B, V), which a CUDA graph can capture."""

    def __init__(self, settings: Sequence[Sampling], vocab_size: int, device: torch.device):
        self.device = device
        # a filter, its parameter, and the rows it applies to; None: all
        self.steps: list[tuple[Callable[[Tensor, Any], Tensor], PerRow, Tensor | None]] = []
        # the logits of greedy rows are left unchanged
        self._add(apply_temperature, [1.0 if each.greedy else each.temperature for each in settings], 1.0)
        self._add(top_k, [min(each.top_k or vocab_size, vocab_size) for each in settings], vocab_size)
        self._add(top_p, [1.0 if each.top_p is None else each.top_p for each in settings], 1.0)
        self._add(min_p, [0.0 if each.min_p is None else each.min_p for each in settings], 0.0)
        self._add(typical, [1.0 if each.typical_p is None else each.typical_p for each in settings], 1.0)
        # filters of equal kind launch the same kernels
        self.kind = [(keep.__name__, type(value), 0 if rows is None else len(rows)) for keep, value, rows in self.steps]

    def _add(self, keep: Callable[[Tensor, Any], Tensor], values: Sequence[float], neutral: float) -> None:
        """Add a filter for the rows whose value isn't neutral: some filters sort, so other rows are spared."""
        rows = [row for row, value in enumerate(values) if value != neutral]
        if not rows:
            return
        active = [values[row] for row in rows]
        one_k = keep is top_k and len(set(active)) == 1  # top-k of one k needs no sort
        parameter = active[0] if one_k else on_device(torch.tensor(active), self.device)
        all_rows = len(rows) == len(values)
        self.steps.append((keep, parameter, None if all_rows else on_device(torch.tensor(rows), self.device)))

    def __call__(self, logits: Tensor) -> Tensor:
        """Return logits (B, V) with −inf for dropped tokens."""
        for keep, parameter, rows in self.steps:
            result = keep(logits if rows is None else logits.index_select(0, rows), parameter)
            logits = result if rows is None else logits.index_copy(0, rows, result)
        return logits


def filter_logits(logits: Tensor, settings: Sequence[Sampling]) -> Tensor:
    """Apply the temperature and filters of settings[i] to row i of logits (B, V)."""
    return Filters(settings, logits.shape[-1], logits.device)(logits.float())


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a CPU tensor to the device without making the host wait."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class TokenFetch:
    """A copy of tokens (batch,) to the host, in progress; calling it waits for them and returns them."""

    def __init__(self, tokens: Tensor):
        self._host, self._copied = tokens, None
        if tokens.is_cuda:
            self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._host.copy_(tokens, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()

    @property
    def ready(self) -> bool:
        return self._copied is None or self._copied.query()

    def __call__(self) -> list[int]:
        if self._copied is not None:
            self._copied.synchronize()
        return list(self._host.tolist())


def greedy(logits: Tensor) -> Tensor:
    """Return the likeliest token (…) of logits (…, V); of ties, the one with the lowest id."""
    if not logits.is_cuda:
        return logits.max(dim=-1).indices
    # on a GPU, argmax may return any of the ties
    return (logits == logits.amax(dim=-1, keepdim=True)).int().argmax(dim=-1)


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token (…) from softmax(logits) (…, V) by inverting the cumulative distribution at `uniforms` (…).

    Each token takes one uniform number, so a row's draw doesn't depend on other rows. The sum is in float64: over a
    large vocabulary, float32 would lose the rare tokens.
    """
    cumulative = logits.double().softmax(dim=-1).cumsum(dim=-1)
    point = uniforms.to(cumulative).unsqueeze(-1) * cumulative[..., -1:]
    # the first token whose interval ends after the point; a token of probability 0 has an empty interval
    token = torch.searchsorted(cumulative, point, right=True).squeeze(-1)
    return token.clamp(max=logits.shape[-1] - 1)


def choose_tokens(logits: Tensor, settings: Sequence[Sampling], uniforms: Sequence[float]) -> Tensor:
    """Return the next token (B,) of each row of logits (B, V), greedy or drawn, without waiting for the device."""
    drawn = [row for row, each in enumerate(settings) if not each.greedy]
    if not drawn:
        return greedy(logits)
    points = on_device(torch.tensor([uniforms[row] for row in drawn], dtype=torch.float64), logits.device)
    if len(drawn) == len(settings):
        return draw(filter_logits(logits, settings), points)
    index = on_device(torch.tensor(drawn), logits.device)
    tokens = draw(filter_logits(logits[index], [settings[row] for row in drawn]), points)
    return greedy(logits).index_copy(0, index, tokens)


def mark_invalid(tokens: Tensor, logits: Tensor) -> Tensor:
    """Replace tokens (B,) by NOT_FINITE or NONE_LEFT where their logits (B, V) allow no choice."""
    best = logits.amax(dim=-1)
    return torch.where(best.isfinite(), tokens, torch.where(best == -torch.inf, NONE_LEFT, NOT_FINITE))


def invalid_logits_error(mark: int) -> ModelError:
    """Return the error for NOT_FINITE or NONE_LEFT."""
    if mark == NONE_LEFT:
        return ModelError("no token is left to choose: the model or the settings exclude all of them here")
    return ModelError("the model gives NaN or infinite logits; its training diverged or its weights are damaged")


def check_logits(logits: Tensor) -> None:
    """Raise ModelError if no token can be chosen from some row of logits (…, V)."""
    best = logits.amax(dim=-1)
    if not bool(best.isfinite().all()):
        raise invalid_logits_error(NONE_LEFT if best[~best.isfinite()][0] == -torch.inf else NOT_FINITE)


def top_log_probs(logits: Tensor, count: int, normalised: bool = False) -> tuple[Tensor, Tensor]:
    """Return log p (rows, count) in float64, best first, and the ids of the likeliest tokens of logits (rows, V).

    If `normalised`, logits are log p already. A row of −∞ only gives −∞; NaN and +∞ are refused.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    best, ids = fast_topk(logits, min(count, logits.shape[-1]))
    dead = best[:, :1] == -torch.inf
    check_logits(best.masked_fill(dead, 0.0))
    # log p = x − log Σ eˣ, of the top tokens only
    log_p = best.double() if normalised else best.double() - logsumexp(logits).double()
    return torch.where(dead, -torch.inf, log_p), ids


def logsumexp(logits: Tensor) -> Tensor:
    """Return log Σ eˣ (rows, 1) of logits (rows, V).

    On a CPU, weft's C code takes a third of torch's time. torch copies its input, hence only a few rows per call.
    """
    contiguous = logits.dtype == torch.float32 and logits.stride(1) == 1 and not logits.is_cuda
    if contiguous and native.library() is not None:
        return native.logsumexp(logits)
    parts = logits.split(len(logits) if logits.is_cuda else LOGSUMEXP_ROWS)
    return torch.cat([part.logsumexp(dim=-1, keepdim=True) for part in parts])


def fast_topk(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return `x.topk(count)` of x (rows, V), faster where count is much smaller than V.

    The largest values are in the blocks with the largest maxima, so only these blocks are searched. torch sorts pairs
    of values and indices of the whole row, which takes longer than the LM head does with fast kernels.
    """
    rows, size = x.shape
    blocks = size // TOPK_BLOCK
    if count * 4 > blocks:
        return x.topk(count, dim=-1)
    by_block = x[:, : blocks * TOPK_BLOCK].unflatten(1, (blocks, TOPK_BLOCK))
    chosen = by_block.amax(dim=-1).topk(count, dim=-1).indices
    inside = torch.arange(TOPK_BLOCK, device=x.device) + chosen.unsqueeze(-1) * TOPK_BLOCK
    tail = torch.arange(blocks * TOPK_BLOCK, size, device=x.device).expand(rows, -1)
    candidates = torch.cat((inside.flatten(1), tail), dim=1)
    best, index = x.gather(1, candidates).topk(count, dim=-1)
    return best, candidates.gather(1, index)


def repetition_penalty(logits: Tensor, seen: Tensor, penalty: PerRow) -> Tensor:
    """Make `seen` tokens (…, V) less likely: divide positive logits by the penalty, multiply negative ones.

    Keskar et al. 2019, §4.1, with the sign handled so that a penalty above 1 always lowers the logit.
    """
    penalty = _column(penalty, logits)
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def no_repeat_ngram(logits: Tensor, texts: Sequence[Sequence[int]], sizes: Sequence[int]) -> Tensor:
    """Exclude tokens that would repeat an n-gram of sizes[i] tokens in texts[i]; 0 allows all (Paulus et al. 2018)."""
    banned = torch.zeros_like(logits, dtype=torch.bool)
    for row, (text, size) in enumerate(zip(texts, sizes, strict=True)):
        if size:
            last = text[len(text) - size + 1 :]
            repeats = [text[at + size - 1] for at in range(len(text) - size + 1) if text[at : at + size - 1] == last]
            banned[row, [token for token in repeats if token < logits.shape[-1]]] = True
    return logits.masked_fill(banned, -torch.inf)


class PenaltyHistory:
    """Tokens of each row so far, for penalties: `texts` are the ids of prompt and text, `in_prompt` (batch, V) marks
    the prompt's tokens, and `counts` (batch, V) counts the generated ones."""

    def __init__(self, prompts: Sequence[Sequence[int]], vocab_size: int, device: torch.device):
        self.in_prompt = torch.zeros(len(prompts), vocab_size, dtype=torch.bool, device=device)
        for row, prompt in enumerate(prompts):
            # a prompt may hold ids beyond the tokenizer's vocabulary, which are never chosen
            self.in_prompt[row, [token for token in prompt if token < vocab_size]] = True
        self.counts = torch.zeros(len(prompts), vocab_size, device=device)
        self.texts = [list(prompt) for prompt in prompts]

    def push(self, tokens: Sequence[int]) -> None:
        self.counts[range(len(tokens)), tokens] += 1
        for text, token in zip(self.texts, tokens, strict=True):
            text.append(token)

    def reorder(self, index: Sequence[int]) -> None:
        """Make row i continue from row index[i]."""
        self.in_prompt, self.counts = self.in_prompt[index], self.counts[index]
        self.texts = [self.texts[row].copy() for row in index]

    @classmethod
    def concatenate(cls, histories: "Sequence[PenaltyHistory]") -> "PenaltyHistory":
        result = cls([], 0, torch.device("cpu"))
        result.texts = [text for each in histories for text in each.texts]
        result.in_prompt = torch.cat([each.in_prompt for each in histories])
        result.counts = torch.cat([each.counts for each in histories])
        return result


def apply_rules(
    logits: Tensor,
    rules: Sequence[Rules],
    written: Sequence[int],
    *,
    history: PenaltyHistory | None = None,
    eos_id: int | None = None,
) -> Tensor:
    """Apply rules[i] to row i of logits (B, V), whose text has written[i] tokens so far.

    The order is logit_bias, repetition_penalty, frequency_penalty, presence_penalty, no_repeat_ngram, banned and
    min_tokens, forced and last. The `history` is required if a rule penalises.
    """
    logits = logits.float()
    if any(rule.changes_logits for rule in rules):
        logits = logits.clone()
    for row, rule in enumerate(rules):
        for token, bias in rule.logit_bias.items():
            logits[row, token] += bias
    if history is not None:
        penalties = [(rule.repetition_penalty, rule.frequency_penalty, rule.presence_penalty) for rule in rules]
        repetition, frequency, presence = torch.tensor(penalties, device=logits.device).unbind(1)
        logits = repetition_penalty(logits, history.in_prompt | (history.counts > 0), repetition)
        logits = logits - frequency[:, None] * history.counts - presence[:, None] * (history.counts > 0)
        sizes = [rule.no_repeat_ngram for rule in rules]
        logits = no_repeat_ngram(logits, history.texts, sizes) if any(sizes) else logits
    for row, (rule, count) in enumerate(zip(rules, written, strict=True)):
        ends = () if count >= rule.min_tokens else (*rule.stop_ids, *(() if eos_id is None else (eos_id,)))
        if rule.banned or ends:
            logits[row, [*rule.banned, *ends]] = -torch.inf
        last = rule.last if count == rule.max_tokens - 1 else None
        only = rule.forced[count] if count < len(rule.forced) else last
        if only is not None:  # certain, even if the model excludes it
            logits[row] = -torch.inf
            logits[row, only] = 0.0
    return logits


def check_rules(rules: Sequence[Rules], vocab_size: int) -> None:
    """Refuse token ids outside a vocabulary of this size, and rules that ban every token."""
    for rule in rules:
        settings = {name: getattr(rule, name) for name in ("logit_bias", "banned", "forced", "stop_ids")}
        settings["last"] = () if rule.last is None else (rule.last,)
        for name, tokens in settings.items():
            wrong = next((token for token in tokens if token >= vocab_size), None)
            if wrong is not None:
                raise ModelError(f"{name}: token {wrong} is outside the vocabulary of {vocab_size}")
        if len(set(rule.banned)) == vocab_size:
            raise ModelError(f"banned: all {vocab_size} tokens of the vocabulary, so nothing can be written")
