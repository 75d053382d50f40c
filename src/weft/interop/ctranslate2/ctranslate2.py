"""CTranslate2 folders: translation models of Marian (OPUS-MT), OpenNMT and others, quantized or not.

A folder holds model.bin (`file.py`), config.json and the vocabularies; the SentencePiece models that
tokenize text are often put beside them. int8 and int16 weights are dequantized to fp32.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

import torch
from torch import Tensor

from weft.config import Tree, validate
from weft.errors import InteropError
from weft.interop.bundle import ModelBundle, named_tokenizer
from weft.interop.ctranslate2.file import ModelFile, open_file
from weft.interop.ctranslate2.tokenizer import marian_files, read_tokenizers, read_vocabularies
from weft.interop.settings import Settings, nested
from weft.interop.weight_map import Rule, Shape, block, conversions, module, tensor, to_ours
from weft.models.config import EncoderDecoder
from weft.nn.config import Activation
from weft.nn.position import sinusoids
from weft.nn.position_config import Learned, Sinusoidal, T5Bias
from weft.storage.untrusted import optional_object

MODEL, CONFIG = "model.bin", "config.json"
# the kinds that translate, and their heads where the file does not say how many; the first versions gave no kind
HEADS = {"TransformerSpec": 8, "TransformerBase": 8, "TransformerBig": 16, "": 8}
ACTIVATIONS: tuple[Activation | None, ...] = ("relu", "gelu-tanh", "silu", "gelu", None, "tanh", "sigmoid")
SIDES = ("encoder", "decoder")
TARGET, SOURCES = "decoder/embeddings/weight", ("encoder/embeddings_0/weight", "encoder/embeddings/weight")
TOKENS = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
POSITIONS = tuple(f"{side}/position_encodings/encodings" for side in SIDES)
NEVER = -1e4  # the logit of a token that is never generated
UNLIMITED = 2048  # positions that get a row where the file leaves them to a formula
# how it searches unless it is told otherwise, in transformers' words (which has to know a width to end early)
SEARCH = {"min_new_tokens": 1, "early_stopping": True, "renormalize_logits": True, "num_beams": 5}
# whose settings stand for those of all layers
OWN, FEEDFORWARD = "decoder/layer_0/self_attention", "decoder/layer_0/ffn/linear_0"

# switches that weft has no part for, unless they are off
OFF = ("alibi", "alibi_use_positive_positions", "scale_alibi", "final_logit_softcapping")
# every setting that is understood, or does not change the model's output
SETTINGS = {
    *OFF,
    *("activation", "alignment_heads", "alignment_layer", "bos_token", "embeddings_merge", "eos_token", "head_dim"),
    *("layernorm_embedding", "multi_query_attention", "multiply_by_sqrt_depth", "num_heads", "num_heads_kv"),
    *("pre_norm", "queries_scale", "relative_attention_max_distance", "scale_embeddings", "scale_outputs"),
    *("start_from_zero_embedding", "unk_token", "user_decoder_start_tokens", "with_relative_position"),
    *("with_source_bos", "with_source_eos", "with_target_bos"),
}
# the tensors with a row a token of the target, to which Marian's start adds one
EXTENDED = {TARGET, "decoder/projection/weight", "decoder/projection/bias"}


def recognises(path: Path) -> bool:
    """Whether a path is a CTranslate2 model's folder (its file, and a vocabulary as that program names it) or file."""
    alone = path.is_file()
    folder = path.parent if alone and path.name == MODEL else path
    names = [f"{name}_vocabulary.{end}" for name in ("shared", "source") for end in ("json", "txt")]
    return (folder / MODEL).is_file() and any((folder / name).is_file() for name in (*names, *[CONFIG] * alone))


def read(path: Path, tokenizer: Path | None = None) -> ModelBundle:
    """The encoder–decoder of a folder, or of its model.bin; `tokenizer` is used for the target if it is given."""
    folder = path if path.is_dir() else path.parent
    stored = _open(folder / MODEL)
    config = Settings(optional_object(folder / CONFIG) | _older_config(stored.file), str(folder / CONFIG))
    vocabularies = read_vocabularies(folder)
    model = validate(EncoderDecoder, _settings(stored, config), f"{folder / MODEL}: settings that do not fit")
    for side, table in (("target", TARGET), ("source", stored.source_table)):
        tokens, rows = len(vocabularies[side]), stored.file[table].shape[0]
        if tokens != rows:
            has = f"the {side} vocabulary has {tokens} tokens"
            raise InteropError(f"{folder}: {has}, but the embeddings have {rows} rows")
    weights = to_ours(conversions(_rules(model, stored), model), _found(stored, model), _reader(stored), str(path))
    target, source = read_tokenizers(folder, config, vocabularies, stored.zero_start)
    types = sorted({variable.dtype for variable in stored.file.variables.values() if len(variable.shape) > 1})
    return ModelBundle(
        model=model,
        weights=weights,
        tokenizer=target if tokenizer is None else named_tokenizer(tokenizer, model.vocab_size),
        source_tokenizer=source,
        files=marian_files(folder, vocabularies) if stored.zero_start and tokenizer is None else {},
        origin=f"{folder}: CTranslate2, {' and '.join(types)}",
        notes={"generation": SEARCH},
    )


