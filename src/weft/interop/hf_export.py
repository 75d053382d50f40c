"""A model written as a Hugging Face folder, in the family that can say all of its settings."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.config import Tree
from weft.errors import InteropError, WeftError
from weft.interop import safetensors
from weft.interop.bundle import LazyWeights, ModelBundle, counted
from weft.interop.families.base import Family, Settings, Transformer
from weft.interop.families.known import FAMILIES, family_of
from weft.interop.families.seq2seq import T5
from weft.interop.hf import CONFIG, GENERATION, KEPT, first_reason
from weft.interop.hf_tokenizer import tokenizer_files
from weft.interop.safetensors import DTYPES
from weft.interop.weight_map import conversions, to_theirs
from weft.models.config import Decoder, EmbeddingHead, Encoder, EncoderDecoder
from weft.progress import bar

TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def write(bundle: ModelBundle, folder: Path, dtype: str | None = None) -> Family:
    """Fill an empty folder with a model, as `transformers` reads it. The family that it was written as.

    What was read from such a folder, and still is the same model, gets back its names, dtypes and files; `dtype`, one
    of TYPES, converts all weights.
    """
    family, tree, kept = _settings_out(bundle)
    weights = _their_weights(bundle, family, kept)
    if dtype is not None:
        weights = {name: _typed(make, TYPES[dtype]) for name, make in weights.items()}
        tree = {key: value for key, value in tree.items() if key != "torch_dtype"} | {"dtype": _word(TYPES[dtype])}
    headers: Mapping[str, str] = kept.get("headers", {}) if dtype is None else {}
    with bar("writing", len(weights)) as advance:
        _write_weights(folder, counted(weights, advance), headers, bundle.origin)
    for name, data in _small_files(bundle, tree, bool(kept), bool(headers)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return family


def _their_weights(bundle: ModelBundle, family: Family, kept: Tree) -> dict[str, Callable[[], Tensor]]:
    """The family's tensors; by the notes `kept`, with the names, dtypes, copies and extra tensors they came with."""
    weights = dict(to_theirs(conversions(family.rules(bundle.model), bundle.model), bundle.weights))
    weights |= {name: _typed(weights[name], DTYPES[kind]) for name, kind in kept.get("dtypes", {}).items()}
    weights |= {copy: weights[original] for copy, original in kept.get("copies", {}).items()}
    if kept:
        weights |= bundle.unused
    for name, shape in family.fillers(bundle.model).items():
        weights.setdefault(name, _zeros(shape, next(iter(weights.values()))))
    names = kept.get("names", {})
    return {names.get(name, name): make for name, make in weights.items()}


def _write_weights(folder: Path, weights: LazyWeights, headers: Mapping[str, str], origin: str) -> None:
    """One file, or the files that the weights came from, each by its header."""
    for file, header in headers.items():
        if not safetensors.is_shard(file):
            raise InteropError(f"{origin}: '{file}' is not the name of a .safetensors file")
        safetensors.write_as(folder / file, header, weights)
    if not headers:
        safetensors.write(folder / safetensors.SINGLE, weights)


def _small_files(bundle: ModelBundle, tree: Tree, same: bool, sharded: bool) -> dict[str, bytes]:
    """All that is not weights, by name; the list of shards only where there are the same ones again."""
    files = {name: data for name, data in bundle.files.items() if same and name in KEPT}
    if not sharded:
        files.pop(safetensors.INDEX, None)
    if CONFIG not in files or json.loads(files[CONFIG]) != tree:
        files[CONFIG] = _json(tree)
    if GENERATION not in files and not isinstance(bundle.model, Encoder):
        files[GENERATION] = _json({"_from_model_config": True} | {key: tree[key] for key in TOKENS if key in tree})
    if not same and isinstance(bundle.model, Encoder) and isinstance(bundle.model.head, EmbeddingHead):
        files |= {name: _json(value) for name, value in _sentence_transformers(bundle.model, bundle.model.head).items()}
    return files | (tokenizer_files(bundle) if bundle.tokenizer is not None else {})


TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")


