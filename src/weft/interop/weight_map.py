"""Translate names and layouts of weights, in both directions and tensor by tensor, by a table of rules.

A rule maps weft's name of a tensor to its name elsewhere (or several, concatenated along the rows) and its layout
there. A part that another program lacks, because it is 0, has the name "". `{layer}` stands for a block's number, and
`{expert}` for that of an expert, whose matrices are elements of one of ours. A table may have rules for tensors that a
model lacks (biases, an untied LM head): the model's config decides which apply. Tensors are read lazily.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from weft.errors import InteropError
from weft.models.build import build
from weft.models.config import Decoder, Encoder, EncoderDecoder, Model
from weft.nn.init import empty_weights
from weft.storage.tensors import LazyWeights

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorLayout:
    """Layout of a tensor in another program. `to_ours` and `to_theirs` are exact inverses."""

    to_ours: Callable[[Tensor], Tensor]
    to_theirs: Callable[[Tensor], Tensor]

    def shape(self, ours: Shape) -> Shape:
        """Shape in the other program of a tensor whose shape is `ours`."""
        return tuple(self.to_theirs(torch.empty(ours, device="meta")).shape)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous() if tensor.dim() == 2 else tensor


SAME = TensorLayout(lambda theirs: theirs, lambda ours: ours)
TRANSPOSED = TensorLayout(_transposed, _transposed)  # matrices as (in, out) instead of (out, in)
ONE_ROW = TensorLayout(lambda theirs: theirs[0], lambda ours: ours[None])  # a vector stored as a matrix of one row
VECTOR = TensorLayout(lambda theirs: theirs.flatten(), lambda ours: ours)  # which may be stored as a matrix of one row
A_ROW = TensorLayout(lambda theirs: theirs.reshape(1, -1), lambda ours: ours[0])  # a row of a matrix stored as a vector


def _transposed_experts(tensor: Tensor) -> Tensor:
    return tensor.mT.contiguous() if tensor.dim() == 3 else tensor


def _interleaved(ours: Tensor) -> Tensor:
    return _transposed_experts(ours.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))


def _gates_first(theirs: Tensor) -> Tensor:
    return _transposed_experts(theirs).unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


# matrices of experts as (experts, in, out), and gates and up projections in turn; biases are in the same order
EXPERTS_TRANSPOSED = TensorLayout(_transposed_experts, _transposed_experts)
EXPERTS_INTERLEAVED = TensorLayout(_gates_first, _interleaved)


def reordered(order: Callable[[Tensor], Tensor]) -> TensorLayout:
    """Layout with permuted rows: `order` maps our row indices to the order in which they are stored."""
    return TensorLayout(
        lambda theirs: theirs[order(torch.arange(len(theirs))).argsort()],
        lambda ours: ours if ours.is_meta else ours[order(torch.arange(len(ours)))],  # the shape stays
    )


def adjacent_pairs(d_head: int) -> TensorLayout:
    """Layout of queries or keys whose rotary pairs are adjacent rows; in weft, pairs are d_head/2 rows apart.

    Their row 2i of a head is our row i, and their row 2i + 1 is our row d_head/2 + i (Su et al. 2021, §3.4.2).
    """
    return reordered(lambda rows: rows.view(-1, 2, d_head // 2).mT.flatten())


def grouped(groups: int, d_head: int) -> TensorLayout:
    """Layout of queries, keys and values stored group by group: the queries of a group, its key, its value.

    In weft, all queries come first, then all keys, then all values.
    """

    def order(rows: Tensor) -> Tensor:
        queries, keys, values = rows.view(-1, d_head).split([len(rows) // d_head - 2 * groups, groups, groups])
        return torch.cat([queries.unflatten(0, (groups, -1)), keys[:, None], values[:, None]], dim=1).flatten()

    return reordered(order)


@dataclass(frozen=True)
class NameRule:
    """weft's name of a tensor, their names of its parts in row order, and the layout of each part."""

    ours: str
    theirs: tuple[str, ...]
    layouts: tuple[TensorLayout, ...]


Rules = tuple[NameRule, ...]
Layouts = TensorLayout | tuple[TensorLayout, ...]  # of all parts, or one for each part
Names = str | tuple[str, ...] | None  # of a module, or of its parts; None if there is no such module
# short names of a block's modules
MODULES = {
    "norm": "attention_skip.norm", "norm_out": "attention_skip.norm_out", "qkv": "attention.qkv",
    "global_qkv": "attention.global_qkv",
    "q_norm": "attention.q_norm", "k_norm": "attention.k_norm", "out": "attention.out",
    "cross_norm": "cross_skip.norm", "cross_norm_out": "cross_skip.norm_out",
    "cross_q": "cross.q", "cross_kv": "cross.kv", "cross_out": "cross.out",
    "ff_norm": "feedforward_skip.norm", "ff_norm_out": "feedforward_skip.norm_out", "up": "feedforward.up",
    "gate_up": "feedforward.gate_up", "down": "feedforward.down", "router": "feedforward.router",
    "shared_gate_up": "feedforward.shared.gate_up", "shared_down": "feedforward.shared.down",
    "shared_gate": "feedforward.shared_gate", "q_down": "attention.q_down", "q_latent_norm": "attention.q_latent_norm",
    "q_up": "attention.q_up", "kv_down": "attention.kv_down", "kv_latent_norm": "attention.kv_latent_norm",
    "kv_up": "attention.kv_up",
}  # fmt: skip


