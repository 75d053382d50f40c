"""Decoders that rotate a part of each head and have LayerNorm, with attention and feed-forward side by side or not.

GPT-NeoX and Pythia (Black et al. 2022; Biderman et al. 2023), Phi 1 and 2 (Li et al. 2023), StableLM (2023), and
StarCoder2 (Lozhkov et al. 2024), which rotates whole heads.
"""

from weft.config import Tree
from weft.interop.families.base import Family
from weft.interop.families.decoder_heads import architectures, fixed_head, head, head_rules
from weft.interop.families.llama import RULES as LLAMA_RULES
from weft.interop.families.llama import SIZES, TIED, one_window
from weft.interop.families.rotary import rotary
from weft.interop.settings import Flat, Settings
from weft.interop.table import Special, Table, activation, flag, number
from weft.interop.weight_map import A_ROW, SAME, Rule, grouped, module, tensor
from weft.models.config import Decoder

BLOCK, LAYER = "decoder.blocks.{layer}", "gpt_neox.layers.{layer}"
FIXED = {"feedforward.kind": "plain", "norm.kind": "layer", "position.kind": "rotary", "init.kind": "normal"}
EPS = number("norm.eps", "layer_norm_eps", 1e-5)


def _neox_rules(model: Decoder) -> tuple[Rule, ...]:
    return (
        tensor("embedding.weight", "gpt_neox.embed_in.weight"),
        *module(f"{BLOCK}.attention_skip.norm", f"{LAYER}.input_layernorm"),
        *module(
            f"{BLOCK}.attention.qkv",
            f"{LAYER}.attention.query_key_value",
            layout=grouped(model.attention.groups, model.d_head),
        ),
        *module(f"{BLOCK}.attention.out", f"{LAYER}.attention.dense"),
        *module(f"{BLOCK}.feedforward_skip.norm", f"{LAYER}.post_attention_layernorm"),
        *module(f"{BLOCK}.feedforward.up", f"{LAYER}.mlp.dense_h_to_4h"),
        *module(f"{BLOCK}.feedforward.down", f"{LAYER}.mlp.dense_4h_to_h"),
        *module("decoder.norm", "gpt_neox.final_layer_norm"),
        tensor("output.weight", "embed_out.weight"),
    )


def parallel(ours: str, default: bool) -> Special:
    """use_parallel_residual: sublayers side by side, in the way called `ours`, or one after the other."""
    return Special(
        lambda settings, model: {
            "sublayers": ours if settings.flag("use_parallel_residual", default) else "sequential"
        },
        lambda model: {"use_parallel_residual": model["sublayers"] == ours},
    )


def all_bias(key: str, default: bool, kind: str = "all") -> Special:
    """A key that gives attention all its biases, or those of `kind`."""
    return Special(
        lambda settings, model: {"attention.bias": kind if settings.flag(key, default) else "none"},
        lambda model: {key: model["attention.bias"] == kind},
    )


GPT_NEOX = Family(
    kind="gpt_neox",
    title="GPT-NeoX",
    model=Decoder,
    architectures=architectures("GPTNeoX"),
    settings=Table(
        rows=(
            *(row for row in SIZES if getattr(row, "theirs", "") != "num_key_value_heads"),
            EPS,
            activation("feedforward.activation", "hidden_act", "gelu"),
            number("dropout", "hidden_dropout", 0.0),
            rotary(fraction=0.25, keys=("rotary_emb_base", "rotary_pct")),
            parallel("parallel-two-norms", True),
            all_bias("attention_bias", True),
            head(TIED),
        ),
        fixed=FIXED,
    ),
    rules=lambda model: head_rules(_neox_rules(model))(model),
    prefix="gpt_neox.",
    copies=lambda model: {"embed_out.weight": "gpt_neox.embed_in.weight"},
    unused=(r"gpt_neox\.layers\.\d+\.attention\.(masked_bias|bias|rotary_emb\..*)",),
)


# ---- names as LLaMA's


def _named(**names: str) -> tuple[Rule, ...]:
    """LLaMA's names with other words for some parts."""

    def renamed(name: str) -> str:
        for old, new in names.items():
            name = name.replace(f".{old}.", f".{new}.")
        return name

    return tuple(
        Rule(rule.ours, tuple(renamed(name) for name in rule.theirs), rule.layouts)
        for rule in LLAMA_RULES
        if not rule.ours.startswith("output.")
    )


