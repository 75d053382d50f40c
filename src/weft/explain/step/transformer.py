"""A token's way through a Transformer's stack: one block is opened, of the others it is told what they add."""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from weft.explain.anatomy.parts import with_bias
from weft.explain.step.attention import attention_stages
from weft.explain.step.passing import NAMES, Followed
from weft.explain.step.stage import Way, cost, products, shown, token_stage
from weft.models.stack import Stack
from weft.models.transformer import Transformer
from weft.nn import feedforward, norm
from weft.nn.block import Block, Sublayer
from weft.nn.hashed_ngrams import NGramEmbedding
from weft.nn.linear import Linear
from weft.nn.position import Position

MAX_SUMMARIES = 1 << 16  # probabilities that all blocks' summaries hold; of more, the mean over the heads
NAMED_UNITS = 24  # of a feed-forward layer, the largest

Norm = norm.LayerNorm | norm.RMSNorm


def stack_stages(way: Way, followed: Followed, source: str | None = None) -> str:
    """From ids to features; `source` is the stage that gave what cross-attention reads. Returns the last one's id."""
    _embed(way, followed)
    for layer in range(len(followed.stack.layers)):
        before = way.last
        if layer == followed.opened:
            _block(way, followed, source)
        _summary(way, followed, layer, before)
    if followed.stack.norm is not None:
        group = "output" if followed.embedding == "embedding" else "source_output"
        normed = followed.at(f"{followed.name}.norm")
        norm_stage(way, f"{group}.norm", followed.stack.norm, normed)
    return way.last


def norm_stage(way: Way, id: str, module: Norm, x: Tensor, read: str | None = None) -> str:
    """A norm that gave x (width,) of what the stage `read` gave, by default the last one."""
    return way.add(
        id,
        "layer-norm" if isinstance(module, norm.LayerNorm) else "rms-norm",
        shown("normed", x, "coordinate"),
        numbers={"eps": module.eps or 0.0, "width": len(x)},
        inputs=(read or way.last,),
        by=type(module),
        cost=cost(0, module),
    )


def _embed(way: Way, followed: Followed) -> None:
    model, stack, place, group = followed.model, followed.stack, followed.place, followed.embedding
    own = group == "embedding" or model.source_embedding is None
    table = model.embedding if own else model.source_embedding
    assert table is not None
    ids = torch.tensor([followed.ids], device=table.weight.device)
    token_stage(way, group, followed.ids, followed.pieces, place)
    x, factor = model.embed(ids, table)[0, place], model.config.embedding_factor
    scaled, segments = factor is not None, model.segments is not None
    more = ", times a constant factor" * scaled + ", plus the vector of the first segment" * segments
    way.add(
        f"{group}.row",
        "embedding",
        shown("embedding", x, "coordinate"),
        numbers={"vocab_size": len(table.weight), "width": len(x)} | ({} if factor is None else {"factor": factor}),
        words={"id": followed.ids[place], "factors": " · factor" * scaled + " + S[0]" * segments, "more": more},
        by=Transformer.embed,
        cost=cost(0, table, model.segments),
    )
    if model.ngrams is not None:
        x = _ngrams(way, followed, model.ngrams, x)
    if stack.projection is not None and not stack.narrow:
        x = _project(way, followed, stack.projection)
    if type(stack.position).embed is not Position.embed:
        where = torch.tensor([[place]], device=x.device)
        added = stack.position.embed(torch.zeros_like(x)[None, None], where)[0, 0]
        x = x + added
        way.add(
            f"{group}.position",
            "position",
            shown("sum", x, "coordinate"),
            shown("position", added, "coordinate"),
            numbers={"position": place},
            by=type(stack.position).embed,
            cost=cost(0, stack.position),
        )
    if stack.embedding_norm is not None:
        normed = followed.at(f"{followed.name}.embedding_norm")
        norm_stage(way, f"{group}.norm", stack.embedding_norm, normed)
    if stack.projection is not None and stack.narrow:
        _project(way, followed, stack.projection)


def _ngrams(way: Way, followed: Followed, tables: NGramEmbedding, x: Tensor) -> Tensor:
    ids, place = torch.tensor([followed.ids], device=x.device), followed.place
    added, rows = tables(ids)[0, place], tables.indices(ids)[0, place] % tables.rows
    found = dict(zip(tables.orders, rows.tolist(), strict=True))
    way.add(
        f"{followed.embedding}.ngrams",
        "n-grams",
        shown("sum", x + added, "coordinate"),
        shown("n-grams", added, "coordinate"),
        numbers={"rows": tables.rows, **{f"row of the last {order}": row for order, row in found.items()}},
        words={"sum": " + ".join(f"N{order}[{row}]" for order, row in found.items())},
        by=NGramEmbedding.forward,
        cost=cost(0 if tables.projection is None else products(tables.projection), tables),
    )
    return x + added


def _project(way: Way, followed: Followed, linear: Linear) -> Tensor:
    x, counted = followed.at(f"{followed.name}.projection"), cost(products(linear), linear)
    projected = shown("projected", x, "coordinate")
    way.add(f"{followed.embedding}.projection", "projection", projected, by=Stack.begin, cost=counted)
    return x


