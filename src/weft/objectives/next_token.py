"""The next token of running text: what GPT, LLaMA, recurrent and n-gram models learn."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

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
from weft.evaluate.sections import SectionScores, concatenate_scores, cut_sections, section_metrics
from weft.evaluate.unspelled import Spelling, spelling
from weft.models.base import LanguageModel
from weft.models.ngram import NGram
from weft.objectives.frame import TextFrame
from weft.objectives.text import TextObjective
from weft.objectives.tokens import TokenObjective
from weft.progress import Advance, bar
from weft.recipe import objective as config
from weft.training.loader import Loader, steps_of
from weft.training.objective import EVALUATED_TOKENS, Results

BASELINE_BYTES = 16_000_000  # of the training text, for the character frequencies
SAMPLES, SAMPLE_TOKENS = 3, 100


class NextToken(TokenObjective[config.NextToken], TextObjective[config.NextToken]):
    """Each token from those before it."""

    usage = "weft generate {run} --prompt 'Once upon'"
    frame: TextFrame | None = None  # around texts that are given to be evaluated; those that were held out have none

    @property
    def stored_frame(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Texts that are given stand apart by eos where their tokenizer puts nothing after one."""
        if self.frame is None:
            return None
        eos = () if self.tokenizer.eos_id is None else (self.tokenizer.eos_id,)
        return self.frame.before, self.frame.after or eos

    @cached_property
    def loader(self) -> Loader:
        if not self.recipe.batch.carry:
            return self.windows(self.length)
        # else rows continue those of the step before
        (text,), size = self.tokens("train"), self.recipe.batch.size or 1
        lanes = Lanes(len(text), self.length, size, self.recipe.seed)

        def make(step: int, rank: int, ranks: int) -> Batch:
            return lanes_batch(text, lanes, step - 1, rows=rank_samples(0, size, rank=rank, ranks=ranks))

        return replace(steps_of(self.recipe.batch, make, lambda step: step / lanes.steps, "sequence"), even=False)

    def _spelling(self, text: Tokens) -> Spelling:
        if text not in self._spellings:
            self._spellings[text] = spelling(text, self.tokenizer)
        return self._spellings[text]

    @cached_property
    def _spellings(self) -> WeakKeyDictionary[Tokens, Spelling]:
        """Found once: training evaluates the same text over and over."""
        return WeakKeyDictionary()

    @property
    def training_text(self) -> Tokens:
        return self.tokens("train")[0]

    @property
    def training_bytes(self) -> int | None:
        """How much text there is to train on, by what is stored; None where that is gone, or there never was any."""
        try:
            shards = [shard for place in self._places() for shard in Shards.open(place).of("train")]
        except DataError:
            return None
        return sum(shard.bytes for shard in shards) or None

    def evaluate(self, model: LanguageModel) -> dict[str, float]:
        return self.score(model, self.tokens("validation"), limit=self.recipe.evaluate.tokens).metrics()

    def sample(self, model: LanguageModel) -> list[str]:
        settings = Sampling(max_tokens=30, temperature=0.8, top_p=0.95)
        return [complete(model, [Prompt.of(self.tokenizer, "")], settings)[0].text]

    def score(self, model: LanguageModel, texts: Sequence[Tokens], *, limit: int | None = None) -> Score:
        """One score over several texts, each read in the windows that the model was trained on."""
        with bar("measuring", sum(map(len, texts)), wanted=limit is None) as advance:
            found = []
            for text in texts:
                parts = self.token_scores(model, text, limit=limit, progress=advance)
                found.append(self._paid(Score.of(parts, text, limit), text, model))
            return Score.total(found)

    def sections(
        self,
        model: LanguageModel,
        side: Side = "validation",
        *,
        most_bytes: int | None = None,
        stride: int | None = None,
    ) -> SectionScores:
        """What each section of a side's text costs; in all, what `score` has.

        A text has the same sections whatever the tokenizer and the model. With `most_bytes` its beginning is read, of
        several texts the same share of each, up to a section's border.
        """
        texts = self.tokens(side)
        share = 1.0 if most_bytes is None else min(1.0, most_bytes / sum(text.bytes for text in texts))
        cuts = [cut_sections(text, self.tokenizer, max_bytes=math.ceil(share * text.bytes)) for text in texts]
        found = []
        with bar("measuring", sum(each.tokens for each in cuts), wanted=most_bytes is None) as advance:
            for each, text in zip(cuts, texts, strict=True):
                parts = self.token_scores(model, text, limit=each.tokens, stride=stride, progress=advance)
                isolated, no_first = self._apart(model), self._abrupt(model)
                found.append(each.scores(parts, isolated_documents=isolated, no_first=no_first))
        return concatenate_scores(found)

    def costs(
        self, model: LanguageModel, side: Side = "validation", stride: int | None = None
    ) -> tuple[list[TextCosts], SectionScores]:
        """What each token of a side's texts costs, and what each section does."""
        texts, costs, found = self.tokens(side), [], []
        with bar("measuring", sum(map(len, texts))) as advance:
            for text in texts:
                parts = self.token_scores(model, text, stride=stride, progress=advance)
                costs.append(TextCosts.of(text, parts))
                isolated, no_first = self._apart(model), self._abrupt(model)
                sections = cut_sections(text, self.tokenizer)
                found.append(sections.scores([costs[-1].scores], isolated_documents=isolated, no_first=no_first))
        return costs, concatenate_scores(found)

    def token_scores(
        self,
        model: LanguageModel,
        text: Tokens,
        *,
        limit: int | None = None,
        stride: int | None = None,
        progress: Advance = lambda scored: None,
    ) -> Iterator[TokenScores]:
        """−log p of every token of a text, or of its first `limit` ones, batch by batch."""
        if isinstance(model, NGram):
            parts = iter([ngram_token_scores(model, text, limit=limit, unscored=self._unscored)])
        else:
            parts = token_scores(model, text, self._reading(stride), limit=limit)
        for part in parts:
            progress(len(part.nats))
            yield part

    def _apart(self, model: LanguageModel) -> bool:
        """Whether nothing predicts the first token of a document: documents don't see each other, nor what ends one."""
        return self.recipe.data.document_mask and not isinstance(model, NGram)  # n-grams know how a document begins

    def _abrupt(self, model: LanguageModel) -> bool:
        """Whether nothing predicts the first token of a text that is given, though others are predicted from it."""
        given = self.frame is not None and not self.frame.begins
        return given and not self._apart(model) and not isinstance(model, NGram)

    @property
    def _unscored(self) -> tuple[int, ...]:
        """Ids that are no part of a text: what stands before it, and what only keeps given texts apart."""
        if self.frame is None:
            return self.tokenizer.leading if self.tokenizer.adds_bos else ()
        _, ends = self.stored_frame or ((), ())
        return tuple(id for id in (*self.frame.before, *ends) if id not in self.frame.after)

    def _reading(self, stride: int | None) -> ScoringOptions:
        apart = self.recipe.data.document_mask
        first = self.tokenizer.eos_id if self.frame is None else next(iter(self.frame.precede), None)
        sizes, carry = (self.length, max(1, EVALUATED_TOKENS // self.length), stride), bool(self.recipe.batch.carry)
        first = None if apart else first
        return ScoringOptions(*sizes, first=first, document_mask=apart, carry=carry, unscored=self._unscored)

    def _paid(self, found: Score, text: Tokens, model: LanguageModel) -> Score:
        """A text's score with its unknown words and unspelled bytes; of a part of it, its share of them."""
        spelled = self._spelling(text)
        share = found.bytes / spelled.bytes if spelled.bytes else 0.0
        unpaid = spelled.unspelled + (spelled.begins if self._apart(model) else 0)
        return replace(found, unknown=round(share * spelled.unknown), unspelled=share * unpaid)

    def measure(self, model: LanguageModel, side: Side = "validation", stride: int | None = None) -> Results:
        """The metrics over all text of a side, their 95 % intervals, and how much text that is. `stride` makes windows
        overlap."""
        return Results(section_metrics(self.sections(model, side, stride=stride)))

    def final_evaluation(self, model: LanguageModel) -> Results:
        """The metrics over everything that was held out, beside what character frequencies give, and some texts."""
        metrics: dict[str, Any] = {}
        if self.holds_out:
            found = self.score(model, self.tokens("validation"))
            metrics = {**found.metrics(), "unknown_share": found.unknown_share}
            if (characters := self._character_baseline()) is not None:
                metrics["nats_per_character"] = found.spelled_nats / characters.characters
                metrics["baseline_bits_per_byte"] = characters.bits_per_byte
        settings = Sampling(max_tokens=SAMPLE_TOKENS, temperature=0.8, top_p=0.95)
        texts = complete(model, [Prompt.of(self.tokenizer, "")] * SAMPLES, settings)
        return Results(metrics, [text.text for text in texts])

    def _character_baseline(self) -> Baseline | None:
        """What character frequencies of the training text need for the held-out text, whatever the tokenizer.

        Tokens that don't spell the text tell nothing of its characters; then the text itself is read again, and where
        it is gone, or isn't what it was, there is no baseline.
        """
        exact = all(self._spelling(text).exact for text in self.tokens("validation"))
        texts = self._decoded if exact else self._read_again
        try:
            found = character_baseline(_first(BASELINE_BYTES, texts("train")), texts("validation"))
        except DataError:
            return None
        size = sum(text.bytes for text in self.tokens("validation"))
        # a token that two sections share is stored with the first of them, though its text is read again with both
        same = exact or 1000 * abs(found.bytes - size) <= size
        return found if same and found.characters else None

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


def _first(most: int, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield text
        most -= len(text.encode())
        if most <= 0:
            return
