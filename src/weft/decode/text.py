"""A generated text: choosing its next token, the text that each token adds, and the reason it ends.

Tokens become text as they are generated: whole characters only, and no part of a stop string.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from weft.decode.config import Rules, Sampling
from weft.decode.constrain import Constraint
from weft.decode.prompt import Prompt, slide
from weft.decode.sampling import PenaltyHistory, apply_rules, check_logits, choose_tokens
from weft.text.tokenizer import Tokenizer

UNIFORMS_PER_CALL = 64  # random numbers that a text takes from its generator in one call
Finish = Literal["eos", "stop", "length"]


class Detokenizer:
    """Turns the tokens of one text into text that may be shown, and detects stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], mid_text: bool):
        self.stream, self.stop = tokenizer.stream(mid_text=mid_text), stop
        self.pending = ""  # may be the beginning of a stop string
        self.ready = ""  # may be shown
        self.stopped: str | None = None  # the stop string that is complete

    def push(self, token: int, replacement: str | None = None) -> bool:
        """Add a token, or the text that replaces it; return whether a stop string is complete."""
        return self._add(self.stream.push(token, replacement))

    def end(self) -> bool:
        """Release pending text after the last token; return whether it completes a stop string."""
        stopped = self._add(self.stream.flush())
        if not stopped:
            self.ready += self.pending
            self.pending = ""
        return stopped

    def take(self) -> str:
        """Return the text that became ready since the last call."""
        text, self.ready = self.ready, ""
        return text

    def copy(self) -> "Detokenizer":
        """Return a copy for another beam with the same prefix."""
        other = object.__new__(Detokenizer)  # a beam search makes many copies
        other.__dict__.update(self.__dict__, stream=self.stream.copy())
        return other

    def _add(self, text: str) -> bool:
        if not self.stop:
            self.ready += text
            return False
        self.pending += text
        matches = [(start, stop) for stop in self.stop if (start := self.pending.find(stop)) >= 0]
        if matches:
            start, self.stopped = min(matches)
            self.ready, self.pending = self.ready + self.pending[:start], ""
            return True
        size = len(self.pending)
        partial = (n for s in self.stop for n in range(1, min(size + 1, len(s))) if self.pending.endswith(s[:n]))
        shown = size - max(partial, default=0)
        self.ready, self.pending = self.ready + self.pending[:shown], self.pending[shown:]
        return False


class StopCondition:
    """Decides when one text ends, and why; every decoding method consults it after each token.

    "stop": a stop string is complete, a token is among the `stop_ids`, or the constraint allows nothing more. "length":
    the text has `limit` tokens, the least of both `max_tokens` and the free part of the model's window.
    """

    def __init__(self, prompt: Prompt, rules: Rules, window: int | None):
        self.eos_id, self.stop_ids = prompt.eos_id, prompt.stop_ids.union(rules.stop_ids)
        # the newest token isn't read, so a full window still yields one
        limits = rules.max_tokens, prompt.max_tokens, None if window is None else window - len(prompt.ids) + 1
        self.limit = min(limit for limit in limits if limit is not None)
        self.written = 0
        self.constraint: Constraint | None = None
        if prompt.grammar is not None:
            self.constraint = prompt.grammar.begin(prompt.mid_text, self.stop_ids)
        tokenizer = prompt.tokenizer
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer, rules.stop, prompt.mid_text)

    def push(self, token: int) -> Finish | None:
        """Count a generated token; return why the text ends with it, or None."""
        self.written += 1
        finish: Finish | None = "length" if self.written == self.limit else None
        if token == self.eos_id:
            finish = "eos"
        elif token in self.stop_ids:
            finish = "stop"
        else:
            if self.detokenizer is not None and self.detokenizer.push(token):
                finish = "stop"
            if self.constraint is not None:
                self.constraint.push(token)
                finish = "stop" if self.constraint.over else finish
        # pending bytes at the end of the text may complete a stop string
        text = self.detokenizer
        if finish is not None and text is not None and text.stopped is None and text.end():
            return "stop"
        return finish

    def copy(self) -> "StopCondition":
        """Return a copy for another beam with the same prefix."""
        other = object.__new__(StopCondition)
        other.__dict__.update(self.__dict__)
        other.constraint = None if self.constraint is None else self.constraint.copy()
        other.detokenizer = None if self.detokenizer is None else self.detokenizer.copy()
        return other