def _block(way: Way, followed: Followed, source: str | None) -> None:
    """The inside of the block that is opened."""
    name, block, before = f"{followed.name}.{followed.opened}", followed.block(followed.opened), way.last
    normed, ends = before, []
    for part in _sublayers(block):
        skip, start = getattr(block, f"{part}_skip"), before if block.parallel else way.last
        if skip.norm is not None and skip.pre:
            x = followed.layer(f"{part}_skip.norm")
            normed = norm_stage(way, f"{name}.{part}.norm", skip.norm, x, start)
        elif not block.parallel:  # side by side, a layer without a norm of its own reads what the other's gave
            normed = start
        if part == "feedforward":
            _feedforward(way, followed, normed)
        else:
            attention_stages(way, followed, part, normed, source)
        if skip.norm_out is not None:
            x = followed.layer(f"{part}_skip.norm_out")
            norm_stage(way, f"{name}.{part}.norm_out", skip.norm_out, x)
        ends.append(way.last)
        if not block.parallel:
            _residual(way, followed, part, start)
    if block.parallel:
        way.add(
            f"{name}.residual",
            "parallel-residual",
            shown("residual", followed.layer("residual"), "coordinate"),
            inputs=(before, *ends),
            by=Block.forward,
        )


def _sublayers(block: Block) -> list[str]:
    return ["attention", *(["cross"] if block.cross is not None else []), "feedforward"]


def _residual(way: Way, followed: Followed, part: str, start: str) -> None:
    id, block = f"{followed.name}.{followed.opened}.{part}", followed.block(followed.opened)
    skip, end = getattr(block, f"{part}_skip"), followed.layer(f"{part}_skip")
    post = skip.norm is not None and not skip.pre
    added = followed.added(part)
    total = end if not post else followed.before(part) + added if skip.residual else added
    way.add(
        f"{id}.residual",
        "residual" if skip.residual else "no-residual",
        shown("residual", total, "coordinate"),
        words={"scaled": "y" if skip.scale == 1.0 else f"{skip.scale:g} · y", "part": NAMES[part]},
        inputs=(start, way.last) if skip.residual else (way.last,),
        by=Sublayer.write,
    )
    if post:
        norm_stage(way, f"{id}.norm", skip.norm, end)


def _feedforward(way: Way, followed: Followed, read: str) -> None:
    id, module = f"{followed.name}.{followed.opened}.feedforward", followed.block(followed.opened).feedforward
    gated = isinstance(module, feedforward.Gated)
    up = module.gate_up if gated else module.up
    before = followed.at(f"{id}.{'gate_up' if gated else 'up'}")
    gate, *more = before.chunk(2) if gated else (before,)
    hidden = followed.at(f"{id}.hidden")
    way.add(
        f"{id}.up",
        "gate-up" if gated else "up",
        shown("gate" if gated else "before activation", gate, "unit"),
        *(shown("up", each, "unit") for each in more),
        numbers={"d_ff": len(hidden)},
        words={"bias": with_bias(up)},
        inputs=(read,),
        by=type(module).forward,
        cost=cost(products(up), up),
    )
    largest = hidden.abs().topk(min(NAMED_UNITS, len(hidden))).indices.sort().values
    names = [str(unit) for unit in largest.tolist()]
    way.add(
        f"{id}.hidden",
        "gated-hidden" if gated else "hidden",
        shown("hidden", hidden, "unit"),
        shown("largest units", hidden[largest], ("unit", names)),
        shown("largest units, before", gate[largest], ("unit", names)),
        numbers={"d_ff": len(hidden), "above 0": int((hidden > 0).sum())},
        words={"f": followed.model.config.feedforward.activation},
        by=type(module).forward,
    )
    way.add(
        f"{id}.down",
        "down",
        shown("feed-forward", followed.at(id), "coordinate"),
        words={"W": "W_d" if gated else "W₂", "bias": with_bias(module.down)},
        by=type(module).forward,
        cost=cost(products(module.down), module.down),
    )


def _summary(way: Way, followed: Followed, layer: int, before: str) -> None:
    """What a block attends to at the place, and how much of what it adds."""
    name, block, layers = f"{followed.name}.{layer}", followed.block(layer), followed.stack.layers
    parts, tensors = _sublayers(block), []
    for part in parts[:-1]:
        probabilities = followed.seen[f"{name}.{part}.probabilities"][0, :, followed.place]
        keys = ("key", followed.pieces if part == "attention" else followed.other)
        label = "attention" if part == "attention" else "attention to the source"
        if probabilities.numel() * len(layers) > MAX_SUMMARIES:
            tensors.append(shown(f"{label}, mean of heads", probabilities.mean(0), keys, scale="probability"))
        else:
            tensors.append(shown(label, probabilities, "head", keys, scale="probability"))
    labels, sharing = ["feed-forward" if part == "feedforward" else part for part in parts], followed.stack.sharing
    axis, shared = ("part", labels), f" Its weights are those of {sharing} layers." if sharing > 1 else ""
    added, stream = [followed.added(part, layer) for part in parts], [followed.before(part, layer) for part in parts]
    way.add(
        name,
        "block",
        *tensors,
        shown("norm added", torch.stack(added).norm(dim=1), axis, scale="positive"),
        shown(
            "cosine", torch.stack([cosine_similarity(*pair, dim=0) for pair in zip(added, stream, strict=True)]), axis
        ),
        shown("residual", followed.at(f"{name}.residual"), "coordinate"),
        numbers={"norm before": float(stream[0].norm()), "norm after": float(followed.at(f"{name}.residual").norm())},
        words={"layer": layer, "layers": len(layers), "sum": " + ".join(["x", *labels]), "shared": shared},
        inputs=(before,),
        by=Block.forward,
        cost=cost(sum(products(part) for part in block.modules() if isinstance(part, Linear)), block),
    )
