"""Read and write GGUF files, llama.cpp's format: settings, weights and tokenizer in one file.

Quantised weights become fp32, which represents them exactly; fp16 would round them again. If all matrices of a file
have one 16-bit dtype that also represents its vectors, that dtype is kept. The quantised blocks are kept with the
weights: an export with `dtype = None` writes those of every unchanged matrix byte for byte, and other matrices in the
dtype of the run, so that reading it again gives the same values.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.config import validate
from weft.errors import InteropError
from weft.interop import weight_map
from weft.interop.bundle import ModelBundle, as_dtype, lazy_weights, load_tokenizer
from weft.interop.gguf import file as gguf_file
from weft.interop.gguf.architectures import ARCHITECTURES, MIXTURES, STEP, WITHOUT_EXPERTS
from weft.interop.gguf.file import ARRAY, BY_NAME, DTYPES, FLOAT32, Contents, LazyTensor, TensorEncoding, Value, typed
from weft.interop.gguf.scaling import FACTORS, IN_TENSORS, factor_tensors, read_factors, scaling_of
from weft.interop.gguf.tensors import ADJACENT, JOINED, REPEATED, first_layer_tensors, settings_from_tensors
from weft.interop.gguf.tokenizer import read_tokenizer, tokenizer_keys
from weft.interop.license import license_from_keys, license_keys
from weft.interop.settings import Flat, Settings, Transformer, count_experts, first_lossless, flat, nested, shown
from weft.interop.weight_map import (
    A_ROW,
    EXPERTS_TRANSPOSED,
    SAME,
    VECTOR,
    Layouts,
    Names,
    Rules,
    TensorLayout,
    adjacent_pairs,
    block,
    experts,
    module,
    tensor,
)
from weft.models.config import Decoder, Model
from weft.models.head_config import LMHead
from weft.nn.config import Norm, RMSNorm
from weft.nn.position_config import Rotary
from weft.progress import bar

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_k", "q4_0")
# 4-bit dtypes → fallbacks for rows that are not whole blocks; embeddings and LM head, which suffer most from rounding,
# have 8 bits instead
FOUR_BITS = {"q4_k": ("Q5_0",), "q4_0": ()}
TABLES = ("token_embd.weight", "output.weight")
POSITIONS = "position_embd.weight"
MODULE_NAMES = {  # of a block, by the short names of `block`
    "norm": "attn_norm", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "out": "attn_output", "ff_norm": "ffn_norm",
    "norm_out": "post_attention_norm", "ff_norm_out": "post_ffw_norm", "up": "ffn_up", "down": "ffn_down",
    "router": "ffn_gate_inp", "shared_down": "ffn_down_shexp", "shared_gate": "ffn_gate_inp_shexp",
}  # fmt: skip
LATENT_NAMES: dict[str, Names] = {
    "qkv": None, "q_norm": None, "k_norm": None, "kv_down": "attn_kv_a_mqa", "kv_latent_norm": "attn_kv_a_norm",
}  # fmt: skip
QUERY_RANK_NAMES: dict[str, Names] = {"q_down": "attn_q_a", "q_latent_norm": "attn_q_a_norm", "q_up": "attn_q_b"}
WHOLE_KV = "blk.0.attn_kv_b.weight"  # of older files
EXPERT_TENSORS = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight")
VECTORS = ("ffn_gate_inp_shexp.weight", "exp_probs_b.bias")
MAX_KEPT_VALUES = 64  # length of an array that is kept in the notes
KEPT = ("general.type", "general.name")  # keys that keep their imported values
# keys that describe the file itself and are always new
GENERAL = {"general.architecture", "general.alignment", "general.file_type", "general.quantization_version"}


def read(path: Path, tokenizer: Path | None = None) -> ModelBundle:
    """Read the model of a GGUF file; `tokenizer` is the path of another tokenizer that replaces the file's.

    Weights are read, and dequantised, lazily.
    """
    contents = gguf_file.open_file(path)
    architecture = contents.get("general.architecture")
    if architecture == "phimoe":
        difference = "llama.cpp computes other norms, expert weights and positions than this model was trained with"
        raise InteropError(f"{path}: general.architecture = 'phimoe': {difference}; import its Hugging Face folder")
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise InteropError(f"{path}: general.architecture = {shown(architecture)}: weft reads {known}")
    if (parts := contents.get("split.count", 1)) != 1:
        raise InteropError(f"{path}: one of {shown(parts)} parts of a model; join them with llama-gguf-split")
    if any(entry.encoding.block > 1 for entry in contents.tensors.values()):
        gguf_file.quantization()  # report a missing package now, not when the first weight is read
    settings = _settings_of(contents, architecture)
    shapes = {name: entry.shape for name, entry in contents.tensors.items() if name not in FACTORS}
    # converters may write these vectors as matrices of one row
    shapes |= {name: shape[-1:] for name, shape in shapes.items() if name.endswith(VECTORS) and shape[0] == 1}
    tables = [contents.raw(name) for name in TABLES if name in shapes]
    if architecture in ("gpt2", *REPEATED) and len(tables) == 2 and tables[0] == tables[1]:
        del shapes["output.weight"]
    model = _read_settings(settings, contents, tied="output.weight" not in shapes)
    if tokenizer is None:
        chosen_tokenizer = read_tokenizer(settings.tree, str(path))
    else:
        chosen_tokenizer = load_tokenizer(tokenizer, model.vocab_size)
        settings.used |= {key for key in contents.keys if key.startswith("tokenizer.")}  # of the replaced one
    rows, tokens = model.vocab_size, contents.get("tokenizer.ggml.tokens")
    for key, size in (
        (f"{settings.prefix}vocab_size", settings.get("vocab_size", rows)),
        ("tokenizer.ggml.tokens", len(tokens) if isinstance(tokens, list) else rows),
    ):
        if size != rows:
            raise InteropError(f"{path}: {key} has {shown(size)} entries, but 'token_embd.weight' has {rows} rows")
    if architecture == "glm4moe":  # further layers predict several tokens
        last = tuple(f"blk.{layer}." for layer in range(model.layers, settings.integer("block_count")))
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(last)}
    table = weight_map.conversions(rules(architecture, model, whole=WHOLE_KV in shapes), model)
    weights = weight_map.to_ours(table, shapes, contents.tensor, location=str(path))
    encodings = {name: entry.encoding.name for name, entry in contents.tensors.items()}
    sizes: Counter[str] = Counter()
    for name, entry in contents.tensors.items():
        sizes[encodings[name]] += math.prod(entry.shape)
    stored = {name: kind for name, kind in encodings.items() if kind != "F32"}
    most_common, file_type = sizes.most_common(1)[0][0], contents.get("general.file_type")
    file_type = file_type if type(file_type) is int and most_common not in DTYPES else None
    kind = most_common if file_type is None else gguf_file.FILE_TYPES.get(file_type, most_common)
    dtype = _run_dtype(contents, model)
    settings.used |= {*GENERAL, "split.count", "tokenizer.chat_template"}
    unused = {key: value for key, value in contents.keys.items() if key not in settings.used}
    kept = {key: list(v) for key, v in unused.items() if v.type != ARRAY or len(v.value) <= MAX_KEPT_VALUES}
    notes = {"keys": kept, "encodings": stored, "file_type": file_type}
    return ModelBundle(
        model=model,
        weights={name: as_dtype(make, dtype) for name, make in weights.items()},
        tokenizer=chosen_tokenizer,
        origin=f"{path.name} (GGUF, {architecture}, {kind})",
        notes={"gguf": notes, "license": license_from_keys(settings.tree)},
        unused=lazy_weights(contents.blocks, (name for name, kind in stored.items() if kind not in DTYPES)),
    )


def _run_dtype(contents: Contents, model: Decoder) -> torch.dtype:
    """Dtype of all matrices if they share one that represents all vectors exactly, else fp32."""
    offset = model.norm.offset if isinstance(model.norm, RMSNorm) else 0.0
    matrices = {entry.encoding.name for name, entry in contents.tensors.items() if not _always_fp32(name, entry.shape)}
    dtype = DTYPES.get(matrices.pop(), torch.float32) if len(matrices) == 1 else torch.float32
    for name, entry in contents.tensors.items():
        if _always_fp32(name, entry.shape) and name not in FACTORS:
            vector = contents.tensor(name).float() - offset
            if not torch.equal(vector.to(dtype).float(), vector):
                return torch.float32
    return dtype


def _always_fp32(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether llama.cpp requires fp32 for a tensor."""
    return len(shape) == 1 or name == POSITIONS or name.endswith(("_norm.weight", "ffn_gate_inp.weight"))


