"""What each attention head does: how widely it looks, where to, and what the model loses without it.

A head is named where it does one thing by these thresholds; all are means over the tokens of the text that attend:

    induction            at least 0.4 to the token after an earlier copy of this one, on random tokens given twice
    previous token       at least 0.5 to the token before
    same token           at least 0.5 to itself
    first token (sink)   at least 0.5 to the first token
    uniform              an entropy of at least 0.9 of the largest that its mask allows
    local                a mean distance of at most 2 tokens, and of at most half of what even weights would give
"""

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from weft.errors import counted
from weft.explain.ablation import ABLATED_TOKENS, ablation_costs
from weft.explain.attention.maps import NAMES, AttentionMaps, Head, Kind, KindMaps, attention_maps
from weft.explain.capture import capture
from weft.explain.reading import Reading, lacks
from weft.explain.texts import TEXTS
from weft.figures.heatmap import SmallMap, small_maps
from weft.figures.page import template
from weft.figures.picture import Picture
from weft.models.base import LanguageModel, evaluating
from weft.models.config import Decoder, LMHead
from weft.models.transformer import Transformer

INDUCTION, MOSTLY, UNIFORM, NEAR = 0.4, 0.5, 0.9, 2.0
LISTED_HEADS = 20
# statistics by name: in a heading, and as short as a terminal wants it
COLUMNS = {
    "entropy": ("entropy", "entropy"),
    "distance": ("distance", "dist."),
    "first": ("to first", "first"),
    "previous": ("to previous", "prev."),
    "itself": ("to itself", "self"),
    "induction": ("induction", "induc."),
    "cost": ("cost", "cost"),
}
SHARES = ("first", "previous", "itself", "induction")  # they are 1 at most
UNITS = {"entropy": "nats", "distance": "tokens", "cost": "nats"}
_ORDER = ("induction", "previous token", "same token", "local", "uniform", "first token (sink)")

Table = NDArray[np.float64]  # (layers, heads); NaN where a statistic means nothing


