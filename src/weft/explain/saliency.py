"""Tokens that a prediction depends on: the gradient of its log-probability with respect to the input embeddings.

The norm of the gradient says how much a small change of a token's embedding would matter (Simonyan et al. 2014);
gradient × input how much the embedding contributes to log p, to first order and with its sign (Denil et al. 2014).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray
from torch import Tensor

from weft.errors import DataError, ModelError
from weft.explain.capture import capture
from weft.explain.reading import Reading, pieces, text_tokens
from weft.explain.surprise import predicts_masked
from weft.explain.texts import TEXTS
from weft.figures.picture import COLOURS, Picture, new_figure
from weft.figures.shaded import Measure, Token, drawable, families, lines_figure, percent
from weft.figures.tables import Table, text_table
from weft.models.base import LanguageModel, device_of, evaluating
from weft.models.ngram import NGram
from weft.models.transformer import Transformer
from weft.models.word_table import WordTable

MAX_BARS = 44  # tokens that a figure draws as bars; longer texts are shaded lines
MAX_ROWS = 12  # tokens listed in a terminal
NORM, TIMES_INPUT = "gradient norm", "gradient × input"


class Side(NamedTuple):
    """Tokens that were read, with the gradient's norm and gradient × input of each embedding: (time,) each."""

    name: str
    tokens: tuple[Token, ...]
    norm: NDArray[np.float64]
    times_input: NDArray[np.float64]


@dataclass(frozen=True)
class Saliency(Picture):
    """Dependence of log p(`target`) on `sides`: the source, if there is one, and the text up to position `place`."""

    about: str
    target: str
    log_prob: float
    sides: tuple[Side, ...]
    place: int
    rest: tuple[Token, ...] = ()  # tokens after the position
    masked: bool = False  # the target is at the position itself, and the whole text was read

    title = "Saliency"
    module = "saliency.js"

    def figure(self) -> Figure:
        """Return one bar per token; for a long text, its lines shaded by the gradient's norm."""
        if sum(len(side.tokens) for side in self.sides) > MAX_BARS:
            tokens = [token for side in self.sides for token in side.tokens]
            values = np.concatenate([side.norm for side in self.sides])
            measure = Measure(f"{NORM}: {self.target}", values.tolist(), float(values.max()))
            return lines_figure(self.title, tokens, measure)
        heights = [max(2, len(side.tokens)) for side in self.sides]
        figure = new_figure(6.5, 0.9 + 0.5 * (len(heights) - 1) + 0.19 * sum(heights))
        shared: dict[str, Any] = {"squeeze": False, "sharex": "col", "gridspec_kw": {"height_ratios": heights}}
        grid: Any = figure.subplots(len(self.sides), 2, **shared)
        for (left, right), side in zip(grid, self.sides, strict=True):
            rows = np.arange(len(side.tokens))
            left.barh(rows, side.norm, color=COLOURS[0])
            # Tokens that lower log p are hatched, besides being left of zero.
            hatch = ["" if value >= 0 else "////" for value in side.times_input]
            right.barh(rows, side.times_input, color=COLOURS[0], hatch=hatch, ec="white", lw=0)
            names = [drawable(token.piece) for token in side.tokens]
            left.set_yticks(rows, names, fontsize=9, family=families(), parse_math=False)
            right.set_yticks([])
            right.axvline(0, color="black", lw=0.6)
            left.set_ylabel(side.name, fontsize=9)
            for axes in (left, right):
                axes.set_ylim(len(side.tokens) - 0.4, -0.6)
                axes.tick_params(labelsize=9, length=2)
                axes.xaxis.set_major_locator(MaxNLocator(4))
                axes.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
                axes.spines[["top", "right", "left"]].set_visible(False)
        grid[-1, 0].set_xlabel(NORM, fontsize=9)
        grid[-1, 1].set_xlabel(TIMES_INPUT, fontsize=9)
        title = f"p({drawable(self.target)}) = {percent(float(np.exp(self.log_prob)))}"
        figure.suptitle(title, fontsize=10, family=families(), parse_math=False)
        return figure

    def text(self) -> str:
        numbered = [(side.name, *row) for side in self.sides for row in zip(count(), *side[1:], strict=False)]
        rows = [
            (name, str(position), token.piece, f"{norm:.3g}", f"{times:+.3g}".replace("-", "−"))
            for name, position, token, norm, times in sorted(numbered, key=lambda row: -row[3])[:MAX_ROWS]
        ]
        nats, p = f"{self.log_prob:.2f}".replace("-", "−"), percent(float(np.exp(self.log_prob)))
        title = f"log-probability of {self.target}: {nats} nats, probability {p}"
        return text_table(Table(("", "pos.", "token", "norm", "× input"), rows, title, text=(0, 2)))


