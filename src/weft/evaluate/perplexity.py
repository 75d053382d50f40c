"""Loss of a language model on a text: mean negative log-likelihood, perplexity, bits per byte.

Every token of the text is scored once. The mean is over tokens, so it depends on the tokenizer. Bits per byte divides
the same sum by the UTF-8 bytes of the text, so that models with different tokenizers compare. For that, the whole text
has to be charged: bytes that no token spells, mostly unknown words, cost 8 bits each (`evaluate/unspelled.py`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import groupby, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.data.batch import restarting_positions
from weft.data.shards import Ids, Tokens
from weft.decode.config import Sampling
from weft.decode.prompt import Prompt, context_window, output_vocab_size
from weft.decode.text import NO_LOGPROBS, Logprobs, token_logprobs
from weft.errors import DataError
from weft.models.base import LanguageModel, device_of, evaluating, read_in_steps
from weft.models.ngram import NGram
from weft.nn.recurrent import CarriedState

NATS_PER_BYTE = 8 * math.log(2)  # cost of a byte that no token spells
MIN_LANE_WINDOWS = 64  # windows per lane of a text that is read with carried states
HEAD_ELEMENTS = 1 << 24  # logits computed at a time: 64 MiB in fp32


def perplexity(loss: float) -> float:
    """Return exp of a mean loss in nats; infinite if it overflows, NaN if the loss is."""
    return math.inf if loss >= 700 else math.exp(loss)


@dataclass(frozen=True)
class Score:
    """Summed negative log-likelihood of a text, and the sizes to divide it by."""

    nats: float
    tokens: int
    bytes: int
    unknown: int = 0  # tokens that stand for unknown words
    unspelled: float = 0.0  # bytes of the text that no token spells

    @property
    def loss(self) -> float:
        """Mean negative log-likelihood per token, in nats."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss): the number of equally likely tokens with the same uncertainty."""
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float:
        """Bits per UTF-8 byte that a compressor with this model needs; it writes unspelled bytes literally."""
        return self.spelled_nats / math.log(2) / self.bytes if self.bytes else math.nan

    @property
    def spelled_nats(self) -> float:
        """Cost of the whole text: of its tokens and of the bytes that they don't spell."""
        return self.nats + NATS_PER_BYTE * self.unspelled

    @property
    def unknown_share(self) -> float:
        return self.unknown / self.tokens

    @classmethod
    def of(cls, parts: "Iterable[TokenScores]", text: Tokens, limit: int | None = None) -> "Score":
        """Add up the scores of a text, or of its first `limit` tokens, whose bytes are then estimated by proportion."""
        nats, count, read = 0.0, 0, _limited(text, limit)
        for part in parts:
            nats += float(part.nats.sum())
            count += len(part.nats)
        return cls(nats, count, text.bytes if read == len(text) else round(text.bytes * read / len(text)))

    @classmethod
    def total(cls, scores: "Iterable[Score]") -> "Score":
        return cls(*map(sum, zip(*map(astuple, scores), strict=True)))

    def metrics(self) -> dict[str, float]:
        """Return the metrics by the names that logs and tables use."""
        return {"loss": self.loss, "perplexity": self.perplexity, "bits_per_byte": self.bits_per_byte}


class ScoringWindow(NamedTuple):
    """A window of a text: the model reads `length` tokens from `start`, and its last `scored` predictions count."""

    start: int
    length: int
    scored: int


def windows(tokens: int, length: int, stride: int | None = None) -> Iterator[ScoringWindow]:
    """Yield windows over a text so that each token after the first is predicted exactly once.

    Without a `stride`, windows don't overlap, and the first tokens of each have little context. With one, each window
    starts `stride` tokens later and scores only tokens beyond the previous window: slower, but every token after the
    first window has at least length − stride tokens of context.
    """
    step = length if stride is None else stride
    assert 0 < step <= length, "a stride beyond the window would skip tokens"
    start, reached = 0, 0  # reached: number of predictions so far; prediction i is of token i + 1
    while reached < tokens - 1:
        end = min(start + length, tokens - 1)
        yield ScoringWindow(start, end - start, end - reached)
        reached = end
        start += step


@dataclass(frozen=True)
class ScoringOptions:
    """Windows in which a text is scored: `length` tokens each, `batch` at a time, overlapping with a `stride`.

    `first` is the token before a text in training; with it, the text's first token is scored too, so that bits per byte
    counts every byte. With `document_mask`, tokens don't attend to other documents, and the first token of a document,
    which nothing predicts, isn't scored. `unscored` ids, such as bos, are read but not scored.

    With `carry`, a recurrent model reads the text in a few parallel lanes, carrying its state from window to window.
    """

    length: int
    batch: int = 16
    stride: int | None = None
    first: int | None = None
    document_mask: bool = False
    carry: bool = False
    unscored: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.first is None or not self.document_mask, "with the mask, no token precedes a text"
        if self.stride is not None and not 0 < self.stride <= self.length:
            raise DataError(f"stride = {self.stride}: expected 1 … {self.length}, the window's length")


