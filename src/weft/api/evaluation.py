"""A run's model on a text: its metrics, what they are made of, and how much of the text was trained on."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

from weft.api.arguments import checked
from weft.config import validate
from weft.data.config import Data
from weft.data.shards import Side
from weft.decode.prompt import context_window
from weft.decode.text import spell_token
from weft.errors import ConfigError, DataError, RunError
from weft.evaluate.details import Details, LossBucket, by_frequency, by_position, most_surprising, token_counts
from weft.evaluate.overlap import Overlap, overlap
from weft.evaluate.perplexity import Surprisal, surprisals
from weft.evaluate.sections import section_metrics
from weft.models.base import LanguageModel, device_of
from weft.models.ngram import NGram
from weft.objectives import table as objectives
from weft.objectives.frame import text_frame
from weft.objectives.next_token import NextToken
from weft.objectives.rows import RowObjective
from weft.objectives.tokens import TranslationObjective
from weft.progress import bar, log_to_stderr
from weft.runs.folder import RunFolder
from weft.training.objective import Objective
from weft.training.precision import reading


@checked
@dataclass(frozen=True)
class Evaluation:
    """A model and the text that it is measured on: a `side` of the data of `objective`."""

    model: LanguageModel
    own: Objective[Any]  # the run's, with the text that it was trained on
    objective: Objective[Any]
    side: Side

    def metrics(self, stride: int | None = None) -> dict[str, Any]:
        """All metrics of the objective; `stride` as for `Run.evaluate`."""
        with self._precision():
            if stride is None:
                return self.objective.measure(self.model, self.side).metrics
            if not isinstance(self.objective, NextToken) or isinstance(self.model, NGram):
                raise ConfigError(f"stride = {stride}: this run is not evaluated in windows of text")
            return self.objective.measure(self.model, self.side, stride).metrics

    def details(self, stride: int | None = None) -> Details:
        """The same for a language model with the loss by context and by frequency, and the most surprising passages."""
        objective, own = self._text("details"), self.own
        if stride is not None and isinstance(self.model, NGram):
            raise ConfigError(f"stride = {stride}: this run is not evaluated in windows of text")
        with self._precision():
            costs, found = objective.costs(self.model, self.side, stride)
        tokenizer = objective.tokenizer
        frequencies: list[LossBucket] = []
        if isinstance(own, NextToken) and own.training_bytes is not None:
            with suppress(RunError):  # damage, which need not concern another text
                frequencies = by_frequency(costs, token_counts(own.tokens("train"), tokenizer.vocab_size))
        return Details(section_metrics(found), by_position(costs), frequencies, most_surprising(costs, tokenizer))

    @property
    def compared_bytes(self) -> int | None:
        """How much text `overlap` reads; None where there is no training text to compare with."""
        if not isinstance(self.objective, NextToken) or not isinstance(self.own, NextToken):
            return None
        trained = self.own.training_bytes
        return None if trained is None else trained + sum(text.bytes for text in self.objective.tokens(self.side))

    def overlap(self) -> Overlap:
        """How much of the text occurs in the training text, by n-grams of words (`weft.evaluate.overlap`)."""
        objective, own, size = self._text("overlap"), self.own, self.compared_bytes
        if size is None or not isinstance(own, NextToken):
            raise DataError("overlap: the text that this run was trained on isn't here to compare with")
        with bar("comparing", size, unit="bytes") as advance:
            return overlap(objective.tokens(self.side), own.tokens("train"), objective.tokenizer, progress=advance)

    def _text(self, what: str) -> NextToken:
        if not isinstance(self.objective, NextToken):
            raise ConfigError(f"{what}: this run is {self.objective.settings.makes}, and that is for language models")
        return self.objective

    def _precision(self) -> Any:
        return reading(self.own.recipe.precision or "fp32", device_of(self.model))


@contextmanager
def evaluation_on(own: Objective[Any], model: LanguageModel, given: Mapping[str, Any] | None) -> Iterator[Evaluation]:
    """An evaluation on what a run held out, or on the data that is `given`, as settings, and read whole."""
    own.settings.check(own.recipe.model)
    if given is None:
        if not own.recipe.data.parts or not own.holds_out:
            raise DataError(f"{own.folder.path}: this run held out nothing; name what to evaluate on with --data")
        yield Evaluation(model, own, own, "validation")
        return
    kept = {key: getattr(own.recipe.data, key) for key in ("column", "on_error", "document_mask")}
    read = validate(Data, {**kept, **given, "validation": {"kind": "none"}})
    with TemporaryDirectory(prefix="weft-") as folder:
        other = objectives.build(own.recipe.replace(data=read), RunFolder(folder), own.tokenizers)
        if isinstance(other, NextToken):
            other.frame = text_frame(own.recipe, own.tokenizer)
        elif isinstance(other, TranslationObjective) and isinstance(own, TranslationObjective):
            other.direction = own.direction
        elif isinstance(other, RowObjective) and isinstance(own, RowObjective):
            other.frame = own.frame
        other.prepare(log_to_stderr)
        yield Evaluation(model, own, other, "train")


def text_surprisal(own: Objective[Any], model: LanguageModel, text: str) -> list[Surprisal]:
    """The tokens of a text that a run's model reads, with their surprisals."""
    if not isinstance(text, str):
        raise ConfigError(f"text = {str(text)[:40]!r}: expected one text")
    if not own.recipe.objective.continues:
        raise own.cannot("score a text")
    if os.path.splitext(text)[1] and os.path.isfile(text):  # False, too, for what is too long for a name
        log_to_stderr(f"weft: {text!r} is scored as a text; evaluate({text!r}) measures the file of that name")
    frame = text_frame(own.recipe, own.tokenizer)
    ids = [*own.tokenizer.encode(text), *frame.after]
    with reading(own.recipe.precision or "fp32", device_of(model)):
        found = surprisals(model, ids, frame.begins, length=context_window(model) or own.length)
    return [Surprisal(spell_token(own.tokenizer, id), nats) for id, nats in zip(ids, found, strict=True)]
