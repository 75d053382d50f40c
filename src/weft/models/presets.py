"""The models that have a name. A preset is a config and a line on where it comes from; any field can be overridden."""

from collections.abc import Callable
from typing import Any, TypedDict, Unpack

from weft.config import Config
from weft.errors import ConfigError, suggestion
from weft.models.config import Bahdanau, Decoder, Encoder, EncoderDecoder, LMHead, NGram, PretrainingHead, Recurrent
from weft.nn.config import Attention, Gated, LayerNorm, NormalInit, Plain, RMSNorm, XavierInit
from weft.nn.position_config import Learned, Rotary, Sinusoidal


def gpt(layers: int, d_model: int, heads: int, context: int, vocab_size: int = 50257, **changes: Any) -> Decoder:
    """GPT-2 and GPT-3: pre-norm, learned positions, tanh GELU, biases everywhere (Radford et al. 2019)."""
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "context": context, "layers": layers, "d_model": d_model}
    attention, feedforward = Attention(heads=heads, bias="all"), Plain(d_ff=4 * d_model, activation="gelu-tanh")
    parts = {"attention": attention, "feedforward": feedforward, "norm": LayerNorm(), "position": Learned()}
    return Decoder(**sizes | parts | changes)


class LlamaOptions(TypedDict, total=False):
    """What LLaMA's sizes differ in, besides their shape."""

    vocab_size: int
    kv_heads: int | None
    base: float
    eps: float
    tied: bool


def llama(
    layers: int, d_model: int, heads: int, d_ff: int, context: int = 2048, **options: Unpack[LlamaOptions]
) -> Decoder:
    """LLaMA: pre-norm RMSNorm, rotary positions, SwiGLU, no biases (Touvron et al. 2023)."""
    return Decoder(
        vocab_size=options.get("vocab_size", 32000),
        context=context,
        layers=layers,
        d_model=d_model,
        attention=Attention(heads=heads, kv_heads=options.get("kv_heads")),
        feedforward=Gated(d_ff=d_ff),
        norm=RMSNorm(eps=options.get("eps", 1e-5)),
        position=Rotary(base=options.get("base", 10000.0)),
        head=LMHead(tied=options.get("tied", False)),
    )


def bert(layers: int, d_model: int, heads: int, vocab_size: int = 30522, context: int = 512) -> Encoder:
    """BERT: post-norm, learned positions, two segments, both pretraining heads (Devlin et al. 2019)."""
    return Encoder(
        vocab_size=vocab_size,
        context=context,
        layers=layers,
        d_model=d_model,
        attention=Attention(heads=heads, bias="all", dropout=0.1),
        feedforward=Plain(d_ff=4 * d_model, activation="gelu"),
        norm=LayerNorm(eps=1e-12),
        placement="post",
        position=Learned(),
        embedding_norm=True,
        segments=2,
        dropout=0.1,
        init=NormalInit(depth_scaled=False),
        head=PretrainingHead(),
    )


def vaswani(layers: int, d_model: int, heads: int, d_ff: int, dropout: float, **changes: Any) -> EncoderDecoder:
    """The 2017 Transformer: post-norm, sinusoids, ReLU, one shared table of embeddings (Vaswani et al. 2017)."""
    sizes: dict[str, Any] = {"vocab_size": 37000, "context": 512, "layers": layers, "d_model": d_model}
    parts = {"attention": Attention(heads=heads, bias="all"), "feedforward": Plain(d_ff=d_ff), "norm": LayerNorm()}
    others = {"placement": "post", "position": Sinusoidal(), "embedding_scale": True, "init": XavierInit()}
    return EncoderDecoder(**sizes | parts | others | {"dropout": dropout} | changes)


def transformer_lm() -> Decoder:
    """The 2017 block as a language model; `transformer++` differs from it in four switches and in nothing else."""
    return Decoder(
        vocab_size=8192,
        context=256,
        layers=6,
        d_model=256,
        attention=Attention(heads=4),
        feedforward=Plain(d_ff=1024, activation="relu", bias=False),
        norm=LayerNorm(),
        placement="post",
        position=Sinusoidal(amplitude=256**-0.5),  # beside waves of size 1 the embeddings would hardly be seen
    )


def transformer_plus_plus() -> Decoder:
    """LLaMA's four switches on the 2017 block: pre-norm, RMSNorm, (gated) SiLU, rotary (Gu and Dao 2023, §4.2)."""
    return transformer_lm().replace(
        placement="pre", norm=RMSNorm(), feedforward=Gated(d_ff=688, activation="silu"), position=Rotary()
    )


