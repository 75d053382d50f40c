"""Speculative decoding: draft some tokens cheaply, verify them with the model in one step, and keep the accepted ones.

A step of a large model takes as long for five tokens as for one, so every accepted token saves a step. The text follows
the same distribution as without drafts (Leviathan et al. 2023, appendix A.1), and greedy text is identical. Drafts come
from a smaller model with the same vocabulary, or from the text itself, which often repeats.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.fast.stepper import Stepper
from weft.decode.generate import max_length
from weft.decode.prompt import Prompt, as_prompts, check_prompts, context_window, output_vocab_size, slide
from weft.decode.sampling import check_logits, choose_tokens, draw, filter_logits, greedy
from weft.decode.text import Chunk, GeneratedText, adjust_logits, token_logprobs
from weft.errors import ModelError
from weft.models.base import LanguageModel, device_of
from weft.models.transformer import Transformer

MAX_DRAFT_TOKENS = 5  # verified in one step


class DraftTokens(NamedTuple):
    """Tokens that may come next, and the distributions (tokens, V) they were drawn from; None if deterministic."""

    tokens: list[int]
    probabilities: Tensor | None


class LookUp:
    """Drafts the tokens after the previous occurrence of the longest n-gram that ends the text, n ≤ `max_ngram`."""

    def __init__(self, max_ngram: int):
        if max_ngram < 1:
            raise ModelError(f"lookup = {max_ngram}: at least one token has to match")
        self.max_ngram, self.indexed = max_ngram, 0
        self.after: list[dict[tuple[int, ...], int]] = [{} for _ in range(max_ngram)]  # n-gram → the position after it

    def draft(self, text: Sequence[int], max_tokens: int) -> DraftTokens:
        """Return up to `max_tokens` tokens that may follow the text."""
        # the n-grams at the end are indexed by the next call, when the token after them is known
        for end in range(self.indexed, len(text)):
            for n in range(1, min(self.max_ngram, end) + 1):
                self.after[n - 1][tuple(text[end - n : end])] = end
        self.indexed = len(text)
        for n in range(min(self.max_ngram, len(text)), 0, -1):
            start = self.after[n - 1].get(tuple(text[-n:]))
            if start is not None:
                return DraftTokens(list(text[start : start + max_tokens]), None)
        return DraftTokens([], None)


class Draft:
    """Drafts tokens with a smaller model, greedy or drawn with the same settings as the text."""

    def __init__(self, model: LanguageModel, prompt: Prompt, settings: Sampling):
        if model.training:
            raise ModelError("the draft model is in training mode; call model.eval() first")
        self.model, self.settings = model, settings
        self.vocab_size = output_vocab_size(model, prompt.vocab_size)
        self.window, self.keep = context_window(model), prompt.fit(context_window(model))[1]
        self.limit = max_length([prompt.ids], settings.max_tokens, model)
        # independent of the draws that accept or reject its tokens
        self.rng = torch.Generator().manual_seed((settings.seed * 2 + 1) % 2**63)
        self.dropped = -1  # tokens of the text that have left the window; −1 before the first draft

    def draft(self, text: Sequence[int], max_tokens: int) -> DraftTokens:
        """Return up to `max_tokens` tokens that may follow the text."""
        visible = slide(text, self.window, self.keep)
        if self.dropped != len(text) - len(visible):  # the window has slid: everything is read again
            self.dropped = len(text) - len(visible)
            self.stepper = Stepper(self.model, 1, 1, limit=self.limit)
            self.read: list[int] = []
            self.accepted = 0  # tokens that the stepper has read and that are part of the text
        max_tokens = min(max_tokens, self.limit - len(visible) + 1)  # the last token is never read
        if max_tokens < 1:
            return DraftTokens([], None)
        logits, tokens, rows = self._catch_up(visible), list[int](), list[Tensor]()
        while True:
            check_logits(logits)
            if self.settings.greedy:
                tokens.append(int(greedy(logits)))
            else:
                adjusted = filter_logits(logits, [self.settings])
                uniform = torch.rand(1, dtype=torch.float64, generator=self.rng)
                tokens.append(int(draw(adjusted, uniform.to(adjusted.device))))
                rows.append(adjusted[0].double().softmax(dim=-1))
            if len(tokens) == max_tokens:
                return DraftTokens(tokens, torch.stack(rows) if rows else None)
            logits = self._step(tokens[-1:])

    def _catch_up(self, text: Sequence[int]) -> Tensor:
        """Forget rejected tokens and read those that replaced them; logits (1, V) after the text."""
        same = self.accepted
        while same < min(len(self.read), len(text) - 1) and self.read[same] == text[same]:
            same += 1
        self.stepper.truncate(same)
        del self.read[same:]
        self.accepted = len(text) - 1
        return self._step(text[same:])

    def _step(self, tokens: Sequence[int]) -> Tensor:
        self.read += tokens
        return _read(self.stepper, tokens, 1)[:, : self.vocab_size]


def _read(stepper: Stepper, tokens: Sequence[int], last: int) -> Tensor:
    features = stepper.read(torch.tensor([list(tokens)], device=device_of(stepper.model)))
    return stepper.model.head(features[:, -last:])[0]


def speculate(
    model: LanguageModel, prompt: Prompt | Sequence[int], settings: Sampling, *, drafter: LookUp | Draft
) -> Iterator[Chunk]:
    """Continue one prompt as `generate` does, with drafted tokens; chunks come in bursts."""
    (checked,) = as_prompts([prompt])
    check_prompts(model, [checked], [settings])
    return _speculate(model, drafter, GeneratedText(checked, settings, context_window(model), seed=settings.seed))


@torch.inference_mode()
def _speculate(model: LanguageModel, drafter: LookUp | Draft, text: GeneratedText) -> Iterator[Chunk]:
    vocab_size = output_vocab_size(model, text.prompt.vocab_size)
    limit = max_length([text.ids], text.settings.max_tokens, model)
    stepper = Stepper(model, 1, len(text.ids), limit=limit)
    history = list(text.prompt.ids)
    read = 0  # tokens of text.ids that the model has read
    # A draft beyond a length at which the position encoding rescales would change the rotation of earlier tokens.
    switches = model.decoder.switches if isinstance(model, Transformer) and model.decoder is not None else []
    while True:
        if text.full:
            text.slide()
            stepper, read = Stepper(model, 1, len(text.ids), limit=limit), 0
        length = len(text.ids)
        max_tokens = min(MAX_DRAFT_TOKENS, text.settings.max_tokens - text.written - 1, limit - length)
        max_tokens = min([max_tokens, *(each - length for each in switches if each >= length)])
        draft = drafter.draft(history, max_tokens) if max_tokens > 0 else DraftTokens([], None)
        logits = _read(stepper, [*text.ids[read:], *draft.tokens], len(draft.tokens) + 1)[:, :vocab_size]
        for index in range(len(draft.tokens) + 1):
            row = logits[index : index + 1]
            token = model.agree(_choose(text, adjust_logits([text], row), draft, index=index))
            chunk = text.push(token, token_logprobs(row, [token], [text.settings])[0])
            yield chunk
            if chunk.finish is not None:
                return
            history.append(token)
            if index < len(draft.tokens) and token != draft.tokens[index]:
                break
        read = len(text.ids) - 1  # the newest token has not been read
        stepper.truncate(read)


def _choose(text: GeneratedText, logits: Tensor, draft: DraftTokens, *, index: int) -> int:
    """Choose the next token from logits (1, V): the drafted one as often as the distribution allows.

    A token x drawn from q is accepted with probability min(1, p(x) / q(x)); otherwise the token is drawn from
    max(0, p − q), normalised. The result follows p. A deterministic draft is accepted if a draw from p equals it.
    """
    settings = text.settings
    if draft.probabilities is None or index == len(draft.tokens) or settings.greedy:
        return int(choose_tokens(logits, [settings], [0.0 if settings.greedy else text.uniform()]))
    p = filter_logits(logits, [settings])[0].double().softmax(dim=-1)
    q, x = draft.probabilities[index].to(p), draft.tokens[index]
    accept, redraw = text.uniform(), text.uniform()
    if accept * float(q[x]) < float(p[x]):
        return x
    residual = (p - q).clamp(min=0.0)
    # p and q may be equal up to rounding: then draw from p
    residual = residual if float(residual.sum()) > 0.0 else p
    return int(draw(residual.log(), torch.tensor(redraw, dtype=torch.float64, device=residual.device)))
