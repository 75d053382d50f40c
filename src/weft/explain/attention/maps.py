"""Attention probabilities of every head while a model reads a text.

maps = attention_maps(reading)
maps.head(3, 1)                  # the heat map of one head
maps.follow("making", layer=4)   # the tokens a word attends to, one colour per head (Vaswani et al. 2017, figure 3)
maps.follow("difficult")         # … in the layer with the strongest attention to a distant token
maps.rollout()                   # attention through all layers (Abnar and Zuidema 2020)
"""

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args

import numpy as np
import torch
from markupsafe import Markup
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from weft.errors import ConfigError, DataError, ModelError, counted, suggestion
from weft.explain.attention.lines import MIN_DRAWN, LineView, Probabilities, strongest
from weft.explain.attention.page import pack
from weft.explain.capture import capture
from weft.explain.reading import WHITE, Reading, unsupported
from weft.explain.texts import TEXTS
from weft.figures.heatmap import MAX_LABELS, annotate_cells, draw_cells, label_axis, label_inches, max_pool, shorten
from weft.figures.page import Section, mount_point
from weft.figures.picture import SHADES, Picture, new_figure
from weft.models.base import LanguageModel, evaluating
from weft.models.config import Bahdanau, EncoderDecoder, TransformerConfig
from weft.models.stack import Stack
from weft.models.transformer import Transformer

AttentionKind = Literal["encoder", "decoder", "cross"]
NAMES: dict[AttentionKind, str] = {f: f"{f} self-attention" for f in get_args(AttentionKind)}
NAMES["cross"] = "attention to the source"
MAX_PROBABILITIES = 1 << 28  # probabilities of all maps together: 1 GiB in float32
MAX_PAGE_BYTES = 2_000_000  # all packed maps of a page, so that a page of many views stays within 3 MB
MAX_CELLS = 200  # cells along a side of a printed map; longer texts are pooled
MAX_WRITTEN = 10  # tokens up to which the probabilities are written into the cells
MAX_TEXT_ROWS = 40
MAX_GRID_TOKENS = 32  # tokens up to which they are written beside the maps of all heads
TOKEN_INCHES = 0.135  # height of such a token
MIN_DISTANT = 5  # tokens between a query and a key that are far apart
NEXT_TOKEN = "…"  # label of the last row of attention to a source, whose token is not in the text
_CHARACTERS = {visible: char for char, visible in WHITE.items()}
_WORD = re.compile(r"\w+(?:['’-]\w+)*")


class KindMaps(NamedTuple):
    """Attention of one kind: probabilities (layers, heads, time, source time), and the tokens of both sides."""

    kind: AttentionKind
    probabilities: Probabilities
    queries: list[str]
    keys: list[str]

    @property
    def single(self) -> bool:
        """Whether there is one map, which then is not named by a layer and a head."""
        return self.probabilities[..., 0, 0].size == 1

    def where(self, layer: int, head: int | None = None) -> str:
        """Return a layer or a head as the end of a title; nothing if there is one map."""
        return "" if self.single else f", layer {layer}" + ("" if head is None else f", head {head}")


class Head(NamedTuple):
    """One head with its statistics; NaN where a statistic does not apply."""

    kind: AttentionKind
    layer: int
    head: int
    names: tuple[str, ...]
    entropy: float
    distance: float
    first: float
    previous: float
    itself: float
    distant: float
    induction: float
    cost: float
    pair: str  # query and key of `distant`


