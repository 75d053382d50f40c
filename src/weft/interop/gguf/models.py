"""Which of llama.cpp's architectures a model is, its settings from and to the keys of a GGUF file, and its tensors."""

import numpy as np
import torch
from torch import Tensor

from weft.config import Tree, validate
from weft.errors import InteropError
from weft.interop.gguf import architectures as llama_cpp
from weft.interop.gguf.architectures import ARCHITECTURES, FREQUENCIES, LONG, SHORT
from weft.interop.gguf.file import ARRAY, FLOAT32, Contents
from weft.interop.settings import Flat, Settings, Transformer, first_that_holds, flat, nested
from weft.interop.weight_map import SAME, Layout, Rules, adjacent_pairs, block, module, tensor
from weft.models.config import Decoder, Model
from weft.nn.config import Norm, RMSNorm
from weft.nn.position import Rotary as RotaryModule
from weft.nn.position_config import Rotary, Sizes
from weft.nn.scaling import Llama3Scaling, LongRoPE

POSITIONS = "position_embd.weight"
SCALED_BY = {FREQUENCIES: "llama3", LONG: "longrope"}  # by the tensors that are there


# ---- reading


def settings_of(contents: Contents, architecture: str) -> Settings:
    """The keys of a file, to be asked for under the architecture's name.

    A float is the shortest number that fp32 stores as the same: 1e-5 was meant, not 9.999999747378752e-06.
    """
    tree = {}
    for key, (type, value, of) in contents.keys.items():
        by_layer = type == ARRAY and key.startswith(f"{architecture}.") and not key.endswith(llama_cpp.STEP)
        if by_layer and len(set(value)) == 1:
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
    read_in, written = (
        any(f"blk.0.attn_{part}.bias" in tensors for part in parts) for parts in (("q", "qkv"), ("output",))
    )
    bias = {(True, True): "all", (True, False): "qkv", (False, True): "out"}.get((read_in, written), "none")
    known = {"vocab_size": table.shape[0], "head.kind": "lm", "head.tied": tied, "attention.bias": bias}
    known["head.bias"] = "output.bias" in tensors
    architecture = settings.prefix.removesuffix(".")
    known |= llama_cpp.shown_by_tensors(architecture, tensors)
    scaling = next((kind for name, kind in SCALED_BY.items() if name in tensors), None)
    if scaling is not None:
        known["position.scaling.kind"] = scaling
    model = ARCHITECTURES[architecture].settings(settings, known)
    if scaling is not None:
        read = _llama3_scaling if scaling == "llama3" else _long_scaling
        model |= {f"position.scaling.{key}": value for key, value in read(settings, contents, model).items()}
    return validate(Decoder, nested(model), settings.place)


def _llama3_scaling(settings: Settings, contents: Contents, model: Flat) -> Tree:
    """LLaMA 3.1's scaling of positions, from the factors that each frequency is divided by."""
    found = contents.tensor(FREQUENCIES).float()
    factor = float(found.nan_to_num(0.0, 0.0, 0.0).max().clamp(min=1.0))
    original = settings.whole("rope.scaling.original_context_length", 8192)
    scaling: Tree = Llama3Scaling(factor=factor, original_context=original).model_dump()
    position = validate(Rotary, {"base": model["position.base"], "scaling": scaling}, settings.place)
    wanted = frequency_factors(position, model["attention.d_head"])
    if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=1e-4):
        raise InteropError(f"{contents.path}: '{FREQUENCIES}' holds another scaling of positions than LLaMA 3.1's")
    return scaling


def _long_scaling(settings: Settings, contents: Contents, model: Flat) -> Tree:
    """LongRoPE's two lists of factors, and what goes with them."""
    if SHORT not in contents.tensors:
        raise InteropError(f"{contents.path}: it has a tensor '{LONG}', but no '{SHORT}'")
    lists = {
        side: tuple(float(str(factor)) for factor in contents.tensor(name).float().flatten().numpy())
        for side, name in (("short", SHORT), ("long", LONG))
    }
    original = settings.whole("rope.scaling.original_context_length", model["context"])
    return {
        **lists,
        "original_context": original,
        "attention_factor": settings.number("rope.scaling.attn_factor", 1.0),
    }


