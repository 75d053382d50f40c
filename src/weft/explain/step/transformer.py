"""Stages of a token in a Transformer's stack: one block in detail, and a summary of every block."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from weft.explain.anatomy.parts import with_bias
from weft.explain.step.attention import attention_stages
from weft.explain.step.passing import SUBLAYERS, FollowedToken
from weft.explain.step.stage import cost, linear_cost, sent
from weft.models.stack import Stack
from weft.models.transformer import Transformer
from weft.nn import feedforward, norm
from weft.nn.block import Block, Sublayer
from weft.nn.experts import Experts
from weft.nn.hashed_ngrams import NGramEmbedding
from weft.nn.linear import Linear
from weft.nn.position import Position

MAX_SUMMARY_VALUES = 1 << 14  # probabilities in all blocks' summaries; beyond that, only the mean over the heads
NAMED_UNITS = 24  # largest hidden units that are listed
NAMES = {"attention": "self-attention", "cross": "attention to the source", "feedforward": "the feed-forward layer"}

Norm = norm.LayerNorm | norm.RMSNorm


def stack_stages(token: FollowedToken, source: str | None = None) -> str:
    """Record the stages from ids to features; `source` is the stage that cross-attention reads. Return the last id."""
    _embedding_stages(token)
    for layer in range(len(token.stack.layers)):
        before = token.stages.last
        if layer == token.opened:
            _block_stages(token, source)
        _summary(token, layer, before)
    if token.stack.norm is not None:
        group = "output" if token.embedding == "embedding" else "source_output"
        _norm_stage(token, f"{group}.norm", token.stack.norm, x=token.at(f"{token.name}.norm"))
    return token.stages.last


def _norm_stage(token: FollowedToken, id: str, module: Norm, *, x: Tensor, read: str | None = None) -> str:
    """Record a norm with the result x (width,), computed from the stage `read`, by default the last one."""
    text = "layer-norm" if isinstance(module, norm.LayerNorm) else "rms-norm"
    tensor, numbers = sent("normalised", x, "coordinate"), {"eps": module.eps or 0.0, "width": len(x)}
    inputs, weights = (read or token.stages.last,), cost(0, module)
    return token.stages.record(id, tensor, text=text, numbers=numbers, inputs=inputs, by=type(module), cost=weights)


def _embedding_stages(token: FollowedToken) -> None:
    model, stack, position, group = token.model, token.stack, token.position, token.embedding
    shared = group == "embedding" or model.source_embedding is None
    table = model.embedding if shared else model.source_embedding
    assert table is not None
    ids = torch.tensor([token.ids], device=table.weight.device)
    token.stages.record_tokens(group, token.ids, token.pieces, position=position)
    x, factor = model.embed(ids, table)[0, position], model.config.embedding_factor
    scaled, segments = factor is not None, model.segments is not None
    more = ", times a constant factor" * scaled + ", plus the vector of the first segment" * segments
    token.stages.record(
        f"{group}.row",
        sent("embedding", x, "coordinate"),
        text="embedding",
        numbers={"vocab_size": len(table.weight), "width": len(x)} | ({} if factor is None else {"factor": factor}),
        words={"id": token.ids[position], "factors": " · factor" * scaled + " + S[0]" * segments, "more": more},
        by=Transformer.embed,
        cost=cost(0, table, model.segments),
    )
    if model.ngrams is not None:
        x = _ngram_stage(token, model.ngrams, x)
    if stack.projection is not None and not stack.narrow:
        x = _projection_stage(token, stack.projection)
    if type(stack.position).embed is not Position.embed:
        index = torch.tensor([[position]], device=x.device)
        encoded, added = (stack.position.embed(each[None, None], index)[0, 0] for each in (x, torch.zeros_like(x)))
        beside = len(encoded) > len(x)  # concatenated, not added
        tensors = [sent("joined" if beside else "sum", encoded, "coordinate")]
        tensors.append(sent("position", added[len(x) :] if beside else added, "coordinate"))
        numbers, embed = {"position": position}, type(stack.position).embed
        weights, text = cost(0, stack.position), "position-beside" if beside else "position"
        token.stages.record(f"{group}.position", *tensors, text=text, numbers=numbers, by=embed, cost=weights)
    if stack.embedding_norm is not None:
        _norm_stage(token, f"{group}.norm", stack.embedding_norm, x=token.at(f"{token.name}.embedding_norm"))
    if stack.projection is not None and stack.narrow:
        _projection_stage(token, stack.projection)


def _ngram_stage(token: FollowedToken, tables: NGramEmbedding, x: Tensor) -> Tensor:
    """Record the sum of x and the hashed n-grams' rows; return it."""
    ids, position = torch.tensor([token.ids], device=x.device), token.position
    added, indices = tables(ids)[0, position], tables.indices(ids)[0, position] % tables.rows
    rows = dict(zip(tables.orders, indices.tolist(), strict=True))
    token.stages.record(
        f"{token.embedding}.ngrams",
        sent("sum", x + added, "coordinate"),
        sent("n-grams", added, "coordinate"),
        text="n-grams",
        numbers={"rows": tables.rows, **{f"row of the last {order}": row for order, row in rows.items()}},
        words={"sum": " + ".join(f"N{order}[{row}]" for order, row in rows.items())},
        by=NGramEmbedding.forward,
        cost=cost(0 if tables.projection is None else 2 * tables.projection.weight.numel(), tables),
    )
    return x + added


