"""Mixtures of experts: each is a table of `experts.toml`, and its unusual settings are rows here."""

import math
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from weft.config import Tree, flat
from weft.interop.families import llama, positions, recent
from weft.interop.families.base import UNTIED, Family, decoder_head
from weft.interop.settings import Flat, Settings, layer_pattern, shown
from weft.interop.table import Key, Row, Special, biases, constant, follows, keys, repeats, switch, without
from weft.interop.weight_map import (
    EXPERTS_INTERLEAVED,
    EXPERTS_TRANSPOSED,
    ONE_ROW,
    SAME,
    Names,
    Rules,
    experts,
    tensor,
)

TABLES: Tree = tomllib.loads(Path(__file__).with_name("experts.toml").read_text(encoding="utf-8"))
ONE_BY_ONE = ["mlp.experts.{expert}", "gate_proj.weight", "up_proj.weight", "down_proj.weight"]
SIZES = without(llama.SIZES, "feedforward.d_ff")
LISTED = (("feedforward.experts", "num_experts"), ("feedforward.chosen", "moe_topk"))  # by Hunyuan, for each layer


def whole(settings: Settings, key: str, default: int) -> int:
    """Integer from 0 on."""
    value = settings.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise settings.error(key, "expected a whole number")
    return value


def dense_layers(
    read: Callable[[Settings, range], list[int]],
    write: Callable[[list[int], range], Tree],
    *,
    width: str = "intermediate_size",
) -> Special:
    """Row of the layers without experts, whose width has the key `width`."""

    def to_ours(settings: Settings, model: Flat) -> Flat:
        layers = read(settings, range(positions.depth(model)))
        if not layers:
            return {}
        inner = {"kind": "gated", "activation": model["feedforward.activation"]}
        inner["d_ff"] = settings.integer(width)
        settings_of_dense = {f"feedforward.dense.{name}": value for name, value in inner.items()}
        return {"feedforward.dense_layers": layers, **settings_of_dense}

    def to_theirs(model: Flat) -> Tree:
        d_ff = model.get("feedforward.dense.d_ff", model["feedforward.d_ff"])
        return {width: d_ff, **write(model.get("feedforward.dense_layers", []), range(model["layers"]))}

    return Special(to_ours, to_theirs)


def _read_some_dense(settings: Settings, layers: range) -> list[int]:
    """Qwen lists dense layers, and may have experts only in every n-th of the others."""
    listed, step = settings.get("mlp_only_layers", []), settings.integer("decoder_sparse_step", 1)
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise settings.error("mlp_only_layers", "expected a list of numbers of layers")
    return [layer for layer in layers if layer in listed or (layer + 1) % step]


def _read_ernie_dense(settings: Settings, layers: range) -> list[int]:
    first, step = whole(settings, "moe_layer_start_index", 1), settings.integer("moe_layer_interval", 1)
    last = settings.get("moe_layer_end_index", -1)
    if type(last) is not int:
        raise settings.error("moe_layer_end_index", "expected the number of a layer, or -1")
    last = len(layers) - 1 if last == -1 else last
    return [layer for layer in layers if (layer + 1) % step or not first <= layer <= last]


def write_ernie_dense(dense: list[int], layers: range) -> Tree:
    mixed = [layer for layer in layers if layer not in dense] or [len(layers)]
    step = next(
        (
            step
            for step in layers[1:]
            if all((layer + 1) % step == 0 for layer in mixed)
            and len(mixed) == len([n for n in layers[mixed[0] : mixed[-1] + 1] if (n + 1) % step == 0])
        ),
        1,
    )
    return {"moe_layer_start_index": mixed[0], "moe_layer_end_index": mixed[-1], "moe_layer_interval": step}


def _read_llama4_dense(settings: Settings, layers: range) -> list[int]:
    listed, step = settings.get("moe_layers"), settings.integer("interleave_moe_layer_step", 1)
    if listed is None:
        return [layer for layer in layers if (layer + 1) % step]
    if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
        raise settings.error("moe_layers", "expected a list of numbers of layers")
    return [layer for layer in layers if layer not in listed]


