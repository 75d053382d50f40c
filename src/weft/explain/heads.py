"""Role of each attention head: how widely it attends, where to, and how much the model loses without it.

A head gets a name if it meets one of these thresholds; all are means over the queries of the text:

    induction            at least 0.4 to the token after an earlier copy of the query, on repeated random tokens
    previous token       at least 0.5 to the token before
    same token           at least 0.5 to itself
    first token (sink)   at least 0.5 to the first token
    uniform              an entropy of at least 0.9 of the maximum that its mask allows
    local                a mean distance of at most 2 tokens, and at most half of that of uniform attention
    long distance        at least 0.5 from one query to a key that is 5 or more tokens away and not the first token
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from weft.errors import counted
from weft.explain.ablation import ABLATED_TOKENS, ablation_costs
from weft.explain.attention import maps as attention
from weft.explain.attention.lines import Probabilities
from weft.explain.attention.maps import NAMES, AttentionKind, AttentionMaps, Head, KindMaps, attention_maps
from weft.explain.capture import capture
from weft.explain.reading import Reading, unsupported
from weft.explain.texts import TEXTS
from weft.figures.heatmap import SmallMap, small_multiples
from weft.figures.page import template
from weft.figures.picture import Picture
from weft.models.base import LanguageModel, evaluating
from weft.models.config import Decoder
from weft.models.head_config import LMHead
from weft.models.transformer import Transformer

MIN_INDUCTION, MIN_PROBABILITY, MIN_ENTROPY_SHARE, MAX_LOCAL_DISTANCE = 0.4, 0.5, 0.9, 2.0
LISTED_HEADS = 20
# statistic: heading on a page, and in a terminal
COLUMNS = {
    "entropy": ("entropy", "entropy"),
    "distance": ("distance", "dist."),
    "first": ("to first", "first"),
    "previous": ("to previous", "prev."),
    "itself": ("to itself", "self"),
    "distant": ("to distant", "far"),
    "induction": ("induction", "induc."),
    "cost": ("cost", "cost"),
}
PROBABILITIES = ("first", "previous", "itself", "distant", "induction")  # statistics between 0 and 1
UNITS = {"entropy": "nats", "distance": "tokens", "cost": "nats"}
# by interest
_ROLES = ("induction", "long distance", "previous token", "same token", "local", "uniform", "first token (sink)")

Grid = NDArray[np.float64]  # (layers, heads); NaN where a statistic does not apply


@dataclass(frozen=True, eq=False)
class HeadTable(Picture):
    """Statistics of every head of a model on a text: `statistics` by kind and name, (layers, heads) each.

    entropy (nats) and distance (tokens) are means over queries; first, previous and itself are mean probabilities;
    distant is the largest probability of a key far from its query, and `pairs` names the two; induction is the score of
    `induction_scores`; cost is the increase of the loss, in nats per token, without the head.
    """

    title: str
    about: str
    statistics: dict[AttentionKind, dict[str, Grid]]
    names: dict[AttentionKind, list[list[tuple[str, ...]]]]
    pairs: dict[AttentionKind, list[list[str]]]

    def heads(self) -> list[Head]:
        """Return all heads, the most interesting first: by cost or, without costs, by role."""
        heads = []
        for kind, statistics in self.statistics.items():
            for layer, head in np.ndindex(statistics["entropy"].shape):
                values: dict[str, Any] = {name: float(table[layer, head]) for name, table in statistics.items()}
                named: dict[str, Any] = {"names": self.names[kind][layer][head], "pair": self.pairs[kind][layer][head]}
                heads.append(Head(kind, layer, head, **named, **values))

        def interest(head: Head) -> tuple[float, float]:
            role = min((_ROLES.index(name) for name in head.names), default=len(_ROLES) - 2.5)
            return (role, head.entropy) if math.isnan(head.cost) else (-head.cost, role)

        return sorted(heads, key=interest)

    @property
    def known(self) -> list[str]:
        """Names of the statistics that apply to these heads."""
        tables = self.statistics.values()
        return [name for name in COLUMNS if any(not np.isnan(statistics[name]).all() for statistics in tables)]

    @property
    def single(self) -> bool:
        """Whether the model has one attention, as recurrent models do: no layers and heads to number."""
        return sum(statistics["entropy"].size for statistics in self.statistics.values()) == 1

    def index(self, head: Head) -> str:
        """Return a head's index, such as '3.1', after the kind of attention if there are several.

        The only attention of a model has no index, but a name.
        """
        if self.single:
            return NAMES[head.kind]
        return f"{head.kind} {head.layer}.{head.head}" if len(self.statistics) > 1 else f"{head.layer}.{head.head}"

    def text(self) -> str:
        """Return the first heads of the table in 80 columns, and the heads of each role."""
        width = 25 if self.single else 15 if len(self.statistics) > 1 else 6
        lines = [
            f"{'' if self.single else 'head':<{width}}"
            + "".join(f"{COLUMNS[name][1]:>7}" for name in self.known)
            + "  role"
        ]
        heads = self.heads()
        for head in heads[:LISTED_HEADS]:
            cells = "".join(f"{_cell(getattr(head, name)):>7}" for name in self.known)
            line = f"{self.index(head):<{width}}{cells}  {', '.join(head.names)}"
            lines.append(line if len(line) < 80 else f"{line[:78]}…")
        if len(heads) > LISTED_HEADS:
            lines.append(f"… and {len(heads) - LISTED_HEADS} more heads")
        for line in self._role_lines():
            lines.append(line if len(line) < 80 else f"{line[:77].rsplit(',', 1)[0]}, …")
        return "\n".join([self.title, *lines])

    def _role_lines(self) -> list[str]:
        lines = []
        for role in _ROLES:
            heads, distant = [head for head in self.heads() if role in head.names], role == "long distance"
            heads = sorted(heads, key=lambda head: -head.distant) if distant else heads
            named = [self.index(head) + (f" {head.pair} {head.distant:.2f}" if distant else "") for head in heads]
            counts = "" if self.single else f"{counted(len(heads), 'head')}: "
            lines += [f"{role}: {counts}{', '.join(named)}"] if heads else []
        return lines

    def _maps(self, titles: dict[AttentionKind, str]) -> list[list[SmallMap | None]]:
        """Return a map (layers, heads) of every statistic; one row per kind of attention."""

        def small_map(kind: AttentionKind, name: str) -> SmallMap | None:
            values = self.statistics[kind][name]
            if np.abs(np.nan_to_num(values)).max() < 1e-6:  # does not apply, or zero everywhere
                return None
            title = f"{titles[kind] if len(self.statistics) > 1 else ''}{COLUMNS[name][0]}"
            top = 1.0 if name in PROBABILITIES else max(float(np.nanmax(values)), 1e-6)
            return SmallMap(title, values, top, unit=UNITS.get(name, ""))

        return [[small_map(kind, name) for name in self.known] for kind in self.statistics]

    def html(self) -> str:
        rows = [
            (self.index(head), [_cell(getattr(head, name)) for name in self.known], ", ".join(head.names))
            for head in self.heads()
        ]
        maps = self._maps({kind: f"{name}: " for kind, name in NAMES.items()})
        drawn, columns = [small for row in maps for small in row if small], [COLUMNS[name][0] for name in self.known]
        listed: dict[str, Any] = {"heads": rows[:LISTED_HEADS], "others": rows[LISTED_HEADS:], "columns": columns}
        listed["single"] = self.single
        return template("heads.html").render(maps=drawn, named=self._role_lines(), **listed)

    def figure(self) -> Figure:
        return small_multiples(self._maps({kind: f"{kind} " for kind in NAMES}), self.title)


def named_maps(reading: Reading) -> AttentionMaps:
    """Return `attention_maps` with the heads that have a role, the most interesting first."""
    maps = attention_maps(reading)
    heads = head_statistics(reading, ablate=False, maps=maps).heads()
    return replace(maps, named=tuple(head for head in heads if head.names))


def head_statistics(reading: Reading, ablate: bool = True, maps: AttentionMaps | None = None) -> HeadTable:
    """Return statistics of every head on a text and, with `ablate`, the cost of removing it (over 128 tokens).

    `maps` is the attention of this reading, if already computed.
    """
    maps = maps or attention_maps(reading)
    predicts = isinstance(reading.model, Transformer) and isinstance(reading.model.config.head, LMHead)
    costs = ablation_costs(reading) if ablate and predicts and len(reading.ids) > 1 else {}
    config, induction = reading.model.config, None
    if isinstance(config, Decoder):
        induction = induction_scores(reading.model, min(reading.tokenizer.vocab_size, config.vocab_size))
    statistics: dict[AttentionKind, dict[str, Grid]] = {}
    names: dict[AttentionKind, list[list[tuple[str, ...]]]] = {}
    pairs: dict[AttentionKind, list[list[str]]] = {}
    for part in maps.parts:
        of_kind = statistics[part.kind] = _statistics(part)
        pairs[part.kind] = _distant_pairs(part)
        if induction is not None:
            of_kind["induction"] = induction
        if part.kind in costs:
            of_kind["cost"] = costs[part.kind]
        names[part.kind] = _roles(part, of_kind)
    first = f" over the first {ABLATED_TOKENS} tokens" if len(reading.ids) > ABLATED_TOKENS else ""
    about = [TEXTS["heads"], *[TEXTS["heads-induction"]] * (induction is not None)]
    about += [TEXTS["heads-cost"].format(first=first)] * bool(costs)
    heads = sum(part.probabilities[..., 0, 0].size for part in maps.parts)
    title = "What the attention does" if heads == 1 else f"What {heads} heads do"
    return HeadTable(title, " ".join(about), statistics, names=names, pairs=pairs)


@torch.no_grad()
def induction_scores(model: LanguageModel, vocab_size: int, length: int = 25, *, rows: int = 4, seed: int = 0) -> Grid:
    """Return how much each head of a decoder attends to the token after an earlier copy of the query, (layers, heads).

    A sequence of `length` random tokens is given twice; the score is the mean probability from position i of the second
    half to position i − length + 1 (Elhage et al. 2021; Olsson et al. 2022).
    """
    if not isinstance(model, Transformer) or not isinstance(model.config, Decoder):
        raise unsupported(model, "no induction score", "it takes a decoder")
    length = min(length, model.config.context // 2)
    generator = torch.Generator().manual_seed(seed)
    if length <= vocab_size < length**2:  # a token drawn twice would have two copies to attend to
        once = torch.stack([torch.randperm(vocab_size, generator=generator)[:length] for _ in range(rows)])
    else:
        once = torch.randint(vocab_size, (rows, length), generator=generator)
    with evaluating(model) as device, capture(model, "decoder.*.attention.probabilities") as captured:
        model.features(once.repeat(1, 2).to(device))
    second = torch.arange(length, 2 * length)
    scores = [p[:, :, second, second - length + 1].double().mean(dim=(0, 2)).cpu() for p in captured.values()]
    return torch.stack(scores).numpy()


def _statistics(part: KindMaps) -> dict[str, Grid]:
    """Return the statistics of one kind of attention; distances do not apply between two texts."""
    p, T = part.probabilities, part.probabilities.shape[2]
    log_p = np.log(p, out=np.zeros_like(p), where=p > 0)
    entropy = -np.einsum("lhts,lhts->lh", p, log_p, dtype=np.float64) / T
    statistics: dict[str, Grid] = dict.fromkeys(COLUMNS, np.full_like(entropy, np.nan)) | {"entropy": entropy}
    if part.kind != "cross":
        statistics["distance"] = np.einsum("lhts,ts->lh", p, _distances(T), dtype=np.float64) / T
    if part.kind != "cross" and T > 1:
        later = np.arange(1, T)  # the first token of a causal model can only attend to itself
        statistics["first"] = p[:, :, 1:, 0].mean(-1, dtype=np.float64)
        statistics["previous"] = p[:, :, later, later - 1].mean(-1, dtype=np.float64)
        statistics["itself"] = p[:, :, later, later].mean(-1, dtype=np.float64)
    if part.kind != "cross" and T > attention.MIN_DISTANT + 1:
        statistics["distant"] = attention.distant_probabilities(part).max(axis=(2, 3)).astype(np.float64)
    return statistics


def _distant_pairs(part: KindMaps) -> list[list[str]]:
    """Return query and key of each head's largest probability at a distance, by layer and head."""

    def pair(probabilities: Probabilities) -> str:
        query, key = np.unravel_index(int(probabilities.argmax()), probabilities.shape)
        return f"{part.queries[query]} → {part.keys[key]}"

    return [list(map(pair, heads)) for heads in attention.distant_probabilities(part)]


