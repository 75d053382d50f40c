"""Which of llama.cpp's architectures a decoder is, and how its settings and tensors are called in a GGUF file."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.errors import InteropError
from weft.interop.gguf_file import ARRAY, FLOAT32, STRING, UINT32, Contents, Value
from weft.interop.weight_map import SAME, AdjacentPairs, Rule, both, rule
from weft.models.config import Decoder, Model
from weft.nn.config import Gated, LinearScaling, Llama3Scaling, RMSNorm, Rotary

LARGEST = 2**20  # of any width or count: beyond, a header is damaged or means harm
LONGEST = 2**32 - 1  # tokens of a context
KEPT = 64  # values of an array that is kept as a note
FREQUENCIES, POSITIONS = "rope_freqs.weight", "position_embd.weight"


# ---- architectures: what differs between the families of the LLaMA kind


@dataclass(frozen=True)
class Family:
    """A decoder with RMSNorm, rotary positions and a gated feed-forward; `adjacent`: rotary pairs are neighbours."""

    adjacent: bool = False
    qk_norm: bool = False
    activation: str = "silu"
    embedding_scale: bool = False
    offset: float = 0.0  # of the norms' gains, which a file stores with it added


FAMILIES = {
    "llama": Family(adjacent=True),
    "qwen2": Family(),
    "qwen3": Family(qk_norm=True),
    "gemma": Family(activation="gelu-tanh", embedding_scale=True, offset=1.0),
}
KNOWN = [*FAMILIES, "gpt2"]


@dataclass(frozen=True)
class Shifted:
    """A gain that is stored whole, where here it is `offset` plus a vector."""

    offset: float

    def shape(self, ours: tuple[int, ...]) -> tuple[int, ...]:
        return ours

    def to_ours(self, theirs: Tensor) -> Tensor:
        return theirs.float() - self.offset

    def to_theirs(self, ours: Tensor) -> Tensor:
        return ours.float() + self.offset


def rules(architecture: str, model: Decoder) -> list[Rule]:
    """Where each of weft's tensors stands in a file."""
    block, blk = "decoder.blocks.{layer}", "blk.{layer}"
    offset = model.norm.offset if isinstance(model.norm, RMSNorm) else 0.0
    gain = Shifted(offset) if offset else SAME
    shared = [
        rule("embedding.weight", "token_embd.weight"),
        rule("output.weight", "output.weight"),
        *both("decoder.norm", "output_norm", form=gain),
        *both(f"{block}.attention_skip.norm", f"{blk}.attn_norm", form=gain),
        *both(f"{block}.attention.out", f"{blk}.attn_output"),
        *both(f"{block}.feedforward_skip.norm", f"{blk}.ffn_norm", form=gain),
        *both(f"{block}.feedforward.down", f"{blk}.ffn_down"),
    ]
    if architecture == "gpt2":
        return [
            *shared,
            rule("decoder.position.weight", POSITIONS),
            *both(f"{block}.attention.qkv", f"{blk}.attn_qkv"),
            *both(f"{block}.feedforward.up", f"{blk}.ffn_up"),
        ]
    assert isinstance(model.position, Rotary)
    differs = FAMILIES[architecture].adjacent and model.position.pairs == "halves"
    turned = AdjacentPairs(model.d_head) if differs else SAME
    return [
        *shared,
        *both(f"{block}.attention.qkv", *(f"{blk}.attn_{x}" for x in "qkv"), forms=(turned, turned, SAME)),
        *(rule(f"{block}.attention.{x}_norm.weight", f"{blk}.attn_{x}_norm.weight") for x in "qk"),
        *both(f"{block}.feedforward.gate_up", f"{blk}.ffn_gate", f"{blk}.ffn_up"),
    ]


# ---- from a file's keys