def write(bundle: ModelBundle, path: Path, dtype: str | None = None) -> None:
    """Write a model as a GGUF file, atomically.

    `dtype`, one of TYPES, is that of the matrices (with Q4_K and Q4_0, embeddings and LM head are Q8_0); if None, each
    matrix keeps its own, including imported quantised blocks. Vectors are fp32, as llama.cpp requires. Keys of an
    imported GGUF file that weft does not use are written again.
    """
    architecture = architecture_of(bundle.model)
    assert isinstance(bundle.model, Decoder)
    if dtype is not None and dtype.startswith("q"):
        gguf_file.quantization()
    keys, tensors = _keys(bundle, architecture, path.stem), _tensors(bundle, architecture, dtype)
    former = bundle.notes.get("gguf", {}).get("file_type") or 0
    keys["general.file_type"] = typed(former if dtype is None else BY_NAME[dtype.upper()].file_type)
    with bar("writing", len(tensors)) as advance:
        gguf_file.write_file(path, keys, tensors, advance=advance)


def _keys(bundle: ModelBundle, architecture: str, name: str) -> dict[str, Value]:
    model, tokenizer = bundle.model, bundle.tokenizer
    assert isinstance(model, Decoder)
    kept: Mapping[str, Any] = bundle.notes.get("gguf", {}).get("keys", {})
    if tokenizer is None or bundle.notes.get("tokenizer", tokenizer.fingerprint) != tokenizer.fingerprint:
        kept = {key: value for key, value in kept.items() if not key.startswith("tokenizer.")}  # of another one
    keys = {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": name,
        "general.file_type": 0,
        "general.quantization_version": 2,
        **{key: name for key, name in license_keys(bundle.notes.get("license", {})).items() if key not in kept},
    }
    keys |= {f"{architecture}.{key}": value for key, value in ARCHITECTURES[architecture].keys(flat(model)).items()}
    if tokenizer is not None:
        pre = kept["tokenizer.ggml.pre"][1] if "tokenizer.ggml.pre" in kept else None
        keys |= tokenizer_keys(tokenizer, model.vocab_size, pre)
    imported = {key: Value(*value) for key, value in kept.items() if key not in keys or key in KEPT}
    return {key: typed(value) for key, value in keys.items()} | imported


