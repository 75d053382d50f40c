"""GPT-2 (Radford et al. 2019), with learned positions, pre-norm and matrices stored as (in, out); and its relatives.

GPT-Neo (Black et al. 2021) has a window in every other layer; GPT-J (Wang and Komatsuzaki 2021) rotates part of each
head and computes attention and feed-forward in parallel. OPT (Zhang et al. 2022) has positions from 2; its version with
350M parameters has post-norm and embeddings half as wide as its layers. GPTBigCode (SantaCoder, StarCoder; Li et al.
2023) is GPT-2 with one head of keys and values; CodeGen (Nijkamp et al. 2023) is GPT-J with queries, values and keys
stored in four groups.
"""

from dataclasses import replace

from torch import Tensor

from weft.config import Tree
from weft.interop.families.base import HEAD_BIAS, PLAIN, TABLES, TIED, UNTIED, Family, decoder_head, on_decoder, sizes
from weft.interop.families.positions import MAX_LAYERS, rotated_part, windows_of, with_windows
from weft.interop.settings import Flat, Settings
from weft.interop.table import Special, all_biases, embedding_width, switch
from weft.interop.weight_map import TRANSPOSED, Rules, TensorLayout, block, grouped, module, reordered, tensor
from weft.models.config import Decoder

LEARNED = {**PLAIN, "position.kind": "learned"}
LAYER, OPT_LAYER = "transformer.h.{layer}", "model.decoder.layers.{layer}"
ENDS = (tensor("embedding.weight", "transformer.wte.weight"), *module("decoder.norm", "transformer.ln_f"))
POSITIONS = (tensor("decoder.position.weight", "transformer.wpe.weight"),)
MASKS = (r"transformer\.h\.\d+\.attn\.(masked_)?bias",)