class Settings:
    """A file's keys, asked for by their names under the architecture's; what nobody asked for is left over."""

    def __init__(self, contents: Contents) -> None:
        self.contents, self.used = contents, {"general.architecture", "general.alignment", "general.file_type"}
        self.used |= {"general.quantization_version", "tokenizer.chat_template"}
        self.architecture = contents.get("general.architecture")

    def wrong(self, what: str) -> InteropError:
        return InteropError(f"{self.contents.path}: {what}")

    def get(self, name: str, default: Any = None) -> Any:
        self.used.add(name)
        return self.contents.get(name, default)

    def own(self, name: str, default: Any = None) -> Any:
        """A value under the architecture's name; one that is given layer by layer must be the same for all."""
        value = self.get(f"{self.architecture}.{name}", default)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise self.wrong(f"'{self.architecture}.{name}' differs from layer to layer; expected one value")
            value = value[0]
        if value is None:
            raise self.wrong(f"'{self.architecture}.{name}' is missing")
        return value

    def whole(self, name: str, default: int | None = None, most: int = LARGEST) -> int:
        value = self.own(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= most:
            raise self.wrong(
                f"'{self.architecture}.{name}' = {value!r:.60}: expected a whole number from 1 to {most:,}"
            )
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.own(name, default)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise self.wrong(f"'{self.architecture}.{name}' = {value!r:.60}: expected a positive number")
        return float(str(np.float32(value)))  # 1e-5 was meant, not 9.999999747378752e-06

    def unused(self) -> dict[str, Any]:
        """What is left over, as JSON values, for a file that is written later."""
        left = {}
        for key, value in self.contents.keys.items():
            if key not in self.used and not (value.type == ARRAY and len(value.value) > KEPT):
                left[key] = list(value)
        return left


def settings_tree(settings: Settings) -> dict[str, Any]:
    """The settings of a decoder, but for its head."""
    if settings.architecture == "gpt2":
        return _gpt2(settings)
    return _llama(settings, FAMILIES[settings.architecture])


def _sizes(settings: Settings) -> dict[str, Any]:
    """What all architectures say: how many layers, how wide, and how long a text was."""
    layers = settings.whole("block_count")
    if layers > len(settings.contents.tensors):  # a model of so many layers is not even begun
        raise settings.wrong(f"block_count = {layers}, but there are {len(settings.contents.tensors)} tensors")
    table = settings.contents.tensors.get("token_embd.weight")
    if table is None or len(table.shape) != 2:
        raise settings.wrong("there is no table 'token_embd.weight' of (vocab_size, d_model)")
    return {
        "vocab_size": table.shape[0],
        "layers": layers,
        "d_model": settings.whole("embedding_length"),
        "context": settings.whole("context_length", most=LONGEST),
    }


def _gpt2(settings: Settings) -> dict[str, Any]:
    d_model, heads = settings.whole("embedding_length"), settings.whole("attention.head_count")
    if settings.whole("attention.head_count_kv", heads) != heads:
        raise settings.wrong("gpt2.attention.head_count_kv differs from head_count, which GPT-2 has not")
    eps = settings.number("attention.layer_norm_epsilon")
    d_ff = settings.whole("feed_forward_length", 4 * d_model)
    return _sizes(settings) | {
        "attention": {"heads": heads, "bias": "all"},
        "feedforward": {"kind": "plain", "d_ff": d_ff, "activation": "gelu-tanh"},
        "norm": {"kind": "layer", "eps": eps},
        "position": {"kind": "learned"},
    }


def _llama(settings: Settings, family: Family) -> dict[str, Any]:
    if settings.own("expert_count", 0):
        raise settings.wrong("a mixture of experts, which weft has no part for")
    d_model, heads = settings.whole("embedding_length"), settings.whole("attention.head_count")
    d_head = settings.whole("attention.key_length", max(1, d_model // heads))
    for name in ("attention.value_length", "rope.dimension_count"):
        if settings.whole(name, d_head) != d_head:
            raise settings.wrong(f"'{settings.architecture}.{name}' is not {d_head}, the width of a head of keys")
    eps = settings.number("attention.layer_norm_rms_epsilon")
    windowed = settings.own("attention.sliding_window", 0) != 0
    attention = {
        "heads": heads,
        "kv_heads": settings.whole("attention.head_count_kv", heads),
        "d_head": None if d_head * heads == d_model else d_head,
        "bias": _biases(settings),
        "qk_norm": {"kind": "rms", "eps": eps} if family.qk_norm else None,
        "window": settings.whole("attention.sliding_window", most=LONGEST) if windowed else None,
    }
    if attention["kv_heads"] == heads:
        attention["kv_heads"] = None
    base = settings.number("rope.freq_base", 10000.0)
    return _sizes(settings) | {
        "attention": attention,
        "feedforward": {
            "kind": "gated",
            "d_ff": settings.whole("feed_forward_length"),
            "activation": family.activation,
        },
        "norm": {"kind": "rms", "eps": eps, "offset": family.offset},
        "position": {"kind": "rotary", "base": base, "scaling": _scaling(settings, base, d_head)},
        "embedding_scale": family.embedding_scale,
    }


def _biases(settings: Settings) -> str:
    has = settings.contents.tensors.__contains__
    return "all" if has("blk.0.attn_output.bias") else "qkv" if has("blk.0.attn_q.bias") else "none"


def _scaling(settings: Settings, base: float, d_head: int) -> dict[str, Any] | None:
    """How the positions were stretched for longer texts."""
    kind = settings.own("rope.scaling.type", "none")
    original = settings.whole("rope.scaling.original_context_length", 8192, most=LONGEST)
    if FREQUENCIES in settings.contents.tensors:
        found = settings.contents.tensor(FREQUENCIES).float()
        factor = float(found.nan_to_num(0.0, 0.0, 0.0).max().clamp(min=1.0))
        guess = Llama3Scaling(factor=factor, original_context=original)
        wanted = frequency_factors(Rotary(base=base, scaling=guess), d_head)
        if found.shape != wanted.shape or not torch.allclose(found, wanted, rtol=1e-4):
            raise settings.wrong(f"'{FREQUENCIES}' holds another scaling of positions than LLaMA 3.1's")
        return guess.model_dump()
    if kind == "linear":
        return {"kind": "linear", "factor": settings.number("rope.scaling.factor")}
    if kind != "none":
        raise settings.wrong(f"rope.scaling.type = {kind!r:.60}: known: none, linear, and LLaMA 3.1's '{FREQUENCIES}'")
    return None


def frequency_factors(position: Rotary, d_head: int) -> Tensor:
    """What each rotary frequency is divided by, (d_head/2,): GGUF's form of LLaMA 3.1's scaling."""
    from weft.nn.position import Rotary as Module

    cpu = torch.device("cpu")
    plain = Module(position.replace(scaling=None), d_head, 1).frequencies(1, cpu)
    return plain / Module(position, d_head, 1).frequencies(1, cpu)


# ---- to a file's keys


def model_keys(architecture: str, model: Decoder) -> dict[str, Value]:
    attention, norm = model.attention, model.norm
    epsilon = "layer_norm_epsilon" if architecture == "gpt2" else "layer_norm_rms_epsilon"
    keys = {
        "vocab_size": Value(UINT32, model.vocab_size),
        "context_length": Value(UINT32, model.context),
        "embedding_length": Value(UINT32, model.d_model),
        "block_count": Value(UINT32, model.layers),
        "feed_forward_length": Value(UINT32, model.feedforward.d_ff),
        "attention.head_count": Value(UINT32, attention.heads),
        "attention.head_count_kv": Value(UINT32, attention.groups),
        f"attention.{epsilon}": Value(FLOAT32, norm.eps),
    }
    if isinstance(model.position, Rotary):
        keys |= {
            "attention.key_length": Value(UINT32, model.d_head),
            "attention.value_length": Value(UINT32, model.d_head),
            "rope.dimension_count": Value(UINT32, model.d_head),
            "rope.freq_base": Value(FLOAT32, model.position.base),
        }
        if isinstance(model.position.scaling, LinearScaling):
            keys["rope.scaling.type"] = Value(STRING, "linear")
            keys["rope.scaling.factor"] = Value(FLOAT32, model.position.scaling.factor)
        if isinstance(model.position.scaling, Llama3Scaling):
            original = model.position.scaling.original_context
            keys["rope.scaling.original_context_length"] = Value(UINT32, original)
    return {f"{architecture}.{name}": value for name, value in keys.items()}


def architecture_of(model: Model) -> str:
    """The architecture of llama.cpp that a model is, or an error that names the setting which none of them has."""
    if not isinstance(model, Decoder):
        raise InteropError(f"model.kind = '{model.kind}': a GGUF file holds decoders alone")
    expected: dict[str, Any] = {
        "head.kind": "lm",
        "head.bias": False,
        "head.scale": None,
        "placement": "pre",
        "residual": True,
        "embedding_norm": False,
        "attention.scale": None,
        "attention.window": None,
    }
    if isinstance(model.norm, RMSNorm):
        architecture = _family_of(model)
        family = FAMILIES[architecture]
        expected |= {
            "feedforward.kind": "gated",
            "feedforward.activation": family.activation,
            "feedforward.bias": False,
            "position.kind": "rotary",
            "embedding_scale": family.embedding_scale,
        }
        if family.qk_norm:
            expected |= {"attention.qk_norm.kind": "rms", "attention.qk_norm.eps": model.norm.eps}
            expected["attention.bias"] = "none"
        if not family.adjacent:
            expected["position.pairs"] = "halves"
        if architecture == "gemma":
            expected |= {"head.tied": True, "attention.bias": "none"}
    else:
        architecture = "gpt2"
        expected |= {
            "norm.bias": True,
            "attention.bias": "all",
            "attention.qk_norm": None,
            "attention.kv_heads": None,
            "attention.d_head": None,
            "feedforward.kind": "plain",
            "feedforward.activation": "gelu-tanh",
            "feedforward.bias": True,
            "position.kind": "learned",
            "position.offset": 0,
            "embedding_scale": False,
        }
    _hold(model, expected, architecture)
    return architecture


def _family_of(model: Decoder) -> str:
    if model.attention.qk_norm is not None:
        return "qwen3"
    if isinstance(model.feedforward, Gated) and model.feedforward.activation == "gelu-tanh":
        return "gemma"
    return "qwen2" if model.attention.bias == "qkv" else "llama"


def _hold(model: Decoder, expected: Mapping[str, Any], architecture: str) -> None:
    tree = model.model_dump()
    for key, value in expected.items():
        found: Any = tree
        for name in key.split("."):
            found = found.get(name) if isinstance(found, dict) else None
        same_heads = key == "attention.kv_heads" and found == model.attention.heads
        same_width = key == "attention.d_head" and model.d_head * model.attention.heads == model.d_model
        if found != value and not same_heads and not same_width:
            raise InteropError(
                f"model.{key} = {found!r}: a GGUF file cannot hold it; its nearest kind, {architecture}, has {value!r}"
            )
    scaling = tree["position"].get("scaling")
    if scaling and scaling["kind"] not in ("linear", "llama3"):
        raise InteropError(f"model.position.scaling.kind = '{scaling['kind']}': GGUF files know linear and llama3")
