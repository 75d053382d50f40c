"""Hugging Face model folders in and out: config.json, safetensors, tokenizer, and what belongs to them.

What was read can be written back as it was: tensors under their own names with their own bits, and every setting,
also those that weft does not have. Nothing in a folder is executed: of `pytorch_model.bin`, a pickle, tensors are taken
and nothing else, and an export writes safetensors.
"""

import json
import re
from collections.abc import Callable, Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from weft.config import Tree
from weft.errors import InteropError
from weft.interop import safetensors
from weft.interop.bundle import LazyWeights, ModelBundle, as_dtype, counted, fitting, lazily, named_tokenizer
from weft.interop.families.base import Family
from weft.interop.families.known import FAMILIES, family_of
from weft.interop.hf_tokenizer import TOKENIZER_FILES, json_bytes, read_languages, read_tokenizer, tokenizer_files
from weft.interop.license import in_folder
from weft.interop.safetensors import DTYPES, FLOATS, Stored
from weft.interop.settings import Flat, Settings, Transformer, differences, first_that_holds
from weft.interop.weight_files import model_tensors
from weft.interop.weight_map import Conversions, conversions, their_shapes, to_ours, to_theirs
from weft.models.config import EmbeddingHead, Encoder, EncoderDecoder
from weft.progress import bar
from weft.untrusted import read_bytes, read_object, read_text

CONFIG, GENERATION = "config.json", "generation_config.json"
# small files that belong to a model and are written again as they were
KEPT = (
    CONFIG,
    GENERATION,
    safetensors.INDEX,
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "forced_eos_token_id")
TYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
POOLING = {"cls_token": "first", "mean_tokens": "mean", "lasttoken": "last"}  # sentence-transformers' word → ours


def recognises(path: Path) -> bool:
    """Whether a path is a folder with a config.json."""
    return (path / CONFIG).is_file()


