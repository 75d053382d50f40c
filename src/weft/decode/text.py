"""One text: while it is written, how its next token is chosen, what each token adds and why it ends; and whole.

Tokens become text as they come: whole characters only, and no part of a stop string is ever shown.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from weft.decode.config import Rules, Sampling
from weft.decode.constrain import Constraint
from weft.decode.prompt import Prompt, slid
from weft.decode.sampling import Past, apply_rules, check_logits, picked
from weft.text.tokenizer import Tokenizer

AHEAD = 64  # random numbers that a text draws at a time
Finish = Literal["eos", "stop", "length"]


class Detokenizer:
    """Turns the tokens of one text into text that may be shown, and notices stop strings."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], begun: bool):
        self.stream, self.stop = tokenizer.stream(begun=begun), stop
        self.held = ""  # written, but it may be the beginning of a stop string
        self.ready = ""  # may be shown
        self.stopped: str | None = None  # the stop string that is complete

    def push(self, token: int, instead: str | None = None) -> bool:
        """Read a token, or what stands for it; True if a stop string is complete."""
        return self._add(self.stream.push(token, instead))

    def end(self) -> bool:
        """No token follows: what was held back is text after all, unless it completes a stop string."""
        stopped = self._add(self.stream.flush())
        if not stopped:
            self.ready += self.held
            self.held = ""
        return stopped

    def take(self) -> str:
        """The text that may be shown and hasn't been taken yet."""
        text, self.ready = self.ready, ""
        return text

    def copy(self) -> "Detokenizer":
        """Another text that begins as this one did: a beam."""
        other = object.__new__(Detokenizer)  # a beam search makes many of them
        other.__dict__.update(self.__dict__, stream=self.stream.copy())
        return other

    def _add(self, text: str) -> bool:
        self.held += text
        found = [(place, stop) for stop in self.stop if (place := self.held.find(stop)) >= 0]
        if found:
            place, self.stopped = min(found)
            self.ready, self.held = self.ready + self.held[:place], ""
            return True
        size = len(self.held)
        begun = (n for stop in self.stop for n in range(1, min(size + 1, len(stop))) if self.held.endswith(stop[:n]))
        shown = size - max(begun, default=0)
        self.ready, self.held = self.ready + self.held[:shown], self.held[shown:]
        return False


class Ending:
    """Follows one text and says when it ends, and why: the one rule that every way of writing asks after each token.

    "eos": the model ended the text itself. "stop": a stop string is complete, one of the prompt's or the rules'
    `stop_ids` came, or the constraint is met and allows nothing more. "length": `limit` tokens are written, which is
    `max_tokens`, the prompt's `most`, or what the model's window leaves.
    """

    def __init__(self, prompt: Prompt, rules: Rules, window: int | None):
        self.eos_id, self.stop_ids = prompt.eos_id, prompt.stop_ids.union(rules.stop_ids)
        # the newest token isn't read, so a full window still gives one
        limits = rules.max_tokens, prompt.most, None if window is None else window - len(prompt.ids) + 1
        self.limit = min(limit for limit in limits if limit is not None)
        self.written = 0
        self.constraint: Constraint | None = None if prompt.grammar is None else prompt.grammar.begin(prompt.begun)
        known = prompt.tokenizer
        self.detokenizer = None if known is None else Detokenizer(known, rules.stop, prompt.begun)

    def push(self, token: int) -> Finish | None:
        """Count a token that was written; why the text ends with it, if it does."""
        self.written += 1
        finish: Finish | None = "length" if self.written == self.limit else None
        if token == self.eos_id:
            finish = "eos"
        else:
            if token in self.stop_ids or (self.detokenizer is not None and self.detokenizer.push(token)):
                finish = "stop"
            if self.constraint is not None:
                self.constraint.push(token)
                finish = "stop" if self.constraint.over else finish
        # no stop string goes by unseen: what is held back at the end may complete one
        text = self.detokenizer
        if finish is not None and text is not None and text.stopped is None and text.end():
            return "stop"
        return finish

    def take(self) -> str:
        """The text that may be shown and hasn't been taken yet; none where only ids are written."""
        return "" if self.detokenizer is None else self.detokenizer.take()

    def copy(self) -> "Ending":
        """For another text that begins as this one did: a beam."""
        other = object.__new__(Ending)
        other.__dict__.update(self.__dict__)
        other.constraint = None if self.constraint is None else self.constraint.copy()
        other.detokenizer = None if self.detokenizer is None else self.detokenizer.copy()
        return other


