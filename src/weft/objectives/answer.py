"""Where the answer to a question begins and ends in a text (Rajpurkar et al. 2016; Devlin et al. 2019, §4.2)."""

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
from weft.objectives.rows import Numbers, RowObjective, check_finite, head_outputs, named, read_framed, read_pairs
from weft.progress import bar
from weft.recipe import objective as config
from weft.text.tokenizer import Tokenizer, TokenSpan
from weft.training.objective import Prediction


class Found(NamedTuple):
    """An answer, the probability that it begins and ends where it does, and its characters in the text."""

    text: str
    probability: float
    start: int
    end: int


class Window(NamedTuple):
    """Some tokens of the text of a question, from the one of number `begin` on."""

    question: int
    begin: int
    ids: list[int]


class Answer(RowObjective[config.Answer]):
    """Three columns: a question, a text, and the answer as it stands in the text, where it stands first."""

    usage = "weft classify {run} questions.jsonl"

    def columns(self) -> Mapping[str, Kind]:
        return {self.settings.question: "text", self.settings.context: "text", self.settings.answer: "text"}

    def row_texts(self, values: Mapping[str, Any], side: Literal["target", "source"]) -> Iterator[str]:
        if side == "target":
            yield from (values[column] for column in (self.settings.question, self.settings.context))

    def encode(self, rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
        for row in rows:
            question, context, answer = (row.values[column] for column in self.columns())
            with named(row):
                ids, start, end = answered(self.tokenizer, context, answer)
            yield {"first": self.tokenizer.encode(question), "second": ids, "start": start, "end": end}

    def lengths(self, examples: Examples) -> Numbers:
        return framed_lengths(examples, ("first", "second"), self.frame, length=self.length)

    def fitted(self, question: Sequence[int]) -> tuple[list[int], int, int]:
        """As much of a question as half a row holds; where the text begins in the row, and how much of it fits."""
        frame, most = self.frame, self.frame.text_length(self.length, 2)
        assert most is not None
        kept = list(question[: max(1, most // 2)])
        return kept, len(frame.before) + len(kept) + len(frame.between), max(1, most - len(kept))

    def batch(self, examples: Examples, numbers: Numbers) -> Batch:
        """Questions with their texts, each with two targets (B, 2): the places of the answer's first and last token. Of
        a text that is too long, the part around the answer is read."""
        first, second, targets = [], [], []
        for n in numbers:
            start, end = (int(examples.values(field)[n]) for field in ("start", "end"))
            question, offset, most = self.fitted(examples.ids("first", n).tolist())
            begin = 0 if end < most else max(0, start - max(0, most - (end - start + 1)) // 2)
            first.append(question)
            second.append(examples.ids("second", n)[begin : begin + most].tolist())
            targets.append([offset + start - begin, offset + min(end - begin, most - 1)])
        tokens, mask, segments = framed(first, second, self.frame, length=self.length)
        return Batch(tokens, torch.tensor(targets), mask=mask, segments=segments)

    def output_loss(self, outputs: Tensor, batch: Batch) -> Tensor:
        """−log p of both places among all real tokens."""
        return F.cross_entropy(_by_place(outputs, batch.mask), batch.targets.flatten(), reduction="sum")

    def metrics(self, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, Any]:
        loss, right, rows = 0.0, 0, 0
        for logits, batch in head_outputs(model, batches):
            places = _by_place(logits, batch.mask)
            loss += float(self.output_loss(logits, batch))
            right += int((places.argmax(-1).view(-1, 2) == batch.targets).all(-1).sum())
            rows += len(logits)
        return {"loss": loss / max(1, 2 * rows), "exact": right / max(1, rows)}

    def predict(self, model: LanguageModel, questions: Sequence[str], contexts: Sequence[str]) -> list[Found]:
        """The likeliest answer to each question in its text, of `longest` tokens at most. A text that is too long is
        read in parts that overlap by half."""
        if len(questions) != len(contexts):
            raise ConfigError(f"{len(contexts)} texts for {len(questions)} questions; each question needs one")
        asked = [self.tokenizer.encode(question) for question in questions]
        spans = [self.tokenizer.token_spans(context) for context in contexts]
        windows = [window for n, ids in enumerate(asked) for window in self._windows(n, ids, spans[n])]
        best = [Found("", 0.0, 0, 0)] * len(questions)
        fitted = [self.fitted(ids) for ids in asked]
        kept = [fitted[window.question][0] for window in windows]
        with bar("reading", len(windows)) as advance:
            for some, answers in read_framed(self, model, kept, [window.ids for window in windows]):
                check_finite(answers, self.folder.path)
                for n, logits in zip(some, answers, strict=True):
                    number, begin, ids = windows[n]
                    offset = fitted[number][1]
                    found = self._likeliest(logits[offset : offset + len(ids)])
                    if found is not None and found[2] > best[number].probability:
                        first, last = spans[number][begin + found[0]], spans[number][begin + found[1]]
                        text = contexts[number][first.start : last.end]
                        best[number] = Found(text, found[2], first.start, last.end)
                advance(len(some))
        return best

    def _windows(self, number: int, question: list[int], spans: Sequence[TokenSpan]) -> Iterator[Window]:
        ids, most = [span.id for span in spans], self.fitted(question)[2]
        for begin in range(0, max(1, len(ids)), max(1, most // 2)):
            yield Window(number, begin, ids[begin : begin + most])
            if begin + most >= len(ids):
                break

    def _likeliest(self, logits: npt.NDArray[np.float32]) -> tuple[int, int, float] | None:
        """The first and last token of the likeliest answer, by logits (tokens, 2), with its probability."""
        if not len(logits):
            return None
        starts, ends = torch.from_numpy(logits).softmax(0).unbind(-1)
        both = torch.outer(starts, ends).triu().tril(self.settings.longest - 1)
        first, last = divmod(int(both.argmax()), len(logits))
        return first, last, float(both[first, last])

    def predictions(
        self, model: LanguageModel, file: str, column: str | None = None, second: str | None = None
    ) -> Iterator[Prediction]:
        one, two = column or self.settings.question, second or self.settings.context
        questions, contexts = read_pairs(file, one, two, f"{self.folder.path}: answers questions about texts")
        for question, found in zip(questions, self.predict(model, questions, contexts), strict=True):
            line = f"{' '.join(found.text.split())}\t{found.probability:.4f}\t{question}"
            record = {"question": question, "answer": found.text, "probability": found.probability}
            yield Prediction(line, {**record, "start": found.start, "end": found.end})


def answered(tokenizer: Tokenizer, context: str, answer: str) -> tuple[list[int], int, int]:
    """The tokens of a text, and the numbers of the first and the last that have a part in the answer."""
    start = context.find(answer)
    if start < 0:
        raise DataError(f"the answer '{answer[:80]}' doesn't stand in its text")
    end, spans = start + len(answer), tokenizer.token_spans(context)
    within = [number for number, span in enumerate(spans) if span.start < end and span.end > start]
    if not within:
        raise DataError(f"the answer '{answer[:80]}' has no tokens")
    return [span.id for span in spans], within[0], within[-1]


def _by_place(logits: Tensor, mask: Tensor | None) -> Tensor:
    """Logits (B, T, 2) as (2B, T): of each row first where the answer begins, then where it ends."""
    if mask is not None:
        logits = logits.masked_fill(~mask[..., None], float("-inf"))
    return logits.transpose(1, 2).flatten(0, 1)
