"""OPT (Zhang et al. 2022): learned positions from 2 on, and norms before the sublayers.

One of them, with 350M parameters, has norms after the sublayers and embeddings half as wide as its layers.
"""

from weft.config import Tree
from weft.interop.families.base import Family
from weft.interop.families.decoder_heads import architectures, head, head_rules
from weft.interop.settings import Flat, Settings
from weft.interop.table import Special, Table, activation, embedding_width, flag, number, whole
from weft.interop.weight_map import module, tensor
from weft.models.config import Decoder

BLOCK, LAYER = "decoder.blocks.{layer}", "model.decoder.layers.{layer}"
RULES = (
    tensor("embedding.weight", "model.decoder.embed_tokens.weight"),
    tensor("decoder.position.weight", "model.decoder.embed_positions.weight"),
    *module(f"{BLOCK}.attention_skip.norm", f"{LAYER}.self_attn_layer_norm"),
    *module(f"{BLOCK}.attention.qkv", *(f"{LAYER}.self_attn.{part}_proj" for part in "qkv")),
    *module(f"{BLOCK}.attention.out", f"{LAYER}.self_attn.out_proj"),
    *module(f"{BLOCK}.feedforward_skip.norm", f"{LAYER}.final_layer_norm"),
    *module(f"{BLOCK}.feedforward.up", f"{LAYER}.fc1"),
    *module(f"{BLOCK}.feedforward.down", f"{LAYER}.fc2"),
    *module("decoder.norm", "model.decoder.final_layer_norm"),
    tensor("decoder.projection.weight", "model.decoder.project_in.weight"),
    tensor("output.dense.weight", "model.decoder.project_out.weight"),
    tensor("output.weight", "lm_head.weight"),
)


def _read_norms(settings: Settings, model: Flat) -> Flat:
    affine = settings.flag("layer_norm_elementwise_affine", True)
    before = settings.flag("do_layer_norm_before", True)
    settings.only(_remove_final_layer_norm=False)
    return {"placement": "pre" if before else "post", "norm.gain": affine, "norm.bias": affine}


def _write_norms(model: Flat) -> Tree:
    affine = model.get("norm.gain", True)
    return {"do_layer_norm_before": model["placement"] == "pre", "layer_norm_elementwise_affine": affine}


def _read_bias(settings: Settings, model: Flat) -> Flat:
    there = settings.flag("enable_bias", True)
    return {"attention.bias": "all" if there else "none", "feedforward.bias": there}


def _read_width(settings: Settings, model: Flat) -> Flat:
    found = WIDTH.read(settings, model)
    if found["d_embedding"] is not None and model["head.kind"] != "lm":
        raise settings.refusal("word_embed_proj_dim", "weft reads such a model with the head that predicts words alone")
    return found


WIDTH = embedding_width("word_embed_proj_dim")
OPT = Family(
    kind="opt",
    title="OPT",
    model=Decoder,
    architectures=architectures("OPT", without=("ForTokenClassification",)),
    settings=Table(
        rows=(
            whole("vocab_size", "vocab_size", 50272),
            whole("context", "max_position_embeddings", 2048),
            whole("d_model", "hidden_size", 768),
            whole("layers", "num_hidden_layers", 12),
            whole("attention.heads", "num_attention_heads", 12),
            whole("feedforward.d_ff", "ffn_dim", 3072),
            activation("feedforward.activation", "activation_function", "relu"),
            Special(_read_width, WIDTH.write),
            Special(_read_norms, _write_norms),
            Special(_read_bias, lambda model: {"enable_bias": model["attention.bias"] == "all"}),
            number("attention.dropout", "attention_dropout", 0.0),
            number("dropout", "dropout", 0.1),
            number("init.std", "init_std", 0.02, written=False),
            head(flag("head.tied", "tie_word_embeddings", True)),
        ),
        fixed={
            "feedforward.kind": "plain",
            "norm.kind": "layer",
            "norm.eps": 1e-5,
            "position.kind": "learned",
            "position.offset": 2,
            "init.kind": "normal",
        },
    ),
    rules=head_rules(RULES),
    prefix="model.",
    copies=lambda model: {"lm_head.weight": "model.decoder.embed_tokens.weight"},
    renames={"decoder.": "model.decoder."},  # of the first files
)
