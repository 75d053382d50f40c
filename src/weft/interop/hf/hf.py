"""Hugging Face model folders in and out: config.json, safetensors, tokenizer, and what belongs to them.

What was read can be written back as it was: tensors under their own names with their own bits, and every setting,
also those that weft does not have. Nothing in a folder is executed: of `pytorch_model.bin`, a pickle, tensors are taken
and nothing else, and an export writes safetensors.
"""

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from weft.config import Tree
from weft.errors import InteropError
from weft.interop.bundle import ModelBundle, as_dtype, counted, fitting, named_tokenizer
from weft.interop.families.base import Family, named_labels
from weft.interop.families.known import FAMILIES, family_of
from weft.interop.hf import weights
from weft.interop.hf.tokenizer import TOKENIZER_FILES, json_bytes, read_languages, read_tokenizer, tokenizer_files
from weft.interop.license import in_folder
from weft.interop.settings import Flat, Settings, Transformer, differences, first_that_holds
from weft.models.config import EmbeddingHead, Encoder, EncoderDecoder
from weft.progress import bar, warn
from weft.storage import tensors
from weft.storage.untrusted import optional_object, read_bytes, read_object, read_text
from weft.text.tokenizer import Tokenizer
from weft.text.vocabularies import SETTINGS as TOKENIZER_SETTINGS

CONFIG, GENERATION = "config.json", "generation_config.json"
MODULES, POOLED = "modules.json", "1_Pooling/config.json"
# how much of a text a sentence encoder reads, by any of the names that sentence-transformers has had for it
NAMES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta")
SENTENCES = tuple(f"sentence_{name}_config.json" for name in NAMES)
# small files that belong to a model and are written again as they were
KEPT = (CONFIG, GENERATION, weights.INDEX, MODULES, POOLED, *SENTENCES, "config_sentence_transformers.json")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")
GENERATION_IDS = ("decoder_start_token_id", "forced_bos_token_id")
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MULTI_LABEL = "multi_label_classification"
POOLING = {"cls_token": "first", "mean_tokens": "mean", "lasttoken": "last"}  # sentence-transformers' word → ours


