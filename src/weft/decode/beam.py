"""Beam search: the likeliest text, as far as keeping a few beginnings at a time can find it.

A text's score is its log-probability divided by a length penalty, since every further token lowers the sum; with a
coverage penalty, words of the source that were never looked at lower it too (Wu et al. 2016, §7). What ended is kept
apart, also where the model's window is full: read from a later place on, a text would have another log-probability.
When the search of a prompt is over, `Beam` says.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.decode.config import Beam
from weft.decode.generate import max_length, read_prompts
from weft.decode.prompt import Prompt, Prompts, check_prompts, choices, context_window
from weft.decode.sampling import Past, apply_rules, likeliest, log_total
from weft.decode.text import Completion, Detokenizer, Ending, Finish
from weft.errors import ConfigError, ModelError
from weft.models.base import EncoderInput, LanguageModel


@dataclass(frozen=True)
class Hypothesis:
    """A finished text: its ids without the prompt, log p of them all, and the score that penalties make of that."""

    ids: tuple[int, ...]
    logprob: float
    score: float
    finish: Finish


_Beginning = tuple[tuple[int, ...], Ending]  # a text that is still alive: its ids without the prompt, and when it ends
Candidate = tuple[float, int, int]  # log p of a beginning with one token more, which beginning, which token
# candidates of a step, best first; which of them each beam goes on with, −1 where it is empty
Watch = Callable[[Sequence[Candidate], Sequence[int]], None]
Replace = Callable[[int, tuple[int, ...]], Mapping[int, str]]  # of a prompt's number and a text's ids


def beam_search(
    model: LanguageModel,
    prompts: Prompts,
    settings: Beam,
    source: EncoderInput | None = None,
    watch: Watch | None = None,
) -> list[list[Hypothesis]]:
    """For each of `prompts`, of one vocabulary, or lists of ids, the `settings.n` best continuations, best first.

    A text ends as `Ending` says. Fewer than n come back only where fewer exist. Probabilities are those after the rules
    of `settings`. `watch` is shown every step of every search.
    """
    asked = [prompt if isinstance(prompt, Prompt) else Prompt(prompt) for prompt in prompts]
    check_prompts(model, asked, [settings] * len(asked))
    coverage, window = _Coverage(model) if settings.coverage_penalty else None, context_window(model)
    try:
        return _Batch(model, [_Search(each, settings, window, watch) for each in asked], source, coverage).run()
    finally:
        if coverage is not None:
            coverage.stop()


def search_texts(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    settings: Beam,
    source: EncoderInput | None = None,
    instead: Replace | None = None,
    watch: Watch | None = None,
) -> list[list[Completion]]:
    """For each prompt the `settings.n` best continuations as text, best first, without prompt and stop strings;
    `instead` gives texts that stand for some of its tokens, by place."""
    if not prompts:
        return []

    def completion(hypothesis: Hypothesis, row: int) -> Completion:
        prompt = prompts[row]
        assert prompt.tokenizer is not None
        text = Detokenizer(prompt.tokenizer, settings.stop, prompt.begun)
        # what ends a text is no part of it, also where it is an ordinary token
        ends = {prompt.eos_id, *prompt.stop_ids, *settings.stop_ids}
        shown = hypothesis.ids[:-1] if hypothesis.ids[-1] in ends else hypothesis.ids
        texts = {} if instead is None else instead(row, shown)
        if not any(text.push(token, texts.get(place)) for place, token in enumerate(shown)):
            text.end()
        return Completion(text.take(), len(hypothesis.ids), hypothesis.finish, score=hypothesis.score)

    found = beam_search(model, prompts, settings, source, watch)
    return [[completion(each, row) for each in some] for row, some in enumerate(found)]


class _Search:
    """One prompt's search: what is alive, beam by beam, and the best that ended."""

    def __init__(self, prompt: Prompt, settings: Beam, window: int | None, watch: Watch | None):
        self.prompt, self.settings, self.watch = prompt, settings, watch
        # without stop strings nobody has to know what the beams spell
        watched = prompt if settings.stop else replace(prompt, tokenizer=None)
        ending = Ending(watched, settings, window)
        self.alive: list[_Beginning | None] = [((), ending)]
        self.limit = ending.limit  # tokens that a text can have
        self.ended: list[Hypothesis] = []
        self.endings = 0  # how many ended, those that were not kept too
        self.over = False

    def advance(self, candidates: Sequence[Candidate], unseen: Sequence[float]) -> list[int]:
        """Take one step with the candidates, best first; which of them each of K beams goes on with, −1 for none.

        `unseen` is what each beam loses for words of the source that it hasn't looked at. A text that ended counts only
        if it stood among the K best: the others would not have been looked at either.
        """
        K = self.settings.beams
        kept: dict[int, _Beginning] = {}
        written = 0
        for place, (logprob, parent, token) in enumerate(candidates):
            if logprob == -torch.inf or len(kept) == K:
                break
            before = self.alive[parent]
            assert before is not None
            ids, ending = (*before[0], token), before[1].copy()
            finish, written = ending.push(token), len(ids)
            if finish is None:
                kept[place] = ids, ending
            elif place < K:
                score = logprob / self.settings.length_penalty.divisor(len(ids)) + unseen[parent]
                self.ended.append(Hypothesis(ids, logprob, score, finish))
                self.endings += 1
        self.ended.sort(key=lambda hypothesis: -hypothesis.score)
        del self.ended[K:]
        beams = _beams(candidates, list(kept), K)
        self.alive = [kept.get(place) for place in beams]
        if self.watch is not None:
            self.watch(candidates, beams)
        self.over = not kept or self._settled(candidates[next(iter(kept))][0], written + 1)
        if not kept and not self.ended:
            raise ModelError("no text is left to search: the model or the settings exclude every token here")
        return beams

    def _settled(self, best: float, length: int) -> bool:
        """Whether nothing that is alive, of which the best has log p `best`, can or will still be among the n best.
        What is alive can end with `length` tokens, or with more."""
        settings = self.settings
        if settings.beams == 1:
            return bool(self.ended)  # a single beam has no second choice
        if len(self.ended) < settings.n:
            return False
        if settings.patience is not None and self.endings >= settings.patience * settings.beams:
            return True
        if settings.settled == "likely" and len(self.ended) == settings.beams:
            return best / settings.length_penalty.divisor(length - 1) <= self.ended[-1].score
        # log p only falls from here, so a score is best at the next token, or at the last where length is rewarded;
        # and at best all of the source will have been looked at
        reach = max(best / settings.length_penalty.divisor(each) for each in (length, self.limit))
        return reach <= self.ended[settings.n - 1].score

    def allowed(self, width: int, size: int) -> Tensor:
        """(width, V): what the constraints of the beams allow."""
        mask = torch.ones(width, size, dtype=torch.bool)
        for row, beginning in zip(mask, self.alive, strict=False):
            if beginning is not None and (constraint := beginning[1].constraint) is not None:
                row.copy_(constraint.mask())  # of nothing: this beam leads nowhere; another may
        return mask