class Chunk(NamedTuple):
    """One token of one text, and the text it adds."""

    row: int
    id: int
    text: str  # may be empty: a character is incomplete, or a stop string may have begun
    tokens: int  # of the row so far
    finish: Finish | None  # set at the end of the text
    logprob: float | None = None  # if requested
    top: tuple[tuple[int, float], ...] = ()  # the likeliest tokens as (id, log p), if requested
    slid: bool = False  # the model read only the end
    stopped: str | None = None  # the stop string that ended the text


Logprobs = tuple[float | None, tuple[tuple[int, float], ...]]  # a chunk's `logprob` and `top`
NO_LOGPROBS: Logprobs = (None, ())


class GeneratedText:
    """One text in progress; `ids` are what the model reads: all tokens, or the last ones after a slide."""

    def __init__(self, prompt: Prompt, settings: Sampling, window: int | None, *, seed: int, row: int = 0):
        self.prompt, self.settings, self.row = prompt, settings, row
        self.window = window if settings.slide else None
        self.stop_condition = StopCondition(prompt, settings, None if settings.slide else window)
        self.ids, self._keep = prompt.fit(self.window)
        self.slid = len(self.ids) < len(prompt.ids)
        self.changes_logits = settings.changes_logits or self.stop_condition.constraint is not None
        # whether choosing or reporting the next token takes state that only the host has
        self.needs_host = self.changes_logits or settings.logprobs is not None
        self.history: PenaltyHistory | None = None  # set where the settings penalise
        self.rng = torch.Generator().manual_seed(seed)
        self._uniforms: list[float] = []

    @property
    def written(self) -> int:
        """Number of tokens generated so far."""
        return self.stop_condition.written

    @property
    def left(self) -> int:
        """Number of tokens until the limit."""
        return self.stop_condition.limit - self.written

    @property
    def until_full(self) -> int:
        """Number of tokens after which `ids` no longer fit into the window; `left` without a window."""
        return self.left if self.window is None else self.window - len(self.ids) + 1

    @property
    def full(self) -> bool:
        return self.window is not None and len(self.ids) > self.window

    def slide(self) -> None:
        """Drop the oldest ids; the others have to be read again."""
        self.ids, self.slid = list(slide(self.ids, self.window, self._keep)), True

    def uniform(self) -> float:
        """Return the next number in [0, 1) of this text's random sequence, which no other text affects."""
        if not self._uniforms:
            self._uniforms = torch.rand(UNIFORMS_PER_CALL, dtype=torch.float64, generator=self.rng).tolist()[::-1]
        return self._uniforms.pop()

    def push(self, token: int, logprobs: Logprobs = NO_LOGPROBS) -> Chunk:
        """Append a token and return its chunk."""
        finish = self.stop_condition.push(token)
        self.ids.append(token)
        if self.history is not None:
            self.history.push([token])
        detokenizer = self.stop_condition.detokenizer
        return Chunk(
            row=self.row,
            id=token,
            text="" if detokenizer is None else detokenizer.take(),
            tokens=self.written,
            finish=finish,
            logprob=logprobs[0],
            top=logprobs[1],
            slid=self.slid,
            stopped=None if finish != "stop" or detokenizer is None else detokenizer.stopped,
        )


def adjust_logits(texts: Sequence[GeneratedText], logits: Tensor) -> Tensor:
    """Apply each text's rules and constraint to its row of logits (B, V), all of one vocabulary.

    Raises ModelError if a row allows no token. Has no side effects, so it can be called again with fewer texts.
    """
    result = logits.float()
    rows = [row for row, text in enumerate(texts) if text.changes_logits]
    if rows:
        index = torch.tensor(rows, device=logits.device)
        result = result.index_copy(0, index, _adjust_rows([texts[row] for row in rows], result[index]))
    check_logits(result)
    return result


def _adjust_rows(texts: Sequence[GeneratedText], logits: Tensor) -> Tensor:
    rules = [text.settings for text in texts]
    history = None
    if any(rule.penalises for rule in rules):
        for text in texts:
            text.history = text.history or PenaltyHistory([text.prompt.ids], logits.shape[-1], logits.device)
        history = PenaltyHistory.concatenate([text.history for text in texts if text.history is not None])
    written = [text.written for text in texts]
    result = apply_rules(logits, rules, written, history=history, eos_id=texts[0].prompt.eos_id)
    constraints = [text.stop_condition.constraint for text in texts]
    if any(constraint is not None for constraint in constraints):
        unconstrained = torch.ones(logits.shape[-1], dtype=torch.bool)
        allowed = [unconstrained if each is None else each.allowed() for each in constraints]
        result = result.masked_fill(~torch.stack(allowed).to(result.device), -torch.inf)
    return result