@dataclass(frozen=True, eq=False)
class HeadTable(Picture):
    """Statistics of every head of a model on a text: `statistics` by kind and name, (layers, heads) each.

    entropy (nats) and distance (tokens) are means over queries; first, previous and itself are mean weights; induction
    is the score of `induction_scores`; cost is what the text loses in nats a token if the head gives zeros.
    """

    title: str
    about: str
    statistics: dict[Kind, dict[str, Table]]
    names: dict[Kind, list[list[tuple[str, ...]]]]

    def heads(self) -> list[Head]:
        """All heads, the most interesting first: those whose loss costs the most, or else those that have a name."""
        found = []
        for kind, of in self.statistics.items():
            for layer, head in np.ndindex(of["entropy"].shape):
                values = {name: float(table[layer, head]) for name, table in of.items()}
                found.append(Head(kind, layer, head, self.names[kind][layer][head], **values))

        def interest(each: Head) -> tuple[float, float]:
            by_name = min((_ORDER.index(name) for name in each.names), default=len(_ORDER) - 2.5)
            return (by_name, each.entropy) if math.isnan(each.cost) else (-each.cost, by_name)

        return sorted(found, key=interest)

    def named(self) -> dict[str, list[Head]]:
        """The heads that have a name, by it."""
        found: dict[str, list[Head]] = {}
        for each in self.heads():
            for name in each.names:
                found.setdefault(name, []).append(each)
        return found

    @property
    def known(self) -> list[str]:
        """The statistics that mean something for these heads."""
        return [name for name in COLUMNS if any(not np.isnan(of[name]).all() for of in self.statistics.values())]

    def place(self, head: Head) -> str:
        """'3.1', with the kind of attention where there are several."""
        return f"{head.kind} {head.layer}.{head.head}" if len(self.statistics) > 1 else f"{head.layer}.{head.head}"

    def text(self) -> str:
        """The first heads of the table, in 80 columns, and how many have which name."""
        wide = 15 if len(self.statistics) > 1 else 6
        lines = [f"{'head':<{wide}}" + "".join(f"{COLUMNS[name][1]:>7}" for name in self.known) + "  what it does"]
        heads = self.heads()
        for each in heads[:LISTED_HEADS]:
            cells = "".join(f"{_cell(getattr(each, name)):>7}" for name in self.known)
            line = f"{self.place(each):<{wide}}{cells}  {', '.join(each.names)}"
            lines.append(line if len(line) < 80 else f"{line[:78]}…")
        if len(heads) > LISTED_HEADS:
            lines.append(f"… and {len(heads) - LISTED_HEADS} more heads")
        for line in self._named_lines():
            lines.append(line if len(line) < 80 else f"{line[:77].rsplit(',', 1)[0]}, …")
        return "\n".join([self.title, *lines])

    def _named_lines(self) -> list[str]:
        found = self.named()
        return [
            f"{name}: {counted(len(found[name]), 'head')}: {', '.join(map(self.place, found[name]))}"
            for name in _ORDER
            if name in found
        ]

    def _maps(self, titles: dict[Kind, str]) -> list[list[SmallMap | None]]:
        """A small map of every statistic, layers in rows and heads in columns; a row a kind of attention."""

        def small(kind: Kind, name: str) -> SmallMap | None:
            values = self.statistics[kind][name]
            if np.abs(np.nan_to_num(values)).max() < 1e-6:  # it means nothing, or nothing is there
                return None
            title = f"{titles[kind] if len(self.statistics) > 1 else ''}{COLUMNS[name][0]}"
            top = 1.0 if name in SHARES else max(float(np.nanmax(values)), 1e-6)
            return SmallMap(title, values, top, UNITS.get(name, ""))

        return [[small(kind, name) for name in self.known] for kind in self.statistics]

    def html(self) -> str:
        rows = [
            (self.place(each), [_cell(getattr(each, name)) for name in self.known], ", ".join(each.names))
            for each in self.heads()
        ]
        maps = self._maps({kind: f"{name}: " for kind, name in NAMES.items()})
        return template("heads.html").render(
            maps=[each for row in maps for each in row if each is not None],
            named=self._named_lines(),
            heads=rows[:LISTED_HEADS],
            others=rows[LISTED_HEADS:],
            columns=[COLUMNS[name][0] for name in self.known],
        )

    def figure(self) -> Figure:
        return small_maps(self._maps({kind: f"{kind} " for kind in NAMES}), self.title)


def named_maps(reading: Reading) -> AttentionMaps:
    """`attention_maps`, with the heads that have a name, the most interesting first."""
    maps = attention_maps(reading)
    found = head_statistics(reading, ablate=False, maps=maps).heads()
    return replace(maps, named=tuple(each for each in found if each.names))


def head_statistics(reading: Reading, ablate: bool = True, maps: AttentionMaps | None = None) -> HeadTable:
    """The statistics of every head while the model reads a text, and with `ablate` what the text loses without it.

    Ablation takes a forward pass a head, from its layer on; of long texts it reads the first 128 tokens. `maps`: the
    attention of that reading, where it is known.
    """
    maps = maps or attention_maps(reading)
    predicts = isinstance(reading.model, Transformer) and isinstance(reading.model.config.head, LMHead)
    costs = ablation_costs(reading) if ablate and predicts and len(reading.ids) > 1 else {}
    config, induction = reading.model.config, None
    if isinstance(config, Decoder):
        induction = induction_scores(reading.model, min(reading.tokenizer.vocab_size, config.vocab_size))
    statistics: dict[Kind, dict[str, Table]] = {}
    names: dict[Kind, list[list[tuple[str, ...]]]] = {}
    for part in maps.parts:
        of = statistics[part.kind] = _statistics(part)
        if induction is not None:
            of["induction"] = induction
        if part.kind in costs:
            of["cost"] = costs[part.kind]
        names[part.kind] = _names(part, of)
    about = TEXTS["heads"]
    if induction is not None:
        copies = "the weight on the token after an earlier copy, on random tokens given twice"
        about += f" Induction is {copies} (Olsson et al. 2022)."
    if costs:
        first = f" over the first {ABLATED_TOKENS} tokens" if len(reading.ids) > ABLATED_TOKENS else ""
        about += f" Cost is what the text loses in nats a token{first} if the head gives nothing; – is a gain."
    heads = sum(part.probabilities[..., 0, 0].size for part in maps.parts)
    return HeadTable("What the head does" if heads == 1 else f"What {heads} heads do", about, statistics, names)