def _beams(candidates: Sequence[Candidate], kept: Sequence[int], beams: int) -> list[int]:
    """Which of the candidates that are `kept`, best first, each beam goes on with; −1 for an empty one. The best that
    goes on from a beam stays there, so that little has to be moved; the others go where one is free."""
    found, others = [-1] * beams, []
    for place in kept:
        parent = candidates[place][1]
        if found[parent] < 0:
            found[parent] = place
        else:
            others.append(place)
    free = (beam for beam in range(beams) if found[beam] < 0)
    for place, beam in zip(others, free, strict=False):
        found[beam] = place
    return found


class _Batch:
    """The searches of several prompts, which step together: `width` beams each, one before the first token, then K."""

    @torch.inference_mode()
    def __init__(
        self, model: LanguageModel, every: Sequence[_Search], source: EncoderInput | None, coverage: "_Coverage | None"
    ):
        self.model, self.settings, self.coverage, first = model, every[0].settings, coverage, every[0].prompt
        self.size, self.eos_id = choices(model, first.vocab_size), first.eos_id
        self.every, self.searches = every, list(every)  # all, and those that go on
        ids = [search.prompt.ids for search in every]
        limit = max_length(ids, max(search.limit for search in every), model)
        self.stepper, self.logits = read_prompts(model, ids, limit, source)
        self.device = self.logits.device
        if coverage is not None:
            coverage.begin([len(each) - 1 for each in ids])
        self.past = Past(ids, self.size, self.device) if self.settings.penalises else None
        self.width, self.written = 1, 0
        # log p of what is alive, (searches, width)
        self.scores = torch.zeros(len(ids), 1, dtype=torch.float64, device=self.device)

    @torch.inference_mode()
    def run(self) -> list[list[Hypothesis]]:
        while self._step():
            pass
        return [search.ended[: self.settings.n] for search in self.every]

    def _step(self) -> bool:
        # each beam ends in at most one way, so among twice as many candidates there are K to go on with
        few = 2 * self.settings.beams
        log_p, ids = self._likeliest(few)
        total = (self.scores.unsqueeze(-1) + log_p.view(*self.scores.shape, -1)).flatten(1)
        best, places = total.topk(min(few, total.shape[1]), dim=-1)
        parents, tokens = places // log_p.shape[1], ids.view(total.shape).gather(1, places)
        if self.model.shards > 1:
            agreed = self.model.agree([best.tolist(), parents.tolist(), tokens.tolist()])
            best, parents, tokens = best.new_tensor(agreed[0]), *(places.new_tensor(each) for each in agreed[1:])
        self.written += 1
        left_out = [[0.0] * self.width] * len(self.searches)
        if self.coverage is not None:
            # Σ log min(weight, 1) over the source: 0 where all of it was looked at, below where some was not
            seen = self.coverage.seen
            looked = seen.clamp(min=1e-9, max=1.0).log().where(seen > 0, 0.0).sum(dim=-1)
            left_out = (self.settings.coverage_penalty * looked).view(len(self.searches), self.width).tolist()
        found = zip(self.searches, left_out, best.tolist(), parents.tolist(), tokens.tolist(), strict=True)
        kept = [search.advance(list(zip(*row, strict=True)), unseen) for search, unseen, *row in found]
        stay = dict.fromkeys(place for place, search in enumerate(self.searches) if not search.over)
        if not stay:
            return False
        # few are moved: where one is left out among the first, one of the last stands
        last = [place for place in stay if place >= len(stay)]
        going = [place if place in stay else last.pop() for place in range(len(stay))]
        self.searches = [self.searches[place] for place in going]
        left = torch.tensor(going, device=self.device)
        candidates = torch.tensor([kept[place] for place in going], device=self.device)  # (searches left, K)
        alive = candidates.clamp(min=0)
        self.scores = best[left].gather(1, alive).masked_fill(candidates < 0, -torch.inf)
        rows = (left.unsqueeze(1) * self.width + parents[left].gather(1, alive)).flatten()
        self._read(rows, tokens[left].gather(1, alive).flatten())
        return True

    def _likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        rows, logits = len(self.logits), self.logits[:, : self.size]
        constrained = any(search.prompt.grammar is not None for search in self.searches)
        as_given = not self.settings.renormalise and (constrained or self.settings.changes_logits)
        if as_given:
            logits = logits.float()
            logits = logits - log_total(logits)
        ready = apply_rules(logits, [self.settings] * rows, self.past, [self.written] * rows, self.eos_id)
        if constrained:
            allowed = torch.cat([search.allowed(self.width, self.size) for search in self.searches])
            ready = ready.masked_fill(~allowed.to(self.device), -torch.inf)
        return likeliest(ready, count, normalised=as_given)

    def _read(self, rows: Tensor, tokens: Tensor) -> None:
        """Beam i goes on from row rows[i] with tokens[i]."""
        self.stepper.reorder(rows)
        if self.coverage is not None:
            self.coverage.seen = self.coverage.seen[rows]
        if self.past is not None:
            self.past.reorder(rows.tolist())
            self.past.push(tokens.tolist())
        self.width = self.settings.beams
        # forgets nothing: it gives the capacity of the searches that are over to the others
        self.stepper.truncate(max(len(search.prompt.ids) for search in self.searches) + self.written - 1)
        del self.logits  # the next ones need as much memory
        self.logits = self.stepper.step_between(tokens)
        if self.coverage is not None:
            self.coverage.add()


class _Coverage:
    """How much each word of the source was looked at so far, by every beam: (rows, source time)."""

    def __init__(self, model: LanguageModel):
        probabilities = model.alignment
        if probabilities is None:
            raise ConfigError("coverage_penalty: this model looks at no source; leave it out")
        if model.shards > 1:
            raise ConfigError("coverage_penalty: it looks at all heads, which several processes divide here; start one")
        self.seen = torch.empty(0)
        self.latest = torch.empty(0)  # of the last reading, (rows, time, source time), the mean of all heads
        self.stop = probabilities.watch(self._look)

    def _look(self, probabilities: Tensor) -> None:
        self.latest = probabilities.mean(dim=1) if probabilities.dim() == 4 else probabilities

    def begin(self, places: list[int]) -> None:
        """Count what the first token of each row was written with."""
        rows = torch.arange(len(places), device=self.latest.device)
        self.seen = self.latest[rows, torch.tensor(places, device=rows.device)].double()

    def add(self) -> None:
        """Count what the newest token is written with."""
        # beams of one source may have looked at it as queries of one row
        self.seen = self.seen + self.latest.reshape(self.seen.shape).double()
