"""A model written as a Hugging Face folder, in the family that can express all of its settings."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.config import Tree
from weft.errors import InteropError
from weft.interop import safetensors
from weft.interop.bundle import LazyWeights, ModelBundle, as_dtype, counted
from weft.interop.families.base import Family
from weft.interop.families.known import FAMILIES, family_of
from weft.interop.hf import CONFIG, GENERATION, KEPT, POOLING
from weft.interop.hf_tokenizer import json_bytes, tokenizer_files
from weft.interop.safetensors import DTYPES
from weft.interop.settings import Settings, Transformer, differences, first_that_holds
from weft.interop.weight_map import conversions, to_theirs
from weft.models.config import EmbeddingHead, Encoder, EncoderDecoder
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
        weights = {name: as_dtype(make, TYPES[dtype]) for name, make in weights.items()}
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
    weights |= {name: as_dtype(weights[name], DTYPES[kind]) for name, kind in kept.get("dtypes", {}).items()}
    weights |= {copy: weights[original] for copy, original in kept.get("copies", {}).items()}
    if kept:
        weights |= bundle.unused
    for name, shape in family.zeros(bundle.model).items():
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
        files[CONFIG] = json_bytes(tree)
    if GENERATION not in files and not isinstance(bundle.model, Encoder):
        files[GENERATION] = json_bytes({"_from_model_config": True} | {key: tree[key] for key in TOKENS if key in tree})
    if not same and isinstance(bundle.model, Encoder) and isinstance(bundle.model.head, EmbeddingHead):
        files |= {
            name: json_bytes(value) for name, value in _sentence_transformers(bundle.model, bundle.model.head).items()
        }
    return files | (tokenizer_files(bundle) if bundle.tokenizer is not None else {})


TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")


def _sentence_transformers(model: Encoder, head: EmbeddingHead) -> dict[str, Any]:
    """How sentence-transformers makes one vector of many."""
    pooling = {f"pooling_mode_{theirs}": head.pooling == ours for theirs, ours in POOLING.items()}
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


def _zeros(shape: tuple[int, ...], like: Callable[[], Tensor]) -> Callable[[], Tensor]:
    return lambda: torch.zeros(shape, dtype=like().dtype)


def _settings_out(bundle: ModelBundle) -> tuple[Family, Tree, Tree]:
    """The family that can hold the model, its config.json, and the notes of what was read, if it still is the same."""
    family = choose(bundle)
    original: Tree = bundle.notes.get("config", {}) if bundle.notes.get("family") == family.kind else {}
    assert isinstance(bundle.model, Transformer)
    if original and not differences(bundle.model, _read_again(family, original, bundle.model)):
        return family, original, bundle.notes
    architecture, tree = family.write(bundle.model)
    config: Tree = {**original, "architectures": [architecture], **tree}
    config["dtype"] = _word(next(iter(bundle.weights.values()))().dtype)
    if bundle.labels is not None:
        config["id2label"] = {str(number): name for number, name in enumerate(bundle.labels)}
        config["label2id"] = {name: number for number, name in enumerate(bundle.labels)}
    tokenizer = bundle.tokenizer
    ids = {role: None if tokenizer is None else getattr(tokenizer, f"{role}_id") for role in ("bos", "eos", "pad")}
    for role, id in ids.items():
        config.setdefault(f"{role}_token_id", id)
    if isinstance(bundle.model, EncoderDecoder):  # what it generates begins with bos in weft
        config.setdefault("decoder_start_token_id", next((id for id in ids.values() if id is not None), 0))
        config.setdefault("forced_eos_token_id", None)
    return family, config, {}


def choose(bundle: ModelBundle) -> Family:
    """The first family that can express all of the model's settings: the one it came from, then any other."""
    model = bundle.model
    if not isinstance(model, Transformer):
        raise InteropError(
            f"model.kind = '{model.kind}': Hugging Face has no family for it; only Transformers can be exported"
        )
    families = [family for family in FAMILIES.values() if isinstance(model, family.model)]
    came_from = bundle.notes.get("family")
    families.sort(key=lambda family: family.kind != came_from)
    titled = {family.title: family for family in families}
    ways = {title: partial(_written_and_read, family, model) for title, family in titled.items()}
    return titled[first_that_holds(model, ways, "Hugging Face family")]


def _written_and_read(family: Family, model: Transformer) -> Transformer:
    architecture, tree = family.write(model)
    return _read_again(family, {**tree, "architectures": [architecture]}, model)


def _read_again(family: Family, tree: Tree, model: Transformer) -> Transformer:
    """The model that a config.json would be read as beside the weights of `model`."""
    _, architecture = family_of(tree, CONFIG)
    return family.read(Settings(tree, CONFIG), architecture, family.known(model))
