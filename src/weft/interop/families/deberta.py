"""DeBERTa v2 and v3 (He et al. 2021, 2023): a BERT whose attention compares contents with distances and the other way
round, by vectors of distances that all layers share."""

from weft.config import Tree
from weft.interop.families.bert import BERT_WORDS, BODY, FIXED, OTHERS, embeddings, family, layers
from weft.interop.families.heads import encoder_head, pooled, words_head
from weft.interop.settings import Flat, Settings
from weft.interop.table import Special, constant, even_heads, without
from weft.interop.weight_map import module, tensor

BOTH = ("c2p", "p2c")


def _read_distances(settings: Settings, model: Flat) -> Flat:
    """What is compared with what, and how distances are counted."""
    if not settings.flag("relative_attention", False):
        raise settings.refusal("relative_attention", "weft has only True")
    given = settings.get("pos_att_type", [])
    kinds = [kind.strip() for kind in given.lower().split("|")] if isinstance(given, str) else given
    if kinds not in (list(BOTH), list(BOTH[::-1])):
        raise settings.refusal("pos_att_type", "weft compares contents with distances both ways, c2p and p2c")
    buckets = settings.get("position_buckets", -1)
    if not isinstance(buckets, int) or buckets < 4:
        raise settings.refusal("position_buckets", "weft counts distances in buckets, 4 or more on either side")
    farthest = settings.get("max_relative_positions", -1)
    if not isinstance(farthest, int) or isinstance(farthest, bool) or farthest < 1:
        farthest = model["context"]
    normed = settings.get("norm_rel_ebd", "none")
    if not isinstance(normed, str):
        raise settings.refusal("norm_rel_ebd", "expected 'layer_norm' or 'none'")
    return {
        "attention.scale": (3 * even_heads(model)) ** -0.5,
        "position.buckets": settings.whole("position_buckets"),
        "position.max_distance": farthest,
        "position.norm_eps": model["norm.eps"] if "layer_norm" in normed.lower() else None,
    }


def _write_distances(model: Flat) -> Tree:
    normed = model.get("position.norm_eps") is not None
    return {
        "relative_attention": True,
        "pos_att_type": list(BOTH),
        "position_buckets": model.get("position.buckets"),
        "max_relative_positions": model.get("position.max_distance", -1),
        "norm_rel_ebd": "layer_norm" if normed else "none",
        "share_att_key": True,
        "position_biased_input": False,
    }


DROPOUTS = {"sequence": ("cls_dropout", "hidden_dropout_prob"), "token": ("hidden_dropout_prob",)}
SEGMENTS = Special(
    lambda settings, model: {
        "segments": 0 if settings.get("type_vocab_size", 0) == 0 else settings.whole("type_vocab_size")
    },
    lambda model: {"type_vocab_size": model.get("segments", 0)},
)
ONLY = {
    "is_decoder": False, "add_cross_attention": False, "share_att_key": True, "position_biased_input": False,
    "conv_kernel_size": 0, "pooler_hidden_act": "gelu", "legacy": True,
}  # fmt: skip
DEFAULTS = {
    "hidden_size": 1536, "num_hidden_layers": 24, "num_attention_heads": 24, "intermediate_size": 6144,
    "layer_norm_eps": 1e-7,
    # what transformers takes, and weft does not have
    "share_att_key": False, "position_biased_input": True,
}  # fmt: skip
DEBERTA_V2 = family(
    ("deberta-v2", "DeBERTa v2", "DebertaV2"),
    (
        *without(BODY, "segments"),
        SEGMENTS,
        Special(_read_distances, _write_distances),
        constant("pooler_hidden_act", "gelu"),
        encoder_head("gelu", DROPOUTS),
    ),
    fixed={**FIXED, "position.kind": "disentangled"},
    only=ONLY,
    defaults=DEFAULTS,
    body=(
        *(rule for rule in embeddings("deberta.embeddings") if ".position." not in rule.ours),
        tensor("encoder.position.weight", "deberta.encoder.rel_embeddings.weight"),
        *module("encoder.position.norm", "deberta.encoder.LayerNorm"),
        *layers(
            "deberta.encoder.layer.{layer}", tuple(f"attention.self.{part}_proj" for part in ("query", "key", "value"))
        ),
    ),
    heads={
        "mlm": words_head("output", *BERT_WORDS),
        "sequence": pooled("output", "pooler.dense", "classifier"),
        **OTHERS,
    },
    root="deberta",
    unused=(r"(cls|lm_predictions|mask_predictions|pooler)\..*", r"deberta\.embeddings\.position_embeddings\..*"),
)