@dataclass(frozen=True)
class _Stored:
    """A model.bin, and which of its tensors are the same.

    `shared`: one table embeds source and target; `tied`: the output's table is the target's embeddings; `zero_start`:
    the decoder starts from a zero vector, which is a token of its own in weft.
    """

    file: ModelFile
    source_table: str
    shared: bool
    tied: bool
    zero_start: bool


def _open(path: Path) -> _Stored:
    file = open_file(path)
    if file.kind not in HEADS:
        known = ", ".join(filter(None, HEADS))
        raise file.error(f"a model of kind '{file.kind}'; weft reads {known}, which translate")
    if "encoder/embeddings_1/weight" in file:
        raise file.error("several source embeddings (word features) are not supported")
    source = next((name for name in SOURCES if name in file), SOURCES[-1])
    shared, tied = (file[name] is file[TARGET] for name in (source, "decoder/projection/weight"))
    return _Stored(file, source, shared, tied, bool(file.number("decoder/start_from_zero_embedding")))


def _older_config(file: ModelFile) -> Tree:
    """What stands in config.json since version 6, from the variables of an older file."""
    if file.version >= 6:
        return {}
    tokens = {key: file.text(key) if key in file else usual for key, usual in TOKENS.items()}
    begins = tokens["bos_token"] if file.number("with_target_bos", default=1) else tokens["eos_token"]
    return {
        **tokens,
        "add_source_bos": bool(file.number("with_source_bos")),
        "add_source_eos": bool(file.number("with_source_eos")),
        "decoder_start_token": None if file.number("user_decoder_start_tokens") else begins,
    }


def _both_sides(file: ModelFile, setting: str, default: float) -> float:
    """A setting that weft has once for both sides; older files give one to both, too."""
    one, other = (file.number(f"{side}/{setting}", setting, default=default) for side in SIDES)
    if one != other:
        raise file.error(f"{setting} is {one:g} in the encoder and {other:g} in the decoder; weft has one for both")
    return one


def _layers(file: ModelFile, side: str) -> int:
    name = f"{side}/layer_{{}}/ffn/linear_0/weight"
    file.matrix(name.format(0))  # there is one at least
    return next(number for number in count(1) if name.format(number) not in file)


def _settings(stored: _Stored, config: Settings) -> Tree:
    file = stored.file
    rows, d_model = file.matrix(TARGET)
    heads = int(_both_sides(file, "num_heads", HEADS[file.kind]))
    d_head = file.matrix(f"{OWN}/linear_1/weight")[1] // max(heads, 1)
    if heads < 1 or d_head < 1:
        raise file.error(f"num_heads = {heads}: expected a whole number above 0")
    for switch in OFF:
        if file.number(f"decoder/{switch}", switch):
            raise file.error(f"decoder/{switch} is on; weft has no such part in an encoder–decoder")
    number = int(_both_sides(file, "activation", 0))
    activation = ACTIVATIONS[number] if 0 <= number < len(ACTIVATIONS) else None
    if activation is None:
        raise file.error(f"activation number {number} is not one that weft has")
    rms = f"{OWN}/layer_norm/beta" not in file
    eps = config.get("layer_norm_epsilon") or (1e-6 if rms else 1e-5)
    if not isinstance(eps, int | float) or not 0 < eps < 1:
        raise config.error("layer_norm_epsilon", "expected a number between 0 and 1")
    qkv, out = (f"{OWN}/linear_{part}/bias" in file for part in (0, 1))
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
            "attention.kv_heads": int(file.number(f"{OWN}/num_heads_kv", "num_heads_kv", default=heads)),
            "attention.d_head": d_head,
            "attention.bias": "all" if qkv and out else "qkv" if qkv else "none",
            "attention.scale": file.number(f"{OWN}/queries_scale") if f"{OWN}/queries_scale" in file else None,
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


def _embedding_scale(stored: _Stored, d_model: int) -> bool:
    """Whether embeddings are multiplied by √d_model: given as a switch, or as the number itself; on if it is absent."""
    file, old = stored.file, stored.source_table.removesuffix("weight") + "multiply_by_sqrt_depth"
    scale = _both_sides(file, "scale_embeddings", 1)
    name = next((name for name in ("decoder/scale_embeddings", "scale_embeddings", old) if name in file), None)
    if name is None or file[name].dtype == "int8":
        return name is None or file.number(name) != 0
    if scale != 1 and abs(scale - d_model**0.5) > 1e-2 * d_model**0.5:
        raise file.error(f"embeddings are multiplied by {scale:g}; weft multiplies by √{d_model} or not at all")
    return scale != 1


