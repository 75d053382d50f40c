"""llama.cpp's architectures: how each calls its settings and tensors in a GGUF file, and which of them a model is."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.config import Tree, validate
from weft.errors import InteropError
from weft.interop.gguf_file import ARRAY, FLOAT32, Contents
from weft.interop.settings import Flat, Settings, Transformer, first_that_holds, flat, nested, repeated
from weft.interop.table import Row, Special, Table, even_heads, follows, number, same, whole
from weft.interop.weight_map import SAME, Layout, Rule, adjacent_pairs, module, tensor
from weft.models.config import Decoder, Model
from weft.nn.config import RMSNorm
from weft.nn.position import Rotary as RotaryModule
from weft.nn.position_config import Rotary, Sizes
from weft.nn.scaling import Llama3Scaling

KEPT = 64  # values of an array that is kept as a note
FREQUENCIES, POSITIONS = "rope_freqs.weight", "position_embd.weight"
BLOCK, BLK = "decoder.blocks.{layer}", "blk.{layer}"


# ---- settings


def _read_scaling(settings: Settings, model: Flat) -> Flat:
    """How positions were scaled for longer texts; LLaMA 3.1's way is a tensor, not a key."""
    kind = settings.get("rope.scaling.type", "none")
    settings.whole("rope.scaling.original_context_length", 8192)
    if "position.scaling.kind" in model:
        return {}
    if kind not in ("none", "linear"):
        raise settings.refusal("rope.scaling.type", f"weft has none, linear, and LLaMA 3.1's '{FREQUENCIES}'")
    if kind == "none":
        return {}
    return {"position.scaling.kind": "linear", "position.scaling.factor": settings.number("rope.scaling.factor")}


def _write_scaling(model: Flat) -> Tree:
    kind = model.get("position.scaling.kind")
    if kind == "linear":
        return {"rope.scaling.type": "linear", "rope.scaling.factor": model["position.scaling.factor"]}
    if kind == "llama3":
        return {"rope.scaling.original_context_length": model["position.scaling.original_context"]}
    return {}


def _read_window(settings: Settings, model: Flat) -> Flat:
    """A window is read and not written: llama.cpp gives it to some layers only, as the architecture says."""
    windowed = settings.get("attention.sliding_window", 0) != 0
    return {"attention.window": settings.whole("attention.sliding_window")} if windowed else {}


SIZES: tuple[Row, ...] = (
    Special(write=lambda model: {"vocab_size": model["vocab_size"]}),
    whole("context", "context_length"),
    whole("d_model", "embedding_length"),
    whole("layers", "block_count"),
    whole("feedforward.d_ff", "feed_forward_length", lambda model: 4 * model["d_model"]),
    whole("attention.heads", "attention.head_count"),
)
ROTATED: tuple[Row, ...] = (
    *SIZES,
    whole("attention.kv_heads", "attention.head_count_kv", lambda model: model["attention.heads"]),
    whole("attention.d_head", "attention.key_length", even_heads),
    same("attention.value_length", "attention.d_head"),
    number("position.base", "rope.freq_base", 10000.0),
    Special(_read_scaling, _write_scaling),
)
WHOLE_HEADS = same("rope.dimension_count", "attention.d_head")
RMS, LAYER_NORM = (number("norm.eps", f"attention.layer_norm_{kind}epsilon") for kind in ("rms_", ""))
LLAMA: tuple[Row, ...] = (*ROTATED, RMS, WHOLE_HEADS)
# a part of each head is rotated
FRACTION = Special(
    lambda settings, model: {
        "position.fraction": settings.whole("rope.dimension_count", model["attention.d_head"])
        / model["attention.d_head"]
    },
    lambda model: {"rope.dimension_count": round(model.get("position.fraction", 1.0) * model["attention.d_head"])},
)
PARALLEL = Special(
    lambda settings, model: {
        "sublayers": "parallel-two-norms" if settings.flag("use_parallel_residual", True) else "sequential"
    },
    lambda model: {"use_parallel_residual": model["sublayers"] == "parallel-two-norms"},
)