@dataclass(frozen=True, eq=False)
class HeadMap(Picture):
    """Probabilities (time, source time) of consecutive queries and keys; `start` are their first tokens."""

    title: str
    about: str
    probabilities: Probabilities
    queries: list[str]
    keys: list[str]
    start: tuple[int, int] = (0, 0)

    def figure(self) -> Figure:
        """Return the heat map, queries in rows; in a long text each cell is the maximum of a block."""
        cells, block = max_pool(self.probabilities, MAX_CELLS)
        rows, columns = cells.shape
        side = max(rows, columns)
        inches = 9.0 / side if side > MAX_LABELS else 0.45 if side <= MAX_WRITTEN else 0.2
        width = max(2.4, columns * inches) + label_inches(self.queries) + 0.9
        figure = new_figure(width, max(1.6, rows * inches) + label_inches(self.keys) + 0.7)
        axes: Any = figure.add_subplot()
        image = draw_cells(axes, cells, PowerNorm(0.5, vmin=0.0, vmax=float(cells.max()) or 1.0))
        axes.xaxis.tick_top()
        label_axis(axes.xaxis, self.keys, self.start[1], block=block)
        label_axis(axes.yaxis, self.queries, self.start[0], block=block)
        axes.xaxis.set_label_position("top")
        axes.set(xlabel="key: attended to", ylabel="query: attends")
        figure.suptitle(self.title, parse_math=False, fontsize=11)
        if side <= MAX_WRITTEN and block == 1:
            annotate_cells(axes, image, lambda row, column: f"{cells[row, column]:.2f}", size=9)
        else:
            figure.colorbar(image, shrink=0.6, aspect=25, pad=0.02).outline.set_linewidth(0.5)
        return figure

    def text(self) -> str:
        labels = [shorten(label) for label in self.queries[:MAX_TEXT_ROWS]]
        width = max(map(len, labels))
        lines = [
            f"{row + self.start[0]:>4}  {label:<{width}}  → {strongest(self.probabilities[row], self.keys)}"[:79]
            for row, label in enumerate(labels)
        ]
        omitted = len(self.queries) - len(labels)
        return "\n".join([self.title, *lines, *([f"      … {omitted} more tokens"] if omitted else [])])