def read(folder: Path, tokenizer: Path | None = None) -> ModelBundle:
    """The model in a folder, with the tokenizer at another path if one is given."""
    tree = read_object(folder / CONFIG)
    settings = Settings(tree, str(folder / CONFIG))
    family, architecture = family_of(tree, settings.where)
    found = model_tensors(folder)
    model = family.read(settings, architecture, _known(folder, family, architecture, found))
    _check_problem(settings, model)
    deepest = max(model.layers // model.sharing, getattr(model, "encoder_layers", None) or 0)
    if deepest > len(found):  # before that many layers are built
        raise InteropError(f"{settings.where}: {deepest} layers, but the files hold {len(found)} tensors in all")
    model, table, tensors = _match(family, model, found)
    weights, unused, notes = _weights(family, model, table, tensors, str(folder))
    used = {**tree, **_generation(folder)}  # transformers reads ids for generation in that file first
    if tokenizer is None:
        own, source = read_tokenizer(folder, used, model)
        for each, size in ((own, model.vocab_size), (source, getattr(model, "source_vocab_size", None))):
            if each is not None:
                fitting(each, size or model.vocab_size, str(folder))
    else:
        own, source = named_tokenizer(tokenizer, model.vocab_size), None
    kept = KEPT if tokenizer is not None else (*KEPT, *TOKENIZER_FILES)
    return ModelBundle(
        model=model,
        weights=weights,
        tokenizer=own,
        origin=f"{folder} ({family.title}, Hugging Face)",
        notes={"family": family.kind, "config": tree, "place": _name(folder), "license": in_folder(folder), **notes},
        unused=unused,
        files={name: read_bytes(folder / name) for name in kept if (folder / name).is_file()},
        labels=_labels(tree, model),
        source_tokenizer=source,
        languages=read_languages(folder, used, own) if isinstance(model, EncoderDecoder) and own is not None else None,
    )


def _generation(folder: Path) -> Tree:
    """The ids in generation_config.json. What is wrong with that file is said when it is used."""
    try:
        tree = read_object(folder / GENERATION) if (folder / GENERATION).is_file() else {}
    except InteropError:
        return {}
    return {key: tree[key] for key in ("decoder_start_token_id", "forced_bos_token_id") if tree.get(key) is not None}


def _name(folder: Path) -> str:
    """What the model is called: its name on the hub, where it came from there, else its folder."""
    found = re.search(r"models--([^/]+)--([^/]+)/snapshots/", f"{folder.as_posix()}/")
    return f"{found[1]}/{found[2]}" if found else str(folder)


# ---- settings


def _known(folder: Path, family: Family, architecture: str, names: Mapping[str, Any]) -> Flat:
    """Settings that stand in the weights or in other files than config.json."""
    known: Flat = {key: there(names) for key, there in family.by_weights.items()}
    return known | _pooling(folder) if family.architectures[architecture] == "embedding" else known


def _pooling(folder: Path) -> Flat:
    """How a sentence encoder makes one vector of many, by the files of sentence-transformers where they are."""
    path = folder / "1_Pooling/config.json"
    if not path.is_file():
        return {}
    tree = read_object(path)
    modes = [key.removeprefix("pooling_mode_") for key, on in tree.items() if key.startswith("pooling_mode_") and on]
    if len(modes) != 1 or modes[0] not in POOLING:
        raise InteropError(
            f"{path}: pooling by {' and '.join(modes) or 'nothing'}; weft has mean, first (cls) and last"
        )
    listing = folder / "modules.json"
    modules = read_text(listing) if listing.is_file() else ""
    return {"head.pooling": POOLING[modes[0]], "head.normalise": "Normalize" in modules}


def _check_problem(settings: Settings, model: Transformer) -> None:
    """Refuse outputs that are neither one of several labels nor a single number."""
    kind, labels = settings.get("problem_type"), getattr(model.head, "labels", None)
    if labels is None or kind is None:
        return
    if kind == "multi_label_classification" or (kind == "regression") != (labels == 1):
        raise settings.refusal("problem_type", f"with {labels} labels; weft gives a text one label, or one number")


# ---- weights


def _match(
    family: Family, model: Transformer, found: Mapping[str, Stored]
) -> tuple[Transformer, Conversions, dict[str, Stored]]:
    """The model, its conversions, and the stored tensors by the names that the family has for them today.

    An output table that should be the embeddings', but is stored and differs, makes the model an untied one.
    """
    table = conversions(family.rules(model), model)
    wanted = set(their_shapes(table))
    tensors = _by_present_names(family, model, wanted, found)
    for copy, original in family.copies(model).items():
        if copy not in tensors or original not in tensors or copy in wanted:
            continue
        if not safetensors.equal(tensors, copy, original):
            untied: Transformer = model.replace(head=model.head.model_copy(update={"tied": False}).model_dump())
            table = conversions(family.rules(untied), untied)
            if copy not in their_shapes(table):
                names = tensors[copy].name, tensors[original].name
                raise InteropError(f"'{names[0]}' differs from '{names[1]}', which it should repeat")
            return untied, table, tensors
    return model, table, tensors


def _by_present_names(
    family: Family, model: Transformer, wanted: set[str], found: Mapping[str, Stored]
) -> dict[str, Stored]:
    """The tensors by their present names: old endings replaced, the whole model's prefix in front."""
    copies = family.copies(model)
    present = {name: _present(family, name, {*wanted, *copies}) for name in found}
    here = set(present.values())
    for name, known in present.items():  # a tied table may be stored only under another of its names
        original = copies.get(known)
        if original in wanted and original not in here and known not in wanted:
            present[name] = original
            here.add(original)
    tensors: dict[str, Stored] = {}
    for name, known in present.items():
        if known in tensors:
            folder = found[name].file.parent
            raise InteropError(f"{folder}: '{tensors[known].name}' and '{name}' are names of the same tensor")
        tensors[known] = found[name]
    return tensors


def _present(family: Family, name: str, known: set[str]) -> str:
    for old, new in family.renames.items():
        if old.endswith("."):  # a beginning
            name = new + name.removeprefix(old) if name.startswith(old) else name
        else:
            name = name.removesuffix(old) + new if name.endswith(old) else name
    return next((each for each in (name, family.prefix + name) if each in known or _is_unused(family, each)), name)


def _is_unused(family: Family, name: str) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in family.unused)