def _distances(T: int) -> NDArray[np.float32]:
    positions = np.arange(T, dtype=np.float32)
    return np.abs(positions[:, None] - positions)


def _roles(part: KindMaps, statistics: dict[str, Grid]) -> list[list[tuple[str, ...]]]:
    visible = (part.probabilities > 0).any(axis=(0, 1))  # keys that the mask lets each query see
    keys = visible.sum(-1)
    max_entropy = np.log(keys).mean()
    uniform_distance = (_distances(visible.shape[0]) * visible).sum(-1) / keys if part.kind != "cross" else np.zeros(1)
    entropy = statistics["entropy"]
    has_role = {
        "induction": statistics["induction"] >= MIN_INDUCTION,
        "previous token": statistics["previous"] >= MIN_PROBABILITY,
        "same token": statistics["itself"] >= MIN_PROBABILITY,
        "local": statistics["distance"] <= min(MAX_LOCAL_DISTANCE, float(uniform_distance.mean()) / 2),
        "long distance": statistics["distant"] >= MIN_PROBABILITY,
        "uniform": entropy >= MIN_ENTROPY_SHARE * max_entropy if max_entropy > 0 else np.zeros(entropy.shape, bool),
        "first token (sink)": statistics["first"] >= MIN_PROBABILITY,
    }
    has_role["local"] &= ~(has_role["previous token"] | has_role["same token"])  # these are local by definition
    layers, heads = map(range, entropy.shape)
    return [[tuple(name for name in _ROLES if has_role[name][layer, head]) for head in heads] for layer in layers]


def _cell(value: float) -> str:
    return "" if math.isnan(value) else f"{round(value, 3) + 0.0:.3f}".replace("-", "−")
