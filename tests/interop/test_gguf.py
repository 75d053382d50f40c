"""GGUF files against two programs of other authors: the `gguf` package writes them, `transformers` reads them."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import random
import re
import struct
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.later import Later
from torch import Tensor

from weft.api.export_model import export_model
from weft.api.import_model import import_model
from weft.errors import InteropError, WeftError
from weft.interop.bundle import ModelBundle
from weft.interop.gguf import gguf as weft_gguf
from weft.interop.gguf import q4_k as gguf_q4_k
from weft.interop.gguf.file import ENCODINGS, STRING, Contents, Entry, open_file
from weft.interop.gguf.gguf import architecture_of
from weft.interop.gguf.tokenizer import tokenizer_keys
from weft.models.build import build
from weft.models.config import ClassificationHead, Decoder, LMHead
from weft.models.presets import gpt, llama, preset
from weft.nn.config import Attention, Gated, LayerNorm, Plain, RMSNorm
from weft.nn.position_config import ALiBi, DynamicNTK, LinearScaling, Llama3Scaling, LongRoPE, NoPosition, Rotary
from weft.text.config import BPE
from weft.text.tokenizer import Tokenizer, build_tokenizer

transformers = Later("transformers")

gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")

D, HEADS, LAYERS, FF = 64, 4, 2, 96
TEXTS = (
    "the cat sat on the mat in 1984, and the cat's hat  was 3.14 big",
    "naïve café: 東京 🙂\n\n  12\t3 hats",
    "  the",
    "",
)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def bpe(size: int = 300) -> Tokenizer:
    return build_tokenizer(BPE(vocab_size=size), [" ".join(TEXTS)] * 4)


def weights_of(model: Decoder, dtype: torch.dtype = torch.float32) -> dict[str, Callable[[], Tensor]]:
    """Random weights, gains around 1, that would show a swap or an omission."""
    state = build(model).state_dict()
    made = {n: (torch.randn_like(t) * 0.15 + n.endswith("norm.weight")).to(dtype) for n, t in state.items()}
    return {name: partial(made.__getitem__, name) for name in made}


def write(model: Any, weights: Any, tokenizer: Tokenizer | None, path: Path, dtype: str | None = None) -> None:
    weft_gguf.write(ModelBundle(model, weights, tokenizer, "here"), path, dtype)


def logits(bundle: ModelBundle, tokens: Tensor) -> Tensor:
    model = build(bundle.model).eval()
    model.load_state_dict({name: make().float() for name, make in bundle.weights.items()})
    with torch.no_grad():
        return model(tokens)


# ---- files as the converter of llama.cpp writes them


SHAPE: dict[str, Any] = {"hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
SHAPE |= {"intermediate_size": FF, "num_key_value_heads": 2, "max_position_embeddings": 48}


def their_model(architecture: str, vocab: int, **changes: Any) -> Any:
    shape = SHAPE | {"vocab_size": vocab, "rms_norm_eps": 1e-5, "tie_word_embeddings": False} | changes
    made = {
        "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)),
        "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape)),
        "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**shape, head_dim=128)),
        "gemma": lambda: transformers.GemmaForCausalLM(
            transformers.GemmaConfig(**shape | {"tie_word_embeddings": True}, head_dim=24)
        ),
        "gpt2": lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=vocab, n_positions=1024, n_embd=D, n_layer=LAYERS, n_head=HEADS)
        ),
    }[architecture]().eval()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.15)
    return made


def permuted(weight: Tensor, heads: int) -> Tensor:
    """What llama.cpp does to rows of queries and keys: halves become neighbours."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


