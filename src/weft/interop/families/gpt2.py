"""GPT-2 (Radford et al. 2019): learned positions, pre-norm, matrices stored as (in, out)."""

from collections.abc import Collection

from weft.config import Tree
from weft.interop.families.base import THEIR_ACTIVATIONS, Family, Settings
from weft.interop.weight_map import TRANSPOSED, both, rule
from weft.models.config import Decoder, LMHead
from weft.nn.config import Attention, LayerNorm, Learned, NormalInit, Plain

BLOCK, LAYER = "decoder.blocks.{layer}", "transformer.h.{layer}"

RULES = (
    rule("embedding.weight", "transformer.wte.weight"),
    rule("decoder.position.weight", "transformer.wpe.weight"),
    *both(f"{BLOCK}.attention_skip.norm", f"{LAYER}.ln_1"),
    *both(f"{BLOCK}.attention.qkv", f"{LAYER}.attn.c_attn", form=TRANSPOSED),
    *both(f"{BLOCK}.attention.out", f"{LAYER}.attn.c_proj", form=TRANSPOSED),
    *both(f"{BLOCK}.feedforward_skip.norm", f"{LAYER}.ln_2"),
    *both(f"{BLOCK}.feedforward.up", f"{LAYER}.mlp.c_fc", form=TRANSPOSED),
    *both(f"{BLOCK}.feedforward.down", f"{LAYER}.mlp.c_proj", form=TRANSPOSED),
    *both("decoder.norm", "transformer.ln_f"),
    rule("output.weight", "lm_head.weight"),
)


def read(settings: Settings, architecture: str, names: Collection[str]) -> Decoder:
    """The model of a GPT-2 config.json."""
    settings.only(scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    d_model = settings.whole("n_embd", 768)
    return Decoder(
        vocab_size=settings.whole("vocab_size", 50257),
        context=settings.whole("n_positions", 1024),
        layers=settings.whole("n_layer", 12),
        d_model=d_model,
        attention=Attention(heads=settings.whole("n_head", 12), bias="all", dropout=settings.number("attn_pdrop", 0.1)),
        feedforward=Plain(
            d_ff=settings.whole("n_inner", 4 * d_model),
            activation=settings.activation("activation_function", "gelu_new"),
        ),
        norm=LayerNorm(eps=settings.number("layer_norm_epsilon", 1e-5)),
        position=Learned(),
        dropout=settings.number("resid_pdrop", 0.1),
        init=NormalInit(std=settings.number("initializer_range", 0.02)),
        head=LMHead(tied=settings.flag("tie_word_embeddings", True)),
    )


def write(model: Decoder) -> tuple[str, Tree]:
    """The config.json of a model."""
    return "GPT2LMHeadModel", {
        "model_type": "gpt2",
        "vocab_size": model.vocab_size,
        "n_positions": model.context,
        "n_embd": model.d_model,
        "n_layer": model.layers,
        "n_head": model.attention.heads,
        "n_inner": model.feedforward.d_ff,
        "activation_function": THEIR_ACTIVATIONS[model.feedforward.activation],
        "layer_norm_epsilon": model.norm.eps,
        "attn_pdrop": model.attention.dropout,
        "embd_pdrop": model.dropout,
        "resid_pdrop": model.dropout,
        "tie_word_embeddings": getattr(model.head, "tied", True),
    }


GPT2 = Family(
    kind="gpt2",
    title="GPT-2",
    models="decoder",
    architectures={"GPT2LMHeadModel": "lm", "GPT2Model": "lm"},
    rules=lambda model: RULES,
    read=read,
    write=write,
    prefix="transformer.",
    copies=lambda model: {"lm_head.weight": "transformer.wte.weight"},
    idle=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),
)