class TokenScores(NamedTuple):
    """Scored tokens of a text: (N,) each."""

    positions: Ids  # in the text
    nats: npt.NDArray[np.float64]  # −log p of each
    context: Ids  # number of tokens before each that the model saw


def token_scores(
    model: LanguageModel, text: Tokens, options: ScoringOptions, *, limit: int | None = None
) -> Iterator[TokenScores]:
    """Yield −log p of every token of a text, or of its first `limit` ones, batch by batch."""
    total = _limited(text, limit) + (options.first is not None)
    if total < 2:
        shift = int(options.first is not None)
        raise DataError(f"the text to evaluate holds {total - shift} tokens; at least {2 - shift} are needed")
    any_scored = False
    with evaluating(model):
        if options.carry and options.stride is None:
            yield from _score_lanes(model, text, options, tokens=total)
            return
        # batches of equal length; the last, shorter window is alone, so that nothing is padded
        for _, same_length in groupby(windows(total, options.length, options.stride), lambda window: window.length):
            while batch := list(islice(same_length, options.batch)):
                scores = _score(model, text, options, batch=batch)
                any_scored = any_scored or len(scores.nats) > 0
                yield scores
    if not any_scored:
        raise DataError("no document of the text to evaluate holds two tokens; there is nothing to predict")


