"""Evaluation of a run on data: metrics, their details, and the overlap with the training text."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from weft.api.arguments import checked
from weft.config import Tree, validate
from weft.data.config import Data
from weft.data.shards import Side
from weft.decode.prompt import context_window
from weft.decode.text import spell_token
from weft.errors import ConfigError, DataError, RunError
from weft.evaluate.details import Details, LossBucket, by_frequency, by_position, most_surprising, token_counts
from weft.evaluate.overlap import Overlap, overlap
from weft.evaluate.perplexity import Surprisal, surprisals
from weft.evaluate.sections import section_metrics
from weft.figures.page import html_table
from weft.figures.tables import Table
from weft.models.base import LanguageModel, device_of
from weft.models.ngram import NGram
from weft.objectives import table as objectives
from weft.objectives.frame import text_frame
from weft.objectives.next_token import NextToken
from weft.objectives.rows import RowObjective
from weft.objectives.tokens import TranslationObjective
from weft.objectives.word_vectors import WordVectors
from weft.progress import bar, log_to_stderr
from weft.recipe.metrics import metric
from weft.runs.folder import RunFolder
from weft.training.objective import Objective
from weft.training.precision import reading


class EvaluationMetrics(dict[str, Any]):
    """Metrics by name, which a notebook shows as a table."""

    def _repr_html_(self) -> str:
        low_high = self.get("intervals") or {}
        rows = [
            (metric(name).title, metric(name).text(value), " to ".join(map(metric(name).text, low_high.get(name, ()))))
            for name, value in self.items()
            if isinstance(value, float)
        ]
        heading = ("metric", "value", "95% interval" if low_high else "")
        return html_table(Table(heading, rows, "", text=(0, 1, 2)))


@checked
@dataclass(frozen=True)
class Evaluation:
    """A model, and the data that it is evaluated on: one `side` of the data of `objective`."""

    model: LanguageModel
    run_objective: Objective[Any]  # with the training text
    objective: Objective[Any]
    side: Side

    def metrics(self, stride: int | None = None) -> EvaluationMetrics:
        """Return all metrics of the objective; `stride` is as for `Run.evaluate`."""
        with self._precision():
            if stride is None:
                return EvaluationMetrics(self.objective.measure(self.model, self.side).metrics)
            if not isinstance(self.objective, NextToken):
                raise _without_windows(stride)
            self._check_stride(stride)
            return EvaluationMetrics(self.objective.measure(self.model, self.side, stride).metrics)

    def details(self, stride: int | None = None) -> Details:
        """Return a language model's metrics with the loss by context length and by token frequency, and the most
        surprising passages."""
        objective, trained = self._language_model("details"), self.run_objective
        self._check_stride(stride)
        with self._precision():
            costs, sections = objective.costs(self.model, self.side, stride)
        tokenizer = objective.tokenizer
        frequencies: list[LossBucket] = []
        if isinstance(trained, NextToken) and trained.training_bytes is not None:
            with suppress(RunError):  # damaged training data need not prevent an evaluation on other data
                frequencies = by_frequency(costs, token_counts(trained.tokens("train"), tokenizer.vocab_size))
        return Details(section_metrics(sections), by_position(costs), frequencies, most_surprising(costs, tokenizer))

    def _check_stride(self, stride: int | None) -> None:
        if stride is not None and isinstance(self.model, NGram):
            raise _without_windows(stride)

    @property
    def compared_bytes(self) -> int | None:
        """Bytes of text that `overlap` reads; None if there is no training text to compare with."""
        if not isinstance(self.objective, NextToken) or not isinstance(self.run_objective, NextToken):
            return None
        trained = self.run_objective.training_bytes
        return None if trained is None else trained + sum(text.bytes for text in self.objective.tokens(self.side))

    def overlap(self) -> Overlap:
        """Return how much of the text occurs in the training text, by n-grams of words (`weft.evaluate.overlap`)."""
        objective, trained, size = self._language_model("overlap"), self.run_objective, self.compared_bytes
        if size is None or not isinstance(trained, NextToken):
            raise DataError("overlap: this run's training text is not here to compare with")
        with bar("comparing", size, unit="bytes") as advance:
            return overlap(objective.tokens(self.side), trained.tokens("train"), objective.tokenizer, progress=advance)

    def _language_model(self, feature: str) -> NextToken:
        if not isinstance(self.objective, NextToken):
            raise ConfigError(f"{feature}: only for language models; this run is {self.objective.settings.makes}")
        return self.objective

    def _precision(self) -> Any:
        return reading(self.run_objective.recipe.precision or "fp32", device_of(self.model))


def _without_windows(stride: int) -> ConfigError:
    return ConfigError(f"stride = {stride}: this run is not evaluated in windows of text; leave it out")


@contextmanager
def evaluation_on(objective: Objective[Any], model: LanguageModel, data: Tree | None) -> Iterator[Evaluation]:
    """Open a run's held-out data for evaluation, or all of `data`, which is given as settings."""
    objective.settings.check(objective.recipe.model)
    if isinstance(objective, WordVectors):
        objective.measure(model)  # refused: they are measured by `weft neighbours`
    if data is None:
        if not objective.recipe.data.parts or not objective.holds_out:
            path = objective.folder.path
            raise DataError(f"{path}: this run has no held-out data; name the data to evaluate on with --data")
        yield Evaluation(model, objective, objective, side="validation")
        return
    inherited = {key: getattr(objective.recipe.data, key) for key in ("column", "on_error", "document_mask")}
    settings = validate(Data, {**inherited, **data, "validation": {"kind": "none"}})
    with TemporaryDirectory(prefix="weft-") as folder:
        other = objectives.build(objective.recipe.replace(data=settings), RunFolder(folder), objective.tokenizers)
        if isinstance(other, NextToken):
            other.frame = text_frame(objective.recipe, objective.tokenizer)
        elif isinstance(other, TranslationObjective) and isinstance(objective, TranslationObjective):
            other.direction = objective.direction
        elif isinstance(other, RowObjective) and isinstance(objective, RowObjective):
            other.frame = objective.frame
        other.prepare(log_to_stderr)
        yield Evaluation(model, objective, other, side="train")


def text_surprisal(objective: Objective[Any], model: LanguageModel, text: str) -> list[Surprisal]:
    """Return the tokens of a text with their surprisals."""
    if not isinstance(text, str):
        raise ConfigError(f"text = {str(text)[:40]!r}: expected a single text")
    objective.check_continues("score a text")
    if os.path.splitext(text)[1] and os.path.isfile(text):  # also False for a text too long to be a path
        log_to_stderr(f"weft: {text!r} is scored as a text; evaluate({text!r}) would evaluate the file of that name")
    frame = text_frame(objective.recipe, objective.tokenizer)
    ids = [*objective.tokenizer.encode(text), *frame.after]
    with reading(objective.recipe.precision or "fp32", device_of(model)):
        nats = surprisals(model, ids, frame.begins, length=context_window(model) or objective.length)
    return [Surprisal(spell_token(objective.tokenizer, id), value) for id, value in zip(ids, nats, strict=True)]