Agree = Callable[[list[int]], list[int]]  # makes all ranks choose the same tokens (`LanguageModel.agree`)


def extend_texts(texts: Sequence[GeneratedText], logits: Tensor, adjusted: Tensor, *, agree: Agree) -> list[Chunk]:
    """Append a token to each text, chosen from `adjusted` (B, V); the model's `logits` are for log-probabilities."""
    settings = [text.settings for text in texts]
    uniforms = [0.0 if text.settings.greedy else text.uniform() for text in texts]
    tokens = agree(choose_tokens(adjusted, settings, uniforms).tolist())
    logprobs = token_logprobs(logits, tokens, settings)
    return [text.push(token, report) for text, token, report in zip(texts, tokens, logprobs, strict=True)]


def token_logprobs(logits: Tensor, tokens: Sequence[int], settings: Sequence[Sampling]) -> list[Logprobs]:
    """Return log p of the chosen and the likeliest tokens for each row of logits (B, V) that requests it."""
    requests = [each.logprobs for each in settings]
    most = max((count for count in requests if count is not None), default=None)
    if most is None:
        return [NO_LOGPROBS] * len(tokens)
    log_p = logits.float().log_softmax(dim=-1)
    values, ids = log_p.topk(min(most, logits.shape[-1]), dim=-1)
    tops = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    chosen = log_p.gather(-1, torch.tensor(tokens, device=logits.device).unsqueeze(-1)).squeeze(-1).tolist()
    rows = zip(requests, chosen, tops, strict=True)
    return [NO_LOGPROBS if count is None else (value, tuple(top[:count])) for count, value, top in rows]


@dataclass(frozen=True)
class TokenLogprob:
    """A token, its log-probability, and the likeliest tokens at its position as (text, log-probability)."""

    id: int
    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Completion:
    """The whole text of one row; `scored` if log p were requested, `score` by beam search, `slid` beyond the window."""

    text: str
    tokens: int
    finish: Finish
    scored: tuple[TokenLogprob, ...] = field(default=(), repr=False)
    score: float | None = None
    slid: bool = False


def gather(stream: Iterable[Chunk], prompts: Sequence[Prompt]) -> list[Completion]:
    """Consume a stream and return the whole text of each row."""
    rows: list[list[Chunk]] = [[] for _ in prompts]
    for chunk in stream:
        rows[chunk.row].append(chunk)
    return [completion_of(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]


def completion_of(chunks: Sequence[Chunk], prompt: Prompt) -> Completion:
    """Return the text that all chunks of a row make up."""
    last = chunks[-1]
    assert last.finish is not None, "every text ends"
    text = "".join(chunk.text for chunk in chunks)
    scored = () if prompt.tokenizer is None else _scored(chunks, text, prompt.tokenizer, mid_text=prompt.mid_text)
    return Completion(text, last.tokens, last.finish, scored=scored, slid=last.slid)


def _scored(chunks: Sequence[Chunk], text: str, tokenizer: Tokenizer, *, mid_text: bool) -> tuple[TokenLogprob, ...]:
    """Tokens of a text with their log-probabilities, without those that lie wholly in a stop string."""
    scored: list[TokenLogprob] = []
    stream = tokenizer.stream(mid_text=mid_text)
    before = 0  # characters before the token
    for chunk in chunks:
        if chunk.logprob is None or (chunks[-1].finish == "stop" and before >= len(text)):
            break
        top = tuple((spell_token(tokenizer, id), value) for id, value in chunk.top)
        scored.append(TokenLogprob(chunk.id, spell_token(tokenizer, chunk.id), logprob=chunk.logprob, top=top))
        before += len(stream.push(chunk.id))
    return tuple(scored)


def spell_token(tokenizer: Tokenizer, id: int) -> str:
    """Return a token as it appears in running text; special tokens by name."""
    return token_spelling(tokenizer, id).decode("utf-8", "replace")


def token_spelling(tokenizer: Tokenizer, id: int) -> bytes:
    """Return the bytes of a token in running text, which may be a part of a character; special tokens by name."""
    special = id in tokenizer.special_tokens.values()
    return tokenizer.token(id).encode() if special else tokenizer.token_bytes(id)
