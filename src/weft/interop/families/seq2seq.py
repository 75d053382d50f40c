"""Encoder–decoders.

Marian (Junczys-Dowmunt et al. 2018), BART (Lewis et al. 2020), T5 and T5 v1.1 (Raffel et al. 2020; Shazeer 2020).
"""

from collections.abc import Collection, Mapping
from typing import Literal

from weft.config import Tree
from weft.interop.families.base import ACTIVATIONS, THEIR_ACTIVATIONS, Family, Settings
from weft.interop.weight_map import ONE_ROW, Rule, both, rule
from weft.models.config import EncoderDecoder, LMHead, Model
from weft.nn.config import (
    Activation,
    Attention,
    Gated,
    LayerNorm,
    Learned,
    NormalInit,
    Plain,
    RMSNorm,
    Sinusoidal,
    T5Bias,
    XavierInit,
)

Side = Literal["encoder", "decoder"]


def _layers(side: Side) -> tuple[Rule, ...]:
    """Marian's and BART's names in one of the two stacks."""
    block, layer = f"{side}.blocks.{{layer}}", f"model.{side}.layers.{{layer}}"
    return (
        *both(f"{block}.attention.qkv", *(f"{layer}.self_attn.{part}_proj" for part in "qkv")),
        *both(f"{block}.attention.out", f"{layer}.self_attn.out_proj"),
        *both(f"{block}.attention_skip.norm", f"{layer}.self_attn_layer_norm"),
        *both(f"{block}.cross.q", f"{layer}.encoder_attn.q_proj"),
        *both(f"{block}.cross.kv", *(f"{layer}.encoder_attn.{part}_proj" for part in "kv")),
        *both(f"{block}.cross.out", f"{layer}.encoder_attn.out_proj"),
        *both(f"{block}.cross_skip.norm", f"{layer}.encoder_attn_layer_norm"),
        *both(f"{block}.feedforward.up", f"{layer}.fc1"),
        *both(f"{block}.feedforward.down", f"{layer}.fc2"),
        *both(f"{block}.feedforward_skip.norm", f"{layer}.final_layer_norm"),
    )


STACKS = (*_layers("encoder"), *_layers("decoder"))
OUTPUT = (rule("output.weight", "lm_head.weight"), rule("output.bias", "final_logits_bias", form=ONE_ROW))
SHARED = (rule("embedding.weight", "model.shared.weight"),)
APART = (
    rule("embedding.weight", "model.decoder.embed_tokens.weight"),
    rule("source_embedding.weight", "model.encoder.embed_tokens.weight"),
)
BART_EMBEDDINGS = tuple(
    each
    for side in ("encoder", "decoder")
    for each in (
        rule(f"{side}.position.weight", f"model.{side}.embed_positions.weight"),
        *both(f"{side}.embedding_norm", f"model.{side}.layernorm_embedding"),
    )
)


def _apart(model: Model) -> bool:
    return getattr(model, "source_vocab_size", None) is not None


def _copies(model: Model) -> Mapping[str, str]:
    if _apart(model):
        return {"lm_head.weight": "model.decoder.embed_tokens.weight"}
    names = ("lm_head.weight", "model.encoder.embed_tokens.weight", "model.decoder.embed_tokens.weight")
    return dict.fromkeys(names, "model.shared.weight")


def _no_bias(model: EncoderDecoder) -> dict[str, tuple[int, ...]]:
    """transformers always adds a bias to the logits, and misses it in a file that has none."""
    return {} if model.head.bias else {"final_logits_bias": (1, model.vocab_size)}


def _read(
    settings: Settings,
    names: Collection[str],
    position: Sinusoidal | Learned,
    embedding_norm: bool,
    source_vocab_size: int | None = None,
    vocab_size: int | None = None,
) -> EncoderDecoder:
    heads, d_ff = settings.whole("encoder_attention_heads"), settings.whole("encoder_ffn_dim")
    settings.only(
        decoder_attention_heads=heads,
        decoder_ffn_dim=d_ff,
        normalize_before=False,
        normalize_embedding=embedding_norm,
        add_final_layer_norm=False,
    )
    layers, encoder_layers = settings.whole("decoder_layers"), settings.whole("encoder_layers")
    return EncoderDecoder(
        vocab_size=vocab_size or settings.whole("vocab_size"),
        source_vocab_size=source_vocab_size,
        context=settings.whole("max_position_embeddings", 1024),
        layers=layers,
        encoder_layers=None if encoder_layers == layers else encoder_layers,
        d_model=settings.whole("d_model"),
        attention=Attention(heads=heads, bias="all", dropout=settings.number("attention_dropout", 0.0)),
        feedforward=Plain(
            d_ff=d_ff,
            activation=settings.activation("activation_function", "gelu"),
            dropout=settings.number("activation_dropout", 0.0),
        ),
        norm=LayerNorm(),
        placement="post",
        position=position,
        embedding_scale=settings.flag("scale_embedding", False),
        embedding_norm=embedding_norm,
        dropout=settings.number("dropout", 0.1),
        init=NormalInit(std=settings.number("init_std", 0.02), depth_scaled=False),
        head=LMHead(tied=settings.flag("tie_word_embeddings", True), bias="final_logits_bias" in names),
    )