def _read_chunks(settings: Settings, model: Flat) -> Flat:
    """Some layers of Llama 4 see chunks of the text, and those without positions may scale their queries."""
    rotated = llama.rotated_layers(settings, model)
    chunk = settings.get("attention_chunk_size", 8192)
    if chunk is not None:
        chunk = settings.integer("attention_chunk_size", 8192)
    chunked = positions.layer_types(settings, model, rotated, narrow="chunked_attention")
    if any(chunked) and chunk is None:
        raise settings.error("attention_chunk_size", "layer_types has layers in chunks, which need a number")
    unrotated: Tree = {"kind": "none"}
    if settings.flag("attn_temperature_tuning", True):
        growth, interval = settings.number("attn_scale", 0.1), settings.integer("floor_scale", 8192)
        unrotated = {"kind": "tempered", "growth": growth, "interval": interval}
    kinds = [
        {"window": None, "chunk": chunk if narrow else None, "position": None if turned else unrotated}
        for narrow, turned in zip(chunked, rotated, strict=True)
    ]
    return layer_pattern(kinds)


def _write_chunks(model: Flat) -> Tree:
    kinds = positions.kinds_of(model)
    chunk = next((kind["chunk"] for kind in kinds if kind.get("chunk")), None)
    tempered = next((kind["position"] for kind in kinds if (kind["position"] or {}).get("kind") == "tempered"), None)
    return {
        "attention_chunk_size": chunk,
        "layer_types": [positions.FULL if not kind.get("chunk") else "chunked_attention" for kind in kinds],
        "no_rope_layers": [int(kind["position"] is None) for kind in kinds],
        "attn_temperature_tuning": tempered is not None,
        **({"attn_scale": tempered["growth"], "floor_scale": tempered["interval"]} if tempered else {}),
    }


def _read_qwen_window(settings: Settings, model: Flat) -> Flat:
    used, first = settings.flag("use_sliding_window", False), whole(settings, "max_window_layers", 28)
    usual = [used and layer % 2 == 0 and layer < first for layer in range(positions.depth(model))]
    windowed = positions.layer_types(settings, model, usual)
    if any(windowed) and not used:
        raise settings.error("use_sliding_window", "layer_types has layers with a window, which need true")
    return positions.with_windows(windowed, positions.window(settings, 4096)) if any(windowed) else {}


def _write_qwen_window(model: Flat) -> Tree:
    return {"use_sliding_window": any(positions.windows_of(model)), **positions.write_windows(model)}


def _read_one_window(settings: Settings, model: Flat) -> Flat:
    used = settings.flag("use_sliding_window", False)
    return {"attention.window": positions.window(settings, 4096) if used else None}


def _write_one_window(model: Flat) -> Tree:
    size = model["attention.window"]
    return {"use_sliding_window": size is not None, "sliding_window": size}


