"""GGUF files compared with other programs: the package `gguf` writes them, transformers and llama.cpp read them."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.interop.gguf_models import FAMILIES, FF, GEMMA3, HEADS, LAYERS, TEXTS, D, bpe, logits, random_weights, write
from tests.interop.hf_models import stepped
from tests.later import Later
from tests.pairwise import each_once
from tests.spread import spread
from torch import Tensor

from weft.interop.bundle import ModelBundle
from weft.interop.gguf import gguf as weft_gguf
from weft.interop.gguf.file import open_file
from weft.interop.gguf.tokenizer import tokenizer_keys
from weft.models.build import build
from weft.models.config import Decoder
from weft.models.head_config import LMHead

transformers = Later("transformers")
gguf = pytest.importorskip("gguf", reason="the package gguf is not installed")
pytestmark = pytest.mark.usefixtures("seeded")

SIZES: dict[str, Any] = {"hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
LLAMA: dict[str, Any] = {
    **SIZES,
    "intermediate_size": FF,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
FALCON = {"num_kv_heads": 2, "new_decoder_architecture": True, "activation": "gelu_pytorch_tanh"}
GEMMA3_SETTINGS = {"num_hidden_layers": 7, "head_dim": 24, "query_pre_attn_scalar": 24, "sliding_window": 5}
MIXTURE: dict[str, Any] = {**LLAMA, "num_experts": 6, "num_experts_per_tok": 3}
DEEPSEEK: dict[str, Any] = {
    **LLAMA,
    "num_key_value_heads": HEADS,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 24,
    "v_head_dim": 12,
    "q_lora_rank": 28,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_shared_experts": 2,
    "routed_scaling_factor": 2.5,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
}


def yarn(mscale: float) -> dict[str, Any]:
    """Rotary settings of DeepSeek, whose two factors of queries and keys cancel each other."""
    sizes = {"factor": 4.0, "original_max_position_embeddings": 12, "mscale": mscale, "mscale_all_dim": mscale}
    return {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, **sizes}}


# prefix of the classes in transformers, and settings
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", LLAMA),
    "qwen2": ("Qwen2", LLAMA),
    "qwen3": ("Qwen3", {**LLAMA, "head_dim": 128}),
    "gemma": ("Gemma", {**LLAMA, "head_dim": 24, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", {"n_positions": 1024, "n_embd": D, "n_layer": LAYERS, "n_head": HEADS}),
    "phi3": ("Phi3", {**LLAMA, "original_max_position_embeddings": 48, "pad_token_id": 0, "sliding_window": 6}),
    "gemma3": ("Gemma3", {**LLAMA, **GEMMA3_SETTINGS, "tie_word_embeddings": True}),
    "smollm3": ("SmolLM3", {**LLAMA, "num_hidden_layers": 5, "pad_token_id": 0, "tie_word_embeddings": True}),
    "falcon": ("Falcon", {**SIZES, **FALCON}),
    "stablelm": ("StableLm", {**LLAMA, "use_qkv_bias": True}),
    "olmo": ("Olmo", {**LLAMA, "clip_qkv": 0.5, "tie_word_embeddings": True}),
    "bloom": ("Bloom", {"hidden_size": D, "n_layer": LAYERS, "n_head": HEADS}),
    "mixtral": ("Mixtral", {**LLAMA, "num_local_experts": 6}),
    "qwen2moe": (
        "Qwen2Moe",
        {**MIXTURE, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40, "intermediate_size": 99},
    ),
    "qwen3moe": ("Qwen3Moe", {**MIXTURE, "moe_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 24}),
    "granitemoe": (
        "GraniteMoe",
        {**LLAMA, "num_local_experts": 6, "num_experts_per_tok": 3, "attention_multiplier": 0.2}
        | {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    ),
    "hunyuan-moe": ("HunYuanMoEV1", {**LLAMA, "num_experts": 6, "moe_topk": 3, "head_dim": 24}),
    "minimax-m2": (
        "MiniMaxM2",
        {**LLAMA, "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 24}
        | {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 0.5}},
    ),
    "glm4moe": (
        "Glm4Moe",
        {**LLAMA, "n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 24}
        | {"n_shared_experts": 2, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1, "use_qk_norm": True}
        | {"num_hidden_layers": 3, "attention_bias": True, "n_group": 1, "topk_group": 1},
    ),
    "gpt-oss": (
        "GptOss",
        {**LLAMA, "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 24, "sliding_window": 5}
        | {"layer_types": ["sliding_attention", "full_attention"]}
        | {
            "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False}
            | {"original_max_position_embeddings": 12, "beta_fast": 32.0, "beta_slow": 1.0}
        },
    ),
    "olmoe": ("Olmoe", {**MIXTURE, "num_key_value_heads": HEADS}),
    "deepseek2": ("DeepseekV3", {**DEEPSEEK, **yarn(1.0)}),
    "deepseek2-softmax": (
        "DeepseekV2",
        {**DEEPSEEK, **yarn(0.707), "q_lora_rank": None, "topk_method": "group_limited_greedy"},
    ),
    "deepseek2-whole": ("DeepseekV3", {**DEEPSEEK, "norm_topk_prob": False, "v_head_dim": 32}),
    "ernie4_5-moe": (
        "Ernie4_5_Moe",
        {**LLAMA, "num_hidden_layers": 4, "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24}
        | {"moe_num_shared_experts": 2, "moe_layer_interval": 2, "moe_layer_start_index": 2},
    ),
    "ernie4_5-moe-unshared": (
        "Ernie4_5_Moe",
        {**LLAMA, "moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24, "moe_num_shared_experts": 0},
    ),
    "llama4": (
        "Llama4",
        {**LLAMA, "num_hidden_layers": 5, "num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 24}
        | {"intermediate_size": 32, "intermediate_size_mlp": FF, "interleave_moe_layer_step": 2}
        | {
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4, "factor": 16.0, "low_freq_factor": 1.0}
            | {"high_freq_factor": 1.0, "original_max_position_embeddings": 8192}
        },
    ),
}
MIXTURES = tuple(ARCHITECTURES)[tuple(ARCHITECTURES).index("mixtral") :]


def known_as(architecture: str) -> str:
    """Name of an architecture in llama.cpp."""
    return "llama" if architecture == "mixtral" else re.sub("-(softmax|whole|unshared)$", "", architecture)


# names of modules in transformers → names that the package gguf knows
RENAMED = {
    "block_sparse_moe.router": "mlp.gate", "block_sparse_moe.experts": "mlp.experts",
    "e_score_correction_bias": "e_score_correction.bias",
    "mlp.gate.moe_statics": "mlp.moe_statics",
}  # fmt: skip


def reference_model(architecture: str) -> Any:
    prefix, settings = ARCHITECTURES[architecture]
    config = getattr(transformers, f"{prefix}{'TextConfig' if prefix in ('Gemma3', 'Llama4') else 'Config'}")
    head = "LMHeadModel" if architecture == "gpt2" else "ForCausalLM"
    model = getattr(transformers, f"{prefix}{head}")(config(vocab_size=300, **settings)).eval()
    with torch.no_grad():
        biases = [buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")]
        for parameter in (*model.parameters(), *biases):
            parameter.normal_(std=0.15)
    return model


def add_settings(writer: Any, architecture: str, config: Any) -> None:
    """Add the keys that the converter of llama.cpp writes."""
    plain = architecture in ("gpt2", "falcon", "bloom")
    writer.add_block_count(config.num_hidden_layers + (architecture == "glm4moe"))
    writer.add_context_length(1024 if architecture == "gpt2" else 48)
    writer.add_embedding_length(D)
    writer.add_feed_forward_length(4 * D if plain else FF)
    writer.add_head_count(HEADS)
    latent = architecture.startswith("deepseek2")
    if architecture != "gpt2":
        whole = architecture in ("bloom", "olmoe", "deepseek2-whole")
        writer.add_head_count_kv(HEADS if whole else 1 if latent else 2)
    if architecture in MIXTURES:
        writer.add_expert_count(6)
        writer.add_expert_used_count(2 if architecture == "mixtral" else 3)
    if architecture in ("qwen2moe", "qwen3moe", "glm4moe", "llama4") or latent:
        writer.add_expert_feed_forward_length(32)
    if architecture == "llama4":
        writer.add_interleave_moe_layer_step(config.interleave_moe_layer_step)
    if latent:
        add_latent_settings(writer, config, whole=architecture == "deepseek2-whole")
    if architecture.startswith("ernie"):
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        if config.moe_num_shared_experts:
            writer.add_expert_shared_feed_forward_length(config.intermediate_size // config.num_key_value_heads)
    if architecture in ("hunyuan-moe", "minimax-m2", "gpt-oss"):
        writer.add_expert_feed_forward_length(FF)
    if architecture in ("qwen2moe", "hunyuan-moe"):
        writer.add_expert_shared_feed_forward_length(40 if architecture == "qwen2moe" else FF)
    if architecture in ("minimax-m2", "glm4moe"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_rope_dimension_count(12)
    if architecture == "glm4moe":
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.3.nextn.enorm.weight", np.ones(D, dtype=np.float32))
        writer.add_expert_shared_count(2)
        writer.add_leading_dense_block_count(1)
        writer.add_expert_weights_norm(True)
        writer.add_expert_weights_scale(2.5)
    if architecture == "granitemoe":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if plain or architecture in ("stablelm", "olmo"):
        writer.add_layer_norm_eps(1e-5)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if architecture in ("phi3", "smollm3", "olmo"):
        writer.add_rope_dimension_count(D // HEADS)
    elif architecture == "stablelm":
        writer.add_rope_dimension_count(D // HEADS // 4)
    if architecture in (
        "qwen3",
        "gemma",
        "gemma3",
        "qwen3moe",
        "hunyuan-moe",
        "minimax-m2",
        "glm4moe",
        "gpt-oss",
        "llama4",
    ):
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if not plain:
        rotary = config.rope_parameters
        writer.add_rope_freq_base((rotary["full_attention"] if architecture == "gemma3" else rotary)["rope_theta"])
    if architecture == "gpt-oss":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(12)
    if architecture in ("phi3", "gemma3", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window)
    if architecture == "olmo":
        writer.add_clamp_kqv(config.clip_qkv)


def add_latent_settings(writer: Any, config: Any, *, whole: bool) -> None:
    """Add the keys of DeepSeek; those of older files, if keys and values are `whole`."""
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    rank, rotated, d_head = config.kv_lora_rank, config.qk_rope_head_dim, config.qk_nope_head_dim + 8
    writer.add_kv_lora_rank(rank)
    writer.add_rope_dimension_count(rotated)
    writer.add_key_length(d_head if whole else rank + rotated)
    writer.add_value_length(config.v_head_dim if whole else rank)
    if not whole:
        writer.add_key_length_mla(d_head)
        writer.add_value_length_mla(config.v_head_dim)
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(12)
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])
    sigmoid = config.model_type == "deepseek_v3"
    if sigmoid:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_weights_norm(sigmoid and config.norm_topk_prob)
    writer.add_expert_weights_scale(config.routed_scaling_factor)
    writer.add_expert_shared_count(config.n_shared_experts)
    writer.add_leading_dense_block_count(config.first_k_dense_replace)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of queries or keys as llama.cpp does: halves become neighbours."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def separated(fused: Tensor, groups: int) -> Tensor:
    """Reorder queries, keys and values, which are stored group by group, to all queries, all keys, all values."""
    parts = fused.reshape(groups, -1, D // HEADS, *fused.shape[1:])
    return torch.cat([part.reshape(-1, *fused.shape[1:]) for part in (parts[:, :-2], parts[:, -2], parts[:, -1])])


def converted(architecture: str, name: str, weight: Tensor) -> Tensor:
    """Change a tensor as the converter of llama.cpp does."""
    if architecture in ("llama", "mixtral", "granitemoe", "smollm3", "olmo") and ("q_proj" in name or "k_proj" in name):
        return interleaved(weight, HEADS if "q_proj" in name else 2)
    if "query_key_value" in name:
        return separated(weight, HEADS if architecture == "bloom" else 2)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return weight + 1
    if architecture == "gpt2" and weight.dim() == 2 and ".h." in name:
        return weight.T.contiguous()
    return weight


def write_reference(path: Path, architecture: str, model: Any) -> None:
    """Write a model of transformers with the package `gguf`, under its names."""
    known = known_as(architecture)
    writer = gguf.GGUFWriter(path, known)
    add_settings(writer, architecture, model.config)
    keys = tokenizer_keys(bpe(), 300)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(keys["tokenizer.ggml.tokens"])
    writer.add_token_types(keys["tokenizer.ggml.token_type"])
    writer.add_token_merges(keys["tokenizer.ggml.merges"])
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == known)
    names = gguf.get_tensor_name_map(kind, model.config.num_hidden_layers)
    biases = {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    for name, parameter in {**dict(model.named_parameters()), **biases}.items():
        weight = converted(architecture, name, parameter.data.clone())
        name = name.removeprefix("transformer.") if architecture == "bloom" else name
        for theirs, package in RENAMED.items():
            name = name.replace(theirs, package)
        if architecture == "llama4" and ".experts." in name:
            weight = weight.mT
        if architecture == "gpt-oss" and ".experts." in name:
            weight = weight.mT if weight.dim() == 3 else weight
            if "gate_up" in name:  # gates and up projections in turn
                weight = torch.cat((weight[:, ::2], weight[:, 1::2]), 1)
            name = name.replace("_proj_bias", "_proj.bias")
        parts = {name: weight}
        if "experts.gate_up_proj" in name:
            gate, up = weight.chunk(2, dim=1)
            parts = {name.replace("gate_up", "gate"): gate, name.replace("gate_up", "up"): up}
        if "kv_b_proj" in name and architecture != "deepseek2-whole":
            keys_of_head, values_of_head = weight.unflatten(0, (HEADS, -1)).split([24, 12], dim=1)
            parts = {name.replace("kv_b", "k_b"): keys_of_head.mT, name.replace("kv_b", "v_b"): values_of_head}
        for part, values in parts.items():
            known_name = names.get_name(
                part if part.endswith((".weight", ".bias")) else f"{part}.weight", (".weight", ".bias")
            )
            writer.add_tensor(known_name, values.contiguous().numpy())
    if architecture == "llama4":
        unscaled = 1e4 ** -(torch.arange(0, 24, 2) / 24)
        writer.add_tensor("rope_freqs.weight", (unscaled / model.model.rotary_emb.inv_freq).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("architecture", spread(ARCHITECTURES, 9))
def test_a_reference_file_gives_the_logits_of_transformers(architecture: str, tmp_path: Path) -> None:
    theirs = reference_model(architecture)
    write_reference(tmp_path / "m.gguf", architecture, theirs)
    bundle = weft_gguf.read(tmp_path / "m.gguf")
    tokens = torch.randint(300, (2, 17))
    tolerance = 1e-5 if architecture in ("llama", "qwen2", "qwen3", "gemma", "gpt2") else 2e-5
    assert isinstance(bundle.model, Decoder) and isinstance(bundle.model.head, LMHead)
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (logits(bundle, tokens) - expected).abs().max() <= tolerance
        if architecture in MIXTURES:
            model = build(bundle.model).eval()
            model.load_state_dict({name: read().float() for name, read in bundle.weights.items()})
            assert (stepped(model, tokens) - expected).abs().max() <= 1e-4
    assert bundle.model.head.tied == theirs.config.tie_word_embeddings
    assert bundle.tokenizer is not None
    assert [bundle.tokenizer.encode(text) for text in TEXTS] == [bpe().encode(text) for text in TEXTS]


@pytest.mark.parametrize("architecture", spread(["llama", "qwen2", "qwen3", "gpt2"], 1))
def test_transformers_reads_an_imported_model(architecture: str, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")
    write_reference(tmp_path / "first.gguf", architecture, reference_model(architecture))
    weft_gguf.write(weft_gguf.read(tmp_path / "first.gguf"), tmp_path / "m.gguf", "f16")
    ours = weft_gguf.read(tmp_path / "m.gguf")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    tokens = torch.randint(300, (2, 17))
    with torch.no_grad():
        assert (logits(ours, tokens) - theirs(tokens).logits).abs().max() <= 1e-5
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    for text in TEXTS:
        assert tokenizer.encode(text, add_special_tokens=False) == bpe().encode(text)


@pytest.mark.parametrize(
    "name",
    spread(["gemma3", "gemma2", "falcon", "bloom", "starcoder2", "stablelm", "qwen2moe", "qwen3moe", "minimax-m2"], 2),
)
def test_transformers_reads_other_decoders(name: str, tmp_path: Path) -> None:
    """Of the architectures that weft writes, those that transformers reads from GGUF files."""
    pytest.importorskip("accelerate", reason="transformers needs accelerate to read GGUF files")
    model = FAMILIES[name].replace(context=512)
    if name == "gemma3":  # transformers supports only this width, and no scaling, in GGUF files
        model = GEMMA3.replace(attention=GEMMA3.attention.replace(heads=2, kv_heads=1, d_head=256))
    weights = random_weights(model)
    write(tmp_path / "m.gguf", model, weights)
    if name == "falcon":  # transformers has the exact GELU, llama.cpp the approximation
        model = model.replace(feedforward=model.feedforward.replace(activation="gelu"))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32).eval()
    tokens = torch.randint(300, (2, 17))
    tolerance = 5e-5 if name == "gemma3" else 1e-5  # gemma3 has seven layers
    with torch.no_grad():
        ours = logits(ModelBundle(model, weights, None, ""), tokens)
        assert (ours - theirs(tokens).logits).abs().max() <= tolerance


@pytest.mark.parametrize(("name", "dtype"), each_once(FAMILIES, [None, "f16", "q8_0", "q4_k", "q4_0"]))
def test_llama_cpp_reads_every_architecture(name: str, dtype: str | None, tmp_path: Path) -> None:
    """llama.cpp keeps its KV cache in fp16, and rounds the activations that it multiplies by 8-bit blocks."""
    llama_cpp = pytest.importorskip("llama_cpp", reason="the package llama-cpp-python is not installed")
    write(tmp_path / "m.gguf", FAMILIES[name].replace(context=512), dtype=dtype)
    tokens = torch.randint(3, 300, (1, 20))
    ours = logits(weft_gguf.read(tmp_path / "m.gguf"), tokens)[0]
    theirs = llama_cpp.Llama(str(tmp_path / "m.gguf"), n_ctx=64, logits_all=True, verbose=False, n_threads=1)
    theirs.eval(tokens[0].tolist())
    scores = torch.from_numpy(np.array(theirs.scores[:20]))
    assert (scores - ours).norm() <= (0.06 if dtype in ("q8_0", "q4_k", "q4_0") else 0.008) * ours.norm()
    for text in TEXTS[:2]:
        assert theirs.tokenize(text.encode(), add_bos=False) == bpe().encode(text)


@pytest.mark.parametrize("name", spread(FAMILIES, 12))
def test_tensors_have_the_names_of_the_package_gguf(name: str, tmp_path: Path) -> None:
    """And the LM head is stored for those architectures of which llama.cpp requires it."""
    write(tmp_path / "m.gguf", FAMILIES[name])
    contents = open_file(tmp_path / "m.gguf")
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    architecture = kinds[contents.get("general.architecture")]
    names = {gguf.TENSOR_NAMES[tensor] for tensor in gguf.MODEL_TENSORS[architecture]}
    stored = {re.sub(r"^blk\.\d+", "blk.{bid}", tensor.rpartition(".")[0]) for tensor in contents.tensors}
    assert stored <= names | {"output"}
    assert "output" in stored or architecture.name not in ("OLMO2", "GPTNEOX", "PHI2", "STABLELM")
