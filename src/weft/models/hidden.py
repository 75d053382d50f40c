"""A model's features of many texts, batch by batch, with every text framed as in training.

A tokenizer whose own file frames a text (LLaMA's: bos text, BERT's: [CLS] text [SEP]) shows how its model read texts.
Where the file has no frame, an encoder reads [CLS] text [SEP], and other models the text and the token that ends it.
Models that only weft trains were trained without the file's frame, and read texts the same way here (`trained_frame`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from weft.errors import DataError, ModelError
from weft.models.base import LanguageModel, evaluating
from weft.models.config import Decoder, EncoderDecoder, LMHead
from weft.models.recurrent import Recurrent
from weft.models.transformer import Transformer
from weft.text.tokenizer import Tokenizer


class Framed(NamedTuple):
    """A text as a model reads it: `before` tokens of the frame, `length` of the text, perhaps more of the frame."""

    ids: list[int]
    before: int
    length: int


class Read(NamedTuple):
    """Some texts that were read: their numbers, features (batch, time, d_model), mask (batch, time) True where real."""

    rows: list[int]
    features: Tensor
    mask: Tensor


def check_readable(model: LanguageModel) -> None:
    """Refuse a model that cannot read a text alone."""
    if not isinstance(model, Recurrent | Transformer) or isinstance(model.config, EncoderDecoder):
        kind = getattr(model.config, "kind", type(model).__name__)
        instead = "use an encoder, a decoder or a recurrent model"
        raise ModelError(f"a model of kind '{kind}' gives no vectors for a text; {instead}")


def context_of(model: LanguageModel) -> int | None:
    """How many tokens a model can read; a recurrent one has no limit."""
    return model.config.context if isinstance(model, Transformer) else None


def frame_for(model: LanguageModel) -> Callable[[Tokenizer, Sequence[int], int | None], Framed]:
    """How a model reads a text. Only weft trains recurrent models, and decoders with heads for other than words."""
    config = model.config
    trained_here = isinstance(config, Decoder) and not isinstance(config.head, LMHead)
    return trained_frame if trained_here or isinstance(model, Recurrent) else frame


def frame(tokenizer: Tokenizer, ids: Sequence[int], most: int | None) -> Framed:
    """A text's ids in their frame; what doesn't fit into `most` tokens is cut off the text's end."""
    before, after = tokenizer.frame
    return _framed(before, ids, after, most) if before or after else trained_frame(tokenizer, ids, most)


def trained_frame(tokenizer: Tokenizer, ids: Sequence[int], most: int | None) -> Framed:
    """The same in the frame that sentences have in weft's own training (`weft.data.batch.framed`)."""
    before = () if tokenizer.cls_id is None or tokenizer.sep_id is None else (tokenizer.cls_id,)
    end = tokenizer.sep_id if before else tokenizer.eos_id
    return _framed(before, ids, () if end is None else (end,), most)


def _framed(before: Sequence[int], ids: Sequence[int], after: Sequence[int], most: int | None) -> Framed:
    fits = len(ids) if most is None else max(0, most - len(before) - len(after))
    kept = list(ids[:fits])
    return Framed([*before, *kept, *after], len(before), len(kept))


@torch.no_grad()
def read(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[Framed],
    *,
    batch: int = 32,
    progress: Callable[[int], object] | None = None,
) -> Iterator[Read]:
    """Read texts, longest first, so that a batch has similar lengths and the first one needs the most memory."""
    check_readable(model)
    for number, text in enumerate(texts, 1):
        if not text.ids:
            raise DataError(f"text {number} is empty, and this tokenizer has no special token to put in its place")
    # masked places are never read, so without a pad token any id will do
    pad = 0 if tokenizer.pad_id is None else tokenizer.pad_id
    order = sorted(range(len(texts)), key=lambda row: -len(texts[row].ids))
    with evaluating(model) as device:
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            ids = [torch.tensor(texts[row].ids) for row in rows]
            tokens = pad_sequence(ids, batch_first=True, padding_value=pad)
            mask = torch.arange(tokens.shape[1]) < torch.tensor([len(each) for each in ids])[:, None]
            given = {} if isinstance(model, Recurrent) or bool(mask.all()) else {"mask": mask.to(device)}
            features = model.features(tokens.to(device), **given).float()
            yield Read(rows, features, mask.to(device))
            if progress is not None:
                progress(len(rows))