def read(folder: Path, tokenizer: Path | None = None) -> ModelBundle:
    """The model in a folder, with the tokenizer at another path if one is given."""
    tree = read_object(folder / CONFIG)
    settings = Settings(tree, str(folder / CONFIG))
    found = weights.listing(folder)
    family, architecture = family_of(tree, settings.place, found)
    known = {key: there(found) for key, there in family.by_weights.items()}  # what config.json does not say
    if family.architectures[architecture] == "embedding":
        known |= _pooling(folder)
    model = family.read(settings, architecture, known)
    problem, labels = settings.get("problem_type"), getattr(model.head, "labels", None)
    if None not in (problem, labels) and (problem == MULTI_LABEL or (problem == "regression") != (labels == 1)):
        raise settings.error("problem_type", f"with {labels} labels; weft gives a text one label, or one number")
    depth = max(model.layers // model.sharing, getattr(model, "encoder_layers", None) or 0)
    if depth > len(found):  # before that many layers are built
        raise InteropError(f"{settings.place}: {depth} layers, but the files hold {len(found)} tensors in all")
    model, ours, unused, notes = weights.read(family, model, found, str(folder))
    used = dict(tree)
    with suppress(InteropError):  # what is wrong with generation_config.json is said when it is used
        own_ids = optional_object(folder / GENERATION)  # transformers reads ids for generation there first
        used |= {key: own_ids[key] for key in GENERATION_IDS if own_ids.get(key) is not None}
    if tokenizer is None:
        own, source = read_tokenizer(folder, used, model)
        for each, size in ((own, model.vocab_size), (source, getattr(model, "source_vocab_size", None))):
            if each is not None:
                fitting(each, size or model.vocab_size, str(folder))
    else:
        own, source = named_tokenizer(tokenizer, model.vocab_size), None
    kept = KEPT if tokenizer is not None else (*KEPT, *TOKENIZER_FILES)
    # what the model is called: its name on the hub, where it came from there, else its folder
    cached = re.search(r"models--([^/]+)--([^/]+)/snapshots/", f"{folder.as_posix()}/")
    place = f"{cached[1]}/{cached[2]}" if cached else str(folder)
    return ModelBundle(
        model=model,
        weights=ours,
        tokenizer=own,
        origin=f"{folder} ({family.title}, Hugging Face)",
        notes={"family": family.kind, "config": tree, "place": place, "license": in_folder(folder), **notes},
        unused=unused,
        files={name: read_bytes(folder / name) for name in kept if (folder / name).is_file()},
        labels=_labels(tree, model),
        length=_length(folder, model, own) if isinstance(model.head, EmbeddingHead) else None,
        source_tokenizer=source,
        languages=read_languages(folder, used, own) if isinstance(model, EncoderDecoder) and own is not None else None,
    )


def _pooling(folder: Path) -> Flat:
    """How a sentence encoder makes one vector of many, by the files of sentence-transformers where they are."""
    if not (folder / POOLED).is_file():
        return {}
    tree = read_object(folder / POOLED)
    modes = [key.removeprefix("pooling_mode_") for key, on in tree.items() if key.startswith("pooling_mode_") and on]
    if len(modes) != 1 or modes[0] not in POOLING:
        given = " and ".join(modes) or "nothing"
        raise InteropError(f"{folder / POOLED}: pooling by {given}; weft has mean, first (cls) and last")
    modules = read_text(folder / MODULES) if (folder / MODULES).is_file() else ""
    return {"head.pooling": POOLING[modes[0]], "head.normalise": "Normalize" in modules}


def _length(folder: Path, model: Transformer, tokenizer: Tokenizer | None) -> int:
    """How many tokens of a text a sentence encoder reads, by the files of sentence-transformers where they are."""
    file = next((folder / name for name in SENTENCES if (folder / name).is_file()), folder / SENTENCES[0])
    settings = Settings(optional_object(file), str(file))
    lowers = settings.get("do_lower_case") is True
    if lowers and tokenizer is not None and tokenizer.encode("A") != tokenizer.encode("a"):
        warn(f"{file}: do_lower_case = true: not used; put texts in small letters before they are embedded")
    length = settings.get("max_seq_length")
    if length is None and (folder / MODULES).is_file():  # then the tokenizer says it
        length = optional_object(folder / TOKENIZER_SETTINGS).get("model_max_length")
        length = length if isinstance(length, int) and length > 0 else None
    elif length is not None:
        length = settings.whole("max_seq_length")
    return model.context if length is None else min(length, model.context)


def _labels(tree: Tree, model: Transformer) -> tuple[str, ...] | None:
    count, named = getattr(model.head, "labels", None), tree.get("id2label")
    if count is None:
        return None
    usual = tuple(f"LABEL_{number}" for number in range(count))  # which transformers does not write down
    if not isinstance(named, dict):
        return usual
    names = tuple(str(named.get(str(number), name)) for number, name in enumerate(usual))
    return names if len(set(names)) == count else usual


def write(bundle: ModelBundle, folder: Path, dtype: str | None = None) -> Family:
    """Fill an empty folder with a model, as `transformers` reads it. The family that it was written as.

    What was read from such a folder, and still is the same model, gets back its names, dtypes and files; `dtype`, one
    of TYPES, converts all weights.
    """
    family, tree, kept = _settings_out(bundle)
    theirs = weights.theirs(bundle, family, kept)
    if dtype is not None:
        theirs = {name: as_dtype(make, TYPES[dtype]) for name, make in theirs.items()}
        tree = {key: value for key, value in tree.items() if key != "torch_dtype"}
        tree["dtype"] = str(TYPES[dtype]).removeprefix("torch.")
    headers: Mapping[str, str] = kept.get("headers", {}) if dtype is None else {}
    for file in headers:
        if not weights.is_shard(file):
            raise InteropError(f"{bundle.origin}: '{file}' is not the name of a .safetensors file")
    with bar("writing", len(theirs)) as advance:
        counting = counted(theirs, advance)
        for file, header in headers.items():  # the files that the weights came from
            tensors.write_with_header(folder / file, header, counting)
        if not headers:
            tensors.write(folder / weights.SINGLE, counting)
    for name, data in _small_files(bundle, tree, bool(kept), bool(headers)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return family


def _small_files(bundle: ModelBundle, tree: Tree, same: bool, sharded: bool) -> dict[str, bytes]:
    """All that is not weights, by name; the list of shards only where there are the same ones again."""
    files = {name: data for name, data in bundle.files.items() if same and name in KEPT}
    if not sharded:
        files.pop(weights.INDEX, None)
    if CONFIG not in files or json.loads(files[CONFIG]) != tree:
        files[CONFIG] = json_bytes(tree)
    if GENERATION not in files and not isinstance(bundle.model, Encoder):
        own = bundle.notes.get("generation") or {"_from_model_config": True}
        files[GENERATION] = json_bytes(own | {key: tree[key] for key in TOKENS if key in tree})
    if not same and isinstance(bundle.model, Encoder) and isinstance(bundle.model.head, EmbeddingHead):
        files |= _sentence_transformers(bundle.model, bundle.model.head, bundle.length)
    return files | (tokenizer_files(bundle) if bundle.tokenizer is not None else {})


def _sentence_transformers(model: Encoder, head: EmbeddingHead, length: int | None) -> dict[str, bytes]:
    pooling = {f"pooling_mode_{theirs}": head.pooling == ours for theirs, ours in POOLING.items()}
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")] + [("2_Normalize", "Normalize")] * head.normalise
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(modules)
    ]
    return {
        MODULES: json_bytes(listed),
        POOLED: json_bytes({"word_embedding_dimension": model.d_model, **pooling}),
        SENTENCES[0]: json_bytes({"max_seq_length": length or model.context, "do_lower_case": False}),
    }


def _settings_out(bundle: ModelBundle) -> tuple[Family, Tree, Tree]:
    """The family that can hold the model, its config.json, and the notes of what was read, if it still is the same."""
    family = choose(bundle)
    original: Tree = bundle.notes.get("config", {}) if bundle.notes.get("family") == family.kind else {}
    assert isinstance(bundle.model, Transformer)
    if original and not differences(bundle.model, _read_again(family, bundle.model, original)):
        return family, original, bundle.notes
    config: Tree = {**original, **family.write(bundle.model)}
    config["dtype"] = str(next(iter(bundle.weights.values()))().dtype).removeprefix("torch.")
    if bundle.labels is not None:
        config |= named_labels(bundle.labels)
    ids = {role: getattr(bundle.tokenizer, f"{role}_id", None) for role in ("bos", "eos", "pad")}
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
        none = "Hugging Face has no family for it; only Transformers can be exported"
        raise InteropError(f"model.kind = '{model.kind}': {none}")
    families = [family for family in FAMILIES.values() if isinstance(model, family.model)]
    families.sort(key=lambda family: family.kind != bundle.notes.get("family"))
    titled = {family.title: family for family in families}
    again = {title: partial(_read_again, family, model) for title, family in titled.items()}
    return titled[first_that_holds(model, again, "Hugging Face family")]


def _read_again(family: Family, model: Transformer, tree: Tree | None = None) -> Transformer:
    """The model that a config.json, the family's own if none is given, would be read as beside the weights."""
    tree = family.write(model) if tree is None else tree
    _, architecture = family_of(tree, CONFIG)
    return family.read(Settings(tree, CONFIG), architecture, family.known(model))
