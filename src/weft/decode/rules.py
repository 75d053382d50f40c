"""What the text so far and the caller's rules do to logits: pure functions on logits (…, V), to be composed.

They come before temperature and the filters of `sampling`. None of them changes its argument. A penalty is one number
or a tensor (…) of one number a row.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from weft.decode.config import Rules
from weft.decode.sampling import Amount, column
from weft.errors import ModelError


def repetition_penalty(logits: Tensor, seen: Tensor, penalty: Amount) -> Tensor:
    """Make the tokens that were `seen` (…, V) less likely: positive logits are divided, negative ones multiplied.

    Keskar et al. 2019, §4.1, with the sign handled so that a penalty above 1 always lowers.
    """
    penalty = column(penalty, logits)
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def frequency_penalty(logits: Tensor, counts: Tensor, penalty: Amount) -> Tensor:
    """Take `penalty` off logits (…, V) once for each time that a token was written, counts (…, V)."""
    return logits - column(penalty, logits) * counts


def presence_penalty(logits: Tensor, counts: Tensor, penalty: Amount) -> Tensor:
    """Take `penalty` off logits (…, V) where a token was written at all, counts (…, V)."""
    return logits - column(penalty, logits) * (counts > 0)


def no_repeat_ngram(logits: Tensor, texts: Sequence[Sequence[int]], sizes: Sequence[int]) -> Tensor:
    """Logits (B, V) with −inf where a token would make the last sizes[i] tokens of texts[i] come a second time.

    Paulus et al. 2018, §2.5. A size of 0 allows everything.
    """
    banned = torch.zeros_like(logits, dtype=torch.bool)
    for row, (text, size) in enumerate(zip(texts, sizes, strict=True)):
        if size:
            last = text[len(text) - size + 1 :]
            again = [text[at + size - 1] for at in range(len(text) - size + 1) if text[at : at + size - 1] == last]
            banned[row, [token for token in again if token < logits.shape[-1]]] = True
    return ban(logits, banned)


def ban(logits: Tensor, banned: Tensor) -> Tensor:
    """Logits (…, V) with −inf where `banned` (…, V)."""
    return logits.masked_fill(banned, -torch.inf)


def force(logits: Tensor, token: int) -> Tensor:
    """Logits (…, V) under which `token` is certain, even one that the model excludes."""
    forced = torch.full_like(logits, -torch.inf)
    forced[..., token] = 0.0
    return forced


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
        """Go on with the newest token of each row."""
        self.written[range(len(tokens)), tokens] += 1
        for text, token in zip(self.texts, tokens, strict=True):
            text.append(token)

    def reorder(self, index: Sequence[int]) -> None:
        """Row i goes on from row index[i]."""
        self.read, self.written = self.read[index], self.written[index]
        self.texts = [self.texts[row].copy() for row in index]

    @classmethod
    def joined(cls, several: "Sequence[Past]") -> "Past":
        """The rows of several, one after the other."""
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
        amounts = torch.zeros_like(logits)
        for row, rule in enumerate(rules):
            for token, amount in rule.logit_bias.items():
                amounts[row, token] = amount
        logits = logits + amounts
    if past is not None:
        logits = _penalised(logits, rules, past)
    banned = [_banned(rule, count, eos_id) for rule, count in zip(rules, written, strict=True)]
    if any(banned):
        never = torch.zeros_like(logits, dtype=torch.bool)
        for row, tokens in enumerate(banned):
            never[row, tokens] = True
        logits = ban(logits, never)
    forced = [_forced(rule, count) for rule, count in zip(rules, written, strict=True)]
    if any(token is not None for token in forced):
        rows = [row if token is None else force(row, token) for row, token in zip(logits, forced, strict=True)]
        logits = torch.stack(rows)
    return logits


def _banned(rule: Rules, count: int, eos_id: int | None) -> list[int]:
    """The tokens that must not come after `count` others."""
    ends = [] if count >= rule.min_tokens else [*rule.stop_ids, *([] if eos_id is None else [eos_id])]
    return [*rule.banned, *ends]


def _forced(rule: Rules, count: int) -> int | None:
    """The token that comes after `count` others in any case."""
    if count < len(rule.forced):
        return rule.forced[count]
    return rule.last if count == rule.max_tokens - 1 else None


def _penalised(logits: Tensor, rules: Sequence[Rules], past: Past) -> Tensor:
    amounts = [(rule.repetition_penalty, rule.frequency_penalty, rule.presence_penalty) for rule in rules]
    repetition, frequency, presence = torch.tensor(amounts, device=logits.device).unbind(1)
    logits = repetition_penalty(logits, past.read | (past.written > 0), repetition)
    logits = frequency_penalty(logits, past.written, frequency)
    logits = presence_penalty(logits, past.written, presence)
    sizes = [rule.no_repeat_ngram for rule in rules]
    return no_repeat_ngram(logits, past.texts, sizes) if any(sizes) else logits


def check_rules(rules: Sequence[Rules], vocab_size: int) -> None:
    """Refuse token ids that a vocabulary of this size doesn't have, and rules that leave nothing to write."""
    for rule in rules:
        named = {name: getattr(rule, name) for name in ("logit_bias", "banned", "forced", "stop_ids")}
        for name, tokens in (*named.items(), ("last", () if rule.last is None else (rule.last,))):
            wrong = next((token for token in tokens if token >= vocab_size), None)
            if wrong is not None:
                raise ModelError(f"{name}: token {wrong} is outside the vocabulary of {vocab_size}")
        if len(set(rule.banned)) == vocab_size:
            raise ModelError(f"banned: all {vocab_size} tokens of the vocabulary, so nothing can be written")