def _weights(
    family: Family, model: Transformer, table: Conversions, tensors: Mapping[str, Stored], where: str
) -> tuple[LazyWeights, LazyWeights, Tree]:
    """Our weights, what weft has no place for, and the notes by which an export reproduces names and dtypes."""
    wanted, copies, read = their_shapes(table), family.copies(model), safetensors.reader(tensors)
    used = {name: stored for name, stored in tensors.items() if name in wanted}
    others = [name for name in tensors if name not in wanted and name not in copies]
    unused = [name for name in others if _is_unused(family, name)]
    for stored in used.values():
        if stored.dtype not in FLOATS:
            raise InteropError(f"{stored.file}: '{stored.name}' holds {stored.dtype}; weights are {FLOATS}")
    shapes = {name: tensors[name].shape for name in (*used, *others) if name not in unused}
    weights = to_ours(table, shapes, read, where)
    types = {name: stored.dtype for name, stored in used.items()}
    notes: Tree = {
        "dtypes": _widened(table, types),
        "names": {name: stored.name for name, stored in tensors.items() if name != stored.name},
        "copies": {name: original for name, original in copies.items() if name in tensors and name not in wanted},
        "headers": safetensors.headers(tensors),
    }
    return weights, lazily(read, unused), notes


def _widened(table: Conversions, types: Mapping[str, str]) -> dict[str, str]:
    """The own dtypes of tensors that become wider when they are joined with others."""
    narrow: dict[str, str] = {}
    for parts in table.values():
        joined = reduce(torch.promote_types, (DTYPES[types[part.name]] for part in parts))
        narrow |= {part.name: types[part.name] for part in parts if DTYPES[types[part.name]] != joined}
    return narrow


# ---- what else is in the folder


def _labels(tree: Tree, model: Transformer) -> tuple[str, ...] | None:
    """A classifier's label names, in order."""
    count, named = getattr(model.head, "labels", None), tree.get("id2label")
    if count is None:
        return None
    usual = tuple(f"LABEL_{number}" for number in range(count))  # which transformers does not write down
    if not isinstance(named, dict):
        return usual
    names = tuple(str(named.get(str(number), name)) for number, name in enumerate(usual))
    return names if len(set(names)) == count else usual


# ---- writing


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
    for name, make in family.fillers(bundle.model).items():
        weights.setdefault(name, _alike(make, next(iter(weights.values()))))
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
        own = bundle.notes.get("generation") or {"_from_model_config": True}
        files[GENERATION] = json_bytes(own | {key: tree[key] for key in TOKENS if key in tree})
    if not same and isinstance(bundle.model, Encoder) and isinstance(bundle.model.head, EmbeddingHead):
        trees = _sentence_transformers(bundle.model, bundle.model.head)
        files |= {name: json_bytes(tree) for name, tree in trees.items()}
    return files | (tokenizer_files(bundle) if bundle.tokenizer is not None else {})


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


def _alike(make: Callable[[], Tensor], other: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A tensor in the dtype of another one."""
    return lambda: make().to(other().dtype)


def _settings_out(bundle: ModelBundle) -> tuple[Family, Tree, Tree]:
    """The family that can hold the model, its config.json, and the notes of what was read, if it still is the same."""
    family = choose(bundle)
    original: Tree = bundle.notes.get("config", {}) if bundle.notes.get("family") == family.kind else {}
    assert isinstance(bundle.model, Transformer)
    if original and not differences(bundle.model, _read_again(family, original, bundle.model)):
        return family, original, bundle.notes
    config: Tree = {**original, **family.write(bundle.model)}
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

    def written_and_read(family: Family) -> Transformer:
        return _read_again(family, family.write(model), model)

    ways = {title: partial(written_and_read, family) for title, family in titled.items()}
    return titled[first_that_holds(model, ways, "Hugging Face family")]


def _read_again(family: Family, tree: Tree, model: Transformer) -> Transformer:
    """The model that a config.json would be read as beside the weights of `model`."""
    _, architecture = family_of(tree, CONFIG)
    return family.read(Settings(tree, CONFIG), architecture, family.known(model))