@dataclass(frozen=True)
class Chunk:
    """What one token adds to one text.

    `text` may be empty: a character may be incomplete, or a stop string may have begun. `tokens` of this row are
    written so far. `finish` is set where the text ends. `logprob` is what the model gave this token and `top` the
    likeliest ones, as (id, log-probability), if asked for. `slid`: the model read only the last part of the text.
    `stopped`: the stop string that ended it.
    """

    row: int
    id: int
    text: str
    tokens: int
    finish: Finish | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    slid: bool = False
    stopped: str | None = None


Report = tuple[float | None, tuple[tuple[int, float], ...]]  # a chunk's `logprob` and `top`
SILENT: Report = (None, ())


class Text:
    """One text: its prompt and settings, its random numbers, and how far it is. `row` is its place in a batch.

    `ids` are what the model reads of it: all, or the last ones where it slides in the model's `window`.
    """

    def __init__(self, prompt: Prompt, settings: Sampling, window: int | None, seed: int, row: int = 0):
        self.prompt, self.settings, self.row = prompt, settings, row
        self.window = window if settings.slide else None
        self.ending = Ending(prompt, settings, None if settings.slide else window)
        self.ids, self._stays = prompt.last(self.window)
        self.slid = len(self.ids) < len(prompt.ids)
        self.changes_logits = settings.changes_logits or self.ending.constraint is not None
        # whether its next token can be chosen, or reported, only by what the host knows of it
        self.needs_host = self.changes_logits or settings.logprobs is not None
        self.past: Past | None = None  # kept where the settings penalise
        self.rng = torch.Generator().manual_seed(seed)
        self._uniforms: list[float] = []

    @property
    def written(self) -> int:
        return self.ending.written

    @property
    def left(self) -> int:
        return self.ending.limit - self.written

    @property
    def until_full(self) -> int:
        """Tokens after which its ids no longer fit into the window; all that are left where nothing limits it."""
        return self.left if self.window is None else self.window - len(self.ids) + 1

    @property
    def full(self) -> bool:
        return self.window is not None and len(self.ids) > self.window

    def slide(self) -> None:
        """Leave out the oldest ids; those that stay have to be read again."""
        self.ids, self.slid = list(slid(self.ids, self.window, self._stays)), True

    def uniform(self) -> float:
        """The next number in [0, 1) of this text's own sequence, which no other text disturbs."""
        if not self._uniforms:
            self._uniforms = torch.rand(AHEAD, dtype=torch.float64, generator=self.rng).tolist()[::-1]
        return self._uniforms.pop()

    def push(self, token: int, report: Report = SILENT) -> Chunk:
        finish = self.ending.push(token)
        self.ids.append(token)
        if self.past is not None:
            self.past.push([token])
        stopped = None if finish != "stop" or self.ending.detokenizer is None else self.ending.detokenizer.stopped
        return Chunk(self.row, token, self.ending.take(), self.written, finish, *report, self.slid, stopped)


def adjusted(texts: Sequence[Text], logits: Tensor) -> Tensor:
    """Logits (B, V) after each text's rules and constraint, from which a token can be chosen; else a ModelError. All
    texts are of one vocabulary. Nothing is drawn or counted here: after an error it can be tried with fewer texts."""
    ready = logits.float()
    rows = [row for row, text in enumerate(texts) if text.changes_logits]
    if len(rows) == len(texts):
        ready = _adjusted(texts, ready)
    elif rows:
        index = torch.tensor(rows, device=logits.device)
        ready = ready.index_copy(0, index, _adjusted([texts[row] for row in rows], ready[index]))
    check_logits(ready)
    return ready


def _adjusted(texts: Sequence[Text], logits: Tensor) -> Tensor:
    rules, eos_id = [text.settings for text in texts], texts[0].prompt.eos_id
    past = None
    if any(rule.penalises for rule in rules):
        for text in texts:
            text.past = text.past or Past([text.prompt.ids], logits.shape[-1], logits.device)
        past = Past.joined([text.past for text in texts if text.past is not None])
    ready = apply_rules(logits, rules, past, [text.written for text in texts], eos_id)
    constraints = [text.ending.constraint for text in texts]
    if any(constraint is not None for constraint in constraints):
        every = torch.ones(logits.shape[-1], dtype=torch.bool)
        allowed = [every if each is None else each.allowed() for each in constraints]
        ready = ready.masked_fill(~torch.stack(allowed).to(ready.device), -torch.inf)
    return ready


