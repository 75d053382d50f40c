"""GPT-2 (Radford et al. 2019): learned positions, pre-norm, matrices stored as (in, out).

GPT-Neo (Black et al. 2021) has a window in every other layer; GPT-J (Wang and Komatsuzaki 2021) rotates a part of each
head, and has attention and feed-forward side by side.
"""

from typing import Any

from weft.config import Tree
from weft.interop.families.base import Family
from weft.interop.families.decoder_heads import architectures, fixed_head, head, head_rules
from weft.interop.families.layers import windows_of, with_windows
from weft.interop.settings import Flat, Settings
from weft.interop.table import Row, Special, Table, activation, flag, number, whole
from weft.interop.weight_map import TRANSPOSED, Layout, Rule, module, tensor
from weft.models.config import Decoder

BLOCK, LAYER = "decoder.blocks.{layer}", "transformer.h.{layer}"


def rules(matrices: Layout) -> tuple[Rule, ...]:
    """The names of GPT-2's weights, whose matrices have this layout."""
    return (
        tensor("embedding.weight", "transformer.wte.weight"),
        tensor("decoder.position.weight", "transformer.wpe.weight"),
        *module(f"{BLOCK}.attention_skip.norm", f"{LAYER}.ln_1"),
        *module(f"{BLOCK}.attention.qkv", f"{LAYER}.attn.c_attn", layout=matrices),
        *module(f"{BLOCK}.attention.out", f"{LAYER}.attn.c_proj", layout=matrices),
        *module(f"{BLOCK}.feedforward_skip.norm", f"{LAYER}.ln_2"),
        *module(f"{BLOCK}.feedforward.up", f"{LAYER}.mlp.c_fc", layout=matrices),
        *module(f"{BLOCK}.feedforward.down", f"{LAYER}.mlp.c_proj", layout=matrices),
        *module("decoder.norm", "transformer.ln_f"),
        tensor("output.weight", "lm_head.weight"),
    )


RULES = rules(TRANSPOSED)
SIZES: tuple[Row, ...] = (
    whole("vocab_size", "vocab_size", 50257),
    whole("context", "n_positions", 1024),
    whole("d_model", "n_embd", 768),
    whole("layers", "n_layer", 12),
    whole("attention.heads", "n_head", 12),
    whole("feedforward.d_ff", "n_inner", lambda model: 4 * model["d_model"]),
    activation("feedforward.activation", "activation_function", "gelu_new"),
    number("norm.eps", "layer_norm_epsilon", 1e-5),
    number("attention.dropout", "attn_pdrop", 0.1),
    Special(write=lambda model: {"embd_pdrop": model["dropout"]}),
    number("dropout", "resid_pdrop", 0.1),
    number("init.std", "initializer_range", 0.02, written=False),
)
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0}
MASKS = (r"transformer\.h\.\d+\.attn\.(masked_)?bias",)


def _family(kind: str, title: str, name: str, settings: Table, rules: tuple[Rule, ...], **more: Any) -> Family:
    """A relative of GPT-2's: `without` are heads that it does not have, `words` its class that predicts words."""
    return Family(
        kind=kind,
        title=title,
        model=Decoder,
        architectures=architectures(name, more.pop("words", None), more.pop("without", ())),
        settings=settings,
        rules=head_rules(rules),
        prefix="transformer.",
        copies=lambda model: {"lm_head.weight": "transformer.wte.weight"},
        **more,
    )


SETTINGS = Table(
    rows=(
        *SIZES,
        head(flag("head.tied", "tie_word_embeddings", True)),
    ),
    fixed={
        "attention.bias": "all",
        "feedforward.kind": "plain",
        "norm.kind": "layer",
        "position.kind": "learned",
        "init.kind": "normal",
    },
    only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
)

GPT2 = _family("gpt2", "GPT-2", "GPT2", SETTINGS, RULES, words="GPT2LMHeadModel", unused=MASKS)


# ---- GPT-J

GPTJ_RULES = (
    tensor("embedding.weight", "transformer.wte.weight"),
    *module(f"{BLOCK}.attention_skip.norm", f"{LAYER}.ln_1"),
    *module(f"{BLOCK}.attention.qkv", *(f"{LAYER}.attn.{part}_proj" for part in "qkv")),
    *module(f"{BLOCK}.attention.out", f"{LAYER}.attn.out_proj"),
    *module(f"{BLOCK}.feedforward.up", f"{LAYER}.mlp.fc_in"),
    *module(f"{BLOCK}.feedforward.down", f"{LAYER}.mlp.fc_out"),
    *module("decoder.norm", "transformer.ln_f"),
    *module("output", "lm_head"),
)


