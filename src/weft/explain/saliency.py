"""Which tokens a prediction depends on: the gradient of its log-probability by the embeddings of what was read.

The norm of the gradient tells how much a small change of a token's embedding would matter (Simonyan et al. 2014);
gradient × input how much the embedding itself adds to log p, to first order, with its sign (Denil et al. 2014).
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from weft.errors import DataError, ModelError
from weft.explain.capture import capture
from weft.explain.reading import Reading, pieces, running
from weft.explain.surprise import predicts_masked
from weft.figures.picture import COLOURS, Picture, new_figure
from weft.figures.shaded import Measure, Token, drawable, families, lines_figure, percent
from weft.figures.tables import Table, text_table
from weft.models.base import evaluating
from weft.models.ngram import NGram
from weft.models.transformer import Transformer

MAX_BARS = 44  # tokens of a figure that are still drawn as bars
MAX_TOLD = 12  # tokens that a terminal shows
NORM, TIMES_INPUT = "gradient norm", "gradient × input"


class Side(NamedTuple):
    """Tokens that were read, the norm of the gradient by each one's embedding, and gradient × input: (time,) each."""

    name: str
    tokens: tuple[Token, ...]
    norm: NDArray[np.float64]
    times_input: NDArray[np.float64]


@dataclass(frozen=True)
class Saliency(Picture):
    """What log p of `target` depends on. `sides`: the source, where there is one, and the text up to `place`.

    `rest` are the tokens after it. `masked`: the target stands at the place itself, and the text is all that was read.
    """

    about: str
    target: str
    log_prob: float
    sides: tuple[Side, ...]
    place: int
    rest: tuple[Token, ...] = ()
    masked: bool = False

    title = "Saliency"
    module = "saliency.js"

    def figure(self) -> Figure:
        """Bars, a token each; of more tokens than fit, the texts in lines on their shades."""
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
            places = np.arange(len(side.tokens))
            left.barh(places, side.norm, color=COLOURS[0])
            # what lowers log p is told apart by its side of zero, and by hatching
            hatch = ["" if value >= 0 else "////" for value in side.times_input]
            right.barh(places, side.times_input, color=COLOURS[0], hatch=hatch, ec="white", lw=0)
            names = [drawable(token.piece) for token in side.tokens]
            left.set_yticks(places, names, fontsize=8, family=families(), parse_math=False)
            right.set_yticks([])
            right.axvline(0, color="black", lw=0.6)
            left.set_ylabel(side.name, fontsize=9)
            for axes in (left, right):
                axes.set_ylim(len(side.tokens) - 0.4, -0.6)
                axes.tick_params(labelsize=8, length=2)
                axes.xaxis.set_major_locator(MaxNLocator(4))
                axes.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
                axes.spines[["top", "right", "left"]].set_visible(False)
        grid[-1, 0].set_xlabel(NORM, fontsize=9)
        grid[-1, 1].set_xlabel(TIMES_INPUT, fontsize=9)
        shown = f"p({drawable(self.target)}) = {self._target[-1]}"
        figure.suptitle(shown, fontsize=10, family=families(), parse_math=False)
        return figure

    def text(self) -> str:
        rows = [
            (-norm, (side.name, *row))
            for side, rows in zip(self.sides, self._rows, strict=True)
            for norm, row in zip(side.norm, rows, strict=True)
        ]
        rows.sort(key=lambda row: row[0])
        header = ("", "place", "token", "norm", "× input")
        title = "log-probability of {}: {} nats, probability {}".format(*self._target)
        return text_table(Table(header, [row for _, row in rows[:MAX_TOLD]], title, text=(0, 2)))

    @property
    def _target(self) -> tuple[str, str, str]:
        return self.target, f"{self.log_prob:.2f}".replace("-", "−"), percent(float(np.exp(self.log_prob)))

    @cached_property
    def _rows(self) -> list[list[tuple[str, str, str, str]]]:
        return [
            [
                (str(place), token.piece, f"{norm:.3g}", f"{times:+.3g}".replace("-", "−"))
                for place, token, norm, times in zip(count(1), *side[1:], strict=False)
            ]
            for side in self.sides
        ]


