"""Where a model looks: the attention probabilities of every head while it reads a text.

maps = attention_maps(reading)
maps.head(3, 1)                  # the heat map of one head
maps.follow("making", layer=4)   # what a word attends to, a colour a head (Vaswani et al. 2017, figure 3)
maps.rollout()                   # attention through all layers (Abnar and Zuidema 2020)
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from weft.errors import ConfigError, DataError, ModelError, suggestion
from weft.explain.attention_figure import (
    FAINTEST,
    NAMES,
    SHADE,
    HeadMap,
    Kind,
    KindMaps,
    LineView,
    Weights,
    grid,
    shortened,
    strongest,
)
from weft.explain.attention_page import part_of_page
from weft.explain.capture import capture
from weft.explain.reading import WHITE, Reading
from weft.figures.page import Section
from weft.figures.picture import Picture
from weft.models.base import LanguageModel, evaluating
from weft.models.config import Bahdanau, Decoder, Encoder, EncoderDecoder

MOST_WEIGHTS = 1 << 28  # a gigabyte of them
WRITES = "…"  # what the last row of attention to a source would write
_SIGNS = {shown: sign for sign, shown in WHITE.items()}
_WORD = re.compile(r"\w+(?:['’-]\w+)*")


@dataclass(frozen=True, eq=False)
class AttentionMaps(Picture):
    """All attention probabilities of a model that reads a text, kind by kind."""

    title: str
    about: str
    parts: tuple[KindMaps, ...]
    scripts: ClassVar[tuple[str, ...]] = ("attention_maps.js", "attention.js")

    @property
    def kinds(self) -> list[Kind]:
        """Those that the model has."""
        return [part.kind for part in self.parts]

    def part(self, kind: str | None = None) -> KindMaps:
        """The maps of a kind; without one those over the source, or the only ones."""
        found = self.parts[-1] if kind is None else next((each for each in self.parts if each.kind == kind), None)
        if found is None:
            raise ConfigError(f"kind {kind!r}: this model has {' and '.join(self.kinds)} attention")
        return found

    def head(self, layer: int, head: int, kind: str | None = None, zoom: tuple[int, int] | None = None) -> HeadMap:
        """The heat map of one head.

        `zoom` shows the tokens from start to stop − 1 alone: of both sides, or of those that are written over all of
        the source.
        """
        part = self.part(kind)
        weights = part.weights[_checked(part, "layer", layer), _checked(part, "head", head)]
        title = f"{NAMES[part.kind].capitalize()}, layer {layer}, head {head}"
        return _map(title, part, weights, zoom)

    def follow(self, word: str | int, layer: int, head: int | None = None, kind: str | None = None) -> LineView:
        """What a word attends to, in one head or in all heads of a layer. A number is the place of a token."""
        part = self.part(kind)
        _checked(part, "layer", layer)
        heads = list(range(part.weights.shape[1])) if head is None else [_checked(part, "head", head)]
        chosen, times = _places(word, part)
        name = "".join(part.queries[place] for place in chosen).strip("␣")
        where = f"layer {layer}" if head is None else f"layer {layer}, head {head}"
        about = (
            f"What {name!r} attends to{f' (the first of {times})' if times > 1 else ''}: a line's width is its weight, "
            f"its colour the head, and lines below {FAINTEST} are left out. The squares beside a token tell how much "
            "each head gives it."
        )
        if part.kind == "cross":
            about += " Here the word is the one that is written."
        weights = part.weights[layer][heads][:, chosen]
        title = f"What {shortened(name, 24)!r} attends to: {NAMES[part.kind]}, {where}"
        return LineView(title, about, weights, heads, chosen, part.queries, part.keys)

    def rollout(self, kind: str | None = None) -> HeadMap:
        """How much of each token reaches each place of the last layer, if attention alone carried it.

        Abnar and Zuidema 2020, §3: the mean over the heads, half of it with half of the identity for the residual
        stream, multiplied from layer to layer.
        """
        own = [each for each in self.parts if each.kind != "cross" and kind in (None, each.kind)]
        if not own:
            raise ModelError("attention rollout needs layers of self-attention, and this is attention to a source")
        part = own[0]
        steps = 0.5 * part.weights.mean(axis=1, dtype=np.float64) + 0.5 * np.eye(len(part.queries))
        total = steps[0]
        for step in steps[1:]:
            total = step @ total
        about = (
            "How much of each token (column) reaches each place of the last layer (row), if attention alone carried "
            "it: the mean over the heads, half of it with half of the identity for the residual stream, multiplied "
            f"from layer to layer (Abnar and Zuidema 2020); {SHADE}."
        )
        title = f"Attention rollout: {NAMES[part.kind]}, {len(steps)} layers"
        return HeadMap(title, about, total.astype(np.float32), part.queries, part.keys)

    def figure(self) -> Figure:
        """The grid of all heads."""
        return grid(self.parts, self.title)

    def html(self) -> str:
        """The part of a page in which a kind, a layer, a head and a token are chosen."""
        return part_of_page(self.parts)

    def sections(self) -> list[Section]:
        """This, and where there are layers of self-attention their rollout."""
        stacked = any(part.kind != "cross" and len(part.weights) > 1 for part in self.parts)
        return [*super().sections(), *(self.rollout().sections() if stacked else [])]

    def text(self) -> str:
        """The tokens that get the most attention, layer by layer."""
        lines = []
        for part in self.parts:
            layers, heads, queries, keys = part.weights.shape
            lines.append(f"{NAMES[part.kind]}: {layers} layers × {heads} heads, {queries} × {keys} tokens")
            for layer, given in enumerate(part.weights.mean(axis=(1, 2))):
                found = [f"{shortened(part.keys[key])} {given[key]:.2f}" for key in strongest(given, 4)]
                lines.append(f"  layer {layer:>2}  mostly to {',  '.join(found)}"[:79])
        return "\n".join(lines)


def attention_maps(reading: Reading) -> AttentionMaps:
    """Every attention probability that the model computes for a reading.

    Rows of attention to a source are named by the token that is written there, which is the one after the one read:
    so Bahdanau et al. (2015) draw them.
    """
    model = reading.model
    names = _names(model)
    _check_size(reading)
    with evaluating(model), torch.no_grad(), capture(model, *names.values()) as seen:
        model.features(reading.tokens, **reading.given)
    written = [*reading.pieces[1:], WRITES]
    source = reading.source_pieces or []
    parts = []
    for kind, pattern in names.items():
        layers = [seen[name] for name in seen if re.fullmatch(pattern.replace("*", r"\d+"), name)]
        labels = {
            "encoder": (source or reading.pieces, source or reading.pieces),
            "decoder": (reading.pieces, reading.pieces),
            "cross": (written, source),
        }[kind]
        parts.append(KindMaps(kind, _stacked(layers), *labels))
    about = (
        "Each small map is one head: a row is a token that attends, a column one that is attended to, and the weights "
        f"of a row sum to 1; {SHADE}."
    )
    if max(max(part.weights.shape[2:]) for part in parts) > 64:
        about += " In the small maps each cell is the largest weight of a block of tokens, so that thin lines survive."
    return AttentionMaps(f"Attention over {len(reading.ids)} tokens", about, tuple(parts))


def _names(model: LanguageModel) -> dict[Kind, str]:
    """What has to be captured for each kind of attention that a model has."""
    encoder: dict[Kind, str] = {"encoder": "encoder.*.attention.probabilities"}
    decoder: dict[Kind, str] = {"decoder": "decoder.*.attention.probabilities"}
    match model.config:
        case Encoder():
            return encoder
        case Decoder():
            return decoder
        case EncoderDecoder():
            return {**encoder, **decoder, "cross": "decoder.*.cross.probabilities"}
        case Bahdanau():
            return {"cross": "attention.probabilities"}
    kind = getattr(model.config, "kind", type(model).__name__)
    raise ModelError(
        f"a model of kind '{kind}' has no attention; it takes a Transformer (encoder, decoder, encoder-decoder) or a "
        "bahdanau model"
    )


def _check_size(reading: Reading) -> None:
    """Refuse a text whose weights would fill the memory."""
    config = reading.model.config
    if not isinstance(config, Encoder | Decoder | EncoderDecoder):
        return
    maps, time = config.layers * config.attention.heads, max(len(reading.ids), len(reading.source or ()))
    if isinstance(config, EncoderDecoder):
        maps = 2 * maps + (config.encoder_layers or config.layers) * config.attention.heads
    if maps * time * time > MOST_WEIGHTS:
        most = int((MOST_WEIGHTS / maps) ** 0.5)
        raise DataError(f"the attention of all {maps} heads over {time} tokens is too much; give at most {most} tokens")


def _stacked(layers: Sequence[Tensor]) -> Weights:
    """(layers, heads, time, source time) of what each layer gave, (1, [heads,] time, source time)."""
    first = layers[0]
    shape = (len(layers), *(first.shape[1:] if first.dim() == 4 else (1, *first.shape[1:])))
    weights = np.empty(shape, np.float32)
    for layer, given in enumerate(layers):
        weights[layer] = given[0].float().cpu().numpy()
    return weights


def _checked(part: KindMaps, name: str, number: int) -> int:
    """A layer or a head that the model has."""
    count = part.weights.shape[0 if name == "layer" else 1]
    if not 0 <= number < count:
        has = f"has {count} {name}s, 0 to {count - 1}" if count > 1 else f"has one {name}, number 0"
        raise ConfigError(f"--{name} {number}: this model {has}")
    return number


def _map(title: str, part: KindMaps, weights: Weights, zoom: tuple[int, int] | None) -> HeadMap:
    about = (
        "A row is a token that attends (the query), a column one that is attended to (the key); the weights of a row "
        f"sum to 1; {SHADE}."
    )
    if part.kind == "cross":
        about += " A row is named by the token that is written there."
    queries, keys, start = part.queries, part.keys, (0, 0)
    if zoom is not None:
        begin, end = zoom
        if not 0 <= begin < end <= len(queries):
            raise DataError(f"tokens {begin} to {end}: the text has {len(queries)} tokens, 0 to {len(queries)}")
        title = f"{title}, tokens {begin} to {end - 1}"
        about += " Only a part of the text is shown."
        rows = columns = slice(begin, end)
        if part.kind == "cross":
            columns = slice(0, len(keys))
        weights, queries, keys = weights[rows, columns], queries[rows], keys[columns]
        start = (rows.start, columns.start)
    if max(weights.shape) > 200:
        about += " Each cell is the largest weight of a block of tokens."
    return HeadMap(title, about, weights, queries, keys, start)


# ---- words


def _places(word: str | int, part: KindMaps) -> tuple[list[int], int]:
    """The places of a word's tokens where it first stands, and how often it stands in the text."""
    labels = part.queries
    if isinstance(word, int):
        if not 0 <= word < len(labels):
            raise DataError(f"token {word}: the text has {len(labels)} tokens, 0 to {len(labels) - 1}")
        return [word], 1
    text, ends = "", []
    for label in labels:
        text += "".join(_SIGNS.get(sign, sign) for sign in label)
        ends.append(len(text))
    wanted = re.escape(word.strip())
    for form, flags in ((rf"(?<!\w){wanted}(?!\w)", 0), (rf"(?<!\w){wanted}(?!\w)", re.IGNORECASE), (wanted, 0)):
        found = list(re.finditer(form, text, flags)) if wanted else []
        if found:
            start, stop = found[0].span()
            begins = [0, *ends[:-1]]
            places = [n for n, (a, b) in enumerate(zip(begins, ends, strict=True)) if a < stop and b > start]
            return places, len(found)
    raise DataError(f"{word!r} is not in the text; {suggestion(word, cast('list[str]', _WORD.findall(text)))}")