def names(matrices: TensorLayout) -> Rules:
    """Rules of GPT-2's weights below the head, with matrices in this layout."""
    parts = {"qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    layouts = dict.fromkeys(parts, matrices)
    return (*ENDS, *POSITIONS, *block("decoder", LAYER, layouts, norm="ln_1", ff_norm="ln_2", **parts))


SIZES = sizes("gpt2")
EMBEDDING_DROPOUT = Special(write=lambda model: {"embd_pdrop": model["dropout"]})
GPT2 = Family(
    names=("gpt2", "GPT-2", "GPT2"),
    rows=(*SIZES, EMBEDDING_DROPOUT, decoder_head(TIED)),
    fixed={**LEARNED, "attention.bias": "all"},
    only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    body=names(TRANSPOSED),
    heads=on_decoder(),
    classes={"lm": "GPT2LMHeadModel"},
    prefix="transformer.",
    unused=MASKS,
)

GPTJ = Family(
    names=("gptj", "GPT-J", "GPTJ"),
    rows=(*SIZES, EMBEDDING_DROPOUT, decoder_head(UNTIED, HEAD_BIAS), rotated_part("rotary_dim", 64)),
    fixed={**PLAIN, "sublayers": "parallel", "position.kind": "rotary", "position.pairs": "adjacent"},
    defaults=TABLES["defaults"]["gptj"],
    body=(
        *ENDS,
        *block("decoder", LAYER, norm="ln_1", qkv="attn.*_proj", out="attn.out_proj"),
        *block("decoder", LAYER, up="mlp.fc_in", down="mlp.fc_out"),
    ),
    heads=on_decoder(without=("token",)),
    prefix="transformer.",
    unused=(*MASKS, r"transformer\.h\.\d+\.attn\.embed_positions"),
)

CODEGEN_GROUPS = 4


def _codegen_names(model: Decoder) -> Rules:
    """Rules of CodeGen's weights; each of the groups holds a fourth of the queries, of the values and of the keys."""

    def order(rows: Tensor) -> Tensor:
        return rows.view(3, CODEGEN_GROUPS, -1)[[0, 2, 1]].transpose(0, 1).flatten()

    return (
        *ENDS,
        *block("decoder", LAYER, {"qkv": reordered(order)}, norm="ln_1", qkv="attn.qkv_proj", out="attn.out_proj"),
        *block("decoder", LAYER, up="mlp.fc_in", down="mlp.fc_out"),
    )


def _check_groups(settings: Settings, model: Flat) -> Flat:
    if model["attention.heads"] % CODEGEN_GROUPS:
        raise settings.error("n_head", f"expected a multiple of {CODEGEN_GROUPS}")
    return {}


CODEGEN = replace(
    GPTJ,
    names=("codegen", "CodeGen", "CodeGen"),
    rows=(*GPTJ.rows, Special(_check_groups)),
    body=_codegen_names,
    heads=on_decoder(without=("sequence", "token", "span")),
    unused=(*MASKS, r"transformer\.h\.\d+\.attn\.causal_mask"),
)


def _bigcode_names(model: Decoder) -> Rules:
    layouts = {} if model.attention.groups == 1 else {"qkv": grouped(model.attention.heads, model.d_head)}
    parts = {"qkv": "attn.c_attn", "out": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj"}
    return (*ENDS, *POSITIONS, *block("decoder", LAYER, layouts, norm="ln_1", ff_norm="ln_2", **parts))


MULTI_QUERY = Special(
    lambda settings, model: {
        "attention.kv_heads": 1 if settings.flag("multi_query", True) else model["attention.heads"]
    },
    lambda model: {"multi_query": model["attention.kv_heads"] == 1},
)
GPT_BIGCODE = replace(
    GPT2,
    names=("gpt_bigcode", "GPTBigCode", "GPTBigCode"),
    rows=(*SIZES, EMBEDDING_DROPOUT, MULTI_QUERY, decoder_head(TIED)),
    only={"scale_attn_weights": True, "add_cross_attention": False},
    defaults={"activation_function": "gelu_pytorch_tanh"},
    body=_bigcode_names,
    heads=on_decoder(without=("span",)),
    classes={},
)

KINDS = ("global", "local")


def _read_kinds(settings: Settings, model: Flat) -> Flat:
    """Read attention_types, [[[kinds, …], repetitions], …]; attention_layers of newer files takes precedence."""
    layers = settings.get("attention_layers")
    key = "attention_types" if layers is None else "attention_layers"
    groups = settings.get(key, [[["global", "local"], 12]]) if layers is None else [[layers, 1]]
    kinds: list[str] = []
    try:
        for pattern, times in groups:
            if len(pattern) * times > MAX_LAYERS or any(kind not in KINDS for kind in pattern):
                raise ValueError
            kinds += list(pattern) * times
    except (TypeError, ValueError):
        expected = "[[['global', 'local'], how often], …]" if layers is None else "'global' or 'local' for each layer"
        raise settings.error(key, f"expected {expected}") from None
    if len(kinds) != model["layers"]:
        raise settings.error(key, f"{len(kinds)} kinds for {model['layers']} layers")
    return with_windows([kind == "local" for kind in kinds], settings.integer("window_size", 256))


def _write_kinds(model: Flat) -> Tree:
    sizes = windows_of(model)
    kinds = [KINDS[bool(size)] for size in sizes]
    return {"attention_types": [[kinds, 1]], "window_size": next((size for size in sizes if size), 256)}


NEO_SIZES = sizes("gpt_neo")
GPT_NEO = Family(
    names=("gpt_neo", "GPT-Neo", "GPTNeo"),
    rows=(*NEO_SIZES, decoder_head(TIED), Special(_read_kinds, _write_kinds)),
    fixed={**LEARNED, "attention.bias": "out", "attention.scale": 1.0},
    only={"is_causal": True},  # transformers ignores the key
    body=(
        *ENDS,
        *POSITIONS,
        *block("decoder", LAYER, norm="ln_1", qkv="attn.attention.*_proj", out="attn.attention.out_proj"),
        *block("decoder", LAYER, ff_norm="ln_2", up="mlp.c_fc", down="mlp.c_proj"),
    ),
    heads=on_decoder(),
    prefix="transformer.",
    unused=(r"transformer\.h\.\d+\.attn\.attention\.(masked_)?bias",),
)


def _check_width(settings: Settings, model: Flat) -> Flat:
    settings.only(_remove_final_layer_norm=False)
    if model["d_embedding"] is not None and not (model["head.kind"] == "lm" and settings.flag("is_causal", True)):
        raise settings.error("word_embed_proj_dim", "weft reads such a model only if it is causal, with an LM head")
    return {}


OPT_SIZES = sizes("opt")
AFFINE = {"norm.gain": True, "norm.bias": True}
OPT = Family(
    names=("opt", "OPT", "OPT"),
    rows=(
        *OPT_SIZES,
        embedding_width("word_embed_proj_dim"),
        Special(_check_width),
        switch("do_layer_norm_before", True, on={"placement": "pre"}, off={"placement": "post"}),
        switch("layer_norm_elementwise_affine", True, on=AFFINE, off=dict.fromkeys(AFFINE, False)),
        all_biases("enable_bias"),
        decoder_head(TIED),
    ),
    fixed={**LEARNED, "norm.eps": 1e-5, "position.offset": 2},
    body=(
        tensor("embedding.weight", "model.decoder.embed_tokens.weight"),
        tensor("decoder.position.weight", "model.decoder.embed_positions.weight"),
        *block("decoder", OPT_LAYER, norm="self_attn_layer_norm", qkv="self_attn.*_proj", out="self_attn.out_proj"),
        *block("decoder", OPT_LAYER, ff_norm="final_layer_norm", up="fc1", down="fc2"),
        *module("decoder.norm", "model.decoder.final_layer_norm"),
        tensor("decoder.projection.weight", "model.decoder.project_in.weight"),
        tensor("output.dense.weight", "model.decoder.project_out.weight"),
    ),
    heads=on_decoder(without=("token",)),
    renames={"decoder.": "model.decoder."},  # names in the first files
)
