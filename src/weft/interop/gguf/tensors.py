"""Tensors of llama.cpp's architectures: how each stores them, and the settings that follow from them alone."""

from collections.abc import Container

from weft.interop.settings import Flat

# architectures whose files store queries and keys with adjacent rotary pairs
ADJACENT = ("llama", "granite", "granitemoe", "smollm3", "olmo", "ernie4_5-moe", "llama4")
# architectures whose files store queries, keys and values as one matrix
JOINED = ("gpt2", "gptneox", "phi2", "phi3", "falcon", "bloom")
# architectures whose files have an LM head even if it is tied; those of GPT-2 may have one
REPEATED = ("olmo2", "gptneox", "phi2", "stablelm")


def settings_from_tensors(architecture: str, names: Container[str]) -> Flat:
    """Settings without a key that follow from the names of the first layer's tensors."""
    if architecture == "glm4moe" and "blk.0.attn_q_norm.weight" in names:
        return {"attention.qk_norm.kind": "rms"}
    if architecture == "falcon":
        return {"sublayers": "parallel-two-norms" if "blk.0.attn_norm_2.weight" in names else "parallel"}
    if architecture != "stablelm":
        return {}
    settings: Flat = {"sublayers": "sequential" if "blk.0.ffn_norm.weight" in names else "parallel"}
    settings["attention.bias"] = "qkv" if "blk.0.attn_q.bias" in names else "none"
    if "blk.0.attn_q_norm.weight" in names:
        norm = {"attention.qk_norm.kind": "layer", "attention.qk_norm.bias": False}
        settings |= {**norm, "attention.qk_norm_over": "each-head"}
    return settings


def first_layer_tensors(model: Flat) -> set[str]:
    """Names of a model's first-layer tensors that `settings_from_tensors` checks."""
    present = {
        "blk.0.attn_norm_2.weight": model["sublayers"] == "parallel-two-norms",
        "blk.0.ffn_norm.weight": model["sublayers"] != "parallel",
        "blk.0.attn_q.bias": model["attention.bias"] in ("qkv", "all"),
        "blk.0.attn_q_norm.weight": model.get("attention.qk_norm.kind") is not None,
    }
    return {name for name, is_present in present.items() if is_present}