def _write(model: EncoderDecoder) -> Tree:
    return {
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.context,
        "encoder_layers": model.encoder_layers or model.layers,
        "decoder_layers": model.layers,
        "d_model": model.d_model,
        "encoder_attention_heads": model.attention.heads,
        "decoder_attention_heads": model.attention.heads,
        "attention_dropout": model.attention.dropout,
        "encoder_ffn_dim": model.feedforward.d_ff,
        "decoder_ffn_dim": model.feedforward.d_ff,
        "activation_function": THEIR_ACTIVATIONS[model.feedforward.activation],
        "activation_dropout": model.feedforward.dropout,
        "scale_embedding": model.embedding_scale,
        "dropout": model.dropout,
        "is_encoder_decoder": True,
        "tie_word_embeddings": model.head.tied,
    }


# ---- Marian


def read_marian(settings: Settings, architecture: str, names: Collection[str]) -> EncoderDecoder:
    settings.only(static_position_embeddings=True)
    halves = Sinusoidal(layout="halves")
    if settings.flag("share_encoder_decoder_embeddings", True):
        return _read(settings, names, halves, embedding_norm=False)
    source = settings.whole("vocab_size")
    target = settings.whole("decoder_vocab_size", source)
    return _read(settings, names, halves, embedding_norm=False, source_vocab_size=source, vocab_size=target)


def write_marian(model: EncoderDecoder) -> tuple[str, Tree]:
    tree = {"model_type": "marian", **_write(model), "share_encoder_decoder_embeddings": not _apart(model)}
    if model.source_vocab_size is not None:
        tree |= {"vocab_size": model.source_vocab_size, "decoder_vocab_size": model.vocab_size}
    return "MarianMTModel", tree


MARIAN = Family(
    kind="marian",
    title="Marian",
    models="encoder-decoder",
    architectures={"MarianMTModel": "lm"},
    rules=lambda model: (*(APART if _apart(model) else SHARED), *STACKS, *OUTPUT),
    read=read_marian,
    write=write_marian,
    copies=_copies,
    idle=(r"model\.(encoder|decoder)\.embed_positions\.weight",),  # sinusoids, which weft computes
    fillers=_no_bias,
)


# ---- BART


def read_bart(settings: Settings, architecture: str, names: Collection[str]) -> EncoderDecoder:
    return _read(settings, names, Learned(offset=2), embedding_norm=True)


def write_bart(model: EncoderDecoder) -> tuple[str, Tree]:
    return "BartForConditionalGeneration", {"model_type": "bart", **_write(model)}


BART = Family(
    kind="bart",
    title="BART",
    models="encoder-decoder",
    architectures={"BartForConditionalGeneration": "lm", "BartModel": "lm"},
    rules=lambda model: (*SHARED, *BART_EMBEDDINGS, *STACKS, *OUTPUT),
    read=read_bart,
    write=write_bart,
    prefix="model.",
    copies=_copies,
    fillers=_no_bias,
)


# ---- T5