LLAMA_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GPT2_NAMES = {
    "transformer.wte": "token_embd",
    "transformer.wpe": "position_embd",
    "transformer.ln_f": "output_norm",
    "ln_1": "attn_norm",
    "ln_2": "ffn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}


def reference_file(path: Path, architecture: str, theirs: Any, tokenizer: Tokenizer) -> None:
    """The file of a transformers model, by the `gguf` package."""
    config = theirs.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(D)
    writer.add_head_count(HEADS)
    if architecture == "gpt2":
        writer.add_feed_forward_length(4 * D)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(FF)
        writer.add_head_count_kv(2)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        if architecture in ("qwen3", "gemma"):
            writer.add_key_length(config.head_dim)
            writer.add_value_length(config.head_dim)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    keys = tokenizer_keys(tokenizer, config.vocab_size)
    writer.add_token_list(keys["tokenizer.ggml.tokens"])
    writer.add_token_types(keys["tokenizer.ggml.token_type"])
    writer.add_token_merges(keys["tokenizer.ggml.merges"])
    for name, tensor in theirs.named_parameters():
        writer.add_tensor(*stored(architecture, name, tensor.detach().clone()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def stored(architecture: str, name: str, tensor: Tensor) -> tuple[str, Any]:
    """A tensor's name and numbers in a file."""
    stem, kind = name.rsplit(".", 1)
    if architecture == "gpt2":
        tensor = tensor.T if tensor.dim() == 2 and ".h." in name else tensor
        parts = stem.removeprefix("transformer.h.").split(".", 1)
        new = GPT2_NAMES.get(stem) or f"blk.{parts[0]}.{GPT2_NAMES[parts[1]]}"
    else:
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            tensor = permuted(tensor, HEADS if "q_proj" in name else 2)
        if architecture == "gemma" and "norm" in name:
            tensor = tensor + 1
        parts = stem.removeprefix("model.layers.").split(".", 1)
        new = LLAMA_NAMES.get(stem) or f"blk.{parts[0]}.{LLAMA_NAMES[parts[1]]}"
    return f"{new}.{kind}", tensor.contiguous().numpy()


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma", "gpt2"])
def test_a_file_of_theirs_gives_their_logits(architecture: str, tmp_path: Path) -> None:
    tokenizer = bpe()
    theirs = their_model(architecture, tokenizer.vocab_size)
    reference_file(tmp_path / "m.gguf", architecture, theirs, tokenizer)
    bundle = weft_gguf.read(tmp_path / "m.gguf")
    tokens = torch.randint(tokenizer.vocab_size, (2, 17))
    with torch.no_grad():
        assert (logits(bundle, tokens) - theirs(tokens).logits).abs().max() <= 1e-5
    assert isinstance(bundle.model, Decoder)
    assert bundle.model.head == LMHead(tied=architecture in ("gemma", "gpt2"))
    assert bundle.tokenizer is not None
    assert [bundle.tokenizer.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gpt2"])
def test_transformers_reads_what_is_written(architecture: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")
    tokenizer = bpe()
    first = tmp_path / "first.gguf"
    reference_file(first, architecture, their_model(architecture, tokenizer.vocab_size), tokenizer)
    bundle = weft_gguf.read(first)
    weft_gguf.write(bundle, tmp_path / "m.gguf", "f16")
    again = weft_gguf.read(tmp_path / "m.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    tokens = torch.randint(tokenizer.vocab_size, (2, 17))
    with torch.no_grad():
        assert (logits(again, tokens) - theirs(tokens).logits).abs().max() <= 1e-5
    reads = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        assert reads.encode(text, add_special_tokens=False) == tokenizer.encode(text)


SMALL: dict[str, Any] = {"hidden_size": D, "vocab_size": 300}
OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "phi3": ("Phi3", {**SHAPE, "original_max_position_embeddings": 48, "pad_token_id": 0, "sliding_window": 6}),
    "gemma3": (
        "Gemma3",
        {**SHAPE, "num_hidden_layers": 7, "head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 5},
    ),
    "smollm3": ("SmolLM3", {**SHAPE, "num_hidden_layers": 5, "pad_token_id": 0}),
    "falcon": (
        "Falcon",
        {
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_kv_heads": 2,
            "new_decoder_architecture": True,
            "activation": "gelu_pytorch_tanh",
        },
    ),
    "stablelm": ("StableLm", {**SHAPE, "use_qkv_bias": True}),
    "olmo": ("Olmo", {**SHAPE, "clip_qkv": 0.5, "tie_word_embeddings": True}),
    "bloom": ("Bloom", {"n_layer": LAYERS, "n_head": HEADS}),
}


def other_keys(writer: Any, architecture: str, config: Any) -> None:
    """The keys that the converter of llama.cpp writes."""
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(D)
    writer.add_head_count(HEADS)
    plain = architecture in ("falcon", "bloom")
    writer.add_context_length(48)
    writer.add_feed_forward_length(4 * D if plain else FF)
    writer.add_head_count_kv(HEADS if architecture == "bloom" else 2)
    if architecture in ("phi3", "gemma3", "smollm3"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    else:
        writer.add_layer_norm_eps(1e-5)
    if architecture in ("phi3", "smollm3", "olmo"):
        writer.add_rope_dimension_count(D // HEADS)
    elif architecture == "stablelm":
        writer.add_rope_dimension_count(D // HEADS // 4)
    if architecture == "gemma3":
        writer.add_key_length(24)
        writer.add_value_length(24)
        writer.add_rope_freq_base(config.rope_parameters["full_attention"]["rope_theta"])
    elif not plain:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture in ("phi3", "gemma3"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "olmo":
        writer.add_clamp_kqv(config.clip_qkv)


def by_parts(joined: Tensor, groups: int) -> Tensor:
    """Queries, keys and values that lie group by group, as all queries, all keys, all values."""
    parts = joined.reshape(groups, -1, D // HEADS, *joined.shape[1:])
    return torch.cat([part.reshape(-1, *joined.shape[1:]) for part in (parts[:, :-2], parts[:, -2], parts[:, -1])])


@pytest.mark.parametrize("architecture", OTHERS)
def test_a_file_of_another_decoder_gives_its_logits(architecture: str, tmp_path: Path) -> None:
    """A model of transformers, stored under the names of the package `gguf` in the layout of llama.cpp's converter."""
    name, settings = OTHERS[architecture]
    config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(**SMALL | settings)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    other_keys(writer, architecture, config)
    keys = tokenizer_keys(bpe(), 300)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(keys["tokenizer.ggml.tokens"])
    writer.add_token_types(keys["tokenizer.ggml.token_type"])
    writer.add_token_merges(keys["tokenizer.ggml.merges"])
    kind = next(each for each, its in gguf.MODEL_ARCH_NAMES.items() if its == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    for name, parameter in theirs.named_parameters():
        weight = parameter.data.normal_(std=0.15).clone()
        if architecture in ("smollm3", "olmo") and ("q_proj" in name or "k_proj" in name):
            weight = permuted(weight, HEADS if "q_proj" in name else 2)
        if "query_key_value" in name:
            weight = by_parts(weight, HEADS if architecture == "bloom" else 2)
        weight = weight + 1 if architecture == "gemma3" and name.endswith("norm.weight") else weight
        name = name.removeprefix("transformer.") if architecture == "bloom" else name
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tokens = torch.randint(300, (2, 17))
    with torch.no_grad():
        assert (logits(weft_gguf.read(tmp_path / "m.gguf"), tokens) - theirs(tokens).logits).abs().max() <= 2e-5


# ---- in and out


ROTATED = gpt(LAYERS, D, HEADS, context=48, vocab_size=300).replace(position=Rotary())
BARE = ROTATED.replace(feedforward=Plain(d_ff=FF, activation="gelu-tanh", bias=False), attention=Attention(heads=HEADS))
SHORT = (1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.1)
LONG = (1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 21.3)
GEMMA3 = llama(7, D, HEADS, d_ff=FF, context=48, vocab_size=300, tied=True).replace(
    feedforward=Gated(d_ff=FF, activation="gelu-tanh"),
    embedding_scale=True,
    norm=RMSNorm(offset=1.0),
    placement="sandwich",
    attention=Attention(heads=HEADS, kv_heads=2, d_head=24, qk_norm=RMSNorm(offset=1.0)),
    position=Rotary(base=1e6),
    pattern=[{"window": 5, "position": Rotary(base=1e4)}] * 5 + [{}],
)
STABLELM = llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300, kv_heads=2).replace(
    norm=LayerNorm(), position=Rotary(fraction=0.25)
)
FAMILIES = {
    "llama": llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300, kv_heads=2),
    "llama-neighbours": llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300).replace(
        position=Rotary(pairs="adjacent")
    ),
    "llama-linear": llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300).replace(
        position=Rotary(scaling=LinearScaling(factor=4.0))
    ),
    "llama-3.1": llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300, tied=True, base=5e5).replace(
        position=Rotary(base=5e5, scaling=Llama3Scaling(factor=32.0))
    ),
    "llama-biased": llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300).replace(
        attention=Attention(heads=HEADS, bias="all")
    ),
    "llama-out": llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300).replace(
        attention=Attention(heads=HEADS, bias="out")
    ),
    "qwen2-biased": llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300).replace(
        attention=Attention(heads=HEADS, bias="qkv"), head=LMHead(tied=False, bias=True)
    ),
    "qwen2": llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300).replace(
        attention=Attention(heads=HEADS, kv_heads=2, bias="qkv")
    ),
    "qwen3": llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300, norm=RMSNorm(eps=1e-6)).replace(
        attention=Attention(heads=HEADS, kv_heads=2, d_head=24, qk_norm=RMSNorm(eps=1e-6))
    ),
    "gemma": llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300, tied=True).replace(
        feedforward=Gated(d_ff=FF, activation="gelu-tanh"), embedding_scale=True, norm=RMSNorm(offset=1.0)
    ),
    "gpt2": gpt(LAYERS, D, HEADS, context=48, vocab_size=300),
    "gemma2": llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300, tied=True).replace(
        feedforward=Gated(d_ff=FF, activation="gelu-tanh"),
        embedding_scale=True,
        norm=RMSNorm(offset=1.0),
        placement="sandwich",
        attention=Attention(heads=2, d_head=256, softcap=50.0),  # transformers takes no other width from a file
        head=LMHead(softcap=30.0),
        pattern=[{"window": 5}, {}],
    ),
    "olmo2": llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300).replace(
        placement="res-post", attention=Attention(heads=HEADS, kv_heads=2, qk_norm=RMSNorm(), qk_norm_over="heads")
    ),
    "granite": llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300).replace(
        embedding_scale=12.0,
        residual_scale=0.25,
        attention=Attention(heads=HEADS, scale=0.125),
        head=LMHead(scale=0.125),
    ),
    "starcoder2": ROTATED,
    "gptneox": ROTATED.replace(sublayers="parallel-two-norms", position=Rotary(fraction=0.5)),
    "phi2": ROTATED.replace(sublayers="parallel", position=Rotary(fraction=0.5), head=LMHead(tied=False, bias=True)),
    "phi3": llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300, kv_heads=2).replace(
        position=Rotary(fraction=0.75)
    ),
    "phi3-long": llama(LAYERS, D, HEADS, d_ff=FF, context=512, vocab_size=300, tied=True).replace(
        position=Rotary(scaling=LongRoPE(short=SHORT, long=LONG, original_context=256, attention_factor=1.25))
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
    "falcon": BARE.replace(sublayers="parallel", attention=Attention(heads=HEADS, kv_heads=1)),
    "falcon-40b": BARE.replace(sublayers="parallel-two-norms", attention=Attention(heads=HEADS, kv_heads=2)),
    "stablelm": STABLELM,
    "stablelm-tied": STABLELM.replace(head=LMHead(), attention=Attention(heads=HEADS, bias="qkv")),
    "stablelm-12b": STABLELM.replace(
        sublayers="parallel",
        attention=Attention(heads=HEADS, kv_heads=2, qk_norm=LayerNorm(bias=False), qk_norm_over="each-head"),
    ),
    "olmo": llama(LAYERS, D, HEADS, d_ff=FF, context=48, vocab_size=300, kv_heads=2).replace(
        norm=LayerNorm(gain=False, bias=False), attention=Attention(heads=HEADS, kv_heads=2, clip=0.5)
    ),
    "bloom": gpt(LAYERS, D, HEADS, context=48, vocab_size=300).replace(position=ALiBi(), embedding_norm=True),
}