def _score_lanes(model: LanguageModel, text: Tokens, options: ScoringOptions, *, tokens: int) -> Iterator[TokenScores]:
    """Yield −log p with states carried from window to window, in few lanes, because each starts from a zero state."""
    device, length, predictions = device_of(model), options.length, tokens - 1
    # at most one window in MIN_LANE_WINDOWS has a cold start
    lanes = max(1, min(options.batch, predictions // (MIN_LANE_WINDOWS * length)))
    each, rest = divmod(predictions, lanes)
    steps = [(range(lanes), begin, min(length, each - begin)) for begin in range(0, each, length)]
    last = range(lanes - 1, lanes)  # the last lane reads the remainder alone
    steps += [(last, begin, min(length, each + rest - begin)) for begin in range(each, each + rest, length)]
    state = None
    for active, begin, time in steps:
        starts = np.array([lane * each + begin for lane in active])
        rows = torch.stack([_row(text, ScoringWindow(start, time, time), options.first) for start in starts.tolist()])
        rows = rows.to(device)
        carried = CarriedState(state if state is None else state[:, :, -len(active) :])
        with torch.no_grad():  # not around the `yield`, where the caller runs
            features = model.features(rows[:, :-1], carried=carried)
            losses = token_losses(model, features.flatten(0, 1), rows[:, 1:].flatten())
        state = carried.state
        positions = (starts[:, None] + np.arange(1, time + 1)).flatten() - (options.first is not None)
        context = np.tile(np.arange(begin + 1, begin + time + 1), len(active))
        scored = _is_scored(rows[:, 1:].flatten().cpu().numpy(), options.unscored)
        yield TokenScores(positions[scored], losses.double().cpu().numpy()[scored], context[scored])


def _is_scored(ids: Ids, unscored: Sequence[int]) -> npt.NDArray[np.bool_]:
    return np.isin(ids, unscored, invert=True) if unscored else np.ones(ids.shape, dtype=bool)


def ngram_token_scores(model: NGram, text: Tokens, *, limit: int | None, unscored: Sequence[int]) -> TokenScores:
    """Return −log p of an n-gram model, which needs no windows: the context is n − 1 tokens of the same document."""
    total = _limited(text, limit)
    if not total:
        raise DataError("the text to evaluate is empty")
    begins, ids = np.flatnonzero(np.diff(text.documents(0, total))) + 1, text.read(0, total)
    nats = -model.log_prob(ids, begins).astype(np.float64)
    positions, firsts = np.arange(total), np.zeros(total, dtype=np.int64)
    firsts[begins] = begins
    context = np.minimum(positions - np.maximum.accumulate(firsts), model.config.order - 1)
    scored = _is_scored(ids, unscored)
    return TokenScores(positions[scored], nats[scored], context[scored])


def _limited(text: Tokens, limit: int | None) -> int:
    return len(text) if limit is None else min(limit, len(text))


@torch.no_grad()
def _score(model: LanguageModel, text: Tokens, options: ScoringOptions, *, batch: list[ScoringWindow]) -> TokenScores:
    device, length = device_of(model), batch[0].length
    rows = torch.stack([_row(text, window, options.first) for window in batch]).to(device)
    context = np.broadcast_to(np.arange(1, length + 1), (len(batch), length))
    mask = context > np.array([[length - window.scored] for window in batch])
    mask &= _is_scored(rows[:, 1:].cpu().numpy(), options.unscored)
    inputs: dict[str, Any] = {}
    if options.document_mask:
        numbers = np.stack([text.documents(window.start, length + 1) for window in batch])
        within = restarting_positions(numbers[:, :-1])
        documents = torch.from_numpy(numbers[:, :-1].copy()).to(device)
        inputs = {"documents": documents, "positions": torch.from_numpy(within).to(device)}
        mask &= numbers[:, 1:] == numbers[:, :-1]
        context = within + 1
    features = model.features(rows[:, :-1], **inputs)
    scored = torch.from_numpy(mask).to(device)
    losses = token_losses(model, features[scored], rows[:, 1:][scored])
    positions = np.array([[window.start] for window in batch]) + np.arange(1, length + 1) - (options.first is not None)
    return TokenScores(positions[mask], losses.double().cpu().numpy(), context[mask])


def _row(text: Tokens, window: ScoringWindow, first: int | None) -> Tensor:
    """The length + 1 tokens of a window; `first`, if given, precedes the text."""
    if first is None or window.start > 0:
        return torch.from_numpy(text.read(window.start - (first is not None), window.length + 1))
    return torch.from_numpy(np.concatenate([np.asarray([first], dtype=np.int64), text.read(0, window.length)]))


def token_losses(model: LanguageModel, features: Tensor, targets: Tensor, *, max_logits: int = HEAD_ELEMENTS) -> Tensor:
    """Return −log p (N,) of targets (N,) from features (N, …); the LM head computes a slice at a time."""
    if not len(targets):
        return features.new_zeros(0)
    rows = max(1, max_logits // model.config.vocab_size)  # type: ignore[attr-defined]
    parts = zip(features.split(rows), targets.split(rows), strict=True)
    return torch.cat([F.cross_entropy(model.head(x[None])[0].float(), y, reduction="none") for x, y in parts])


class Surprisal(NamedTuple):
    """A token as it appears in the text, and its surprisal in nats; None for a first token that nothing predicts."""

    token: str
    nats: float | None


@torch.no_grad()
def surprisals(model: LanguageModel, ids: Sequence[int], before: Sequence[int], *, length: int) -> list[float | None]:
    """Return −log p in nats of each of `ids` after `before`, in windows of `length` tokens that overlap by half."""
    if not ids:
        raise DataError("the text to score is empty")
    if isinstance(model, NGram):  # its counts have no tokens before a text
        return [-each for each in model.log_prob(np.asarray(ids), np.zeros(0, dtype=np.int64)).tolist()]
    tokens = torch.tensor([*before, *ids])
    nats: list[float | None] = [None] * (not before)
    for features, targets in _predictions(model, tokens, length):
        nats += token_losses(model, features, targets).tolist()
    return nats[-len(ids) :]


@torch.no_grad()
def prompt_logprobs(model: LanguageModel, prompt: Prompt, top: int) -> list[Logprobs]:
    """Return log p of each token of a prompt, and of the `top` likeliest at its position; none of the first token.

    A prompt longer than the model's window is read in windows that overlap by half.
    """
    vocab_size = output_vocab_size(model, prompt.vocab_size)
    rows, settings = max(1, HEAD_ELEMENTS // vocab_size), Sampling(logprobs=top)
    logprobs = [NO_LOGPROBS]
    for features, targets in _predictions(model, torch.tensor(prompt.ids), context_window(model) or len(prompt.ids)):
        for x, y in zip(features.split(rows), targets.split(rows), strict=True):
            logprobs += token_logprobs(model.head(x[None])[0][:, :vocab_size], y.tolist(), [settings] * len(y))
    return logprobs


def _predictions(model: LanguageModel, tokens: Tensor, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield features (N, …) before consecutive tokens of a text, and these tokens (N,); the first token has none.

    Windows of `length` tokens overlap by half, and each is read in chunks with pauses between them.
    """
    with evaluating(model) as device:
        for window in windows(len(tokens), length, max(1, length // 2)):
            row = tokens[window.start : window.start + window.length + 1].to(device)
            state = model.start(1, window.length)
            for part in read_in_steps(model, window.length):
                features = model.advance(row[None, part], state)[0]
                # earlier ones were scored in the window before
                scored = max(part.start, window.length - window.scored)
                if scored < part.stop:
                    yield features[scored - part.start :], row[scored + 1 : part.stop + 1]