Agree = Callable[[list[int]], list[int]]  # what all processes choose that write the same texts (`LanguageModel.agree`)


def write(texts: Sequence[Text], logits: Tensor, ready: Tensor, agree: Agree) -> list[Chunk]:
    """Choose a token for each text from `ready` (B, V) logits, which the model gave as `logits`, and go on with it."""
    settings = [text.settings for text in texts]
    uniforms = [0.0 if text.settings.greedy else text.uniform() for text in texts]
    tokens = agree(picked(ready, settings, uniforms).tolist())
    given = zip(texts, tokens, reports(logits, tokens, settings), strict=True)
    return [text.push(token, report) for text, token, report in given]


def reports(logits: Tensor, chosen: Sequence[int], settings: Sequence[Sampling]) -> list[Report]:
    """For each row of logits (B, V) that asks for it, log p of the chosen token and of the likeliest ones."""
    wanted = [each.logprobs for each in settings]
    most = max((want for want in wanted if want is not None), default=None)
    if most is None:
        return [SILENT] * len(chosen)
    log_p = logits.float().log_softmax(dim=-1)
    values, ids = log_p.topk(min(most, logits.shape[-1]), dim=-1)
    tops = [list(zip(*pair, strict=True)) for pair in zip(ids.tolist(), values.tolist(), strict=True)]
    own = log_p.gather(-1, torch.tensor(chosen, device=logits.device).unsqueeze(-1)).squeeze(-1).tolist()
    return [SILENT if want is None else (own[row], tuple(tops[row][:want])) for row, want in enumerate(wanted)]


@dataclass(frozen=True)
class TokenLogprob:
    """A token with its log-probability and the likeliest tokens in its place, as (text, log-probability)."""

    id: int
    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Completion:
    """The whole text of one row. `scored` is filled if log-probabilities were asked for; `score` by beam search.

    `slid`: prompt and text were longer than the model's window, and it went on over the last tokens.
    """

    text: str
    tokens: int
    finish: Finish
    scored: tuple[TokenLogprob, ...] = field(default=(), repr=False)
    score: float | None = None
    slid: bool = False


def gather(stream: Iterable[Chunk], prompts: Sequence[Prompt]) -> list[Completion]:
    """The whole text of each row of a stream that has run to its end."""
    rows: list[list[Chunk]] = [[] for _ in prompts]
    for chunk in stream:
        rows[chunk.row].append(chunk)
    return [completion_of(row, prompt) for row, prompt in zip(rows, prompts, strict=True)]


def completion_of(chunks: Sequence[Chunk], prompt: Prompt) -> Completion:
    last = chunks[-1]
    assert last.finish is not None, "every text ends"
    text = "".join(chunk.text for chunk in chunks)
    scored = () if prompt.tokenizer is None else _scored(chunks, text, prompt.tokenizer, prompt.begun)
    return Completion(text, last.tokens, last.finish, scored, slid=last.slid)


def _scored(chunks: Sequence[Chunk], text: str, tokenizer: Tokenizer, begun: bool) -> tuple[TokenLogprob, ...]:
    """The tokens of a text with their log-probabilities; those that lie wholly in a stop string don't show either."""
    scored: list[TokenLogprob] = []
    stream = tokenizer.stream(begun=begun)
    before = 0  # characters before the token
    for chunk in chunks:
        if chunk.logprob is None or (chunks[-1].finish == "stop" and before >= len(text)):
            break
        top = tuple((spelled(tokenizer, id), value) for id, value in chunk.top)
        scored.append(TokenLogprob(chunk.id, spelled(tokenizer, chunk.id), chunk.logprob, top))
        before += len(stream.push(chunk.id))
    return tuple(scored)


def spelled(tokenizer: Tokenizer, id: int) -> str:
    """A token as a reader would see it in a running text; special ones by their names."""
    special = id in tokenizer.special_tokens.values()
    return tokenizer.token(id) if special else tokenizer.token_bytes(id).decode("utf-8", "replace")
