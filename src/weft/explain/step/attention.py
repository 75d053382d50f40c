"""Stages of one attention of a Transformer: queries, keys, scores, mask, softmax, mix of values, projection."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import counted
from weft.explain.anatomy.parts import with_bias
from weft.explain.step.passing import AttentionInputs, FollowedToken
from weft.explain.step.stage import cost, linear_cost, sent
from weft.nn.attention import CrossAttention, Heads, LatentAttention, RelativeAttention, ScoredAttention
from weft.nn.attention_paths import Scoring
from weft.nn.mask import Mask
from weft.nn.scaled_dot_product import masked_softmax, reference_attention

HIDDEN_BY = {"future": "the causal mask", "window": "the attention window", "chunk": "the beginning of the chunk"}


def attention_stages(token: FollowedToken, part: str, *, read: str, source: str | None) -> None:
    """Record an attention of the opened layer; `read` is the stage of its input, `source` that of the source's."""
    stages, module, qkv = token.stages, getattr(token.block, part), token.attention_inputs(part)
    id, position, keys = f"{token.name}.{token.opened}.{part}", token.position, ("key", qkv.keys)
    *inputs, values = _projection_stages(token, part, qkv, read=read, source=source or read)
    if qkv.mask.angles is not None and part == "attention":
        cos, sin = (each[0, 0, position] for each in qkv.mask.angles)
        rotated = [sent("queries, rotated", qkv.rotated.q[0, :, position], "head", "coordinate")]
        rotated.append(sent("keys, rotated", qkv.rotated.k[0], "head", keys, "coordinate"))
        angles = [sent("cos θ", cos, "pair"), sent("sin θ", sin, "pair")]
        sizes, rotate = {"position": position, "pairs": len(cos)}, type(qkv.mask.position).rotate
        inputs = [stages.record(f"{id}.rotary", *rotated, *angles, numbers=sizes, inputs=inputs, by=rotate)]
    scores = module.scores(qkv.rotated, qkv.mask)[0, :, position]
    _scores_stage(token, part, scores, keys=qkv.keys, inputs=inputs)
    _mask_stages(token, id, scores, qkv=qkv)
    probabilities = token.captured[f"{id}.probabilities"][0, :, position]
    softmax = sent("probabilities", probabilities, "head", keys, scale="probability")
    sinks = [] if module.sinks is None else [sent("sinks, scores of no key", module.sinks, "head")]
    softmax_id = stages.record(f"{id}.softmax", softmax, *sinks, by=masked_softmax, cost=cost(0, module.sinks))
    H, d_v, relative = module.heads, module.d_v, isinstance(module, RelativeAttention)
    stages.record(
        f"{id}.mix",
        sent("heads", token.at(f"{id}.heads").view(H, d_v), "head", "coordinate"),
        text="relative-mix" if relative else "mix",
        numbers={"heads": H, "d_head" if d_v == module.d_head else "d_v": d_v},
        inputs=(softmax_id, values),
        by=type(module).mix if isinstance(module, ScoredAttention) else reference_attention,
        cost=cost(2 * H * d_v * len(qkv.keys), module.relative_values if relative else None),
    )
    output, words = sent("attention", token.at(id), "coordinate"), {"last": H - 1, "bias": with_bias(module.out)}
    stages.record(f"{id}.out", output, text="heads-mixed", words=words, by=Heads.attend, cost=linear_cost(module.out))


