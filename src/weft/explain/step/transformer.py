"""A token's way through a Transformer's stack: one block is opened, of the others it is told what they add."""

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from weft.explain.step.attention import attention_stages
from weft.explain.step.passing import NAMES, Followed
from weft.explain.step.stage import Way, cost, products, shown, token_stage
from weft.models.transformer import Stack, Transformer
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
    layer = isinstance(module, norm.LayerNorm)
    becomes = "mean becomes 0 and its deviation 1" if layer else "root mean square becomes 1"
    return way.add(
        id,
        "LayerNorm" if layer else "RMSNorm",
        f"The vector is normed: its {becomes}, then each coordinate has a gain of its own.",
        "gain · (x − μ) / σ + bias" if layer else "gain · x / RMS(x)",
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
    segment = "" if model.segments is None else " + S[0]"
    way.add(
        f"{group}.row",
        "Embedding",
        f"The id's row of the table of embeddings{'' if factor is None else ', times a constant factor'}"
        f"{', plus the vector of the first segment' if segment else ''}.",
        f"x = E[{followed.ids[place]}]{'' if factor is None else ' · factor'}{segment}",
        shown("embedding", x, "coordinate"),
        numbers={"vocab_size": len(table.weight), "width": len(x)} | ({} if factor is None else {"factor": factor}),
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
            "Position",
            "A vector that stands for the token's position is added to its embedding.",
            f"x + P[{place}]",
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
    found = {f"row of the last {order}": row for order, row in zip(tables.orders, rows.tolist(), strict=True)}
    way.add(
        f"{followed.embedding}.ngrams",
        "N-grams",
        "The last tokens, a few of them at a time, have rows of their own, which a hash finds. Their sum is added.",
        "x + " + " + ".join(f"N{order}[{row}]" for order, row in zip(tables.orders, rows.tolist(), strict=True)),
        shown("sum", x + added, "coordinate"),
        shown("n-grams", added, "coordinate"),
        numbers={"rows": tables.rows, **found},
        by=NGramEmbedding.forward,
        cost=cost(0 if tables.projection is None else products(tables.projection), tables),
    )
    return x + added


def _project(way: Way, followed: Followed, linear: Linear) -> Tensor:
    x, about = followed.at(f"{followed.name}.projection"), "A matrix makes the vector as wide as the blocks are."
    tensor, counted = shown("projected", x, "coordinate"), cost(products(linear), linear)
    way.add(f"{followed.embedding}.projection", "Projection", about, "W x", tensor, by=Stack.begin, cost=counted)
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
            "Residual",
            "Attention and feed-forward have read the same token; what both give is added to it at once.",
            "x + attention + feed-forward",
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
    scaled = "y" if skip.scale == 1.0 else f"{skip.scale:g} · y"
    way.add(
        f"{id}.residual",
        "Residual",
        f"What {NAMES[part]} gives is added to what came in."
        if skip.residual
        else "This model has no skip connections: what came in is left behind.",
        f"x + {scaled}" if skip.residual else scaled,
        shown("residual", total, "coordinate"),
        inputs=(start, way.last) if skip.residual else (way.last,),
        by=Sublayer.write,
    )
    if post:
        norm_stage(way, f"{id}.norm", skip.norm, end)


def _feedforward(way: Way, followed: Followed, read: str) -> None:
    id, module = f"{followed.name}.{followed.opened}.feedforward", followed.block(followed.opened).feedforward
    gated = isinstance(module, feedforward.Gated)
    up = module.gate_up if gated else module.up
    f, bias = followed.model.config.feedforward.activation, "" if up.bias is None else " + b"
    before = followed.at(f"{id}.{'gate_up' if gated else 'up'}")
    gate, *more = before.chunk(2) if gated else (before,)
    hidden = followed.at(f"{id}.hidden")
    way.add(
        f"{id}.up",
        "Gate and up" if gated else "Up",
        f"Two matrices make {len(hidden)} numbers each of the token's vector: gates, and what they let through."
        if gated
        else f"A matrix makes {len(hidden)} numbers of the token's vector, one a hidden unit.",
        f"g = W_g x{bias}, u = W_u x{bias}" if gated else f"u = W₁ x{bias}",
        shown("gate" if gated else "before activation", gate, "unit"),
        *(shown("up", each, "unit") for each in more),
        numbers={"d_ff": len(hidden)},
        inputs=(read,),
        by=type(module).forward,
        cost=cost(products(up), up),
    )
    largest = hidden.abs().topk(min(NAMED_UNITS, len(hidden))).indices.sort().values
    names = [str(unit) for unit in largest.tolist()]
    way.add(
        f"{id}.hidden",
        "Activation",
        f"Each unit passes through {f}" + (", and multiplies what its gate lets through." if gated else "."),
        f"h = {f}(g) ⊙ u" if gated else f"h = {f}(u)",
        shown("hidden", hidden, "unit"),
        shown("largest units", hidden[largest], ("unit", names)),
        shown("largest units, before", gate[largest], ("unit", names)),
        numbers={"d_ff": len(hidden), "above 0": int((hidden > 0).sum())},
        by=type(module).forward,
    )
    way.add(
        f"{id}.down",
        "Down",
        "A matrix brings the hidden units back to the model's width: what the layer adds to the token.",
        f"y = {'W_d' if gated else 'W₂'} h" + ("" if module.down.bias is None else " + b"),
        shown("feed-forward", followed.at(id), "coordinate"),
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
    axis = ("part", [{"attention": "attention", "cross": "cross", "feedforward": "feed-forward"}[p] for p in parts])
    added, stream = [followed.added(part, layer) for part in parts], [followed.before(part, layer) for part in parts]
    way.add(
        name,
        f"Block {layer}",
        f"Block {layer} of {len(layers)}: what each of its heads looks at, and what it adds to the token's vector."
        + (f" Its weights are those of {followed.stack.sharing} layers." if followed.stack.sharing > 1 else ""),
        "x + attention + feed-forward" if len(parts) == 2 else "x + attention + cross + feed-forward",
        *tensors,
        shown("norm added", torch.stack(added).norm(dim=1), axis, scale="positive"),
        shown(
            "cosine", torch.stack([cosine_similarity(*pair, dim=0) for pair in zip(added, stream, strict=True)]), axis
        ),
        shown("residual", followed.at(f"{name}.residual"), "coordinate"),
        numbers={
            "norm before": float(stream[0].norm()),
            "norm after": float(followed.at(f"{name}.residual").norm()),
        },
        inputs=(before,),
        by=Block.forward,
        cost=cost(sum(products(part) for part in block.modules() if isinstance(part, Linear)), block),
    )