def _norms(model: Decoder) -> tuple[Rule, ...]:
    """The norms of queries and keys: one for all heads, or one for each, without biases."""
    each = model.attention.qk_norm_over == "each-head"
    found: list[Rule] = []
    for part, heads in (("q", model.attention.heads), ("k", model.attention.groups)):
        name = f"model.layers.{{layer}}.self_attn.{part}_layernorm"
        names = [f"{name}.norms.{head}" for head in range(heads)] if each else [name]
        found += module(f"{BLOCK}.attention.{part}_norm", *names, layout=A_ROW if each else SAME)
    return tuple(found)


def qk_norm(over: str, bias: bool) -> Special:
    """qk_layernorm: LayerNorm of queries and keys."""

    def read(settings: Settings, model: Flat) -> Flat:
        if not settings.flag("qk_layernorm", False):
            return {}
        norm = {"kind": "layer", "eps": model["norm.eps"], "bias": bias}
        return {"attention.qk_norm_over": over, **{f"attention.qk_norm.{key}": value for key, value in norm.items()}}

    return Special(read, lambda model: {"qk_layernorm": "attention.qk_norm.kind" in model})


def _family(kind: str, title: str, name: str, rules: tuple[Rule, ...], table: Table) -> Family:
    words = (*(rule for rule in rules if "_norm." not in rule.ours), *module("output", "lm_head"))

    def made(model: Decoder) -> tuple[Rule, ...]:
        return head_rules((*words, *_norms(model)), tags="score")(model)

    return Family(
        kind=kind,
        title=title,
        model=Decoder,
        architectures=architectures(name, without=("ForQuestionAnswering",)),
        settings=table,
        rules=made,
        prefix="model.",
        copies=lambda model: {"lm_head.weight": "model.embed_tokens.weight"},
        unused=(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\..*",),
    )


def _plain(up: str, down: str) -> tuple[Rule, ...]:
    """The names of a plain feed-forward."""
    layer, ours = "model.layers.{layer}.mlp", f"{BLOCK}.feedforward"
    return (*module(f"{ours}.up", f"{layer}.{up}"), *module(f"{ours}.down", f"{layer}.{down}"))


def _without_feedforward(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    return tuple(rule for rule in rules if ".feedforward." not in rule.ours)


PHI = _family(
    "phi",
    "Phi",
    "Phi",
    (*_without_feedforward(_named(o_proj="dense", norm="final_layernorm")), *_plain("fc1", "fc2")),
    Table(
        rows=(
            *SIZES,
            EPS,
            activation("feedforward.activation", "hidden_act", "gelu_new"),
            number("dropout", "resid_pdrop", 0.0),
            rotary(fraction=0.5),
            qk_norm("head", bias=True),
            head(TIED, fixed_head("head.bias", True)),
        ),
        fixed={**FIXED, "sublayers": "parallel", "attention.bias": "all"},
    ),
)
STABLELM = _family(
    "stablelm",
    "StableLM",
    "StableLm",
    _named(),
    Table(
        rows=(
            *SIZES,
            EPS,
            activation("feedforward.activation", "hidden_act", "silu"),
            number("dropout", "hidden_dropout", 0.0),
            rotary(fraction=0.25),
            parallel("parallel", False),
            all_bias("use_qkv_bias", False, "qkv"),
            qk_norm("each-head", bias=False),
            head(TIED),
        ),
        fixed={**FIXED, "feedforward.kind": "gated"},
        defaults={"max_position_embeddings": 4096},
    ),
)


def _read_bias(settings: Settings, model: Flat) -> Flat:
    there = settings.flag("use_bias", True)
    return {"attention.bias": "all" if there else "none", "feedforward.bias": there}


def _write_bias(model: Flat) -> Tree:
    return {"use_bias": model["attention.bias"] == "all"}


STARCODER2 = _family(
    "starcoder2",
    "StarCoder2",
    "Starcoder2",
    (*_without_feedforward(_named()), *_plain("c_fc", "c_proj")),
    Table(
        rows=(
            *SIZES,
            number("norm.eps", "norm_epsilon", 1e-5),
            activation("feedforward.activation", "hidden_act", "gelu_pytorch_tanh"),
            number("dropout", "residual_dropout", 0.0),
            rotary(),
            one_window(),
            Special(_read_bias, _write_bias),
            head(flag("head.tied", "tie_word_embeddings", True)),
        ),
        fixed=FIXED,
        defaults={"max_position_embeddings": 4096, "initializer_range": 0.018042},
    ),
)