def _projection_stages(token: FollowedToken, part: str, qkv: AttentionInputs, *, read: str, source: str) -> list[str]:
    """Record the position's queries and all keys and values; return the ids of the three stages."""
    module: Any = getattr(token.block, part)
    cross, (q, k, v), keys = isinstance(module, CrossAttention), qkv.plain, ("key", qkv.keys)
    H, G, d_head = module.heads, module.kv_heads, module.d_head
    clipped = "" if module.clip is None else f", clipped to ±{module.clip:g}"
    normalised = "" if module.q_norm is None else ", normalised"
    latent = isinstance(module, LatentAttention)
    linear = module.q if cross else module.q_up if latent else module.qkv
    project = CrossAttention.forward if cross else type(module).project
    words = {"bias": with_bias(linear), "made": clipped + normalised, "read": "The source" if cross else "Every token"}
    id, tensor = f"{token.name}.{token.opened}.{part}", sent("queries", q[0, :, token.position], "head", "coordinate")
    key_values = module.kv if cross else module.kv_up if latent else linear
    sizes = {"keys": module.kept if latent else d_head, "values": v.shape[-1]}
    weights = _part_cost(linear, linear.in_features * H * d_head)
    if latent and module.query_rank is not None:
        weights = _added(weights, linear_cost(module.q_down))
    numbers, inputs = {"heads": H, "d_head": d_head}, (read,)
    record = token.stages.record
    ids = [record(f"{id}.queries", tensor, numbers=numbers, words=words, inputs=inputs, by=project, cost=weights)]
    shared = "" if H == G else f", each shared by {H // G} heads of queries"
    for name, x, after in (("keys", k, clipped + normalised), ("values", v, clipped)):
        width, spent = x.shape[-1], _part_cost(key_values, key_values.in_features * G * sizes[name])
        spent = _added(spent, linear_cost(module.kv_down)) if latent and name == "keys" else spent
        stage = record(
            f"{id}.{name}",
            sent(name, x[0], "head", keys, "coordinate"),
            numbers={"kv_heads": G, "d_head" if width == d_head else "d_v": width, "keys": len(qkv.keys)},
            words=words | {"made": shared + after},
            inputs=(source if cross else read,),
            by=CrossAttention.keys_values if cross else project,
            cost=spent,
        )
        ids.append(stage)
    return ids


def _part_cost(linear: Any, weights: int) -> dict[str, int]:
    """Return the cost of this many weights of a larger matrix, with their share of the bias."""
    stored = weights + (0 if linear.bias is None else weights // linear.in_features)
    return {"flops": 2 * weights, "parameters": stored, "bytes": stored * linear.weight.element_size()}


def _added(first: dict[str, int], second: dict[str, int]) -> dict[str, int]:
    return {key: value + second[key] for key, value in first.items()}


def _scores_stage(token: FollowedToken, part: str, scores: Tensor, *, keys: Sequence[str], inputs: list[str]) -> None:
    module: Any = getattr(token.block, part)
    H, d_head, scored = module.heads, module.d_head, isinstance(module, ScoredAttention)
    root = math.isclose(module.scale, d_head**-0.5)
    formula = ("(Q Kᵀ + distances)" if scored else "Q Kᵀ") + (" / √d_head" if root else " · scale")
    more = ", and with their distances" * scored
    numbers: dict[str, float] = {"d_head": d_head, **({"√d_head": d_head**0.5} if root else {"scale": module.scale})}
    if module.softcap is not None:
        formula, more = f"c · tanh({formula} / c)", f"{more}; the cap c bounds the scores"
        numbers["c"] = module.softcap
    token.stages.record(
        f"{token.name}.{token.opened}.{part}.scores",
        sent("scores", scores, "head", ("key", keys)),
        numbers=numbers,
        words={"formula": formula, "more": more},
        inputs=inputs,
        by=type(module).scores if scored else Scoring.scores,
        cost=cost(2 * H * d_head * len(keys), getattr(module, "relative_keys", None)),
    )


def _mask_stages(token: FollowedToken, id: str, scores: Tensor, *, qkv: AttentionInputs) -> None:
    """Record the position bias, if any, and the masked scores."""
    position, keys = token.position, ("key", qkv.keys)
    mask, encoding = qkv.mask.mask, qkv.mask.position
    bias = encoding.local_bias(qkv.mask.queries[:, position : position + 1], qkv.mask.keys)
    if bias is not None:
        scores = scores + bias[0, :, 0]
        biased = [sent("scores with bias", scores, "head", keys), sent("bias", bias[0, :, 0], "head", keys)]
        token.stages.record(f"{id}.bias", *biased, by=type(encoding).bias, cost=cost(0, *encoding.parameters()))
    visible = mask.dense(slice(position, position + 1), slice(0, len(qkv.keys)), scores.device)[0, 0, 0]
    hidden = {"future": len(visible) - 1 - position if mask.causal else 0}
    hidden["window" if mask.chunks is None else "chunk"] = int((~visible).sum()) - hidden["future"]
    hidden = {why: count for why, count in hidden.items() if count}
    reasons = [
        f"{counted(n, 'key')} {'is' if n == 1 else 'are'} hidden by {HIDDEN_BY[why]}" for why, n in hidden.items()
    ]
    token.stages.record(
        f"{id}.mask",
        sent("scores, masked", scores.masked_fill(~visible, -torch.inf), "head", keys),
        sent("seen", visible, keys, scale="positive"),
        numbers={"keys": len(visible), "seen": int(visible.sum()), **hidden},
        words={"hidden": "; ".join(reasons) or "No key is hidden from this token"},
        by=Mask.visible,
    )
