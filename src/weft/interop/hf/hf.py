"""Read and write Hugging Face model folders: config.json, safetensors, the tokenizer and small files.

An imported model can be written back unchanged: tensors with their names and bits, and all settings, also those that
weft lacks. Nothing in a folder is executed: only tensors are read from `pytorch_model.bin`, a pickle, and an export
writes safetensors.
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
from weft.interop.bundle import ModelBundle, as_dtype, check_vocabulary, load_tokenizer, with_progress
from weft.interop.families.base import Family, label_keys
from weft.interop.families.known import FAMILIES, family_of
from weft.interop.hf import weights
from weft.interop.hf.mxfp4 import unpack
from weft.interop.hf.sines_first import sines_first
from weft.interop.hf.text_tower import text_tensors, text_tower
from weft.interop.hf.tokenizer import TOKENIZER_FILES, json_bytes, read_languages, read_tokenizer, tokenizer_files
from weft.interop.license import license_of_folder
from weft.interop.settings import Flat, Settings, Transformer, count_experts, differences, first_lossless, shown
from weft.models.config import Decoder, Encoder, EncoderDecoder
from weft.models.head_config import EmbeddingHead
from weft.progress import bar, warn
from weft.storage import tensors
from weft.storage.untrusted import optional_object, read_bytes, read_object, read_text
from weft.text.tokenizer import Tokenizer
from weft.text.vocabularies import SETTINGS as TOKENIZER_SETTINGS

CONFIG, GENERATION = "config.json", "generation_config.json"
MODULES, POOLED = "modules.json", "1_Pooling/config.json"
# settings of a sentence encoder, under all names that sentence-transformers has used
NAMES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta")
SENTENCES = tuple(f"sentence_{name}_config.json" for name in NAMES)
# small files that are exported verbatim
KEPT = (CONFIG, GENERATION, weights.INDEX, MODULES, POOLED, *SENTENCES, "config_sentence_transformers.json")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")
GENERATION_IDS = ("decoder_start_token_id", "forced_bos_token_id")
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
MULTI_LABEL = "multi_label_classification"
# sentence-transformers' name → ours
POOLING = {
    "cls_token": "first", "mean_tokens": "mean", "lasttoken": "last", "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean-sqrt", "weightedmean_tokens": "weighted-mean",
}  # fmt: skip
PARTS = ("Transformer", "Pooling", "Normalize")  # modules of sentence-transformers that weft has


def read(folder: Path, tokenizer: Path | None = None) -> ModelBundle:
    """Read the model of a folder; `tokenizer` is the path of another tokenizer that replaces the folder's."""
    tree = read_object(folder / CONFIG)
    stored, kept = weights.list_weights(folder), KEPT
    tower = text_tower(tree, str(folder / CONFIG))
    if tower is not None:
        parts, tree = len(stored), tower
        stored = text_tensors(stored, tree)
        warn(f"{folder}: a multimodal model; its text part is read, {len(stored)} of {parts} tensors")
        kept = (GENERATION,)
    packed = any(name.endswith("_blocks") for name in stored)
    if packed:
        tree, stored = {key: value for key, value in tree.items() if key != "quantization_config"}, unpack(stored)
    settings = Settings(tree, str(folder / CONFIG))
    family, architecture = family_of(tree, settings.location, stored)
    head, known = family.architectures[architecture], Flat()
    if head == "lm":
        known = {key: is_present(stored) for key, is_present in family.by_weights.items()}
    if head in ("embedding", "lm"):
        known |= _read_pooling(folder)
    model = family.read(settings, architecture, known)
    problem, labels = settings.get("problem_type"), getattr(model.head, "labels", None)
    if None not in (problem, labels) and (problem == MULTI_LABEL or (problem == "regression") != (labels == 1)):
        raise settings.error("problem_type", f"with {labels} labels; weft predicts one label or one number per text")
    depth = max(model.layers // model.sharing, getattr(model, "encoder_layers", None) or 0)
    if depth > len(stored):  # checked before the layers are built
        raise InteropError(f"{settings.location}: {depth} layers, but the files have only {len(stored)} tensors")
    one_by_one = any("{expert}" in name for rule in family.rules(model) for name in rule.theirs)
    if one_by_one and count_experts(model) > len(stored):
        raise InteropError(
            f"{settings.location}: {count_experts(model)} experts, but the files have only {len(stored)} tensors"
        )
    model, lazy, unused, notes = weights.read(family, model, stored, location=str(folder))
    with_ids = dict(tree)
    with suppress(InteropError):  # a damaged generation_config.json is reported when it is used
        generation = optional_object(folder / GENERATION)  # its ids take precedence in transformers
        with_ids |= {key: generation[key] for key in GENERATION_IDS if generation.get(key) is not None}
    if tokenizer is None:
        target, source = read_tokenizer(folder, with_ids, model)
        for side, size in ((target, model.vocab_size), (source, getattr(model, "source_vocab_size", None))):
            if side is not None:
                check_vocabulary(side, size or model.vocab_size, str(folder))
    else:
        target, source = load_tokenizer(tokenizer, model.vocab_size), None
    is_translator = isinstance(model, EncoderDecoder) and model.head.kind == "lm" and target is not None
    kept = kept if tokenizer is not None else (*kept, *TOKENIZER_FILES)
    if tower is not None or packed:  # the export is a model of text, or of unpacked weights, in one file
        notes |= {"names": {}, "headers": {}}
    # the model's name: that on the hub if it came from there, else its folder
    cached = re.search(r"models--([^/]+)--([^/]+)/snapshots/", f"{folder.as_posix()}/")
    name = f"{cached[1]}/{cached[2]}" if cached else str(folder)
    return ModelBundle(
        model=model,
        weights=lazy,
        tokenizer=target,
        origin=f"{folder} ({family.title}, Hugging Face)",
        notes={"family": family.kind, "config": tree, "place": name, "license": license_of_folder(folder), **notes},
        unused=unused,
        files={file: read_bytes(folder / file) for file in kept if (folder / file).is_file()},
        labels=_read_labels(tree, model),
        length=_read_length(folder, model, target) if isinstance(model.head, EmbeddingHead) else None,
        source_tokenizer=source,
        languages=read_languages(folder, with_ids, target) if is_translator and target is not None else None,
    )


def _read_pooling(folder: Path) -> Flat:
    """Pooling of a sentence encoder from the files of sentence-transformers; {} if there are none."""
    if not (folder / POOLED).is_file():
        return {}
    tree = read_object(folder / POOLED)
    modes = [key.removeprefix("pooling_mode_") for key, on in tree.items() if key.startswith("pooling_mode_") and on]
    if len(modes) != 1 or modes[0] not in POOLING:
        given = " and ".join(modes) or "nothing"
        raise InteropError(f"{folder / POOLED}: pooling by {given}; weft has one of {', '.join(POOLING)}")
    modules = _read_modules(folder / MODULES) if (folder / MODULES).is_file() else []
    head = {"head.pooling": POOLING[modes[0]], "head.normalise": "Normalize" in modules}
    return {"head.kind": "embedding", **head}


def _read_modules(file: Path) -> list[str]:
    """Names of a sentence encoder's modules; InteropError if one is not of PARTS."""
    try:
        names = [module["type"].rpartition(".")[2] for module in json.loads(read_text(file))]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise InteropError(f"{file}: expected a list of modules, each with a type") from None
    if other := next((name for name in names if name not in PARTS), None):
        raise InteropError(f"{file}: a module of type {shown(other)}; weft has {', '.join(PARTS)}")
    return names


def _read_length(folder: Path, model: Transformer, tokenizer: Tokenizer | None) -> int:
    """Number of tokens that a sentence encoder reads, from the files of sentence-transformers or the context."""
    file = next((folder / name for name in SENTENCES if (folder / name).is_file()), folder / SENTENCES[0])
    settings = Settings(optional_object(file), str(file))
    lowers = settings.get("do_lower_case") is True
    if lowers and tokenizer is not None and tokenizer.encode("A") != tokenizer.encode("a"):
        warn(f"{file}: do_lower_case = true: not used; convert texts to lower case before embedding them")
    length = settings.get("max_seq_length")
    if length is None and (folder / MODULES).is_file():  # then the tokenizer's settings have it
        length = optional_object(folder / TOKENIZER_SETTINGS).get("model_max_length")
        length = length if isinstance(length, int) and length > 0 else None
    elif length is not None:
        length = settings.integer("max_seq_length")
    return model.context if length is None else min(length, model.context)


def _read_labels(tree: Tree, model: Transformer) -> tuple[str, ...] | None:
    count, id2label = getattr(model.head, "labels", None), tree.get("id2label")
    if count is None:
        return None
    default = tuple(f"LABEL_{number}" for number in range(count))  # transformers does not write these
    if not isinstance(id2label, dict):
        return default
    names = tuple(str(id2label.get(str(number), name)) for number, name in enumerate(default))
    return names if len(set(names)) == count else default


def write(bundle: ModelBundle, folder: Path, dtype: str | None = None) -> Family:
    """Write a model to an empty folder for `transformers`; return the family that it was written as.

    A model that was imported from such a folder and has not changed gets back its names, dtypes and files. `dtype`, one
    of TYPES, converts all weights.
    """
    bundle = sines_first(bundle)
    family, tree, notes = _to_config(bundle)
    theirs = weights.to_family(bundle, family, notes)
    if dtype is not None:
        theirs = {name: as_dtype(make, TYPES[dtype]) for name, make in theirs.items()}
        tree = {key: value for key, value in tree.items() if key != "torch_dtype"}
        tree["dtype"] = str(TYPES[dtype]).removeprefix("torch.")
    headers: Mapping[str, str] = notes.get("headers", {}) if dtype is None else {}
    for file in headers:
        if not weights.is_shard(file):
            raise InteropError(f"{bundle.origin}: '{file}' is not the name of a .safetensors file")
    with bar("writing", len(theirs)) as advance:
        lazy = with_progress(theirs, advance)
        for file, header in headers.items():  # the same files as imported
            tensors.write_with_header(folder / file, header, lazy)
        if not headers:
            tensors.write(folder / weights.SINGLE, lazy)
    for name, data in _small_files(bundle, tree, unchanged=bool(notes), sharded=bool(headers)).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return family


def _small_files(bundle: ModelBundle, tree: Tree, *, unchanged: bool, sharded: bool) -> dict[str, bytes]:
    """All files but weights, by name; the index of shards only if the same shards are written again."""
    files = {name: data for name, data in bundle.files.items() if unchanged and name in KEPT}
    if not sharded:
        files.pop(weights.INDEX, None)
    if CONFIG not in files or json.loads(files[CONFIG]) != tree:
        files[CONFIG] = json_bytes(tree)
    if GENERATION not in files and not isinstance(bundle.model, Encoder):
        generation = bundle.notes.get("generation") or {"_from_model_config": True}
        files[GENERATION] = json_bytes(generation | {key: tree[key] for key in TOKENS if key in tree})
    if not unchanged and isinstance(bundle.model, Decoder | Encoder) and isinstance(bundle.model.head, EmbeddingHead):
        files |= _sentence_transformers(bundle.model, bundle.model.head, bundle.length)
    return files | (tokenizer_files(bundle) if bundle.tokenizer is not None else {})


def _sentence_transformers(model: Decoder | Encoder, head: EmbeddingHead, length: int | None) -> dict[str, bytes]:
    pooling = {f"pooling_mode_{theirs}": head.pooling == ours for theirs, ours in POOLING.items()}
    kinds = [("", "Transformer"), ("1_Pooling", "Pooling")] + [("2_Normalize", "Normalize")] * head.normalise
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (path, kind) in enumerate(kinds)
    ]
    return {
        MODULES: json_bytes(modules),
        POOLED: json_bytes({"word_embedding_dimension": model.d_model, **pooling}),
        SENTENCES[0]: json_bytes({"max_seq_length": length or model.context, "do_lower_case": False}),
    }