def _projection_stage(token: FollowedToken, linear: Linear) -> Tensor:
    x = token.at(f"{token.name}.projection")
    projected = sent("projected", x, "coordinate")
    token.stages.record(f"{token.embedding}.projection", projected, by=Stack.begin, cost=linear_cost(linear))
    return x


def _block_stages(token: FollowedToken, source: str | None) -> None:
    """Record the inside of the opened block."""
    name, block, stages = f"{token.name}.{token.opened}", token.block, token.stages
    before = read = stages.last
    ends = []
    for part in _sublayers(block):
        skip, start = getattr(block, f"{part}_skip"), before if block.parallel else stages.last
        if skip.norm is not None and skip.pre:
            x = token.at(f"{name}.{part}_skip.norm")
            read = _norm_stage(token, f"{name}.{part}.norm", skip.norm, x=x, read=start)
        elif not block.parallel:  # in parallel, a sublayer without a norm reads the other one's
            read = start
        if part == "feedforward":
            _feedforward_stages(token, read)
        else:
            attention_stages(token, part, read=read, source=source)
        if skip.norm_out is not None:
            _norm_stage(token, f"{name}.{part}.norm_out", skip.norm_out, x=token.at(f"{name}.{part}_skip.norm_out"))
        ends.append(stages.last)
        if not block.parallel:
            _residual_stages(token, part, start)
    if block.parallel:
        residual = sent("residual", token.at(f"{name}.residual"), "coordinate")
        inputs, text = (before, *ends), "parallel-residual"
        stages.record(f"{name}.residual", residual, text=text, inputs=inputs, by=Block.forward)


def _sublayers(block: Any) -> list[str]:
    return [name for name in SUBLAYERS if getattr(block, name) is not None]


def _residual_stages(token: FollowedToken, part: str, start: str) -> None:
    """Record the sum of a sublayer's input and output, and the norm after it, if any."""
    id, layer = f"{token.name}.{token.opened}.{part}", token.opened
    skip, result = getattr(token.block, f"{part}_skip"), token.at(f"{id}_skip")
    post, total = skip.norm is not None and not skip.pre, result
    if post:
        total = token.sublayer_output(part, layer)
        total = token.sublayer_input(part, layer) + total if skip.residual else total
    token.stages.record(
        f"{id}.residual",
        sent("residual", total, "coordinate"),
        text="residual" if skip.residual else "no-residual",
        words={"scaled": "y" if skip.scale == 1.0 else f"{skip.scale:g} · y", "part": NAMES[part]},
        inputs=(start, token.stages.last) if skip.residual else (token.stages.last,),
        by=Sublayer.write,
    )
    if post:
        _norm_stage(token, f"{id}.norm", skip.norm, x=result)