@dataclass(frozen=True, eq=False)
class AttentionMaps(Picture):
    """All attention probabilities of a model that reads a text, kind by kind."""

    title: str
    about: str
    parts: tuple[KindMaps, ...]
    named: tuple[Head, ...] = ()  # heads with a recognised role (heads.py)
    scripts: ClassVar[tuple[str, ...]] = ("attention.js",)

    def part(self, kind: str | None = None) -> KindMaps:
        """Return the maps of one kind; by default those over the source, or the only ones."""
        part = self.parts[-1] if kind is None else next((each for each in self.parts if each.kind == kind), None)
        if part is None:
            kinds = " and ".join(each.kind for each in self.parts)
            raise ConfigError(f"kind {kind!r}: this model has {kinds} attention")
        return part

    def head(self, layer: int, head: int, kind: str | None = None, *, zoom: tuple[int, int] | None = None) -> HeadMap:
        """Return the heat map of one head; `zoom` is a half-open range of tokens (over a source, of queries only)."""
        part = self.part(kind)
        cells = part.probabilities[_checked(part, "layer", layer), _checked(part, "head", head)]
        title, about = f"{NAMES[part.kind].capitalize()}{part.where(layer, head)}", TEXTS["head"]
        about += " A row is named by the token written at that step." * (part.kind == "cross")
        queries, keys, start = part.queries, part.keys, (0, 0)
        if zoom is not None:
            begin, end = zoom
            if not 0 <= begin < end <= len(queries):
                raise DataError(f"tokens {begin} to {end}: the text has {len(queries)} tokens, 0 to {len(queries)}")
            title, about = f"{title}, tokens {begin} to {end - 1}", f"{about} Only a part of the text is shown."
            rows, columns = slice(begin, end), slice(0, len(keys)) if part.kind == "cross" else slice(begin, end)
            cells, queries, keys, start = cells[rows, columns], queries[rows], keys[columns], (begin, columns.start)
        if max(cells.shape) > MAX_CELLS:
            about += " Each cell is the maximum of a block of tokens."
        return HeadMap(title, about, cells, queries=queries, keys=keys, start=start)

    def follow(
        self, word: str | int, layer: int | None = None, head: int | None = None, *, kind: str | None = None
    ) -> LineView:
        """Return lines from a word or a token's index to what it attends to, in one or all heads of a layer."""
        part = self.part(kind)
        if layer is None:  # that with the largest probability from the word to a distant token
            far = distant_probabilities(part)[:, :, _find_word(word, part.queries)[0]]
            layer = int(far.max(axis=(1, 2, 3)).argmax())
        _checked(part, "layer", layer)
        heads = list(range(part.probabilities.shape[1])) if head is None else [_checked(part, "head", head)]
        chosen, times = _find_word(word, part.queries)
        name = "".join(part.queries[token] for token in chosen).strip("␣")
        first = f" (the first of {times})" if times > 1 else ""
        about = TEXTS["follow"].format(name=repr(name), first=first, least=MIN_DRAWN)
        about += " Here the word is the one being written." * (part.kind == "cross")
        title = f"What {shorten(name, 24)!r} attends to: {NAMES[part.kind]}{part.where(layer, head)}"
        tokens: dict[str, Any] = {"chosen": chosen, "queries": part.queries, "keys": part.keys, "single": part.single}
        return LineView(title, about, part.probabilities[layer][heads][:, chosen], heads=heads, **tokens)

    def rollout(self, kind: str | None = None) -> HeadMap:
        """Return how much of each token reaches each position of the last layer (Abnar and Zuidema 2020, §3)."""
        parts = [each for each in self.parts if each.kind != "cross" and kind in (None, each.kind)]
        if not parts:
            raise ModelError("attention rollout needs layers of self-attention, and this is attention to a source")
        part = parts[0]
        layers = 0.5 * part.probabilities.mean(axis=1, dtype=np.float64) + 0.5 * np.eye(len(part.queries))
        total = layers[0]
        for layer in layers[1:]:
            total = layer @ total
        title = f"Attention rollout: {NAMES[part.kind]}, {counted(len(layers), 'layer')}"
        return HeadMap(title, TEXTS["rollout"], total.astype(np.float32), queries=part.queries, keys=part.keys)

    def figure(self) -> Figure:
        """Return all heads as small maps: layers in rows, heads in columns, the kinds one below another.

        The only map of a model is drawn large.
        """
        if len(self.parts) == 1 and self.parts[0].single:
            return self.head(0, 0).figure()
        widths, heights, margin = [], [], 0.0
        for layers, heads, queries, keys in (part.probabilities.shape for part in self.parts):
            side = max(queries, keys)
            inches = max(min(1.5, 10.0 / heads, 14.0 / layers), TOKEN_INCHES * side if side <= MAX_GRID_TOKENS else 0.0)
            inches = inches if layers * heads > 1 else 3.0
            widths.append(heads * inches * max(0.35, keys / side))
            heights.append(layers * inches * max(0.35, queries / side))
        for part in self.parts:
            margin = max(margin, label_inches([*part.queries, *part.keys]) if _shows_tokens(part) else 0.0)
        height = sum(heights) + (0.9 + margin) * len(self.parts) + 0.3
        figure = new_figure(max(max(widths) + margin + 1.8, 3.6), height)
        figure.suptitle(self.title, parse_math=False, fontsize=11)
        grid: Any = figure.subplots(len(self.parts), 1, squeeze=False, height_ratios=heights)
        for axes, part, height in zip(grid[:, 0], self.parts, heights, strict=True):
            mosaic, pitch = _mosaic(part.probabilities)
            image = draw_cells(axes, mosaic, PowerNorm(0.5, vmin=0.0, vmax=1.0))  # the root keeps 0.01 visible
            image.set_cmap(SHADES.with_extremes(bad="#b9b9b9"))
            axes.spines[:].set_visible(False)
            axes.xaxis.tick_top()
            axes.xaxis.set_label_position("top")
            numbered = (axes.xaxis, axes.yaxis)
            if _shows_tokens(part):  # beside the first row and column of maps
                for axis, tokens, step in ((axes.xaxis, part.keys, pitch[1]), (axes.yaxis, part.queries, pitch[0])):
                    positions = [2.5 + (step - 3) / len(tokens) * (n + 0.5) for n in range(len(tokens))]
                    axis.set_ticks(positions, map(shorten, tokens), parse_math=False)
                axes.tick_params(length=0, labelsize=9, pad=1)
                for tick in axes.get_xticklabels():
                    tick.set_rotation(90 if len(tick.get_text()) > 1 else 0)
                below, right = axes.secondary_xaxis("bottom"), axes.secondary_yaxis("right")
                for extra in (below, right):
                    extra.spines[:].set_visible(False)
                numbered = (below.xaxis, right.yaxis)
            name = "head" if len(self.parts) == 1 else f"{NAMES[part.kind]}: head"
            for axis, label, count, step in zip(
                numbered, (name, "layer"), part.probabilities.shape[1::-1], pitch[::-1], strict=True
            ):
                axis.set_ticks([step * (number + 0.5) for number in range(count)], range(count))
                axis.set_tick_params(length=0, labelsize=9)
                axis.set_label_text(label)
            bar = figure.colorbar(image, ax=axes, shrink=min(1, 3 / height), aspect=20, pad=0.02, label="probability")
            bar.set_ticks([0.0, 0.01, 0.1, 0.25, 0.5, 1.0], labels=["0", "0.01", "0.1", "0.25", "0.5", "1"])
            bar.ax.tick_params(labelsize=9)
            bar.outline.set_linewidth(0.4)
        return figure

    def packed(self) -> dict[str, Any]:
        """Return all maps for the page's script, notes on their precision, and the named heads (NaN as None)."""
        counts = [part.probabilities[..., 0, 0].size for part in self.parts]
        parts, notes = [], []
        for part, count in zip(self.parts, counts, strict=True):
            limit = int(MAX_PAGE_BYTES * count / sum(counts))
            maps, note = pack(part.probabilities, max_characters=limit, causal=part.kind == "decoder")
            labels = {"kind": part.kind, "name": NAMES[part.kind], "queries": part.queries, "keys": part.keys}
            parts.append(labels | maps)
            notes.append(note)
        named = [{key: None if value != value else value for key, value in h._asdict().items()} for h in self.named]
        return {"parts": parts, "notes": list(dict.fromkeys(notes)), "named": named}

    def html(self) -> str:
        return mount_point("attention.js", self.packed(), Markup("<pre>{}</pre>").format(self.text()))

    def sections(self) -> list[Section]:
        stacked = any(part.kind != "cross" and len(part.probabilities) > 1 for part in self.parts)
        return [*super().sections(), *(self.rollout().sections() if stacked else [])]

    def text(self) -> str:
        lines = []
        for part in self.parts:
            layers, heads, queries, keys = part.probabilities.shape
            size = "" if part.single else f"{counted(layers, 'layer')} × {counted(heads, 'head')}, "
            lines.append(f"{NAMES[part.kind]}: {size}{queries} × {keys} tokens")
            for layer, means in enumerate(part.probabilities.mean(axis=(1, 2))):
                named = "" if part.single else f"layer {layer:>2}  "
                lines.append(f"  {named}mostly to {strongest(means, part.keys, 4)}"[:79])
        return "\n".join(lines)


