"""Where a model looks: the attention probabilities of every head while it reads a text.

maps = attention_maps(reading)
maps.head(3, 1)                  # the heat map of one head
maps.follow("making", layer=4)   # what a word attends to, a colour a head (Vaswani et al. 2017, figure 3)
maps.rollout()                   # attention through all layers (Abnar and Zuidema 2020)
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, cast

import numpy as np
import torch
from markupsafe import Markup
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from weft.errors import ConfigError, DataError, ModelError, counted, suggestion
from weft.explain.attention.lines import MIN_DRAWN, LineView, Probabilities, strongest
from weft.explain.attention.page import packed
from weft.explain.capture import capture
from weft.explain.reading import WHITE, Reading, lacks
from weft.explain.texts import TEXTS
from weft.figures.heatmap import MAX_LABELS, label_axis, label_inches, pooled, shade_cells, shortened, write_cells
from weft.figures.page import Section, mounted
from weft.figures.picture import SHADES, Picture, new_figure
from weft.models.base import LanguageModel, evaluating
from weft.models.config import Bahdanau, Decoder, Encoder, EncoderDecoder

Kind = Literal["encoder", "decoder", "cross"]
NAMES: dict[Kind, str] = {
    "encoder": "encoder self-attention",
    "decoder": "decoder self-attention",
    "cross": "attention to the source",
}
MAX_PROBABILITIES = 1 << 28  # a gigabyte of them
MAX_PAGE_BYTES = 2_000_000  # of all maps on a page, as text: a page of many pictures stays within 3 MB
MAX_CELLS = 200  # along a side of a printed map; longer texts are pooled
MAX_WRITTEN = 10  # tokens whose probabilities are still written into the cells
MAX_TEXT_ROWS = 40
WRITES = "…"  # what the last row of attention to a source would write
# Attention spreads over all orders of size. The square root keeps 0.01 in sight beside 1.
_SIGNS = {shown: sign for sign, shown in WHITE.items()}
_WORD = re.compile(r"\w+(?:['’-]\w+)*")


class KindMaps(NamedTuple):
    """All attention of one kind: probabilities (layers, heads, time, source time), and the tokens of both sides."""

    kind: Kind
    probabilities: Probabilities
    queries: list[str]
    keys: list[str]


class Head(NamedTuple):
    """One head with its statistics; NaN where one means nothing."""

    kind: Kind
    layer: int
    head: int
    names: tuple[str, ...]
    entropy: float
    distance: float
    first: float
    previous: float
    itself: float
    induction: float
    cost: float


@dataclass(frozen=True, eq=False)
class HeadMap(Picture):
    """Probabilities (time, source time) of some queries over some keys, which begin at token `start` of each side."""

    title: str
    about: str
    probabilities: Probabilities
    queries: list[str]
    keys: list[str]
    start: tuple[int, int] = (0, 0)

    def figure(self) -> Figure:
        """The heat map, queries in rows; of a long text each cell is the largest of a block of probabilities."""
        shown, block = pooled(self.probabilities, MAX_CELLS)
        rows, columns = shown.shape
        side = max(rows, columns)
        cell = 9.0 / side if side > MAX_LABELS else 0.42 if side <= MAX_WRITTEN else 0.2
        width = max(2.4, columns * cell) + label_inches(self.queries) + 0.9
        figure = new_figure(width, max(1.6, rows * cell) + label_inches(self.keys) + 0.7)
        axes: Any = figure.add_subplot()
        image = shade_cells(axes, shown, PowerNorm(0.5, vmin=0.0, vmax=float(shown.max()) or 1.0))
        label_axis(axes.xaxis, self.keys, self.start[1], block)
        label_axis(axes.yaxis, self.queries, self.start[0], block)
        axes.tick_params(axis="x", rotation=90)
        axes.xaxis.tick_top()
        axes.set_xlabel("key: attended to")
        axes.xaxis.set_label_position("top")
        axes.set_ylabel("query: attends")
        figure.suptitle(self.title, parse_math=False, fontsize=11)
        if side <= MAX_WRITTEN and block == 1:
            write_cells(axes, image, lambda row, column: f"{shown[row, column]:.2f}", 7)
        else:
            figure.colorbar(image, shrink=0.6, aspect=25, pad=0.02).outline.set_linewidth(0.5)
        return figure

    def text(self) -> str:
        labels = [shortened(label) for label in self.queries[:MAX_TEXT_ROWS]]
        wide = max(map(len, labels))
        lines = [
            f"{row + self.start[0]:>4}  {label:<{wide}}  → {strongest(self.probabilities[row], self.keys)}"[:79]
            for row, label in enumerate(labels)
        ]
        more = len(self.queries) - len(labels)
        return "\n".join([self.title, *lines, *([f"      … {more} more tokens"] if more else [])])


@dataclass(frozen=True, eq=False)
class AttentionMaps(Picture):
    """All attention probabilities of a model that reads a text, kind by kind."""

    title: str
    about: str
    parts: tuple[KindMaps, ...]
    named: tuple[Head, ...] = ()  # those that do one thing, as `heads.py` finds them
    scripts: ClassVar[tuple[str, ...]] = ("attention.js",)

    @property
    def kinds(self) -> list[Kind]:
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
        shown = part.probabilities[_checked(part, "layer", layer), _checked(part, "head", head)]
        return _map(f"{NAMES[part.kind].capitalize()}, layer {layer}, head {head}", part, shown, zoom)

    def follow(self, word: str | int, layer: int, head: int | None = None, kind: str | None = None) -> LineView:
        """What a word attends to, in one head or in all heads of a layer. A number is the place of a token."""
        part = self.part(kind)
        _checked(part, "layer", layer)
        heads = list(range(part.probabilities.shape[1])) if head is None else [_checked(part, "head", head)]
        chosen, times = _places(word, part)
        name = "".join(part.queries[place] for place in chosen).strip("␣")
        where = f"layer {layer}" if head is None else f"layer {layer}, head {head}"
        about = (
            f"What {name!r} attends to{f' (the first of {times})' if times > 1 else ''}: a line's width is the "
            f"probability, its colour the head, and lines below {MIN_DRAWN} are left out. The squares beside a token "
            "tell how much each head gives it."
        )
        if part.kind == "cross":
            about += " Here the word is the one that is written."
        title = f"What {shortened(name, 24)!r} attends to: {NAMES[part.kind]}, {where}"
        shown = part.probabilities[layer][heads][:, chosen]
        return LineView(title, about, shown, heads, chosen, part.queries, part.keys)

    def rollout(self, kind: str | None = None) -> HeadMap:
        """How much of each token reaches each place of the last layer, if attention alone carried it.

        Abnar and Zuidema 2020, §3: the mean over the heads, half of it with half of the identity for the residual
        stream, multiplied from layer to layer.
        """
        own = [each for each in self.parts if each.kind != "cross" and kind in (None, each.kind)]
        if not own:
            raise ModelError("attention rollout needs layers of self-attention, and this is attention to a source")
        part = own[0]
        steps = 0.5 * part.probabilities.mean(axis=1, dtype=np.float64) + 0.5 * np.eye(len(part.queries))
        total = steps[0]
        for step in steps[1:]:
            total = step @ total
        title = f"Attention rollout: {NAMES[part.kind]}, {counted(len(steps), 'layer')}"
        return HeadMap(title, TEXTS["rollout"], total.astype(np.float32), part.queries, part.keys)

    def figure(self) -> Figure:
        """All heads as small maps: layers in rows, heads in columns, one part below the other for each kind."""
        widths, heights = [], []
        for layers, heads, queries, keys in (part.probabilities.shape for part in self.parts):
            one = min(1.5, 10.0 / heads, 14.0 / layers) if layers * heads > 1 else 3.0
            widths.append(heads * one * max(0.35, keys / max(queries, keys)))
            heights.append(layers * one * max(0.35, queries / max(queries, keys)))
        figure = new_figure(max(max(widths) + 1.0, 3.2), sum(heights) + 0.75 * len(self.parts) + 0.3)
        figure.suptitle(self.title, parse_math=False, fontsize=11)
        grid: Any = figure.subplots(len(self.parts), 1, squeeze=False, height_ratios=heights)
        for axes, part in zip(grid[:, 0], self.parts, strict=True):
            layers, heads = part.probabilities.shape[:2]
            mosaic, pitch = _mosaic(part.probabilities)
            image = shade_cells(axes, mosaic, PowerNorm(0.5, vmin=0.0, vmax=1.0))
            image.set_cmap(SHADES.with_extremes(bad="#b9b9b9"))
            axes.set_xticks([pitch[1] * (head + 0.5) for head in range(heads)], range(heads))
            axes.set_yticks([pitch[0] * (layer + 0.5) for layer in range(layers)], range(layers))
            axes.tick_params(length=0, labelsize=8)
            axes.xaxis.tick_top()
            axes.xaxis.set_label_position("top")
            axes.set_xlabel("head" if len(self.parts) == 1 else f"{NAMES[part.kind]}: head")
            axes.set_ylabel("layer")
            axes.spines[:].set_visible(False)
        return figure

    def packed(self) -> dict[str, Any]:
        """All maps for the page's script, kind by kind, what a reader has to know of their precision, and the heads
        that have a name; a statistic that means nothing is None."""
        maps = [part.probabilities[..., 0, 0].size for part in self.parts]
        parts, notes = [], []
        for part, count in zip(self.parts, maps, strict=True):
            share = int(MAX_PAGE_BYTES * count / sum(maps))
            small, note = packed(part.probabilities, share, past=part.kind == "decoder")
            named = {"kind": part.kind, "name": NAMES[part.kind], "queries": part.queries, "keys": part.keys}
            parts.append(named | small)
            notes.append(note)
        heads = [
            {name: None if value != value else value for name, value in each._asdict().items()} for each in self.named
        ]
        return {"parts": parts, "notes": list(dict.fromkeys(notes)), "named": heads}

    def html(self) -> str:
        return mounted("attention.js", self.packed(), Markup("<pre>{}</pre>").format(self.text()))

    def sections(self) -> list[Section]:
        stacked = any(part.kind != "cross" and len(part.probabilities) > 1 for part in self.parts)
        return [*super().sections(), *(self.rollout().sections() if stacked else [])]

    def text(self) -> str:
        lines = []
        for part in self.parts:
            layers, heads, queries, keys = part.probabilities.shape
            lines.append(f"{NAMES[part.kind]}: {layers} layers × {heads} heads, {queries} × {keys} tokens")
            for layer, given in enumerate(part.probabilities.mean(axis=(1, 2))):
                lines.append(f"  layer {layer:>2}  mostly to {strongest(given, part.keys, 4)}"[:79])
        return "\n".join(lines)


def _mosaic(probabilities: Probabilities) -> tuple[Probabilities, tuple[int, int]]:
    """All maps (layers, heads, time, source time) as one image with NaN between them, and the pitch of its cells."""
    layers, heads = probabilities.shape[:2]
    small, _ = pooled(probabilities, 96 if layers * heads <= 64 else 64)
    # small maps are enlarged, so that what separates them stays a thin line
    small = small.repeat(-(-40 // small.shape[2]), axis=2).repeat(-(-40 // small.shape[3]), axis=3)
    framed = np.pad(small, ((0, 0), (0, 0), (3, 0), (3, 0)), constant_values=np.nan)
    pitch = framed.shape[2], framed.shape[3]
    image = framed.transpose(0, 2, 1, 3).reshape(layers * pitch[0], heads * pitch[1])
    return np.pad(image, ((0, 3), (0, 3)), constant_values=np.nan), pitch


def attention_maps(reading: Reading) -> AttentionMaps:
    """Every attention probability that the model computes for a reading.

    Rows of attention to a source are named by the token that is written there, which is the one after the one read:
    so Bahdanau et al. (2015) draw them.
    """
    model, names = reading.model, probability_places(reading.model)
    _check_size(reading)
    with evaluating(model), torch.no_grad(), capture(model, *names.values()) as seen:
        model.features(reading.tokens, **reading.given)
    own, source = reading.pieces, reading.source_pieces or []
    first, written, parts = source or own, [*own[1:], WRITES], []
    labels = {"encoder": (first, first), "decoder": (own, own), "cross": (written, source)}
    for kind, pattern in names.items():
        layers = [seen[name] for name in seen if re.fullmatch(pattern.replace("*", r"\d+"), name)]
        # (layers, heads, time, source time) of what each layer gave, (1, [heads,] time, source time)
        stacked = np.stack([(each[0] if each.dim() == 4 else each).float().cpu().numpy() for each in layers])
        parts.append(KindMaps(kind, stacked, *labels[kind]))
    about = TEXTS["attention"]
    if max(max(part.probabilities.shape[2:]) for part in parts) > 64:
        about += " In the small maps each cell is the largest of a block of tokens, so that thin lines survive."
    return AttentionMaps(f"Attention over {counted(len(reading.ids), 'token')}", about, tuple(parts))


def probability_places(model: LanguageModel) -> dict[Kind, str]:
    """Where `capture` finds the probabilities of each kind of attention; `*` stands for a layer."""
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
    raise lacks(model, "no attention", "it takes a Transformer (encoder, decoder, encoder-decoder) or a bahdanau model")


def _check_size(reading: Reading) -> None:
    config = reading.model.config
    if not isinstance(config, Encoder | Decoder | EncoderDecoder):
        return
    maps, time = config.layers * config.attention.heads, max(len(reading.ids), len(reading.source or ()))
    if isinstance(config, EncoderDecoder):
        maps = 2 * maps + (config.encoder_layers or config.layers) * config.attention.heads
    if maps * time * time > MAX_PROBABILITIES:
        most = int((MAX_PROBABILITIES / maps) ** 0.5)
        raise DataError(f"the attention of all {maps} heads over {time} tokens is too much; give at most {most} tokens")


def _checked(part: KindMaps, name: str, number: int) -> int:
    count = part.probabilities.shape[0 if name == "layer" else 1]
    if not 0 <= number < count:
        has = f"has {count} {name}s, 0 to {count - 1}" if count > 1 else f"has one {name}, number 0"
        raise ConfigError(f"--{name} {number}: this model {has}")
    return number


def _map(title: str, part: KindMaps, shown: Probabilities, zoom: tuple[int, int] | None) -> HeadMap:
    about = TEXTS["head"]
    if part.kind == "cross":
        about += " A row is named by the token that is written there."
    queries, keys, start = part.queries, part.keys, (0, 0)
    if zoom is not None:
        begin, end = zoom
        if not 0 <= begin < end <= len(queries):
            raise DataError(f"tokens {begin} to {end}: the text has {len(queries)} tokens, 0 to {len(queries)}")
        title = f"{title}, tokens {begin} to {end - 1}"
        about += " Only a part of the text is shown."
        rows, columns = slice(begin, end), slice(0, len(keys)) if part.kind == "cross" else slice(begin, end)
        shown, queries, keys = shown[rows, columns], queries[rows], keys[columns]
        start = (rows.start, columns.start)
    if max(shown.shape) > MAX_CELLS:
        about += " Each cell is the largest of a block of tokens."
    return HeadMap(title, about, shown, queries, keys, start)


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
            places = [n for n, (a, b) in enumerate(pairwise([0, *ends])) if a < stop and b > start]
            return places, len(found)
    raise DataError(f"{word!r} is not in the text; {suggestion(word, cast('list[str]', _WORD.findall(text)))}")