@torch.no_grad()
def induction_scores(model: LanguageModel, vocab_size: int, length: int = 25, rows: int = 4, seed: int = 0) -> Table:
    """How much each head of a decoder attends to what followed an earlier copy of the token, (layers, heads).

    Random tokens of this length are given twice; the score is the mean weight from place i of the second half to place
    i − length + 1 (Elhage et al. 2021; Olsson et al. 2022).
    """
    if not isinstance(model, Transformer) or not isinstance(model.config, Decoder):
        raise lacks(model, "no induction score", "it takes a decoder")
    length = min(length, model.config.context // 2)
    once = torch.randint(vocab_size, (rows, length), generator=torch.Generator().manual_seed(seed))
    with evaluating(model) as device, capture(model, "decoder.*.attention.probabilities") as seen:
        model.features(once.repeat(1, 2).to(device))
    second = torch.arange(length, 2 * length)
    scores = [each[:, :, second, second - length + 1].double().mean(dim=(0, 2)).cpu() for each in seen.values()]
    return torch.stack(scores).numpy()


def _statistics(part: KindMaps) -> dict[str, Table]:
    """Those of one kind, (layers, heads) each; places mean nothing between two texts."""
    p, T = part.probabilities, part.probabilities.shape[2]
    logs = np.log(p, out=np.zeros_like(p), where=p > 0)
    entropy = -np.einsum("lhts,lhts->lh", p, logs, dtype=np.float64) / T
    found: dict[str, Table] = dict.fromkeys(COLUMNS, np.full_like(entropy, np.nan)) | {"entropy": entropy}
    if part.kind != "cross":
        found["distance"] = np.einsum("lhts,ts->lh", p, _apart(T), dtype=np.float64) / T
    if part.kind != "cross" and T > 1:
        # the first token of a causal model has nobody else to look at
        later = np.arange(1, T)
        found["first"] = p[:, :, 1:, 0].mean(-1, dtype=np.float64)
        found["previous"] = p[:, :, later, later - 1].mean(-1, dtype=np.float64)
        found["itself"] = p[:, :, later, later].mean(-1, dtype=np.float64)
    return found


def _apart(T: int) -> NDArray[np.float32]:
    places = np.arange(T, dtype=np.float32)
    return np.abs(places[:, None] - places)


def _names(part: KindMaps, of: dict[str, Table]) -> list[list[tuple[str, ...]]]:
    seen = (part.probabilities > 0).any(axis=(0, 1))  # what the mask lets a query see
    keys = seen.sum(-1)
    widest = np.log(keys).mean()  # the entropy of even weights
    even = (_apart(seen.shape[0]) * seen).sum(-1) / keys if part.kind != "cross" else np.zeros(1)
    tests = {
        "induction": of["induction"] >= INDUCTION,
        "previous token": of["previous"] >= MOSTLY,
        "same token": of["itself"] >= MOSTLY,
        "local": of["distance"] <= min(NEAR, float(even.mean()) / 2),
        "uniform": of["entropy"] >= UNIFORM * widest if widest > 0 else np.zeros(of["entropy"].shape, bool),
        "first token (sink)": of["first"] >= MOSTLY,
    }
    tests["local"] &= ~(tests["previous token"] | tests["same token"])  # a head of neighbours is local anyway
    layers, heads = map(range, of["entropy"].shape)
    return [[tuple(name for name in _ORDER if tests[name][layer, head]) for head in heads] for layer in layers]


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{round(value, 3) + 0.0:.3f}".replace("-", "−")