def check_names(contents: Contents) -> None:
    """Tensors have the names that the package `gguf` lists; the output's is there where llama.cpp won't do without."""
    names = {each: kind for kind, each in gguf.MODEL_ARCH_NAMES.items()}
    architecture = names[contents.get("general.architecture")]
    listed = {gguf.TENSOR_NAMES[each] for each in gguf.MODEL_TENSORS[architecture]}
    written = {re.sub(r"^blk\.\d+", "blk.{bid}", each.rpartition(".")[0]) for each in contents.tensors}
    assert written <= listed | {"output"}
    assert "output" in written or architecture.name not in ("OLMO2", "GPTNEOX", "PHI2", "STABLELM")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (place % 2)) for place, name in enumerate(FAMILIES)]
)
def test_writing_and_reading_changes_nothing(name: str, tmp_path: Path) -> None:
    model, tokenizer = FAMILIES[name], bpe()
    tokenizer.chat_template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    weights = weights_of(model)
    write(model, weights, tokenizer, tmp_path / "m.gguf")
    check_names(open_file(tmp_path / "m.gguf"))
    bundle = weft_gguf.read(tmp_path / "m.gguf")
    assert bundle.tokenizer is not None
    assert bundle.tokenizer.chat_template == tokenizer.chat_template
    assert bundle.tokenizer.roles == tokenizer.roles
    tokens = torch.randint(300, (2, 17))
    assert (logits(bundle, tokens) - logits(ModelBundle(model, weights, None, ""), tokens)).abs().max() <= 1e-5
    if name == "llama-neighbours":  # they come back as halves, with their rows in that order
        assert bundle.model.replace(position=model.position) == model
    else:
        assert bundle.model == model
        rounded = name.startswith("gemma")  # 1 + w is stored, which rounds w
        same = {n: make for n, make in weights.items() if not (rounded and "norm" in n)}
        assert all(torch.equal(bundle.weights[n](), make()) for n, make in same.items())


