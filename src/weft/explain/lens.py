"""Logit lens: what a model would predict if it ended after an earlier layer (nostalgebraist 2020).

The residual stream after every layer goes through the last norm and the head, as the last layer's does in the model.
With post-norm blocks there is no last norm, and the head reads the residual stream as it is.
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

from weft.explain.capture import capture, stack_input
from weft.explain.reading import Reading, pieces, unsupported
from weft.explain.surprise import MAX_LOGITS, Guess, predicts_masked
from weft.explain.texts import TEXTS
from weft.figures.picture import SHADES, Picture, new_figure
from weft.figures.shaded import DARKEST, drawable, families, percent, width_of
from weft.figures.tables import Table, text_table
from weft.models.base import evaluating
from weft.models.stack import Stack
from weft.models.transformer import Transformer

MAX_POSITIONS = 96  # last positions of a text that are computed
MAX_COLUMNS, MAX_ROWS = 16, 33  # positions and layers in a figure
CELL_INCHES, FONT_SIZE = 0.66, 6.5


@dataclass(frozen=True)
class Lens(Picture):
    """Likeliest token at every layer and position, and the probability and rank of the final prediction there."""

    about: str
    read: tuple[str, ...]  # tokens at the positions
    following: tuple[str, ...]  # next tokens of the text
    start: int  # first position in the reading
    guesses: tuple[tuple[Guess, ...], ...]  # row 0 is the embedding, the last row the model's output
    final_probability: NDArray[np.float32]  # (layers + 1, positions)
    final_rank: NDArray[np.int64]
    masked: bool = False  # the model predicts the token at each position, and `following` are the tokens read

    title = "Logit lens"
    module = "lens.js"

    @property
    def probability(self) -> NDArray[np.float32]:
        """Probability of the likeliest token in each cell."""
        return np.array([[guess.probability for guess in row] for row in self.guesses], dtype=np.float32)

    @cached_property
    def names(self) -> list[str]:
        last = len(self.guesses) - 2
        return ["embedding", *(f"layer {n}" for n in range(last)), f"layer {last}, output"]

    def figure(self) -> Figure:
        """Return layers upwards and the last positions from left to right, each cell shaded by its probability."""
        count = len(self.guesses)
        rows = sorted({round(row) for row in np.linspace(0, count - 1, min(count, MAX_ROWS))})  # evenly spaced
        columns = range(max(0, len(self.read) - MAX_COLUMNS), len(self.read))
        figure = new_figure(1.0 + CELL_INCHES * max(4, len(columns)), 1.1 + 0.2 * len(rows))
        axes: Any = figure.add_subplot()
        shades = self.probability[np.ix_(rows, columns)]
        image = axes.imshow(shades * DARKEST, cmap=SHADES, vmin=0.0, vmax=1.0, aspect="auto", origin="lower")
        font = {"fontsize": FONT_SIZE, "family": families(), "parse_math": False}
        for (row, column), _ in np.ndenumerate(shades):
            piece = self.guesses[rows[row]][columns[column]].piece
            weight = "bold" if self.final_rank[rows[row], columns[column]] == 1 else "normal"
            label = _shortened(piece, 72 * CELL_INCHES / (1.15 if weight == "bold" else 1.0) - 4)
            axes.text(column, row, label, ha="center", va="center", weight=weight, **font)
        sides = (self.read, self.following)
        below, above = ([_shortened(tokens[n], 72 * CELL_INCHES - 2) for n in columns] for tokens in sides)
        axes.set_xticks(range(len(columns)), below, **font)
        axes.set_yticks(range(len(rows)), [self.names[row] for row in rows], fontsize=FONT_SIZE)
        axes.set_xlabel("token read", fontsize=FONT_SIZE + 1)
        top = axes.secondary_xaxis("top")
        top.set_xticks(range(len(columns)), above, **font)
        top.set_xlabel("in the text" if self.masked else "next in the text", fontsize=FONT_SIZE + 1)
        for side in (axes, top):
            side.tick_params(length=0)
            side.spines[:].set_visible(False)
        axes.set_xticks(np.arange(len(columns) + 1) - 0.5, minor=True)
        axes.set_yticks(np.arange(len(rows) + 1) - 0.5, minor=True)
        axes.grid(which="minor", color="white", lw=0.8)
        axes.tick_params(which="minor", length=0)
        bar = figure.colorbar(image, ax=axes, shrink=0.5, pad=0.01, boundaries=np.linspace(0, DARKEST, 100))
        bar.set_ticks([0, DARKEST / 2, DARKEST], labels=["0", "0.5", "1"], fontsize=FONT_SIZE)
        bar.set_label("probability", fontsize=FONT_SIZE)
        return figure

    def text(self) -> str:
        rows = []
        for row in reversed(range(len(self.guesses))):
            guess, p = self.guesses[row][-1], float(self.final_probability[row, -1])
            final = f"the output's: {percent(p)}, rank {self.final_rank[row, -1]:,}"
            rows.append((self.names[row], guess.piece, percent(guess.probability), final))
        title = f"{'at' if self.masked else 'after'} token {self.start + len(self.read)}, {self.read[-1]}"
        return text_table(Table(("",) * 4, rows, title, text=(1, 3)))


@torch.no_grad()
def lens(reading: Reading) -> Lens:
    """Return the likeliest token of every layer at the last 96 positions, or all there are.

    For Transformers that predict tokens; of an encoder–decoder, the decoder's layers.
    """
    model, tokenizer = reading.model, reading.tokenizer
    if not isinstance(model, Transformer):
        raise unsupported(model, "no residual stream to look into", "the lens needs a Transformer")
    masked = predicts_masked(model)
    start = max(0, len(reading.ids) - MAX_POSITIONS)
    name = "encoder" if model.decoder is None else "decoder"
    stack = model.decoder or model.encoder
    assert stack is not None
    below = stack_input(name, stack)
    with evaluating(model), capture(model, below, f"{name}.*.residual") as captured:
        model.features(reading.tokens, **reading.model_kwargs)
        streams = [captured[below], *(captured[f"{name}.{n}.residual"] for n in range(len(stack.layers)))]
        known = min(tokenizer.vocab_size, model.config.vocab_size)
        final = torch.cat([each[:, :known].argmax(-1) for each in _logits(model, stack, streams[-1][0, start:])])
        layers = [_predictions(_logits(model, stack, each[0, start:]), final, known) for each in streams]
    best, log_p, ranks = zip(*layers, strict=True)
    guesses = (tuple(map(Guess, pieces(tokenizer, ids.tolist()), p.exp().tolist())) for p, ids in best)
    following = reading.pieces if masked else [*reading.pieces[1:], ""]
    target = "the token at its position" if masked else "the next token"
    through = "the last norm and the head" if stack.norm is not None else "the head alone (the blocks are post-norm)"
    return Lens(
        about=TEXTS["lens"].format(target=target, through=through),
        read=tuple(reading.pieces[start:]),
        following=tuple(following[start:]),
        start=start,
        guesses=tuple(guesses),
        final_probability=np.stack([each.exp().numpy() for each in log_p]),
        final_rank=torch.stack(ranks).numpy(),
        masked=masked,
    )


def _logits(model: Transformer, stack: Stack, stream: Tensor) -> Iterator[Tensor]:
    """Yield the logits (…, V) of a residual stream (positions, d_model), a few positions at a time."""
    normalised = stream if stack.norm is None else stack.norm(stream)
    rows = max(1, MAX_LOGITS // model.config.vocab_size)
    return (model.readout(batch).logits().float() for batch in normalised.split(rows))


def _predictions(logits: Iterator[Tensor], final: Tensor, known: int) -> tuple[tuple[Tensor, Tensor], Tensor, Tensor]:
    """Return log p and ids of one layer's likeliest tokens among the first `known`, and log p and rank of `final`."""
    log_p = torch.cat([each.log_softmax(-1)[:, :known] for each in logits])
    final_log_p = log_p.gather(1, final[:, None])
    values, ids = log_p.max(1)
    return (values.cpu(), ids.cpu()), final_log_p[:, 0].cpu(), ((log_p > final_log_p).sum(1) + 1).cpu()


def _shortened(piece: str, width: float) -> str:
    """Return a piece that fits into `width` points, with an ellipsis if it is cut."""
    piece = drawable(piece)
    if width_of(piece, FONT_SIZE) <= width:
        return piece
    while piece and width_of(piece + "…", FONT_SIZE) > width:
        piece = piece[:-1]
    return piece + "…"