def factors(model: Decoder) -> dict[str, Tensor]:
    """The tensors that scale positions, by name."""
    scaling = model.position.scaling if isinstance(model.position, Rotary) else None
    if isinstance(scaling, LongRoPE):
        return {LONG: torch.tensor(scaling.long), SHORT: torch.tensor(scaling.short)}
    if isinstance(scaling, Llama3Scaling):
        assert isinstance(model.position, Rotary)
        return {FREQUENCIES: frequency_factors(model.position, model.d_head)}
    return {}


def frequency_factors(position: Rotary, d_head: int) -> Tensor:
    """What each rotary frequency is divided by, (d_head/2,): GGUF's form of LLaMA 3.1's scaling."""
    cpu, sizes = torch.device("cpu"), Sizes(d_model=d_head, heads=1, d_head=d_head, context=1, causal=True, layers=1)
    plain = RotaryModule(position.replace(scaling=None), sizes).frequencies(1, cpu)
    return plain / RotaryModule(position, sizes).frequencies(1, cpu)


# ---- writing


def architecture_of(model: Model) -> str:
    """The architecture of llama.cpp that a model is, or an error that names what none of them has."""
    if not isinstance(model, Decoder):
        raise InteropError(f"model.kind = '{model.kind}': a GGUF file can hold decoders only")
    return first_that_holds(model, ARCHITECTURES, lambda name: _read_again(name, model), "GGUF architecture")


def _read_again(name: str, model: Decoder) -> Transformer:
    """The model that its keys would be read as beside its tensors."""
    table, ours = ARCHITECTURES[name], flat(model)
    tree = {f"{name}.{key}": value for key, value in table.keys(ours).items()}
    in_tensors = {"vocab_size", "head.tied", "attention.bias"}
    if name == "qwen2":
        in_tensors.add("head.bias")
    if name in llama_cpp.IN_TENSORS.get(ours.get("position.scaling.kind", ""), ()):
        in_tensors |= {key for key in ours if key.startswith("position.scaling.")}
    if name in llama_cpp.ADJACENT:  # where it differs, rows are reordered
        in_tensors.add("position.pairs")
    known = {"head.kind": "lm", **{key: ours[key] for key in in_tensors if key in ours}, **table.fixed}
    known |= llama_cpp.shown_by_tensors(name, llama_cpp.names_of_first(ours))
    return validate(Decoder, nested(table.settings(Settings(tree, "GGUF", f"{name}."), known)))


def rules(architecture: str, model: Decoder) -> Rules:
    """Where each of weft's tensors is in a file."""
    gain, own = _gain(model.norm), _gain(model.attention.qk_norm)
    halves = isinstance(model.position, Rotary) and model.position.pairs == "halves"
    pairs = adjacent_pairs(model.d_head) if halves and architecture in llama_cpp.ADJACENT else SAME
    joined = architecture in llama_cpp.JOINED
    layouts = {"qkv": SAME if joined else (pairs, pairs, SAME), "q_norm": own, "k_norm": own}
    layouts |= dict.fromkeys(("norm", "norm_out", "ff_norm", "ff_norm_out"), gain)
    norm, ff_norm = "attn_norm", "ffn_norm"
    if architecture == "falcon" and model.sublayers == "parallel-two-norms":
        norm, ff_norm = "attn_norm_2", "attn_norm"  # the second was added for attention
    return (
        tensor("embedding.weight", "token_embd.weight"),
        tensor("decoder.position.weight", POSITIONS),
        *module("decoder.embedding_norm", "token_embd_norm", layout=gain),
        *module("output", "output"),
        *module("decoder.norm", "output_norm", layout=gain),
        *block(
            "decoder",
            "blk.{layer}",
            layouts,
            norm=norm,
            qkv="attn_qkv" if joined else "attn_*",
            q_norm="attn_q_norm",
            k_norm="attn_k_norm",
            out="attn_output",
            ff_norm=ff_norm,
            norm_out="post_attention_norm",
            ff_norm_out="post_ffw_norm",
            up="ffn_up",
            gate_up="ffn_up" if architecture == "phi3" else ("ffn_gate", "ffn_up"),
            down="ffn_down",
        ),
    )


def _gain(norm: Norm | None) -> Layout:
    """How a norm's gain is stored: whole, where here it may be `offset` plus a vector."""
    offset = norm.offset if isinstance(norm, RMSNorm) else 0.0
    return Layout(lambda theirs: theirs.float() - offset, lambda ours: ours.float() + offset) if offset else SAME
