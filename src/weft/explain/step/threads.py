"""Values along the tokens' threads, as the Explorer's stage draws them: the shown tokens of a text in every column."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.explain.step.passing import SUBLAYERS, AttentionInputs, FollowedToken
from weft.explain.step.stage import rounded
from weft.nn import feedforward
from weft.nn.attention import GlobalAttention
from weft.nn.experts import Choice, Experts
from weft.nn.linear import Linear
from weft.nn.position import Position

MAX_THREADS = 12  # tokens of a text that are shown
MAX_SIDED_THREADS = 7  # tokens of a text and of its source, each
MAX_OPERANDS = 1 << 13  # weights of neurons that are sent, so that their sums can be checked term by term
MIN_NEURONS = 8  # neurons whose weights are sent even if that is more
SLIM_BARS = 32  # values of a block that is not open


def shown_threads(
    size: int,
    position: int,
    attended: Tensor | None = None,
    *,
    requested: Sequence[int] = (),
    causal: bool = True,
    limit: int = MAX_THREADS,
) -> list[int]:
    """Return the tokens to show of `size`, ascending: all, or those requested, or the most relevant.

    The followed token is always shown. Half of the others are the tokens before it, the rest those with the highest
    `attended` (size,): how much it attends to each.
    """
    if wrong := [index for index in requested if not 0 <= index < size]:
        raise ConfigError(f"threads: {wrong[0]} is not a token of the text, which has {size}, counted from 0")
    if size <= limit:
        return list(range(size))
    if requested:
        return sorted({position, *[index for index in requested if index != position][: limit - 1]})
    last = position if causal else min(size - 1, position + limit // 4)
    recent = list(range(last, max(-1, last - limit // 2 - 1), -1))
    scores = torch.zeros(size) if attended is None else attended.float().cpu()
    others = [n for n in scores.argsort(descending=True, stable=True).tolist() if not causal or n <= position]
    return sorted(list(dict.fromkeys([position, *recent, *others]))[:limit])


def binned(values: Tensor, bins: int = SLIM_BARS) -> list[float]:
    """Return at most `bins` values: of neighbours the one farthest from zero."""
    if len(values) <= bins:
        return rounded(values)
    return rounded(torch.stack([part[part.abs().argmax()] for part in values.tensor_split(bins)]))


def transformer_threads(token: FollowedToken, requested: Sequence[int] = ()) -> dict[str, Any]:
    """Return the threads of a stack: its embeddings, every block in short, and the open block in full."""
    captured, name, layers = token.captured, f"{token.name}.{token.opened}", token.stack.layers
    inputs = token.attention_inputs("attention")
    attended = captured[f"{name}.attention.probabilities"][0, :, token.position].amax(0)
    causal, limit = inputs.mask.mask.causal, MAX_THREADS if token.block.cross is None else MAX_SIDED_THREADS
    rows = shown_threads(len(token.ids), token.position, attended, requested=requested, causal=causal, limit=limit)
    blocks = []
    for layer, block in enumerate(layers):
        parts = [part for part in SUBLAYERS if getattr(block, part) is not None]
        after = token.at(f"{token.name}.{layer}.residual")
        before = [token.sublayer_input(part, layer) for part in parts]
        norms = rounded(torch.stack([each.norm() for each in (*before, after)]))
        blocks.append({"norms": norms, "added": binned(after - before[0])})
    opened: dict[str, Any] = {"feedforward": _feedforward(token) if _has_neurons(token.block) else None}
    opened["experts"] = _experts(token) if isinstance(token.block.feedforward, Experts) else None
    opened["attention"] = _attention(token, "attention", rows, keys=rows)
    result = {"rows": rows, "embedding": _embedding(token, rows), "blocks": blocks, "open": token.opened}
    if token.block.cross is not None:
        weights = captured[f"{name}.cross.probabilities"][0, :, token.position]
        size, most = len(token.source_pieces), int(weights.mean(0).argmax())
        keys = shown_threads(size, most, weights.amax(0), causal=False, limit=limit)
        opened["cross"] = _attention(token, "cross", rows, keys=keys)
        memory = captured["encoder"][0, keys].float()
        result["source"] = {"rows": keys, "memory": rounded(memory)}
    return {**result, "block": opened, "final": rounded(token.at(token.name))}


def _embedding(token: FollowedToken, rows: Sequence[int]) -> dict[str, Any]:
    """Return the tokens' rows of the table, and the vectors that the first block reads, (rows, width) each."""
    model, stack = token.model, token.stack
    table = model.embedding if token.embedding == "embedding" else model.source_embedding or model.embedding
    ids = torch.tensor([token.ids], device=table.weight.device)
    words, x = model.embed(ids, table)[0, rows].float(), token.captured[token.begin][0, rows].float()
    positions = torch.arange(len(token.ids), device=x.device)[None]
    added = words.shape == x.shape and type(stack.position).embed is not Position.embed
    if added:
        places = stack.position.embed(torch.zeros_like(x[None]), positions[:, rows])[0]
        added = torch.allclose(words + places, x, rtol=1e-4, atol=1e-5)
    return {"words": rounded(words), "x": rounded(x), "added": added}