# name: (how to make it, where it comes from)
PRESETS: dict[str, tuple[Callable[[], Config], str]] = {
    "ngram-3": (lambda: NGram(vocab_size=8192, order=3), "trigram, modified Kneser–Ney"),
    "ngram-5": (lambda: NGram(vocab_size=8192, order=5), "5-gram, modified Kneser–Ney"),
    "elman": (lambda: Recurrent(vocab_size=8192, cell="elman", d_model=512, d_embedding=256), "Elman 1990"),
    "lstm": (
        lambda: Recurrent(vocab_size=8192, cell="lstm", layers=2, d_model=512, tied=True, dropout=0.1),
        "Hochreiter and Schmidhuber 1997",
    ),
    "gru": (
        lambda: Recurrent(vocab_size=8192, cell="gru", layers=2, d_model=512, tied=True, dropout=0.1),
        "Cho et al. 2014",
    ),
    "bahdanau": (
        lambda: Bahdanau(vocab_size=30000, d_model=1000, d_embedding=620, d_attention=1000),
        "Bahdanau et al. 2015, RNNsearch",
    ),
    "bahdanau-tiny": (lambda: Bahdanau(vocab_size=8192, d_model=256, dropout=0.1), "a laptop's size"),
    "vaswani-tiny": (lambda: vaswani(3, 256, 4, 1024, 0.1, vocab_size=8192), "a laptop's size"),
    "vaswani-base": (lambda: vaswani(6, 512, 8, 2048, 0.1), "Vaswani et al. 2017, table 3"),
    "vaswani-big": (lambda: vaswani(6, 1024, 16, 4096, 0.3), "Vaswani et al. 2017, table 3"),
    "transformer": (transformer_lm, "the 2017 block as a language model"),
    "transformer++": (transformer_plus_plus, "the same with LLaMA's four switches"),
    "bert-tiny": (lambda: bert(2, 128, 2), "Turc et al. 2019"),
    "bert-mini": (lambda: bert(4, 256, 4), "Turc et al. 2019"),
    "bert-small": (lambda: bert(4, 512, 8), "Turc et al. 2019"),
    "bert-base": (lambda: bert(12, 768, 12), "Devlin et al. 2019"),
    "bert-large": (lambda: bert(24, 1024, 16), "Devlin et al. 2019"),
    "gpt-tiny": (lambda: gpt(4, 128, 4, 128, 8192), "a laptop's size"),
    "gpt-mini": (
        lambda: gpt(6, 384, 6, 256, 8192, dropout=0.2, attention=Attention(heads=6, bias="all", dropout=0.2)),
        "nanoGPT's character model's size",
    ),
    "gpt2": (lambda: gpt(12, 768, 12, 1024), "Radford et al. 2019"),
    "gpt2-medium": (lambda: gpt(24, 1024, 16, 1024), "Radford et al. 2019"),
    "gpt2-large": (lambda: gpt(36, 1280, 20, 1024), "Radford et al. 2019"),
    "gpt2-xl": (lambda: gpt(48, 1600, 25, 1024), "Radford et al. 2019"),
    "gpt3-small": (lambda: gpt(12, 768, 12, 2048), "Brown et al. 2020, table 2.1"),
    "gpt3-medium": (lambda: gpt(24, 1024, 16, 2048), "Brown et al. 2020, table 2.1"),
    "gpt3-large": (lambda: gpt(24, 1536, 16, 2048), "Brown et al. 2020, table 2.1"),
    "gpt3-xl": (lambda: gpt(24, 2048, 16, 2048), "table 2.1 prints 24 heads of 128, not 2048; built as 16"),
    "gpt3-2.7b": (lambda: gpt(32, 2560, 32, 2048), "Brown et al. 2020, table 2.1"),
    "gpt3-6.7b": (lambda: gpt(32, 4096, 32, 2048), "Brown et al. 2020, table 2.1"),
    "gpt3-13b": (lambda: gpt(40, 5120, 40, 2048), "table 2.1 prints d_model 5140, not 40 × 128; built as 5120"),
    "gpt3-175b": (lambda: gpt(96, 12288, 96, 2048), "Brown et al. 2020, table 2.1"),
    "llama-tiny": (lambda: llama(4, 128, 4, 352, 128, vocab_size=8192, tied=True), "a laptop's size"),
    "llama-mini": (lambda: llama(6, 384, 6, 1024, 256, vocab_size=8192, tied=True), "a small GPU's size"),
    "llama-7b": (lambda: llama(32, 4096, 32, 11008, eps=1e-6), "Touvron et al. 2023"),
    "llama-13b": (lambda: llama(40, 5120, 40, 13824, eps=1e-6), "Touvron et al. 2023"),
    "llama-33b": (lambda: llama(60, 6656, 52, 17920, eps=1e-6), "Touvron et al. 2023"),
    "llama-65b": (lambda: llama(80, 8192, 64, 22016), "Touvron et al. 2023"),
    "llama3-8b": (
        lambda: llama(32, 4096, 32, 14336, 8192, vocab_size=128256, kv_heads=8, base=500000.0),
        "Dubey et al. 2024",
    ),
    "smollm2-135m": (
        lambda: llama(30, 576, 9, 1536, 8192, vocab_size=49152, kv_heads=3, base=100000.0, tied=True),
        "Allal et al. 2025",
    ),
}


def preset(name: str) -> Any:
    """The config of a named model."""
    if name not in PRESETS:
        raise ConfigError(f"'{name}': no such preset; {suggestion(name, PRESETS)}")
    return PRESETS[name][0]()
