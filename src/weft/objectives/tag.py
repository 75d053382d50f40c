"""One of several labels for every word."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.data.batch import Batch, framed, framed_lengths
from weft.data.examples import Examples
from weft.data.shards import Side
from weft.data.table import Kind, Row, RowSource, has_lines, read_rows, read_texts
from weft.errors import ConfigError, DataError
from weft.models.base import LanguageModel
from weft.objectives.classify import classification_metrics
from weft.objectives.rows import Numbers, RowObjective, check_finite, head_outputs, named, read_framed
from weft.progress import bar
from weft.recipe import objective as config
from weft.text.tokenizer import Tokenizer
from weft.training.objective import Prediction, Results


class Tag(RowObjective[config.Tag]):
    """Two columns with as many entries each: words, and their tags. A word's first token carries its tag."""

    usage = "weft classify {run} < lines.txt"
    label_field = "tags"

    def columns(self) -> Mapping[str, Kind]:
        return {self.settings.words: "words", self.settings.tags: "words"}

    def row_texts(self, values: Mapping[str, Any], side: Literal["target", "source"]) -> Iterator[str]:
        if side == "target":
            yield " ".join(values[self.settings.words])

    def encode(self, rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
        for row in rows:
            words, tags = row.values[self.settings.words], row.values[self.settings.tags]
            numbers = [self.label_ids.number(tag, row) for tag in tags]
            with named(row):
                example = tagged_example(self.tokenizer, words, numbers)
            yield example

    def lengths(self, examples: Examples) -> Numbers:
        return framed_lengths(examples, ("first",), self.frame, length=self.length)

    def batch(self, examples: Examples, numbers: Numbers) -> Batch:
        """Sentences with targets (B, T) that count at the first token of each word alone."""
        first = [examples.ids("first", n).tolist() for n in numbers]
        tokens, mask, _ = framed(first, None, self.frame, length=self.length)
        most, before = self.frame.text_length(self.length), len(self.frame.before)
        tags = np.full(tuple(tokens.shape), -1, dtype=np.int64)
        for at, n in enumerate(numbers):
            marks = examples.ids("tags", n)[:most]
            tags[at, before : before + len(marks)] = marks
        return Batch(tokens, torch.from_numpy(np.maximum(tags, 0)), loss_mask=torch.from_numpy(tags >= 0), mask=mask)

    def output_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """−log p of the label at each place that the loss mask keeps; targets (B, T) int64."""
        assert batch.loss_mask is not None
        losses = F.cross_entropy(outputs.flatten(0, 1), batch.targets.flatten(), reduction="none")
        return torch.where(batch.loss_mask.flatten(), losses, 0.0).sum()

    def measure(self, model: LanguageModel, side: Side = "validation") -> Results:
        return Results(self.metrics(model, self.batches(side), whole=True))

    def metrics(self, model: LanguageModel, batches: Iterable[Batch], *, whole: bool = False) -> dict[str, Any]:
        outputs = (
            (logits, batch.targets if batch.loss_mask is None else batch.targets.masked_fill(~batch.loss_mask, -1))
            for logits, batch in head_outputs(model, batches)
        )
        return classification_metrics(outputs, self.labels, whole=whole)

    def predict(self, model: LanguageModel, sentences: Sequence[Sequence[str]]) -> list[list[tuple[str, float]]]:
        """The likeliest tag of each word of each sentence, with its probability."""
        return [[self._likeliest(word) for word in words] for words in self.outputs(model, sentences)]

    def predictions(
        self, model: LanguageModel, file: str, column: str | None = None, second: str | None = None
    ) -> Iterator[Prediction]:
        """A tag for each word; in lines of text, words are what spaces divide."""
        if second is not None:
            raise ConfigError(f"--second {second}: {self.folder.path} tags the words of one text")
        if has_lines(file):
            sentences = [text.split() for text in read_texts(file, column)]
        else:
            name = column or self.settings.words
            sentences = [row.values[name] for row in read_rows(RowSource([file], {name: "words"}))]
        for words, found in zip(sentences, self.predict(model, sentences), strict=True):
            line = " ".join(f"{word}/{tag}" for word, (tag, _) in zip(words, found, strict=True))
            tags, probabilities = [tag for tag, _ in found], [share for _, share in found]
            yield Prediction(line, {"words": words, "tags": tags, "probabilities": probabilities})

    def _likeliest(self, logits: npt.NDArray[np.float32]) -> tuple[str, float]:
        """The tag with the largest of some logits (labels,), and its probability."""
        check_finite(logits, self.folder.path)
        best = int(logits.argmax())
        return self.labels[best], float(torch.from_numpy(logits).softmax(-1)[best])

    def outputs(self, model: LanguageModel, sentences: Sequence[Sequence[str]]) -> list[npt.NDArray[np.float32]]:
        """The head's logits (words, labels) for the words of each sentence; longer ones are read in parts."""
        found = [np.zeros((len(words), len(self.labels)), dtype=np.float32) for words in sentences]
        most, before = self.frame.text_length(self.length), len(self.frame.before)
        examples = [tagged_example(self.tokenizer, words, range(len(words))) for words in sentences]
        parts = [(number, *part) for number, example in enumerate(examples) for part in _parts(example, most)]
        with bar("tagging words", sum(len(words) for words in sentences)) as advance:
            for some, answers in read_framed(self, model, [ids for _, ids, _ in parts]):
                for n, logits in zip(some, answers, strict=True):
                    number, _, words = parts[n]
                    for word, at in words.items():
                        found[number][word] = logits[before + at]
                advance(sum(len(parts[n][2]) for n in some))
        return found


def tagged_example(tokenizer: Tokenizer, words: Sequence[str], tags: Sequence[int]) -> dict[str, list[int]]:
    """The tokens of a sentence, and for each the tag of the word that it begins, -1 where it begins none. The words are
    joined by spaces and tokenized as any text is; a token belongs to the word in which it ends."""
    if len(words) != len(tags):
        raise DataError(f"{len(words)} words have {len(tags)} tags; each word needs one")
    text = " ".join(words)
    word_at = [number for number, word in enumerate(words) for _ in range(len(word) + 1)]  # by character
    ids, marks, begun = list[int](), list[int](), set[int]()
    for token in tokenizer.token_spans(text):
        word = word_at[token.end - 1] if token.end and not text[token.end - 1].isspace() else None
        ids.append(token.id)
        marks.append(-1 if word is None or word in begun else tags[word])
        begun |= set() if word is None else {word}
    lost = [repr(word) for number, word in enumerate(words) if number not in begun]
    if lost:
        raise DataError(f"a word that the tokenizer makes no token of: {lost[0]}")
    return {"first": ids, "tags": marks}


def _parts(example: Mapping[str, Sequence[int]], most: int | None) -> Iterator[tuple[list[int], dict[int, int]]]:
    """A sentence in parts of up to `most` tokens, cut between words: their tokens, and where each word begins."""
    ids, marks = list(example["first"]), list(example["tags"])
    begin = 0
    while begin < len(ids):
        end = len(ids) if most is None else min(len(ids), begin + most)
        if end < len(ids):  # a word that is longer than a whole part is cut itself
            end = next((at for at in range(end, begin, -1) if marks[at] >= 0), end)
        yield ids[begin:end], {word: at for at, word in enumerate(marks[begin:end]) if word >= 0}
        begin = end
