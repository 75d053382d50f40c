"""Surprisal of every token of a text, and the tokens that the model expected.

The surprisal of a token is −log p given the tokens before it (Hale 2001; Levy 2008). A masked language model predicts a
token from both sides: each token is masked in turn, and the sum is the text's pseudo-log-likelihood (Salazar et al.
2020). ELMo predicts a token twice: from the tokens before it, and from those after it.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from weft.errors import ConfigError, DataError, ModelError
from weft.explain.reading import Reading, pieces, predicts_tokens, text_tokens
from weft.explain.texts import TEXTS
from weft.figures.page import Section
from weft.figures.picture import Picture
from weft.figures.shaded import Measure, Token, lines_figure, percent
from weft.figures.tables import WIDTH, Table, text_table
from weft.models.base import LanguageModel, evaluating
from weft.models.elmo import ELMo
from weft.models.ngram import NGram
from weft.models.transformer import Transformer

MAX_LOGITS = 1 << 24  # logits held in memory at a time
MAX_MASKED_TOKENS = 1 << 13  # tokens in one batch of a masked model
SCALES = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0)  # nats that the darkest shade can stand for
DIRECTIONS = ("forward", "backward")  # of ELMo
HEADINGS = ("pos.", "token", "nats", "probability", "rank", "likeliest")
MAX_ROWS = 12  # tokens listed in a terminal


class Guess(NamedTuple):
    """Predicted token, in readable form, and its probability."""

    piece: str
    probability: float


@dataclass(frozen=True)
class Surprise(Picture):
    """Tokens of a text with their surprisal, rank and alternatives; None or empty for a token that nothing predicts."""

    about: str
    tokens: tuple[Token, ...]
    nats: tuple[float | None, ...]
    ranks: tuple[int | None, ...]  # among all tokens; 1 is the likeliest
    guesses: tuple[tuple[Guess, ...], ...]  # the likeliest tokens
    vocab_size: int
    masked: bool = False  # tokens were predicted from both sides
    directions: tuple["Surprise", ...] = ()  # ELMo's, forward and backward; the other fields are the mean of log p

    title = "Surprise"
    module = "surprise.js"

    @cached_property
    def scored(self) -> list[float]:
        return [nats for nats in self.nats if nats is not None]

    @property
    def nats_per_token(self) -> float:
        return sum(self.scored) / len(self.scored)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Bits per byte, comparable between tokenizers; NaN for a text without bytes."""
        pairs = zip(self.tokens, self.nats, strict=True)
        size = sum(len(token.text.encode()) for token, nats in pairs if nats is not None)
        return sum(self.scored) / math.log(2) / size if size else math.nan

    @cached_property
    def measure(self) -> Measure:
        """Shades of the tokens; similarly surprising texts share one scale."""
        finite = sorted(nats for nats in self.scored if math.isfinite(nats))
        high = finite[int(0.95 * (len(finite) - 1))] if finite else SCALES[0]
        return Measure("surprisal, nats", self.nats, next((top for top in SCALES if top >= high), SCALES[-1]))

    def figure(self) -> Figure:
        return lines_figure(self.title, self.tokens, self.measure)

    def sections(self) -> list[Section]:
        named = zip(DIRECTIONS, self.directions, strict=False)
        apart = [each.sections()[0]._replace(title=f"{self.title}, {name}") for name, each in named]
        return [*super().sections(), *apart]

    def text(self) -> str:
        columns = zip(count(), self.tokens, self.nats, self.ranks, self.guesses, strict=False)
        scored = [(nats, n, token, rank, top) for n, token, nats, rank, top in columns if nats is not None]
        rows = []
        surprising = sorted(scored, key=lambda row: -row[0])[:MAX_ROWS]
        for nats, position, token, rank, guesses in sorted(surprising, key=lambda row: row[1]):
            surprisal = f"{nats:.2f}" if math.isfinite(nats) else "∞"
            likeliest = " · ".join(f"{guess.piece} {percent(guess.probability)}" for guess in guesses)
            rows.append((str(position), token.piece, surprisal, percent(math.exp(-nats)), f"{rank:,}", likeliest))
        name = "pseudo-perplexity" if self.masked else "perplexity"
        means = f"{self.nats_per_token:.3f} nats per token, {name} {self.perplexity:,.4g}"
        total = f"{len(self.scored):,} tokens, {means}, {self.bits_per_byte:.3f} bits per byte"
        texts = [text_table(Table(HEADINGS, rows, "", text=(1, 5)), WIDTH) + f"\n\n{total}"]
        texts += [f"{name}\n\n{each.text()}" for name, each in zip(DIRECTIONS, self.directions, strict=False)]
        return "\n\n".join(texts)


@torch.no_grad()
def surprise(reading: Reading, top: int = 5) -> Surprise:
    """Return −log p of each token of a text given the tokens before it, and the `top` likeliest tokens there.

    An encoder–decoder reads a target, given the source. A masked model predicts each token while it is masked. For ELMo
    log p is the mean of both directions; `directions` has each of them.
    """
    if top < 1:
        raise ConfigError(f"top = {top}: at least one token")
    if not reading.ids[reading.before :]:
        raise DataError("the text is empty")
    with evaluating(reading.model):
        if isinstance(reading.model, ELMo):
            states = reading.model.directions(reading.model.features(reading.tokens))
            contexts = {TEXTS["surprise-mean"]: (1, 1), "the tokens before it": (1, 0), "the tokens after it": (0, 1)}
            mean, *directions = (
                _surprise(reading, context, _elmo_log_p(reading, states, used), top=top)
                for context, used in contexts.items()
            )
            return replace(mean, directions=tuple(directions))
        if predicts_masked(reading.model):
            return _surprise(reading, TEXTS["surprise-masked"], _masked_log_p(reading), top=top)
        context = "the source and the tokens before it" if reading.source is not None else "the tokens before it"
        return _surprise(reading, context, _log_p(reading), top=top)


