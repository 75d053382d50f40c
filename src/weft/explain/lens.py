"""The logit lens: what a model would predict if its layers ended early (nostalgebraist 2020).

The residual stream after every layer goes through the last norm and the head, as only the last layer's does in the
model. Where blocks norm their own output (post-norm) there is no last norm, and the head reads the residual as it is.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from weft.explain.capture import capture
from weft.explain.reading import Reading, lacks, pieces
from weft.explain.surprise import HEAD_ELEMENTS, Guess, predicts_masked
from weft.figures.picture import SHADES, Picture, new_figure
from weft.figures.shaded import DARKEST, drawable, families, percent, width_of
from weft.figures.tables import Table, text_table
from weft.models.base import evaluating
from weft.models.stack import Stack
from weft.models.transformer import Transformer

SHOWN_PLACES = 96  # where nobody chose any
MAX_COLUMNS, MAX_ROWS = 16, 33  # of a figure
CELL, SIZE = 0.66, 6.5  # inches, points


@dataclass(frozen=True)
class Lens(Picture):
    """The likeliest token at every layer and place, and how the model's final prediction fares there.

    Row 0 is the embedding, the last row the model's own output. `read` are the tokens read at the places, which begin
    at `start` in the reading; `following` what comes next in the text. Arrays are (layers + 1, places).
    """

    about: str
    read: tuple[str, ...]
    following: tuple[str, ...]
    start: int
    guesses: tuple[tuple[Guess, ...], ...]
    final_probability: NDArray[np.float32]
    final_rank: NDArray[np.int64]
    masked: bool = False  # the model predicts the tokens at their own places, and `following` are these

    title = "Logit lens"
    module = "lens.js"

    @property
    def probability(self) -> NDArray[np.float32]:
        """Of the likeliest token in each cell."""
        return np.array([[guess.probability for guess in row] for row in self.guesses], dtype=np.float32)

    @cached_property
    def names(self) -> list[str]:
        last = len(self.guesses) - 2
        return ["embedding", *(f"layer {n}" for n in range(last)), f"layer {last}, output"]

    def figure(self) -> Figure:
        """Layers upward, the last places from left to right; the shade of a cell is the probability of its token."""
        count = len(self.guesses)  # all of these rows, or some at even distances, the first and the last among them
        rows = sorted({round(place) for place in np.linspace(0, count - 1, min(count, MAX_ROWS))})
        columns = range(max(0, len(self.read) - MAX_COLUMNS), len(self.read))
        figure = new_figure(1.0 + CELL * max(4, len(columns)), 1.1 + 0.2 * len(rows))
        axes: Any = figure.add_subplot()
        shares = self.probability[np.ix_(rows, columns)]
        image = axes.imshow(shares * DARKEST, cmap=SHADES, vmin=0.0, vmax=1.0, aspect="auto", origin="lower")
        font = {"fontsize": SIZE, "family": families(), "parse_math": False}
        for (row, column), _ in np.ndenumerate(shares):
            piece = self.guesses[rows[row]][columns[column]].piece
            weight = "bold" if self.final_rank[rows[row], columns[column]] == 1 else "normal"
            shown = _fitting(piece, 72 * CELL / (1.15 if weight == "bold" else 1.0) - 4)
            axes.text(column, row, shown, ha="center", va="center", weight=weight, **font)
        below, above = ([_fitting(side[n], 72 * CELL - 2) for n in columns] for side in (self.read, self.following))
        axes.set_xticks(range(len(columns)), below, **font)
        axes.set_yticks(range(len(rows)), [self.names[row] for row in rows], fontsize=SIZE)
        axes.set_xlabel("token read", fontsize=SIZE + 1)
        top = axes.secondary_xaxis("top")
        top.set_xticks(range(len(columns)), above, **font)
        top.set_xlabel("in the text" if self.masked else "next in the text", fontsize=SIZE + 1)
        for each in (axes, top):
            each.tick_params(length=0)
            each.spines[:].set_visible(False)
        axes.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", lw=0.8)
        axes.tick_params(which="minor", length=0)
        bar = figure.colorbar(image, ax=axes, shrink=0.5, pad=0.01, boundaries=np.linspace(0, DARKEST, 100))
        bar.set_ticks([0, DARKEST / 2, DARKEST], labels=["0", "0.5", "1"], fontsize=SIZE)
        bar.set_label("probability", fontsize=SIZE)
        return figure

    def text(self) -> str:
        rows = []
        for row in reversed(range(len(self.guesses))):
            guess, share = self.guesses[row][-1], float(self.final_probability[row, -1])
            final = f"the output's: {percent(share)}, rank {self.final_rank[row, -1]:,}"
            rows.append((self.names[row], guess.piece, percent(guess.probability), final))
        title = f"{'at' if self.masked else 'after'} token {self.start + len(self.read)}, {self.read[-1]}"
        return text_table(Table(("",) * 4, rows, title, text=(1, 3)))


@torch.no_grad()
def lens(reading: Reading) -> Lens:
    """The likeliest token that every layer would predict at the last 96 places, or all there are.

    For Transformers that predict words; of an encoder–decoder, the decoder's layers.
    """
    model, tokenizer = reading.model, reading.tokenizer
    if not isinstance(model, Transformer):
        raise lacks(model, "no residual stream to look into", "the lens needs a Transformer")
    masked = predicts_masked(model)
    start = max(0, len(reading.ids) - SHOWN_PLACES)
    name = "encoder" if model.decoder is None else "decoder"
    stack = model.decoder or model.encoder
    assert stack is not None
    below = f"{name}.projection" if stack.projection is not None and stack.narrow else f"{name}.dropout"
    with evaluating(model), capture(model, below, f"{name}.*.residual") as seen:
        model.features(reading.tokens, **reading.given)
        # the dropout passes on what the first block reads; while a model is used, it drops nothing
        streams = [seen[below], *(seen[f"{name}.{n}.residual"] for n in range(len(stack.layers)))]
        known = min(tokenizer.vocab_size, model.config.vocab_size)
        final = torch.cat([each[:, :known].argmax(-1) for each in _logits(model, stack, streams[-1][0, start:])])
        layers = [_layer(_logits(model, stack, each[0, start:]), final, known) for each in streams]
    guesses, log_p, ranks = zip(*layers, strict=True)
    # a masked model predicts the tokens that it reads
    following = reading.pieces if masked else [*reading.pieces[1:], ""]
    texts = tuple(reading.pieces[start:]), tuple(following[start:])
    named = (tuple(map(Guess, pieces(tokenizer, ids.tolist()), values.exp().tolist())) for values, ids in guesses)
    probabilities, final_rank = np.stack([each.exp().numpy() for each in log_p]), torch.stack(ranks).numpy()
    return Lens(_about(stack, masked), *texts, start, tuple(named), probabilities, final_rank, masked)


def _logits(model: Transformer, stack: Stack, stream: Tensor) -> Iterator[Tensor]:
    """What the head makes of a residual stream (places, d_model), some places (…, V) at a time."""
    normed = stream if stack.norm is None else stack.norm(stream)
    rows = max(1, HEAD_ELEMENTS // model.config.vocab_size)
    return (model.readout(some).logits().float() for some in normed.split(rows))


def _layer(logits: Iterator[Tensor], final: Tensor, known: int) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """What one layer would predict of the `known` tokens, which have names: log p and ids of the likeliest (places,);
    log p and rank of the final prediction."""
    log_p = torch.cat([each.log_softmax(-1)[:, :known] for each in logits])
    own = log_p.gather(1, final[:, None])
    values, ids = log_p.max(1)
    return (values.cpu(), ids.cpu()), own[:, 0].cpu(), ((log_p > own).sum(1) + 1).cpu()


def _about(stack: Stack, masked: bool) -> str:
    what = "the token at its own place" if masked else "the next token"
    alone = stack.norm is None
    through = "the head alone (the blocks norm their own output)" if alone else "the last norm and the head"
    return (
        f"What each layer would predict as {what}, if the model ended there: its residual stream through {through} "
        "(logit lens; nostalgebraist 2020). The shade is the probability; bold is what the model predicts in the end."
    )


def _fitting(piece: str, width: float) -> str:
    """A piece for a cell of so many points: what doesn't fit is left out at its end."""
    piece = drawable(piece)
    if width_of(piece, SIZE) <= width:
        return piece
    while piece and width_of(piece + "…", SIZE) > width:
        piece = piece[:-1]
    return piece + "…"
