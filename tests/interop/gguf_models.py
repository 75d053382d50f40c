"""Small decoders of all architectures that weft writes as GGUF files, with random weights and a BPE tokenizer."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.interop.bundle import ModelBundle
from weft.interop.gguf import gguf
from weft.interop.gguf.file import open_file
from weft.models.build import build
from weft.models.config import Decoder
from weft.models.head_config import LMHead
from weft.models.presets import gpt, llama
from weft.nn.config import Attention, Experts, Gated, LayerNorm, Plain, RMSNorm
from weft.nn.position_config import ALiBi, LinearScaling, Llama3Scaling, LongRoPE, NoPosition, Rotary, Tempered, YaRN
from weft.text.config import BPE
from weft.text.tokenizer import Tokenizer, build_tokenizer

D, HEADS, LAYERS, FF = 64, 4, 2, 96
TEXTS = (
    "the cat sat on the mat in 1984, and the cat's hat  was 3.14 big",
    "naïve café: 東京 🙂\n\n  12\t3 hats",
    "  the",
    "",
)
GPT = gpt(LAYERS, D, HEADS, context=48, vocab_size=300)
LLAMA = llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300)
GROUPED = llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300, kv_heads=2)
TIED = llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300, tied=True)
ROTARY_GPT = GPT.replace(position=Rotary())
WITHOUT_BIAS = ROTARY_GPT.replace(
    feedforward=Plain(d_ff=FF, activation="gelu-tanh", bias=False), attention=Attention(heads=HEADS)
)
SHORT = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.1)
LONG = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 21.3)
GEMMA = TIED.replace(feedforward=Gated(d_ff=FF, activation="gelu-tanh"), embedding_scale=True, norm=RMSNorm(offset=1.0))
GEMMA3 = GEMMA.replace(
    layers=7,
    placement="sandwich",
    attention=Attention(heads=HEADS, kv_heads=2, d_head=24, qk_norm=RMSNorm(offset=1.0)),
    position=Rotary(base=1e6),
    pattern=[{"window": 5, "position": Rotary(base=1e4)}] * 5 + [{}],
)
STABLELM = GROUPED.replace(norm=LayerNorm(), position=Rotary(fraction=0.25))
MIXTURE = GROUPED.replace(feedforward=Experts(experts=5, chosen=2, d_ff=FF))
LAYERED = Experts(experts=6, chosen=3, d_ff=32, shared="added", shared_d_ff=64, dense=Gated(d_ff=FF))
DEEPSEEK = MIXTURE.replace(
    layers=3,
    feedforward=LAYERED.replace(
        score="sigmoid", choice_bias=0.0, scale=2.5, dense_layers=(0,), groups=3, kept_groups=2
    ),
    attention=Attention(
        heads=HEADS,
        d_head=32,
        d_v=16,
        scale=32**-0.5 * (0.1 * math.log(4.0) + 1) ** 2,
        latent={"rank": 20, "query_rank": 28},
    ),
    position=Rotary(
        fraction=0.25, pairs="adjacent", scaling=YaRN(factor=4.0, original_context=12, attention_factor=1.0)
    ),
)
FAMILIES = {
    "llama": GROUPED,
    "llama-neighbours": LLAMA.replace(position=Rotary(pairs="adjacent")),
    "llama-linear": LLAMA.replace(position=Rotary(scaling=LinearScaling(factor=4.0))),
    "llama-3.1": TIED.replace(position=Rotary(base=5e5, scaling=Llama3Scaling(factor=32.0))),
    "llama-biased": LLAMA.replace(attention=Attention(heads=HEADS, bias="all")),
    "llama-out": LLAMA.replace(attention=Attention(heads=HEADS, bias="out")),
    "qwen2-biased": LLAMA.replace(attention=Attention(heads=HEADS, bias="qkv"), head=LMHead(tied=False, bias=True)),
    "qwen2": LLAMA.replace(attention=Attention(heads=HEADS, kv_heads=2, bias="qkv")),
    "qwen3": llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300, norm=RMSNorm(eps=1e-6)).replace(
        attention=Attention(heads=HEADS, kv_heads=2, d_head=24, qk_norm=RMSNorm(eps=1e-6))
    ),
    "gemma": GEMMA,
    "gpt2": GPT,
    "gemma2": GEMMA.replace(
        placement="sandwich",
        attention=Attention(heads=2, d_head=256, softcap=50.0),  # transformers supports only this width in GGUF files
        head=LMHead(softcap=30.0),
        pattern=[{"window": 5}, {}],
    ),
    "olmo2": LLAMA.replace(
        placement="res-post", attention=Attention(heads=HEADS, kv_heads=2, qk_norm=RMSNorm(), qk_norm_over="heads")
    ),
    "granite": LLAMA.replace(
        embedding_scale=12.0,
        residual_scale=0.25,
        attention=Attention(heads=HEADS, scale=0.125),
        head=LMHead(scale=0.125),
    ),
    "starcoder2": ROTARY_GPT,
    "gptneox": ROTARY_GPT.replace(sublayers="parallel-two-norms", position=Rotary(fraction=0.5)),
    "phi2": ROTARY_GPT.replace(sublayers="parallel", position=Rotary(fraction=0.5), head=LMHead(tied=False, bias=True)),
    "phi3": GROUPED.replace(position=Rotary(fraction=0.75)),
    "phi3-long": TIED.replace(
        context=512,
        position=Rotary(scaling=LongRoPE(short=SHORT, long=LONG, original_context=256, attention_factor=1.25)),
    ),
    "gemma3": GEMMA3.replace(position=Rotary(base=1e6, scaling=LinearScaling(factor=8.0))),
    "gemma3-softcap": GEMMA3.replace(
        layers=4, pattern=[{"window": 5}, {}], position=Rotary(base=1e4), head=LMHead(tied=False, softcap=20.0)
    ),
    "gemma3-windows": GEMMA3.replace(
        pattern=[], attention=GEMMA3.attention.replace(window=5), position=Rotary(base=2e4)
    ),
    "smollm3": llama(5, D, HEADS, d_ff=FF, context=48, vocab_size=300, kv_heads=2, tied=True, base=5e6).replace(
        pattern=[{}, {}, {}, {"position": NoPosition()}]
    ),
    "falcon": WITHOUT_BIAS.replace(sublayers="parallel", attention=Attention(heads=HEADS, kv_heads=1)),
    "falcon-40b": WITHOUT_BIAS.replace(sublayers="parallel-two-norms", attention=Attention(heads=HEADS, kv_heads=2)),
    "stablelm": STABLELM,
    "stablelm-tied": STABLELM.replace(head=LMHead(), attention=Attention(heads=HEADS, bias="qkv")),
    "stablelm-12b": STABLELM.replace(
        sublayers="parallel",
        attention=Attention(heads=HEADS, kv_heads=2, qk_norm=LayerNorm(bias=False), qk_norm_over="each-head"),
    ),
    "olmo": GROUPED.replace(
        norm=LayerNorm(gain=False, bias=False), attention=Attention(heads=HEADS, kv_heads=2, clip=0.5)
    ),
    "bloom": GPT.replace(position=ALiBi(), embedding_norm=True),
    "mixtral": MIXTURE,
    "qwen2moe": MIXTURE.replace(
        feedforward=Experts(experts=6, chosen=3, d_ff=32, renormalised=False, shared="gated", shared_d_ff=96),
        attention=Attention(heads=HEADS, kv_heads=2, bias="qkv"),
    ),
    "qwen3moe": MIXTURE.replace(attention=Attention(heads=HEADS, kv_heads=2, d_head=128, qk_norm=RMSNorm())),
    "granitemoe": MIXTURE.replace(
        feedforward=MIXTURE.feedforward.replace(score="softmax-chosen"),
        attention=Attention(heads=HEADS, kv_heads=2, scale=0.125),
        embedding_scale=12.0,
        head=LMHead(scale=0.125),
    ),
    "hunyuan-moe": MIXTURE.replace(
        feedforward=MIXTURE.feedforward.replace(shared="added", shared_d_ff=96),
        attention=Attention(heads=HEADS, kv_heads=2, d_head=24, qk_norm=RMSNorm(), qk_norm_rotated=True),
    ),
    "minimax-m2": MIXTURE.replace(
        feedforward=MIXTURE.feedforward.replace(score="sigmoid", choice_bias=0.0),
        attention=Attention(heads=HEADS, kv_heads=2, d_head=24, qk_norm=RMSNorm(), qk_norm_over="heads"),
        position=Rotary(fraction=0.5),
    ),
    "glm4moe": MIXTURE.replace(
        layers=3,
        feedforward=Experts(
            experts=6,
            chosen=3,
            d_ff=32,
            score="sigmoid",
            choice_bias=0.0,
            scale=2.5,
            shared="added",
            shared_d_ff=64,
            dense=Gated(d_ff=FF),
            dense_layers=(0,),
        ),
        attention=Attention(heads=HEADS, kv_heads=2, bias="qkv", qk_norm=RMSNorm()),
        position=Rotary(fraction=0.5),
    ),
    "gpt-oss": MIXTURE.replace(
        feedforward=Experts(
            experts=6,
            chosen=3,
            d_ff=32,
            score="softmax-chosen",
            router_bias=True,
            bias=True,
            limit=7.0,
            up_offset=1.0,
            beta=1.702,
        ),
        attention=Attention(heads=HEADS, kv_heads=2, bias="all", sinks=True),
        position=Rotary(scaling=YaRN(factor=4.0, original_context=12, whole_pairs=False)),
        pattern=[{"window": 5}, {}],
    ),
    "deepseek2": DEEPSEEK,
    "deepseek2-softmax": DEEPSEEK.replace(
        feedforward=DEEPSEEK.feedforward.replace(
            score="softmax", choice_bias=None, renormalised=False, group_score="maximum"
        ),
        attention=DEEPSEEK.attention.replace(latent={"rank": 20}, scale=None),
        position=Rotary(fraction=0.25, pairs="adjacent"),
    ),
    "ernie4_5-moe": MIXTURE.replace(
        layers=6,
        feedforward=LAYERED.replace(choice_bias=0.0, dense_layers=(0, 1, 2, 4)),
        position=Rotary(base=5e5, pairs="halves"),
    ),
    "llama4": MIXTURE.replace(
        layers=5,
        feedforward=LAYERED.replace(
            score="sigmoid", renormalised=False, weighs="input", shared_d_ff=32, dense_layers=(0, 2, 4)
        ),
        attention=Attention(heads=HEADS, kv_heads=2, qk_norm=RMSNorm(gain=False), qk_norm_rotated=True),
        position=Rotary(scaling=Llama3Scaling(factor=16.0, high=1.0)),
        pattern=[{"chunk": 8192}] * 3 + [{"position": Tempered()}],
    ),
    "llama-yarn": LLAMA.replace(position=Rotary(scaling=YaRN(factor=4.0, original_context=12, fast=16.0))),
    "olmoe": MIXTURE.replace(
        feedforward=MIXTURE.feedforward.replace(renormalised=False),
        attention=Attention(heads=HEADS, qk_norm=RMSNorm(), qk_norm_over="heads"),
    ),
}
TINY = llama(1, 32, 2, d_ff=32, context=16, vocab_size=300)


def bpe(size: int = 300) -> Tokenizer:
    return build_tokenizer(BPE(vocab_size=size), [" ".join(TEXTS)] * 4)


def random_weights(model: Decoder, dtype: torch.dtype = torch.float32) -> dict[str, Callable[[], Tensor]]:
    """Random weights, with gains around 1, so that a swapped or missing tensor changes the logits."""
    state = build(model).state_dict()
    weights = {n: (torch.randn_like(t) * 0.15 + n.endswith("norm.weight")).to(dtype) for n, t in state.items()}
    return {name: partial(weights.__getitem__, name) for name in weights}


def write(
    path: Path, model: Any, weights: Any = None, *, dtype: str | None = None, notes: dict[str, Any] | None = None
) -> None:
    """Write a model with random weights, or these, and the tokenizer of 300 tokens."""
    weights = random_weights(model) if weights is None else weights
    gguf.write(ModelBundle(model, weights, bpe(), "here", notes=notes or {}), path, dtype)


def logits(bundle: ModelBundle, tokens: Tensor) -> Tensor:
    model = build(bundle.model).eval()
    model.load_state_dict({name: read().float() for name, read in bundle.weights.items()})
    with torch.no_grad():
        return model(tokens)


def encodings(path: Path) -> dict[str, str]:
    """Names of the encodings of a file's tensors."""
    return {name: entry.encoding.name for name, entry in open_file(path).tensors.items()}