def _read_every_other(settings: Settings, model: Flat) -> Flat:
    """Gemma 2's window is that of every other layer, from the lowest on."""
    size = settings.whole("attention.sliding_window", 4096)
    return repeated([{"window": size if layer % 2 == 0 else None} for layer in range(min(model["layers"], 2**10))])


def _write_every_other(model: Flat) -> Tree:
    kinds = model["pattern"] or [{"window": model["attention.window"]}]
    return {"attention.sliding_window": kinds[0]["window"]} if kinds[0]["window"] else {}


def _read_caps(settings: Settings, model: Flat) -> Flat:
    scores, logits = settings.number("attn_logit_softcapping", 50.0), settings.number("final_logit_softcapping", 30.0)
    return {"attention.softcap": scores, "head.softcap": logits}


def _write_caps(model: Flat) -> Tree:
    caps = {"attn_logit_softcapping": model["attention.softcap"], "final_logit_softcapping": model["head.softcap"]}
    return {key: cap for key, cap in caps.items() if cap is not None}


def _read_factors(settings: Settings, model: Flat) -> Flat:
    """Granite's factors; logits are divided by theirs."""
    keys = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
    embedded, added, scores, divisor = (settings.number(key, 1.0) for key in keys)
    if min(embedded, added, scores, divisor) <= 0:
        raise settings.refusal("logit_scale", "Granite's factors are all above 0")
    scale = None if divisor == 1.0 else 1 / divisor
    found = {"residual_scale": added, "attention.scale": scores, "head.scale": scale}
    return {**found, "embedding_scale": False if embedded == 1.0 else embedded}


def _write_factors(model: Flat) -> Tree:
    embedded, divisor = model["embedding_scale"], 1 / (model["head.scale"] or 1.0)
    return {
        "embedding_scale": (model["d_model"] ** 0.5 if embedded else 1.0) if isinstance(embedded, bool) else embedded,
        "residual_scale": model["residual_scale"],
        "attention.scale": model["attention.scale"],
        "logit_scale": float(round(divisor)) if abs(divisor - round(divisor)) < 1e-9 else divisor,
    }


def _llama_like(fixed: Mapping[str, Any], *more: Row) -> Table:
    """RMSNorm, rotary positions, a gated feed-forward."""
    usual = {"norm.kind": "rms", "position.kind": "rotary", "feedforward.kind": "gated"}
    return Table((*LLAMA, *(more or (Special(_read_window),))), {**usual, **fixed}, only={"expert_count": 0})


def _plain(fixed: Mapping[str, Any], *more: Row) -> Table:
    """LayerNorm, rotary positions, a plain feed-forward, and biases everywhere."""
    usual = {"norm.kind": "layer", "position.kind": "rotary", "feedforward.kind": "plain", "attention.bias": "all"}
    return Table((*ROTATED, LAYER_NORM, *more), {**usual, "feedforward.activation": "gelu-tanh", **fixed})


# files of these store queries and keys for rotary pairs that are adjacent
ADJACENT = ("llama", "granite")
JOINED = ("gpt2", "gptneox", "phi2")  # files of these store queries, keys and values as one
# where several can hold a model, the first one is written
ARCHITECTURES = {
    "qwen2": _llama_like({"attention.bias": "qkv"}),
    "llama": _llama_like({}),
    "qwen3": _llama_like(
        {"attention.qk_norm.kind": "rms", "attention.bias": "none"},
        follows("attention.qk_norm.eps", "norm.eps"),
        Special(_read_window),
    ),
    "gemma": _llama_like(
        {
            "feedforward.activation": "gelu-tanh",
            "embedding_scale": True,
            "norm.offset": 1.0,
            "head.tied": True,
            "attention.bias": "none",
        }
    ),
    "gemma2": _llama_like(
        {
            "feedforward.activation": "gelu-tanh",
            "embedding_scale": True,
            "norm.offset": 1.0,
            "head.tied": True,
            "attention.bias": "none",
            "placement": "sandwich",
        },
        Special(_read_every_other, _write_every_other),
        Special(_read_caps, _write_caps),
    ),
    "olmo2": _llama_like(
        {
            "attention.qk_norm.kind": "rms",
            "attention.qk_norm_over": "heads",
            "attention.bias": "none",
            "placement": "res-post",
        },
        follows("attention.qk_norm.eps", "norm.eps"),
    ),
    "granite": _llama_like({}, Special(_read_factors, _write_factors)),
    "starcoder2": _plain({}, WHOLE_HEADS),
    "gptneox": _plain({}, FRACTION, PARALLEL),
    "phi2": _plain({"sublayers": "parallel"}, FRACTION),
    "gpt2": Table(
        rows=(
            *SIZES,
            same("attention.head_count_kv", "attention.heads"),
            number("norm.eps", "attention.layer_norm_epsilon"),
        ),
        fixed={
            "attention.bias": "all",
            "feedforward.kind": "plain",
            "feedforward.activation": "gelu-tanh",
            "norm.kind": "layer",
            "position.kind": "learned",
        },
    ),
}


