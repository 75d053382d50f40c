"""Write small models as CTranslate2 folders, without CTranslate2, and run what weft reads from them."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.interop.bundle import ModelBundle
from weft.models.build import build
from weft.models.config import EncoderDecoder
from weft.models.head_config import LMHead
from weft.models.transformer import Transformer
from weft.nn.config import Attention, Gated, LayerNorm, Plain, RMSNorm
from weft.nn.position import sinusoids
from weft.nn.position_config import Learned, Relative, Sinusoidal, T5Bias

D, HEADS, FF = 16, 4, 24
TOKENS = ["<unk>", "<s>", "</s>", *(f"w{number}" for number in range(20))]
SOURCE, TARGET = [3, 9, 17, 4, 4], [1, 5, 9, 21]
BASE = EncoderDecoder(
    vocab_size=len(TOKENS),
    context=40,
    layers=1,
    encoder_layers=2,
    d_model=D,
    attention=Attention(heads=HEADS, bias="all"),
    feedforward=Plain(d_ff=FF),
    norm=LayerNorm(),
    placement="post",
    position=Sinusoidal(layout="halves"),
    embedding_scale=True,
    head=LMHead(bias=True),
)
MODELS = {
    "marian": BASE.replace(feedforward=Plain(d_ff=FF, activation="silu")),
    "opennmt": BASE.replace(placement="pre", head=LMHead(tied=False, bias=True), position=Sinusoidal()),
    "two-tables": BASE.replace(source_vocab_size=len(TOKENS), embedding_scale=False),
    "bart": BASE.replace(
        position=Learned(), embedding_norm=True, feedforward=Plain(d_ff=FF, activation="gelu"), embedding_scale=False
    ),
    "relative": BASE.replace(placement="pre", position=Relative(max_distance=3)),
    "t5": BASE.replace(
        placement="pre",
        attention=Attention(heads=HEADS, d_head=3, scale=1.0),
        feedforward=Gated(d_ff=FF, activation="gelu-tanh"),
        norm=RMSNorm(eps=1e-6),
        position=T5Bias(buckets=8, max_distance=20),
        embedding_scale=False,
        head=LMHead(scale=D**-0.5),
    ),
}
PARTS = {
    "attention.qkv": "self_attention/linear_0",
    "attention.out": "self_attention/linear_1",
    "attention_skip.norm": "self_attention/layer_norm",
    "cross.q": "attention/linear_0",
    "cross.kv": "attention/linear_1",
    "cross.out": "attention/linear_2",
    "cross_skip.norm": "attention/layer_norm",
    "feedforward.up": "ffn/linear_0",
    "feedforward.down": "ffn/linear_1",
    "feedforward_skip.norm": "ffn/layer_norm",
}

Variables = dict[str, Any]  # NumPy arrays, and scalars for settings


def random_model(config: EncoderDecoder) -> Transformer:
    torch.manual_seed(0)
    model = build(config).eval()
    assert isinstance(model, Transformer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def variables(model: Transformer) -> tuple[Variables, dict[str, str]]:
    """Return a model's tensors and settings under CTranslate2's names, and the aliases."""
    config, state = model.config, {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    assert isinstance(config, EncoderDecoder)
    activations = ("relu", "gelu-tanh", "silu", "gelu")
    arrays: Variables = {"decoder/embeddings/weight": state["embedding.weight"]}
    aliases = {}
    for ours, theirs in (
        ("source_embedding.weight", "encoder/embeddings_0/weight"),
        ("output.weight", "decoder/projection/weight"),
    ):
        if ours in state:
            arrays[theirs] = state[ours]
        else:
            aliases[theirs] = "decoder/embeddings/weight"
    if "output.bias" in state:
        arrays["decoder/projection/bias"] = state["output.bias"]
    assert isinstance(config.head, LMHead)
    if config.head.scale:
        arrays["decoder/scale_outputs"] = np.float32(config.head.scale)
    for side, layers in (("encoder", config.encoder_layers), ("decoder", config.layers)):
        arrays[f"{side}/num_heads"] = np.int16(HEADS)
        arrays[f"{side}/pre_norm"] = np.int8(config.placement == "pre")
        arrays[f"{side}/activation"] = np.int8(activations.index(config.feedforward.activation))
        arrays[f"{side}/scale_embeddings"] = np.float32(D**0.5) if config.embedding_scale else np.int8(0)
        if isinstance(config.position, Sinusoidal):
            waves = sinusoids(torch.arange(config.context), D, config.position.layout).float().numpy()
            arrays[f"{side}/position_encodings/encodings"] = waves
        if isinstance(config.position, Learned):
            arrays[f"{side}/position_encodings/encodings"] = state[f"{side}.position.weight"]
        for ours, theirs in (("norm", "layer_norm"), ("embedding_norm", "layernorm_embedding")):
            for kind, name in (("weight", "gamma"), ("bias", "beta")):
                if f"{side}.{ours}.{kind}" in state:
                    arrays[f"{side}/{theirs}/{name}"] = state[f"{side}.{ours}.{kind}"]
        for layer in range(layers or 0):
            block, scope = f"{side}.blocks.{layer}", f"{side}/layer_{layer}"
            for ours, theirs in PARTS.items():
                for kind in ("weight", "bias"):
                    if f"{block}.{ours}.{kind}" in state:
                        name = {"weight": "gamma", "bias": "beta"}[kind] if ours.endswith("norm") else kind
                        arrays[f"{scope}/{theirs}/{name}"] = state[f"{block}.{ours}.{kind}"]
            if f"{block}.feedforward.gate_up.weight" in state:
                gate, up = np.split(state[f"{block}.feedforward.gate_up.weight"], 2)
                arrays |= {f"{scope}/ffn/linear_0/weight": gate, f"{scope}/ffn/linear_0_noact/weight": up}
            if isinstance(config.position, Relative):
                for kind in ("keys", "values"):
                    name = f"{scope}/self_attention/relative_position_{kind}"
                    arrays[name] = state[f"{block}.attention.relative_{kind}"]
            if isinstance(config.position, T5Bias):
                name = "self_attention/relative_attention_bias"
                arrays[f"{scope}/self_attention/relative_attention_max_distance"] = np.int32(20)
                if layer:
                    aliases[f"{scope}/{name}"] = f"{side}/layer_0/{name}"
                else:
                    arrays[f"{scope}/{name}"] = state[f"{side}.position.weight"]
            for attention in ("self_attention", "attention"):
                if f"{scope}/{attention}/linear_0/weight" not in arrays:
                    continue
                if config.attention.scale:
                    arrays[f"{scope}/{attention}/queries_scale"] = np.float32(config.attention.scale)
                if config.attention.d_head:
                    arrays[f"{scope}/{attention}/head_dim"] = np.int32(config.attention.d_head)
    return arrays, aliases


def text(word: str) -> bytes:
    return struct.pack("<H", len(word.encode()) + 1) + word.encode() + b"\0"


def binary(
    arrays: Variables,
    aliases: Mapping[str, str],
    kind: str = "TransformerSpec",
    *,
    version: int = 6,
    revision: int = 7,
) -> bytes:
    """Return the content of model.bin."""
    types = ["float32", "int8", "int16", "int32", "float16"]
    out = struct.pack("<I", version) + text(kind) + struct.pack("<II", revision, len(arrays))
    for name in sorted(arrays):
        array = np.asarray(arrays[name])
        out += text(name) + struct.pack("<B", array.ndim) + struct.pack(f"<{array.ndim}I", *array.shape)
        if version >= 4:
            out += struct.pack("<BI", types.index(array.dtype.name), array.nbytes)
        else:
            out += struct.pack("<BI", array.itemsize, array.size)
        out += array.tobytes()
    return out + struct.pack("<I", len(aliases)) + b"".join(text(a) + text(b) for a, b in sorted(aliases.items()))


def first_names(arrays: Variables, aliases: Mapping[str, str]) -> Variables:
    """Rename to OpenNMT-tf's names as in the first revision, which has no aliases and no table of positions."""
    words = {"embeddings_0/": "embeddings/", "embeddings/weight": "w_embs", "projection": "dense", "/weight": "/kernel"}
    words |= {"layer_norm": "LayerNorm", "linear_0": "conv1d", "linear_": "conv1d_"}
    renamed = {}
    for name, array in {**arrays, **{alias: arrays[name] for alias, name in aliases.items()}}.items():
        if array.ndim and "encodings" not in name:
            for new, old in words.items():
                name = name.replace(new, old)
            if name.startswith("encoder"):
                name = name.replace("self_attention", "multi_head")
            else:
                name = name.replace("/attention", "/multi_head").replace("self_attention", "masked_multi_head")
            renamed[f"transformer/{name}:0"] = array
    return renamed


