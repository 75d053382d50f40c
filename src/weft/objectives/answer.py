"""Extractive question answering: a span of a text (Rajpurkar et al. 2016; Devlin et al. 2019, §4.2)."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.data.batch import Batch, framed, framed_lengths
from weft.data.examples import Examples
from weft.data.table import Kind, Row
from weft.errors import ConfigError, DataError
from weft.models.base import LanguageModel
from weft.objectives.rows import Numbers, RowObjective, head_outputs, naming_row, read_columns, read_framed
from weft.progress import bar
from weft.recipe import objective as config
from weft.text.tokenizer import Tokenizer, TokenSpan
from weft.training.objective import Prediction


class AnswerSpan(NamedTuple):
    """An answer, the probability of its span, and its characters [start, end) in the text."""

    text: str
    probability: float
    start: int
    end: int


class Answer(RowObjective[config.Answer]):
    """−log p of the first and last token of an answer, at its first occurrence in the text."""

    usage = "weft classify {run} questions.jsonl"

    def columns(self) -> Mapping[str, Kind]:
        return {self.settings.question: "text", self.settings.context: "text", self.settings.answer: "text"}

    def row_texts(self, values: Mapping[str, Any], side: Literal["target", "source"]) -> Iterator[str]:
        if side == "target":
            yield from (values[column] for column in (self.settings.question, self.settings.context))

    def encode(self, rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
        for row in rows:
            question, context, answer = (row.values[column] for column in self.columns())
            with naming_row(row):
                ids, start, end = answer_span(self.tokenizer, context, answer)
            yield {"first": self.tokenizer.encode(question), "second": ids, "start": start, "end": end}

    def lengths(self, examples: Examples) -> Numbers:
        return framed_lengths(examples, ("first", "second"), self.frame, length=self.length)

    def fit(self, question: Sequence[int]) -> tuple[list[int], int, int]:
        """Return a question cut to half a row, the offset of the text in the row, and how much of the text fits."""
        frame, space = self.frame, self.frame.text_length(self.length, 2)
        assert space is not None
        kept = list(question[: max(1, space // 2)])
        return kept, len(frame.before) + len(kept) + len(frame.between), max(1, space - len(kept))

    def batch(self, examples: Examples, numbers: Numbers) -> Batch:
        """Return questions with their texts; targets (B, 2) are the positions of the answer's first and last token. Of
        a text that is too long, the part around the answer is read."""
        first, second, targets = [], [], []
        for n in numbers:
            start, end = (int(examples.values(field)[n]) for field in ("start", "end"))
            question, offset, space = self.fit(examples.ids("first", n).tolist())
            begin = 0 if end < space else max(0, start - max(0, space - (end - start + 1)) // 2)
            first.append(question)
            second.append(examples.ids("second", n)[begin : begin + space].tolist())
            targets.append([offset + start - begin, offset + min(end - begin, space - 1)])
        tokens, mask, segments = framed(first, second, self.frame, length=self.length)
        return Batch(tokens, torch.tensor(targets), mask=mask, segments=segments)

    def output_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """Return −log p of both positions among all real tokens."""
        return F.cross_entropy(_by_position(outputs, batch.mask), batch.targets.flatten(), reduction="sum")

    def metrics(self, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, Any]:
        loss, right, rows = 0.0, 0, 0
        for logits, batch in head_outputs(model, batches):
            positions = _by_position(logits, batch.mask)
            loss += float(self.output_loss(logits, batch))
            right += int((positions.argmax(-1).view(-1, 2) == batch.targets).all(-1).sum())
            rows += len(logits)
        return {"loss": loss / max(1, 2 * rows), "exact": right / max(1, rows)}

    def predict(self, model: LanguageModel, questions: Sequence[str], contexts: Sequence[str]) -> list[AnswerSpan]:
        """Return the likeliest answer to each question. Long texts are read in windows that overlap by half."""
        if len(questions) != len(contexts):
            raise ConfigError(f"{len(contexts)} texts for {len(questions)} questions; each question needs one")
        fits = [self.fit(self.tokenizer.encode(question)) for question in questions]
        spans = [self.tokenizer.token_spans(context) for context in contexts]
        windows = [(n, *window) for n, (_, _, space) in enumerate(fits) for window in _windows(spans[n], space)]
        best = [AnswerSpan("", 0.0, start=0, end=0)] * len(questions)
        question_ids, context_ids = [fits[n][0] for n, _, _ in windows], [ids for _, _, ids in windows]
        with bar("reading", len(windows)) as advance:
            for numbers, outputs in read_framed(self, model, question_ids, others=context_ids):
                for n, logits in zip(numbers, outputs, strict=True):
                    number, begin, ids = windows[n]
                    offset = fits[number][1]
                    likeliest = self._likeliest(logits[offset : offset + len(ids)])
                    if likeliest is not None and likeliest[2] > best[number].probability:
                        first, last = (spans[number][begin + token] for token in likeliest[:2])
                        text = contexts[number][first.start : last.end]
                        best[number] = AnswerSpan(text, likeliest[2], start=first.start, end=last.end)
                advance(len(numbers))
        return best

    def _likeliest(self, logits: npt.NDArray[np.float32]) -> tuple[int, int, float] | None:
        """Return the first and last token of the likeliest answer, by logits (tokens, 2), and its probability."""
        if not len(logits):
            return None
        starts, ends = torch.from_numpy(logits).softmax(0).unbind(-1)
        both = torch.outer(starts, ends).triu().tril(self.settings.longest - 1)
        first, last = divmod(int(both.argmax()), len(logits))
        return first, last, float(both[first, last])

    def predictions(
        self, model: LanguageModel, file: str, column: str | None = None, *, second: str | None = None
    ) -> Iterator[Prediction]:
        columns = column or self.settings.question, second or self.settings.context
        expected = f"{self.folder.path}: answers questions about texts"
        questions, contexts = read_columns(file, *columns, expected=expected)
        for question, answer in zip(questions, self.predict(model, questions, contexts), strict=True):
            line = f"{' '.join(answer.text.split())}\t{answer.probability:.4f}\t{question}"
            record = {"question": question, "answer": answer.text, "probability": answer.probability}
            yield Prediction(line, {**record, "start": answer.start, "end": answer.end})


def _windows(spans: Sequence[TokenSpan], size: int) -> Iterator[tuple[int, list[int]]]:
    """Yield windows of `size` tokens of a text that overlap by half: the number of the first token, and the ids."""
    ids = [span.id for span in spans]
    for begin in range(0, max(1, len(ids)), max(1, size // 2)):
        yield begin, ids[begin : begin + size]
        if begin + size >= len(ids):
            break


def answer_span(tokenizer: Tokenizer, context: str, answer: str) -> tuple[list[int], int, int]:
    """Return the tokens of a text, and the numbers of the first and the last that overlap the answer."""
    start = context.find(answer)
    if start < 0:
        raise DataError(f"the answer '{answer[:80]}' does not occur in its text")
    end, spans = start + len(answer), tokenizer.token_spans(context)
    within = [number for number, span in enumerate(spans) if span.start < end and span.end > start]
    if not within:
        raise DataError(f"the answer '{answer[:80]}' has no tokens")
    return [span.id for span in spans], within[0], within[-1]


def _by_position(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Reshape logits (B, T, 2) → (2B, T): for each row those of the answer's beginning, then those of its end."""
    if mask is not None:
        logits = logits.masked_fill(~mask[..., None], float("-inf"))
    return logits.transpose(1, 2).flatten(0, 1)
