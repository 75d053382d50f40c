"""Beam search: the likeliest text, as far as keeping a few beginnings at a time can find it.

A text's score is its log-probability divided by a length penalty, since every further token lowers the sum; with a
coverage penalty, words of the source that were never looked at lower it too (Wu et al. 2016, §7). What ended is kept
apart; the search of a prompt is over when no beginning that is still alive can reach the score of the worst
text that would be returned, however it went on.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from weft.decode.config import Beam
from weft.decode.generate import (
    Finish,
    check_prompts,
    chosen_size,
    device_of,
    longest_text,
    max_room,
    read_prompts,
)
from weft.decode.room import make_room
from weft.decode.sampling import check_logits
from weft.decode.shaping import Past, check_ids, needs_past, shaped
from weft.decode.writing import Completion, has_begun, prompt_ids, told
from weft.errors import ConfigError, ModelError
from weft.models.base import LanguageModel, Source
from weft.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Hypothesis:
    """A finished text: its ids without the prompt, log p of them all, and the score that penalties make of that."""

    ids: tuple[int, ...]
    logprob: float
    score: float
    finish: Finish


@dataclass
class _Search:
    """One prompt's search: what is alive, best first, and the best that ended."""

    prompt: int
    limit: int  # tokens that may be written
    alive: list[tuple[int, ...]]
    ended: list[Hypothesis]
    over: bool = False


Stops = Callable[[int, tuple[int, ...]], bool]  # a prompt's number, what was written after it


@torch.inference_mode()
def beam_search(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    settings: Beam,
    *,
    eos_id: int | None = None,
    vocab_size: int | None = None,
    source: Source | None = None,
    stops: Stops | None = None,
) -> list[list[Hypothesis]]:
    """For each of `prompts`, ragged lists of ids, the `settings.n` best continuations, best first.

    A text ends with `eos_id`, where `stops(prompt, ids)` says so, after `max_tokens` or where the model's window is
    full. Fewer than n come back only where fewer exist. Probabilities are those after the rules of `settings`,
    renormalised.
    """
    window = longest_text(model)
    check_prompts(model, prompts, window)
    size = chosen_size(model, vocab_size)
    check_ids([settings], size)
    watched = _Coverage(model) if settings.coverage_penalty else None
    try:
        return _search(model, prompts, settings, window, size, eos_id, source, stops, watched)
    finally:
        if watched is not None:
            watched.hook.remove()


def _search(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    settings: Beam,
    window: int | None,
    size: int,
    eos_id: int | None,
    source: Source | None,
    stops: Stops | None,
    watched: "_Coverage | None",
) -> list[list[Hypothesis]]:
    K = settings.beams
    device = device_of(model)
    limits = [settings.max_tokens if window is None else min(settings.max_tokens, window - len(p) + 1) for p in prompts]
    searches = [_Search(prompt, limit, [()], []) for prompt, limit in enumerate(limits)]
    everyone = list(searches)
    room = max_room([len(prompt) for prompt in prompts], [settings], window)
    state, logits = read_prompts(model, prompts, 1, room, source)
    if watched is not None:
        watched.begin([len(prompt) - 1 for prompt in prompts])
    past = Past(prompts, size, device) if needs_past([settings]) else None
    width = 1  # beams a prompt: one before the first token, then K
    scores = torch.zeros(len(prompts), 1, dtype=torch.float64, device=device)  # log p of what is alive, (B, width)
    count = 0
    while True:
        ready = shaped(logits[:, :size], [settings] * len(logits), past, count, eos_id)
        dead = ready.amax(dim=-1, keepdim=True) == -torch.inf  # nothing may follow: the beam is given up
        check_logits(ready.masked_fill(dead, 0.0))
        log_p = ready.log_softmax(dim=-1).masked_fill(dead, -torch.inf)
        count += 1
        # each beam ends in at most one way, so among twice as many candidates there are K to go on with
        total = scores.unsqueeze(-1) + log_p.double().view(len(searches), width, size)
        best, places = total.flatten(1).topk(min(2 * K, width * size), dim=-1)
        parents, tokens = places // size, places % size
        left_out = [[0.0] * width] * len(searches)
        if watched is not None:
            left_out = (settings.coverage_penalty * watched.log_seen().view(len(searches), width)).tolist()
        moves = [
            _advance(search, settings, row, unseen, eos_id, stops)
            for search, unseen, *row in zip(
                searches, left_out, best.tolist(), parents.tolist(), tokens.tolist(), strict=True
            )
        ]
        going = [place for place, search in enumerate(searches) if not search.over]
        if not going:
            return [search.ended[: settings.n] for search in everyone]
        kept = torch.tensor([moves[place] for place in going], device=device)  # (prompts left, K): candidates
        left, empty = torch.tensor(going, device=device), kept < 0
        kept = kept.clamp(min=0)
        scores = best[left].gather(1, kept).masked_fill(empty, -torch.inf)
        index = (left.unsqueeze(1) * width + parents[left].gather(1, kept)).flatten()
        newest = tokens[left].gather(1, kept).flatten()
        state.reorder(index)
        if watched is not None:
            watched.reorder(index)
        if past is not None:
            past.reorder(index)
            past.push(newest)
        searches = [searches[place] for place in going]
        width = K
        longest = max(len(prompts[search.prompt]) for search in searches) + count - 1
        if state.longest > longest:
            state.truncate(longest)  # forgets nothing: it gives the room of the searches that are over to the others
        make_room(state, 1, room)
        logits = model.step(newest.unsqueeze(1), state)[:, -1]
        if watched is not None:
            watched.add()