def _read_rotated(settings: Settings, model: Flat) -> Flat:
    """How many coordinates of each head are rotated."""
    d_head = max(1, model["d_model"] // model["attention.heads"])
    return {"position.fraction": settings.whole("rotary_dim", 64) / d_head}


def _write_rotated(model: Flat) -> Tree:
    return {"rotary_dim": round(model.get("position.fraction", 1.0) * model["attention.d_head"])}


GPTJ = _family(
    "gptj",
    "GPT-J",
    "GPTJ",
    Table(
        rows=(
            *SIZES,
            head(flag("head.tied", "tie_word_embeddings", False), fixed_head("head.bias", True)),
            Special(_read_rotated, _write_rotated),
        ),
        fixed={
            "sublayers": "parallel",
            "feedforward.kind": "plain",
            "norm.kind": "layer",
            "position.kind": "rotary",
            "position.pairs": "adjacent",
            "init.kind": "normal",
        },
        defaults={"vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16, **NO_DROPOUT},
    ),
    GPTJ_RULES,
    without=("ForTokenClassification",),
    unused=(*MASKS, r"transformer\.h\.\d+\.attn\.embed_positions"),
)


# ---- GPT-Neo

NEO_RULES = (
    tensor("embedding.weight", "transformer.wte.weight"),
    tensor("decoder.position.weight", "transformer.wpe.weight"),
    *module(f"{BLOCK}.attention_skip.norm", f"{LAYER}.ln_1"),
    *module(f"{BLOCK}.attention.qkv", *(f"{LAYER}.attn.attention.{part}_proj" for part in "qkv")),
    *module(f"{BLOCK}.attention.out", f"{LAYER}.attn.attention.out_proj"),
    *module(f"{BLOCK}.feedforward_skip.norm", f"{LAYER}.ln_2"),
    *module(f"{BLOCK}.feedforward.up", f"{LAYER}.mlp.c_fc"),
    *module(f"{BLOCK}.feedforward.down", f"{LAYER}.mlp.c_proj"),
    *module("decoder.norm", "transformer.ln_f"),
    tensor("output.weight", "lm_head.weight"),
)
KINDS = ("global", "local")


def _read_kinds(settings: Settings, model: Flat) -> Flat:
    """attention_types is [[[kinds, …], how often], …]."""
    given = settings.get("attention_types", [[["global", "local"], 12]])
    named: list[str] = []
    try:
        for some, times in given:
            if len(some) * times > 2**10 or any(kind not in KINDS for kind in some):
                raise ValueError
            named += list(some) * times
    except (TypeError, ValueError):
        raise settings.refusal("attention_types", "expected [[['global', 'local'], how often], …]") from None
    if len(named) != model["layers"]:
        raise settings.refusal("attention_types", f"{len(named)} kinds for {model['layers']} layers")
    return with_windows([kind == "local" for kind in named], settings.whole("window_size", 256))


def _write_kinds(model: Flat) -> Tree:
    sizes = windows_of(model)
    kinds = [KINDS[bool(size)] for size in sizes]
    return {"attention_types": [[kinds, 1]], "window_size": next((size for size in sizes if size), 256)}


GPT_NEO = _family(
    "gpt_neo",
    "GPT-Neo",
    "GPTNeo",
    Table(
        rows=(
            whole("vocab_size", "vocab_size", 50257),
            whole("context", "max_position_embeddings", 2048),
            whole("d_model", "hidden_size", 2048),
            whole("layers", "num_layers", 24),
            whole("attention.heads", "num_heads", 16),
            whole("feedforward.d_ff", "intermediate_size", lambda model: 4 * model["d_model"]),
            activation("feedforward.activation", "activation_function", "gelu_new"),
            number("norm.eps", "layer_norm_epsilon", 1e-5),
            number("attention.dropout", "attention_dropout", 0.0),
            number("dropout", "resid_dropout", 0.0),
            number("init.std", "initializer_range", 0.02, written=False),
            head(flag("head.tied", "tie_word_embeddings", True)),
            Special(_read_kinds, _write_kinds),
        ),
        fixed={
            "attention.bias": "out",
            "attention.scale": 1.0,
            "feedforward.kind": "plain",
            "norm.kind": "layer",
            "position.kind": "learned",
            "init.kind": "normal",
        },
    ),
    NEO_RULES,
    unused=(r"transformer\.h\.\d+\.attn\.attention\.(masked_)?bias",),
)
