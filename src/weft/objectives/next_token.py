"""The next token of running text: what GPT, LLaMA, recurrent and n-gram models learn."""

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

from weft.data.shards import Side, Tokens
from weft.decode.config import Sampling
from weft.decode.many import complete
from weft.decode.prompt import Prompt
from weft.evaluate.baseline import Baseline, character_baseline
from weft.evaluate.perplexity import Reading, Score, score, score_counts
from weft.models.base import LanguageModel
from weft.models.ngram import NGram
from weft.objectives.text import TextObjective
from weft.objectives.words import WordObjective
from weft.progress import bar
from weft.recipe import objective as config
from weft.training.loader import Loader
from weft.training.objective import EVALUATED_TOKENS, Results

BASELINE_TOKENS = 4_000_000  # of the training text, for the character frequencies
SAMPLES = 3


class NextToken(WordObjective[config.NextToken], TextObjective[config.NextToken]):
    """Each token from those before it."""

    usage = "weft generate {run} --prompt 'Once upon'"

    @cached_property
    def loader(self) -> Loader:
        return self.windows(self.length)

    @property
    def training_text(self) -> Tokens:
        """The text that an n-gram model counts."""
        return self.tokens("train")[0]

    def evaluate(self, model: LanguageModel) -> dict[str, float]:
        """Loss, perplexity and bits per byte."""
        return self.score(model, self.tokens("validation"), limit=self.recipe.evaluate.tokens).metrics()

    def sample(self, model: LanguageModel) -> list[str]:
        """A few words, to see in the report how they improve."""
        settings = Sampling(max_tokens=30, temperature=0.8, top_p=0.95)
        return [complete(model, [Prompt.of(self.tokenizer, "")], settings)[0].text]

    def score(
        self, model: LanguageModel, texts: Sequence[Tokens], *, limit: int | None = None, stride: int | None = None
    ) -> Score:
        """One score over several texts, each read in the windows that the model was trained on."""
        if isinstance(model, NGram):
            return Score.total(score_counts(model, text, limit=limit) for text in texts)
        apart = self.recipe.data.document_mask
        reading = Reading(
            self.length,
            max(1, EVALUATED_TOKENS // self.length),
            stride,
            first=None if apart else self.tokenizer.eos_id,
            document_mask=apart,
        )
        with bar("measuring", sum(map(len, texts)), wanted=limit is None) as advance:
            return Score.total(score(model, text, reading, limit=limit, progress=advance) for text in texts)

    def measure(self, model: LanguageModel, side: Side = "validation", stride: int | None = None) -> Results:
        """The metrics over all text of a side, and how much text that is. `stride` makes windows overlap."""
        found = self.score(model, self.tokens(side), stride=stride)
        return Results({**found.metrics(), "tokens": found.tokens, "bytes": found.bytes})

    def final_evaluation(self, model: LanguageModel) -> Results:
        """The metrics over everything that was held out, beside what character frequencies give, and some texts."""
        metrics: dict[str, Any] = {}
        if self.holds_out:
            found = self.score(model, self.tokens("validation"))
            characters = self._character_baseline()
            metrics = {
                **found.metrics(),
                "nats_per_character": found.nats / characters.characters if characters.characters else math.nan,
                "baseline_bits_per_byte": characters.bits_per_byte,
            }
        settings = Sampling(max_tokens=100, temperature=0.8, top_p=0.95)
        texts = complete(model, [Prompt.of(self.tokenizer, "")] * SAMPLES, settings)
        return Results(metrics, [text.text for text in texts])

    def _character_baseline(self) -> Baseline:
        """What character frequencies of the training text need for the held-out text."""

        def decoded(side: Side, most: int | None = None) -> Iterator[str]:
            for tokens in self.tokens(side):
                end = len(tokens) if most is None else min(most, len(tokens))
                for start in range(0, end, 1 << 16):
                    yield self.tokenizer.decode(tokens.read(start, min(1 << 16, end - start)).tolist())

        return character_baseline(decoded("train", BASELINE_TOKENS // len(self.corpora)), decoded("validation"))