def _to_config(bundle: ModelBundle) -> tuple[Family, Tree, Tree]:
    """Family that can express the model, its config.json, and the notes of the import if the model is unchanged."""
    family = choose(bundle)
    original: Tree = bundle.notes.get("config", {}) if bundle.notes.get("family") == family.kind else {}
    assert isinstance(bundle.model, Transformer)
    if original and not differences(bundle.model, _round_trip(family, bundle.model, original)):
        return family, original, bundle.notes
    config: Tree = {**original, **family.write(bundle.model)}
    config["dtype"] = str(next(iter(bundle.weights.values()))().dtype).removeprefix("torch.")
    if bundle.labels is not None:
        config |= label_keys(bundle.labels)
    ids = {role: getattr(bundle.tokenizer, f"{role}_id", None) for role in ("bos", "eos", "pad")}
    for role, id in ids.items():
        config.setdefault(f"{role}_token_id", family.ids.get(role) if id is None else id)
    if isinstance(bundle.model, EncoderDecoder):  # in weft, generated text begins with bos
        config.setdefault("decoder_start_token_id", next((id for id in ids.values() if id is not None), 0))
        config.setdefault("forced_eos_token_id", None)
    return family, config, {}


def choose(bundle: ModelBundle) -> Family:
    """First family that can express all settings of the model, beginning with the one it was imported from."""
    model = bundle.model
    if not isinstance(model, Transformer):
        why = "Hugging Face has no family for it; only Transformers can be exported"
        raise InteropError(f"model.kind = '{model.kind}': {why}")
    stacks = (type(model),) if isinstance(model, EncoderDecoder) else (Decoder, Encoder)
    families = [family for family in FAMILIES.values() if family.model in stacks]
    families.sort(key=lambda family: (family.kind != bundle.notes.get("family"), family.model is not type(model)))
    by_title = {family.title: family for family in families}
    round_trips = {title: partial(_round_trip, family, model) for title, family in by_title.items()}
    return by_title[first_lossless(model, round_trips, "Hugging Face family")]


def _round_trip(family: Family, model: Transformer, tree: Tree | None = None) -> Transformer:
    """Model that is read from a config.json, by default the one that the family writes, and the model's weights."""
    tree = family.write(model) if tree is None else tree
    _, architecture = family_of(tree, CONFIG)
    return family.read(Settings(tree, CONFIG), architecture, family.known(model))