def _masked_scores(module: Any, inputs: AttentionInputs) -> Tensor:
    """Return all scores (heads, time, source time) with their position bias, −∞ where a key is not visible."""
    mask = inputs.mask
    scores = module.scores(inputs.rotated, mask)[0]
    bias = mask.position.local_bias(mask.queries, mask.keys)
    scores = scores if bias is None else scores + bias[0]
    visible = mask.mask.dense(slice(0, scores.shape[-2]), slice(0, scores.shape[-1]), scores.device)[0, 0]
    return scores.masked_fill(~visible, -torch.inf)


def _attention(token: FollowedToken, part: str, rows: Sequence[int], *, keys: Sequence[int]) -> dict[str, Any]:
    """Return an attention of the open block between shown tokens, (heads, rows, keys); masked scores are None."""
    module, inputs = getattr(token.block, part), token.attention_inputs(part)
    id, scores = f"{token.name}.{token.opened}.{part}", _masked_scores(module, inputs)
    if isinstance(module, GlobalAttention):
        scores = scores.clone()
        for row in rows:
            scores[:, row] = _masked_scores(module, token.attention_inputs(part, row))[:, row]
    q, k, v = (each[0].float() for each in inputs.rotated)
    weights = token.captured[f"{id}.probabilities"][0]
    return {
        "q": rounded(q[:, rows]),
        "k": rounded(k[:, keys]),
        "v": rounded(v[:, keys]),
        "scale": rounded(module.scale),
        "scores": rounded(scores[:, rows][..., keys]),
        "weights": rounded(weights[:, rows][..., keys]),
        "outputs": rounded(token.at(f"{id}.heads").view(module.heads, module.d_v)),
        "read": rounded(token.sublayer_read(part)),
        "added": rounded(token.sublayer_output(part, token.opened)),
    }


def _has_neurons(block: Any) -> bool:
    """Return whether a block has one feed-forward layer, whose neurons are drawn; a mixture has `_experts`."""
    return isinstance(block.feedforward, feedforward.Plain | feedforward.Gated)


def _feedforward(token: FollowedToken) -> dict[str, Any]:
    """Return all neurons of the open block, and the weights of those that are farthest from zero."""
    id, module = f"{token.name}.{token.opened}.feedforward", token.block.feedforward
    gated = isinstance(module, feedforward.Gated)
    up, read = module.gate_up if gated else module.up, token.sublayer_read("feedforward")
    hidden, before = token.at(f"{id}.hidden"), token.at(f"{id}.{'gate_up' if gated else 'up'}")
    result = {"read": rounded(read), "hidden": rounded(hidden), "before": rounded(before[: len(hidden)])}
    result |= {"factors": rounded(before[len(hidden) :]) if gated else None, "activation": _activation(token)}
    result["added"] = rounded(token.sublayer_output("feedforward", token.opened))
    if type(up) is Linear and type(module.down) is Linear:  # a low-rank adapter has no single row
        count = min(len(hidden), max(MIN_NEURONS, MAX_OPERANDS // len(read)))
        units = hidden.abs().topk(count).indices
        result |= {"units": units.tolist(), "up": rounded(up.weight[units])}
        result |= {"bias": None if up.bias is None else rounded(up.bias[units])}
        result["down"] = rounded(module.down.weight[:, units].T)
    return result


def _experts(token: FollowedToken) -> dict[str, Any]:
    """Return the router's probabilities (experts,), the chosen experts with their weights and weighted outputs (chosen,
    width), and the output of the shared layer, if there is one, with its weight."""
    id, module = f"{token.name}.{token.opened}.feedforward", token.block.feedforward
    logits, read = token.at(f"{id}.router"), token.sublayer_read("feedforward")
    experts, weights = module.router.choose(logits)
    x = read.to(token.captured[id].dtype)
    outputs = module.mix(x.expand(len(experts), -1), Choice(experts[:, None], weights[:, None])).float()
    result: dict[str, Any] = {"probabilities": rounded(module.router.probabilities(logits)), "shared": None}
    result |= {"chosen": experts.tolist(), "weights": rounded(weights), "outputs": rounded(outputs)}
    if module.shared is not None:
        weight = 1.0 if module.shared_gate is None else float(module.shared_gate(x).sigmoid())
        result["shared"] = {"weight": weight, "output": rounded(token.at(id) - outputs.sum(0))}
    return result


def _activation(token: FollowedToken) -> str:
    return token.model.config.feedforward.activation