def first_binary(arrays: Variables, kind: str = "") -> bytes:
    """Return a model.bin of version 2, or of version 1, which names no kind; both have no aliases."""
    data = binary(arrays, {}, kind, version=2, revision=1)[:-4]
    return data if kind else struct.pack("<I", 1) + data[4 + len(text(kind)) + 4 :]


def folder(path: Path, data: bytes, tokens: Any = TOKENS, **settings: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "model.bin").write_bytes(data)
    (path / "shared_vocabulary.json").write_text(json.dumps(tokens))
    config = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "decoder_start_token": "<s>"}
    config |= {"add_source_bos": False, "add_source_eos": False, "layer_norm_epsilon": None} | settings
    (path / "config.json").write_text(json.dumps(config))
    return path


def rebuild(bundle: ModelBundle) -> Transformer:
    model = build(bundle.model).eval()
    model.load_state_dict({name: read() for name, read in bundle.weights.items()})
    assert isinstance(model, Transformer)
    return model


def logits(model: Transformer, target: list[int], source: list[int]) -> Tensor:
    batch: Any = SimpleNamespace(tokens=torch.tensor([source]), mask=torch.ones(1, len(source), dtype=torch.bool))
    with torch.no_grad():
        return model(torch.tensor([target]), source=batch)[0].float()


def scores(model: Transformer, target: list[int]) -> Tensor:
    """Log-likelihoods of the tokens of TARGET and eos, given SOURCE."""
    predictions = logits(model, target, SOURCE).log_softmax(-1)
    return predictions[torch.arange(4), torch.tensor([*TARGET[1:], 2])]
