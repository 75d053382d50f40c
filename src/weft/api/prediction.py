"""Prediction of a model that was trained on labelled rows or on pairs, and the tokens that it depends on.

Predictions are those of the objective's `predict`, which `weft classify` and `Run` call; vectors are those of `embed`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.data.batch import fit_pair, framed
from weft.data.shards import Side
from weft.errors import ConfigError, WeftError, suggestion
from weft.explain import views
from weft.figures.page import as_json
from weft.models.base import LanguageModel, device_of
from weft.models.hidden import frame_for
from weft.objectives.answer import Answer, FoundAnswer
from weft.objectives.classify import Classify
from weft.objectives.contrastive import Contrastive, EmbeddingOptions, embed
from weft.objectives.regress import Regress
from weft.objectives.rows import RowObjective
from weft.objectives.tag import Tag

SENTENCE = "The animal didn't cross the street because it was too tired."
EXAMPLE_INPUTS = ("Why didn't the animal cross the street?", SENTENCE)
ORIGINS: dict[Side, str] = {
    "validation": "from the held-out data",
    "train": "from the training data, as nothing was held out",
}
NO_DATA = "an example, as the run's data is not here"
MAX_COMPARED = 400  # rows of the run's data whose texts are compared with a text
MAX_NEAREST = 8  # similar texts that are listed
Choose = Callable[[Tensor], Tensor]  # from the outputs of the head for one row to the explained scalar
Record = dict[str, Any]


@dataclass(frozen=True)
class Predictor:
    """A trained model and its objective, for predictions of single inputs."""

    model: LanguageModel
    objective: RowObjective[Any]

    def own_inputs(self, tokens: int) -> tuple[Sequence[str], str]:
        """Return the texts of one of the run's rows, held out if possible, and their origin in words."""
        for side, origin in ORIGINS.items():
            with suppress(WeftError):  # the data may be gone, and an imported model has none
                if texts := self.objective.input_excerpt(side, tokens):
                    return texts, origin
        return EXAMPLE_INPUTS[-len(self.objective.settings.input_columns) :], NO_DATA

    def predict(self, texts: Sequence[str], output: str | int | None = None) -> Record:
        """Return the prediction for one text, or for two, and the gradients of one `output` by token.

        `output` is a label, the index of a word, or the index of a similar text; by default the first that is returned,
        or the first word whose tag is not the commonest.
        """
        objective, batch = self.objective, [[text] for text in texts]
        match objective:
            case Classify():
                (labels,) = objective.predict(self.model, *batch)
                label = next(iter(labels)) if output is None else str(output)
                if label not in labels:
                    raise ConfigError(f"output = '{label}': not a label of this model; {suggestion(label, labels)}")
                index = objective.labels.index(label)
                ids = self.objective.tokenizer.encode_batch(list(texts))
                return {
                    "labels": labels,
                    "saliency": self._gradients(label, ids, lambda x: x[0].log_softmax(-1)[index]),
                }
            case Regress():
                ids = self.objective.tokenizer.encode_batch(list(texts))
                gradients = self._gradients("the predicted number", ids, lambda outputs: outputs[0, 0])
                (score,) = objective.predict(self.model, *batch)
                return {"score": score, "range": objective.score_range(), "saliency": gradients}
            case Tag():
                return self._tags(objective, texts[0].split(), output)
            case Answer():
                found = objective.find(self.model, *batch)[0]
                return {"answer": found.span._asdict(), "saliency": self._answer_gradients(objective, found)}
            case Contrastive():
                return self._nearest(objective, texts, output)
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

    def _answer_gradients(self, objective: Answer, found: FoundAnswer) -> Record | None:
        if not found.window:
            return None
        begin = objective.fit(found.question)[1]

        def choose(outputs: Tensor) -> Tensor:
            starts, ends = outputs[0, begin : begin + len(found.window)].log_softmax(0).unbind(-1)
            return starts[found.first] + ends[found.last]

        return self._gradients(found.span.text, [found.question, found.window], choose)

    def _nearest(self, objective: Contrastive, texts: Sequence[str], output: str | int | None) -> Record:
        text, *second = texts
        compared, vectors = (second, self._embed(second)) if second else self._compared
        cosines = vectors @ self._embed([text])[0] if compared else np.zeros(0)
        order = [n for n in np.argsort(-cosines, kind="stable").tolist() if second or compared[n] != text]
        if not (order := order[:MAX_NEAREST]):
            return {"nearest": [], "saliency": None}
        index = _index(output, len(order), default=0)
        other = torch.from_numpy(vectors[order[index]]).to(device_of(self.model))
        ids, before, length = frame_for(self.model)(
            objective.tokenizer, objective.tokenizer.encode(text), objective.length
        )
        gradients = self._row_gradients(
            compared[order[index]],
            [("text", ids[before : before + length], before)],
            torch.tensor([ids]),
            inputs={},
            choose=lambda outputs: outputs[0] @ other / outputs[0].norm(),
        )
        nearest = [{"text": compared[n], "cosine": float(cosines[n])} for n in order]
        return {"nearest": nearest, "compared": len(compared), "chosen": index, "saliency": gradients}

    @cached_property
    def _compared(self) -> tuple[list[str], npt.NDArray[np.float32]]:
        """Texts of the run's data, the held-out ones first, and their vectors (texts, d_model)."""
        texts: list[str] = []
        with suppress(WeftError):  # the data may be gone, and an imported model has none
            texts = [text for side in ORIGINS for text in self.objective.first_texts(side, MAX_COMPARED)]
        return texts, self._embed(texts) if texts else np.zeros((0, 0), dtype=np.float32)

    def _embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        options = EmbeddingOptions(length=self.objective.length)
        return embed(self.model, self.objective.tokenizer, texts, options=options)

    def _gradients(self, target: str, ids: Sequence[Sequence[int]], choose: Choose) -> Record:
        """Return the gradients of a scalar of the outputs for one text, or for two, cut to a row as for predictions."""
        frame, length = self.objective.frame, self.objective.length
        max_tokens, at = frame.text_length(length, len(ids)), len(frame.before)
        if len(ids) == 1:
            read = [("text", ids[0][:max_tokens], at)]
        else:
            first, second = fit_pair(ids[0], ids[1], max_tokens)
            names = (*self.objective.settings.input_columns, "second")[:2]
            read = [(names[0], first, at), (names[1], second, at + len(first) + len(frame.between))]
        batch = framed([ids[0]], None if len(ids) == 1 else [ids[1]], frame, length=length)
        inputs = {"mask": batch.mask} | ({} if batch.segments is None else {"segments": batch.segments})
        return self._row_gradients(target, read, batch.tokens, inputs=inputs, choose=choose)

    def _row_gradients(
        self,
        target: str,
        read: Sequence[tuple[str, Sequence[int], int]],
        tokens: Tensor,
        *,
        inputs: Mapping[str, Tensor],
        choose: Choose,
    ) -> Record:
        """Return the gradients for a row; `read` has the name of each text, its ids, and its offset in the row."""
        device = device_of(self.model)
        inputs = {name: value.to(device) for name, value in inputs.items()}
        value, [(norm, times)] = views.saliency.embedding_gradients(
            self.model, lambda: choose(self.model(tokens.to(device), **inputs).float()), ("embedding",)
        )
        sides = []
        for name, ids, offset in read:
            part, shown = slice(offset, offset + len(ids)), views.reading.text_tokens(self.objective.tokenizer, ids)
            sides.append(views.saliency.Side(name, tuple(shown), norm=norm[part], times_input=times[part]))
        return as_json({"target": target, "value": value, "sides": sides})


def _index(output: str | int | None, size: int, *, default: int) -> int:
    if output is None:
        return default
    if not isinstance(output, int) or not 0 <= output < size:
        raise ConfigError(f"output = {output}: expected an index, 0 … {size - 1}")
    return output