def tensor(ours: str, *theirs: str, layout: Layouts = SAME) -> NameRule:
    """Rule for one tensor."""
    layouts = layout if isinstance(layout, tuple) else (layout,) * len(theirs)
    assert len(layouts) == len(theirs) > 0, ours
    return NameRule(ours, theirs, layouts)


def module(ours: str, *theirs: str, layout: Layouts = SAME) -> Rules:
    """Rules for the weight and bias of a module."""
    return tuple(
        tensor(f"{ours}.{kind}", *(f"{name}.{kind}" for name in theirs), layout=layout) for kind in ("weight", "bias")
    )


def block(stack: str, theirs: str, layouts: Mapping[str, Layouts] | None = None, /, **names: Names) -> Rules:
    """Rules for the modules of a stack's blocks; their names begin with `theirs`.

    `names` maps the short names of MODULES to the rest of each name; `*` stands for the letters q, k and v.
    `layouts` are those other than SAME.
    """
    rules: list[NameRule] = []
    for short, name in names.items():
        if isinstance(name, str):
            letters = short.rpartition("_")[2] if "*" in name else " "
            name = tuple(name.replace("*", letter) for letter in letters)
        if name is not None:
            layout = (layouts or {}).get(short, SAME)
            ours = f"{stack}.blocks.{{layer}}.{MODULES[short]}"
            rules += module(ours, *(f"{theirs}.{part}" for part in name), layout=layout)
    return tuple(rules)


def experts(
    theirs: str, gate_up: tuple[str, ...], down: str, *, layouts: tuple[Layouts, ...], bias: str = "_bias"
) -> Rules:
    """Rules for the matrices of a decoder's experts and their biases; their names begin with `theirs`. Names without
    `{expert}` are of all experts together, and their biases end in `bias`."""
    rules = []
    for ours, names, layout in (("gate_up", gate_up, layouts[0]), ("down", (down,), layouts[1])):
        own = f"decoder.blocks.{{layer}}.feedforward.experts.{ours}"
        rules.append(tensor(own, *(f"{theirs}.{name}" for name in names), layout=layout))
        if "{expert}" not in down:
            biases = (f"{theirs}.{name.removesuffix('.weight')}{bias}" for name in names)
            rules.append(tensor(f"{own}_bias", *biases, layout=layout))
    return tuple(rules)


@dataclass(frozen=True)
class TensorPart:
    """One of their tensors: rows [start, stop) of one of ours, in another layout. Rows of a tensor of `experts` are
    counted through all of them, those of a tensor of `heads` within each of them."""

    name: str
    shape: Shape
    start: int
    stop: int
    layout: TensorLayout
    experts: int = 0
    axis: int = 0  # 1 for rows of each expert or head, in matrices of all of them together
    heads: int = 0

    def of(self, ours: Tensor) -> Tensor:
        """Convert our tensor to theirs."""
        rows = ours.flatten(0, 1) if self.experts else ours.unflatten(0, (self.heads, -1)) if self.heads else ours
        return self.layout.to_theirs(rows.narrow(self.axis, self.start, self.stop - self.start))


Conversions = Mapping[str, tuple[TensorPart, ...]]  # our tensor → its parts


def shapes(model: Model) -> dict[str, Shape]:
    """Shapes of all tensors of a model, without allocating them."""
    with empty_weights():
        return {name: tuple(tensor.shape) for name, tensor in build(model).state_dict().items()}


def conversions(rules: Iterable[NameRule], model: Model) -> Conversions:
    """Apply the rules to `model`, layer by layer; InteropError if a tensor of the model has no rule."""
    ours = shapes(model)
    layers = 1 + max((int(match[1]) for name in ours if (match := re.search(r"\.blocks\.(\d+)\.", name))), default=0)
    table: dict[str, tuple[TensorPart, ...]] = {}
    for rule in rules:
        for layer in range(layers if "{layer}" in rule.ours else 1):
            name = rule.ours.replace("{layer}", str(layer))
            if name not in ours:
                continue
            assert name not in table, f"two rules for {name}"
            table[name] = tuple(_parts(rule, name, ours[name], model=model, layer=layer))
    unnamed = next((name for name in ours if name not in table), None)
    if unnamed is not None:
        raise InteropError(f"{unnamed} {list(ours[unnamed])}: this format has no place for it")
    return {name: table[name] for name in ours}


