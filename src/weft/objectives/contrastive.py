"""Texts that belong together: vectors that lie close, and how any model's vector of a text is made."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.data.batch import Batch, Source, framed, framed_lengths
from weft.data.examples import Examples
from weft.data.table import Kind, Row
from weft.errors import ModelError
from weft.models.base import LanguageModel, row_rng
from weft.models.config import EmbeddingHead
from weft.models.heads import pool
from weft.models.hidden import check_readable, context_of, frame_for, read
from weft.objectives.rows import Numbers, RowObjective, head_output
from weft.progress import Log, bar
from weft.recipe import objective as config
from weft.text.tokenizer import Tokenizer
from weft.training.objective import Loss

SIDES = ("first", "second")
Pooling = Literal["mean", "first", "last"]
SECOND_READING = 1 << 10  # far beyond the numbers of any model's dropouts: partners drop numbers of their own


class Contrastive(RowObjective[config.Contrastive]):
    """Two columns of text: which text of the batch belongs to this one."""

    usage = "weft embed {run} < lines.txt"

    def columns(self) -> Mapping[str, Kind]:
        return {self.settings.first: "text", self.settings.second: "text"}

    def encode(self, rows: Sequence[Row]) -> Iterable[dict[str, Any]]:
        return self.ids(rows, {"first": self.settings.first, "second": self.settings.second})

    def lengths(self, examples: Examples) -> Numbers:
        return np.stack([framed_lengths(examples, (side,), self.frame, self.length) for side in SIDES], axis=1)

    def batch(self, examples: Examples, numbers: Numbers) -> Batch:
        """Two texts that belong together, each in a frame of its own; the other one is the source. The target of row i
        is i: its partner among all others (B,)."""
        texts = ([examples.ids(side, n).tolist() for n in numbers] for side in SIDES)
        one, other = (framed(ids, None, self.frame, length=self.length) for ids in texts)
        source = Source(other.tokens, other.mask)
        return Batch(one.tokens, torch.arange(len(one.tokens)), mask=one.mask, source=source)

    def loss(self, model: LanguageModel, features: Tensor, batch: Batch) -> Loss:
        """Asked both ways: the mean of two −log p (Radford et al. 2021, §2.3). Vectors of length 1: cosines."""
        assert batch.source is not None, "each text has a partner"
        own_rng = row_rng(batch)
        rng = None if own_rng is None else own_rng.for_repeat(SECOND_READING)
        ones = head_output(model, features, batch)
        others = model(batch.source.tokens, mask=batch.source.mask, rng=rng).float()
        cosines = F.normalize(ones, dim=-1) @ F.normalize(others, dim=-1).mT / self.settings.temperature
        own = torch.arange(len(cosines), device=cosines.device)
        there, back = (F.cross_entropy(each, own, reduction="sum") for each in (cosines, cosines.mT))
        loss = (there + back) / 2
        return loss, batch.count, {"nll": loss.detach()}

    def metrics(self, model: LanguageModel, batches: Iterable[Batch]) -> dict[str, Any]:
        return dict(self.mean_loss(model, batches))


@dataclass(frozen=True)
class Embedding:
    """How a text becomes a vector, `batch` texts at a time; with `normalise` it has length 1.

    `pooling` takes the mean over a text's tokens, or its first token (an encoder's [CLS]) or last one (a decoder's,
    which has read all others). Without it a model that was trained to embed pools as it was trained to, and any other
    takes the mean. Of a text the first `length` tokens are read; without it, all that the model can read.
    """

    pooling: Pooling | None = None
    normalise: bool = True
    batch: int = 32
    length: int | None = None


def embed(
    model: LanguageModel, tokenizer: Tokenizer, texts: Sequence[str], settings: Embedding, log: Log = lambda line: None
) -> npt.NDArray[np.float32]:
    """Vectors (N, d_model) of N texts, in their order. Texts that are longer than the model reads are cut, and that is
    logged."""
    check_readable(model)
    head = getattr(model.config, "head", None)
    pooling = settings.pooling or (head.pooling if isinstance(head, EmbeddingHead) else "mean")
    most, frame = settings.length or context_of(model), frame_for(model)
    ids = tokenizer.encode_batch(texts)
    framed_texts = [frame(tokenizer, each, most) for each in ids]
    cut = sum(text.length < len(each) for text, each in zip(framed_texts, ids, strict=True))
    if cut:
        log(f"{cut} of {len(texts)} texts are longer than the {most} tokens this model reads; their ends are left out")
    found = np.zeros((len(texts), model.config.d_model), dtype=np.float32)  # type: ignore[attr-defined]
    with bar("embedding", len(texts)) as advance:
        for group in read(model, tokenizer, framed_texts, batch=settings.batch, progress=advance):
            vectors = pool(group.features, group.mask, pooling)
            vectors = F.normalize(vectors, dim=-1) if settings.normalise else vectors
            found[group.rows] = vectors.to("cpu", torch.float32).numpy()
    broken = np.flatnonzero(~np.isfinite(found).all(axis=1))
    if len(broken):
        raise ModelError(f"text {broken[0] + 1}: its vector is not finite (NaN); the model's weights may be damaged")
    return found