def distant_probabilities(part: KindMaps) -> Probabilities:
    """Return the probabilities (layers, heads, time, source time) of keys at least MIN_DISTANT tokens from the query.

    Others are 0, and so are those of the first token and, in an encoder, of the last: heads with nothing to attend to
    attend there. Positions in two different texts have no distance, so all of them count.
    """
    p = part.probabilities
    if part.kind == "cross":
        return p
    queries, keys = np.indices(p.shape[2:])
    counted_keys = (keys > 0) & ((keys < p.shape[3] - 1) | (part.kind == "decoder"))
    return np.where((np.abs(queries - keys) >= MIN_DISTANT) & counted_keys, p, np.float32(0.0))


def _shows_tokens(part: KindMaps) -> bool:
    return max(part.probabilities.shape[2:]) <= MAX_GRID_TOKENS


def _mosaic(probabilities: Probabilities) -> tuple[Probabilities, tuple[int, int]]:
    """Return all maps (layers, heads, time, source time) as one image separated by NaN, and the pitch of the maps."""
    layers, heads = probabilities.shape[:2]
    maps, _ = max_pool(probabilities, 96 if layers * heads <= 64 else 64)
    # Small maps are enlarged, so that the separators stay thin lines.
    maps = maps.repeat(-(-40 // maps.shape[2]), axis=2).repeat(-(-40 // maps.shape[3]), axis=3)
    framed = np.pad(maps, ((0, 0), (0, 0), (3, 0), (3, 0)), constant_values=np.nan)
    pitch = framed.shape[2], framed.shape[3]
    image = framed.transpose(0, 2, 1, 3).reshape(layers * pitch[0], heads * pitch[1])
    return np.pad(image, ((0, 3), (0, 3)), constant_values=np.nan), pitch


def attention_maps(reading: Reading) -> AttentionMaps:
    """Return every attention probability that the model computes for a reading."""
    model, names = reading.model, probability_names(reading.model)
    if isinstance(config := model.config, TransformerConfig):
        maps, time = config.layers * config.attention.heads, max(len(reading.ids), len(reading.source or ()))
        if isinstance(config, EncoderDecoder):
            maps = 2 * maps + (config.encoder_layers or config.layers) * config.attention.heads
        if maps * time * time > MAX_PROBABILITIES:
            limit = int((MAX_PROBABILITIES / maps) ** 0.5)
            raise DataError(f"attention of all {maps} heads over {time} tokens is too large; give at most {limit}")
    with evaluating(model), torch.no_grad(), capture(model, *names.values()) as captured:
        model.features(reading.tokens, **reading.model_kwargs)
    text, source = reading.pieces, reading.source_pieces or []
    # a row of attention to a source is named by the token written at that step, as in Bahdanau et al. (2015)
    ended = reading.ids[-1] == reading.tokenizer.eos_id  # nothing is written after that
    encoder, written, parts = source or text, [*text[1:], *([] if ended else [NEXT_TOKEN])], []
    labels = {"encoder": (encoder, encoder), "decoder": (text, text), "cross": (written, source)}
    for kind, pattern in names.items():
        layers = [captured[name] for name in captured if re.fullmatch(pattern.replace("*", r"\d+"), name)]
        # each is (1, [heads,] time, source time); stacked (layers, heads, time, source time)
        stacked = np.stack([(each[0] if each.dim() == 4 else each).float().cpu().numpy() for each in layers])
        queries, keys = labels[kind]
        parts.append(KindMaps(kind, stacked[:, :, : len(queries)], queries, keys))
    about = TEXTS["attention"]
    if max(max(part.probabilities.shape[2:]) for part in parts) > 64:
        about += " In the small maps each cell is the maximum of a block of tokens, so that thin lines stay visible."
    return AttentionMaps(f"Attention over {counted(len(reading.ids), 'token')}", about, tuple(parts))


def probability_names(model: LanguageModel) -> dict[AttentionKind, str]:
    """Return the names under which `capture` finds each kind of attention's probabilities; `*` is the layer."""
    if isinstance(model.config, Bahdanau):
        return {"cross": "attention.probabilities"}
    if not isinstance(model, Transformer):
        advice = "it takes a Transformer (encoder, decoder, encoder-decoder) or a bahdanau model"
        raise unsupported(model, "no attention", advice)
    stacks: dict[AttentionKind, Stack | None] = {"encoder": model.encoder, "decoder": model.decoder}
    names = {kind: f"{kind}.*.attention.probabilities" for kind, stack in stacks.items() if stack is not None}
    return names | ({"cross": "decoder.*.cross.probabilities"} if len(names) == 2 else {})


def _checked(part: KindMaps, name: str, number: int) -> int:
    count = part.probabilities.shape[0 if name == "layer" else 1]
    if not 0 <= number < count:
        has = f"has {count} {name}s, 0 to {count - 1}" if count > 1 else f"has one {name}, number 0"
        raise ConfigError(f"--{name} {number}: this model {has}")
    return number


def _find_word(word: str | int, labels: list[str]) -> tuple[list[int], int]:
    """Return the tokens of a word's first occurrence, and the number of its occurrences."""
    if isinstance(word, int):
        if not 0 <= word < len(labels):
            raise DataError(f"token {word}: the text has {len(labels)} tokens, 0 to {len(labels) - 1}")
        return [word], 1
    text, ends = "", []
    for label in labels:
        text += "".join(_CHARACTERS.get(char, char) for char in label)
        ends.append(len(text))
    escaped = re.escape(word.strip())
    for pattern, flags in ((rf"(?<!\w){escaped}(?!\w)", 0), (rf"(?<!\w){escaped}(?!\w)", re.IGNORECASE), (escaped, 0)):
        matches = list(re.finditer(pattern, text, flags)) if escaped else []
        if matches:
            start, stop = matches[0].span()
            return [n for n, (a, b) in enumerate(pairwise([0, *ends])) if a < stop and b > start], len(matches)
    raise DataError(f"{word!r} is not in the text; {suggestion(word, cast('list[str]', _WORD.findall(text)))}")