def _tensors(bundle: ModelBundle, architecture: str, dtype: str | None) -> list[LazyTensor]:
    model = bundle.model
    assert isinstance(model, Decoder)
    parts = weight_map.conversions(rules(architecture, model), model)
    weights = weight_map.to_theirs(parts, bundle.weights)
    tensors = []
    for name, shape in weight_map.their_shapes(parts).items():
        former, blocks = _former(bundle, name)
        encoding = _encoding(name, shape, dtype)
        tensors.append(LazyTensor(name, shape, encoding, read=weights[name], former=former, blocks=blocks))
    if architecture in REPEATED and isinstance(model.head, LMHead) and model.head.tied:
        embedding = next(lazy for lazy in tensors if lazy.name == "token_embd.weight")
        tensors.append(embedding._replace(name="output.weight"))
    factors = factor_tensors(model).items()
    return [LazyTensor(name, tuple(t.shape), BY_NAME["F32"], read=t.clone) for name, t in factors] + tensors


def _former(bundle: ModelBundle, name: str) -> tuple[TensorEncoding | None, Callable[[], Tensor] | None]:
    """Encoding of a tensor in the imported GGUF file, if any, and the function that reads its quantised blocks."""
    encoding = BY_NAME.get(bundle.notes.get("gguf", {}).get("encodings", {}).get(name))
    if encoding is None or encoding.block == 1:
        return encoding, None
    return (encoding, bundle.unused[name]) if name in bundle.unused else (None, None)


