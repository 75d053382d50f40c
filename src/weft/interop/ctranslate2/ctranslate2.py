"""Read CTranslate2 folders: translation models of Marian (OPUS-MT), OpenNMT and others, quantised or not.

A folder has model.bin (`file.py`), config.json and the vocabularies, and often the SentencePiece models. int8 and int16
weights are dequantised to fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from weft.config import Tree, validate
from weft.errors import InteropError
from weft.interop.bundle import ModelBundle, load_tokenizer
from weft.interop.ctranslate2.file import ModelFile, open_file
from weft.interop.ctranslate2.tokenizer import marian_files, read_tokenizers, read_vocabularies
from weft.interop.settings import Settings, nested
from weft.interop.weight_map import NameRule, Shape, block, conversions, module, tensor, to_ours
from weft.models.config import EncoderDecoder
from weft.nn.config import Activation
from weft.nn.position import sinusoids
from weft.nn.position_config import Learned, Sinusoidal, T5Bias
from weft.storage.untrusted import optional_object

MODEL, CONFIG = "model.bin", "config.json"
# kind of translation model → default number of heads; the first versions have no kind
HEADS = {"TransformerSpec": 8, "TransformerBase": 8, "TransformerBig": 16, "": 8}
ACTIVATIONS: tuple[Activation | None, ...] = ("relu", "gelu-tanh", "silu", "gelu", None, "tanh", "sigmoid")
SIDES = ("encoder", "decoder")
TARGET, SOURCES = "decoder/embeddings/weight", ("encoder/embeddings_0/weight", "encoder/embeddings/weight")
TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
POSITIONS = tuple(f"{side}/position_encodings/encodings" for side in SIDES)
NEVER = -1e4  # logit of a token that is never generated
UNLIMITED = 2048  # context of a model whose positions are computed by a formula
# CTranslate2's default search, by the names of transformers (which needs the number of beams to stop early)
SEARCH = {"min_new_tokens": 1, "early_stopping": True, "renormalize_logits": True, "num_beams": 5}
# modules of the first layer, whose settings are those of all layers
ATTENTION, FEEDFORWARD = "decoder/layer_0/self_attention", "decoder/layer_0/ffn/linear_0"

# features that weft lacks; they must be off
OFF = ("alibi", "alibi_use_positive_positions", "scale_alibi", "final_logit_softcapping")
# settings that are read, or do not change the model's output
SETTINGS = {
    *OFF,
    *("activation", "alignment_heads", "alignment_layer", "bos_token", "embeddings_merge", "eos_token", "head_dim"),
    *("layernorm_embedding", "multi_query_attention", "multiply_by_sqrt_depth", "num_heads", "num_heads_kv"),
    *("pre_norm", "queries_scale", "relative_attention_max_distance", "scale_embeddings", "scale_outputs"),
    *("start_from_zero_embedding", "unk_token", "user_decoder_start_tokens", "with_relative_position"),
    *("with_source_bos", "with_source_eos", "with_target_bos"),
}
# tensors with a row per target token, to which Marian's start token adds one
EXTENDED = {TARGET, "decoder/projection/weight", "decoder/projection/bias"}


def recognises(path: Path) -> bool:
    """Return whether a path is the folder of a CTranslate2 model (model.bin and a vocabulary), or its model.bin."""
    is_file = path.is_file()
    folder = path.parent if is_file and path.name == MODEL else path
    names = [f"{name}_vocabulary.{end}" for name in ("shared", "source") for end in ("json", "txt")]
    return (folder / MODEL).is_file() and any((folder / name).is_file() for name in (*names, *[CONFIG] * is_file))


def read(path: Path, tokenizer: Path | None = None) -> ModelBundle:
    """Read the encoder–decoder of a folder, or of its model.bin; `tokenizer`, if given, replaces that of the target."""
    folder = path if path.is_dir() else path.parent
    stored = _open(folder / MODEL)
    config = Settings(optional_object(folder / CONFIG) | _older_config(stored.file), str(folder / CONFIG))
    vocabularies = read_vocabularies(folder)
    model = validate(EncoderDecoder, _settings(stored, config), f"{folder / MODEL}: inconsistent settings")
    for side, table in (("target", TARGET), ("source", stored.source_table)):
        tokens, rows = len(vocabularies[side]), stored.file[table].shape[0]
        if tokens != rows:
            has = f"the {side} vocabulary has {tokens} tokens"
            raise InteropError(f"{folder}: {has}, but the embeddings have {rows} rows")
    parts = conversions(_rules(model, stored), model)
    weights = to_ours(parts, _tensor_shapes(stored, model), _reader(stored), location=str(path))
    target, source = read_tokenizers(folder, config, vocabularies, zero_start=stored.zero_start)
    dtypes = sorted({variable.dtype for variable in stored.file.variables.values() if len(variable.shape) > 1})
    return ModelBundle(
        model=model,
        weights=weights,
        tokenizer=target if tokenizer is None else load_tokenizer(tokenizer, model.vocab_size),
        source_tokenizer=source,
        files=marian_files(folder, vocabularies) if stored.zero_start and tokenizer is None else {},
        origin=f"{folder}: CTranslate2, {' and '.join(dtypes)}",
        notes={"generation": SEARCH},
    )


@dataclass(frozen=True)
class _StoredModel:
    """A model.bin, and which of its tensors are aliases.

    `shared`: source and target have the same embeddings; `tied`: the LM head is the target's embeddings; `zero_start`:
    the decoder starts with a zero vector, which becomes an additional token in weft.
    """

    file: ModelFile
    source_table: str
    shared: bool
    tied: bool
    zero_start: bool


def _open(path: Path) -> _StoredModel:
    file = open_file(path)
    if file.kind not in HEADS:
        known = ", ".join(filter(None, HEADS))
        raise file.error(f"a model of kind '{file.kind}'; weft reads the translation models {known}")
    if "encoder/embeddings_1/weight" in file:
        raise file.error("several source embeddings (word features) are not supported")
    source = next((name for name in SOURCES if name in file), SOURCES[-1])
    shared, tied = (file[name] is file[TARGET] for name in (source, "decoder/projection/weight"))
    zero_start = bool(file.number("decoder/start_from_zero_embedding"))
    return _StoredModel(file, source, shared=shared, tied=tied, zero_start=zero_start)


def _older_config(file: ModelFile) -> Tree:
    """Settings of config.json that files before version 6 have as variables."""
    if file.version >= 6:
        return {}
    tokens = {key: file.text(key) if key in file else default for key, default in TOKENS.items()}
    begins = tokens["bos_token"] if file.number("with_target_bos", default=1) else tokens["eos_token"]
    return {
        **tokens,
        "add_source_bos": bool(file.number("with_source_bos")),
        "add_source_eos": bool(file.number("with_source_eos")),
        "decoder_start_token": None if file.number("user_decoder_start_tokens") else begins,
    }


def _both_sides(file: ModelFile, setting: str, default: float) -> float:
    """Value of a setting that must be the same on both sides; older files have one for both."""
    encoder, decoder = (file.number(f"{side}/{setting}", setting, default=default) for side in SIDES)
    if encoder != decoder:
        values = f"{encoder:g} in the encoder and {decoder:g} in the decoder"
        raise file.error(f"{setting} is {values}; weft has one for both")
    return encoder


def _layers(file: ModelFile, side: str) -> int:
    name = f"{side}/layer_{{}}/ffn/linear_0/weight"
    file.matrix(name.format(0))  # raises if there is none
    return next(number for number in count(1) if name.format(number) not in file)


def _settings(stored: _StoredModel, config: Settings) -> Tree:
    file = stored.file
    rows, d_model = file.matrix(TARGET)
    heads = int(_both_sides(file, "num_heads", HEADS[file.kind]))
    d_head = file.matrix(f"{ATTENTION}/linear_1/weight")[1] // max(heads, 1)
    if heads < 1 or d_head < 1:
        raise file.error(f"num_heads = {heads}: expected a whole number above 0")
    for switch in OFF:
        if file.number(f"decoder/{switch}", switch):
            raise file.error(f"decoder/{switch} is on, which weft does not support in an encoder–decoder")
    number = int(_both_sides(file, "activation", 0))
    activation = ACTIVATIONS[number] if 0 <= number < len(ACTIVATIONS) else None
    if activation is None:
        raise file.error(f"weft does not have activation number {number}")
    rms = f"{ATTENTION}/layer_norm/beta" not in file
    eps = config.get("layer_norm_epsilon") or (1e-6 if rms else 1e-5)
    if not isinstance(eps, int | float) or not 0 < eps < 1:
        raise config.error("layer_norm_epsilon", "expected a number between 0 and 1")
    qkv, out = (f"{ATTENTION}/linear_{part}/bias" in file for part in (0, 1))
    scale = file.number("decoder/scale_outputs", "scale_outputs")
    position, context = _position(file, d_model)
    return nested(
        {
            "vocab_size": rows + stored.zero_start,
            "source_vocab_size": None if stored.shared else file.matrix(stored.source_table)[0],
            "context": context,
            "layers": _layers(file, "decoder"),
            "encoder_layers": _layers(file, "encoder"),
            "d_model": d_model,
            "attention.heads": heads,
            "attention.kv_heads": int(file.number(f"{ATTENTION}/num_heads_kv", "num_heads_kv", default=heads)),
            "attention.d_head": d_head,
            "attention.bias": "all" if qkv and out else "qkv" if qkv else "none",
            "attention.scale": file.number(f"{ATTENTION}/queries_scale")
            if f"{ATTENTION}/queries_scale" in file
            else None,
            "feedforward.kind": "gated" if f"{FEEDFORWARD}_noact/weight" in file else "plain",
            "feedforward.d_ff": file.matrix(f"{FEEDFORWARD}/weight")[0],
            "feedforward.activation": activation,
            "feedforward.bias": f"{FEEDFORWARD}/bias" in file,
            "norm": {"kind": "rms" if rms else "layer", "eps": eps},
            "placement": "pre" if _both_sides(file, "pre_norm", 1) else "post",
            "position": position,
            "embedding_scale": _embedding_scale(stored, d_model),
            "embedding_norm": "decoder/layernorm_embedding/gamma" in file,
            "head.tied": stored.tied,
            "head.bias": stored.zero_start or "decoder/projection/bias" in file,
            "head.scale": scale if scale > 0 else None,
        }
    )


def _embedding_scale(stored: _StoredModel, d_model: int) -> bool:
    """Return whether embeddings are multiplied by √d_model: stored as a flag or as the factor; True if absent."""
    file, old = stored.file, stored.source_table.removesuffix("weight") + "multiply_by_sqrt_depth"
    scale = _both_sides(file, "scale_embeddings", 1)
    name = next((name for name in ("decoder/scale_embeddings", "scale_embeddings", old) if name in file), None)
    if name is None or file[name].dtype == "int8":
        return name is None or file.number(name) != 0
    if scale != 1 and abs(scale - d_model**0.5) > 1e-2 * d_model**0.5:
        raise file.error(f"embeddings are multiplied by {scale:g}; weft multiplies by √{d_model} or not at all")
    return scale != 1


def _position(file: ModelFile, d_model: int) -> tuple[Tree, int]:
    """Position settings of the model, and its context."""
    if f"{ATTENTION}/relative_attention_bias" in file:
        buckets = file.matrix(f"{ATTENTION}/relative_attention_bias")[0]
        distance = file.number(f"{ATTENTION}/relative_attention_max_distance") or 128
        return {"kind": "t5", "buckets": buckets, "max_distance": int(distance)}, UNLIMITED
    if f"{ATTENTION}/relative_position_keys" in file:
        rows = file.matrix(f"{ATTENTION}/relative_position_keys")[0]
        return {"kind": "relative", "max_distance": rows // 2}, UNLIMITED
    if not any(table in file for table in POSITIONS):
        return {"kind": "learned"}, UNLIMITED
    sizes = [file.matrix(table) for table in POSITIONS]
    if sizes[0] != sizes[1] or sizes[0][1] != d_model:
        raise file.error(f"position encodings of {sizes[0]} and {sizes[1]}; d_model is {d_model}")
    context = sizes[0][0]
    for layout in ("interleaved", "halves", "tensor2tensor") if d_model % 2 == 0 else ():
        waves = sinusoids(torch.arange(context), d_model, layout)
        if all(torch.allclose(file.tensor(table).double(), waves, atol=2e-3) for table in POSITIONS):
            return {"kind": "sinusoidal", "layout": layout}, context
    return {"kind": "learned"}, context


def _rules(model: EncoderDecoder, stored: _StoredModel) -> list[NameRule]:
    biased = isinstance(model.position, T5Bias)
    position = "layer_0/self_attention/relative_attention_bias" if biased else "position_encodings/encodings"
    rules = [
        tensor("embedding.weight", TARGET),
        tensor("source_embedding.weight", stored.source_table),
        *module("output", "decoder/projection"),
    ]
    for side in SIDES:
        layer, relative = f"{side}/layer_{{layer}}", f"{side}.blocks.{{layer}}.attention.relative"
        rules += [
            *block(side, f"{layer}.self_attention", qkv="linear_0", out="linear_1", norm="layer_norm"),
            *block(side, f"{layer}.attention", cross_q="linear_0", cross_kv="linear_1", cross_out="linear_2"),
            *block(side, f"{layer}.attention", cross_norm="layer_norm"),
            *block(side, f"{layer}.ffn", gate_up=("linear_0", "linear_0_noact"), up="linear_0", down="linear_1"),
            *block(side, f"{layer}.ffn", ff_norm="layer_norm"),
            *module(f"{side}.norm", f"{side}/layer_norm"),
            *module(f"{side}.embedding_norm", f"{side}/layernorm_embedding"),
            tensor(f"{relative}_keys", f"{layer}/self_attention/relative_position_keys"),
            tensor(f"{relative}_values", f"{layer}/self_attention/relative_position_values"),
            tensor(f"{side}.position.weight", f"{side}/{position}"),
        ]
    return [replace(rule, theirs=tuple(map(_their_name, rule.theirs))) for rule in rules]


def _their_name(name: str) -> str:
    """Replace dots by slashes, and weight and bias of a norm by gamma and beta."""
    name = name.replace(".", "/")
    return name.replace("/weight", "/gamma").replace("/bias", "/beta") if "norm" in name else name


def _tensor_shapes(stored: _StoredModel, model: EncoderDecoder) -> dict[str, Shape]:
    """Shapes of all tensors that are weights: not settings, scales, aliases or sinusoids."""
    file, shapes = stored.file, {}
    skipped = set(POSITIONS) if isinstance(model.position, Sinusoidal) else set()
    skipped |= {"decoder/projection/weight"} if stored.tied else set()
    skipped |= {stored.source_table} if stored.shared else set()
    for name, variable in file.variables.items():
        last = name.rsplit("/", 1)[-1]
        if name.endswith("_scale") and name.removesuffix("_scale") in file:
            continue  # read with the tensor that it scales
        if not variable.shape or last in SETTINGS:
            if last not in SETTINGS:
                raise file.error(f"'{name}' is a setting that weft does not know")
            if last == "queries_scale" and file.number(name) != (scale := model.attention.scale):
                raise file.error(f"'{name}' differs from the other layers' {scale}; weft has one for all")
        elif name not in skipped and (last != "relative_attention_bias" or "/layer_0/" in name):
            shapes[name] = variable.shape
    if isinstance(model.position, Learned):
        for name in POSITIONS:
            shapes.setdefault(name, (model.context, model.d_model))
    if stored.zero_start:
        shapes.setdefault("decoder/projection/bias", (model.vocab_size - 1,))
        for name in EXTENDED & shapes.keys():
            shapes[name] = (shapes[name][0] + 1, *shapes[name][1:])
    return shapes


def _reader(stored: _StoredModel) -> Callable[[str], Tensor]:
    file = stored.file
    rows, d_model = file.matrix(TARGET)
    quantized = any(v.dtype in ("int8", "int16") and len(v.shape) > 1 for v in file.variables.values())

    def read(name: str) -> Tensor:
        if name in file:
            values = file.tensor(name)
            values = values.float() if quantized else values
        elif name in POSITIONS:
            # computed by CTranslate2 if they are not stored: tensor2tensor's sinusoids, from position 1
            values = sinusoids(torch.arange(1, UNLIMITED + 1), d_model, "tensor2tensor").float()
        else:  # a bias that only the start token needs
            values = torch.zeros(rows)
        if stored.zero_start and name in EXTENDED:
            start = torch.full((1, *values.shape[1:]), NEVER if name.endswith("/bias") else 0.0, dtype=values.dtype)
            return torch.cat((values, start))
        return values

    return read
