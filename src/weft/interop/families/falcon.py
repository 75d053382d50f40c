"""Falcon (Almazrouei et al. 2023) and BLOOM (BigScience 2022), whose queries, keys and values lie together by groups.

Falcon's first ones share one head of keys and values and have one norm for both sublayers, which stand side by side;
the newer ones have groups, and a norm for each; two small ones have ALiBi, whose penalties are rounded and divided by
√d_head with the scores. BLOOM has ALiBi and a norm of the embeddings.
"""

from weft.config import Tree
from weft.interop.families.base import Family
from weft.interop.families.decoder_heads import architectures, head, head_rules
from weft.interop.families.rotary import rotary
from weft.interop.settings import Flat, Settings
from weft.interop.table import Special, Table, activation, even_heads, flag, number, whole
from weft.interop.weight_map import Rule, grouped, module, tensor
from weft.models.config import Decoder

BLOCK, LAYER = "decoder.blocks.{layer}", "transformer.h.{layer}"
TIED = flag("head.tied", "tie_word_embeddings", True)


def _rules(model: Decoder) -> tuple[Rule, ...]:
    two = model.sublayers == "parallel-two-norms"
    norms = ("ln_attn", "ln_mlp") if two else ("input_layernorm", "post_attention_layernorm")
    layout = grouped(model.attention.groups, model.d_head)
    return (
        tensor("embedding.weight", "transformer.word_embeddings.weight"),
        *module("decoder.embedding_norm", "transformer.word_embeddings_layernorm"),
        *module(f"{BLOCK}.attention_skip.norm", f"{LAYER}.{norms[0]}"),
        *module(f"{BLOCK}.attention.qkv", f"{LAYER}.self_attention.query_key_value", layout=layout),
        *module(f"{BLOCK}.attention.out", f"{LAYER}.self_attention.dense"),
        *module(f"{BLOCK}.feedforward_skip.norm", f"{LAYER}.{norms[1]}"),
        *module(f"{BLOCK}.feedforward.up", f"{LAYER}.mlp.dense_h_to_4h"),
        *module(f"{BLOCK}.feedforward.down", f"{LAYER}.mlp.dense_4h_to_h"),
        *module("decoder.norm", "transformer.ln_f"),
        tensor("output.weight", "lm_head.weight"),
    )


def _read_heads(settings: Settings, model: Flat) -> Flat:
    """Which heads of queries share keys and values, and how the sublayers stand."""
    heads = model["attention.heads"]
    newer, side_by_side = settings.flag("new_decoder_architecture", False), settings.flag("parallel_attn", True)
    if newer and not side_by_side:
        raise settings.refusal("parallel_attn", "weft has only True beside new_decoder_architecture")
    groups = settings.whole("num_kv_heads", heads) if newer else 1 if settings.flag("multi_query", True) else heads
    norms = settings.whole("num_ln_in_parallel_attn", 2 if newer else 1)
    kind = ("parallel-two-norms" if newer and norms == 2 else "parallel") if side_by_side else "sequential"
    bias = settings.flag("bias", False)
    return {
        "attention.kv_heads": groups,
        "sublayers": kind,
        "attention.bias": "all" if bias else "none",
        "feedforward.bias": bias,
    }


def _write_heads(model: Flat) -> Tree:
    heads, groups, kind = model["attention.heads"], model["attention.kv_heads"], model["sublayers"]
    newer = kind == "parallel-two-norms" or groups not in (1, heads)
    return {
        "new_decoder_architecture": newer,
        "num_kv_heads": groups,
        "multi_query": groups == 1,
        "parallel_attn": kind != "sequential",
        "num_ln_in_parallel_attn": 2 if kind == "parallel-two-norms" else 1,
        "bias": model["attention.bias"] == "all",
    }


ROTARY = rotary()


def _read_positions(settings: Settings, model: Flat) -> Flat:
    if not settings.flag("alibi", False):
        return {"position.kind": "rotary", **ROTARY.read(settings, model)}
    return {"position.kind": "alibi", "position.factor": even_heads(model) ** -0.5, "position.rounded": True}


def _write_positions(model: Flat) -> Tree:
    return {"alibi": model["position.kind"] == "alibi", **ROTARY.write(model)}


def _family(kind: str, title: str, settings: Table) -> Family:
    return Family(
        kind=kind,
        title=title,
        model=Decoder,
        architectures=architectures(kind.capitalize()),
        settings=settings,
        rules=lambda model: head_rules(_rules(model))(model),
        prefix="transformer.",
        copies=lambda model: {"lm_head.weight": "transformer.word_embeddings.weight"},
        unused=(r"transformer\.h\.\d+\.self_attention\.rotary_emb\..*",),
    )


FALCON = _family(
    "falcon",
    "Falcon",
    Table(
        rows=(
            whole("vocab_size", "vocab_size", 65024),
            whole("context", "max_position_embeddings", 2048),
            whole("d_model", "hidden_size", 4544),
            whole("layers", "num_hidden_layers", 32),
            whole("attention.heads", "num_attention_heads", 71),
            Special(_read_heads, _write_heads),
            whole("feedforward.d_ff", "ffn_hidden_size", lambda model: 4 * model["d_model"]),
            activation("feedforward.activation", "activation", "gelu"),
            number("norm.eps", "layer_norm_epsilon", 1e-5),
            number("attention.dropout", "attention_dropout", 0.0),
            number("dropout", "hidden_dropout", 0.0),
            Special(_read_positions, _write_positions),
            number("init.std", "initializer_range", 0.02, written=False),
            head(TIED),
        ),
        fixed={"feedforward.kind": "plain", "norm.kind": "layer", "init.kind": "normal"},
    ),
)
BLOOM = _family(
    "bloom",
    "BLOOM",
    Table(
        rows=(
            whole("vocab_size", "vocab_size", 250880),
            whole("context", "seq_length", 2048),
            whole("d_model", "hidden_size", 64),
            whole("layers", "n_layer", 2),
            whole("attention.heads", "n_head", 8),
            Special(read=lambda settings, model: {"feedforward.d_ff": 4 * model["d_model"]}),
            number("norm.eps", "layer_norm_epsilon", 1e-5),
            number("attention.dropout", "attention_dropout", 0.0),
            number("dropout", "hidden_dropout", 0.0),
            number("init.std", "initializer_range", 0.02, written=False),
            head(TIED),
        ),
        fixed={
            "attention.bias": "all",
            "feedforward.kind": "plain",
            "feedforward.activation": "gelu-tanh",
            "norm.kind": "layer",
            "embedding_norm": True,
            "position.kind": "alibi",
            "init.kind": "normal",
        },
        only={"apply_residual_connection_post_layernorm": False},
    ),
)
