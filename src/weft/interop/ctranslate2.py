"""CTranslate2 folders: translation models of Marian (OPUS-MT), OpenNMT and others, quantised or not.

A folder holds model.bin (`ctranslate2_file.py`), config.json and the vocabularies; the SentencePiece files that cut
text are often put beside them. int8 and int16 weights are turned into float32: weft's run holds what they stand for.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from weft.errors import InteropError
from weft.interop.bundle import ModelBundle, named_tokenizer
from weft.interop.ctranslate2_file import Stored, load
from weft.interop.ctranslate2_tokenizer import read_json, tokenizers, vocabularies
from weft.interop.weight_map import Rule, conversions, tensor, to_ours
from weft.models.config import EncoderDecoder, LMHead
from weft.nn.config import (
    Activation,
    Attention,
    Gated,
    LayerNorm,
    Learned,
    Plain,
    Position,
    Relative,
    RMSNorm,
    Sinusoidal,
    T5Bias,
)
from weft.nn.position import sinusoids

MODEL, CONFIG = "model.bin", "config.json"
KIND = "TransformerSpec"
ACTIVATIONS: tuple[Activation | None, ...] = ("relu", "gelu-tanh", "silu", "gelu", None, "tanh", "sigmoid")
SIDES = ("encoder", "decoder")
NEVER = -1e4  # the logit of a token that is never said
UNLIMITED = 2048  # positions that are written down where the file leaves them to a formula

# switches that weft has no part for, unless they are off
OFF = ("alibi", "alibi_use_positive_positions", "scale_alibi", "final_logit_softcapping")
# every setting that is understood, or changes nothing of what the model says
SETTINGS = {*OFF, "activation", "alignment_heads", "alignment_layer", "embeddings_merge", "multi_query_attention"}
SETTINGS |= {"head_dim", "multiply_by_sqrt_depth", "num_heads", "num_heads_kv", "pre_norm", "queries_scale"}
SETTINGS |= {"relative_attention_max_distance", "scale_embeddings", "scale_outputs", "start_from_zero_embedding"}
SETTINGS |= {"with_relative_position"}
# the tensors with a row a token of the target, to which Marian's start adds one
EXTENDED = {"decoder/embeddings/weight", "decoder/projection/weight", "decoder/projection/bias"}


def recognises(path: Path) -> bool:
    """Whether a path is a CTranslate2 model's folder (its file, and a vocabulary as that program names it) or file."""
    if path.is_file():
        return path.name == MODEL and (path.parent / CONFIG).is_file()
    names = (f"{name}_vocabulary.{end}" for name in ("shared", "source") for end in ("json", "txt"))
    return (path / MODEL).is_file() and any((path / name).is_file() for name in names)


def read(path: Path, tokenizer: Path | None = None) -> ModelBundle:
    """The encoder–decoder of a folder, or of its model.bin; `tokenizer` is used for the target if it is given."""
    folder = path if path.is_dir() else path.parent
    stored = load(folder / MODEL)
    if stored.kind != KIND:
        raise InteropError(f"{folder / MODEL}: a model of kind '{stored.kind}'; weft reads {KIND}, which translates")
    config = read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    if not isinstance(config, dict):
        raise InteropError(f"{folder / CONFIG}: expected a JSON object")
    source, target = vocabularies(folder)
    names = _Names(stored)
    zero_start = bool(stored.number("decoder/start_from_zero_embedding"))
    try:
        model = _model(names, config, zero_start)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise InteropError(f"{folder / MODEL}: settings that do not fit: {key} {problem['msg']}".strip()) from None
    _agree(folder, "target", len(target), names.shape("decoder/embeddings/weight")[0])
    _agree(folder, "source", len(source), names.shape(names.source_table)[0])
    weights = to_ours(
        conversions(_rules(model, names), model), _found(names, model, zero_start), _reads(names, zero_start), str(path)
    )
    target_tokenizer, source_tokenizer = tokenizers(folder, config, source, target, zero_start)
    kinds = sorted({variable.dtype for variable in stored.variables.values() if len(variable.shape) > 1})
    return ModelBundle(
        model=model,
        weights=weights,
        tokenizer=target_tokenizer if tokenizer is None else named_tokenizer(tokenizer, model.vocab_size),
        source_tokenizer=source_tokenizer,
        origin=f"{folder}: CTranslate2, {' and '.join(kinds)}",
        notes={
            "format": "ctranslate2",
            "types": kinds,
            "revision": stored.revision,
            "config": config,
            # Marian's sources end in eos, which its text tools add; other models' do where their config says so
            "source_eos": zero_start or bool(config.get("add_source_eos")),
        },
    )