def _parts(rule: NameRule, name: str, shape: Shape, *, model: Model, layer: int) -> Iterator[TensorPart]:
    names, layouts, each = [part.replace("{layer}", str(layer)) for part in rule.theirs], rule.layouts, "{expert}"
    count = shape[0] if each in names[0] else 0
    heads, axis = 0, int(not count and len(names) > 1 and (".experts." in name or name.endswith(".kv_up.weight")))
    if axis and name.endswith(".kv_up.weight"):  # keys and values of each head
        assert isinstance(model, Decoder)
        heads, heights = model.attention.heads, [model.d_head - model.rotated, model.d_v]
        shape = (heads, sum(heights), shape[1])
    elif count:
        heights = [shape[1] // len(names)] * (len(names) * shape[0])
        names = [part.replace(each, str(expert)) for expert in range(shape[0]) for part in names]
        layouts, shape = layouts * shape[0], (shape[0] * shape[1], *shape[2:])
    elif axis:
        heights = [shape[1] // len(names)] * len(names)
    else:
        heights = _part_heights(name, model, parts=len(names), rows=shape[0])
    assert sum(heights) == shape[axis], name
    stops = accumulate(heights)
    by_height: dict[tuple[TensorLayout, int], Shape] = {}
    for theirs, layout, height, stop in zip(names, layouts, heights, stops, strict=True):
        their_shape = by_height.setdefault((layout, height), layout.shape((*shape[:axis], height, *shape[axis + 1 :])))
        start = stop - height
        yield TensorPart(theirs, their_shape, start, stop, layout, experts=count, axis=axis, heads=heads)


def _part_heights(name: str, model: Model, *, parts: int, rows: int) -> list[int]:
    """Rows of each part of a tensor."""
    if parts == 1:
        return [rows]
    layer = name.split(".")[-2]
    if layer in ("q_norm", "k_norm"):
        return [1] * parts
    assert isinstance(model, Decoder | Encoder | EncoderDecoder), "only Transformers join matrices"
    queries, keys = model.attention.heads * model.d_head, model.attention.groups * model.d_head
    heights = {"kv": [keys, keys], "gate_up": [rows // 2] * 2}
    return heights.get(layer, [queries, keys, keys])


def their_shapes(table: Conversions) -> dict[str, Shape]:
    """Shapes of all of their tensors."""
    return {part.name: part.shape for parts in table.values() for part in parts if part.name}


def to_ours(
    table: Conversions, stored: Mapping[str, Shape], read: Callable[[str], Tensor], *, location: str
) -> LazyWeights:
    """Our weights, converted from theirs when they are read.

    `stored` are the names and shapes of all tensors at `location`; `read` returns one of them. InteropError if one is
    missing, superfluous or has another shape.
    """
    expected = their_shapes(table)
    for names, shapes, fault in (
        ([name for name in expected if name not in stored], expected, "is missing"),
        ([name for name in stored if name not in expected], stored, "has no place in this model"),
    ):
        if names:
            more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
            raise InteropError(f"{location}: '{names[0]}' {list(shapes[names[0]])} {fault}{more}")
    for name, shape in expected.items():
        if tuple(stored[name]) != shape:
            raise InteropError(f"{location}: '{name}' is {list(stored[name])}; the settings require {list(shape)}")

    def join(parts: Sequence[TensorPart]) -> Tensor:
        if parts[0].experts:  # filled expert by expert, so that they are not in memory twice
            rows = parts[0].layout.to_ours(read(parts[0].name))
            joined = rows.new_empty(parts[-1].stop, *rows.shape[1:])
            for part in parts:
                rows = part.layout.to_ours(read(part.name))
                joined = joined.to(torch.promote_types(joined.dtype, rows.dtype))
                joined[part.start : part.stop] = rows
            return joined.unflatten(0, (parts[0].experts, -1))
        stored = {part.name: part.layout.to_ours(read(part.name)) for part in parts if part.name}
        like = next(iter(stored.values()))
        tensors = [stored[part.name] if part.name else like.new_zeros(part.shape) for part in parts]
        joined = tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=parts[0].axis)
        return joined.flatten(0, 1) if parts[0].heads else joined

    return {name: partial(join, parts) for name, parts in table.items()}


def to_theirs(table: Conversions, weights: LazyWeights) -> LazyWeights:
    """Their weights, converted from ours when they are read."""

    last: dict[str, Tensor] = {}  # the tensor read last: an expert's matrix is a part of a large one

    def convert(part: TensorPart, name: str) -> Tensor:
        if name not in last:
            last.clear()
            last[name] = weights[name]()
        ours = last[name] if part.experts or part.axis else last.pop(name)
        if any(bool(ours[other.start : other.stop].any()) for other in table[name] if not other.name):
            raise InteropError(f"{name}: a part of it has no place in this format, which takes it to be 0")
        return part.of(ours)

    named = ((part, name) for name, parts in table.items() for part in parts if part.name)
    return {part.name: partial(convert, part, name) for part, name in named}
