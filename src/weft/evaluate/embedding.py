"""One vector a text: what a model makes of its tokens, pooled."""

import io
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from weft.data.streams import lines
from weft.data.table import RowSource, read_rows
from weft.errors import DataError, ModelError
from weft.explain.hidden import check_readable, frame_for, longest, read
from weft.models.base import LanguageModel
from weft.models.config import EmbeddingHead
from weft.models.heads import pool
from weft.progress import bar
from weft.text.tokenizer import Tokenizer

Pooling = Literal["mean", "first", "last"]


def embed(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    pooling: Pooling | None = None,
    normalise: bool = True,
    batch: int = 32,
    say: Callable[[str], object] | None = None,
) -> NDArray[np.float32]:
    """Vectors (N, d_model) of N texts, in their order, each of length 1 if `normalise`.

    `pooling` takes the mean over a text's tokens, or its first token (an encoder's [CLS]) or last one (a decoder's,
    which has read all others). Without it a model that was trained to embed pools as it was trained to, and any other
    takes the mean. Texts that are longer than the model reads are cut, and `say` is told how many.
    """
    check_readable(model)
    head = getattr(model.config, "head", None)
    how = pooling or (head.pooling if isinstance(head, EmbeddingHead) else "mean")
    most = longest(model)
    ids = tokenizer.encode_batch(texts)
    frame = frame_for(model)
    framed = [frame(tokenizer, each, most) for each in ids]
    cut = sum(text.length < len(each) for text, each in zip(framed, ids, strict=True))
    if cut and say is not None:
        say(f"{cut} of {len(texts)} texts are longer than the {most} tokens this model reads; their ends are left out")
    found = np.zeros((len(texts), model.config.d_model), dtype=np.float32)  # type: ignore[attr-defined]
    with bar("embedding", len(texts)) as advance:
        for group in read(model, tokenizer, framed, batch=batch, progress=advance):
            vectors = pool(group.features, group.mask, how)
            _refuse_no_numbers(vectors, group.rows)
            vectors = F.normalize(vectors, dim=-1) if normalise else vectors
            found[group.rows] = vectors.to("cpu", torch.float32).numpy()
    return found


def _refuse_no_numbers(vectors: Tensor, rows: Sequence[int]) -> None:
    broken = (~vectors.isfinite().all(dim=-1)).nonzero().flatten().tolist()
    if broken:
        number = min(rows[place] for place in broken) + 1
        raise ModelError(f"text {number}: the model gives no numbers for it (NaN); its weights may be damaged")


def read_texts(name: str, column: str = "text") -> list[str]:
    """The texts of a file: one a line, or one a row of a table or of JSON; `-` is standard input, one text a line."""
    if name != "-":
        return [row.values[column] for row in read_rows(RowSource([name], {column: "text"}))]
    if column != "text":
        raise DataError(f"standard input: one text a line, without a column '{column}'; name a file that has columns")
    found = [line.strip() for line in lines(name)]
    empty = next((number for number, text in enumerate(found, 1) if not text), None)
    if empty is not None:
        raise DataError(f"standard input, line {empty}: empty; expected a text in every line")
    if not found:
        raise DataError("standard input: holds no text")
    return found


def npy(vectors: NDArray[np.float32]) -> bytes:
    """The content of a .npy file."""
    written = io.BytesIO()
    np.save(written, vectors, allow_pickle=False)
    return written.getvalue()
