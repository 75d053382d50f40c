"""One text from another: translation, summaries, answers."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from weft.data.batch import Batch
from weft.data.collate import pairs_batch, pairs_lengths
from weft.data.examples import Examples, in_chunks
from weft.data.shards import Side
from weft.data.table import Kind, Row
from weft.decode.config import Beam, Sampling
from weft.evaluate.translation import translated
from weft.models.base import LanguageModel
from weft.objectives.objective import Results
from weft.objectives.rows import Numbers, RowObjective
from weft.objectives.words import translate_texts, word_loss, word_metrics
from weft.progress import Advance
from weft.recipe import objective as config
from weft.training.objective import Loss

SHOWN = 5


class Pairs(RowObjective[config.Pairs]):
    """Columns of text, a source and a target."""

    usage = "weft translate {run} < lines.txt"

    def columns(self) -> Mapping[str, Kind]:
        return {self.settings.source: "text", self.settings.target: "text"}

    def row_texts(self, values: Mapping[str, Any], side: Literal["target", "source"]) -> Iterator[str]:
        yield values[self.settings.source if side == "source" else self.settings.target]

    def encode(self, rows: Iterable[Row]) -> Iterator[dict[str, Any]]:
        for chunk in in_chunks(rows):
            sources = self.tokenizers.source.encode_batch([row.values[self.settings.source] for row in chunk])
            targets = self.tokenizers.target.encode_batch([row.values[self.settings.target] for row in chunk])
            for source, target in zip(sources, targets, strict=True):
                yield {"source": source, "target": target}

    def lengths(self, examples: Examples) -> Numbers:
        return pairs_lengths(examples, self.length)

    def batch(self, examples: Examples, numbers: Numbers) -> Batch:
        target, source = self.tokenizers.target, self.tokenizers.source
        return pairs_batch(examples, numbers, target, source_tokenizer=source, length=self.length)

    def loss(self, model: LanguageModel, batch: Batch) -> Loss:
        """−log p of the target's tokens."""
        return word_loss(self.settings, model, batch)

    def metrics(self, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, Any]:
        """Loss and perplexity of the target's tokens."""
        return dict(word_metrics(self.settings, model, batches))

    def measure(self, model: LanguageModel, side: Side = "validation") -> Results:
        """The same, and how what greedy decoding writes compares with the targets."""
        examples = self.examples[side]
        sources = [self.tokenizers.source.decode(examples.ids("source", n).tolist()) for n in range(len(examples))]
        targets = [self.tokenizers.target.decode(examples.ids("target", n).tolist()) for n in range(len(examples))]
        written = self.translate(model, sources, Sampling(temperature=0.0, max_tokens=self.length))
        found = translated(written, targets)
        metrics = {
            **super().measure(model, side).metrics,
            **found.metrics(),
            "bleu_signature": found.bleu.signature,
            "decoding": "greedy",
        }
        return Results(metrics, [f"{sources[n]}\n→ {written[n]}" for n in range(min(SHOWN, len(written)))])

    def translate(
        self,
        model: LanguageModel,
        texts: Sequence[str],
        settings: Beam | Sampling | None = None,
        progress: Advance | None = None,
    ) -> list[str]:
        """What the model writes for each text, in their order; a blank text stays blank. Beam search by default."""
        return translate_texts(self, model, texts, settings, progress)