def test_norms_of_each_head_stay_in_fp32(tmp_path: Path) -> None:
    """They are matrices, but llama.cpp takes no norm in anything else."""
    model = FAMILIES["stablelm-12b"]
    write(model, weights_of(model), None, tmp_path / "m.gguf", "f16")
    kinds = {name: entry.encoding.name for name, entry in open_file(tmp_path / "m.gguf").tensors.items()}
    assert kinds["blk.0.attn_q_norm.weight"] == kinds["blk.0.attn_norm.weight"] == "F32"
    assert kinds["blk.0.attn_q.weight"] == "F16"


@pytest.mark.parametrize(
    "name",
    [
        "gemma3",
        "falcon",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "starcoder2", "stablelm", "bloom")),
    ],
)
def test_transformers_reads_other_decoders(name: str, tmp_path: Path) -> None:
    """Of those that weft writes, the ones whose files transformers knows."""
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")
    model = FAMILIES[name].replace(context=512)
    if name == "gemma3":  # it takes no other width, and no scaling, from a file
        model = GEMMA3.replace(attention=GEMMA3.attention.replace(heads=2, kv_heads=1, d_head=256))
    weights = weights_of(model)
    write(model, weights, bpe(), tmp_path / "m.gguf")
    if name == "falcon":  # theirs is the exact function, llama.cpp's its approximation
        model = model.replace(feedforward=model.feedforward.replace(activation="gelu"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    tokens = torch.randint(300, (2, 17))
    with torch.no_grad():
        ours = logits(ModelBundle(model, weights, None, ""), tokens)
        assert (ours - theirs(tokens).logits).abs().max() <= (5e-5 if name == "gemma3" else 1e-5)  # of seven layers


@pytest.mark.parametrize("dtype", [None, "f16", "q8_0", "q4_k", "q4_0"])
@pytest.mark.parametrize("name", FAMILIES)
def test_llama_cpp_reads_what_is_written(name: str, dtype: str | None, tmp_path: Path) -> None:
    """Nearly the same logits, for it keeps its cache in fp16, and rounds what it multiplies with 8-bit blocks."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="the package llama-cpp-python is not installed")
    model = FAMILIES[name].replace(context=512)
    write(model, weights_of(model), bpe(), tmp_path / "m.gguf", dtype)
    tokens = torch.randint(3, 300, (1, 20))
    ours = logits(weft_gguf.read(tmp_path / "m.gguf"), tokens)[0]
    theirs = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    theirs.eval(tokens[0].tolist())
    found = torch.from_numpy(np.array(theirs.scores[:20]))
    assert (found - ours).norm() <= (0.06 if dtype in ("q8_0", "q4_k", "q4_0") else 0.008) * ours.norm()
    for text in TEXTS[:2]:
        assert theirs.tokenize(text.encode(), add_bos=False) == bpe().encode(text)


def test_writing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    model, notes = FAMILIES["llama"], {"gguf": {"keys": {"general.license": [STRING, "apache-2.0"]}}}
    weft_gguf.write(ModelBundle(model, weights_of(model), bpe(), "here", notes=notes), tmp_path / "a.gguf")
    weft_gguf.write(weft_gguf.read(tmp_path / "a.gguf"), tmp_path / "b.gguf")
    assert open_file(tmp_path / "b.gguf").get("general.license") == "apache-2.0"
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()


def test_a_license_goes_in_and_comes_out(tmp_path: Path) -> None:
    """One that came with a Hugging Face folder, or with another file; what no longer fits is not written twice."""
    given = {"license": "other", "license_name": "deep 1.0", "license_link": "https://example.org/x"}
    model, notes = FAMILIES["llama"], {"license": given, "gguf": {"keys": {"general.author": [STRING, "A. B."]}}}
    weft_gguf.write(ModelBundle(model, weights_of(model), bpe(), "here", notes=notes), tmp_path / "a.gguf")
    keys = {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / "a.gguf").fields.items()}
    names = ("general.license", "general.license.name", "general.license.link", "general.author")
    assert [keys[name] for name in names] == [*given.values(), "A. B."]
    assert weft_gguf.read(tmp_path / "a.gguf").notes["license"] == given


def test_another_tokenizer_takes_the_place_of_the_files_own(tmp_path: Path) -> None:
    model, notes = FAMILIES["llama"], {"gguf": {"keys": {"tokenizer.ggml.eot_token_id": [4, 7]}}}
    weft_gguf.write(ModelBundle(model, weights_of(model), bpe(), "here", notes=notes), tmp_path / "m.gguf")
    assert "tokenizer.ggml.eot_token_id" in weft_gguf.read(tmp_path / "m.gguf").notes["gguf"]["keys"]
    bpe(280).save(tmp_path / "other")
    bundle = weft_gguf.read(tmp_path / "m.gguf", tmp_path / "other")
    assert bundle.tokenizer is not None
    assert bundle.tokenizer.vocab_size == 280
    assert not [key for key in bundle.notes["gguf"]["keys"] if key.startswith("tokenizer.")]
    bpe(310).save(tmp_path / "larger")
    with pytest.raises(WeftError, match="310 entries, but the model's vocab_size is 300"):
        weft_gguf.read(tmp_path / "m.gguf", tmp_path / "larger")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_widths_stay_where_nothing_is_lost(dtype: torch.dtype, tmp_path: Path) -> None:
    weights = weights_of(FAMILIES["llama"], dtype)
    write(FAMILIES["llama"], weights, bpe(), tmp_path / "m.gguf")
    contents = open_file(tmp_path / "m.gguf")
    assert contents.tensors["blk.0.attn_norm.weight"].encoding.name == "F32"
    bundle = weft_gguf.read(tmp_path / "m.gguf")
    assert all(torch.equal(bundle.weights[name](), make()) for name, make in weights.items())
    assert {make().dtype for make in bundle.weights.values()} == {dtype}


def test_vectors_that_a_half_width_would_round_make_all_of_it_fp32(tmp_path: Path) -> None:
    weights = weights_of(FAMILIES["llama"])
    write(FAMILIES["llama"], weights, bpe(), tmp_path / "m.gguf", "f16")
    bundle = weft_gguf.read(tmp_path / "m.gguf")
    assert {make().dtype for make in bundle.weights.values()} == {torch.float32}
    table = weights["embedding.weight"]()
    assert torch.equal(bundle.weights["embedding.weight"](), table.half().float())


def test_eight_bits(tmp_path: Path) -> None:
    model = FAMILIES["llama"]
    weights = weights_of(model)
    write(model, weights, bpe(), tmp_path / "m.gguf", "q8_0")
    contents = open_file(tmp_path / "m.gguf")
    assert contents.get("general.file_type") == 7
    assert contents.tensors["token_embd.weight"].encoding.name == "Q8_0"
    assert contents.tensors["output_norm.weight"].encoding.name == "F32"
    bundle = weft_gguf.read(tmp_path / "m.gguf")
    table, back = weights["embedding.weight"](), bundle.weights["embedding.weight"]()
    steps = table.unflatten(-1, (-1, 32)).abs().amax(-1) / 127
    assert ((table - back).unflatten(-1, (-1, 32)).abs() <= steps[..., None] * 0.57).all()
    weft_gguf.write(bundle, tmp_path / "n.gguf", "q8_0")
    again = weft_gguf.read(tmp_path / "n.gguf")
    assert all(torch.equal(bundle.weights[name](), again.weights[name]()) for name in weights)


def test_four_bits(tmp_path: Path) -> None:
    """The tables keep eight bits; the package `gguf` reads each block as we do; Q4_K errs less than Q4_0."""
    model, errors = llama(1, 256, 4, d_ff=512, context=16, vocab_size=300), {}
    weights = weights_of(model)
    for dtype, file_type, kind in (("q4_k", 15, "Q4_K_M"), ("q4_0", 2, "Q4_0")):
        path = tmp_path / f"{dtype}.gguf"
        write(model, weights, bpe(), path, dtype)
        contents = open_file(path)
        assert contents.get("general.file_type") == file_type
        kinds = {name: entry.encoding.name for name, entry in contents.tensors.items()}
        assert {kinds[name] for name in ("token_embd.weight", "output.weight")} == {"Q8_0"}
        assert kinds["blk.0.ffn_down.weight"] == kinds["blk.0.attn_q.weight"] == dtype.upper()
        name = "decoder.blocks.0.feedforward.down.weight"
        bundle = weft_gguf.read(path)
        back, own = bundle.weights[name](), weights[name]()
        errors[dtype] = ((back - own).norm() / own.norm()).item()
        # the file's own name, whatever most of it is in
        assert bundle.origin == f"{dtype}.gguf (GGUF, llama, {kind})"
        weft_gguf.write(bundle, tmp_path / "again.gguf")
        assert open_file(tmp_path / "again.gguf").get("general.file_type") == file_type
        weft_gguf.write(bundle, tmp_path / "wide.gguf", "f16")
        assert open_file(tmp_path / "wide.gguf").get("general.file_type") == 1
    assert errors["q4_k"] < 0.08 < errors["q4_0"] < 0.1


def test_a_mixture_of_which_most_keeps_eight_bits_has_its_own_name(tmp_path: Path) -> None:
    model = llama(1, 256, 4, d_ff=512, context=16, vocab_size=6000)
    write(model, weights_of(model), bpe(), tmp_path / "m.gguf", "q4_k")
    assert open_file(tmp_path / "m.gguf").get("general.file_type") == 15
    assert weft_gguf.read(tmp_path / "m.gguf").origin == "m.gguf (GGUF, llama, Q4_K_M)"


@pytest.mark.parametrize("shift", [-3.0, 0.0, 3.0])
def test_blocks_of_q4_k_hold_what_they_can(shift: float) -> None:
    """A number is off by half a step of its group, and what the rounding of the scales adds, at most."""
    groups = torch.rand(64, 8, 32) * torch.logspace(-3, 0, 64)[:, None, None] * 0.5 + shift
    blocks = gguf_q4_k.quantize(groups.reshape(16, -1))
    back = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType.Q4_K)).view_as(groups)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1)
    assert ((back - groups).abs().amax(-1) <= (high - low) / 15 * 0.6 + groups.abs().amax((1, 2))[:, None] / 63).all()
    assert torch.equal(gguf_q4_k.quantize(torch.zeros(2, 256)), torch.zeros(2, 144, dtype=torch.uint8))


def test_rows_that_are_no_whole_blocks_are_fp16(tmp_path: Path) -> None:
    model = llama(1, 48, 4, d_ff=64, context=16, vocab_size=300)
    write(model, weights_of(model), bpe(), tmp_path / "m.gguf", "q8_0")
    kinds = {name: entry.encoding.name for name, entry in open_file(tmp_path / "m.gguf").tensors.items()}
    assert kinds["blk.0.ffn_down.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_up.weight"] == "F16"
    model = llama(1, 96, 4, d_ff=256, context=16, vocab_size=300)
    write(model, weights_of(model), bpe(), tmp_path / "k.gguf", "q4_k")
    kinds = {name: entry.encoding.name for name, entry in open_file(tmp_path / "k.gguf").tensors.items()}
    assert kinds["blk.0.ffn_down.weight"] == "Q4_K"
    assert kinds["blk.0.ffn_up.weight"] == "Q5_0"


def test_a_table_that_is_stored_twice_is_one(tmp_path: Path) -> None:
    model = FAMILIES["gpt2"].replace(head=LMHead(tied=False))
    weights = weights_of(model)
    weights["output.weight"] = weights["embedding.weight"]
    write(model, weights, bpe(), tmp_path / "m.gguf")
    assert weft_gguf.read(tmp_path / "m.gguf").model == FAMILIES["gpt2"]


# ---- blocks of few bits


def blocks_of(encoding: Any, rows: int, width: int) -> Any:
    """Any blocks, (rows, blocks, bytes): all bits by chance, and scales that are plain numbers."""
    rng = np.random.default_rng(encoding.number)
    raw = rng.integers(0, 256, (rows, width // encoding.block, encoding.bytes), dtype=np.uint8)
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q6_K": [208], "Q3_K": [108]}
    for place in halves.get(encoding.name, [0, 2] if encoding.name != "Q2_K" else [80, 82]):
        scales = rng.normal(size=(rows, width // encoding.block)).astype(np.float16)
        raw[..., place : place + 2] = scales.view(np.uint8).reshape(*scales.shape, 2)
    return raw


@pytest.mark.parametrize("encoding", [e for e in ENCODINGS.values() if e.block > 1], ids=lambda e: e.name)
def test_blocks_unpack_as_elsewhere(encoding: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.interop.gguf.file.CHUNK", 1024)  # some rows at a time
    rows, width = 7, 512
    raw = blocks_of(encoding, rows, width)
    mapped = memoryview(raw.tobytes())
    contents = Contents(tmp_path, {}, {"t": Entry((rows, width), encoding, 0, len(mapped))}, mapped)
    ours = contents.tensor("t")
    if encoding.name in ("Q5_0", "Q5_1"):
        expected = five_bits(raw, encoding.name)
    else:
        from transformers.integrations.gguf.dequant import dequantize

        expected = dequantize(torch.from_numpy(raw.reshape(-1, encoding.bytes)), encoding.number)
    assert (ours.flatten() - expected.flatten()).abs().max() <= 1e-5 * expected.abs().max()


def five_bits(raw: Any, name: str) -> Tensor:
    """Q5_0 and Q5_1 by their definition: four bits in a byte's half, the fifth in a word of 32."""
    numbers = []
    for block in raw.reshape(-1, raw.shape[-1]).tolist():
        data = bytes(block)
        (scale,), place = struct.unpack_from("<e", data), 2
        least = None
        if name == "Q5_1":
            (least,), place = struct.unpack_from("<e", data, 2), 4
        (high,) = struct.unpack_from("<I", data, place)
        low = data[place + 4 :]
        for i in range(32):
            q = (low[i % 16] >> 4 * (i // 16) & 15) | (high >> i & 1) << 4
            numbers.append((q - 16) * scale if least is None else q * scale + least)
    return torch.tensor(numbers)


def stored_in(path: Path) -> dict[str, tuple[str, bytes]]:
    """The tensors of a file as the package gguf finds them: their types and bytes."""
    return {each.name: (each.tensor_type.name, each.data.tobytes()) for each in gguf.GGUFReader(path).tensors}


def test_blocks_come_back_as_they_came(tmp_path: Path) -> None:
    """A file of all encodings, through a run's folder: the same bytes, but for what has changed."""
    model, tokenizer = llama(2, 256, HEADS, d_ff=256, context=32, vocab_size=300), bpe()
    write(model, weights_of(model), tokenizer, tmp_path / "plain.gguf")
    plain = gguf.GGUFReader(tmp_path / "plain.gguf")
    matrices = [each.name for each in plain.tensors if len(each.shape) == 2]
    kinds = dict(zip(matrices, [e for e in ENCODINGS.values() if e.name != "F32"] * 2, strict=False))
    assert set(kinds.values()) == {e for e in ENCODINGS.values() if e.name != "F32"}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    keys = open_file(tmp_path / "plain.gguf").keys
    for key, (type_, value, of) in keys.items():
        if key not in ("general.architecture", "general.file_type"):
            writer.add_key_value(key, value, gguf.GGUFValueType(type_), gguf.GGUFValueType(of))
    for each in plain.tensors:
        kind = kinds.get(each.name)
        if kind is None:
            writer.add_tensor(each.name, each.data)
        elif kind.block > 1:
            raw = blocks_of(kind, *each.data.shape).reshape(len(each.data), -1)
            writer.add_tensor(each.name, raw, raw_dtype=gguf.GGMLQuantizationType(kind.number))
        else:
            half = torch.from_numpy(each.data.copy()).to(torch.float16 if kind.name == "F16" else torch.bfloat16)
            kept = half.view(torch.uint8).numpy() if kind.name == "BF16" else half.numpy()
            writer.add_tensor(each.name, kept, raw_dtype=gguf.GGMLQuantizationType(kind.number))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    came = stored_in(tmp_path / "m.gguf")
    assert {name: kind for name, (kind, _) in came.items() if name in kinds} == {n: k.name for n, k in kinds.items()}

    import_model(tmp_path / "m.gguf", tmp_path / "run")
    export_model(tmp_path / "run", "gguf", tmp_path / "out.gguf")
    assert stored_in(tmp_path / "out.gguf") == came

    bundle = weft_gguf.read(tmp_path / "m.gguf")
    changed = bundle.weights["decoder.blocks.0.attention.qkv.weight"]().clone()
    changed[0, 0] += 1  # of the queries
    weights = {**bundle.weights, "decoder.blocks.0.attention.qkv.weight": lambda: changed}
    weft_gguf.write(replace(bundle, weights=weights), tmp_path / "changed.gguf")
    found = stored_in(tmp_path / "changed.gguf")
    assert [name for name in came if found[name] != came[name]] == ["blk.0.attn_q.weight"]
    assert found["blk.0.attn_q.weight"][0] == "F32"

    weft_gguf.write(bundle, tmp_path / "q8_0.gguf", "q8_0")
    found = stored_in(tmp_path / "q8_0.gguf")
    assert {kind for name, (kind, _) in found.items() if name in kinds} == {"Q8_0"}
    eights = [name for name, kind in kinds.items() if kind.name == "Q8_0"]
    assert [found[name] for name in eights] == [came[name] for name in eights]


# ---- models that have no place


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (preset("lstm"), "model.kind = 'recurrent'"),
        (preset("bert-tiny"), "model.kind = 'encoder'"),
        (preset("transformer"), "model.placement = 'post', where stablelm has 'pre'"),
        (FAMILIES["llama"].replace(attention=Attention(heads=HEADS, window=4)), "model.attention.window = 4"),
        (FAMILIES["llama"].replace(position=Rotary(scaling=DynamicNTK(factor=2.0))), "scaling.kind = 'dynamic-ntk'"),
        (
            FAMILIES["gpt2"].replace(feedforward={"kind": "plain", "d_ff": 9, "activation": "gelu"}),
            "activation = 'gelu'",
        ),
        (FAMILIES["llama"].replace(feedforward=Gated(d_ff=9, activation="relu")), "activation = 'relu'"),
        (FAMILIES["qwen3"].replace(position=Rotary(scaling=Llama3Scaling())), "kind = 'rms', where llama has None"),
        (
            FAMILIES["phi3"].replace(attention=Attention(heads=HEADS, d_head=8)),
            "fraction = 0.75, where llama has 1.0",
        ),
        (FAMILIES["llama"].replace(head=LMHead(bias=True)), "bias = 'none', where qwen2 has 'qkv'"),
        (FAMILIES["phi2"].replace(head=LMHead(tied=False)), "sublayers = 'parallel', where gptneox"),
        (
            FAMILIES["gptneox"].replace(attention=Attention(heads=HEADS, d_head=8, bias="all")),
            "d_head = 8, where gptneox",
        ),
        (FAMILIES["smollm3"].replace(pattern=[{}, {"position": NoPosition()}]), "model.pattern = "),
        (FAMILIES["gemma3"].replace(pattern=[{"window": 5}, {}, {}]), "model.pattern = "),
        (FAMILIES["gemma3"].replace(pattern=[{"window": 5}] * 5 + [{}]), "model.pattern = "),  # all scaled
        (FAMILIES["falcon"].replace(feedforward=Plain(d_ff=FF, activation="gelu", bias=False)), "activation = 'gelu'"),
        (FAMILIES["falcon"].replace(sublayers="sequential"), "model.sublayers = 'sequential', where falcon has"),
        (FAMILIES["stablelm"].replace(attention=Attention(heads=HEADS, bias="all")), "kind = 'gated', where gptneox"),
        (FAMILIES["olmo"].replace(attention=Attention(heads=HEADS, bias="qkv")), "norm.kind = 'layer', where qwen2"),
        (FAMILIES["bloom"].replace(position=ALiBi(rounded=True)), "rounded = True, where bloom has False"),
        (FAMILIES["llama"].replace(head=ClassificationHead(labels=3, pooling="last")), "head.kind = 'sequence', where"),
    ],
)
def test_models_without_a_place(model: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(InteropError, match=message):
        write(model, {}, None, tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


def test_the_largest_gemmas_have_a_scale_of_their_own() -> None:
    """llama.cpp knows them by their layers; no key says it."""
    for name, layers in (("gemma2", 46), ("gemma3", 62)):
        model = FAMILIES[name].replace(layers=layers)
        with pytest.raises(InteropError, match=r"model\.attention\.scale = "):
            architecture_of(model)
        scale = (D // model.attention.heads) ** -0.5
        assert architecture_of(model.replace(attention=model.attention.replace(scale=scale))) == name


def test_windows_are_read_layer_by_layer(tmp_path: Path) -> None:
    model, windowed = FAMILIES["gemma3"], [True, False, False, True, True, True, True]
    for given in (windowed, [True] * 7):
        notes = {"gguf": {"keys": {"gemma3.attention.sliding_window_pattern": [9, given, 7]}}}
        weft_gguf.write(ModelBundle(model, weights_of(model), bpe(), "here", notes=notes), tmp_path / "m.gguf")
        read = weft_gguf.read(tmp_path / "m.gguf").model
        assert isinstance(read, Decoder)
        assert [kind.window is not None for kind in read.layer_kinds(7)] == given


# ---- bad input


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    model = llama(1, 32, 2, d_ff=32, context=16, vocab_size=300)
    write(model, weights_of(model), bpe(), path)
    return path.read_bytes()


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(WeftError) as caught:
        weft_gguf.read(path)
    message = str(caught.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message


def test_a_file_cut_anywhere_is_refused(whole: bytes, tmp_path: Path) -> None:
    places = [0, 3, 4, 7, 8, 15, 23, 24, *range(30, len(whole), len(whole) // 60), len(whole) - 64]
    for place in places:
        refused(tmp_path / "m.gguf", whole[:place])


def test_damaged_bytes_give_one_line_or_a_model(whole: bytes, tmp_path: Path) -> None:
    """Bytes of the header changed by chance: never anything but an error of weft's, and never much memory."""
    chance = random.Random(0)
    header = whole.index(b"blk.0.ffn_down") + 64
    path = tmp_path / "m.gguf"
    errors: list[str] = []
    for _ in range(80):
        data = bytearray(whole)
        for _ in range(chance.choice([1, 2, 8])):
            place = chance.choice([chance.randrange(header), chance.randrange(64)])
            data[place] = chance.choice([0, 1, 0x7F, 0xFF, chance.randrange(256)])
        path.write_bytes(data)
        try:
            weft_gguf.read(path)
        except WeftError as error:
            errors.append(str(error))
    assert len(errors) > 20
    assert not any("\n" in error for error in errors)


def test_absurd_sizes_cost_nothing(whole: bytes, tmp_path: Path) -> None:
    many = struct.pack("<Q", 2**62)
    tokens = whole.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    name = whole.index(b"token_embd.weight") - 8
    dims = name + 8 + len(b"token_embd.weight") + 4
    tracemalloc.start()
    for place in (8, 16, 24, tokens, name, dims):
        refused(tmp_path / "m.gguf", whole[:place] + many + whole[place + 8 :])
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * len(whole) + 2**22


def renamed(whole: bytes, old: bytes, new: bytes) -> bytes:
    assert len(old) == len(new)
    assert whole.count(old) == 1
    return whole.replace(old, new)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda b: b"GGML" + b[4:], "not a GGUF file: it begins with b'GGML'"),
        (lambda b: b"", "not a GGUF file"),
        (lambda b: b[:4] + struct.pack("<I", 9) + b[8:], "version 9"),
        (lambda b: b[:4] + struct.pack(">I", 3) + b[8:], "big-endian"),
        (lambda b: renamed(b, b"blk.0.attn_q.weight", b"blk.0.attn_x.weight"), "'blk.0.attn_q.weight' .* is missing"),
        (
            lambda b: renamed(b, b"\x0d\0\0\0\0\0\0\0output.weight", b"\x0d\0\0\0\0\0\0\0other.weight_"),
            "'other.weight_' .* no place",
        ),
        (lambda b: renamed(b, b"llama.embedding_length", b"llama.embedding_lengtx"), "embedding_length is missing"),
        (lambda b: renamed(b, b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba"), "'mamba': .*llama"),
        (lambda b: renamed(b, b"gpt-2", b"gpt-9"), "tokenizer.ggml.pre = 'gpt-9'"),
    ],
)
def test_what_is_wrong_is_named(change: Any, expected: str, whole: bytes, tmp_path: Path) -> None:
    message = refused(tmp_path / "m.gguf", change(whole))
    assert re.search(expected, message), message


def test_windows_and_factors_that_make_no_sense_are_named(tmp_path: Path) -> None:
    model = FAMILIES["gemma3"]
    notes = {"gguf": {"keys": {"gemma3.attention.sliding_window_pattern": [9, [True, False], 7]}}}
    weft_gguf.write(ModelBundle(model, weights_of(model), bpe(), "here", notes=notes), tmp_path / "m.gguf")
    message = refused(tmp_path / "m.gguf", (tmp_path / "m.gguf").read_bytes())
    assert "sliding_window_pattern = [True, False]: expected a whole number, or true or false for each of 7" in message
    model = FAMILIES["llama-3.1"]
    write(model, weights_of(model), bpe(), tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    message = refused(tmp_path / "m.gguf", data.replace(struct.pack("<f", 5e5), struct.pack("<f", -5e5)))
    assert "base = -500000.0: expected a number greater than 0" in message
    model = FAMILIES["phi3-long"]
    write(model, weights_of(model), bpe(), tmp_path / "m.gguf")
    data = (tmp_path / "m.gguf").read_bytes()
    message = refused(tmp_path / "m.gguf", renamed(data, b"factors_short", b"factors_shore"))
    assert "it has a tensor 'rope_factors_long.weight', but no 'rope_factors_short.weight'" in message
    place = data.index(b"rope_factors_short.weight") + len(b"rope_factors_short.weight") + 4
    message = refused(tmp_path / "m.gguf", data[:place] + struct.pack("<Q", 7) + data[place + 8 :])
    assert "needs 8 factors in short and in long" in message
    value = struct.pack("<f", SHORT[-1])
    assert data.count(value) == 1
    message = refused(tmp_path / "m.gguf", data.replace(value, struct.pack("<f", float("nan"))))
    assert "position.scaling" in message


def test_an_unknown_encoding_and_wrong_shapes_are_named(whole: bytes, tmp_path: Path) -> None:
    name = b"token_embd.weight"
    kind = whole.index(name) + len(name) + 4 + 16
    message = refused(tmp_path / "m.gguf", whole[:kind] + struct.pack("<I", 39) + whole[kind + 4 :])
    assert "'token_embd.weight' is of ggml type 39" in message
    assert "Q4_K" in message
    key = b"llama.feed_forward_length"
    place = whole.index(key) + len(key) + 4
    message = refused(tmp_path / "m.gguf", whole[:place] + struct.pack("<I", 31) + whole[place + 4 :])
    assert "'blk.0.ffn_gate.weight' is [32, 32]; the settings ask for [31, 32]" in message
    key = b"llama.block_count"
    place = whole.index(key) + len(key) + 4
    message = refused(tmp_path / "m.gguf", whole[:place] + struct.pack("<I", 2**20) + whole[place + 4 :])
    assert "llama.block_count = 1048576: the file holds 12 tensors in all" in message
    key = b"llama.vocab_size"
    place = whole.index(key) + len(key) + 4
    message = refused(tmp_path / "m.gguf", whole[:place] + struct.pack("<I", 299) + whole[place + 4 :])
    assert "llama.vocab_size has 299 entries, but 'token_embd.weight' has 300 rows" in message


def test_a_tokenizer_of_another_size_is_refused(tmp_path: Path) -> None:
    model = llama(1, 32, 2, d_ff=32, context=16, vocab_size=290)
    with pytest.raises(InteropError, match="300 tokens, the model's vocab_size is 290"):
        write(model, weights_of(model), bpe(), tmp_path / "m.gguf")


def test_a_failure_leaves_no_file_and_no_part_of_one(tmp_path: Path) -> None:
    model = llama(1, 32, 2, d_ff=32, context=16, vocab_size=300)
    weights = weights_of(model)

    def fails() -> Tensor:
        raise KeyboardInterrupt

    weights["decoder.norm.weight"] = fails
    (tmp_path / "m.gguf").write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write(model, weights, bpe(), tmp_path / "m.gguf")
    assert [p.name for p in tmp_path.iterdir()] == ["m.gguf"]
    assert (tmp_path / "m.gguf").read_text() == "old"


def test_numbers_beyond_fp16_are_refused(tmp_path: Path) -> None:
    model = llama(1, 32, 2, d_ff=32, context=16, vocab_size=300)
    weights = weights_of(model)
    weights["embedding.weight"] = lambda: torch.full((300, 32), 1e5)
    with pytest.raises(InteropError, match=r"'token_embd.weight' holds 1e\+05, which fp16 can't"):
        write(model, weights, bpe(), tmp_path / "m.gguf", "f16")
    assert not list(tmp_path.iterdir())


def test_a_missing_package_is_named_before_anything_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama(1, 32, 2, d_ff=32, context=16, vocab_size=300)
    write(model, weights_of(model), bpe(), tmp_path / "m.gguf", "q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(InteropError, match=r"pip install 'weft\[gguf\]'"):
        weft_gguf.read(tmp_path / "m.gguf")
    with pytest.raises(InteropError, match=r"pip install 'weft\[gguf\]'"):
        write(model, {}, bpe(), tmp_path / "n.gguf", "q8_0")


def test_a_missing_file() -> None:
    with pytest.raises(InteropError, match="no such file"):
        weft_gguf.read(Path("nowhere.gguf"))