def _agree(folder: Path, side: str, tokens: int, rows: int) -> None:
    if tokens != rows:
        raise InteropError(f"{folder}: the {side} vocabulary has {tokens} tokens, but the embeddings have {rows} rows")


class _Names:
    """The tensors of a file by name, and which of them stand for the same thing."""

    def __init__(self, stored: Stored):
        self.stored = stored
        several = "encoder/embeddings_1/weight" in stored
        if several:
            raise InteropError(f"{stored.path}: several source embeddings (word features) are not supported")
        first, old = "encoder/embeddings_0/weight", "encoder/embeddings/weight"
        self.source_table = first if first in stored else old
        for name in (self.source_table, "decoder/embeddings/weight", "decoder/projection/weight"):
            if name not in stored:
                raise InteropError(f"{stored.path}: '{name}' is missing")
        self.shared = self.same(self.source_table, "decoder/embeddings/weight")
        self.tied = self.same("decoder/projection/weight", "decoder/embeddings/weight")

    def __contains__(self, name: str) -> bool:
        return name in self.stored

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.stored:
            raise InteropError(f"{self.stored.path}: '{name}' is missing")
        return self.stored.shape(name)

    def same(self, one: str, other: str) -> bool:
        return self.stored.resolve(one) == self.stored.resolve(other)

    def number(self, side: str, setting: str, default: float) -> float:
        """A side's setting; older files give one to both sides."""
        found = self.stored.number(f"{side}/{setting}", setting)
        return default if found is None else found

    def both_sides(self, setting: str, default: float) -> float:
        """A setting that weft has once for both sides."""
        one, other = (self.number(side, setting, default) for side in SIDES)
        if one != other:
            raise InteropError(
                f"{self.stored.path}: {setting} is {one:g} in the encoder and {other:g} in the decoder; "
                "weft has one for both"
            )
        return one

    def layers(self, side: str) -> int:
        number = 0
        while f"{side}/layer_{number}/ffn/linear_0/weight" in self.stored:
            number += 1
        if not number:
            raise InteropError(f"{self.stored.path}: '{side}/layer_0/ffn/linear_0/weight' is missing")
        return number


# ---- settings


def _model(names: _Names, config: Mapping[str, Any], zero_start: bool) -> EncoderDecoder:
    where = names.stored.path
    rows, d_model = _matrix(names, "decoder/embeddings/weight")
    heads = int(names.both_sides("num_heads", 8))
    layer = "decoder/layer_0"
    own = f"{layer}/self_attention"
    kind = int(names.both_sides("activation", 0))
    activation = ACTIVATIONS[kind] if 0 <= kind < len(ACTIVATIONS) else None
    if activation is None:
        raise InteropError(f"{where}: activation number {kind} is none that weft has")
    d_head = _matrix(names, f"{own}/linear_1/weight")[1] // max(heads, 1)
    if heads < 1 or d_head < 1:
        raise InteropError(f"{where}: num_heads = {heads}: expected a whole number above 0")
    kv_heads = names.number(own, "num_heads_kv", heads)
    position, context = _position(names, d_model)
    rms = f"{own}/layer_norm/beta" not in names
    eps = config.get("layer_norm_epsilon") or (1e-6 if rms else 1e-5)
    if not isinstance(eps, int | float) or not 0 < eps < 1:
        raise InteropError(f"{where.parent / CONFIG}: layer_norm_epsilon = {eps!r}: expected a number between 0 and 1")
    d_ff = _matrix(names, f"{layer}/ffn/linear_0/weight")[0]
    biased = f"{layer}/ffn/linear_0/bias" in names
    gated = f"{layer}/ffn/linear_0_noact/weight" in names
    qkv, out = (f"{own}/linear_{part}/bias" in names for part in (0, 1))
    scale = names.number("decoder", "scale_outputs", 0.0)
    for switch in OFF:
        if names.number("decoder", switch, 0.0):
            raise InteropError(f"{where}: decoder/{switch} is on; weft has no such part in an encoder–decoder")
    return EncoderDecoder(
        vocab_size=rows + zero_start,
        source_vocab_size=None if names.shared else _matrix(names, names.source_table)[0],
        context=context,
        layers=names.layers("decoder"),
        encoder_layers=names.layers("encoder"),
        d_model=d_model,
        attention=Attention(
            heads=heads,
            kv_heads=None if kv_heads == heads else int(kv_heads),
            d_head=None if d_head * heads == d_model else d_head,
            bias="all" if qkv and out else "qkv" if qkv else "none",
            scale=names.stored.number(f"{own}/queries_scale"),
        ),
        feedforward=Gated(d_ff=d_ff, activation=activation, bias=biased)
        if gated
        else Plain(d_ff=d_ff, activation=activation, bias=biased),
        norm=RMSNorm(eps=eps) if rms else LayerNorm(eps=eps),
        placement="pre" if names.both_sides("pre_norm", 1) else "post",
        position=position,
        embedding_scale=_embedding_scale(names, d_model),
        embedding_norm="decoder/layernorm_embedding/gamma" in names,
        head=LMHead(
            tied=names.tied, bias=zero_start or "decoder/projection/bias" in names, scale=scale if scale > 0 else None
        ),
    )