def _t5_layers(side: Side, feedforward: int) -> tuple[Rule, ...]:
    block, layer = f"{side}.blocks.{{layer}}", f"{side}.block.{{layer}}.layer"
    dense = f"{layer}.{feedforward}.DenseReluDense"
    return (
        rule(f"{side}.position.weight", f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"),
        rule(f"{block}.attention.qkv.weight", *(f"{layer}.0.SelfAttention.{part}.weight" for part in "qkv")),
        rule(f"{block}.attention.out.weight", f"{layer}.0.SelfAttention.o.weight"),
        rule(f"{block}.attention_skip.norm.weight", f"{layer}.0.layer_norm.weight"),
        rule(f"{block}.cross.q.weight", f"{layer}.1.EncDecAttention.q.weight"),
        rule(f"{block}.cross.kv.weight", *(f"{layer}.1.EncDecAttention.{part}.weight" for part in "kv")),
        rule(f"{block}.cross.out.weight", f"{layer}.1.EncDecAttention.o.weight"),
        rule(f"{block}.cross_skip.norm.weight", f"{layer}.1.layer_norm.weight"),
        rule(f"{block}.feedforward.up.weight", f"{dense}.wi.weight"),
        rule(f"{block}.feedforward.gate_up.weight", f"{dense}.wi_0.weight", f"{dense}.wi_1.weight"),
        rule(f"{block}.feedforward.down.weight", f"{dense}.wo.weight"),
        rule(f"{block}.feedforward_skip.norm.weight", f"{layer}.{feedforward}.layer_norm.weight"),
        rule(f"{side}.norm.weight", f"{side}.final_layer_norm.weight"),
    )


T5_RULES = (
    rule("embedding.weight", "shared.weight"),
    *_t5_layers("encoder", 1),
    *_t5_layers("decoder", 2),
    rule("output.weight", "lm_head.weight"),
)


def read_t5(settings: Settings, architecture: str, names: Collection[str]) -> EncoderDecoder:
    given = settings.tree.get("feed_forward_proj")
    gate, _, named = ("relu" if given is None else given if isinstance(given, str) else "no name").rpartition("-")
    if gate not in ("", "gated") or named not in ACTIVATIONS:
        raise settings.refusal("feed_forward_proj", f"weft has {', '.join(ACTIVATIONS)}, each also gated-…")
    d_ff, dropout = settings.whole("d_ff"), settings.number("dropout_rate", 0.1)
    activation: Activation = "gelu-tanh" if (gate, named) == ("gated", "gelu") else ACTIVATIONS[named]
    d_model, layers = settings.whole("d_model"), settings.whole("num_layers")
    decoder_layers = settings.whole("num_decoder_layers", layers)
    # T5 scales its output and v1.1 does not; older files tell them apart by whether the tables are said to be tied,
    # though whether they are is seen from the tensors alone
    scaled = settings.flag("scale_decoder_outputs", settings.flag("tie_word_embeddings", True))
    return EncoderDecoder(
        vocab_size=settings.whole("vocab_size"),
        context=settings.whole("n_positions", 512),
        layers=decoder_layers,
        encoder_layers=None if layers == decoder_layers else layers,
        d_model=d_model,
        attention=Attention(
            heads=settings.whole("num_heads"), d_head=settings.whole("d_kv", 64), scale=1.0, dropout=dropout
        ),
        feedforward=Gated(d_ff=d_ff, activation=activation, dropout=dropout)
        if gate
        else Plain(d_ff=d_ff, activation=activation, bias=False, dropout=dropout),
        norm=RMSNorm(eps=settings.number("layer_norm_epsilon", 1e-6)),
        position=T5Bias(
            buckets=settings.whole("relative_attention_num_buckets", 32),
            max_distance=settings.whole("relative_attention_max_distance", 128),
        ),
        dropout=dropout,
        init=XavierInit(),
        head=LMHead(tied=True, scale=d_model**-0.5 if scaled else None),
    )


def write_t5(model: EncoderDecoder) -> tuple[str, Tree]:
    gated = isinstance(model.feedforward, Gated)
    named = THEIR_ACTIVATIONS[model.feedforward.activation]
    if gated and named == "gelu_new":
        named = "gelu"
    position = model.position
    tree: Tree = {
        "model_type": "t5",
        "vocab_size": model.vocab_size,
        "n_positions": model.context,
        "num_layers": model.encoder_layers or model.layers,
        "num_decoder_layers": model.layers,
        "d_model": model.d_model,
        "num_heads": model.attention.heads,
        "d_kv": model.d_head,
        "d_ff": model.feedforward.d_ff,
        "feed_forward_proj": f"gated-{named}" if gated else named,
        "layer_norm_epsilon": model.norm.eps,
        "dropout_rate": model.dropout,
        "is_encoder_decoder": True,
        # the older sign for an output that is not scaled
        "tie_word_embeddings": model.head.scale is not None,
    }
    if isinstance(position, T5Bias):
        tree["relative_attention_num_buckets"] = position.buckets
        tree["relative_attention_max_distance"] = position.max_distance
    return "T5ForConditionalGeneration", tree


T5 = Family(
    kind="t5",
    title="T5",
    models="encoder-decoder",
    architectures={"T5ForConditionalGeneration": "lm"},
    rules=lambda model: T5_RULES,
    read=read_t5,
    write=write_t5,
    copies=lambda model: dict.fromkeys(
        ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"
    ),
    # the first T5 files hold a table for the cross-attention as well, which nothing reads
    idle=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
)