def _feedforward_stages(token: FollowedToken, read: str) -> None:
    id, module = f"{token.name}.{token.opened}.feedforward", token.block.feedforward
    if isinstance(module, Experts):
        _expert_stages(token, read)
        return
    gated, forward = isinstance(module, feedforward.Gated), type(module).forward
    up = module.gate_up if gated else module.up
    before = token.at(f"{id}.{'gate_up' if gated else 'up'}")
    gate, *others = before.chunk(2) if gated else (before,)
    hidden = token.at(f"{id}.hidden")
    token.stages.record(
        f"{id}.up",
        sent("gate" if gated else "before activation", gate, "unit"),
        *(sent("up", each, "unit") for each in others),
        text="gate-up" if gated else "up",
        numbers={"d_ff": len(hidden)},
        words={"bias": with_bias(up)},
        inputs=(read,),
        by=forward,
        cost=linear_cost(up),
    )
    largest = hidden.abs().topk(min(NAMED_UNITS, len(hidden))).indices.sort().values
    units = ("unit", [str(unit) for unit in largest.tolist()])
    token.stages.record(
        f"{id}.hidden",
        sent("hidden", hidden, "unit"),
        sent("largest units", hidden[largest], units),
        sent("largest units, before", gate[largest], units),
        text="gated-hidden" if gated else "hidden",
        numbers={"d_ff": len(hidden), "above 0": int((hidden > 0).sum())},
        words={"f": token.model.config.feedforward.activation},
        by=forward,
    )
    words = {"W": "W_d" if gated else "W₂", "bias": with_bias(module.down)}
    output = sent("feed-forward", token.at(id), "coordinate")
    token.stages.record(f"{id}.down", output, words=words, by=forward, cost=linear_cost(module.down))


def _expert_stages(token: FollowedToken, read: str) -> None:
    id, module = f"{token.name}.{token.opened}.feedforward", token.block.feedforward
    logits = token.at(f"{id}.router")
    chosen = module.router.choose(logits)
    names = ("expert", [str(expert) for expert in chosen.experts.tolist()])
    token.stages.record(
        f"{id}.router",
        sent("probabilities", module.router.probabilities(logits), "expert", scale="probability"),
        sent("weights of the chosen", chosen.weights, names),
        text="router",
        numbers={"experts": len(logits), "chosen": len(chosen.weights)},
        inputs=(read,),
        by=type(module.router).choose,
        cost=cost(2 * module.router.weight.numel(), module.router),
    )
    output = sent("mixture", token.at(id), "coordinate")
    share = module.settings.chosen / module.settings.experts
    flops = round(2 * share * sum(p.numel() for p in module.experts.parameters()))
    token.stages.record(f"{id}.experts", output, text="experts", by=type(module).mix, cost=cost(flops, module.experts))


def _summary(token: FollowedToken, layer: int, before: str) -> None:
    """Record what a block attends to at the position, and the sizes of its additions to the residual stream."""
    name, layers, sharing = f"{token.name}.{layer}", token.stack.layers, token.stack.sharing
    block = layers[layer]
    parts, tensors = _sublayers(block), []
    for part in parts[:-1]:
        probabilities = token.captured[f"{name}.{part}.probabilities"][0, :, token.position]
        keys = ("key", token.pieces if part == "attention" else token.source_pieces)
        label = "attention" if part == "attention" else "attention to the source"
        if probabilities.numel() * len(layers) > MAX_SUMMARY_VALUES:
            tensors.append(sent(f"{label}, mean of heads", probabilities.mean(0), keys, scale="probability"))
        else:
            tensors.append(sent(label, probabilities, "head", keys, scale="probability"))
    labels = ["feed-forward" if part == "feedforward" else part for part in parts]
    inputs = torch.stack([token.sublayer_input(part, layer) for part in parts])
    outputs = torch.stack([token.sublayer_output(part, layer) for part in parts])
    cosines = torch.stack([cosine_similarity(*pair, dim=0) for pair in zip(outputs, inputs, strict=True)])
    residual = token.at(f"{name}.residual")
    shared = f" Its weights are shared by {sharing} layers." if sharing > 1 else ""
    token.stages.record(
        name,
        *tensors,
        sent("norm added", outputs.norm(dim=1), ("part", labels), scale="positive"),
        sent("cosine", cosines, ("part", labels)),
        sent("residual", residual, "coordinate"),
        text="block",
        numbers={"norm before": float(inputs[0].norm()), "norm after": float(residual.norm())},
        words={"layer": layer, "layers": len(layers), "sum": " + ".join(["x", *labels]), "shared": shared},
        inputs=(before,),
        by=Block.forward,
        cost=cost(sum(2 * part.weight.numel() for part in block.modules() if isinstance(part, Linear)), block),
    )
