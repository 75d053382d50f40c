"""One attention of a Transformer, stage by stage: queries, keys, scores, mask, softmax, mix of values, projection."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.errors import counted
from weft.explain.anatomy.parts import with_bias
from weft.explain.step.passing import Compared, Followed
from weft.explain.step.stage import Way, cost, products, shown
from weft.nn.attention import CrossAttention, Heads, RelativeAttention, ScoredAttention, SelfAttention
from weft.nn.attention_paths import Scoring
from weft.nn.mask import Mask
from weft.nn.scaled_dot_product import masked_softmax, reference_attention


@dataclass(frozen=True)
class _Opened:
    """An attention whose stages are being added: the beginning of their ids, and the place that is followed."""

    way: Way
    id: str
    module: Any
    compared: Compared
    place: int


def attention_stages(way: Way, followed: Followed, part: str, read: str, source: str | None) -> str:
    """Attention of the opened layer: `read` is the stage whose result it reads, `source` the one that gave a source."""
    module, compared = getattr(followed.block(followed.opened), part), followed.compared(part)
    id, place = f"{followed.name}.{followed.opened}.{part}", followed.place
    opened = _Opened(way, id, module, compared, place)
    queries, keys, values = _projected(opened, read, source or read)
    matched = [queries, keys]
    if compared.mask.angles is not None and part == "attention":
        matched = [_rotary(opened, matched)]
    scores = module.scores(compared.rotated, compared.mask)[0, :, place]
    _scores(opened, scores, matched)
    _mask(opened, scores)
    probabilities = followed.seen[f"{id}.probabilities"][0, :, place]
    way.add(
        f"{id}.softmax",
        "softmax",
        shown("probabilities", probabilities, "head", ("key", compared.keys), scale="probability"),
        by=masked_softmax,
    )
    H, d_head, relative = module.heads, module.d_head, isinstance(module, RelativeAttention)
    way.add(
        f"{id}.mix",
        "relative-mix" if relative else "mix",
        shown("heads", followed.at(f"{id}.heads").view(H, d_head), "head", "coordinate"),
        numbers={"heads": H, "d_head": d_head},
        inputs=(way.last, values),
        by=type(module).mix if isinstance(module, ScoredAttention) else reference_attention,
        cost=cost(2 * H * d_head * len(compared.keys), module.relative_values if relative else None),
    )
    return way.add(
        f"{id}.out",
        "heads-mixed",
        shown("attention", followed.at(id), "coordinate"),
        words={"heads": H, "bias": with_bias(module.out)},
        by=Heads.attend,
        cost=cost(products(module.out), module.out),
    )


def _projected(opened: _Opened, read: str, source: str) -> tuple[str, str, str]:
    """Queries of the token, keys and values of all that it may look at: the ids of these stages."""
    way, id, module, compared = opened.way, opened.id, opened.module, opened.compared
    cross, (q, k, v) = isinstance(module, CrossAttention), compared.plain
    H, G, d_head = module.heads, module.kv_heads, module.d_head
    linear = module.q if cross else module.qkv
    bound = "" if module.clip is None else f", cut off at ±{module.clip:g}"
    normed = "" if module.q_norm is None else ", normed"
    width, bias = linear.in_features, with_bias(linear)
    queries = way.add(
        f"{id}.queries",
        "queries",
        shown("queries", q[0, :, opened.place], "head", "coordinate"),
        numbers={"heads": H, "d_head": d_head},
        words={"made": bound + normed, "bias": bias},
        inputs=(read,),
        by=CrossAttention.forward if cross else SelfAttention.project,
        cost=_part_cost(linear, width * H * d_head),
    )
    made, shared = [queries], "" if H == G else f", each shared by {H // G} heads of queries"
    for what, x, after in (("keys", k, bound + normed), ("values", v, bound)):
        stage = way.add(
            f"{id}.{what}",
            what,
            shown(what, x[0], "head", ("key", compared.keys), "coordinate"),
            numbers={"kv_heads": G, "d_head": d_head, "keys": len(compared.keys)},
            words={"read": "The source" if cross else "Every token", "made": shared + after, "bias": bias},
            inputs=(source if cross else read,),
            by=CrossAttention.keys_values if cross else SelfAttention.project,
            cost=_part_cost(module.kv if cross else linear, width * G * d_head),
        )
        made.append(stage)
    return made[0], made[1], made[2]


def _part_cost(linear: Any, weights: int) -> dict[str, int]:
    """Of a matrix of so many weights that lies in a larger one, with its share of the bias."""
    stored = weights + (0 if linear.bias is None else weights // linear.in_features)
    return {"flops": 2 * weights, "parameters": stored, "bytes": stored * linear.weight.element_size()}


def _rotary(opened: _Opened, inputs: Sequence[str]) -> str:
    compared, place = opened.compared, opened.place
    assert compared.mask.angles is not None
    cos, sin = (each[0, 0, place] for each in compared.mask.angles)
    return opened.way.add(
        f"{opened.id}.rotary",
        "rotary",
        shown("queries, rotated", compared.rotated.q[0, :, place], "head", "coordinate"),
        shown("keys, rotated", compared.rotated.k[0], "head", ("key", compared.keys), "coordinate"),
        shown("cos θ", cos, "pair"),
        shown("sin θ", sin, "pair"),
        numbers={"position": place, "pairs": len(cos)},
        inputs=inputs,
        by=type(compared.mask.position).rotate,
    )


def _scores(opened: _Opened, scores: Tensor, inputs: Sequence[str]) -> None:
    module, keys = opened.module, opened.compared.keys
    H, d_head, scored = module.heads, module.d_head, isinstance(module, ScoredAttention)
    root = math.isclose(module.scale, d_head**-0.5)
    formula = ("(Q Kᵀ + distances)" if scored else "Q Kᵀ") + (" / √d_head" if root else " · scale")
    more = ", and with their distances" * scored
    numbers: dict[str, float] = {"d_head": d_head, **({"√d_head": d_head**0.5} if root else {"scale": module.scale})}
    if module.softcap is not None:
        formula, more = f"c · tanh({formula} / c)", f"{more}; no score passes the cap c"
        numbers["c"] = module.softcap
    opened.way.add(
        f"{opened.id}.scores",
        "scores",
        shown("scores", scores, "head", ("key", keys)),
        numbers=numbers,
        words={"formula": formula, "more": more},
        inputs=inputs,
        by=type(module).scores if scored else Scoring.scores,
        cost=cost(2 * H * d_head * len(keys), getattr(module, "relative_keys", None)),
    )


def _mask(opened: _Opened, scores: Tensor) -> None:
    """What positions add to the scores, and which keys are hidden."""
    way, id, place, compared = opened.way, opened.id, opened.place, opened.compared
    mask, axes = compared.mask, ("head", ("key", compared.keys))
    bias = mask.position.local_bias(mask.queries[:, place : place + 1], mask.keys)
    if bias is not None:
        scores = scores + bias[0, :, 0]
        way.add(
            f"{id}.bias",
            "bias",
            shown("scores with bias", scores, *axes),
            shown("bias", bias[0, :, 0], *axes),
            by=type(mask.position).bias,
            cost=cost(0, *mask.position.parameters()),
        )
    seen = mask.mask.dense(slice(place, place + 1), slice(0, len(compared.keys)), scores.device)[0, 0, 0]
    hidden = {"future": len(seen) - 1 - place if mask.mask.causal else 0}
    hidden["window"] = int((~seen).sum()) - hidden["future"]
    told = [
        f"{counted(count, 'key')} {'is' if count == 1 else 'are'} hidden, {_WHY[why]}"
        for why, count in hidden.items()
        if count
    ]
    way.add(
        f"{id}.mask",
        "mask",
        shown("scores, masked", scores.masked_fill(~seen, -torch.inf), *axes),
        shown("seen", seen, ("key", compared.keys), scale="positive"),
        numbers={"keys": len(seen), "seen": int(seen.sum()), **{why: n for why, n in hidden.items() if n}},
        words={"hidden": "; ".join(told) or "No key is hidden from this token"},
        by=Mask.visible,
    )


_WHY = {"future": "as what comes later", "window": "as what lies outside of the window"}