def saliency(reading: Reading, place: int = -1) -> Saliency:
    """The gradient of log p of the token after `place` by the embeddings of all that was read up to there.

    The token is the one that follows in the text; after the last one, the one that the model predicts. A masked model's
    is the token at `place` itself, which is masked; the last word where no place is named. For any model that reads
    embeddings; of an encoder–decoder, by the source's as well.
    """
    model, tokenizer = reading.model, reading.tokenizer
    if isinstance(model, NGram):
        raise ModelError("an n-gram model has counts and no gradients; saliency needs a model with embeddings")
    masked = predicts_masked(model)
    at = _place(reading, place, masked)
    ids = list(reading.ids)
    target: int | None = ids[at] if masked else ids[at + 1] if at + 1 < len(ids) else None
    ids = [*ids[:at], tokenizer.need("mask"), *ids[at + 1 :]] if masked else ids[: at + 1]
    own_source = getattr(model, "source_embedding", None) is not None
    names = ["embedding", *(["source_embedding"] if own_source else [])]
    # cuDNN has no backward pass for recurrent models that are not in training
    with evaluating(model) as device, torch.enable_grad(), torch.backends.cudnn.flags(enabled=False):
        with capture(model, *names, grads=True) as seen:
            features = model.features(torch.tensor([ids], device=device), **reading.given)[:, at]
        if isinstance(model, Transformer):
            logits = model.readout(features).logits()
        else:
            logits = model.head(features[:, None])[:, 0]
        log_p = logits[0].log_softmax(-1)
        if target is None:
            target = int(log_p[: tokenizer.vocab_size].argmax())
        # a source is read first, with the same table or its own
        read = [*(seen.calls("source_embedding") if own_source else []), *seen.calls("embedding")]
        gradients = torch.autograd.grad(log_p[target], read)
    texts = [("text", tokenizer, ids)]
    if reading.source is not None:
        texts.insert(0, ("source", reading.source_tokenizer or tokenizer, list(reading.source)))
    sides = []
    for (name, its, some), x, gradient in zip(texts, read, gradients, strict=True):  # (1, time, d) each
        x, gradient = x[0].detach().double().cpu(), gradient[0].double().cpu()
        norm, times = gradient.norm(dim=-1).numpy(), (gradient * x).sum(-1).numpy()
        sides.append(Side(name, tuple(running(its, some)), norm, times))
    shown = pieces(tokenizer, [target])[0]
    rest = tuple(running(tokenizer, reading.ids)[len(ids) :])
    about, log_prob = _about(reading, at, masked), float(log_p[target].detach())
    return Saliency(about, shown, log_prob, tuple(sides), at, rest, masked)


def _place(reading: Reading, place: int, masked: bool) -> int:
    """The place counted from the start; of a masked model's, by default the last word."""
    length = len(reading.ids)
    if not -length <= place < length:
        raise DataError(f"place = {place}: the model reads {length} tokens, 0 … {length - 1}, or −1 for the last")
    if masked and place == -1:
        special = set(reading.tokenizer.special_tokens.values())
        return max((n for n, id in enumerate(reading.ids) if id not in special), default=length - 1)
    return place % length


def _about(reading: Reading, at: int, masked: bool) -> str:
    last = at + 1 == len(reading.ids)
    which = "predicting" if masked else "the model's prediction after" if last else "the token that follows"
    return (
        f"What {which} token {at + 1} depends on: the gradient of its log-probability by each embedding read. Its norm "
        "says how much a small change there would matter; gradient × input, what the embedding adds to log p, to first "
        "order (Simonyan et al. 2014; Denil et al. 2014)."
    )
