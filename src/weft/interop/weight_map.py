"""One set of weights under two sets of names: a table of rules that is read in both directions, tensor by tensor.

A rule gives weft's name of a tensor, the name (or names, concatenated along the rows) that it has elsewhere, and its
layout there. `{layer}` stands for a block's number. A table may hold rules for tensors that a model does not have
(biases, an output table of its own): the model's config decides which apply. Nothing is read before it is asked for.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from weft.errors import InteropError
from weft.models.build import build
from weft.models.config import Decoder, Encoder, EncoderDecoder, Model
from weft.nn.init import empty_weights
from weft.storage.tensors import LazyWeights

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Layout:
    """How another program stores a tensor. `to_ours` and `to_theirs` are exact inverses."""

    to_ours: Callable[[Tensor], Tensor]
    to_theirs: Callable[[Tensor], Tensor]

    def shape(self, ours: Shape) -> Shape:
        """Their shape of a tensor whose shape is `ours` here."""
        return tuple(self.to_theirs(torch.empty(ours, device="meta")).shape)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous() if tensor.dim() == 2 else tensor


SAME = Layout(lambda theirs: theirs, lambda ours: ours)
TRANSPOSED = Layout(_transposed, _transposed)  # matrices as (in, out) instead of (out, in)
ONE_ROW = Layout(lambda theirs: theirs[0], lambda ours: ours[None])  # a vector as a matrix of one row
A_ROW = Layout(lambda theirs: theirs[None], lambda ours: ours[0])  # a row of a matrix as a vector


def reordered(order: Callable[[Tensor], Tensor]) -> Layout:
    """Rows in another order: `order` gives the numbers of our rows as they follow each other there."""
    return Layout(
        lambda theirs: theirs[order(torch.arange(len(theirs))).argsort()],
        lambda ours: ours[order(torch.arange(len(ours)))],
    )


def adjacent_pairs(d_head: int) -> Layout:
    """Rows of queries or keys ordered for rotary pairs that are adjacent, where here the pairs are two halves.

    Row 2i of a head is there what row i is here, and row 2i + 1 what row d_head/2 + i is (Su et al. 2021, §3.4.2).
    """
    return reordered(lambda rows: rows.view(-1, 2, d_head // 2).mT.flatten())


def grouped(groups: int, d_head: int) -> Layout:
    """Rows of queries, keys and values that lie together group by group: the queries of a group, its key, its value.

    Here all queries come first, then all keys, then all values. With as many groups as heads, each head has its three.
    """

    def order(rows: Tensor) -> Tensor:
        queries, keys, values = rows.view(-1, d_head).split([len(rows) // d_head - 2 * groups, groups, groups])
        return torch.cat([queries.unflatten(0, (groups, -1)), keys[:, None], values[:, None]], dim=1).flatten()

    return reordered(order)


@dataclass(frozen=True)
class Rule:
    """weft's name of a tensor; their names for its parts, in the order of the rows; a layout for each."""

    ours: str
    theirs: tuple[str, ...]
    layouts: tuple[Layout, ...]


Rules = tuple[Rule, ...]
Layouts = Layout | tuple[Layout, ...]  # that of all parts, or each part's own
Names = str | tuple[str, ...] | None  # of a module, of its parts, or of none
# the modules of a block by a short word
PARTS = {
    "norm": "attention_skip.norm", "norm_out": "attention_skip.norm_out", "qkv": "attention.qkv",
    "q_norm": "attention.q_norm", "k_norm": "attention.k_norm", "out": "attention.out",
    "cross_norm": "cross_skip.norm", "cross_q": "cross.q", "cross_kv": "cross.kv", "cross_out": "cross.out",
    "ff_norm": "feedforward_skip.norm", "ff_norm_out": "feedforward_skip.norm_out", "up": "feedforward.up",
    "gate_up": "feedforward.gate_up", "down": "feedforward.down",
}  # fmt: skip


def tensor(ours: str, *theirs: str, layout: Layouts = SAME) -> Rule:
    """The rule for one tensor, whose parts all have one layout, or each its own."""
    layouts = layout if isinstance(layout, tuple) else (layout,) * len(theirs)
    assert len(layouts) == len(theirs) > 0, ours
    return Rule(ours, theirs, layouts)


def module(ours: str, *theirs: str, layout: Layouts = SAME) -> Rules:
    """The rules for a module's weight and bias."""
    return tuple(
        tensor(f"{ours}.{kind}", *(f"{name}.{kind}" for name in theirs), layout=layout) for kind in ("weight", "bias")
    )


