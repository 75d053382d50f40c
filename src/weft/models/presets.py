"""Named models (presets.toml), and the families that most of them belong to.

A preset is a config and a note on its origin; every field can be overridden.
"""

import tomllib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from weft.config import Config
from weft.errors import ConfigError, suggestion
from weft.models.config import (
    Bahdanau,
    Bengio,
    Decoder,
    ELMo,
    Encoder,
    EncoderDecoder,
    GloVe,
    NGram,
    Recurrent,
    Word2Vec,
)
from weft.models.head_config import LMHead, PretrainingHead
from weft.nn.config import Attention, Experts, Gated, LayerNorm, NormalInit, Plain, RMSNorm, XavierInit
from weft.nn.position_config import Learned, Rotary, Sinusoidal


def gpt(layers: int, d_model: int, heads: int, *, context: int, vocab_size: int = 50257, **changes: Any) -> Decoder:
    """GPT-2 and GPT-3: pre-norm, learned positions, tanh GELU, biases everywhere (Radford et al. 2019)."""
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "context": context, "layers": layers, "d_model": d_model}
    attention, feedforward = Attention(heads=heads, bias="all"), Plain(d_ff=4 * d_model, activation="gelu-tanh")
    parts = {"attention": attention, "feedforward": feedforward, "norm": LayerNorm(), "position": Learned()}
    return Decoder(**sizes | parts | changes)


def llama(
    layers: int,
    d_model: int,
    heads: int,
    *,
    d_ff: int,
    context: int = 2048,
    kv_heads: int | None = None,
    tied: bool = False,
    base: float = 10000.0,
    **changes: Any,
) -> Decoder:
    """LLaMA: pre-norm RMSNorm, rotary positions, SwiGLU, no biases (Touvron et al. 2023)."""
    sizes: dict[str, Any] = {"vocab_size": 32000, "context": context, "layers": layers, "d_model": d_model}
    attention, position = Attention(heads=heads, kv_heads=kv_heads), Rotary(base=base)
    parts = {"attention": attention, "feedforward": Gated(d_ff=d_ff), "norm": RMSNorm(), "position": position}
    return Decoder(**sizes | parts | {"head": LMHead(tied=tied)} | changes)


def mixture(layers: int, d_model: int, heads: int, *, experts: dict[str, Any], **changes: Any) -> Decoder:
    """LLaMA with a mixture of experts in every layer (Jiang et al. 2024)."""
    inner = Experts(**experts)
    return llama(layers, d_model, heads, d_ff=inner.d_ff, feedforward=inner, **changes)


def bert(layers: int, d_model: int, heads: int, *, vocab_size: int = 30522, context: int = 512) -> Encoder:
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


def vaswani(layers: int, d_model: int, heads: int, *, d_ff: int, dropout: float, **changes: Any) -> EncoderDecoder:
    """2017 Transformer: post-norm, sinusoids, ReLU, one shared table of embeddings (Vaswani et al. 2017)."""
    sizes: dict[str, Any] = {"vocab_size": 37000, "context": 512, "layers": layers, "d_model": d_model}
    parts = {"attention": Attention(heads=heads, bias="all"), "feedforward": Plain(d_ff=d_ff), "norm": LayerNorm()}
    others = {"placement": "post", "position": Sinusoidal(), "embedding_scale": True, "init": XavierInit()}
    return EncoderDecoder(**sizes | parts | others | {"dropout": dropout} | changes)


FAMILIES: dict[str, Callable[..., Config]] = {make.__name__: make for make in (gpt, llama, mixture, bert, vaswani)}
FAMILIES |= {"ngram": NGram, "recurrent": Recurrent, "bahdanau": Bahdanau, "decoder": Decoder}
FAMILIES |= {"word2vec": Word2Vec, "glove": GloVe, "elmo": ELMo, "bengio": Bengio}


def _entry(family: str, origin: str, **sizes: Any) -> tuple[Callable[[], Config], str]:
    return partial(FAMILIES[family], **sizes), origin


_TABLE = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
PRESETS = {name: _entry(**values) for name, values in _TABLE.items()}  # name: (function that makes the config, origin)


def preset(name: str) -> Any:
    """Return the config of a preset."""
    if name not in PRESETS:
        raise ConfigError(f"'{name}': no such preset; {suggestion(name, PRESETS)}")
    return PRESETS[name][0]()