def _position(file: ModelFile, d_model: int) -> tuple[Tree, int]:
    """How the model knows where a token is, and the longest text that this allows."""
    if f"{OWN}/relative_attention_bias" in file:
        buckets = file.matrix(f"{OWN}/relative_attention_bias")[0]
        farthest = file.number(f"{OWN}/relative_attention_max_distance") or 128
        return {"kind": "t5", "buckets": buckets, "max_distance": int(farthest)}, UNLIMITED
    if f"{OWN}/relative_position_keys" in file:
        return {"kind": "relative", "max_distance": file.matrix(f"{OWN}/relative_position_keys")[0] // 2}, UNLIMITED
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


def _rules(model: EncoderDecoder, stored: _Stored) -> list[Rule]:
    biased = isinstance(model.position, T5Bias)
    position = "layer_0/self_attention/relative_attention_bias" if biased else "position_encodings/encodings"
    rules = [
        tensor("embedding.weight", TARGET),
        tensor("source_embedding.weight", stored.source_table),
        *module("output", "decoder/projection"),
    ]
    for side in SIDES:
        layer, own = f"{side}/layer_{{layer}}", f"{side}.blocks.{{layer}}.attention.relative"
        rules += [
            *block(side, f"{layer}.self_attention", qkv="linear_0", out="linear_1", norm="layer_norm"),
            *block(side, f"{layer}.attention", cross_q="linear_0", cross_kv="linear_1", cross_out="linear_2"),
            *block(side, f"{layer}.attention", cross_norm="layer_norm"),
            *block(side, f"{layer}.ffn", gate_up=("linear_0", "linear_0_noact"), up="linear_0", down="linear_1"),
            *block(side, f"{layer}.ffn", ff_norm="layer_norm"),
            *module(f"{side}.norm", f"{side}/layer_norm"),
            *module(f"{side}.embedding_norm", f"{side}/layernorm_embedding"),
            tensor(f"{own}_keys", f"{layer}/self_attention/relative_position_keys"),
            tensor(f"{own}_values", f"{layer}/self_attention/relative_position_values"),
            tensor(f"{side}.position.weight", f"{side}/{position}"),
        ]
    return [replace(rule, theirs=tuple(map(_spelled, rule.theirs))) for rule in rules]


def _spelled(name: str) -> str:
    """A name with slashes; the parts of a norm have other names than those of a layer."""
    name = name.replace(".", "/")
    return name.replace("/weight", "/gamma").replace("/bias", "/beta") if "norm" in name else name


def _found(stored: _Stored, model: EncoderDecoder) -> dict[str, Shape]:
    """The tensors that need a place: all of the file but what is a setting, a copy or a formula."""
    file, found = stored.file, {}
    left_out = set(POSITIONS) if isinstance(model.position, Sinusoidal) else set()
    left_out |= {"decoder/projection/weight"} if stored.tied else set()
    left_out |= {stored.source_table} if stored.shared else set()
    for name, variable in file.variables.items():
        last = name.rsplit("/", 1)[-1]
        if name.endswith("_scale") and name.removesuffix("_scale") in file:
            continue  # it belongs to the tensor that it scales
        if not variable.shape or last in SETTINGS:
            if last not in SETTINGS:
                raise file.error(f"'{name}' is a setting that weft does not know")
            if last == "queries_scale" and file.number(name) != (scale := model.attention.scale):
                raise file.error(f"'{name}' differs from the other layers' {scale}; weft has one for all")
        elif name not in left_out and (last != "relative_attention_bias" or "/layer_0/" in name):
            found[name] = variable.shape
    if isinstance(model.position, Learned):
        for name in POSITIONS:
            found.setdefault(name, (model.context, model.d_model))
    if stored.zero_start:
        found.setdefault("decoder/projection/bias", (model.vocab_size - 1,))
        for name in EXTENDED & found.keys():
            found[name] = (found[name][0] + 1, *found[name][1:])
    return found


def _reader(stored: _Stored) -> Callable[[str], Tensor]:
    file = stored.file
    rows, d_model = file.matrix(TARGET)
    quantized = any(v.dtype in ("int8", "int16") and len(v.shape) > 1 for v in file.variables.values())

    def read(name: str) -> Tensor:
        if name in file:
            found = file.tensor(name)
            found = found.float() if quantized else found
        elif name in POSITIONS:
            # what CTranslate2 computes where a file holds none: tensor2tensor's sinusoids, counted from 1
            found = sinusoids(torch.arange(1, UNLIMITED + 1), d_model, "tensor2tensor").float()
        else:  # a bias that only the start token needs
            found = torch.zeros(rows)
        if stored.zero_start and name in EXTENDED:
            start = torch.full((1, *found.shape[1:]), NEVER if name.endswith("/bias") else 0.0, dtype=found.dtype)
            return torch.cat((found, start))
        return found

    return read
