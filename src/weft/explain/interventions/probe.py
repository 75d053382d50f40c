"""Probes: what a linear classifier reads in each layer, and how much of it a control task could read as well.

The control task gives each word a random label, always the same one (Hewitt and Liang 2019). A probe that learns it has
memorised words; the difference of the two accuracies, the selectivity, is what the representation itself shows.
"""

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from weft.errors import DataError, counted
from weft.explain.capture import stack_input
from weft.explain.interventions.recording import record, require_activations
from weft.explain.reading import Reading, unsupported
from weft.explain.texts import TEXTS
from weft.figures.charts import Charts
from weft.figures.plot import Axis, Plot, lines
from weft.figures.tables import Table
from weft.models.bahdanau import Bahdanau
from weft.models.base import LanguageModel
from weft.models.recurrent import Recurrent
from weft.models.transformer import Transformer
from weft.progress import bar

HELD_OUT = 5  # every fifth text is held out
BINS = 4  # classes of positions and of lengths
MIN_HELD_OUT = 10  # labelled words that an accuracy needs
L2, ITERATIONS = 1e-3, 60  # of the classifier
TARGETS = ("label", "control", "position", "length")


class LabelledSpan(NamedTuple):
    """Characters [start, end) of text number `text`, and their label."""

    text: int
    start: int
    end: int
    label: str


class LayerProbe(NamedTuple):
    """Held-out accuracies of linear classifiers that read a layer; NaN where there is only one class."""

    layer: str
    label: float
    control: float
    position: float
    length: float

    @property
    def selectivity(self) -> float:
        return self.label - self.control


@dataclass(frozen=True, eq=False)
class Probes(Charts):
    """Probes of every layer of a model, and the accuracy of always choosing the commonest label."""

    layers: tuple[LayerProbe, ...]
    labels: Mapping[str, int]
    baseline: float
    held_out: int

    title = "Probes"
    about = TEXTS["probe"]
    columns = 1

    def charts(self) -> list[Plot]:
        names = {"accuracy": "label", "control task": "control", "selectivity": "selectivity", "position": "position"}
        values = {name: [getattr(layer, key) for layer in self.layers] for name, key in names.items()}
        values["commonest label"] = [self.baseline] * len(self.layers)
        x = Axis(ticks=dict(enumerate(layer.layer for layer in self.layers)))
        return [
            lines(self.title, values, range(len(self.layers)), x=x, y=Axis("held-out accuracy", includes=(0.0, 1.0)))
        ]

    def tables(self) -> list[Table]:
        rows = [
            (each.layer, *(map(_percent, (each.label, each.control, each.selectivity, *each[3:]))))
            for each in self.layers
        ]
        known = ", ".join(f"{label} {count}" for label, count in list(self.labels.items())[:12])
        remarks = [
            f"in %, on {counted(self.held_out, 'held-out word')}; the commonest label: {100 * self.baseline:.1f}%",
            f"labels: {known}{', …' if len(self.labels) > 12 else ''}",
            *(["–: there is only one class, so there is nothing to learn"] if any("–" in row for row in rows) else []),
        ]
        header = ("layer", "accuracy", "control", "selectivity", "position", "length")
        return [Table(header, rows, remarks=remarks)]


def _percent(share: float) -> str:
    return "–" if math.isnan(share) else f"{100 * share:.1f}"


def layer_taps(model: LanguageModel) -> dict[str, str]:
    """Return the taps of a model's layers on the text that it reads, by name; the first is below all layers."""
    require_activations(model)
    if isinstance(model, Recurrent):
        hidden = {f"layer {n}": f"recurrence.{n}.hidden" for n in range(model.config.layers)}
        return {"embedding": "embedding", **hidden}
    if isinstance(model, Bahdanau):
        return {"embedding": "source_dropout", "source states": "encoder"}
    if not isinstance(model, Transformer):
        raise unsupported(model, "no layers with taps", "it takes a Transformer, a recurrent or a bahdanau model")
    name, stack = ("encoder", model.encoder) if model.encoder is not None else ("decoder", model.decoder)
    assert stack is not None
    static = "embedding" if model.decoder is None or model.encoder is None else stack_input(name, stack)
    return {"embedding": static, **{f"layer {n}": f"{name}.{n}.residual" for n in range(len(stack.layers))}}


