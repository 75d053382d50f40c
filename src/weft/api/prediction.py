"""Prediction of a model that was trained on labelled rows or on pairs, and the tokens that it depends on.

Predictions are those of the objective's `predict`, which `weft classify` and `Run` call; vectors are those of `embed`.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.api.reading import NO_DATA, ORIGINS, SENTENCE
from weft.data.batch import fit_pair, framed
from weft.errors import ConfigError, WeftError, suggestion
from weft.explain import views
from weft.figures.page import as_json
from weft.models.base import LanguageModel, device_of
from weft.objectives.answer import Answer, AnswerSpan
from weft.objectives.classify import Classify
from weft.objectives.contrastive import Contrastive, EmbeddingOptions, embed
from weft.objectives.regress import Regress
from weft.objectives.rows import RowObjective
from weft.objectives.tag import Tag

EXAMPLE_INPUTS = ("Why didn't the animal cross the street?", SENTENCE)
MAX_LETTERS = 200  # of the first text of a row that is shown as an example
MAX_COMPARED = 400  # rows of each split whose texts are compared with a text
MAX_NEAREST = 8  # similar texts that are listed
Choose = Callable[[Tensor], Tensor]  # from the outputs of the head for one row to the explained scalar
Record = dict[str, Any]


@dataclass(frozen=True)
class RowPredictor:
    """A trained model and its objective, for predictions of single inputs."""

    model: LanguageModel
    objective: RowObjective[Any]

    def own_inputs(self) -> tuple[Sequence[str], str]:
        """Return the texts of one of the run's rows, held out if possible, and their origin in words."""
        inputs = len(self.objective.settings.input_columns)
        for side, origin in ORIGINS.items():
            with suppress(WeftError):  # the data may be gone, and an imported model has none
                if rows := self.objective.input_texts(side, 20):
                    sizes = [len(texts[0]) for texts in rows]
                    best = max(range(len(rows)), key=lambda n: sizes[n] if sizes[n] <= MAX_LETTERS else -sizes[n])
                    return rows[best][:inputs], origin
        return EXAMPLE_INPUTS[-inputs:], NO_DATA

    def predict(self, texts: Sequence[str], output: str | int | None = None) -> Record:
        """Return the prediction for one text, or for two, and the gradients of one `output` by token.

        `output` is a label, the index of a word, or the index of a similar text; by default the first that is returned,
        or the first word with a rare tag.
        """
        objective, batch = self.objective, [[text] for text in texts]
        ids, columns = objective.tokenizer.encode_batch(list(texts)), objective.settings.input_columns
        if isinstance(objective, Answer | Tag) and len(texts) != len(columns):
            raise ConfigError(f"{objective.folder.path}: {len(texts)} texts; this run expects {' and '.join(columns)}")
        match objective:
            case Classify():
                (labels,) = objective.predict(self.model, *batch)
                label = next(iter(labels)) if output is None else str(output)
                if label not in labels:
                    raise ConfigError(f"output = '{label}': not a label of this model; {suggestion(label, labels)}")
                index = objective.labels.index(label)
                return {
                    "labels": labels,
                    "saliency": self._gradients(label, ids, lambda x: x[0].log_softmax(-1)[index]),
                }
            case Regress():
                (score,) = objective.predict(self.model, *batch)
                gradients = self._gradients("the predicted number", ids, lambda outputs: outputs[0, 0])
                return {"score": score, "range": objective.score_range(), "saliency": gradients}
            case Tag():
                return self._tags(objective, texts[0].split(), output)
            case Answer():
                (answer,) = objective.predict(self.model, *batch)
                row: Record = {"question_ids": ids[0], "context": texts[1]}
                found = self._answer_gradients(objective, answer, **row) if answer.text else None
                return {"answer": answer._asdict(), "saliency": found}
            case Contrastive():
                return self._nearest(texts, ids[0], output)
        raise objective.cannot("predict")

    def _tags(self, objective: Tag, words: Sequence[str], output: str | int | None) -> Record:
        if not words:
            return {"words": [], "saliency": None}
        (tagged,) = objective.predict(self.model, [words])
        tags = [tag for tag, _ in tagged]
        word = _index(output, len(words), default=next((n for n, tag in enumerate(tags) if tags.count(tag) == 1), 0))
        ids, position = objective.read_with(words, word)
        row, label = len(objective.frame.before) + position, objective.labels.index(tags[word])
        gradients = self._gradients(words[word], [ids], lambda outputs: outputs[0, row].log_softmax(-1)[label])
        rows = [{"text": text, "tag": tag, "probability": p} for text, (tag, p) in zip(words, tagged, strict=True)]
        return {"words": rows, "tags": list(objective.labels), "word": word, "saliency": gradients}

    def _answer_gradients(
        self, objective: Answer, answer: AnswerSpan, *, question_ids: Sequence[int], context: str
    ) -> Record:
        spans, (question, offset, space) = objective.tokenizer.token_spans(context), objective.fit(question_ids)
        inside = [n for n, span in enumerate(spans) if span.start < answer.end and span.end > answer.start]
        begin = 0 if inside[-1] < space else max(0, inside[0] - space // 2)  # a long text is cut around the answer
        window = [span.id for span in spans[begin : begin + space]]

        def choose(outputs: Tensor) -> Tensor:
            starts, ends = outputs[0, offset : offset + len(window)].log_softmax(0).unbind(-1)
            return starts[inside[0] - begin] + ends[min(inside[-1] - begin, len(window) - 1)]

        return self._gradients(answer.text, [question, window], choose)

    def _nearest(self, texts: Sequence[str], ids: Sequence[int], output: str | int | None) -> Record:
        text, *second = texts
        compared, vectors = (second, self._embed(second)) if second else self._compared
        cosines = vectors @ self._embed([text])[0] if compared else np.zeros(0)
        order = [n for n in np.argsort(-cosines, kind="stable").tolist() if second or compared[n] != text]
        if not (order := order[:MAX_NEAREST]):
            return {"nearest": [], "saliency": None}
        nearest = [{"text": compared[n], "cosine": float(cosines[n])} for n in order]
        index = _index(output, len(order), default=0)
        other = torch.from_numpy(vectors[order[index]]).to(device_of(self.model))
        gradients = self._gradients(compared[order[index]], [ids], lambda x: x[0] @ other / x[0].norm())
        return {"nearest": nearest, "compared": len(compared), "chosen": index, "saliency": gradients}

    @cached_property
    def _compared(self) -> tuple[list[str], npt.NDArray[np.float32]]:
        """Texts of the run's data, the held-out ones first, and their vectors (texts, d_model)."""
        texts: list[str] = []
        with suppress(WeftError):
            rows = [row for side in ORIGINS for row in self.objective.input_texts(side, MAX_COMPARED)]
            texts = list(dict.fromkeys(text for row in rows for text in row))
        return texts, self._embed(texts) if texts else np.zeros((0, 0), dtype=np.float32)

    def _embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        options = EmbeddingOptions(length=self.objective.length)
        return embed(self.model, self.objective.tokenizer, texts, options=options)

    def _gradients(self, target: str, ids: Sequence[Sequence[int]], choose: Choose) -> Record:
        """Return the gradients of a scalar of the outputs for one text, or for two, cut to a row as for predictions."""
        objective, frame, device = self.objective, self.objective.frame, device_of(self.model)
        max_tokens = frame.text_length(objective.length, len(ids))
        kept = [ids[0][:max_tokens]] if len(ids) == 1 else list(fit_pair(ids[0], ids[1], max_tokens))
        names = (*objective.settings.input_columns, "second") if len(ids) == 2 else ("text",)
        batch = framed([kept[0]], [kept[1]] if len(kept) == 2 else None, frame, length=objective.length)
        inputs = {"mask": batch.mask.to(device)}
        if batch.segments is not None:
            inputs["segments"] = batch.segments.to(device)
        value, [(norm, times)] = views.saliency.embedding_gradients(
            self.model, lambda: choose(self.model(batch.tokens.to(device), **inputs).float()), ("embedding",)
        )
        sides, offset = [], len(frame.before)
        for name, part in zip(names, kept, strict=False):
            here, tokens = slice(offset, offset + len(part)), views.reading.text_tokens(objective.tokenizer, part)
            sides.append(views.saliency.Side(name, tuple(tokens), norm=norm[here], times_input=times[here]))
            offset += len(part) + len(frame.between)
        return as_json({"target": target, "value": value, "sides": sides})


def _index(output: str | int | None, size: int, *, default: int) -> int:
    if output is None:
        return default
    if not isinstance(output, int) or not 0 <= output < size:
        raise ConfigError(f"output = {output}: expected an index, 0 … {size - 1}")
    return output
