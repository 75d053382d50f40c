"""What a model finds surprising in a text, and what it expected instead.

The surprisal of a token is −log p of it, given what stands before it (Hale 2001; Levy 2008). A masked language model
predicts a token from both sides: here each one is masked in turn, and the sum is the text's pseudo-log-likelihood
(Salazar et al. 2020).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from weft.errors import ConfigError, DataError, ModelError
from weft.explain.reading import Reading, pieces, predicts_words, running
from weft.figures.picture import Picture
from weft.figures.shaded import Measure, Token, lines_figure, percent
from weft.figures.tables import WIDTH, Table, text_table
from weft.models.base import LanguageModel, evaluating
from weft.models.ngram import NGram
from weft.models.transformer import Transformer

HEAD_ELEMENTS = 1 << 24  # logits that are held at a time
MASKED_TOKENS = 1 << 13  # tokens that a masked model reads at a time
TOPS = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 16.0)  # nats that may be the darkest shade
HEADINGS = ("place", "token", "nats", "probability", "rank", "likeliest")
MAX_TOLD = 12  # tokens that a terminal shows


class Guess(NamedTuple):
    """A token that could have stood there, as it is shown, and its probability."""

    piece: str
    probability: float


@dataclass(frozen=True)
class Surprise(Picture):
    """Each token of a text, −log p of it in nats, its rank among all tokens (1: the likeliest), and the likeliest ones.

    All three are None or empty where nothing predicts a token. `masked`: tokens were predicted from both sides.
    """

    about: str
    tokens: tuple[Token, ...]
    nats: tuple[float | None, ...]
    ranks: tuple[int | None, ...]
    guesses: tuple[tuple[Guess, ...], ...]
    vocab_size: int
    masked: bool = False

    title = "Surprise"
    module = "surprise.js"

    @cached_property
    def scored(self) -> list[float]:
        return [each for each in self.nats if each is not None]

    @property
    def nats_per_token(self) -> float:
        return sum(self.scored) / len(self.scored)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats_per_token) if self.nats_per_token < 700 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Comparable between tokenizers; NaN for a text without bytes."""
        pairs = zip(self.tokens, self.nats, strict=True)
        size = sum(len(token.text.encode()) for token, nats in pairs if nats is not None)
        return sum(self.scored) / math.log(2) / size if size else math.nan

    @property
    def total(self) -> str:
        name = "pseudo-perplexity" if self.masked else "perplexity"
        return (
            f"{len(self.scored):,} tokens, {self.nats_per_token:.3f} nats per token, "
            f"{name} {self.perplexity:,.4g}, {self.bits_per_byte:.3f} bits per byte"
        )

    @cached_property
    def measure(self) -> Measure:
        """The shades: the same numbers have the same shade in texts that are about equally surprising."""
        finite = sorted(each for each in self.scored if math.isfinite(each))
        high = finite[int(0.95 * (len(finite) - 1))] if finite else TOPS[0]
        return Measure("surprisal, nats", self.nats, next((top for top in TOPS if top >= high), TOPS[-1]))

    def figure(self) -> Figure:
        return lines_figure(self.title, self.tokens, self.measure)

    def text(self) -> str:
        order = sorted(range(len(self.nats)), key=lambda place: -(self.nats[place] or 0.0))
        rows = [self._rows[place] for place in order if self.nats[place] is not None]
        return text_table(Table(HEADINGS, rows[:MAX_TOLD], "", text=(1, 5)), WIDTH) + f"\n\n{self.total}"

    @cached_property
    def _rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        columns = zip(self.tokens, self.nats, self.ranks, self.guesses, strict=True)
        for place, (token, nats, rank, guesses) in enumerate(columns, 1):
            numbers = ("–",) * 3
            if nats is not None:
                numbers = (f"{nats:.2f}" if math.isfinite(nats) else "∞", percent(math.exp(-nats)), f"{rank:,}")
            others = " · ".join(f"{guess.piece} {percent(guess.probability)}" for guess in guesses)
            rows.append((str(place), token.piece, *numbers, others))
        return rows