def shared_count(theirs: str, default: int) -> Special:
    """Row of the number of shared experts, which weft has as one layer; 0: none."""

    def read(settings: Settings, model: Flat) -> Flat:
        count = whole(settings, theirs, default)
        width = {"feedforward.shared": "added", "feedforward.shared_d_ff": count * model["feedforward.d_ff"]}
        return width if count else {}

    def write(model: Flat) -> Tree:
        return {theirs: (model.get("feedforward.shared_d_ff") or 0) // model["feedforward.d_ff"]}

    return Special(read, write)


def _read_equal(settings: Settings, model: Flat) -> Flat:
    """Hunyuan may list a number for each layer; weft has one for all of them."""
    found = {}
    for ours, theirs in LISTED:
        values = settings.get(theirs, 1)
        values = values if isinstance(values, list) and values else [values]
        if any(value != values[0] for value in values):
            raise settings.error(theirs, "weft has one number for all layers")
        one = replace(settings, tree={settings.prefix + theirs: values[0]})
        found[ours] = one.integer(theirs)
    return found


def _read_rotary_dim(settings: Settings, model: Flat) -> Flat:
    """Older files of MiniMax have the number of rotated coordinates instead of their part."""
    table, _ = positions.table_of(settings)
    if settings.get("rotary_dim") is None or "partial_rotary_factor" in {**settings.tree, **table}:
        return {}
    return {"position.fraction": settings.integer("rotary_dim") / model["attention.d_head"]}


def _read_phi_rotary(settings: Settings, model: Flat) -> Flat:
    """PhiMoE's factors of queries and keys are one for short and one for long texts; weft has one."""
    table, key = positions.table_of(settings)
    rope, found = Settings(table, f"{settings.location}: {key}"), PHI_ROTARY.read(settings, model)
    if "position.scaling.kind" not in found:
        return found
    if found["position.scaling.kind"] != "longrope":
        raise rope.error("rope_type", "weft scales the positions of this family by longrope")
    short, long = rope.positive("short_mscale"), rope.positive("long_mscale")
    if short != long:
        raise rope.error("long_mscale", f"weft has one factor for all texts, and short_mscale = {shown(short)}")
    return found | {"position.scaling.attention_factor": short}


def _write_phi_rotary(model: Flat) -> Tree:
    tree = PHI_ROTARY.write(model)
    if model.get("position.scaling.kind") == "longrope":
        tree["rope_scaling"] |= dict.fromkeys(("short_mscale", "long_mscale"), tree["rope_scaling"]["attention_factor"])
    return tree


def groups(count: str, kept: str) -> tuple[Key, Key]:
    """Rows of the number of groups of experts, and of those that a token chooses from."""
    return (
        Key("feedforward.groups", count, 1, kind="integer"),
        Key("feedforward.kept_groups", kept, 1, kind="integer", to_theirs=lambda kept, model: kept or 1),
    )


def _read_latent(settings: Settings, model: Flat) -> Flat:
    rotated, kept = settings.integer("qk_rope_head_dim"), settings.integer("qk_nope_head_dim")
    settings.repeats("head_dim", rotated, "qk_rope_head_dim")
    d_v, d_head = settings.integer("v_head_dim"), rotated + kept
    sizes = {"attention.d_head": d_head, "attention.d_v": None if d_v == d_head else d_v}
    sizes["attention.latent.rank"] = settings.integer("kv_lora_rank")
    ranked = settings.tree.get("q_lora_rank") is not None
    sizes["attention.latent.query_rank"] = settings.integer("q_lora_rank") if ranked else None
    return sizes | {"position.fraction": rotated / d_head}


def write_latent(model: Flat) -> Tree:
    """Sizes of latent attention, under DeepSeek's keys."""
    d_head, rank = model["attention.d_head"], model.get("attention.latent.rank")
    rotated = round(d_head * model.get("position.fraction", 1.0))
    sizes = {"kv_lora_rank": rank, "q_lora_rank": model.get("attention.latent.query_rank")}
    sizes |= {"qk_rope_head_dim": rotated, "qk_nope_head_dim": d_head - rotated}
    return sizes | {"v_head_dim": model["attention.d_v"] or d_head}


def stretched_scale(all_dims: float, factor: float, model: Flat) -> float:
    """DeepSeek's factor of scores, which includes the square of a factor that grows with the stretch of positions."""
    growth = 0.1 * all_dims * math.log(max(1.0, factor)) + 1.0
    return float(model["attention.d_head"] ** -0.5 * growth**2)


def mscale_all_dim(model: Flat) -> float:
    """The setting of `stretched_scale`, `all_dims`, of which a model's factor of scores is the result."""
    growth = (model["attention.scale"] * model["attention.d_head"] ** 0.5) ** 0.5
    factor = model.get("position.scaling.factor") or 1.0
    return round((growth - 1.0) / (0.1 * math.log(factor)), 9) if factor > 1 else 0.0


def _read_scale(settings: Settings, model: Flat) -> Flat:
    table, key = positions.table_of(settings)
    rope, found = Settings(table, f"{settings.location}: {key}"), ROTARY.read(settings, model)
    all_dims = rope.number("mscale_all_dim", 0.0) if "position.scaling.kind" in found else 0.0
    if not all_dims:
        return found
    return found | {"attention.scale": stretched_scale(all_dims, rope.positive("factor"), model)}


def _write_scale(model: Flat) -> Tree:
    tree, all_dims = ROTARY.write(model), mscale_all_dim(model)
    if tree.get("rope_scaling") and all_dims:
        tree["rope_scaling"]["mscale_all_dim"] = all_dims
    return tree


def _read_pairs(settings: Settings, model: Flat) -> Flat:
    adjacent = settings.flag("rope_interleave", "rope_interleave" not in settings.tree)  # null is false
    return {"position.pairs": "adjacent" if adjacent else "halves"}


def _read_best_groups(settings: Settings, model: Flat) -> Flat:
    method = settings.text("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise settings.error("topk_method", "weft has greedy and group_limited_greedy")
    if method == "greedy":
        return {}
    groups, kept = settings.integer("n_group"), settings.integer("topk_group")
    return {"feedforward.groups": groups, "feedforward.kept_groups": kept, "feedforward.group_score": "maximum"}


def _write_best_groups(model: Flat) -> Tree:
    groups, kept = model.get("feedforward.groups", 1), model.get("feedforward.kept_groups")
    method = "greedy" if kept is None else "group_limited_greedy"
    return {"topk_method": method, "n_group": groups, "topk_group": kept or 1}


def _read_qk_eps(settings: Settings, model: Flat) -> Flat:
    return llama.QK_EPS.read(settings, model) if "attention.qk_norm.kind" in model else {}


ROTARY = positions.rotary()
PHI_ROTARY = positions.rotary(1e6)
# modules of latent attention, and those of queries if they are projected twice
LATENT: dict[str, Names] = {
    "qkv": None, "q_norm": None, "k_norm": None, "kv_down": "self_attn.kv_a_proj_with_mqa",
    "kv_latent_norm": "self_attn.kv_a_layernorm", "kv_up": "self_attn.kv_b_proj",
}  # fmt: skip
QUERY_RANK: dict[str, Names] = {
    "q_down": "self_attn.q_a_proj", "q_latent_norm": "self_attn.q_a_layernorm", "q_up": "self_attn.q_b_proj",
}  # fmt: skip
QK_NORM = {"attention.qk_norm.kind": "rms"}
USUAL: tuple[Row, ...] = (llama.WIDTH, llama.EPS, llama.HEAD, llama.ACTIVATION)
LM_HEAD_BIAS = Key("head.bias", "lm_head_bias", False, kind="flag")
# name in experts.toml → rows
ROWS: dict[str, tuple[Row, ...]] = {
    **recent.ROWS,
    "sizes": (*SIZES, *USUAL),
    "sizes_only": (*SIZES, llama.WIDTH, llama.EPS, llama.HEAD),
    "phimoe": (*SIZES, llama.WIDTH, llama.EPS, decoder_head(UNTIED, LM_HEAD_BIAS), llama.ACTIVATION),
    "phimoe_rotary": (Special(_read_phi_rotary, _write_phi_rotary),),
    "qkv_biases": (biases("qkv_bias", True, "qkv"),),
    "qwen_moe_window": (Special(_read_qwen_window, _write_qwen_window),),
    "window_if_used": (Special(_read_one_window, _write_one_window),),
    "some_dense": (
        dense_layers(_read_some_dense, lambda dense, _: {"mlp_only_layers": dense, "decoder_sparse_step": 1}),
    ),
    "first_dense": (
        dense_layers(
            lambda settings, layers: list(layers[: whole(settings, "first_k_dense_replace", 0)]),
            lambda dense, layers: {"first_k_dense_replace": len(dense)},
        ),
    ),
    "llama4_dense": (
        dense_layers(
            _read_llama4_dense,
            lambda dense, layers: {"moe_layers": [layer for layer in layers if layer not in dense]},
            width="intermediate_size_mlp",
        ),
    ),
    "chunks": (Special(_read_chunks, _write_chunks),),
    "ernie_dense": (dense_layers(_read_ernie_dense, write_ernie_dense),),
    "ernie_shared": (shared_count("moe_num_shared_experts", 2),),
    "equal_experts": (Special(_read_equal, lambda model: {theirs: model.get(ours) for ours, theirs in LISTED}),),
    "equal_shared": (follows("feedforward.shared_d_ff", "feedforward.d_ff"),),
    "shared_experts": (
        Key(
            "feedforward.shared_d_ff",
            "n_shared_experts",
            kind="integer",
            to_ours=lambda count, model: count * model["feedforward.d_ff"],
            to_theirs=lambda total, model: (total or 0) // model["feedforward.d_ff"],
        ),
    ),
    "groups": groups("n_group", "topk_group"),
    "qk_norm_without_gain": (
        switch(
            "use_qk_norm",
            True,
            on={**QK_NORM, "attention.qk_norm.gain": False, "attention.qk_norm_rotated": True},
            off={},
        ),
        Special(_read_qk_eps),
    ),
    "optional_qk_norm": (
        switch("use_qk_norm", False, on=QK_NORM, off={}),
        Special(_read_qk_eps),
    ),
    "two_chosen": (constant("num_experts_per_tok", 2),),
    "latent_sizes": (
        *without(SIZES, "attention.kv_heads"),
        *(llama.EPS, llama.HEAD, llama.ACTIVATION),
        repeats("num_key_value_heads", "attention.heads", "num_attention_heads"),
        Special(_read_latent, write_latent),
    ),
    "latent_rotary": (Special(_read_scale, _write_scale),),
    "interleaved": (
        Special(_read_pairs, lambda model: {"rope_interleave": model.get("position.pairs") == "adjacent"}),
    ),
    "best_groups": (Special(_read_best_groups, _write_best_groups),),
    "rotary_dim": (Special(_read_rotary_dim),),
}


def _rules(table: Tree, **more: Names) -> Rules:
    modules: dict[str, Any] = {**table.get("modules", {}), **more}
    start, *gate_up, down = table.get("experts", ONE_BY_ONE)
    gates = EXPERTS_INTERLEAVED if table.get("interleaved") else EXPERTS_TRANSPOSED
    layouts = (gates, EXPERTS_TRANSPOSED) if table.get("transposed") else (SAME, SAME)
    rules = (
        *llama.names(**modules),
        *experts(f"model.layers.{{layer}}.{start}", tuple(gate_up), down, layouts=layouts),
    )
    rules += (tensor("decoder.blocks.{layer}.attention.sinks", "model.layers.{layer}.self_attn.sinks"),)
    if "choice_bias" not in table:
        return rules
    name, layout = f"model.layers.{{layer}}.{table['choice_bias']}", ONE_ROW if table.get("choice_bias_row") else SAME
    return (*rules, tensor("decoder.blocks.{layer}.feedforward.router.choice_bias", name, layout=layout))


def _body(table: Tree) -> Rules | Callable[[Any], Rules]:
    if not table.get("latent"):
        return llama.by_head(_rules(table)) if table.get("old_root") else _rules(table)
    short, ranked = _rules(table, **LATENT, q_up="self_attn.q_proj"), _rules(table, **LATENT, **QUERY_RANK)
    return lambda model: ranked if model.attention.latent and model.attention.latent.query_rank else short


def _family(kind: str, table: Tree) -> Family:
    options: dict[str, Any] = {key: table.get(key) for key in ("fraction", "default", "original")}
    rows = {**ROWS, "rotary": (positions.rotary(table.get("base", 10000.0), **options),)}
    title, classes = table["names"]
    family = llama.family(
        (kind, title, classes),
        (*keys(**table["keys"]), *(row for name in table["rows"] for row in rows[name])),
        tuple(table.get("without", ())),
        body=_body(table),
        fixed={"feedforward.kind": "experts", "feedforward.balance_loss": 0.0, **flat(table.get("fixed", {}))},
        only={**table.get("only", {}), **dict.fromkeys(table.get("null", ()))},
        classes=table.get("classes", {}),
        defaults=table.get("defaults", {}),
        older=table.get("older", {}),
    )
    return replace(family, unused=(*family.unused, *table.get("unused", ())))


FAMILIES = tuple(_family(kind, table) for kind, table in TABLES.items())
