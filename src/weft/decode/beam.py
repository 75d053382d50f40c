"""Beam search: approximate the likeliest text by keeping a few prefixes at each step.

A text's score is its log-probability divided by a length penalty, since every token lowers the sum. A coverage penalty
also lowers it for source tokens without attention (Wu et al. 2016, §7). Texts that ended are kept apart, as are texts
that fill the model's window: with a slid window, log-probabilities would differ. `Beam` describes when a search ends.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from weft.decode.config import Beam
from weft.decode.generate import max_length, prefill
from weft.decode.prompt import Prompt, Prompts, as_prompts, check_prompts, context_window, output_vocab_size
from weft.decode.sampling import PenaltyHistory, apply_rules, logsumexp, top_log_probs
from weft.decode.text import Completion, Detokenizer, Finish, StopCondition
from weft.errors import ConfigError, ModelError
from weft.models.base import EncoderInput, LanguageModel
from weft.progress import pause


@dataclass(frozen=True)
class Hypothesis:
    """A finished text: its ids without the prompt, their log p, and the score after penalties."""

    ids: tuple[int, ...]
    logprob: float
    score: float
    finish: Finish


_Prefix = tuple[tuple[int, ...], StopCondition]  # a live text: its ids without the prompt, and when it ends
Candidate = tuple[float, int, int]  # log p of a prefix with one more token, the beam of the prefix, the token
# called with the candidates of a step, best first, and the index of the candidate that each beam continues, −1 for none
StepCallback = Callable[[Sequence[Candidate], Sequence[int]], None]
# called with a prompt's index and a text's ids; returns texts that replace tokens, by position
Replacements = Callable[[int, tuple[int, ...]], Mapping[int, str]]


def beam_search(
    model: LanguageModel,
    prompts: Prompts,
    settings: Beam,
    *,
    source: EncoderInput | None = None,
    on_step: StepCallback | None = None,
) -> list[list[Hypothesis]]:
    """Return the `settings.n` best continuations of each prompt, best first; prompts, or ids, are of one vocabulary.

    Fewer than n are returned only if fewer exist. Probabilities are those after the rules. Every step calls `on_step`.
    """
    checked = as_prompts(prompts)
    check_prompts(model, checked, [settings] * len(checked))
    coverage, window = _Coverage(model) if settings.coverage_penalty else None, context_window(model)
    try:
        searches = [_PromptSearch(prompt, settings, window, on_step=on_step) for prompt in checked]
        return _SearchBatch(model, searches, source, coverage=coverage).run()
    finally:
        if coverage is not None:
            coverage.stop()


def search_texts(
    model: LanguageModel,
    prompts: Sequence[Prompt],
    settings: Beam,
    *,
    source: EncoderInput | None = None,
    replacements: Replacements | None = None,
) -> list[list[Completion]]:
    """Return the `settings.n` best continuations of each prompt as text, best first, without stop strings."""
    if not prompts:
        return []

    def completion(hypothesis: Hypothesis, row: int) -> Completion:
        prompt = prompts[row]
        assert prompt.tokenizer is not None
        text = Detokenizer(prompt.tokenizer, settings.stop, prompt.mid_text)
        # the token that ends a text is not part of it, even if it is an ordinary token
        ends = {prompt.eos_id, *prompt.stop_ids, *settings.stop_ids}
        ids = hypothesis.ids[:-1] if hypothesis.ids[-1] in ends else hypothesis.ids
        replaced = {} if replacements is None else replacements(row, ids)
        if not any(text.push(token, replaced.get(position)) for position, token in enumerate(ids)):
            text.end()
        return Completion(text.take(), len(hypothesis.ids), hypothesis.finish, score=hypothesis.score)

    rows = beam_search(model, prompts, settings, source=source)
    return [[completion(each, row) for each in hypotheses] for row, hypotheses in enumerate(rows)]


class _PromptSearch:
    """The search of one prompt: the live prefix of each beam, and the best texts that ended."""

    def __init__(self, prompt: Prompt, settings: Beam, window: int | None, *, on_step: StepCallback | None):
        self.prompt, self.settings, self.on_step = prompt, settings, on_step
        # without stop strings, beams need not be detokenised
        condition = StopCondition(prompt if settings.stop else replace(prompt, tokenizer=None), settings, window)
        self.alive: list[_Prefix | None] = [((), condition)]
        self.limit = condition.limit  # maximum number of tokens of a text
        self.ended: list[Hypothesis] = []
        self.ended_count = 0  # including texts that were not kept
        self.over = False

    def advance(self, candidates: Sequence[Candidate], coverage: Sequence[float]) -> list[int]:
        """Take a step with the candidates, best first, and the beams' penalties; return what each beam continues."""
        K, kept, length = self.settings.beams, dict[int, _Prefix](), 0
        for index, (logprob, parent, token) in enumerate(candidates):
            if logprob == -torch.inf or len(kept) == K:
                break
            prefix = self.alive[parent]
            assert prefix is not None
            ids, condition = (*prefix[0], token), prefix[1].copy()
            finish, length = condition.push(token), len(ids)
            if finish is None:
                kept[index] = ids, condition
            elif index < K:  # an ended text counts only if it is among the K best candidates
                score = logprob / self.settings.length_penalty.divisor(len(ids)) + coverage[parent]
                self.ended.append(Hypothesis(ids, logprob, score, finish=finish))
                self.ended_count += 1
        self.ended.sort(key=lambda hypothesis: -hypothesis.score)
        del self.ended[K:]
        beams = _assign_beams(candidates, list(kept), K)
        self.alive = [kept.get(index) for index in beams]
        if self.on_step is not None:
            self.on_step(candidates, beams)
        self.over = not kept or self._settled(candidates[next(iter(kept))][0], length + 1)
        if not kept and not self.ended:
            raise ModelError("no text is left to search: the model or the settings exclude every token here")
        return beams

    def _settled(self, best: float, length: int) -> bool:
        """Return whether no live prefix can, or is likely to, still become one of the n best texts.

        The best of them has log p `best`, and they can end with `length` tokens or more.
        """
        settings = self.settings
        if settings.beams == 1:
            return bool(self.ended)  # a single beam has no second choice
        if len(self.ended) < settings.n:
            return False
        if settings.patience is not None and self.ended_count >= settings.patience * settings.beams:
            return True
        if settings.settled == "likely" and len(self.ended) == settings.beams:
            return best / settings.length_penalty.divisor(length - 1) <= self.ended[-1].score
        # log p can only fall: the score is best at the next token, or, where length is rewarded, at the last one
        bound = max(best / settings.length_penalty.divisor(each) for each in (length, self.limit))
        return bound <= self.ended[settings.n - 1].score

    def allowed(self, width: int, vocab_size: int) -> Tensor:
        """Mask (width, V) of the tokens that the beams' constraints allow."""
        mask = torch.ones(width, vocab_size, dtype=torch.bool)
        for row, prefix in zip(mask, self.alive, strict=False):
            if prefix is not None and (constraint := prefix[1].constraint) is not None:
                row.copy_(constraint.mask())  # may be empty: this beam dies, others may continue
        return mask