def _encoding(name: str, shape: tuple[int, ...], dtype: str | None) -> TensorEncoding | None:
    if _always_fp32(name, shape):
        return BY_NAME["F32"]
    if dtype is None:
        return None
    candidates = (dtype.upper(), *FOUR_BITS.get(dtype, ()), "F16")
    if dtype in FOUR_BITS and name in TABLES:
        candidates = ("Q8_0", "F16")
    return next(BY_NAME[kind] for kind in candidates if shape[-1] % BY_NAME[kind].block == 0)


def _settings_of(contents: Contents, architecture: str) -> Settings:
    """Keys of a file as settings with the architecture's prefix.

    A float is the shortest decimal with the same fp32 value: 1e-5, not 9.999999747378752e-06.
    """
    tree = {}
    for key, (type, value, of) in contents.keys.items():
        by_layer = type == ARRAY and key.startswith(f"{architecture}.") and not key.endswith(STEP)
        if by_layer and len(set(value)) == 1:
            type, value = of, value[0]  # stored by layer, and the same for all layers
        tree[key] = float(str(np.float32(value))) if type == FLOAT32 else value
    return Settings(tree, str(contents.path), f"{architecture}.")


def _read_settings(settings: Settings, contents: Contents, tied: bool) -> Decoder:
    tensors = contents.tensors
    table = tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise InteropError(f"{contents.path}: it has no matrix 'token_embd.weight' (vocab_size, d_model)")
    if settings.integer("block_count") > len(tensors):  # checked before the layers are built
        raise settings.error("block_count", f"the file has only {len(tensors)} tensors")
    biased = {part for part in ("q", "qkv", "output") if f"blk.0.attn_{part}.bias" in tensors}
    qkv, out = bool(biased & {"q", "qkv"}), "output" in biased
    bias = {(True, True): "all", (True, False): "qkv", (False, True): "out"}.get((qkv, out), "none")
    known = {"vocab_size": table.shape[0], "head.kind": "lm", "head.tied": tied, "attention.bias": bias}
    known["head.bias"] = "output.bias" in tensors
    architecture = settings.prefix.removesuffix(".")
    known |= settings_from_tensors(architecture, tensors)
    known |= scaling_of(tensors)
    model = ARCHITECTURES[architecture].settings(settings, known)
    if model["feedforward.kind"] == "experts":
        _check_experts(settings, model, contents)
    model |= read_factors(settings, contents, model)
    return validate(Decoder, nested(model), settings.location)


def _check_experts(settings: Settings, model: Flat, contents: Contents) -> None:
    """Raise InteropError for impossible numbers of experts, before the layers are built."""
    experts, chosen = model["feedforward.experts"], model["feedforward.chosen"]
    if chosen > experts:
        raise settings.error(
            "expert_used_count", f"a token can choose at most {settings.prefix}expert_count = {experts}"
        )
    dense = model.get("feedforward.dense_layers", ())
    first = next((layer for layer in range(model["layers"]) if layer not in dense), model["layers"])
    name, shape = f"blk.{first}.{EXPERT_TENSORS[0]}", [experts, model["feedforward.d_ff"], model["d_model"]]
    stored = contents.tensors.get(name)
    if stored is None:
        raise InteropError(f"{settings.location}: '{name}' {shape} is missing")
    if list(stored.shape) != shape:
        raise InteropError(f"{settings.location}: '{name}' is {list(stored.shape)}; the settings require {shape}")


def architecture_of(model: Model) -> str:
    """Architecture of llama.cpp that can express a model; InteropError that explains what the nearest one lacks."""
    if not isinstance(model, Decoder):
        raise InteropError(f"model.kind = '{model.kind}': a GGUF file can hold decoders only")
    mixed = count_experts(model) > 0
    names = MIXTURES if mixed else WITHOUT_EXPERTS
    if mixed:
        names = tuple(name for name in names if (name == "deepseek2") == (model.attention.latent is not None))
    what = f"GGUF architecture of mixtures ({', '.join(names)})" if mixed else "GGUF architecture"
    return first_lossless(model, {name: partial(_round_trip, name, model) for name in names}, what)