def saliency(reading: Reading, position: int = -1) -> Saliency:
    """Return the gradient of log p of the token after `position` with respect to all embeddings read up to there.

    The target is the next token of the text or, after its end, the model's prediction. For a masked model it is the
    token at `position` itself, which is masked; by default the last one of the text. For any model with embeddings; of
    an encoder–decoder, with respect to the source's as well.
    """
    model, tokenizer = reading.model, reading.tokenizer
    if isinstance(model, NGram):
        raise ModelError("an n-gram model has counts and no gradients; saliency needs a model with embeddings")
    if isinstance(model, WordTable):
        raise ModelError("word vectors predict nothing from a text; saliency needs a language model")
    masked, ids = predicts_masked(model), list(reading.ids)
    if not -len(ids) <= position < len(ids):
        last = len(ids) - 1
        raise DataError(f"place = {position}: the model reads {len(ids)} tokens, 0 … {last}, or −1 for the last")
    at = position % len(ids)
    if masked and position == -1:
        special = set(tokenizer.special_tokens.values())
        at = max((n for n, id in enumerate(ids) if id not in special), default=at)
    target: int | None = ids[at] if masked else ids[at + 1] if at + 1 < len(ids) else None
    ids = [*ids[:at], tokenizer.need("mask"), *ids[at + 1 :]] if masked else ids[: at + 1]
    # The source is embedded first, by its own table or the target's.
    names = [name for name in ("source_embedding", "embedding") if getattr(model, name, None) is not None]

    def log_prob() -> Tensor:
        nonlocal target
        features = model.features(torch.tensor([ids], device=device_of(model)), **reading.model_kwargs)[:, at]
        if isinstance(model, Transformer):
            logits = model.readout(features).logits()
        else:
            logits = model.head(features[:, None])[:, 0]
        log_p = logits[0].log_softmax(-1)
        target = int(log_p[: tokenizer.vocab_size].argmax()) if target is None else target
        return log_p[target]

    value, gradients = embedding_gradients(model, log_prob, names)
    assert target is not None
    texts = [("text", tokenizer, ids)]
    if reading.source is not None:
        texts.insert(0, ("source", reading.source_tokenizer or tokenizer, list(reading.source)))
    parts = zip(texts, gradients, strict=True)
    sides = tuple(Side(name, tuple(text_tokens(its, read)), *gradient) for (name, its, read), gradient in parts)
    last = at + 1 == len(reading.ids)
    which = "predicting" if masked else "the model's prediction after" if last else "the token that follows"
    return Saliency(
        about=TEXTS["saliency"].format(which=which, position=at),
        target=pieces(tokenizer, [target])[0],
        log_prob=value,
        sides=sides,
        place=at,
        rest=tuple(text_tokens(tokenizer, reading.ids)[len(ids) :]),
        masked=masked,
    )


def embedding_gradients(
    model: LanguageModel, compute: Callable[[], Tensor], names: Sequence[str]
) -> tuple[float, list[tuple[NDArray[np.float64], NDArray[np.float64]]]]:
    """Return the scalar that `compute` returns, and its gradient with respect to the outputs of each embedding layer.

    A gradient is given as its norm and as gradient × input, (time,) each. `compute` reads one row.
    """
    # cuDNN has no backward pass for recurrent models in evaluation mode
    with evaluating(model), torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        with capture(model, *names, grads=True) as captured:
            value = compute()
        embeddings = [x for name in names for x in captured.calls(name)]
        gradients = torch.autograd.grad(value, embeddings)
    pairs = [(x[0].detach().double().cpu(), g[0].double().cpu()) for x, g in zip(embeddings, gradients, strict=True)]
    return float(value.detach()), [(g.norm(dim=-1).numpy(), (g * x).sum(-1).numpy()) for x, g in pairs]