class _Coverage:
    """How much each word of the source was looked at so far, by every beam: (rows, source time)."""

    def __init__(self, model: LanguageModel):
        where = model.alignment
        if where is None:
            raise ConfigError("coverage_penalty: this model looks at no source; leave it out")
        self.seen = torch.empty(0)
        self.latest = torch.empty(0)  # weights of the last reading, (rows, time, source time), the mean of all heads
        self.hook = where.register_forward_hook(self._look)

    def _look(self, module: torch.nn.Module, given: object, weights: torch.Tensor) -> None:
        self.latest = weights.mean(dim=1) if weights.dim() == 4 else weights

    def begin(self, places: list[int]) -> None:
        """Count what the first token of each row was written with."""
        rows = torch.arange(len(places), device=self.latest.device)
        self.seen = self.latest[rows, torch.tensor(places, device=rows.device)].double()

    def add(self) -> None:
        """Count what the newest token is written with."""
        self.seen = self.seen + self.latest[:, -1].double()

    def reorder(self, index: torch.Tensor) -> None:
        self.seen = self.seen[index]

    def log_seen(self) -> torch.Tensor:
        """Σ log min(weight, 1) over the source: 0 where all of it was looked at, below where some was not. (rows,)"""
        return self.seen.clamp(min=1e-9, max=1.0).log().where(self.seen > 0, 0.0).sum(dim=-1)


def _advance(
    search: _Search,
    settings: Beam,
    row: Sequence[list[float] | list[int]],
    unseen: Sequence[float],
    eos_id: int | None,
    stops: Stops | None,
) -> list[int]:
    """Take one step with a prompt's candidates, best first; the K candidates that stay alive, −1 for an empty beam.

    `unseen` is what each beam loses for words of the source that it hasn't looked at.
    A text that ended counts only if it stood among the K best: the others would not have been looked at either.
    """
    K = settings.beams
    kept: list[int] = []
    alive: list[tuple[int, ...]] = []
    for place, (logprob, parent, token) in enumerate(zip(*row, strict=True)):
        if logprob == -torch.inf or len(kept) == K:
            break
        ids = (*search.alive[int(parent)], int(token))
        stopped = token != eos_id and stops is not None and stops(search.prompt, ids)
        full = len(ids) == search.limit
        finish: Finish | None = "eos" if token == eos_id else "stop" if stopped else "length" if full else None
        if finish is None:
            kept.append(place)
            alive.append(ids)
        elif place < K:
            divisor = settings.length_penalty.divisor(len(ids))
            score = logprob / divisor + unseen[int(parent)]
            search.ended.append(Hypothesis(ids, logprob, score, finish))
    search.ended.sort(key=lambda hypothesis: -hypothesis.score)
    del search.ended[K:]
    search.alive = alive
    search.over = not alive or _settled(search, settings, max(float(row[0][place]) for place in kept))
    if not alive and not search.ended:
        raise ModelError("no text is left to search: the model or the settings exclude every token here")
    return kept + [-1] * (K - len(kept))


def _settled(search: _Search, settings: Beam, best: float) -> bool:
    """Whether nothing that is alive, of which the best has log p `best`, can still be among the n best."""
    if settings.beams == 1:
        return bool(search.ended)  # a single beam has no second choice
    if len(search.ended) < settings.n:
        return False
    # log p only falls from here, so a score is best at the next token, or at the last where length is rewarded;
    # and at best all of the source will have been looked at
    lengths = (len(search.alive[0]) + 1, search.limit)
    reach = max(best / settings.length_penalty.divisor(length) for length in lengths)
    return reach <= search.ended[settings.n - 1].score


def search_texts(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str | Sequence[int]],
    settings: Beam,
    *,
    source: Source | None = None,
) -> list[list[Completion]]:
    """For each prompt the `settings.n` best continuations as text, best first, without prompt and stop strings."""
    if not prompts:
        return []

    begun = [has_begun(tokenizer, prompt) for prompt in prompts]

    def stops(prompt: int, ids: tuple[int, ...]) -> bool:
        text = told(tokenizer, ids, begun[prompt])
        return any(stop in text for stop in settings.stop)

    found = beam_search(
        model,
        [prompt_ids(tokenizer, prompt) for prompt in prompts],
        settings,
        eos_id=tokenizer.eos_id,
        vocab_size=tokenizer.vocab_size,
        source=source,
        stops=stops if settings.stop else None,
    )
    return [
        [_completion(tokenizer, hypothesis, settings.stop, going_on) for hypothesis in row]
        for row, going_on in zip(found, begun, strict=True)
    ]


def _completion(tokenizer: Tokenizer, hypothesis: Hypothesis, stop: Sequence[str], begun: bool) -> Completion:
    text = told(tokenizer, hypothesis.ids, begun)
    ends = [place for each in stop if (place := text.find(each)) >= 0]
    finish: Finish = "stop" if ends else hypothesis.finish
    return Completion(text[: min(ends)] if ends else text, len(hypothesis.ids), finish, score=hypothesis.score)