def _sentence_transformers(model: Encoder, head: EmbeddingHead) -> dict[str, Any]:
    """How sentence-transformers makes one vector of many."""
    modes = {"first": "cls_token", "mean": "mean_tokens", "last": "lasttoken"}
    pooling = {f"pooling_mode_{theirs}": head.pooling == ours for ours, theirs in modes.items()}
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")] + [("2_Normalize", "Normalize")] * head.normalise
    return {
        "modules.json": [
            {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for number, (path, kind) in enumerate(modules)
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": model.d_model, **pooling},
        "sentence_bert_config.json": {"max_seq_length": model.context, "do_lower_case": False},
    }


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _json(tree: Any) -> bytes:
    return (json.dumps(tree, indent=2, ensure_ascii=False) + "\n").encode()


def _typed(make: Callable[[], Tensor], dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: make().to(dtype)


def _zeros(shape: tuple[int, ...], like: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: torch.zeros(shape, dtype=like().dtype)


def _settings_out(bundle: ModelBundle) -> tuple[Family, Tree, Tree]:
    """The family that can hold the model, its config.json, and the notes of what was read, if it still is the same."""
    family, architecture, tree = _choose(bundle)
    original: Tree = bundle.notes.get("config", {}) if bundle.notes.get("family") == family.kind else {}
    if original and not _differences(bundle.model, _read_again(family, original, bundle.model)):
        return family, original, bundle.notes
    config: Tree = {**original, "architectures": [architecture], **tree}
    config["dtype"] = _word(next(iter(bundle.weights.values()))().dtype)
    if bundle.labels is not None:
        config["id2label"] = {str(number): name for number, name in enumerate(bundle.labels)}
        config["label2id"] = {name: number for number, name in enumerate(bundle.labels)}
    tokenizer = bundle.tokenizer
    ids = {role: None if tokenizer is None else getattr(tokenizer, f"{role}_id") for role in ("bos", "eos", "pad")}
    for role, id in ids.items():
        config.setdefault(f"{role}_token_id", id)
    if isinstance(bundle.model, EncoderDecoder):  # what it writes begins with bos in weft
        config.setdefault("decoder_start_token_id", next((id for id in ids.values() if id is not None), 0))
        config.setdefault("forced_eos_token_id", None)
    return family, config, {}


def _choose(bundle: ModelBundle) -> tuple[Family, str, Tree]:
    """The first family that can say all of the model's settings: the one it came from, then any other."""
    model = bundle.model
    if not isinstance(model, Decoder | Encoder | EncoderDecoder):
        raise InteropError(
            f"model.kind = '{model.kind}': Hugging Face has no family for it; Transformers can be written"
        )
    nearest: tuple[int, str] | None = None
    came = bundle.notes.get("family")
    for family in sorted(FAMILIES.values(), key=lambda each: each.kind != came):
        if family.models != model.kind:
            continue
        try:
            architecture, tree = family.write(model)
            different = _differences(model, _read_again(family, {**tree, "architectures": [architecture]}, model))
        except InteropError as error:
            reasons = [str(error)]
        else:
            if not different:
                return family, architecture, tree
            reasons = [
                f"model.{key} = {ours!r}, where {family.title} has {theirs!r}" for key, ours, theirs in different
            ]
        if nearest is None or len(reasons) < nearest[0]:
            nearest = len(reasons), "; ".join(reasons[:3]) + (" …" if len(reasons) > 3 else "")
    assert nearest is not None
    raise InteropError(f"no Hugging Face family can hold this model; the nearest one fails for {nearest[1]}")


def _read_again(family: Family, tree: Tree, model: Any) -> Transformer:
    """The model that a config.json would be read as, given the tensors that `model` has."""
    names = ["final_logits_bias"] if getattr(model.head, "bias", False) else []
    settings = Settings(tree, CONFIG)
    _, architecture = family_of(tree, CONFIG)
    again: Any
    try:
        again = family.read(settings, architecture, names)
    except ValueError as error:
        if isinstance(error, WeftError):
            raise
        raise InteropError(first_reason(error)) from None
    if isinstance(model.head, EmbeddingHead) and isinstance(again.head, EmbeddingHead):  # told by other files
        again = again.replace(head=model.head)
    if family is T5 and again.head.tied != model.head.tied:  # told by the tensors
        again = again.replace(head=again.head.model_copy(update={"tied": model.head.tied}).model_dump())
    return again


def _differences(ours: Any, theirs: Any) -> list[tuple[str, Any, Any]]:
    """The settings in which two models would compute differently: dotted key, ours, theirs."""
    left, right = _computes(ours), _computes(theirs)
    return [(key, left.get(key), right.get(key)) for key in {**left, **right} if left.get(key) != right.get(key)]


def _computes(model: Any) -> dict[str, Any]:
    """Settings by dotted key, less those of training; what is left to a default is filled in."""
    tree = model.model_dump(mode="json")
    tree["attention"] |= {"kv_heads": model.attention.groups, "d_head": model.d_head}
    tree["attention"]["scale"] = model.attention.scale or model.d_head**-0.5
    if isinstance(model, EncoderDecoder):
        tree["encoder_layers"] = model.encoder_layers or model.layers
    flat: dict[str, Any] = {}

    def walk(prefix: str, table: Mapping[str, Any]) -> None:
        for key, value in table.items():
            if key in ("init", "dropout") or (
                key == "activation" and prefix == "head." and not table.get("pooler", True)
            ):
                continue
            if isinstance(value, Mapping):
                walk(f"{prefix}{key}.", value)
            else:
                flat[prefix + key] = value

    walk("", tree)
    return flat
