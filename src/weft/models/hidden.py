"""Features of many texts, batch by batch, with every text framed by special tokens as in training.

A tokenizer file that frames texts (LLaMA: bos text, BERT: [CLS] text [SEP]) shows how its model was trained. Without
such a frame, an encoder reads [CLS] text [SEP], and other models the text and the end token. Models that only weft
trains were trained without the file's frame, and read texts in the same way here (`trained_frame`).

Features are the states of the top layer, or for ELMo the mean of all layers; `LayerMix` chooses others.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from weft.errors import DataError, ModelError
from weft.models.base import READ_CHUNK, LanguageModel, evaluating
from weft.models.config import Decoder, EncoderDecoder
from weft.models.elmo import ELMo
from weft.models.head_config import LMHead
from weft.models.recurrent import Recurrent
from weft.models.transformer import Transformer
from weft.models.word_table import WordTable
from weft.progress import pause
from weft.text.tokenizer import Tokenizer

Ids = Sequence[int]
MARKED = "[]"  # stands for the words in brackets


class FramedText(NamedTuple):
    """Token ids of a text in its frame: `before` special tokens, `length` of the text, then the end of the frame."""

    ids: list[int]
    before: int
    length: int


Framing = Callable[[Tokenizer, Sequence[int], int | None], FramedText]  # of a text's ids, within this many tokens


class TextFeatures(NamedTuple):
    """Batch of texts: their indices, features (batch, time, d_model), and mask (batch, time), True where real."""

    rows: list[int]
    features: Tensor
    mask: Tensor


class Occurrence(NamedTuple):
    """Word in a text: the characters [start, end) of sentence number `sentence`."""

    sentence: int
    start: int
    end: int
    text: str


class LayerMix(NamedTuple):
    """Layers that features are made of: the one with number `layer`, where 0 is the embeddings, or all of them in the
    mean Σ softmax(weights)_j h_j (Peters et al. 2018, equation 1, with γ = 1)."""

    layer: int | None = None
    weights: tuple[float, ...] | None = None

    def check(self, model: LanguageModel) -> None:
        """Raise ModelError unless a model has these layers."""
        if not isinstance(model, Transformer | ELMo):
            kind = getattr(model.config, "kind", type(model).__name__)
            raise ModelError(f"layer, mix: a model of kind '{kind}' has features of one layer; leave them out")
        last = model.config.layers
        if self.layer is not None and not 0 <= self.layer <= last:
            raise ModelError(f"layer = {self.layer}: this model has 0, the embeddings, to {last}")
        if self.weights is not None and len(self.weights) != last + 1:
            expected = f"{last + 1} are needed, for the embeddings and {last} layers"
            raise ModelError(f"mix = {','.join(f'{weight:g}' for weight in self.weights)}: {expected}")

    def of(self, states: Sequence[Tensor]) -> Tensor:
        """Features (batch, time, width) from the states of all layers, each (batch, time, width)."""
        if self.layer is not None:
            return states[self.layer]
        shares = torch.tensor(self.weights or [0.0] * len(states)).softmax(0).tolist()
        return sum((share * state for share, state in zip(shares, states, strict=True)), torch.zeros_like(states[0]))


def check_readable(model: LanguageModel) -> None:
    """Raise ModelError if a model cannot read a text without a source."""
    if not isinstance(model, Recurrent | ELMo | Transformer | WordTable) or isinstance(model.config, EncoderDecoder):
        kind = getattr(model.config, "kind", type(model).__name__)
        instead = "use an encoder, a decoder, a recurrent model or word vectors"
        raise ModelError(f"a model of kind '{kind}' gives no vectors for a text; {instead}")


def context_of(model: LanguageModel) -> int | None:
    """Number of tokens that a model can read; None: no limit, as for recurrent models."""
    return model.config.context if isinstance(model, Transformer) else None


def feature_width(model: LanguageModel) -> int:
    """Width of the features of a token: ELMo has states of two directions."""
    width: int = model.config.d_model  # type: ignore[attr-defined]
    return 2 * width if isinstance(model, ELMo) else width


def frame_for(model: LanguageModel) -> Framing:
    """Function that frames texts for a model. Only weft trains recurrent models, ELMo, and decoders without an LM
    head. Vectors of words need no frame."""
    config = model.config
    if isinstance(model, WordTable):
        return lambda tokenizer, ids, max_tokens: surround(((), ()), ids, max_tokens)
    trained_here = isinstance(config, Decoder) and not isinstance(config.head, LMHead)
    return trained_frame if trained_here or isinstance(model, Recurrent | ELMo) else frame


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
    layers: LayerMix | None = None,
    progress: Callable[[int], object] | None = None,
) -> Iterator[TextFeatures]:
    """Yield features of texts, longest first: batches have similar lengths, and the first needs the most memory."""
    check_readable(model)
    layers = LayerMix() if layers is None and isinstance(model, ELMo) else layers
    if layers is not None:
        layers.check(model)
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
            elif layers is not None:
                features = layers.of(_layer_states(model, tokens.to(device), inputs)).float()
            else:
                features = model.features(tokens.to(device), **inputs).float()
            yield TextFeatures(rows, features, mask.to(device))
            pause()
            if progress is not None:
                progress(len(rows))


def _layer_states(model: LanguageModel, tokens: Tensor, inputs: Mapping[str, Tensor]) -> Sequence[Tensor]:
    """States (batch, time, width) of every layer; the first are the embeddings."""
    if isinstance(model, ELMo):
        return model.layer_states(tokens, **inputs).unbind()
    assert isinstance(model, Transformer)
    stack = model.encoder or model.decoder
    assert stack is not None
    states: list[Tensor] = []

    def keep(block: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        states.extend((inputs[0], output) if not states else (output,))

    hooks = [block.register_forward_hook(keep) for block in stack.blocks]
    try:
        features = model.features(tokens, **inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return [*states[:-1], features]  # a pre-norm stack ends in a norm


def find_words(texts: Sequence[str], word: str) -> tuple[list[str], list[Occurrence]]:
    """Return texts, and every occurrence of a word in them, in any case. If the word is `[]`, the occurrences are those
    in brackets, which are removed from the texts. Raise DataError for a text without one."""
    if not word.strip():
        raise DataError("word: empty; give a word, or [] for the words in brackets")
    pattern = re.compile(rf"(?<!\w){re.escape(word.strip())}(?!\w)", re.IGNORECASE)
    plain, found = [], list[Occurrence]()
    for number, text in enumerate(texts):
        if word == MARKED:
            parts = re.split(r"\[\s*([^][]*[^][\s])\s*\]", text)
            ends = np.cumsum([len(part) for part in parts]).tolist()
            text, places = "".join(parts), [(ends[n - 1], ends[n]) for n in range(1, len(parts), 2)]
        else:
            places = [match.span() for match in pattern.finditer(text)]
        if not places:
            what = "no word is in [brackets]" if word == MARKED else f"'{word.strip()}' is not in it"
            raise DataError(f"text {number + 1}: {what}: '{text[:60]}'")
        plain.append(text)
        found += [Occurrence(number, start, end, text[start:end]) for start, end in places]
    return plain, found


def word_vectors(
    model: LanguageModel,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    words: Sequence[Occurrence],
    frame: Framing | None = None,
    max_tokens: int | None = None,
    batch: int = 32,
    layers: LayerMix | None = None,
) -> dict[Occurrence, NDArray[np.float32]]:
    """Vector (width,) of each occurrence in its text: the mean of its tokens' features. Words beyond `max_tokens`, by
    default the model's context, are left out, and words of unknown tokens alone."""
    check_readable(model)
    frame, spans = frame or frame_for(model), [tokenizer.token_spans(text) for text in texts]
    framed = [frame(tokenizer, [span.id for span in row], max_tokens or context_of(model)) for row in spans]
    by_text: dict[int, list[Occurrence]] = {}
    for word in words:
        by_text.setdefault(word.sentence, []).append(word)
    vectors: dict[Occurrence, NDArray[np.float32]] = {}
    for group in read(model, tokenizer, framed, batch=batch, layers=layers):
        for row, features in zip(group.rows, group.features.cpu(), strict=True):
            for word in by_text.get(row, ()):
                tokens = [n for n, span in enumerate(spans[row]) if span.start < word.end and span.end > word.start]
                known = any(spans[row][n].id != tokenizer.unk_id for n in tokens)
                if known and tokens[-1] < framed[row].length:
                    vectors[word] = features[[framed[row].before + n for n in tokens]].mean(dim=0).numpy()
    return vectors