def _matrix(names: _Names, name: str) -> tuple[int, int]:
    shape = names.shape(name)
    if len(shape) != 2 or 0 in shape:
        raise InteropError(f"{names.stored.path}: '{name}' {list(shape)} should be a matrix")
    return shape[0], shape[1]


def _embedding_scale(names: _Names, d_model: int) -> bool:
    """Whether embeddings are multiplied by √d_model: said by a switch, or by the number itself."""
    scale = names.both_sides("scale_embeddings", 1)
    if names.stored.number(f"{names.source_table.removesuffix('weight')}multiply_by_sqrt_depth") == 0:
        scale = 0.0
    stored = names.stored.variables.get(names.stored.resolve("decoder/scale_embeddings"))
    if stored is not None and stored.dtype != "int8" and scale != 1:
        if abs(scale - d_model**0.5) > 1e-2 * d_model**0.5:
            raise InteropError(f"{names.stored.path}: embeddings times {scale:g}; weft multiplies by √{d_model} or not")
        return True
    return stored is None or (stored.dtype == "int8" and scale != 0)


def _position(names: _Names, d_model: int) -> tuple[Position, int]:
    """What tells the model where a token stands, and the longest text for it."""
    own = "decoder/layer_0/self_attention"
    if f"{own}/relative_attention_bias" in names:
        buckets = _matrix(names, f"{own}/relative_attention_bias")[0]
        farthest = names.stored.number(f"{own}/relative_attention_max_distance") or 128
        return T5Bias(buckets=buckets, max_distance=int(farthest)), UNLIMITED
    if f"{own}/relative_position_keys" in names:
        return Relative(max_distance=_matrix(names, f"{own}/relative_position_keys")[0] // 2), UNLIMITED
    tables = [f"{side}/position_encodings/encodings" for side in SIDES]
    if not any(table in names for table in tables):
        return Learned(), UNLIMITED
    sizes = [_matrix(names, table) for table in tables]
    if sizes[0] != sizes[1] or sizes[0][1] != d_model:
        raise InteropError(
            f"{names.stored.path}: position encodings of {sizes[0]} and {sizes[1]}; d_model is {d_model}"
        )
    places = torch.arange(sizes[0][0])
    for layout in ("interleaved", "halves", "tensor2tensor"):
        waves = sinusoids(places, d_model, layout) if d_model % 2 == 0 else None
        near = waves is not None and all(
            torch.allclose(names.stored.tensor(table).double(), waves, atol=2e-3) for table in tables
        )
        if near:
            return Sinusoidal(layout=layout), sizes[0][0]
    return Learned(), sizes[0][0]


def default_waves(positions: int, d_model: int) -> Tensor:
    """The sinusoids that CTranslate2 computes where a file holds none: tensor2tensor's, counted from 1."""
    return sinusoids(torch.arange(1, positions + 1), d_model, "tensor2tensor").float()


# ---- weights


def _rules(model: EncoderDecoder, names: _Names) -> list[Rule]:
    """weft's names against CTranslate2's."""
    rules = [
        tensor("embedding.weight", "decoder/embeddings/weight"),
        tensor("source_embedding.weight", names.source_table),
        tensor("output.weight", "decoder/projection/weight"),
        tensor("output.bias", "decoder/projection/bias"),
    ]
    for side in SIDES:
        block, layer = f"{side}.blocks.{{layer}}", f"{side}/layer_{{layer}}"
        rules += [
            *_linear(f"{block}.attention.qkv", f"{layer}/self_attention/linear_0"),
            *_linear(f"{block}.attention.out", f"{layer}/self_attention/linear_1"),
            *_norm(f"{block}.attention_skip.norm", f"{layer}/self_attention/layer_norm"),
            *_norm(f"{block}.feedforward_skip.norm", f"{layer}/ffn/layer_norm"),
            *_linear(f"{block}.feedforward.up", f"{layer}/ffn/linear_0"),
            *_linear(f"{block}.feedforward.gate_up", f"{layer}/ffn/linear_0", f"{layer}/ffn/linear_0_noact"),
            *_linear(f"{block}.feedforward.down", f"{layer}/ffn/linear_1"),
            *_norm(f"{side}.norm", f"{side}/layer_norm"),
            *_norm(f"{side}.embedding_norm", f"{side}/layernorm_embedding"),
            tensor(f"{block}.attention.relative_keys", f"{layer}/self_attention/relative_position_keys"),
            tensor(f"{block}.attention.relative_values", f"{layer}/self_attention/relative_position_values"),
            tensor(f"{side}.position.weight", _position_name(model, side)),
        ]
    block, layer = "decoder.blocks.{layer}", "decoder/layer_{layer}/attention"
    rules += [
        *_linear(f"{block}.cross.q", f"{layer}/linear_0"),
        *_linear(f"{block}.cross.kv", f"{layer}/linear_1"),
        *_linear(f"{block}.cross.out", f"{layer}/linear_2"),
        *_norm(f"{block}.cross_skip.norm", f"{layer}/layer_norm"),
    ]
    return rules


def _linear(ours: str, *theirs: str) -> tuple[Rule, Rule]:
    weight, bias = (tensor(f"{ours}.{kind}", *(f"{name}/{kind}" for name in theirs)) for kind in ("weight", "bias"))
    return weight, bias


def _norm(ours: str, theirs: str) -> tuple[Rule, Rule]:
    return tensor(f"{ours}.weight", f"{theirs}/gamma"), tensor(f"{ours}.bias", f"{theirs}/beta")


def _position_name(model: EncoderDecoder, side: str) -> str:
    if isinstance(model.position, T5Bias):
        return f"{side}/layer_0/self_attention/relative_attention_bias"
    return f"{side}/position_encodings/encodings"


def _found(names: _Names, model: EncoderDecoder, zero_start: bool) -> dict[str, tuple[int, ...]]:
    """The tensors that have to be placed: every one of the file but what is a setting, a copy or a formula."""
    stored, found = names.stored, {}
    for name in (*stored.variables, *stored.aliases):
        shape, last = stored.shape(name), name.rsplit("/", 1)[-1]
        if name.endswith("_scale") and name.removesuffix("_scale") in stored:
            continue  # belongs to the tensor that it scales
        if not shape or last in SETTINGS:
            _known_setting(names, name, last, model)
        else:
            found[name] = shape
    copies = {"decoder/projection/weight"} if names.tied else set()
    copies |= {names.source_table} if names.shared else set()
    for name in list(found):
        repeated = name.endswith("/relative_attention_bias") and "/layer_0/" not in name
        formula = isinstance(model.position, Sinusoidal) and name.endswith("/position_encodings/encodings")
        if name in copies or repeated or formula:
            del found[name]
    if isinstance(model.position, Learned):
        for side in SIDES:
            found.setdefault(f"{side}/position_encodings/encodings", (model.context, model.d_model))
    if zero_start:
        found.setdefault("decoder/projection/bias", (model.vocab_size - 1,))
        for name in EXTENDED & found.keys():
            found[name] = (found[name][0] + 1, *found[name][1:])
    return found


def _known_setting(names: _Names, name: str, last: str, model: EncoderDecoder) -> None:
    if last not in SETTINGS:
        raise InteropError(f"{names.stored.path}: '{name}' is a setting that weft does not know")
    scale = model.attention.scale
    if last == "queries_scale" and names.stored.number(name) != scale:
        raise InteropError(
            f"{names.stored.path}: '{name}' differs from the other layers' {scale}; weft has one for all"
        )


def _reads(names: _Names, zero_start: bool) -> Callable[[str], Tensor]:
    """A function that reads a tensor by name, and makes those that the file leaves to be understood."""
    stored = names.stored
    quantised = any(v.dtype in ("int8", "int16") and len(v.shape) > 1 for v in stored.variables.values())

    def read(name: str) -> Tensor:
        if name in stored:
            tensor = stored.tensor(name)
            tensor = tensor.float() if quantised else tensor
        elif name.endswith("/position_encodings/encodings"):
            tensor = default_waves(UNLIMITED, stored.shape("decoder/embeddings/weight")[1])
        else:  # a bias that only the start token needs
            tensor = torch.zeros(stored.shape("decoder/embeddings/weight")[0])
        if zero_start and name in EXTENDED:
            start = torch.full((1, *tensor.shape[1:]), NEVER if name.endswith("/bias") else 0.0, dtype=tensor.dtype)
            return torch.cat((tensor, start))
        return tensor

    return read
