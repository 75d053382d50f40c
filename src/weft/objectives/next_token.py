"""Next-token prediction on running text: the objective of GPT, LLaMA, recurrent and n-gram models."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from weft.data.batch import Batch, lanes_batch
from weft.data.sampler import Lanes, rank_samples
from weft.data.shards import Shards, Side, Tokens
from weft.data.split import split_sections
from weft.decode.config import Sampling
from weft.decode.generate import complete
from weft.decode.prompt import Prompt
from weft.errors import DataError
from weft.evaluate.baseline import Baseline, character_baseline
from weft.evaluate.details import TextCosts
from weft.evaluate.perplexity import Score, ScoringOptions, TokenScores, ngram_token_scores, token_scores
from weft.evaluate.sections import Sections, SectionScores, concatenate_scores, cut_sections, section_metrics
from weft.evaluate.unspelled import Spelling, spelling
from weft.models.base import LanguageModel
from weft.models.config import Recurrent
from weft.models.ngram import NGram
from weft.objectives.frame import TextFrame
from weft.objectives.text import TextObjective
from weft.objectives.tokens import TokenObjective
from weft.progress import Advance, bar
from weft.recipe import objective as config
from weft.training.loader import Loader, even_loader
from weft.training.objective import EVALUATION_BATCH_TOKENS, Loss, Results

MAX_BASELINE_BYTES = 16_000_000  # of training text that character frequencies are counted in
SAMPLES, SAMPLE_TOKENS = 3, 100  # texts at the end of a run, and tokens of each


class NextToken(TokenObjective[config.NextToken], TextObjective[config.NextToken]):
    """Predict each token from those before it."""

    usage = "weft generate {run} --prompt 'Once upon'"
    frame: TextFrame | None = None  # of texts other than the run's that are evaluated; None for the held-out split

    def loss(self, model: LanguageModel, features: Tensor, batch: Batch) -> Loss:
        loss, count, extras = super().loss(model, features, batch)
        if self.settings.penalised:  # means over (batch, time, d_model), weighted like the tokens
            states, alpha, beta = features.float(), self.settings.activation_penalty, self.settings.temporal_penalty
            change = states.diff(dim=1) if states.shape[1] > 1 else torch.zeros_like(states)
            loss = loss + count * (alpha * states.square().mean() + beta * change.square().mean())
        return loss, count, extras

    @property
    def stored_frame(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The ids before and after each other text; eos separates them if the tokenizer puts nothing after one."""
        if self.frame is None:
            return None
        eos = () if self.tokenizer.eos_id is None else (self.tokenizer.eos_id,)
        return self.frame.before, self.frame.after or eos

    @cached_property
    def loader(self) -> Loader:
        model = self.recipe.model
        shares = isinstance(model, Recurrent) and bool(model.word_dropout or model.weight_drop)
        if not self.recipe.batch.carry:
            return replace(self.windows(self.length), shares_masks=shares)
        # with carried states the rows of a step continue those of the step before
        (text,), size = self.tokens("train"), self.recipe.batch.size or 1
        lanes = Lanes(len(text), self.length, size, self.recipe.seed, varied=self.recipe.batch.vary_length)

        def make(step: int, rank: int, ranks: int) -> Batch:
            return lanes_batch(text, lanes, step - 1, rows=rank_samples(0, size, rank=rank, ranks=ranks))

        loader = even_loader(self.recipe.batch, make, lambda step: step / lanes.steps, row="sequence")
        return replace(loader, shares_masks=shares)

    def _spelling(self, text: Tokens) -> Spelling:
        if text not in self._spellings:
            self._spellings[text] = spelling(text, self.tokenizer)
        return self._spellings[text]

    @cached_property
    def _spellings(self) -> WeakKeyDictionary[Tokens, Spelling]:
        """Cached: training evaluates the same text repeatedly."""
        return WeakKeyDictionary()

    @property
    def training_text(self) -> Tokens:
        """The text that an n-gram model counts."""
        return self.tokens("train")[0]

    @property
    def training_bytes(self) -> int | None:
        """Bytes of the stored training text; None if it is gone, or there never was any."""
        try:
            shards = [shard for folder in self._folders() for shard in Shards.open(folder).of("train")]
        except DataError:
            return None
        return sum(shard.bytes for shard in shards) or None

    def validation_metrics(self, model: LanguageModel, max_tokens: int | None) -> dict[str, float]:
        return self.score(model, self.tokens("validation"), limit=max_tokens).metrics()

    def sample(self, model: LanguageModel) -> list[str]:
        settings = Sampling(max_tokens=30, temperature=0.8, top_p=0.95)
        return [complete(model, [Prompt.of(self.tokenizer, "")], settings)[0].text]

    def score(self, model: LanguageModel, texts: Sequence[Tokens], *, limit: int | None = None) -> Score:
        """Return the total score of several texts, read in windows of the training length."""
        with bar("measuring", sum(map(len, texts)), enabled=limit is None) as advance:
            scores = []
            for text in texts:
                parts = self.token_scores(model, text, limit=limit, progress=advance)
                scores.append(self._with_unspelled(Score.of(parts, text, limit), text, model))
            return Score.total(scores)

    def sections(
        self,
        model: LanguageModel,
        side: Side = "validation",
        *,
        most_bytes: int | None = None,
        stride: int | None = None,
    ) -> SectionScores:
        """Return the cost of each section of a split's text; their sum is that of `score`.

        The sections do not depend on the tokenizer or the model. With `most_bytes` only the beginning is read, of
        several texts the same fraction of each, up to the end of a section.
        """
        texts = self.tokens(side)
        share = 1.0 if most_bytes is None else min(1.0, most_bytes / sum(text.bytes for text in texts))
        cuts = [cut_sections(text, self.tokenizer, max_bytes=math.ceil(share * text.bytes)) for text in texts]
        scores = []
        with bar("measuring", sum(sections.tokens for sections in cuts), enabled=most_bytes is None) as advance:
            for sections, text in zip(cuts, texts, strict=True):
                parts = self.token_scores(model, text, limit=sections.tokens, stride=stride, progress=advance)
                scores.append(self._section_scores(model, sections, parts))
        return concatenate_scores(scores)

    def costs(
        self, model: LanguageModel, side: Side = "validation", stride: int | None = None
    ) -> tuple[list[TextCosts], SectionScores]:
        """Return the cost of each token of a split's texts, and that of each section."""
        texts, costs, scores = self.tokens(side), [], []
        with bar("measuring", sum(map(len, texts))) as advance:
            for text in texts:
                parts = self.token_scores(model, text, stride=stride, progress=advance)
                costs.append(TextCosts.of(text, parts))
                sections = cut_sections(text, self.tokenizer)
                scores.append(self._section_scores(model, sections, [costs[-1].scores]))
        return costs, concatenate_scores(scores)

    def token_scores(
        self,
        model: LanguageModel,
        text: Tokens,
        *,
        limit: int | None = None,
        stride: int | None = None,
        progress: Advance = lambda scored: None,
    ) -> Iterator[TokenScores]:
        """Yield −log p of every token of a text, or of its first `limit` tokens, batch by batch."""
        if isinstance(model, NGram):
            parts = iter([ngram_token_scores(model, text, limit=limit, unscored=self._unscored)])
        else:
            parts = token_scores(model, text, self._reading(stride), limit=limit)
        for part in parts:
            progress(len(part.nats))
            yield part

    def _isolates_documents(self, model: LanguageModel) -> bool:
        """Return whether a document's first token is not predicted, because documents do not attend to each other."""
        return self.recipe.data.document_mask and not isinstance(model, NGram)  # n-grams model a document's beginning

    def _section_scores(self, model: LanguageModel, sections: Sections, parts: Iterable[TokenScores]) -> SectionScores:
        isolated = self._isolates_documents(model)
        bare = self.frame is not None and not self.frame.begins  # no id precedes the first token of another text
        no_first = bare and not isolated and not isinstance(model, NGram)
        return sections.scores(parts, isolated_documents=isolated, no_first=no_first)

    @property
    def _unscored(self) -> tuple[int, ...]:
        """Ids that are not part of a text: those before it, and those that only separate other texts."""
        if self.frame is None:
            return self.tokenizer.leading if self.tokenizer.adds_bos else ()
        _, ends = self.stored_frame or ((), ())
        return tuple(id for id in (*self.frame.before, *ends) if id not in self.frame.after)

    def _reading(self, stride: int | None) -> ScoringOptions:
        apart = self.recipe.data.document_mask
        first = self.tokenizer.eos_id if self.frame is None else next(iter(self.frame.precede), None)
        sizes = self.length, max(1, EVALUATION_BATCH_TOKENS // self.length), stride
        first, carry = None if apart else first, bool(self.recipe.batch.carry)
        return ScoringOptions(*sizes, first=first, document_mask=apart, carry=carry, unscored=self._unscored)

    def _with_unspelled(self, score: Score, text: Tokens, model: LanguageModel) -> Score:
        """Return a score with the text's unknown words and unspelled bytes, in proportion to the part that was read."""
        spelled = self._spelling(text)
        share = score.bytes / spelled.bytes if spelled.bytes else 0.0
        unspelled = spelled.unspelled + (spelled.begins if self._isolates_documents(model) else 0)
        return replace(score, unknown=round(share * spelled.unknown), unspelled=share * unspelled)

    def measure(self, model: LanguageModel, side: Side = "validation", stride: int | None = None) -> Results:
        """Return the metrics over all text of a split, with 95 % intervals. Windows advance by `stride` tokens."""
        return Results(section_metrics(self.sections(model, side, stride=stride)))

    def final_evaluation(self, model: LanguageModel) -> Results:
        """Return the metrics on the whole held-out split, a baseline of character frequencies, and generated texts."""
        metrics: dict[str, Any] = {}
        if self.holds_out:
            score = self.score(model, self.tokens("validation"))
            metrics = {**score.metrics(), "unknown_share": score.unknown_share}
            if (characters := self._character_baseline()) is not None:
                metrics["nats_per_character"] = score.spelled_nats / characters.characters
                metrics["baseline_bits_per_byte"] = characters.bits_per_byte
        settings = Sampling(max_tokens=SAMPLE_TOKENS, temperature=0.8, top_p=0.95)
        texts = complete(model, [Prompt.of(self.tokenizer, "")] * SAMPLES, settings)
        return Results(metrics, [text.text for text in texts])

    def _character_baseline(self) -> Baseline | None:
        """Return the cost of the held-out text under the character frequencies of the training text. If the tokens do
        not spell the text exactly, its sources are read again; None if they are gone or have changed."""
        exact = all(self._spelling(text).exact for text in self.tokens("validation"))
        texts = self._decoded if exact else self._read_again
        try:
            baseline = character_baseline(_first(MAX_BASELINE_BYTES, texts("train")), texts("validation"))
        except DataError:
            return None
        size = sum(text.bytes for text in self.tokens("validation"))
        # a token that two sections share is stored with the first, but its text is read again with both
        same = exact or 1000 * abs(baseline.bytes - size) <= size
        return baseline if same and baseline.characters else None

    def _decoded(self, side: Side) -> Iterator[str]:
        for tokens in self.tokens(side):
            for start in range(0, len(tokens), 1 << 16):
                yield self.tokenizer.decode(tokens.read(start, min(1 << 16, len(tokens) - start)).tolist())

    def _read_again(self, side: Side) -> Iterator[str]:
        data = self.recipe.data
        for part in data.parts:
            if part.prepared is not None:
                raise DataError(f"{part.prepared}: tokens alone")
            yield from (section.text for section in split_sections(data.text(part)) if section.side == side)


def _first(max_bytes: int, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield text
        max_bytes -= len(text.encode())
        if max_bytes <= 0:
            return