# ---- reading


def settings_of(contents: Contents, architecture: str) -> Settings:
    """The keys of a file, to be asked for under the architecture's name.

    A float is the shortest number that fp32 stores as the same: 1e-5 was meant, not 9.999999747378752e-06.
    """
    tree = {}
    for key, (type, value, of) in contents.keys.items():
        if type == ARRAY and key.startswith(f"{architecture}.") and len(set(value)) == 1:
            type, value = of, value[0]  # given layer by layer, and the same for all
        tree[key] = float(str(np.float32(value))) if type == FLOAT32 else value
    return Settings(tree, str(contents.path), f"{architecture}.")


def read_settings(settings: Settings, contents: Contents, tied: bool) -> Decoder:
    """The decoder that a file holds."""
    tensors = contents.tensors
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise InteropError(f"{contents.path}: it has no matrix 'token_embd.weight' (vocab_size, d_model)")
    if settings.whole("block_count") > len(tensors):  # before that many layers are built
        raise settings.refusal("block_count", f"the file holds {len(tensors)} tensors in all")
    bias = "all" if "blk.0.attn_output.bias" in tensors else "qkv" if "blk.0.attn_q.bias" in tensors else "none"
    known = {"vocab_size": table.shape[0], "head.kind": "lm", "head.tied": tied, "attention.bias": bias}
    known["head.bias"] = "output.bias" in tensors
    if FREQUENCIES in tensors:
        known["position.scaling.kind"] = "llama3"
    model = ARCHITECTURES[settings.prefix.removesuffix(".")].read(settings, known)
    if FREQUENCIES in tensors:
        model |= _llama3_scaling(settings, contents, model)
    return validate(Decoder, nested(model), settings.where)


def _llama3_scaling(settings: Settings, contents: Contents, model: Flat) -> Flat:
    """LLaMA 3.1's scaling of positions, from the factors that each frequency is divided by."""
    found = contents.tensor(FREQUENCIES).float()
    factor = float(found.nan_to_num(0.0, 0.0, 0.0).max().clamp(min=1.0))
    original = settings.whole("rope.scaling.original_context_length", 8192)
    scaling = Llama3Scaling(factor=factor, original_context=original)
    wanted = frequency_factors(Rotary(base=model["position.base"], scaling=scaling), model["attention.d_head"])
    if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=1e-4):
        raise InteropError(f"{contents.path}: '{FREQUENCIES}' holds another scaling of positions than LLaMA 3.1's")
    return {f"position.scaling.{key}": value for key, value in scaling.model_dump().items()}


def frequency_factors(position: Rotary, d_head: int) -> Tensor:
    """What each rotary frequency is divided by, (d_head/2,): GGUF's form of LLaMA 3.1's scaling."""
    cpu, sizes = torch.device("cpu"), Sizes(d_model=d_head, heads=1, d_head=d_head, context=1, causal=True, layers=1)
    plain = RotaryModule(position.replace(scaling=None), sizes).frequencies(1, cpu)
    return plain / RotaryModule(position, sizes).frequencies(1, cpu)


