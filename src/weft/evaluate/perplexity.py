"""How surprised a model is by a text: mean negative log-likelihood, perplexity, bits per byte.

Every token of the text is scored once. The mean is over tokens, so it depends on the tokenizer; bits per byte divides
the same sum by the UTF-8 bytes of the text, so it compares models with different tokenizers. That holds only if the
whole text is paid for: what its tokens don't spell, unknown words above all, is charged at 8 bits a byte
(`evaluate/unspelled.py`).
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.data.batch import restarting_positions
from weft.data.shards import Tokens
from weft.errors import DataError
from weft.models.base import LanguageModel, device_of, evaluating
from weft.models.ngram import NGram
from weft.nn.recurrent import carrying

LANE_WINDOWS = 64  # at least so many windows follow each other at each place of a text that is read with carried states
HEAD_ELEMENTS = 1 << 24  # logits computed at a time: 64 MiB in fp32, whatever the batch and the vocabulary


@dataclass(frozen=True)
class Score:
    """The negative log-likelihood of a text, summed, and what to divide it by."""

    nats: float
    tokens: int
    bytes: int
    unknown: int = 0  # tokens that stand for words outside the vocabulary
    unspelled: float = 0.0  # bytes of the text that no token spells

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood of a token, in nats."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp of the mean: as uncertain as a fair choice among this many tokens."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of UTF-8 text that a coder with this model would need; it writes unspelled bytes as they are."""
        return self.spelled_nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def spelled_nats(self) -> float:
        """The cost of the text itself: of its tokens, and of the bytes that they don't spell."""
        return self.nats + 8 * math.log(2) * self.unspelled

    @property
    def unknown_share(self) -> float:
        """The share of unknown tokens."""
        return self.unknown / self.tokens

    @classmethod
    def total(cls, scores: "Iterable[Score]") -> "Score":
        """One score over several texts."""
        found = [(s.nats, s.tokens, s.bytes, s.unknown, s.unspelled) for s in scores]
        return cls(*map(sum, zip(*found, strict=True)))

    def metrics(self) -> dict[str, float]:
        """The metrics by name, as logs and tables show them."""
        return {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


@dataclass(frozen=True)
class Span:
    """A window of a text: it reads tokens start … start + length − 1 and scores its last `scored` predictions."""

    start: int
    length: int
    scored: int


def spans(tokens: int, length: int, stride: int | None = None) -> Iterator[Span]:
    """Windows over a text of `tokens` so that each token that has one before it is predicted exactly once.

    Without `stride` windows don't overlap, and the first tokens of each have little context. With it each window
    starts `stride` further and scores only what the one before didn't reach: slower, and every token (after the
    first window) is predicted from at least length − stride others.
    """
    step = length if stride is None else stride
    assert 0 < step <= length, "a stride beyond the window would skip tokens"
    reached = 0  # predictions made so far; prediction i is of token i + 1
    start = 0
    while reached < tokens - 1:
        end = min(start + length, tokens - 1)
        yield Span(start, end - start, end - reached)
        reached = end
        start += step


@dataclass(frozen=True)
class Reading:
    """How a text is read to be scored: in windows of `length` tokens, `batch` at a time, overlapping with `stride`.

    `first` is the token that stands before a text in training; with it the text's first token is scored too, so that
    bits per byte counts every byte. With `document_mask` no token sees another document, and a document's first token,
    which then nothing predicts, isn't scored.

    With `carry` a recurrent model reads the text at a few places side by side, each window on from the one before.
    """

    length: int
    batch: int = 16
    stride: int | None = None
    first: int | None = None
    document_mask: bool = False
    carry: bool = False

    def __post_init__(self) -> None:
        assert self.first is None or not self.document_mask, "with the mask nothing stands before a text"
        if self.stride is not None and not 0 < self.stride <= self.length:
            raise DataError(f"stride = {self.stride}: expected 1 … {self.length}, the window's length")


@torch.no_grad()
def score(
    model: LanguageModel,
    text: Tokens,
    reading: Reading,
    *,
    limit: int | None = None,
    progress: Callable[[int], object] = lambda scored: None,
) -> Score:
    """Score all of `text`, or its first `limit` tokens; `progress` is called with the tokens of each batch."""
    total = len(text) if limit is None else min(limit, len(text))
    shift = 0 if reading.first is None else 1
    if total + shift < 2:
        raise DataError(f"the text to evaluate holds {total} tokens; at least {2 - shift} are needed")
    nats, count = 0.0, 0
    with evaluating(model):
        if reading.carry and reading.stride is None:
            nats, count = _score_lanes(model, text, total + shift, reading, progress)
            return Score(nats, count, _bytes_of(text, total))
        for group in _batches(spans(total + shift, reading.length, reading.stride), reading.batch):
            loss, scored = _score_group(model, text, group, reading)
            nats += loss
            count += scored
            progress(scored)
    if not count:
        raise DataError("no document of the text to evaluate holds two tokens; there is nothing to predict")
    return Score(nats, count, _bytes_of(text, total))


def _score_lanes(
    model: LanguageModel, text: Tokens, tokens: int, reading: Reading, progress: Callable[[int], object]
) -> tuple[float, int]:
    """The sum of −log p, and how many predictions it is of, with states carried from window to window.

    Each place begins from zeros, so there are few: a window in LANE_WINDOWS at most has a cold start.
    """
    device, length, predictions = device_of(model), reading.length, tokens - 1
    lanes = max(1, min(reading.batch, predictions // (LANE_WINDOWS * length)))
    each, rest = divmod(predictions, lanes)
    windows = [(range(lanes), begin, min(length, each - begin)) for begin in range(0, each, length)]
    # what is left over is the last one's, which reads on alone
    alone = range(lanes - 1, lanes)
    windows += [(alone, begin, min(length, each + rest - begin)) for begin in range(each, each + rest, length)]
    nats, state = 0.0, None
    for some, begin, time in windows:
        starts = [lane * each + begin for lane in some]
        rows = torch.stack([_row(text, Span(start, time, time), reading.first) for start in starts]).to(device)
        with carrying(state if state is None else state[:, :, -len(some) :]) as carried:
            features = model.features(rows[:, :-1])
        state = carried.state
        losses = token_losses(model, features.flatten(0, 1), rows[:, 1:].flatten())
        nats += float(losses.double().sum())
        progress(losses.numel())
    return nats, predictions


def score_counts(model: NGram, text: Tokens, *, limit: int | None = None) -> Score:
    """Score `text`, or its first `limit` tokens, with an n-gram model: what came is looked up, without windows."""
    total = len(text) if limit is None else min(limit, len(text))
    if not total:
        raise DataError("the text to evaluate is empty")
    begins = np.flatnonzero(np.diff(text.documents(0, total))) + 1
    nats = -float(model.log_prob(text.read(0, total), begins).sum(dtype=np.float64))
    return Score(nats, total, _bytes_of(text, total))


def _bytes_of(text: Tokens, tokens: int) -> int:
    """A part's bytes are counted in proportion: only a whole text knows them exactly."""
    return text.bytes if tokens == len(text) else round(text.bytes * tokens / len(text))


def _batches(stream: Iterator[Span], size: int) -> Iterator[list[Span]]:
    """Windows of equal length, `size` at a time; the last, shorter one comes alone, so that nothing is padded."""
    for _, alike in groupby(stream, key=lambda span: span.length):
        while group := list(islice(alike, size)):
            yield group


def _score_group(model: LanguageModel, text: Tokens, group: list[Span], reading: Reading) -> tuple[float, int]:
    device, length = device_of(model), group[0].length
    rows = torch.stack([_row(text, span, reading.first) for span in group]).to(device)
    places = torch.arange(length, device=device)
    scored = places >= torch.tensor([length - span.scored for span in group], device=device).unsqueeze(1)
    given: dict[str, Any] = {}
    if reading.document_mask:
        numbers = np.stack([text.documents(span.start, length + 1) for span in group])
        positions = torch.from_numpy(restarting_positions(numbers[:, :-1])).to(device)
        documents = torch.from_numpy(numbers).to(device)
        given = {"documents": documents[:, :-1], "positions": positions}
        scored &= documents[:, 1:] == documents[:, :-1]
    features = model.features(rows[:, :-1], **given)
    losses = token_losses(model, features[scored], rows[:, 1:][scored])
    return float(losses.double().sum()), int(losses.numel())


def _row(text: Tokens, span: Span, first: int | None) -> Tensor:
    """The length + 1 tokens of a window, where `first` stands before the text if given."""
    if first is None:
        return torch.from_numpy(text.read(span.start, span.length + 1))
    if span.start > 0:
        return torch.from_numpy(text.read(span.start - 1, span.length + 1))
    return torch.from_numpy(np.concatenate([np.asarray([first], dtype=np.int64), text.read(0, span.length)]))


def token_losses(model: LanguageModel, features: Tensor, targets: Tensor) -> Tensor:
    """−log p (N,) of targets (N,) from features (N, …), through the head a slice at a time."""
    vocab_size: int = model.config.vocab_size  # type: ignore[attr-defined]
    rows = max(1, HEAD_ELEMENTS // vocab_size)
    parts = [
        F.cross_entropy(
            model.head(features[i : i + rows].unsqueeze(0))[0].float(), targets[i : i + rows], reduction="none"
        )
        for i in range(0, len(targets), rows)
    ]
    return torch.cat(parts) if parts else features.new_zeros(0)