@torch.no_grad()
def surprise(reading: Reading, top: int = 5) -> Surprise:
    """−log p of each token of a text given what stands before it, and the `top` likeliest tokens in its place.

    For any model that predicts words. An encoder–decoder's text is the target, given the source. Of a masked model each
    token is masked in turn.
    """
    if top < 1:
        raise ConfigError(f"top = {top}: at least one token")
    model, tokenizer, ids = reading.model, reading.tokenizer, reading.ids[reading.before :]
    if not ids:
        raise DataError("the text is empty")
    masked, known = predicts_masked(model), min(tokenizer.vocab_size, _vocab_size(model))
    found: dict[int, tuple[float, int, tuple[Guess, ...]]] = {}
    with evaluating(model):
        for places, log_p in _masked_log_p(reading) if masked else _log_p(reading):
            own = torch.tensor([reading.ids[place] for place in places], device=log_p.device)
            given = log_p.gather(1, own[:, None])
            rank = (log_p > given).sum(1) + 1
            values, likeliest = log_p[:, :known].topk(min(top, known))
            for row, place in enumerate(places):
                names = pieces(tokenizer, likeliest[row].tolist())
                likely = tuple(map(Guess, names, values[row].exp().tolist()))
                found[place - reading.before] = -float(given[row]), int(rank[row]), likely
    if not found:
        raise DataError("there is nothing to score: a single token with nothing before it")
    nats, ranks, guesses = zip(*(found.get(place, (None, None, ())) for place in range(len(ids))), strict=True)
    about = _about(masked, reading.source is not None)
    return Surprise(about, tuple(running(tokenizer, ids)), nats, ranks, guesses, _vocab_size(model), masked)


def predicts_masked(model: LanguageModel) -> bool:
    """Whether a model predicts masked words, and not the next one. One that predicts no words at all is refused."""
    if not isinstance(model, Transformer):
        return False
    if not predicts_words(model):
        raise ModelError(f"a head of kind '{model.config.head.kind}' predicts no words; it takes a language model's")
    return model.decoder is None


Scored = Iterator[tuple[Sequence[int], Tensor]]  # places of a reading, and log p (places, V) of what may stand there


def _log_p(reading: Reading) -> Scored:
    """log p of every token that may stand at each place of the text, given what stands before it."""
    model = reading.model
    if isinstance(model, NGram):  # it counted texts without anything before them, and knows what begins one
        words = reading.tokens[:, reading.before :]
        nothing = words.new_full((1, 1, model.config.order - 1), model.config.vocab_size)
        features = torch.cat([nothing, model.features(words[:, :-1])], dim=1)
        first = reading.before
    else:
        tokens, first = reading.tokens[:, :-1], max(1, reading.before)
        if not tokens.shape[1]:
            return
        features = model.advance(tokens, model.start(1, tokens.shape[1], reading.given.get("source")))[:, first - 1 :]
    rows = max(1, HEAD_ELEMENTS // _vocab_size(model))
    for start in range(0, features.shape[1], rows):
        logits = model.head(features[:, start : start + rows])[0].float()
        # an n-gram's are log p already, which don't sum to one where it backs off "stupidly"
        log_p = logits if isinstance(model, NGram) else logits.log_softmax(-1)
        yield range(first + start, first + start + len(logits)), log_p


def _masked_log_p(reading: Reading) -> Scored:
    """The same for each word of the text, masked while its neighbours are seen."""
    model = reading.model
    assert isinstance(model, Transformer)
    special = set(reading.tokenizer.special_tokens.values())
    places = [place for place, id in enumerate(reading.ids) if place >= reading.before and id not in special]
    rows = max(1, min(MASKED_TOKENS // len(reading.ids), HEAD_ELEMENTS // _vocab_size(model)))
    for start in range(0, len(places), rows):
        some = places[start : start + rows]
        each = torch.arange(len(some), device=reading.tokens.device)
        tokens = reading.tokens.repeat(len(some), 1)
        tokens[each, some] = reading.tokenizer.need("mask")
        features = model.features(tokens)[each, some]
        yield some, model.readout(features).logits().float().log_softmax(-1)


def _vocab_size(model: LanguageModel) -> int:
    return model.config.vocab_size  # type: ignore[attr-defined]


def _about(masked: bool, source: bool) -> str:
    given = "the source and the tokens before it" if source else "the tokens before it"
    if masked:
        given = "all others, each masked in turn (pseudo-log-likelihood; Salazar et al. 2020)"
    meaning = f"How surprising each token is to the model: −log p in nats, given {given}."
    return f"{meaning} The stronger the shade, the more surprising."
