"""DeBERTa (He et al. 2021, 2023): disentangled attention between contents and distances, whose embeddings all layers
share. v2 and v3 project distances by the weights of the tokens, v1 by separate ones."""

from dataclasses import replace

from weft.config import Tree
from weft.interop.families.base import TABLES, encoder_head
from weft.interop.families.bert import BERT_MLM, BODY, FIXED, QKV, embeddings, family, layers, usual_heads
from weft.interop.settings import MAX_SIZE, Flat, Settings, shown
from weft.interop.table import Special, constant, even_heads, without
from weft.interop.weight_map import Rules, grouped, module, tensor
from weft.models.config import Encoder

BOTH = ("c2p", "p2c")


def _read_distances(settings: Settings, model: Flat) -> Flat:
    if not settings.flag("relative_attention", False):
        raise settings.error("relative_attention", "weft has only True")
    kinds = settings.get("pos_att_type", [])
    kinds = [kind.strip() for kind in kinds.lower().split("|")] if isinstance(kinds, str) else kinds
    if kinds not in (list(BOTH), list(BOTH[::-1])):
        raise settings.error("pos_att_type", "weft has only both kinds, c2p and p2c")
    farthest = settings.get("max_relative_positions", -1)
    if not isinstance(farthest, int) or isinstance(farthest, bool) or farthest < 1:
        farthest = model["context"]
    farthest = min(farthest, MAX_SIZE)
    buckets = settings.get("position_buckets", -1)
    if not isinstance(buckets, int) or 0 < buckets < 4:
        raise settings.error("position_buckets", "weft needs 4 buckets of distances or more")
    logarithmic = buckets > 0
    if not logarithmic and farthest < 4:
        raise settings.error("max_relative_positions", "weft needs 4 distances or more")
    if logarithmic and farthest - 1 <= buckets // 2:
        why = f"with position_buckets = {shown(buckets)}, every distance has a separate bucket"
        raise settings.error("max_relative_positions", why)
    norm = settings.get("norm_rel_ebd", "none")
    if not isinstance(norm, str):
        raise settings.error("norm_rel_ebd", "expected 'layer_norm' or 'none'")
    return {
        "attention.scale": (3 * even_heads(model)) ** -0.5,
        "position.buckets": settings.integer("position_buckets") if logarithmic else farthest,
        "position.max_distance": farthest,
        "position.logarithmic": logarithmic,
        "position.norm_eps": model["norm.eps"] if "layer_norm" in norm.lower() else None,
    }


def _write_distances(model: Flat) -> Tree:
    return {
        "relative_attention": True,
        "pos_att_type": list(BOTH),
        "position_buckets": model.get("position.buckets") if model.get("position.logarithmic") else -1,
        "max_relative_positions": model.get("position.max_distance", -1),
        "norm_rel_ebd": "none" if model.get("position.norm_eps") is None else "layer_norm",
        "share_att_key": True,
        "position_biased_input": False,
    }


DEBERTA_DROPOUTS = {"sequence": ("cls_dropout", "hidden_dropout_prob"), "token": ("hidden_dropout_prob",)}
SEGMENTS = Special(
    lambda settings, model: {
        "segments": 0 if settings.get("type_vocab_size", 0) == 0 else settings.integer("type_vocab_size")
    },
    lambda model: {"type_vocab_size": model.get("segments", 0)},
)
DEBERTA_V2_LAYERS = layers("deberta.encoder.layer.{layer}", tuple(f"attention.self.{part}_proj" for part in QKV))
DEBERTA_V2_BODY = (
    *(rule for rule in embeddings("deberta.embeddings") if ".position." not in rule.ours),
    tensor("encoder.position.weight", "deberta.encoder.rel_embeddings.weight"),
    *module("encoder.position.norm", "deberta.encoder.LayerNorm"),
    *DEBERTA_V2_LAYERS,
)
DEBERTA_V2 = family(
    ("deberta-v2", "DeBERTa v2", "DebertaV2"),
    (
        *without(BODY, "segments"),
        SEGMENTS,
        Special(_read_distances, _write_distances),
        constant("pooler_hidden_act", "gelu"),
        encoder_head("gelu", DEBERTA_DROPOUTS),
    ),
    fixed={**FIXED, "position.kind": "disentangled"},
    only=TABLES["only"]["deberta-v2"],
    defaults=TABLES["defaults"]["deberta-v2"],
    body=DEBERTA_V2_BODY,
    heads=usual_heads(BERT_MLM, "pooler.dense"),
    root="deberta",
    unused=(r"(cls|lm_predictions|mask_predictions|pooler)\..*", r"deberta\.embeddings\.position_embeddings\..*"),
)


def _deberta_body(model: Encoder) -> Rules:
    """Rules of DeBERTa v1, whose queries, keys and values are stored head by head, with no bias of keys."""
    own, layer = "encoder.blocks.{layer}.attention", "deberta.encoder.layer.{layer}.attention.self"
    heads = grouped(model.attention.heads, model.d_head)
    return (
        *DEBERTA_V2_BODY[: -len(DEBERTA_V2_LAYERS)],
        *(rule for rule in DEBERTA_V2_LAYERS if ".qkv." not in rule.ours),
        tensor(f"{own}.qkv.weight", f"{layer}.in_proj.weight", layout=heads),
        tensor(f"{own}.qkv.bias", f"{layer}.q_bias", "", f"{layer}.v_bias"),
        tensor(f"{own}.distance_keys", f"{layer}.pos_proj.weight"),
        tensor(f"{own}.distance_queries", f"{layer}.pos_q_proj.weight"),
        tensor(f"{own}.distance_bias", f"{layer}.pos_q_proj.bias"),
    )


def _read_single_distances(settings: Settings, model: Flat) -> Flat:
    """Every distance of v1 has a bucket, and keys of logarithmic buckets and of a norm have no effect."""
    ignored = ("position_buckets", "norm_rel_ebd")
    tree = {key: value for key, value in settings.tree.items() if key not in ignored}
    return _read_distances(replace(settings, tree=tree), model)


DEBERTA = replace(
    DEBERTA_V2,
    names=("deberta", "DeBERTa", "Deberta"),
    rows=(
        *without(BODY, "segments"),
        SEGMENTS,
        Special(_read_single_distances, _write_distances),
        constant("pooler_hidden_act", "gelu"),
        encoder_head("gelu", DEBERTA_DROPOUTS),
    ),
    fixed={**DEBERTA_V2.fixed, "position.separate": True},
    only=TABLES["only"]["deberta"],
    defaults={"position_biased_input": True, "layer_norm_eps": 1e-7},
    body=_deberta_body,
)


FAMILIES = (DEBERTA_V2, DEBERTA)