def unknown_keys(settings: Settings, contents: Contents) -> dict[str, Any]:
    """Keys that nothing asked for, as JSON values, for a file that is written later."""
    return {
        key: list(value)
        for key, value in contents.keys.items()
        if key not in settings.asked and not (value.type == ARRAY and len(value.value) > KEPT)
    }


# ---- writing


def architecture_of(model: Model) -> str:
    """The architecture of llama.cpp that a model is, or an error that names what none of them has."""
    if not isinstance(model, Decoder):
        raise InteropError(f"model.kind = '{model.kind}': a GGUF file can hold decoders only")

    return first_that_holds(
        model, {name: partial(_read_again, name, model) for name in ARCHITECTURES}, "GGUF architecture"
    )


def _read_again(name: str, model: Decoder) -> Transformer:
    """The model that its keys would be read as beside its tensors."""
    table, ours = ARCHITECTURES[name], flat(model)
    tree = {f"{name}.{key}": value for key, value in table.write(ours).items()}
    in_tensors = {"vocab_size", "head.tied", "head.bias", "attention.bias"}
    if ours.get("position.scaling.kind") == "llama3":
        in_tensors |= {key for key in ours if key.startswith("position.scaling.")}
    if name in ADJACENT:  # where it differs, rows are reordered
        in_tensors.add("position.pairs")
    known = {"head.kind": "lm", **{key: ours[key] for key in in_tensors if key in ours}, **table.fixed}
    return validate(Decoder, nested(table.read(Settings(tree, "GGUF", f"{name}."), known)))


def model_keys(architecture: str, model: Decoder) -> Tree:
    """The keys of a model's settings."""
    tree = ARCHITECTURES[architecture].write(flat(model))
    return {f"{architecture}.{key}": value for key, value in tree.items()}


def rules(architecture: str, model: Decoder) -> list[Rule]:
    """Where each of weft's tensors is in a file."""
    gain = _shifted(model.norm.offset) if isinstance(model.norm, RMSNorm) and model.norm.offset else SAME
    reorder = architecture in ADJACENT and isinstance(model.position, Rotary) and model.position.pairs == "halves"
    pairs = adjacent_pairs(model.d_head) if reorder else SAME
    joined = [f"{BLK}.attn_qkv"] if architecture in JOINED else [f"{BLK}.attn_{part}" for part in "qkv"]
    return [
        tensor("embedding.weight", "token_embd.weight"),
        tensor("decoder.position.weight", POSITIONS),
        *module("output", "output"),
        *module("decoder.norm", "output_norm", layout=gain),
        *module(f"{BLOCK}.attention_skip.norm", f"{BLK}.attn_norm", layout=gain),
        *module(f"{BLOCK}.attention.qkv", *joined, layouts=(pairs, pairs, SAME)[: len(joined)]),
        *(tensor(f"{BLOCK}.attention.{part}_norm.weight", f"{BLK}.attn_{part}_norm.weight") for part in "qk"),
        *module(f"{BLOCK}.attention.out", f"{BLK}.attn_output"),
        *module(f"{BLOCK}.feedforward_skip.norm", f"{BLK}.ffn_norm", layout=gain),
        *module(f"{BLOCK}.attention_skip.norm_out", f"{BLK}.post_attention_norm", layout=gain),
        *module(f"{BLOCK}.feedforward_skip.norm_out", f"{BLK}.post_ffw_norm", layout=gain),
        *module(f"{BLOCK}.feedforward.up", f"{BLK}.ffn_up"),
        *module(f"{BLOCK}.feedforward.gate_up", f"{BLK}.ffn_gate", f"{BLK}.ffn_up"),
        *module(f"{BLOCK}.feedforward.down", f"{BLK}.ffn_down"),
    ]


def _shifted(offset: float) -> Layout:
    """A gain that is stored whole, where here it is `offset` plus a vector."""
    return Layout(lambda theirs: theirs.float() - offset, lambda ours: ours.float() + offset)