def _surprise(reading: Reading, context: str, found: "LogProbabilities", *, top: int) -> Surprise:
    """Return the surprisal by log p that was `found` at some positions, given this context."""
    model, tokenizer, ids = reading.model, reading.tokenizer, reading.ids[reading.before :]
    known = min(tokenizer.vocab_size, _vocab_size(model))
    scores: dict[int, tuple[float, int, tuple[Guess, ...]]] = {}
    for positions, log_p in found:
        targets = torch.tensor([reading.ids[position] for position in positions], device=log_p.device)
        target_log_p = log_p.gather(1, targets[:, None])
        if target_log_p.isnan().any():
            raise DataError("the model's probabilities are NaN; its weights may have diverged")
        rank = (log_p > target_log_p).sum(1) + 1
        values, likeliest = log_p[:, :known].topk(min(top, known))
        for row, position in enumerate(positions):
            guesses = tuple(map(Guess, pieces(tokenizer, likeliest[row].tolist()), values[row].exp().tolist()))
            scores[position - reading.before] = -float(target_log_p[row]), int(rank[row]), guesses
    if not scores:
        raise DataError(f"there is nothing to score: a single token, without {context}")
    nats, ranks, top_guesses = zip(*(scores.get(n, (None, None, ())) for n in range(len(ids))), strict=True)
    return Surprise(
        about=TEXTS["surprise"].format(context=context),
        tokens=tuple(text_tokens(tokenizer, ids)),
        nats=nats,
        ranks=ranks,
        guesses=top_guesses,
        vocab_size=_vocab_size(model),
        masked=predicts_masked(model),
    )


def predicts_masked(model: LanguageModel) -> bool:
    """Return whether a model predicts masked tokens rather than the next one; raise if it predicts no tokens."""
    if not isinstance(model, Transformer):
        return False
    if not predicts_tokens(model):
        kind = model.config.head.kind
        raise ModelError(
            f"this model's head is of kind '{kind}' and predicts no tokens; give the run of a language model"
        )
    return model.decoder is None


LogProbabilities = Iterator[tuple[Sequence[int], Tensor]]  # positions of a reading, and log p (positions, V) there


def _log_p(reading: Reading) -> LogProbabilities:
    """Yield log p of every token of the vocabulary at each position of the text, given the tokens before it."""
    model = reading.model
    if isinstance(model, NGram):  # its counts have no special token before a text, and include how texts begin
        tokens = reading.tokens[:, reading.before :]
        empty = tokens.new_full((1, 1, model.config.order - 1), model.config.vocab_size)
        features = torch.cat([empty, model.features(tokens[:, :-1])], dim=1)
        first = reading.before
    else:
        tokens, first = reading.tokens[:, :-1], max(1, reading.before)
        if not tokens.shape[1]:
            return
        state = model.start(1, tokens.shape[1], reading.model_kwargs.get("source"))
        features = model.advance(tokens, state)[:, first - 1 :]
    rows = max(1, MAX_LOGITS // _vocab_size(model))
    for start in range(0, features.shape[1], rows):
        logits = model.head(features[:, start : start + rows])[0].float()
        # An n-gram model gives log p, which do not sum to one with stupid backoff.
        log_p = logits if isinstance(model, NGram) else logits.log_softmax(-1)
        yield range(first + start, first + start + len(logits)), log_p


def _masked_log_p(reading: Reading) -> LogProbabilities:
    """Yield log p of every token of the vocabulary at each position of the text while that position is masked."""
    model = reading.model
    assert isinstance(model, Transformer)
    special = set(reading.tokenizer.special_tokens.values())
    positions = [n for n, id in enumerate(reading.ids) if n >= reading.before and id not in special]
    rows = max(1, min(MAX_MASKED_TOKENS // len(reading.ids), MAX_LOGITS // _vocab_size(model)))
    for start in range(0, len(positions), rows):
        batch = positions[start : start + rows]
        row = torch.arange(len(batch), device=reading.tokens.device)
        tokens = reading.tokens.repeat(len(batch), 1)
        tokens[row, batch] = reading.tokenizer.need("mask")
        yield batch, model.readout(model.features(tokens)[row, batch]).logits().float().log_softmax(-1)


def _elmo_log_p(reading: Reading, states: Sequence[Tensor], sides: tuple[int, int]) -> LogProbabilities:
    """Yield log p by one direction, or the mean of both; at the ends of the text there is one alone.

    states, each (1, time, d_model), are those of both directions; `sides` is 1 for those used.
    """
    model, T = reading.model, len(reading.ids)
    assert isinstance(model, ELMo)
    position = torch.arange(reading.before, T)
    used = torch.stack([(position > 0) & bool(sides[0]), (position < T - 1) & bool(sides[1])]).to(reading.tokens.device)
    position = position[used.any(dim=0).cpu()]
    used = used[:, used.any(dim=0)].float()[..., None]
    rows = max(1, MAX_LOGITS // _vocab_size(model))
    for chosen, weight in zip(position.split(rows), used.split(rows, dim=1), strict=True):
        beside = chosen.sub(1).clamp(min=0), chosen.add(1).clamp(max=T - 1)
        both = zip(states, beside, weight, strict=True)
        total = sum(model.readout(h[0, n]).logits().float().log_softmax(-1) * w for h, n, w in both)
        yield chosen.tolist(), total / weight.sum(dim=0)


def _vocab_size(model: LanguageModel) -> int:
    return model.config.vocab_size  # type: ignore[attr-defined]
