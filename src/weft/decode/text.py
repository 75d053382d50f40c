"""One text while it is written: how its next token is chosen, and what each token adds to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from weft.decode.config import Sampling
from weft.decode.ending import Ending, Finish
from weft.decode.prompt import Prompt, slid
from weft.decode.rules import Past, apply_rules, ban
from weft.decode.sampling import check_logits, choose

AHEAD = 64  # random numbers that a text draws at a time


@dataclass(frozen=True)
class Chunk:
    """What one token adds to one text.

    `text` may be empty: a character may be incomplete, or a stop string may have begun. `tokens` of this row are
    written so far. `finish` is set where the text ends. `logprob` is what the model gave this token and `top` the
    likeliest ones, as (id, log-probability), if asked for. `slid`: the model read only the last part of the text.
    """

    row: int
    id: int
    text: str
    tokens: int
    finish: Finish | None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    slid: bool = False


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
        """Tokens written so far."""
        return self.ending.written

    @property
    def left(self) -> int:
        """Tokens that may still be written."""
        return self.ending.limit - self.written

    @property
    def until_full(self) -> int:
        """Tokens after which its ids no longer fit into the window; all that are left where nothing limits it."""
        return self.left if self.window is None else self.window - len(self.ids) + 1

    @property
    def full(self) -> bool:
        """Whether its ids no longer fit into the window."""
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
        """Go on with a token."""
        finish = self.ending.push(token)
        self.ids.append(token)
        if self.past is not None:
            self.past.push([token])
        return Chunk(self.row, token, self.ending.take(), self.written, finish, *report, self.slid)


def adjusted(texts: Sequence[Text], logits: Tensor) -> Tensor:
    """Logits (B, V) after each text's rules and constraint, from which a token can be chosen; else a ModelError.

    All texts are of one vocabulary. Nothing is drawn or counted here: after an error it can be tried with fewer texts.
    """
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
        past = Past.joined([_past(text, logits) for text in texts])
    ready = apply_rules(logits, rules, past, [text.written for text in texts], eos_id)
    constraints = [text.ending.constraint for text in texts]
    if any(constraint is not None for constraint in constraints):
        every = torch.ones(logits.shape[-1], dtype=torch.bool)
        allowed = [every if each is None else each.allowed() for each in constraints]
        ready = ban(ready, ~torch.stack(allowed).to(ready.device))
    return ready


def _past(text: Text, logits: Tensor) -> Past:
    if text.past is None:
        text.past = Past([text.prompt.ids], logits.shape[-1], logits.device)
    return text.past


Agree = Callable[[list[int]], list[int]]  # what all processes choose that write the same texts (`LanguageModel.agree`)


def write(texts: Sequence[Text], logits: Tensor, ready: Tensor, agree: Agree) -> list[Chunk]:
    """Choose a token for each text from `ready` (B, V) logits, which the model gave as `logits`, and go on with it."""
    settings = [text.settings for text in texts]
    tokens = agree(choose(ready, settings, [0.0 if text.settings.greedy else text.uniform() for text in texts]))
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
