"""How surprised a model is by a text: mean negative log-likelihood, perplexity, bits per byte.

Every token of the text is scored once. The mean is over tokens, so it depends on the tokenizer; bits per byte divides
the same sum by the UTF-8 bytes of the text, so it compares models with different tokenizers. That holds only if the
whole text is paid for: what its tokens don't spell, unknown words above all, is charged at 8 bits a byte
(`evaluate/unspelled.py`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.data.batch import restarting_positions
from weft.data.shards import Ids, Tokens
from weft.errors import DataError
from weft.models.base import LanguageModel, device_of, evaluating
from weft.models.ngram import NGram
from weft.nn.recurrent import CarriedState

BYTE = 8 * math.log(2)  # nats that a byte costs which no token spells
LANE_WINDOWS = 64  # at least so many windows follow each other at each place of a text that is read with carried states
HEAD_ELEMENTS = 1 << 24  # logits computed at a time: 64 MiB in fp32, whatever the batch and the vocabulary


def perplexity(loss: float) -> float:
    """exp of a mean loss in nats, which may be more than a float holds."""
    return math.exp(loss) if loss < 700 else math.inf


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
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits a byte of UTF-8 text that a coder with this model would need; it writes unspelled bytes as they are."""
        return self.spelled_nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def spelled_nats(self) -> float:
        """The cost of the text itself: of its tokens, and of the bytes that they don't spell."""
        return self.nats + BYTE * self.unspelled

    @property
    def unknown_share(self) -> float:
        return self.unknown / self.tokens

    @classmethod
    def of(cls, parts: "Iterable[TokenScores]", text: Tokens, limit: int | None = None) -> "Score":
        """What the tokens of a text, or its first `limit` ones, cost together. A part's bytes are counted in
        proportion: only a whole text knows them exactly."""
        nats, count, read = 0.0, 0, _first(text, limit)
        for part in parts:
            nats += float(part.nats.sum())
            count += len(part.nats)
        return cls(nats, count, text.bytes if read == len(text) else round(text.bytes * read / len(text)))

    @classmethod
    def total(cls, scores: "Iterable[Score]") -> "Score":
        found = [(s.nats, s.tokens, s.bytes, s.unknown, s.unspelled) for s in scores]
        return cls(*map(sum, zip(*found, strict=True)))

    def metrics(self) -> dict[str, float]:
        """The metrics by name, as logs and tables show them."""
        return {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


class Span(NamedTuple):
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
    start, reached = 0, 0  # reached: the predictions made so far; prediction i is of token i + 1
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

    Ids that are `unscored`, such as bos before a text, are read and not predicted: they are no part of the text.

    With `carry` a recurrent model reads the text at a few places side by side, each window on from the one before.
    """

    length: int
    batch: int = 16
    stride: int | None = None
    first: int | None = None
    document_mask: bool = False
    carry: bool = False
    unscored: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.first is None or not self.document_mask, "with the mask nothing stands before a text"
        if self.stride is not None and not 0 < self.stride <= self.length:
            raise DataError(f"stride = {self.stride}: expected 1 … {self.length}, the window's length")


class TokenScores(NamedTuple):
    """Some tokens of a text that a model has predicted: (N,) each."""

    places: Ids  # their numbers in the text
    nats: npt.NDArray[np.float64]  # −log p of each
    seen: Ids  # how many tokens before it were seen


def token_scores(
    model: LanguageModel, text: Tokens, reading: Reading, *, limit: int | None = None
) -> Iterator[TokenScores]:
    """−log p of every token of `text`, or of its first `limit` ones, batch by batch, each token once."""
    total = _first(text, limit)
    shift = 0 if reading.first is None else 1
    if total + shift < 2:
        raise DataError(f"the text to evaluate holds {total} tokens; at least {2 - shift} are needed")
    any_scored = False
    with evaluating(model):
        if reading.carry and reading.stride is None:
            yield from _score_lanes(model, text, total + shift, reading)
            return
        # windows of equal length; the last, shorter one comes alone, so that nothing is padded
        for _, alike in groupby(spans(total + shift, reading.length, reading.stride), key=lambda span: span.length):
            while group := list(islice(alike, reading.batch)):
                found = _score_group(model, text, group, reading)
                any_scored = any_scored or len(found.nats) > 0
                yield found
    if not any_scored:
        raise DataError("no document of the text to evaluate holds two tokens; there is nothing to predict")


def _score_lanes(model: LanguageModel, text: Tokens, tokens: int, reading: Reading) -> Iterator[TokenScores]:
    """−log p of each token, with states carried from window to window. Each place begins from zeros, so there are few:
    a window in LANE_WINDOWS at most has a cold start."""
    device, length, predictions = device_of(model), reading.length, tokens - 1
    lanes = max(1, min(reading.batch, predictions // (LANE_WINDOWS * length)))
    each, rest = divmod(predictions, lanes)
    windows = [(range(lanes), begin, min(length, each - begin)) for begin in range(0, each, length)]
    alone = range(lanes - 1, lanes)  # what is left over is the last one's, which reads on alone
    windows += [(alone, begin, min(length, each + rest - begin)) for begin in range(each, each + rest, length)]
    state = None
    for some, begin, time in windows:
        starts = np.array([lane * each + begin for lane in some])
        rows = torch.stack([_row(text, Span(start, time, time), reading.first) for start in starts.tolist()]).to(device)
        carried = CarriedState(state if state is None else state[:, :, -len(some) :])
        with torch.no_grad():  # not around the `yield`, behind which others go on
            features = model.features(rows[:, :-1], carried=carried)
            losses = token_losses(model, features.flatten(0, 1), rows[:, 1:].flatten())
        state = carried.state
        places = (starts[:, None] + np.arange(1, time + 1)).flatten() - (reading.first is not None)
        seen = np.tile(np.arange(begin + 1, begin + time + 1), len(some))
        scored = _scored(rows[:, 1:].flatten().cpu().numpy(), reading.unscored)
        yield TokenScores(places[scored], losses.double().cpu().numpy()[scored], seen[scored])


def _scored(ids: Ids, unscored: Sequence[int]) -> npt.NDArray[np.bool_]:
    return np.isin(ids, unscored, invert=True) if unscored else np.ones(ids.shape, dtype=bool)


def counted_scores(
    model: NGram, text: Tokens, *, limit: int | None = None, unscored: Sequence[int] = ()
) -> TokenScores:
    """The same with an n-gram model: looked up without windows, by at most n − 1 tokens of the same document."""
    total = _first(text, limit)
    if not total:
        raise DataError("the text to evaluate is empty")
    begins, ids = np.flatnonzero(np.diff(text.documents(0, total))) + 1, text.read(0, total)
    nats = -model.log_prob(ids, begins).astype(np.float64)
    places, firsts = np.arange(total), np.zeros(total, dtype=np.int64)
    firsts[begins] = begins
    seen = np.minimum(places - np.maximum.accumulate(firsts), model.config.order - 1)
    scored = _scored(ids, unscored)
    return TokenScores(places[scored], nats[scored], seen[scored])


def _first(text: Tokens, limit: int | None) -> int:
    return len(text) if limit is None else min(limit, len(text))


@torch.no_grad()
def _score_group(model: LanguageModel, text: Tokens, group: list[Span], reading: Reading) -> TokenScores:
    device, length = device_of(model), group[0].length
    rows = torch.stack([_row(text, span, reading.first) for span in group]).to(device)
    seen = np.broadcast_to(np.arange(1, length + 1), (len(group), length))
    wanted = seen > np.array([[length - span.scored] for span in group])
    wanted &= _scored(rows[:, 1:].cpu().numpy(), reading.unscored)
    given: dict[str, Any] = {}
    if reading.document_mask:
        numbers = np.stack([text.documents(span.start, length + 1) for span in group])
        positions = restarting_positions(numbers[:, :-1])
        documents = torch.from_numpy(numbers[:, :-1].copy()).to(device)
        given = {"documents": documents, "positions": torch.from_numpy(positions).to(device)}
        wanted &= numbers[:, 1:] == numbers[:, :-1]
        seen = positions + 1
    features = model.features(rows[:, :-1], **given)
    scored = torch.from_numpy(wanted).to(device)
    losses = token_losses(model, features[scored], rows[:, 1:][scored])
    places = np.array([[span.start] for span in group]) + np.arange(1, length + 1) - (reading.first is not None)
    return TokenScores(places[wanted], losses.double().cpu().numpy(), seen[wanted])


def _row(text: Tokens, span: Span, first: int | None) -> Tensor:
    """The length + 1 tokens of a window, where `first` stands before the text if given."""
    if first is None or span.start > 0:
        return torch.from_numpy(text.read(span.start - (first is not None), span.length + 1))
    return torch.from_numpy(np.concatenate([np.asarray([first], dtype=np.int64), text.read(0, span.length)]))


def token_losses(model: LanguageModel, features: Tensor, targets: Tensor) -> Tensor:
    """−log p (N,) of targets (N,) from features (N, …), through the head a slice at a time."""
    if not len(targets):
        return features.new_zeros(0)
    vocab_size: int = model.config.vocab_size  # type: ignore[attr-defined]
    rows, parts = max(1, HEAD_ELEMENTS // vocab_size), []
    for some, wanted in zip(features.split(rows), targets.split(rows), strict=True):
        parts.append(F.cross_entropy(model.head(some.unsqueeze(0))[0].float(), wanted, reduction="none"))
    return torch.cat(parts)


class Surprisal(NamedTuple):
    """A token as it stands in the text, and its surprisal in nats; None for a first token that nothing predicts."""

    token: str
    nats: float | None


@torch.no_grad()
def surprisals(model: LanguageModel, ids: Sequence[int], before: Sequence[int], length: int) -> list[float | None]:
    """−log p in nats of each of `ids` read after `before`: beyond `length` tokens in windows half a window apart."""
    if not ids:
        raise DataError("the text to score is empty")
    if isinstance(model, NGram):  # it counted texts without anything before them
        return [-each for each in model.log_prob(np.asarray(ids), np.zeros(0, dtype=np.int64)).tolist()]
    tokens = torch.tensor([*before, *ids])
    found: list[float | None] = [None] * (not before)
    with evaluating(model) as device:
        for span in spans(len(tokens), length, max(1, length // 2)):
            row = tokens[span.start : span.start + span.length + 1].to(device)
            features = model.advance(row[None, :-1], model.start(1, span.length))
            found += token_losses(model, features[0, -span.scored :], row[-span.scored :]).tolist()
    return found[-len(ids) :]