def _assign_beams(candidates: Sequence[Candidate], kept: Sequence[int], beams: int) -> list[int]:
    """Return which of the `kept` candidates, best first, each beam continues; −1 for an empty beam.

    The best continuation of a beam stays in it, so that few rows of the KV cache move; the others take free beams.
    """
    result, others = [-1] * beams, []
    for index in kept:
        parent = candidates[index][1]
        if result[parent] < 0:
            result[parent] = index
        else:
            others.append(index)
    free = (beam for beam in range(beams) if result[beam] < 0)
    for index, beam in zip(others, free, strict=False):
        result[beam] = index
    return result


class _SearchBatch:
    """Searches of several prompts that step together, with `width` beams each: one before the first token, then K."""

    @torch.inference_mode()
    def __init__(
        self,
        model: LanguageModel,
        searches: Sequence[_PromptSearch],
        source: EncoderInput | None,
        *,
        coverage: "_Coverage | None",
    ):
        first = searches[0].prompt
        self.model, self.settings, self.coverage = model, searches[0].settings, coverage
        self.vocab_size, self.eos_id = output_vocab_size(model, first.vocab_size), first.eos_id
        self.all_searches, self.searches = searches, list(searches)  # the latter are not over
        ids = [search.prompt.ids for search in searches]
        limit = max_length(ids, max(search.limit for search in searches), model)
        self.stepper, self.logits = prefill(model, ids, limit, source=source)
        self.device = self.logits.device
        if coverage is not None:
            coverage.begin([len(each) - 1 for each in ids])
        self.history = PenaltyHistory(ids, self.vocab_size, self.device) if self.settings.penalises else None
        self.width, self.written = 1, 0
        # log p of the live prefixes, (searches, width)
        self.scores = torch.zeros(len(ids), 1, dtype=torch.float64, device=self.device)

    @torch.inference_mode()
    def run(self) -> list[list[Hypothesis]]:
        while self._step():
            pause()
        return [search.ended[: self.settings.n] for search in self.all_searches]

    def _step(self) -> bool:
        # a beam has one way to end, so among 2K candidates there are K to continue
        count = 2 * self.settings.beams
        log_p, ids = self._likeliest(count)
        total = (self.scores.unsqueeze(-1) + log_p.view(*self.scores.shape, -1)).flatten(1)
        best, index = total.topk(min(count, total.shape[1]), dim=-1)
        parents, tokens = index // log_p.shape[1], ids.view(total.shape).gather(1, index)
        if self.model.shards > 1:
            agreed = self.model.agree([best.tolist(), parents.tolist(), tokens.tolist()])
            best, parents, tokens = best.new_tensor(agreed[0]), *(index.new_tensor(each) for each in agreed[1:])
        self.written += 1
        penalties = [[0.0] * self.width] * len(self.searches)
        if self.coverage is not None:
            # Σ log min(attention, 1) over the source: 0 if all of it was attended to, negative otherwise
            attention = self.coverage.total
            log_sum = attention.clamp(min=1e-9, max=1.0).log().where(attention > 0, 0.0).sum(dim=-1)
            penalties = (self.settings.coverage_penalty * log_sum).view(len(self.searches), self.width).tolist()
        results = zip(self.searches, penalties, best.tolist(), parents.tolist(), tokens.tolist(), strict=True)
        beams = [search.advance(list(zip(*row, strict=True)), coverage) for search, coverage, *row in results]
        live = dict.fromkeys(row for row, search in enumerate(self.searches) if not search.over)
        if not live:
            return False
        # few rows move: a search from the end takes the row of one that is over
        last = [row for row in live if row >= len(live)]
        order = [row if row in live else last.pop() for row in range(len(live))]
        self.searches = [self.searches[row] for row in order]
        left = torch.tensor(order, device=self.device)
        candidates = torch.tensor([beams[row] for row in order], device=self.device)  # (live searches, K)
        alive = candidates.clamp(min=0)
        self.scores = best[left].gather(1, alive).masked_fill(candidates < 0, -torch.inf)
        rows = (left.unsqueeze(1) * self.width + parents[left].gather(1, alive)).flatten()
        self._read(rows, tokens[left].gather(1, alive).flatten())
        return True

    def _likeliest(self, count: int) -> tuple[Tensor, Tensor]:
        rows, logits = len(self.logits), self.logits[:, : self.vocab_size]
        constrained = any(search.prompt.grammar is not None for search in self.searches)
        normalised = not self.settings.renormalise and (constrained or self.settings.changes_logits)
        if normalised:  # before the rules: they keep the model's log-probabilities of the tokens they allow
            logits = logits.float()
            logits = logits - logsumexp(logits)
        rules, written = [self.settings] * rows, [self.written] * rows
        adjusted = apply_rules(logits, rules, written, history=self.history, eos_id=self.eos_id)
        if constrained:
            allowed = torch.cat([search.allowed(self.width, self.vocab_size) for search in self.searches])
            adjusted = adjusted.masked_fill(~allowed.to(self.device), -torch.inf)
        return top_log_probs(adjusted, count, normalised)

    def _read(self, rows: Tensor, tokens: Tensor) -> None:
        """Make beam i continue from row rows[i] with tokens[i]."""
        self.stepper.reorder(rows)
        if self.coverage is not None:
            self.coverage.total = self.coverage.total[rows]
        if self.history is not None:
            self.history.reorder(rows.tolist())
            self.history.push(tokens.tolist())
        self.width = self.settings.beams
        # drops no token: it frees the capacity of the searches that are over for the others
        self.stepper.truncate(max(len(search.prompt.ids) for search in self.searches) + self.written - 1)
        del self.logits  # free the memory before the next logits are allocated
        self.logits = self.stepper.step_between(tokens)
        if self.coverage is not None:
            self.coverage.add()


class _Coverage:
    """Sum of the attention probabilities of each source token so far, for every beam: (rows, source time)."""

    def __init__(self, model: LanguageModel):
        probabilities = model.alignment
        if probabilities is None:
            raise ConfigError("coverage_penalty: this model has no attention to a source; leave it out")
        if model.shards > 1:
            raise ConfigError("coverage_penalty: needs all heads in one process, but they are sharded; use one process")
        self.total = torch.empty(0)
        self.latest = torch.empty(0)  # of the last forward pass, (rows, time, source time), mean over heads
        self.stop = probabilities.watch(self._record)

    def _record(self, probabilities: Tensor) -> None:
        self.latest = probabilities.mean(dim=1) if probabilities.dim() == 4 else probabilities

    def begin(self, positions: list[int]) -> None:
        """Set the totals to the attention at the last position of each prompt."""
        rows = torch.arange(len(positions), device=self.latest.device)
        self.total = self.latest[rows, torch.tensor(positions, device=rows.device)].double()

    def add(self) -> None:
        """Add the attention of the newest token."""
        # beams of one source may have been queries of one row
        self.total = self.total + self.latest.reshape(self.total.shape).double()
