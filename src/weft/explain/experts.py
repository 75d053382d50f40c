"""Which experts of a mixture read which token of a text, layer by layer, and with which weights."""

from dataclasses import dataclass

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from weft.errors import DataError
from weft.explain.capture import capture
from weft.explain.reading import Reading, text_tokens, unsupported
from weft.explain.texts import TEXTS
from weft.figures.heatmap import draw_cells
from weft.figures.picture import Picture, new_figure
from weft.figures.shaded import Token, percent
from weft.figures.tables import WIDTH, Table, text_table
from weft.models.base import evaluating
from weft.models.transformer import Transformer
from weft.nn.experts import Experts

MAX_ROWS = 24  # tokens listed in a terminal
MAX_LAYERS = 4  # of them


@dataclass(frozen=True)
class ExpertMap(Picture):
    """Experts of each token with their weights, by layer and position; the strongest comes first."""

    about: str
    tokens: tuple[Token, ...]
    layers: tuple[str, ...]  # names of the layers that are mixtures
    experts: int
    chosen: NDArray[np.int64]  # (layers, positions, chosen)
    weights: NDArray[np.float32]

    title = "Experts"
    module = "experts.js"

    @property
    def load(self) -> NDArray[np.float64]:
        """Share of the tokens that each expert reads, (layers, experts)."""
        counts = [np.bincount(layer.flatten(), minlength=self.experts) for layer in self.chosen]
        return np.array(counts) / len(self.tokens)

    def figure(self) -> Figure:
        """Return the share of the tokens that each expert reads: layers upwards, experts from left to right."""
        rows = len(self.layers)
        figure = new_figure(1.6 + max(3.0, 0.3 * self.experts), 1.0 + 0.3 * rows)
        axes = figure.add_subplot()
        image = draw_cells(axes, self.load)
        axes.set_xticks(range(0, self.experts, 1 + self.experts // 17))
        axes.set_yticks(range(rows), self.layers)
        axes.set(xlabel="expert", ylim=(-0.5, rows - 0.5))
        figure.colorbar(image, ax=axes, label="share of tokens")
        return figure

    def text(self) -> str:
        shown = sorted({round(layer) for layer in np.linspace(0, len(self.layers) - 1, MAX_LAYERS)})

        def cell(layer: int, n: int) -> str:
            pairs = zip(self.chosen[layer, n], self.weights[layer, n], strict=True)
            return " ".join(f"{expert} {percent(float(weight))}" for expert, weight in list(pairs)[:2])

        rows = [
            (str(n), token.piece, *(cell(layer, n) for layer in shown))
            for n, token in enumerate(self.tokens[:MAX_ROWS])
        ]
        header = ("pos.", "token", *(self.layers[layer] for layer in shown))
        busiest = [
            f"{name}: expert {load.argmax()} reads {percent(float(load.max()))} of the tokens"
            for name, load in zip(self.layers, self.load, strict=True)
        ]
        table = Table(header, rows, "", text=tuple(range(1, len(header))))
        return text_table(table, WIDTH) + "\n\n" + "\n".join(busiest)


@torch.no_grad()
def experts(reading: Reading) -> ExpertMap:
    """Return the experts that each token of a text chooses; of an encoder–decoder, those of the decoder's layers."""
    model = reading.model
    stack = (model.decoder or model.encoder) if isinstance(model, Transformer) else None
    blocks = [] if stack is None else [(n, block.feedforward) for n, block in enumerate(stack.blocks)]
    mixtures = [(n, module) for n, module in blocks if isinstance(module, Experts)]
    if not mixtures:
        raise unsupported(model, "no mixture of experts", "it takes one such as the preset moe-tiny")
    name = "decoder" if isinstance(model, Transformer) and model.decoder is not None else "encoder"
    taps = [f"{name}.{n}.feedforward.router" for n, _ in mixtures]
    with evaluating(model), capture(model, *taps) as captured:
        model.features(reading.tokens, **reading.model_kwargs)
    chosen, weights = [], []
    if len(reading.ids) == reading.before:
        raise DataError("the text is empty")
    for tap, (_, module) in zip(taps, mixtures, strict=True):
        choice = module.router.choose(captured[tap][0, reading.before :])
        order = choice.weights.argsort(-1, descending=True)
        chosen.append(choice.experts.gather(-1, order).cpu())
        weights.append(choice.weights.gather(-1, order).float().cpu())
        if weights[-1].isnan().any():
            raise DataError("the router's weights are NaN; the model may have diverged")
    settings = mixtures[0][1].settings
    return ExpertMap(
        about=TEXTS["experts"].format(chosen=settings.chosen, experts=settings.experts),
        tokens=tuple(text_tokens(reading.tokenizer, reading.ids[reading.before :])),
        layers=tuple(f"layer {n}" for n, _ in mixtures),
        experts=settings.experts,
        chosen=torch.stack(chosen).numpy(),
        weights=torch.stack(weights).numpy(),
    )