def probe(readings: Sequence[Reading], texts: Sequence[str], spans: Sequence[LabelledSpan]) -> Probes:
    """Train a linear classifier of the labels on every layer, and measure it on every fifth text.

    The vector of a span is the mean over its tokens. Spans of unknown tokens alone are left out.
    """
    named, known = layer_taps(readings[0].model), list[tuple[LabelledSpan, range]]()
    vectors: dict[str, list[Tensor]] = {layer: [] for layer in named}
    by_text: dict[int, list[LabelledSpan]] = {}
    for span in spans:
        by_text.setdefault(span.text, []).append(span)
    with bar("reading texts", len(by_text)) as advance:
        for number, inside in by_text.items():
            reading, values = readings[number], record(readings[number], list(named.values()))
            if any(each.isnan().any() for each in values.values()):
                raise DataError("the model's activations are NaN; its weights may have diverged")
            for span, tokens in ((span, _tokens(reading, texts[number], span)) for span in inside):
                if tokens:
                    known.append((span, range(tokens[0], tokens[-1] + 1)))
                    for layer, tap in named.items():
                        vectors[layer].append(values[tap][tokens].float().mean(0))
            advance(1)
    if not known:
        raise DataError("no labelled word has a token of this model; give labels of words that its tokenizer spells")
    owners = {text: index for index, text in enumerate(dict.fromkeys(span.text for span, _ in known))}
    held = torch.tensor([owners[span.text] % HELD_OUT == HELD_OUT - 1 for span, _ in known])
    labels = Counter(span.label for span, _ in known)
    if len(labels) < 2 or int(held.sum()) < MIN_HELD_OUT:
        few = f"{counted(len(labels), 'label')} on {counted(len(known), 'word')} of {counted(len(owners), 'text')}"
        need = f"two labels, and {MIN_HELD_OUT} labelled words in every fifth text, which is held out"
        raise DataError(f"{few}, {int(held.sum())} of them held out: a probe needs {need}")
    classes = _classes([span for span, _ in known], texts, [tokens for _, tokens in known], readings=readings)
    probes = []
    with bar("probing", len(named)) as advance:
        for layer, rows in vectors.items():
            x = torch.stack(rows)
            probes.append(LayerProbe(layer, *(_accuracy(x, classes[target], held) for target in TARGETS)))
            advance(1)
    target = classes["label"]
    commonest = int(target[~held].bincount().argmax())
    return Probes(
        tuple(probes), dict(labels.most_common()), float((target[held] == commonest).float().mean()), int(held.sum())
    )


def _tokens(reading: Reading, text: str, span: LabelledSpan) -> list[int]:
    """Return the positions of a span's tokens in what the model reads; none if all are unknown."""
    tokenizer = reading.tokenizer if reading.source is None else reading.source_tokenizer or reading.tokenizer
    ids, spans = reading.ids if reading.source is None else reading.source, tokenizer.token_spans(text)
    plain = [token.id for token in spans]
    before = next((n for n in range(len(ids)) if list(ids[n : n + len(plain)]) == plain), 0)
    inside = [n for n, token in enumerate(spans) if token.start < span.end and token.end > span.start]
    return [before + n for n in inside] if any(plain[n] != tokenizer.unk_id for n in inside) else []


def _classes(
    spans: Sequence[LabelledSpan], texts: Sequence[str], tokens: Sequence[range], *, readings: Sequence[Reading]
) -> dict[str, Tensor]:
    """Return the classes (spans,) of labels, of the control task, and of positions and lengths in quarters."""
    drawn = sorted(span.label for span in spans)  # control labels are as frequent as the real ones
    words = [texts[span.text][span.start : span.end].split()[-1].casefold() for span in spans]
    controls = {word: random.Random(f"weft {word}").choice(drawn) for word in dict.fromkeys(words)}
    names = {label: index for index, label in enumerate(dict.fromkeys(drawn))}
    lengths = [len(readings[span.text].source or readings[span.text].ids) for span in spans]

    def quarters(values: Sequence[int]) -> Tensor:
        edges = np.unique(np.quantile(values, np.arange(1, BINS) / BINS))
        return torch.from_numpy(np.searchsorted(edges, values, side="right").astype(np.int64))

    return {
        "label": torch.tensor([names[span.label] for span in spans]),
        "control": torch.tensor([names[controls[word]] for word in words]),
        "position": quarters([each[0] for each in tokens]),
        "length": quarters(lengths),
    }


def _accuracy(x: Tensor, target: Tensor, held: Tensor) -> float:
    """Return the held-out accuracy of softmax regression on standardised features x (words, d)."""
    if len(target.unique()) < 2:
        return float("nan")
    mean, deviation = x[~held].mean(0), x[~held].std(0).clamp(min=1e-6)
    x, classes = (x - mean) / deviation, int(target.max()) + 1
    weights, bias = torch.zeros(x.shape[1], classes, requires_grad=True), torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, bias], max_iter=ITERATIONS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(x[~held] @ weights + bias, target[~held]) + L2 * weights.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return float(((x[held] @ weights + bias).argmax(-1) == target[held]).float().mean())
