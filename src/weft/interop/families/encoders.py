"""Encoders with parts of later decoders, and encoders of proteins.

EuroBERT (Boizard et al. 2025) is LLaMA's stack read in both directions; NomicBERT (Nussbaum et al. 2024) is BERT with
rotary positions and a gated feed-forward layer. ESM-1b and ESM-2 (Rives et al. 2021; Lin et al. 2023) read amino acids,
with learned or rotary positions in pre-norm blocks; they scale embeddings by the fraction of tokens that are masked.
"""

from weft.config import Tree
from weft.interop.families import positions
from weft.interop.families.base import GATED, POST_NORM, count_labels, encoder_head, in_stack, write_labels
from weft.interop.families.bert import BERT_DROPOUTS, BODY, embeddings, family, usual_heads
from weft.interop.families.llama import ACTIVATION, ATTENTION_BIAS, EPS, FEEDFORWARD_BIAS, NAMES, SIZES, WIDTH
from weft.interop.settings import Flat, Settings
from weft.interop.table import Special
from weft.interop.weight_map import block, module

# our pooling, and whether it is after the dense layer
POOLING = {"bos": ("first", False), "mean": ("mean", False), "late": ("mean", True)}


def _read_head(settings: Settings, model: Flat) -> Flat:
    kind = model["head.kind"]
    if kind == "embedding":
        return {}
    if kind == "mlm":
        tied, bias = settings.flag("tie_word_embeddings", False), settings.flag("mlp_bias", False)
        return {"head.tied": tied, "head.dense": False, "head.bias": bias}
    head = {"head.labels": count_labels(settings), "head.dropout": 0.0}
    if kind == "token":
        return head
    pooling = settings.get("classifier_pooling", "late")
    if pooling not in tuple(POOLING):
        raise settings.error("classifier_pooling", f"weft has {', '.join(POOLING)}")
    ours, late = POOLING[pooling]
    return {**head, "head.activation": "gelu", "head.pooling": ours, "head.pooled_late": late}


def _write_head(model: Flat) -> Tree:
    pooling = model.get("head.pooling"), model.get("head.pooled_late")
    theirs = next((name for name, ours in POOLING.items() if ours == pooling), "late")
    return {"tie_word_embeddings": model.get("head.tied", False), "classifier_pooling": theirs, **write_labels(model)}


ROTARY = positions.rotary()
EUROBERT = family(
    ("eurobert", "EuroBERT", "EuroBert"),
    (*SIZES, WIDTH, EPS, ROTARY, ACTIVATION, ATTENTION_BIAS, FEEDFORWARD_BIAS, Special(_read_head, _write_head)),
    fixed=GATED,
    defaults={"max_position_embeddings": 8192, "rms_norm_eps": 1e-5},
    body=in_stack("encoder", NAMES),
    heads={
        "mlm": module("output", "lm_head"),
        "sequence": (*module("output.pooler.dense", "dense"), *module("output.out", "classifier")),
        "token": module("output.out", "classifier"),
        "embedding": (),
    },
    root="model",
)

NOMIC_LAYER = {
    "qkv": "attn.Wqkv", "out": "attn.out_proj", "norm": "norm1", "gate_up": ("mlp.fc12", "mlp.fc11"),
    "down": "mlp.fc2", "ff_norm": "norm2",
}  # fmt: skip
# names and values of keys in the first files, which came with code of their own
NOMIC_OLDER = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "intermediate_size": "n_inner", "max_position_embeddings": "n_positions", "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base", "hidden_dropout_prob": "resid_pdrop",
    "attention_probs_dropout_prob": "attn_pdrop",
}  # fmt: skip
NOMIC_ONLY = {
    "activation_function": "swiglu", "rotary_emb_fraction": 1.0, "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None, "scale_attn_weights": True,
} | dict.fromkeys((
    "causal", "prenorm", "parallel_block", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "rotary_emb_interleaved",
    "use_rms_norm", "is_decoder", "add_cross_attention", "scale_attn_by_inverse_layer_idx",
), False)  # fmt: skip
NOMIC_MLM = tuple(f"cls.predictions.{part}" for part in ("transform.dense", "transform.layer_norm", "decoder", "bias"))
NOMIC_HEADS = usual_heads(NOMIC_MLM, "nomic_bert.pooler.dense")
NOMIC_BERT = family(
    ("nomic_bert", "NomicBERT", "NomicBert"),
    (*BODY, WIDTH, positions.rotary(1000.0), encoder_head("tanh", BERT_DROPOUTS)),
    fixed={**POST_NORM, **GATED, "norm.kind": "layer", "attention.bias": "none", "embedding_norm": True},
    defaults={"vocab_size": 30528, "max_position_embeddings": 2048, "hidden_act": "silu"}
    | dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    only=NOMIC_ONLY,
    older=NOMIC_OLDER,
    body=(
        *(rule for rule in embeddings("nomic_bert.embeddings") if "norm" not in rule.ours),
        *module("encoder.embedding_norm", "nomic_bert.emb_ln"),
        *block("encoder", "nomic_bert.encoder.layers.{layer}", **NOMIC_LAYER),
    ),
    heads={kind: rules for kind, rules in NOMIC_HEADS.items() if kind != "span"},
    unused=(r"cls\.predictions\..*",),
    ids={"pad": 0},
)
FAMILIES = (EUROBERT, NOMIC_BERT)
