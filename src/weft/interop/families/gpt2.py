"""GPT-2 (Radford et al. 2019): learned positions, pre-norm, matrices stored as (in, out)."""

from weft.interop.families.base import Family
from weft.interop.table import Special, Table, activation, flag, number, whole
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
SETTINGS = Table(
    rows=(
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
        flag("head.tied", "tie_word_embeddings", True),
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

GPT2 = Family(
    kind="gpt2",
    title="GPT-2",
    model=Decoder,
    architectures={"GPT2LMHeadModel": "lm", "GPT2Model": "lm"},
    settings=SETTINGS,
    rules=lambda model: RULES,
    prefix="transformer.",
    copies=lambda model: {"lm_head.weight": "transformer.wte.weight"},
    unused=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
)
