"""Tagging: one of several labels for every word."""

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
from weft.objectives.rows import Numbers, RowObjective, head_outputs, naming_row, read_framed
from weft.progress import bar
from weft.recipe import objective as config
from weft.text.tokenizer import Tokenizer
from weft.training.objective import Prediction, Results


class Tag(RowObjective[config.Tag]):
    """−log p of the tag of every word, at the word's first token, from a column of words and a column of tags."""

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
            with naming_row(row):
                example = tagged_example(self.tokenizer, words, numbers)
            yield example

    def lengths(self, examples: Examples) -> Numbers:
        return framed_lengths(examples, ("first",), self.frame, length=self.length)

    def batch(self, examples: Examples, numbers: Numbers) -> Batch:
        """Return sentences with targets (B, T) that count only at the first token of each word."""
        first = [examples.ids("first", n).tolist() for n in numbers]
        tokens, mask, _ = framed(first, None, self.frame, length=self.length)
        max_length, before = self.frame.text_length(self.length), len(self.frame.before)
        tags = np.full(tuple(tokens.shape), -1, dtype=np.int64)
        for row, n in enumerate(numbers):
            ids = examples.ids("tags", n)[:max_length]
            tags[row, before : before + len(ids)] = ids
        return Batch(tokens, torch.from_numpy(np.maximum(tags, 0)), loss_mask=torch.from_numpy(tags >= 0), mask=mask)

    def output_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return −log p of the labels that the loss mask selects; targets (B, T) int64."""
        assert batch.loss_mask is not None
        losses = F.cross_entropy(outputs.flatten(0, 1), batch.targets.flatten(), reduction="none")
        return torch.where(batch.loss_mask.flatten(), losses, 0.0).sum()

    def measure(self, model: LanguageModel, side: Side = "validation") -> Results:
        return Results(self.metrics(model, self.batches(side), intervals=True))

    def metrics(self, model: LanguageModel, batches: Iterable[Batch], *, intervals: bool = False) -> dict[str, Any]:
        outputs = (
            (logits, batch.targets if batch.loss_mask is None else batch.targets.masked_fill(~batch.loss_mask, -1))
            for logits, batch in head_outputs(model, batches)
        )
        return classification_metrics(outputs, self.labels, intervals=intervals)

    def predict(self, model: LanguageModel, sentences: Sequence[Sequence[str]]) -> list[list[tuple[str, float]]]:
        """Return the likeliest tag of each word of each sentence, with its probability."""
        return [[self._likeliest(word) for word in words] for words in self.outputs(model, sentences)]

    def predictions(
        self, model: LanguageModel, file: str, column: str | None = None, *, second: str | None = None
    ) -> Iterator[Prediction]:
        """A tag for each word; in lines of text, words are what spaces divide."""
        if second is not None:
            raise ConfigError(f"--second {second}: {self.folder.path} tags the words of one text")
        if has_lines(file):
            sentences = [text.split() for text in read_texts(file, column)]
        else:
            name = column or self.settings.words
            sentences = [row.values[name] for row in read_rows(RowSource([file], {name: "words"}))]
        for words, tagged in zip(sentences, self.predict(model, sentences), strict=True):
            line = " ".join(f"{word}/{tag}" for word, (tag, _) in zip(words, tagged, strict=True))
            tags, probabilities = [tag for tag, _ in tagged], [share for _, share in tagged]
            yield Prediction(line, {"words": words, "tags": tags, "probabilities": probabilities})

    def _likeliest(self, logits: npt.NDArray[np.float32]) -> tuple[str, float]:
        """Return the tag with the largest of logits (labels,), and its probability."""
        best = int(logits.argmax())
        return self.labels[best], float(torch.from_numpy(logits).softmax(-1)[best])

    def read_with(self, words: Sequence[str], word: int) -> tuple[list[int], int]:
        """Return the tokens that are read together with a word, and the position of the word's first token."""
        example = tagged_example(self.tokenizer, words, range(len(words)))
        parts = _parts(example, self.frame.text_length(self.length))
        return next((ids, positions[word]) for ids, positions in parts if word in positions)

    def outputs(self, model: LanguageModel, sentences: Sequence[Sequence[str]]) -> list[npt.NDArray[np.float32]]:
        """Return the logits (words, labels) of each sentence; sentences longer than a row are read in parts."""
        outputs = [np.zeros((len(words), len(self.labels)), dtype=np.float32) for words in sentences]
        max_length, before = self.frame.text_length(self.length), len(self.frame.before)
        examples = [tagged_example(self.tokenizer, words, range(len(words))) for words in sentences]
        parts = [(number, *part) for number, example in enumerate(examples) for part in _parts(example, max_length)]
        with bar("tagging words", sum(len(words) for words in sentences)) as advance:
            for numbers, batch in read_framed(self, model, [ids for _, ids, _ in parts]):
                for n, logits in zip(numbers, batch, strict=True):
                    number, _, words = parts[n]
                    for word, position in words.items():
                        outputs[number][word] = logits[before + position]
                advance(sum(len(parts[n][2]) for n in numbers))
        return outputs


def tagged_example(tokenizer: Tokenizer, words: Sequence[str], tags: Sequence[int]) -> dict[str, list[int]]:
    """Return the tokens of a sentence, and for each the tag of the word that it begins, or -1. Words are joined by
    spaces and tokenized like any text; a token belongs to the word in which it ends."""
    if len(words) != len(tags):
        raise DataError(f"{len(words)} words have {len(tags)} tags; each word needs one")
    text = " ".join(words)
    word_at = [number for number, word in enumerate(words) for _ in range(len(word) + 1)]  # by character
    ids, tag_ids, begun = list[int](), list[int](), set[int]()
    for token in tokenizer.token_spans(text):
        word = word_at[token.end - 1] if token.end and not text[token.end - 1].isspace() else None
        ids.append(token.id)
        tag_ids.append(-1 if word is None or word in begun else tags[word])
        begun |= set() if word is None else {word}
    lost = [repr(word) for number, word in enumerate(words) if number not in begun]
    if lost:
        raise DataError(f"the tokenizer has no token for the word {lost[0]}")
    return {"first": ids, "tags": tag_ids}


def _parts(example: Mapping[str, Sequence[int]], max_length: int | None) -> Iterator[tuple[list[int], dict[int, int]]]:
    """Yield tokens, and positions of words in them, of a sentence, cut between words into `max_length` at most."""
    ids, words = list(example["first"]), list(example["tags"])
    begin = 0
    while begin < len(ids):
        end = len(ids) if max_length is None else min(len(ids), begin + max_length)
        if end < len(ids):  # a word longer than a whole part is cut
            end = next((position for position in range(end, begin, -1) if words[position] >= 0), end)
        yield ids[begin:end], {word: position for position, word in enumerate(words[begin:end]) if word >= 0}
        begin = end
