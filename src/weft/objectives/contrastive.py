"""Contrastive learning of text embeddings, and the embedding of a text by any model."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.data.batch import Batch, Source, framed, framed_lengths
from weft.data.examples import Examples
from weft.data.table import Kind, Row
from weft.errors import DataError, ModelError
from weft.models.base import LanguageModel, row_rng
from weft.models.head_config import EmbeddingHead, Pooling
from weft.models.heads import pool
from weft.models.hidden import (
    FramedText,
    Framing,
    Ids,
    LayerMix,
    check_readable,
    context_of,
    feature_width,
    find_words,
    frame_for,
    read,
    surround,
    word_vectors,
)
from weft.objectives.rows import Numbers, RowObjective, head_output
from weft.progress import Log, bar
from weft.recipe import objective as config
from weft.text.tokenizer import Tokenizer
from weft.training.objective import Loss

SIDES = ("first", "second")
SECOND_PASS = 1 << 10  # offset of the dropout numbers in the partners' pass, beyond those of any model


class Contrastive(RowObjective[config.Contrastive]):
    """Find the partner of each text, from two columns, among those of the batch."""

    usage = "weft embed {run} < lines.txt"

    def columns(self) -> Mapping[str, Kind]:
        return {self.settings.first: "text", self.settings.second: "text"}

    def encode(self, rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
        return self.ids(rows, {"first": self.settings.first, "second": self.settings.second})

    def lengths(self, examples: Examples) -> Numbers:
        return np.stack([framed_lengths(examples, (side,), self.frame, length=self.length) for side in SIDES], axis=1)

    def batch(self, examples: Examples, numbers: Numbers) -> Batch:
        """Return pairs of texts in separate frames, the second as the source; targets (B,) are the partners' rows."""
        texts = ([examples.ids(side, n).tolist() for n in numbers] for side in SIDES)
        first, second = (framed(ids, None, self.frame, length=self.length) for ids in texts)
        source = Source(second.tokens, second.mask)
        return Batch(first.tokens, torch.arange(len(first.tokens)), mask=first.mask, source=source)

    def loss(self, model: LanguageModel, features: Tensor, batch: Batch) -> Loss:
        """Return the mean −log p of the partner in both directions, by cosines (Radford et al. 2021, §2.3)."""
        assert batch.source is not None, "each text has a partner"
        rng = row_rng(batch)
        first = head_output(model, features, batch)
        second_rng = None if rng is None else rng.for_repeat(SECOND_PASS)
        second = model(batch.source.tokens, mask=batch.source.mask, rng=second_rng).float()
        cosines = F.normalize(first, dim=-1) @ F.normalize(second, dim=-1).mT / self.settings.temperature
        partners = torch.arange(len(cosines), device=cosines.device)
        rows, columns = (F.cross_entropy(logits, partners, reduction="sum") for logits in (cosines, cosines.mT))
        loss = (rows + columns) / 2
        return loss, batch.count, {"nll": loss.detach()}


@dataclass(frozen=True)
class EmbeddingOptions:
    """Options of text embeddings.

    `pooling` is the mean over a text's tokens, the first token (an encoder's [CLS]) or the last one (a decoder's, which
    has read all others). By default a model trained to embed pools as in training, and any other takes the mean.
    """

    pooling: Pooling | None = None
    normalise: bool = True  # to length 1
    batch: int = 32  # texts read at a time
    length: int | None = None  # tokens read of a text; None: as many as the model can read
    frame: tuple[Ids, Ids] | None = None  # ids before and after every text; None: those that the model expects
    layers: LayerMix | None = None  # whose states are pooled; None: the top layer, or ELMo's mean of all
    word: str | None = None  # whose occurrences have a vector each, instead of the texts; `[]`: those in brackets


DEFAULT = EmbeddingOptions()


def embed(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    options: EmbeddingOptions = DEFAULT,
    log: Log = lambda line: None,
) -> npt.NDArray[np.float32]:
    """Return the vectors (N, width) of N texts, or of N occurrences of a word in them. Texts longer than the model
    reads are cut, which is logged."""
    check_readable(model)
    max_length, frame = options.length or context_of(model), frame_for(model)
    if options.frame is not None:
        around = options.frame
        frame = lambda tokenizer, ids, max_tokens: surround(around, ids, max_tokens)  # noqa: E731
    if options.word is not None:
        plain, words = find_words(texts, options.word)
        reading: Any = {"frame": frame, "max_tokens": max_length, "batch": options.batch, "layers": options.layers}
        found = word_vectors(model, tokenizer, plain, words=words, **reading)
        for word in (each for each in words if each not in found):
            limit = "" if max_length is None else f", or beyond the {max_length} tokens that it reads"
            raise DataError(f"text {word.sentence + 1}: '{word.text}' is unknown to this model{limit}")
        vectors = torch.from_numpy(np.stack([found[word] for word in words]))
        embeddings = (F.normalize(vectors, dim=-1) if options.normalise else vectors).numpy()
        numbers = [word.sentence for word in words]
    else:
        framed_texts = _framed_texts(tokenizer, texts, frame, max_length=max_length, log=log)
        embeddings, numbers = _pooled(model, tokenizer, framed_texts, options=options), list(range(len(texts)))
    broken = np.flatnonzero(~np.isfinite(embeddings).all(axis=1))
    if len(broken):
        number = numbers[broken[0]] + 1
        raise ModelError(f"text {number}: its vector is not finite (NaN); the model's weights may be damaged")
    return embeddings


def _framed_texts(
    tokenizer: Tokenizer, texts: Sequence[str], frame: Framing, *, max_length: int | None, log: Log
) -> list[FramedText]:
    encoded = tokenizer.encode_batch(texts)
    framed_texts = [frame(tokenizer, ids, max_length) for ids in encoded]
    cut = sum(text.length < len(ids) for text, ids in zip(framed_texts, encoded, strict=True))
    if cut:
        limit = f"the {max_length} tokens this model reads"
        log(f"{cut} of {len(texts)} texts are longer than {limit}; their ends are left out")
    return framed_texts


def _pooled(
    model: LanguageModel, tokenizer: Tokenizer, texts: Sequence[FramedText], *, options: EmbeddingOptions
) -> npt.NDArray[np.float32]:
    head = getattr(model.config, "head", None)
    pooling = options.pooling or (head.pooling if isinstance(head, EmbeddingHead) else "mean")
    embeddings = np.zeros((len(texts), feature_width(model)), dtype=np.float32)
    with bar("embedding", len(texts)) as advance:
        groups = read(model, tokenizer, texts, batch=options.batch, layers=options.layers, progress=advance)
        for group in groups:
            vectors = pool(group.features, group.mask, pooling)
            vectors = F.normalize(vectors, dim=-1) if options.normalise else vectors
            embeddings[group.rows] = vectors.to("cpu", torch.float32).numpy()
    return embeddings
