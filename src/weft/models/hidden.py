"""Features of many texts, batch by batch, with every text framed by special tokens as in training.

A tokenizer file that frames texts (LLaMA: bos text, BERT: [CLS] text [SEP]) shows how its model was trained. Without
such a frame, an encoder reads [CLS] text [SEP], and other models the text and the end token. Models that only weft
trains were trained without the file's frame, and read texts in the same way here (`trained_frame`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from weft.errors import DataError, ModelError
from weft.models.base import READ_CHUNK, LanguageModel, evaluating
from weft.models.config import Decoder, EncoderDecoder, LMHead
from weft.models.recurrent import Recurrent
from weft.models.transformer import Transformer
from weft.models.word_table import WordTable
from weft.progress import pause
from weft.text.tokenizer import Tokenizer

Ids = Sequence[int]


class FramedText(NamedTuple):
    """Token ids of a text in its frame: `before` special tokens, `length` of the text, then the end of the frame."""

    ids: list[int]
    before: int
    length: int


class TextFeatures(NamedTuple):
    """Batch of texts: their indices, features (batch, time, d_model), and mask (batch, time), True where real."""

    rows: list[int]
    features: Tensor
    mask: Tensor


def check_readable(model: LanguageModel) -> None:
    """Raise ModelError if a model cannot read a text without a source."""
    if not isinstance(model, Recurrent | Transformer | WordTable) or isinstance(model.config, EncoderDecoder):
        kind = getattr(model.config, "kind", type(model).__name__)
        instead = "use an encoder, a decoder, a recurrent model or word vectors"
        raise ModelError(f"a model of kind '{kind}' gives no vectors for a text; {instead}")


def context_of(model: LanguageModel) -> int | None:
    """Number of tokens that a model can read; None: no limit, as for recurrent models."""
    return model.config.context if isinstance(model, Transformer) else None


def frame_for(model: LanguageModel) -> Callable[[Tokenizer, Sequence[int], int | None], FramedText]:
    """Function that frames texts for a model. Only weft trains recurrent models, and decoders without an LM head.
    Vectors of words need no frame."""
    config = model.config
    if isinstance(model, WordTable):
        return lambda tokenizer, ids, max_tokens: surround(((), ()), ids, max_tokens)
    trained_here = isinstance(config, Decoder) and not isinstance(config.head, LMHead)
    return trained_frame if trained_here or isinstance(model, Recurrent) else frame


def frame(tokenizer: Tokenizer, ids: Sequence[int], max_tokens: int | None) -> FramedText:
    """Frame a text's ids as its tokenizer file does; the text is cut at its end to fit into `max_tokens`."""
    if not any(tokenizer.frame):
        return trained_frame(tokenizer, ids, max_tokens)
    return surround(tokenizer.frame, ids, max_tokens)


def trained_frame(tokenizer: Tokenizer, ids: Sequence[int], max_tokens: int | None) -> FramedText:
    """Frame a text's ids as weft's training does (`weft.data.batch.framed`), cut to fit into `max_tokens`."""
    before = () if tokenizer.cls_id is None or tokenizer.sep_id is None else (tokenizer.cls_id,)
    end = tokenizer.sep_id if before else tokenizer.eos_id
    return surround((before, () if end is None else (end,)), ids, max_tokens)


def surround(around: tuple[Ids, Ids], ids: Sequence[int], max_tokens: int | None) -> FramedText:
    """Put ids before and after a text's ids; the text is cut at its end to fit into `max_tokens`."""
    before, after = around
    length = len(ids) if max_tokens is None else max(0, max_tokens - len(before) - len(after))
    text = list(ids[:length])
    return FramedText([*before, *text, *after], len(before), len(text))


@torch.no_grad()
def read(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[FramedText],
    *,
    batch: int = 32,
    progress: Callable[[int], object] | None = None,
) -> Iterator[TextFeatures]:
    """Yield features of texts, longest first: batches have similar lengths, and the first needs the most memory."""
    check_readable(model)
    for number, text in enumerate(texts, 1):
        if not text.ids:
            raise DataError(f"text {number} is empty, and this tokenizer has no special token to replace it")
    pad = 0 if tokenizer.pad_id is None else tokenizer.pad_id  # padding is masked, so any id will do
    order = sorted(range(len(texts)), key=lambda row: -len(texts[row].ids))
    with evaluating(model) as device:
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            ids = [torch.tensor(texts[row].ids) for row in rows]
            tokens = pad_sequence(ids, batch_first=True, padding_value=pad)
            mask = torch.arange(tokens.shape[1]) < torch.tensor([len(text) for text in ids])[:, None]
            inputs = {} if isinstance(model, Recurrent) or bool(mask.all()) else {"mask": mask.to(device)}
            if isinstance(model, Recurrent) and tokens.shape[1] > READ_CHUNK:  # with pauses
                features = model.advance(tokens.to(device), model.start(*tokens.shape)).float()
            else:
                features = model.features(tokens.to(device), **inputs).float()
            yield TextFeatures(rows, features, mask.to(device))
            pause()
            if progress is not None:
                progress(len(rows))