def block(stack: str, theirs: str, layouts: Mapping[str, Layouts] | None = None, /, **names: Names) -> Rules:
    """The rules for the modules of a stack's blocks, whose names begin with `theirs` there.

    `names` gives, by the words of PARTS, what follows; `*` stands for the letters of queries, keys and values. Other
    layouts than the same are in `layouts`.
    """
    rules: list[Rule] = []
    for part, name in names.items():
        if isinstance(name, str):
            letters = part.rpartition("_")[2] if "*" in name else " "
            name = tuple(name.replace("*", letter) for letter in letters)
        if name is not None:
            layout = (layouts or {}).get(part, SAME)
            ours = f"{stack}.blocks.{{layer}}.{PARTS[part]}"
            rules += module(ours, *(f"{theirs}.{each}" for each in name), layout=layout)
    return tuple(rules)


@dataclass(frozen=True)
class Part:
    """One of their tensors: rows `start` … `stop` of one of ours, in another layout."""

    name: str
    shape: Shape
    start: int
    stop: int
    layout: Layout

    def of(self, ours: Tensor) -> Tensor:
        """Their tensor, from ours."""
        return self.layout.to_theirs(ours[self.start : self.stop])


Conversions = Mapping[str, tuple[Part, ...]]  # our tensor → the parts that it consists of


def shapes(model: Model) -> dict[str, Shape]:
    """Every tensor of a model with its shape, without allocating it."""
    with empty_weights():
        return {name: tuple(tensor.shape) for name, tensor in build(model).state_dict().items()}


def conversions(rules: Iterable[Rule], model: Model) -> Conversions:
    """The rules that apply to `model`, layer by layer. Every tensor of the model is covered exactly once."""
    ours = shapes(model)
    layers = 1 + max((int(found[1]) for name in ours if (found := re.search(r"\.blocks\.(\d+)\.", name))), default=0)
    made: dict[str, tuple[Part, ...]] = {}
    for rule in rules:
        for layer in range(layers if "{layer}" in rule.ours else 1):
            name = rule.ours.replace("{layer}", str(layer))
            if name not in ours:
                continue
            assert name not in made, f"two rules for {name}"
            rows, parts, start = _sections(name, model, len(rule.theirs), ours[name]), [], 0
            for theirs, layout, length in zip(rule.theirs, rule.layouts, rows, strict=True):
                shape = layout.shape((length, *ours[name][1:]))
                parts.append(Part(theirs.replace("{layer}", str(layer)), shape, start, start + length, layout))
                start += length
            made[name] = tuple(parts)
    unnamed = next((name for name in ours if name not in made), None)
    if unnamed is not None:
        raise InteropError(f"{unnamed} {list(ours[unnamed])}: this format has no place for it")
    return {name: made[name] for name in ours}


def _sections(name: str, model: Model, parts: int, shape: Shape) -> list[int]:
    if parts == 1:
        return [shape[0]]
    layer = name.split(".")[-2]
    if layer in ("q_norm", "k_norm"):
        return [1] * parts
    assert isinstance(model, Decoder | Encoder | EncoderDecoder), "only Transformers join matrices"
    queries, keys = model.attention.heads * model.d_head, model.attention.groups * model.d_head
    rows = {"qkv": [queries, keys, keys], "kv": [keys, keys], "gate_up": [model.feedforward.d_ff] * 2}[layer]
    assert len(rows) == parts and sum(rows) == shape[0], name
    return rows


def their_shapes(table: Conversions) -> dict[str, Shape]:
    """All of their tensors, with their shapes."""
    return {part.name: part.shape for parts in table.values() for part in parts}


def to_ours(table: Conversions, found: Mapping[str, Shape], read: Callable[[str], Tensor], place: str) -> LazyWeights:
    """Our weights, each read from theirs when it is asked for.

    `found` holds the names and shapes of everything that `place` stores; `read` gets one tensor. What is missing, left
    over or of another shape is an error that names it.
    """
    wanted = their_shapes(table)
    for names, shapes, fault in (
        ([name for name in wanted if name not in found], wanted, "is missing"),
        ([name for name in found if name not in wanted], found, "has no place in this model"),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise InteropError(f"{place}: '{names[0]}' {list(shapes[names[0]])} {fault}{more}")
    for name, shape in wanted.items():
        if tuple(found[name]) != shape:
            raise InteropError(f"{place}: '{name}' is {list(found[name])}; the settings ask for {list(shape)}")

    def made(parts: Iterable[Part]) -> Tensor:
        tensors = [part.layout.to_ours(read(part.name)) for part in parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    return {name: partial(made, parts) for name, parts in table.items()}


def to_theirs(table: Conversions, weights: LazyWeights) -> LazyWeights:
    """Their weights, each made from ours when it is asked for."""

    def made(part: Part, name: str) -> Tensor:
        return part.of(weights[name]())

    return {part.name: partial(made, part, name) for name, parts in table.items() for part in parts}