def _round_trip(name: str, model: Decoder) -> Transformer:
    """Model that is read from the keys that an architecture writes, and from the model's tensors."""
    table, ours = ARCHITECTURES[name], flat(model)
    tree = {f"{name}.{key}": value for key, value in table.keys(ours).items()}
    in_tensors = {"vocab_size", "head.tied", "attention.bias"}
    if name == "qwen2":
        in_tensors.add("head.bias")
    if name in IN_TENSORS.get(ours.get("position.scaling.kind", ""), ()):
        in_tensors |= {key for key in ours if key.startswith("position.scaling.")}
    if name in ADJACENT:  # rows are reordered if the model differs
        in_tensors.add("position.pairs")
    known = {"head.kind": "lm", **{key: ours[key] for key in in_tensors if key in ours}, **table.fixed}
    known |= settings_from_tensors(name, first_layer_tensors(ours))
    return validate(Decoder, nested(table.settings(Settings(tree, "GGUF", f"{name}."), known)))


def rules(architecture: str, model: Decoder, *, whole: bool = False) -> Rules:
    """Rules of all tensors of an architecture; `whole` latent keys and values have one matrix for both."""
    gain, qk_gain = _gain(model.norm), _gain(model.attention.qk_norm)
    halves = isinstance(model.position, Rotary) and model.position.pairs == "halves"
    pairs = adjacent_pairs(model.d_head) if halves and architecture in ADJACENT else SAME
    joined = architecture in JOINED
    layouts: dict[str, Layouts] = {
        "qkv": SAME if joined else (pairs, pairs, SAME),
        "q_norm": qk_gain,
        "k_norm": qk_gain,
    }
    layouts["shared_gate"] = A_ROW
    layouts |= dict.fromkeys(("norm", "norm_out", "ff_norm", "ff_norm_out"), gain)
    names: dict[str, Names] = {**MODULE_NAMES, "qkv": "attn_qkv" if joined else "attn_*"}
    if (latent := model.attention.latent) is not None:
        names |= {**LATENT_NAMES, **(QUERY_RANK_NAMES if latent.query_rank else {"q_up": "attn_q"})}
        names["kv_up"] = "attn_kv_b" if whole else ("attn_k_b", "attn_v_b")
        layouts["kv_up"] = SAME if whole else (EXPERTS_TRANSPOSED, SAME)
    names["shared_gate_up"] = ("ffn_gate_shexp", "ffn_up_shexp")
    names["gate_up"] = "ffn_up" if architecture == "phi3" else ("ffn_gate", "ffn_up")
    if architecture in ("glm4moe", "gpt-oss"):
        names |= {"norm_out": None, "ff_norm": "post_attention_norm"}
    if architecture == "falcon" and model.sublayers == "parallel-two-norms":
        names |= {"norm": "attn_norm_2", "ff_norm": "attn_norm"}  # the second is that of attention
    return (
        tensor("embedding.weight", "token_embd.weight"),
        tensor("decoder.position.weight", POSITIONS),
        *module("decoder.embedding_norm", "token_embd_norm", layout=gain),
        *module("output", "output"),
        *module("decoder.norm", "output_norm", layout=gain),
        *block("decoder", "blk.{layer}", layouts, **names),
        *experts("blk.{layer}", EXPERT_TENSORS[:2], EXPERT_TENSORS[2], layouts=(SAME, SAME), bias=".bias"),
        tensor("decoder.blocks.{layer}.attention.sinks", "blk.{layer}.attn_sinks.weight"),
        tensor("decoder.blocks.{layer}.feedforward.router.choice_bias", "blk.{layer}.exp_probs_b.bias", layout=VECTOR),
    )


def _gain(norm: Norm | None) -> TensorLayout:
    """Layout of a norm's gain, which is stored including `offset`."""
    offset = norm.offset if isinstance(norm, RMSNorm) else 0.0
    return TensorLayout(lambda theirs: theirs.float() - offset, lambda ours: ours.float() + offset) if offset else SAME
